"""The picture of an attribution graph: layers upwards, tokens across, as the front end and the SVG draw circuits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphpatch_notebook.experiments.circuits import circuit as circuits
from graphpatch_notebook.experiments.circuits.circuit import Edge, LayoutRow, PictureNode

if TYPE_CHECKING:
    from graphpatch_notebook.experiments.circuits.attribution_graph import AttributionGraph, GraphNode


def _row_of(node: GraphNode) -> LayoutRow:
    return ("", node.layer if node.kind in ("feature", "error") else None, node.kind)


_BOW, _BOW_MORE = 12.0, 7.0
"""How far from a column's nodes an edge passes, and how much further for each row more."""


def _line(
    source: PictureNode, target: PictureNode, tops: Mapping[LayoutRow, float], column: Sequence[PictureNode]
) -> tuple[str, float]:
    """Returns the line of an edge, and how far right it gets: around the nodes between, if both are in one column.

    Straight, it would be hidden behind these, and behind other edges.
    """
    reach = max(node.width for node in column) / 2
    passed = len({node.row for node in column if tops[source.row] > tops[node.row] > tops[target.row]})
    if not passed or abs(source.x - target.x) > reach:
        return circuits.curve([source, target], tops), 0.0
    out = reach + _BOW + _BOW_MORE * passed
    start, end = tops[source.row] - circuits.NODE_HEIGHT / 2, tops[target.row] + circuits.NODE_HEIGHT / 2
    third = (start - end) / 3
    aside = (source.x + target.x) / 2 + out * 4 / 3  # a curve gets to 3/4 of where its two middle points are
    line = f"M{source.x:.1f} {start:.1f}C{aside:.1f} {start - third:.1f} {aside:.1f} {end + third:.1f} "
    return f"{line}{target.x:.1f} {end:.1f}", (source.x + target.x) / 2 + out


def lay_out_graph(graph: AttributionGraph) -> dict[str, Any]:
    """Returns the picture of a graph, in pixels: its `CircuitPicture`; groups are one node."""
    graph = graph.merged() if graph.groups else graph
    order = {"embed": 0, "error": 1, "feature": 1, "logit": 2}
    drawn = [
        PictureNode(node.name, node.label, circuits.width_of(node.label), _row_of(node), node.position)
        for node in graph.nodes
    ]
    layers = {_row_of(node): (order[node.kind], node.layer, node.kind) for node in graph.nodes}
    rows = {row: [node for node in drawn if node.row == row] for row in sorted(layers, key=layers.__getitem__)}
    pairs = graph.pairs()
    for target, source in pairs:
        drawn[source].near.append(drawn[target])
        drawn[target].near.append(drawn[source])
    positions = sorted({node.position for node in graph.nodes})
    centers = circuits.placed([*rows.values()], positions)
    tops, height = circuits.tops_of(list(rows))
    tokens = [graph.tokens[at] if at < len(graph.tokens) else str(at) for at in positions]
    largest = max((abs(float(graph.weights[pair])) for pair in pairs), default=1.0)
    at = {position: [node for node in drawn if node.position == position] for position in positions}
    lines = [_line(drawn[source], drawn[target], tops, at[graph.nodes[source].position]) for target, source in pairs]
    edges = [
        Edge(str(graph.nodes[source]), str(graph.nodes[target]), float(graph.weights[target, source]))
        for target, source in pairs
    ]
    ends = [node.x + node.width / 2 for node in drawn] + [end for _, end in lines]
    return {
        "width": round(max(ends, default=0.0) + circuits.MARGIN, 1),
        "height": height + circuits.TOKENS,
        "bands": circuits.bands_of(tops),
        "nodes": [
            {**circuits.drawn_node(one, tops[one.row]), "is_error": node.kind == "error"}
            for one, node in zip(drawn, graph.nodes, strict=True)
        ],
        "is_by_influence": True,
        "edges": [
            circuits.drawn_edge(edge, [source, target], circuits.thickness(edge.score, largest), line)
            for (target, source), edge, (line, _) in zip(pairs, edges, lines, strict=True)
        ],
        "columns": [{"label": token, "x": x} for token, x in zip(tokens, centers, strict=True)],
        "links": [],
    }
