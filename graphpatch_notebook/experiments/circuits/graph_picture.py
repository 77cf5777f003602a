"""The picture of an attribution graph: layers upwards, tokens across, as the front end and the SVG draw circuits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphpatch_notebook.experiments.circuits import circuit as circuits
from graphpatch_notebook.experiments.circuits.circuit import LayoutRow, PictureNode

if TYPE_CHECKING:
    from graphpatch_notebook.experiments.circuits.attribution_graph import AttributionGraph, GraphNode


def _row_of(node: GraphNode) -> LayoutRow:
    return ("", node.layer if node.kind in ("feature", "error") else None, node.kind)


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
    return {
        "width": round(max((node.x + node.width / 2 for node in drawn), default=0.0) + circuits.MARGIN, 1),
        "height": height + circuits.TOKENS,
        "bands": circuits.bands_of(tops),
        "nodes": [
            {**circuits.drawn_node(one, tops[one.row]), "is_error": node.kind == "error"}
            for one, node in zip(drawn, graph.nodes, strict=True)
        ],
        "is_by_influence": True,
        "edges": [
            {
                "sender": str(graph.nodes[source]),
                "receiver": str(graph.nodes[target]),
                "score": float(graph.weights[target, source]),
                "position": None,
                "from": source,
                "to": [target],
                "thickness": circuits.thickness(float(graph.weights[target, source]), largest),
                "line": circuits.curve([drawn[source], drawn[target]], tops),
            }
            for target, source in pairs
        ],
        "columns": [{"label": token, "x": x} for token, x in zip(tokens, centers, strict=True)],
        "links": [],
    }
