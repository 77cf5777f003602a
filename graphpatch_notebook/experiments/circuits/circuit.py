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
from graphpatch_notebook.errors import ExperimentError

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
_MARGIN, _LABELS = 14.0, 66.0
_TOKENS, _BETWEEN = 24.0, 40.0
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
        ahead: The attention that is not causal, `layers[2].attn`: it reads keys and values at later positions, too. It
            is known for circuits of scores with positions.

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
    ahead: tuple[str, ...] = ()

    def __repr__(self) -> str:
        more = [f"... and {len(self.edges) - _LISTED} more"] if len(self.edges) > _LISTED else []
        return "\n".join([f"<Circuit of {self.summary}>", *map(str, self.strongest(_LISTED).edges), *more])

    @property
    def summary(self) -> str:
        """How many edges it has, of how many, and its faithfulness if it is known."""
        known = "" if self.faithfulness is None else f", faithfulness {self.faithfulness:.3g}"
        return f"{len(self.edges):,} of {self.candidates:,} edges{known}"

    def strongest(self, count: int | None) -> Circuit:
        """Returns the circuit with only the `edges` with the largest scores; `None` for all."""
        if count is None or len(self.edges) <= count:
            return self
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
        keys and values to the later positions at which it writes (to all if it is not causal). The width of an edge is
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
        text = _svg_of(self, edges)
        if file is not None:
            Path(file).write_text(text, encoding="utf8")
        return text

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
            given |= {name: tuple(map(str, given.get(name, ()))) for name in ("tokens", "ahead")}
            circuit = cls(edges, feeds, **given)
            places = [(edge.sender, edge.receiver, edge.position) for edge in edges]
            if unknown := {edge.receiver for edge in edges}.difference(feeds):
                raise ValueError(f"the receivers {sorted(unknown)} are not among its receivers")
            if len({edge.position is None for edge in edges}) > 1 or len(set(places)) < len(edges):
                raise ValueError("it has an edge twice, or some of its edges have positions, and others have none")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ExperimentError(f"the text is not a circuit: {error}") from None
        return circuit


def place_of(edge: Edge) -> int | None:
    """Returns the position of the senders that an edge leads to; `None` for any."""
    return edge.position if is_local(edge.receiver) else None


def is_local(receiver: str) -> bool:
    """Whether a receiver leads to senders at its own position only; later positions read keys and values, too."""
    return receiver.rpartition(".")[2] in ("q", "mlp")


# -- the picture -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PlacedNode:
    """A node of the picture, or (without a name) the room of an edge that passes through a row.

    Attributes:
        name: The name of the component.
        label: A short one.
        width: Its width.
        row: What determines its row.
        position: Its position; `None` for all.
        x: Its center, from the left.
        y: Its center, from the top.
        ports: Its inputs at which edges end, of `q`, `k` and `v`, and where.
        near: What its edges lead to in other rows.
    """

    name: str
    label: str
    width: float
    row: LayoutRow
    position: int | None = None
    x: float = 0.0
    y: float = 0.0
    ports: dict[str, float] = field(default_factory=dict)
    near: list[PlacedNode] = field(default_factory=list)


@dataclass(frozen=True)
class PlacedEdge:
    """An edge of the picture.

    Attributes:
        edge: The edge.
        sender: The node where it begins.
        receivers: The nodes where it ends: several, if heads share the keys or values that it ends at.
        width: The width of its line, which grows with the magnitude of its score.
        line: Its line, as the `d` of an SVG path.
    """

    edge: Edge
    sender: PlacedNode
    receivers: tuple[PlacedNode, ...]
    width: float
    line: str


@dataclass(frozen=True)
class CircuitPicture:
    """The picture of a circuit, in pixels.

    Attributes:
        width: The width.
        height: The height.
        nodes: The nodes, from the lowest row to the highest, each row from the left.
        edges: The edges, the strongest first.
        bands: The label of each layer, and the top and height of its area.
        columns: The text of each token, and its center from the left; empty without positions.
        links: From a component that reads for other positions to where it writes what it read, with the line.
    """

    width: float
    height: float
    nodes: tuple[PlacedNode, ...]
    edges: tuple[PlacedEdge, ...]
    bands: tuple[tuple[str, float, float], ...]
    columns: tuple[tuple[str, float], ...]
    links: tuple[tuple[PlacedNode, PlacedNode, str], ...]


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
    row = (parsed.stack, parsed.layers, kind)
    if isinstance(parsed.members, int):
        prefix = "cross " if kind == "cross_attn" else ""
        return row, f"{prefix}{parsed.axis} {parsed.layers}.{parsed.members}"
    title = {"attn": "attention", "cross_attn": "cross attention", "mlp": "MLP", "resid_pre": "stream"}.get(kind, kind)
    return row, f"{title} {parsed.layers}"


