"""A circuit as data and as a picture: some edges between the components of a model, with their scores.

`attribute_edges` describes the senders and receivers at the ends of edges. `Circuit.feeds` connects the two: which
senders are computed from a receiver.

An edge may belong to one position in the sequence: it passes on what the sender writes there. A sender at a position is
computed from queries and inputs of MLPs at the same position, and from other receivers (keys, values, mixers) at any.

In the picture, which the front end draws too, layers go upwards, with a row for each kind of component; tokens or
components go across. A node is a component, or a component at a position. Within a row, nodes are sorted by the mean
place of their neighbors. An edge over several rows takes room in each, as a node does, so that no other node hides it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias
from xml.sax.saxutils import escape

from graphpatch_notebook.components.names import parse_name
from graphpatch_notebook.errors import ExperimentError, whole_file

_FORMAT = "graphpatch circuit 1"
_LISTED = 10
READABLE = 60
"""The largest number of edges in a picture at first, the strongest ones: more are hard to distinguish."""
NODE_HEIGHT = 36.0
_PORTS = ("q", "k", "v")
_LETTER = 6.9
"""About how wide a character is, in the font and size of labels."""
_PADDING, _LEAST_WIDTH = 18.0, 62.0
_PITCH = 92.0
"""From a row to the next."""
_GAP, _EDGE_ROOM = 16.0, 10.0
MARGIN, _LABELS = 14.0, 66.0
TOKENS, _BETWEEN = 24.0, 40.0
"""For the tokens, below, and from a column to the next."""
_ROUNDS = 8
_THINNEST, _WIDEST = 1.0, 8.0
_POSITIVE, _NEGATIVE = "#b04339", "#3669be"
"""The colors of edges that raise and lower the metric: both ends of the diverging colormap of heatmaps."""
_GREY = 'fill="#57606a"'
_LINK = 'fill="none" stroke="#57606a" stroke-dasharray="2 4"'
_LEGEND, _LEAST_TOTAL = 62.0, 400.0

LayoutRow: TypeAlias = "tuple[str, int | None, str]"
"""The stack, the layer and the kind of component that a row has."""


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge of a circuit.

    Attributes:
        sender: What is passed on: the name of a component's output.
        receiver: What reads it: the name of a component's input.
        score: The effect of the edge on the metric, as estimated by the method of the scores.
        position: The position of what is passed on; `None` for all of them.

    Example:
        >>> Edge("@embed", "layers[0].mlp", 2.0).receiver
        'layers[0].mlp'
    """

    sender: str
    receiver: str
    score: float
    position: int | None = None

    def __str__(self) -> str:
        at = "" if self.position is None else f" at {self.position}"
        return f"{self.sender} -> {self.receiver}{at}: {self.score:+.4g}"


@dataclass(frozen=True, repr=False)
class Circuit:
    """Some edges between the components of a model, as `circuit` returns them.

    Attributes:
        edges: The edges, largest magnitude of the score first.
        feeds: For each receiver of the model, the senders that are computed from it; empty for `@logits`.
        candidates: How many edges the model has.
        clean: The metric of the run on the clean inputs.
        corrupted: The metric of the run on the corrupted inputs.
        method: How the scores were computed.
        metric: The name of the metric.
        faithfulness: The share of `clean - corrupted` that remains if only these edges pass on what differs between
            the two runs; `None` if it was not measured. Pictures show it: `dataclasses.replace(circuit,
            faithfulness=0.9)`.
        tokens: The text of each position, for pictures of edges with positions; numbers if it is empty.
        missing: Why there are no edges to, or from, whole components: they read what all others write.

    Example:
        >>> circuit = Circuit(
        ...     edges=(Edge("@embed", "layers[0].mlp", 2.0), Edge("layers[0].mlp_out", "@logits", 1.5)),
        ...     feeds={"layers[0].mlp": ("layers[0].mlp_out",), "@logits": ()},
        ...     candidates=3, clean=2.0, corrupted=0.0,
        ... )
        >>> circuit.nodes
        ('@embed', 'layers[0].mlp_out', '@logits')
        >>> circuit
        <Circuit of 2 of 3 edges>
        @embed -> layers[0].mlp: +2
        layers[0].mlp_out -> @logits: +1.5
        >>> Circuit.from_json(circuit.to_json()) == circuit
        True
    """

    edges: tuple[Edge, ...]
    feeds: Mapping[str, tuple[str, ...]]
    candidates: int
    clean: float
    corrupted: float
    method: str = ""
    metric: str = ""
    faithfulness: float | None = None
    tokens: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        more = [f"... and {len(self.edges) - _LISTED} more"] if len(self.edges) > _LISTED else []
        return "\n".join([f"<Circuit of {self.summary}>", *map(str, self.strongest(_LISTED).edges), *more])

    @property
    def summary(self) -> str:
        """How many edges it has, of how many, and its faithfulness if it is known."""
        known = "" if self.faithfulness is None else f", faithfulness {self.faithfulness:.3g}"
        return f"{len(self.edges):,} of {self.candidates:,} edges{known}"

    @property
    def edge_count(self) -> int:
        """The number of edges."""
        return len(self.edges)

    def strongest(self, count: int | None) -> Circuit:
        """Returns the circuit with only the `edges` with the largest scores; `None` for all."""
        return replace(self, edges=tuple(sorted(self.edges, key=lambda edge: -abs(edge.score))[:count]))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The components at both ends of edges, in the order of the model: senders by their names, and `@logits`."""
        used = {edge.sender for edge in self.edges}
        for edge in self.edges:
            used |= set(self.targets(edge.receiver))
        order = [sender for senders in self.feeds.values() for sender in senders]
        starts = [edge.sender for edge in self.edges if edge.sender not in order]
        ends = [receiver for receiver, senders in self.feeds.items() if not senders]
        return tuple(name for name in dict.fromkeys((*starts, *order, *ends)) if name in used)

    def targets(self, receiver: str) -> tuple[str, ...]:
        """Returns the nodes that a receiver belongs to: the senders that are computed from it, or else itself."""
        return self.feeds[receiver] or (receiver,)

    def picture(self) -> dict[str, Any]:
        """Returns the picture, as the front end draws it."""
        return lay_out(self)

    def without_dead_ends(self) -> Circuit:
        """Returns the circuit without edges that change nothing.

        An edge is kept if it is on a way from a sender that no receiver feeds (the embeddings) to a receiver that
        feeds no sender (the logits). All are kept if there are `missing` components, as any edge may lead into one.

        Example:
            >>> feeds = {"layers[0].mlp": ("layers[0].mlp_out",), "@logits": ()}
            >>> edges = (Edge("layers[0].mlp_out", "@logits", 1.5),)
            >>> Circuit(edges, feeds, candidates=3, clean=2.0, corrupted=0.0).without_dead_ends().edges
            ()
        """
        if self.missing:
            return self
        fed = {sender for senders in self.feeds.values() for sender in senders}
        reached = {(sender, place_of(edge)) for edge in self.edges for sender in self.feeds[edge.receiver]}
        used = {(edge.sender, at) for edge in self.edges for at in (edge.position, None)}

        def is_on_a_way(edge: Edge) -> bool:
            is_fed = {(edge.sender, edge.position), (edge.sender, None)} & reached or edge.sender not in fed
            feeds = self.feeds[edge.receiver]
            return bool(is_fed) and (not feeds or any((sender, place_of(edge)) in used for sender in feeds))

        kept = tuple(filter(is_on_a_way, self.edges))
        return self if len(kept) == len(self.edges) else replace(self, edges=kept).without_dead_ends()

    def to_json(self) -> str:
        """Returns the circuit as JSON."""
        document = {
            "format": _FORMAT,
            **{each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("edges", "feeds")},
            "missing": dict(self.missing),
            "edges": [
                [edge.sender, edge.receiver, edge.score, *(() if edge.position is None else (edge.position,))]
                for edge in self.edges
            ],
            "feeds": dict(self.feeds),
        }
        return json.dumps(document, indent=1)

    def to_python(self, graph: str = "pg", inputs: str = "clean", corrupted: str = "corrupted") -> str:
        """Returns Python code that makes the circuit, and runs the model with only its edges.

        The arguments are the variables of the `PatchableGraph`, and of the clean and the corrupted inputs.
        """
        return f'''\
from graphpatch_notebook.experiments import Circuit, circuit_patches

circuit = Circuit.from_json(r"""
{self.to_json()}
""")
with {graph}.patch(circuit_patches({graph}, circuit, {corrupted})):
    output = {graph}({inputs})
'''

    def to_svg(self, file: str | os.PathLike[str] | None = None, *, edges: int | None = None) -> str:
        """Returns a picture of the circuit for papers, and writes it to a file if `file` is given.

        Layers go upwards; if edges have positions, tokens go across, with dotted lines from where a component reads
        keys and values to the later positions at which it writes (to all if there are none). The width of an edge is
        proportional to the magnitude of its score; negative scores are blue and dashed. Fonts are not embedded.

        Args:
            file: The name of the file, such as `"circuit.svg"`.
            edges: Draws only this many of the strongest edges.

        Returns:
            The SVG as text.

        Example:
            >>> feeds = {"layers[0].mlp": ("layers[0].mlp_out",), "@logits": ()}
            >>> edges = (Edge("@embed", "layers[0].mlp", 2.0), Edge("layers[0].mlp_out", "@logits", 1.5))
            >>> Circuit(edges, feeds, candidates=3, clean=2.0, corrupted=0.0).to_svg()[:4]
            '<svg'
        """
        return written_svg(self, file, edges)

    def _repr_svg_(self) -> str:
        return self.to_svg(edges=READABLE)

    @classmethod
    def from_json(cls, text: str) -> Circuit:
        """Returns the circuit that `to_json` wrote.

        Raises:
            ExperimentError: The text is not a circuit.
        """
        try:
            given: dict[str, Any] = json.loads(text)
            if given.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT!r}")
            edges = tuple(Edge(str(s), str(r), float(score), *map(int, at)) for s, r, score, *at in given.pop("edges"))
            feeds = {str(name): tuple(map(str, senders)) for name, senders in given.pop("feeds").items()}
            if unknown := {edge.receiver for edge in edges}.difference(feeds):
                raise ValueError(f"the receivers {sorted(unknown)} are not among its receivers")
            given.pop("ahead", None)  # of version 0.1
            return cls(edges, feeds, **given | {"tokens": tuple(map(str, given.get("tokens", ())))})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ExperimentError(f"the text is not a circuit: {error}") from None


def place_of(edge: Edge) -> int | None:
    """Returns the position of the senders that an edge leads to.

    `None` for any: later positions read what keys and values are computed from, too.
    """
    return edge.position if edge.receiver.rpartition(".")[2] in ("q", "mlp") else None


# -- the picture -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PictureNode:
    """A node of the picture, or (without a name) the room of an edge that passes through a row.

    Attributes:
        x: Its center, from the left.
        near: What its edges lead to in other rows.
        ports: Its inputs at which edges end, of `q`, `k` and `v`.
    """

    name: str
    label: str
    width: float
    row: LayoutRow
    position: int | None
    x: float = 0.0
    near: list[PictureNode] = field(default_factory=list)
    ports: set[str] = field(default_factory=set)

    def port(self, name: str) -> float:
        """Returns where an input is, from the left."""
        return self.x + ((_PORTS.index(name) - 1) * 0.3 * self.width if name in self.ports else 0.0)


def row_and_label(name: str) -> tuple[LayoutRow, str]:
    """Returns the row of a node, and a short name for it.

    Example:
        >>> row_and_label("layers[2].attn.heads[3].z")
        (('', 2, 'attn'), 'head 2.3')
        >>> row_and_label("layers[2].mlp_out")[1], row_and_label("@embed")[1]
        ('MLP 2', 'embed')
    """
    parsed = parse_name(name)
    kind = parsed.words[0].removeprefix("@").removesuffix("_out")
    if not isinstance(parsed.layers, int):
        return (parsed.stack, None, kind), kind.replace("_", " ")
    title = {"attn": "attention", "cross_attn": "cross attention", "mlp": "MLP", "resid_pre": "stream"}.get(kind, kind)
    if isinstance(parsed.members, int):
        title = f"cross {parsed.axis}" if kind == "cross_attn" else str(parsed.axis)
    member = f".{parsed.members}" if isinstance(parsed.members, int) else ""
    return (parsed.stack, parsed.layers, kind), f"{title} {parsed.layers}{member}"


def lay_out(circuit: Circuit) -> dict[str, Any]:
    """Returns the picture of a circuit, in pixels, as the front end and the SVG draw it: its `CircuitPicture`.

    The edges are in it with the strongest first, the nodes from the lowest row to the highest, each row from the left.
    """
    edges = sorted(circuit.edges, key=lambda edge: -abs(edge.score))
    largest = max((abs(edge.score) for edge in edges), default=0.0) or 1.0
    widths = [thickness(edge.score, largest) for edge in edges]
    sending = {edge.sender for edge in edges}
    # Of heads that share keys, those that pass something on.
    ends = {name: [each for each in fed if each in sending] or fed[:1] or [name] for name, fed in circuit.feeds.items()}
    nodes = _nodes_of(circuit, ends)
    order = list(dict.fromkeys(node.row for node in nodes.values()))
    rows = {row: [node for node in nodes.values() if node.row == row] for row in order}
    paths = [
        _routes(edge, ends[edge.receiver], nodes, rows, width if number < READABLE else None)
        for number, (edge, width) in enumerate(zip(edges, widths, strict=True))
    ]
    positions = sorted({node.position for node in nodes.values()}, key=lambda position: position or 0)
    centers = placed(list(rows.values()), positions)
    tops, height = tops_of(order)
    drawn = [node for row in rows.values() for node in sorted(row, key=lambda node: node.x) if node.name]
    number_of = {node: number for number, node in enumerate(drawn)}
    right = max((node.x + node.width / 2 for row in rows.values() for node in row), default=MARGIN + _LABELS)
    tokens = {at: circuit.tokens[at] if at < len(circuit.tokens) else str(at) for at in positions if at is not None}
    routed = list(zip(edges, paths, strict=True))
    links = _links(routed, tops) if tokens else ()
    return {
        "width": round(right + MARGIN, 1),
        "height": height + (TOKENS if tokens else 0),
        "bands": bands_of(tops),
        "nodes": [drawn_node(node, tops[node.row]) for node in drawn],
        "edges": [
            drawn_edge(
                edge,
                [number_of[own[0][0]], *(number_of[path[-1]] for path in own)],
                width,
                "".join(curve(path, tops, _port(edge)) for path in own),
            )
            for (edge, own), width in zip(routed, widths, strict=True)
        ],
        "columns": [{"label": tokens[at], "x": x} for at, x in zip(positions, centers, strict=True) if at in tokens],
        "links": [{"ends": [number_of[one], number_of[other]], "line": line} for one, other, line in links],
    }


def thickness(score: float, largest: float) -> float:
    """Returns the width of the line of an edge."""
    return round(_THINNEST + (_WIDEST - _THINNEST) * abs(score) / largest, 2)


def width_of(label: str) -> float:
    """Returns the width of a node."""
    return max(_LEAST_WIDTH, _LETTER * len(label) + _PADDING)


def tops_of(rows: Sequence[LayoutRow]) -> tuple[dict[LayoutRow, float], float]:
    """Returns the middle of each row, the lowest row first, and the height of all."""
    height = 2 * MARGIN + NODE_HEIGHT + _PITCH * max(len(rows) - 1, 0)
    return {row: height - MARGIN - NODE_HEIGHT / 2 - _PITCH * number for number, row in enumerate(rows)}, height


def _routes(
    edge: Edge,
    ends: Sequence[str],
    nodes: Mapping[tuple[str, int | None], PictureNode],
    rows: Mapping[LayoutRow, list[PictureNode]],
    width: float | None,
) -> list[list[PictureNode]]:
    """Returns the nodes that an edge passes, to each of its ends; adds its rooms to the rows between.

    Only strong lines take room, of their `width`; others pass behind the nodes there.
    """
    order, found = list(rows), []
    for name in ends:
        first, last = nodes[edge.sender, edge.position], nodes[name, edge.position]
        between = () if width is None else order[order.index(first.row) + 1 : order.index(last.row)]
        rooms = [PictureNode("", "", _EDGE_ROOM + (width or 0.0), row, edge.position) for row in between]
        for room in rooms:
            rows[room.row].append(room)
        found.append([first, *rooms, last])
        for one, other in pairwise(found[-1]):
            one.near.append(other)
            other.near.append(one)
        last.ports |= {_port(edge)} & {*_PORTS}
    return found


def drawn_node(node: PictureNode, y: float) -> dict[str, Any]:
    return {
        "name": node.name,
        "label": node.label,
        "x": node.x,
        "y": y,
        "width": node.width,
        "height": NODE_HEIGHT,
        "ports": [[port, round(node.port(port), 1)] for port in _PORTS if port in node.ports],
        "position": node.position,
    }


def drawn_edge(edge: Edge, ends: Sequence[int], width: float, line: str) -> dict[str, Any]:
    """Returns an edge as it is drawn, from the first of the nodes with these numbers to the others."""
    return {
        "sender": edge.sender,
        "receiver": edge.receiver,
        "score": edge.score,
        "position": edge.position,
        "from": ends[0],
        "to": [*ends[1:]],
        "thickness": width,
        "line": line,
    }


def _port(edge: Edge) -> str:
    return edge.receiver.rpartition(".")[2]


def _nodes_of(circuit: Circuit, ends: Mapping[str, Sequence[str]]) -> dict[tuple[str, int | None], PictureNode]:
    """Returns the nodes at the ends of edges, in the order of the model."""
    used = {(edge.sender, edge.position) for edge in circuit.edges}
    used |= {(name, edge.position) for edge in circuit.edges for name in ends[edge.receiver]}
    nodes = {}
    for name in circuit.nodes:
        row, label = row_and_label(name)
        width = width_of(label)
        for position in sorted((at for one, at in used if one == name), key=lambda position: position or 0):
            nodes[name, position] = PictureNode(name, label, width, row, position)
    return nodes


def placed(rows: list[list[PictureNode]], positions: Sequence[int | None]) -> list[float]:
    """Sorts each row, puts its nodes side by side, and returns the center of each column."""
    for round_ in range(_ROUNDS):
        for row in rows[:: 1 if round_ % 2 == 0 else -1]:
            place = {id(node): index / max(len(one) - 1, 1) for one in rows for index, node in enumerate(one)}
            mean = {id(node): sum(place[id(other)] for other in node.near) / max(len(node.near), 1) for node in row}
            row.sort(key=lambda node, mean=mean: (node.position or 0, mean[id(node)]))  # type: ignore[misc]
    left, centers = MARGIN + _LABELS, []
    for position in positions:
        parts = [[node for node in row if node.position == position] for row in rows]
        wide = max(sum(node.width + _GAP for node in part) for part in parts) - _GAP
        centers.append(round(left + wide / 2, 1))
        for part in parts:
            x = left + (wide - sum(node.width + _GAP for node in part) + _GAP) / 2
            for node in part:
                node.x = round(x + node.width / 2, 1)
                x += node.width + _GAP
        left += wide + _BETWEEN
    return centers


def curve(path: Sequence[PictureNode], tops: Mapping[LayoutRow, float], port: str = "") -> str:
    """Returns a line that is vertical in each row, as the `d` of an SVG path."""
    first, *between, last = path
    ends = (first.x, tops[first.row] - NODE_HEIGHT / 2), (last.port(port), tops[last.row] + NODE_HEIGHT / 2)
    line = f"M{ends[0][0]:.1f} {ends[0][1]:.1f}"
    for (x, y), (to_x, to_y) in pairwise([ends[0], *((node.x, tops[node.row]) for node in between), ends[1]]):
        middle = (y + to_y) / 2
        line += f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"
    return line


def bands_of(tops: Mapping[LayoutRow, float]) -> list[dict[str, Any]]:
    """Returns the label of each layer, and the top and height of its area."""
    room, layers = NODE_HEIGHT / 2 + MARGIN, dict[str, list[float]]()
    for (stack, layer, _), y in tops.items():
        if layer is not None:
            layers.setdefault(f"{stack} {layer}" if stack else f"layer {layer}", []).append(y)
    return [
        {"label": label, "y": min(ys) - room, "height": max(ys) - min(ys) + 2 * room} for label, ys in layers.items()
    ]


def _links(
    edges: Sequence[tuple[Edge, list[list[PictureNode]]]], tops: Mapping[LayoutRow, float]
) -> Iterator[tuple[PictureNode, PictureNode, str]]:
    """Yields lines from where a component reads for other positions to where it writes what it read."""
    reading = dict.fromkeys(path[-1] for edge, own in edges if place_of(edge) is None for path in own)
    writing = dict.fromkeys(own[0][0] for _, own in edges)
    for one in reading:
        others = [other for other in writing if other.name == one.name and other is not one]
        for other in [each for each in others if (each.position or 0) > (one.position or 0)] or others:
            half = one.width / 2 if other.x > one.x else -one.width / 2
            start, stop, y = one.x + half, other.x - half, tops[one.row]
            bend, top = (stop - start) / 4, y - NODE_HEIGHT / 2 - 14
            points = f"{start + bend:.1f} {top:.1f} {stop - bend:.1f} {top:.1f} {stop:.1f} {y:.1f}"
            yield one, other, f"M{start:.1f} {y:.1f}C{points}"


# -- SVG ---------------------------------------------------------------------------------------------------------------


def written_svg(graph: Any, file: str | os.PathLike[str] | None, edges: int | None) -> str:
    """Returns the SVG of the strongest edges of a circuit, or attribution graph, and writes it to a file."""
    picture = graph.strongest(edges).picture()
    text = svg_of(picture, summary_of(graph, len(picture["edges"])))
    if file is not None:
        with whole_file(Path(file)) as written:
            written.write_text(text, encoding="utf8")
    return text


def svg_of(picture: Mapping[str, Any], summary: str) -> str:
    """Returns a picture as SVG with a white background."""
    width, height, edges = max(picture["width"], _LEAST_TOTAL), picture["height"] + _LEGEND, picture["edges"]
    title = f"Circuit of {len(edges)} edges between {len(picture['nodes'])} components"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{title}" '
        """font-family="Helvetica, Arial, 'Liberation Sans', sans-serif" font-size="12">""",
        f"<title>{title}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
    ]
    for band in picture["bands"]:
        parts.append(f'<rect x="0" y="{band["y"]:g}" width="{width:g}" height="{band["height"]:g}" fill="#f4f5f7"/>')
        parts.append(_text(10, band["y"] + band["height"] / 2 + 4, band["label"], _GREY))
    for column in picture["columns"]:
        style = 'class="token" text-anchor="middle" fill="#57606a"'
        parts.append(_text(column["x"], picture["height"] - 10, column["label"], style))
    parts += [f'<path class="link" d="{link["line"]}" {_LINK}/>' for link in picture["links"]]
    for edge in edges[::-1]:  # the strongest on top
        at = "" if edge["position"] is None else f" at {edge['position']}"
        name = escape(f"{edge['sender']} → {edge['receiver']}{at}: {edge['score']:+.4g}")
        style = _stroke(edge["score"], edge["thickness"])
        parts.append(f'<path d="{edge["line"]}" class="edge" fill="none" {style}><title>{name}</title></path>')
    parts += map(_node, picture["nodes"])
    if edges:
        score, y = max((edge["score"] for edge in edges), key=abs), picture["height"] + 18.0
        dotted = "; dotted: attention across positions" if picture["links"] else ""
        parts.append(f'<path d="M14 {y:g}h34" {_stroke(score, _WIDEST)}/>')
        parts.append(_text(56, y + 4, f"score {score:+.3g}; dashed if negative{dotted}", 'fill="#24292f"'))
        parts.append(_text(14, y + 30, summary, _GREY))
    return "\n".join([*parts, "</svg>"])


def _node(node: Mapping[str, Any]) -> str:
    x, y, width, middle = node["x"], node["y"], node["width"], 'text-anchor="middle"'
    name = escape(node["name"] + ("" if node["position"] is None else f" at {node['position']}"))
    label = _text(x, y + (0 if node["ports"] else 4), node["label"], middle)
    fill = "#d8dce1" if node.get("is_error") else "#ffffff"
    ports = (_text(at, y + 14, port, f'{middle} font-size="10" fill="#57606a"') for port, at in node["ports"])
    return (
        f'<g class="node"><title>{name}</title><rect x="{x - width / 2:.1f}" y="{y - NODE_HEIGHT / 2:.1f}" '
        f'width="{width:.1f}" height="{NODE_HEIGHT:g}" rx="6" fill="{fill}" stroke="#57606a"/>{label}'
        f"{''.join(ports)}</g>"
    )


def _stroke(score: float, width: float) -> str:
    color = f'stroke="{_NEGATIVE}" stroke-dasharray="8 4"' if score < 0 else f'stroke="{_POSITIVE}"'
    return f'{color} stroke-width="{width:g}" stroke-opacity="0.8"'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def summary_of(circuit: Any, shown: int) -> str:
    """Returns a description of a circuit in one line, and how many edges are shown if these are not all."""
    if getattr(circuit, "groups", None):
        circuit = circuit.merged()  # as it is drawn
    return str(circuit.summary) + (f", the strongest {shown} are shown" if shown < circuit.edge_count else "")