def lay_out(circuit: Circuit) -> CircuitPicture:
    """Returns the picture of a circuit."""
    edges = sorted(circuit.edges, key=lambda edge: -abs(edge.score))
    largest = max((abs(edge.score) for edge in edges), default=0.0) or 1.0
    widths = [round(_THINNEST + (_WIDEST - _THINNEST) * abs(edge.score) / largest, 2) for edge in edges]
    sending = {edge.sender for edge in edges}
    # Of heads that share keys, those that pass something on.
    ends = {name: [each for each in fed if each in sending] or fed[:1] or [name] for name, fed in circuit.feeds.items()}
    nodes = _nodes_of(circuit, ends)
    order = list(dict.fromkeys(node.row for node in nodes.values()))
    rows = {row: [node for node in nodes.values() if node.row == row] for row in order}
    paths: list[list[list[PlacedNode]]] = []
    for number, (edge, width) in enumerate(zip(edges, widths, strict=True)):
        paths.append([])
        for name in ends[edge.receiver]:
            first, last = nodes[edge.sender, edge.position], nodes[name, edge.position]
            # Only strong lines take room in the rows between; others pass behind the nodes there.
            between = order[order.index(first.row) + 1 : order.index(last.row)] if number < READABLE else ()
            rooms = [PlacedNode("", "", _EDGE_ROOM + width, row, edge.position) for row in between]
            for room in rooms:
                rows[room.row].append(room)
            paths[-1].append([first, *rooms, last])
            for one, other in pairwise(paths[-1][-1]):
                one.near.append(other)
                other.near.append(one)
            if (port := edge.receiver.rpartition(".")[2]) in _PORTS:
                last.ports[port] = 0.0
    positions = sorted({node.position for node in nodes.values()}, key=lambda position: position or 0)
    columns = _place(list(rows.values()), positions)
    height = 2 * _MARGIN + NODE_HEIGHT + _PITCH * max(len(order) - 1, 0)
    for number, row in enumerate(rows.values()):
        for node in row:
            node.y = height - _MARGIN - NODE_HEIGHT / 2 - _PITCH * number
            node.ports = {
                name: node.x + (_PORTS.index(name) - 1) * 0.3 * node.width for name in _PORTS if name in node.ports
            }
    drawn = [
        PlacedEdge(edge, own[0][0], tuple(path[-1] for path in own), width, "".join(_curve(edge, path) for path in own))
        for edge, width, own in zip(edges, widths, paths, strict=True)
    ]
    right = max((node.x + node.width / 2 for row in rows.values() for node in row), default=_MARGIN + _LABELS)
    tokens = {at: circuit.tokens[at] if at < len(circuit.tokens) else str(at) for at in positions if at is not None}
    return CircuitPicture(
        round(right + _MARGIN, 1),
        height + (_TOKENS if tokens else 0),
        tuple(node for row in rows.values() for node in sorted(row, key=lambda node: node.x) if node.name),
        tuple(drawn),
        tuple(_bands(rows)),
        tuple((tokens[at], x) for at, x in zip(positions, columns, strict=True) if at is not None),
        tuple(_links(circuit, drawn)) if tokens else (),
    )


def _nodes_of(circuit: Circuit, ends: Mapping[str, Sequence[str]]) -> dict[tuple[str, int | None], PlacedNode]:
    """Returns the nodes at the ends of edges, in the order of the model."""
    used = {(edge.sender, edge.position) for edge in circuit.edges}
    used |= {(name, edge.position) for edge in circuit.edges for name in ends[edge.receiver]}
    nodes = {}
    for name in circuit.nodes:
        row, label = row_and_label(name)
        width = max(_LEAST_WIDTH, _LETTER * len(label) + _PADDING)
        for position in sorted((at for one, at in used if one == name), key=lambda position: position or 0):
            nodes[name, position] = PlacedNode(name, label, width, row, position)
    return nodes


def _place(rows: list[list[PlacedNode]], positions: Sequence[int | None]) -> list[float]:
    """Sorts each row, puts its nodes side by side, and returns the center of each column."""
    for round_ in range(_ROUNDS):
        for row in rows[:: 1 if round_ % 2 == 0 else -1]:
            place = {id(node): index / max(len(one) - 1, 1) for one in rows for index, node in enumerate(one)}
            mean = {id(node): sum(place[id(other)] for other in node.near) / max(len(node.near), 1) for node in row}
            row.sort(key=lambda node, mean=mean: (node.position or 0, mean[id(node)]))  # type: ignore[misc]
    left, centers = _MARGIN + _LABELS, []
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


def _curve(edge: Edge, path: Sequence[PlacedNode]) -> str:
    """Returns a line that is vertical in each row, as the `d` of an SVG path."""
    first, *between, last = path
    half, end = NODE_HEIGHT / 2, last.ports.get(edge.receiver.rpartition(".")[2], last.x)
    points = [(first.x, first.y - half), *((node.x, node.y) for node in between), (end, last.y + half)]
    line = f"M{first.x:.1f} {first.y - half:.1f}"
    for (x, y), (to_x, to_y) in pairwise(points):
        middle = (y + to_y) / 2
        line += f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"
    return line


def _bands(rows: dict[LayoutRow, list[PlacedNode]]) -> Iterator[tuple[str, float, float]]:
    room = NODE_HEIGHT / 2 + _MARGIN
    for stack, layer in dict.fromkeys(row[:2] for row in rows):
        if layer is not None:
            places = [nodes[0].y for row, nodes in rows.items() if row[:2] == (stack, layer)]
            label = f"{stack} {layer}" if stack else f"layer {layer}"
            yield label, min(places) - room, max(places) - min(places) + 2 * room


def _links(circuit: Circuit, edges: Sequence[PlacedEdge]) -> Iterator[tuple[PlacedNode, PlacedNode, str]]:
    """Yields lines from where a component reads for other positions to where it writes what it read."""
    reading = dict.fromkeys(node for drawn in edges if place_of(drawn.edge) is None for node in drawn.receivers)
    writing = dict.fromkeys(drawn.sender for drawn in edges)
    for one in reading:
        same = [other for other in writing if other.name == one.name]
        later = [other for other in same if (other.position or 0) >= (one.position or 0)]
        is_ahead = one.name.removesuffix("_out").partition(".heads[")[0] in circuit.ahead
        for other in same if is_ahead else later or same:
            if other is not one:
                half = one.width / 2 if other.x > one.x else -one.width / 2
                start, stop, top = one.x + half, other.x - half, one.y - NODE_HEIGHT / 2 - 14
                bend = (stop - start) / 4
                points = f"{start + bend:.1f} {top:.1f} {stop - bend:.1f} {top:.1f} {stop:.1f} {one.y:.1f}"
                yield one, other, f"M{start:.1f} {one.y:.1f}C{points}"


# -- SVG ---------------------------------------------------------------------------------------------------------------


def _svg_of(circuit: Circuit, most: int | None = None) -> str:
    """Returns a picture of a circuit, with at most `most` edges, as SVG with a white background."""
    shown = circuit.strongest(most)
    picture = lay_out(shown)
    width, height = max(picture.width, _LEAST_TOTAL), picture.height + _LEGEND
    title = f"Circuit of {len(picture.edges)} edges between {len(picture.nodes)} components"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{title}" '
        """font-family="Helvetica, Arial, 'Liberation Sans', sans-serif" font-size="12">""",
        f"<title>{title}</title>",
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
    ]
    for label, y, tall in picture.bands:
        parts.append(f'<rect x="0" y="{y:g}" width="{width:g}" height="{tall:g}" fill="#f4f5f7"/>')
        parts.append(_text(10, y + tall / 2 + 4, label, _GREY))
    for label, x in picture.columns:
        parts.append(_text(x, picture.height - 10, label, 'class="token" text-anchor="middle" fill="#57606a"'))
    parts += [f'<path class="link" d="{line}" {_LINK}/>' for _, _, line in picture.links]
    for drawn in reversed(picture.edges):  # the strongest on top
        name = escape(str(drawn.edge).replace("->", "→"))
        style = f'class="edge" fill="none" {_stroke(drawn.edge.score, drawn.width)}'
        parts.append(f'<path d="{drawn.line}" {style}><title>{name}</title></path>')
    parts += [_node(node) for node in picture.nodes]
    if picture.edges:
        score, y = picture.edges[0].edge.score, picture.height + 18.0
        parts.append(f'<path d="M14 {y:g}h34" {_stroke(score, _WIDEST)}/>')
        text = f"score {score:+.3g}; dashed if negative" + (
            "; dotted: attention across positions" if picture.links else ""
        )
        parts.append(_text(56, y + 4, text, 'fill="#24292f"'))
        parts.append(_text(14, y + 30, summary_of(circuit, len(shown.edges)), _GREY))
    return "\n".join([*parts, "</svg>"])


def _node(node: PlacedNode) -> str:
    name = node.name if node.position is None else f"{node.name} at {node.position}"
    box = f'x="{node.x - node.width / 2:.1f}" y="{node.y - NODE_HEIGHT / 2:.1f}" width="{node.width:.1f}"'
    middle = 'text-anchor="middle"'
    label = _text(node.x, node.y + (0 if node.ports else 4), node.label, middle)
    ports = (_text(x, node.y + 14, port, f'{middle} font-size="10" fill="#57606a"') for port, x in node.ports.items())
    return (
        f'<g class="node"><title>{escape(name)}</title><rect {box} height="{NODE_HEIGHT:g}" rx="6" fill="#ffffff" '
        f'stroke="#57606a"/>{label}{"".join(ports)}</g>'
    )


def _stroke(score: float, width: float) -> str:
    color = f'stroke="{_NEGATIVE}" stroke-dasharray="8 4"' if score < 0 else f'stroke="{_POSITIVE}"'
    return f'{color} stroke-width="{width:g}" stroke-opacity="0.8"'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def summary_of(circuit: Circuit, shown: int) -> str:
    """Returns a description of a circuit in one line, and how many edges are shown if these are not all."""
    return circuit.summary + (f", the strongest {shown} are shown" if shown < len(circuit.edges) else "")
