"""The picture of a circuit: where its nodes and edges go, and the SVG. The front end draws the same picture.

Layers go upwards, with a row for each kind of component; tokens or components go across. A node is a component, or a
component at a position. Within a row, nodes are sorted by the mean place of their neighbors. An edge over several rows
takes room in each, as a node does, so that no other node hides it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias
from xml.sax.saxutils import escape

from graphpatch_notebook.components.names import parse_name
from graphpatch_notebook.experiments.circuits.circuit import READABLE, Circuit, Edge, place_of

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

_Routes: TypeAlias = "list[list[PlacedNode]]"
"""The lines of an edge: what each passes through, with both ends."""
LayoutRow: TypeAlias = "tuple[str, int | None, str]"
"""The stack, the layer and the kind of component that a row has."""


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
    nodes = _nodes_of(circuit)
    order = list(dict.fromkeys(node.row for node in nodes.values()))
    rows = {row: [node for node in nodes.values() if node.row == row] for row in order}
    routes: list[_Routes] = []
    for number, (edge, width) in enumerate(zip(edges, widths, strict=True)):
        routes.append([])
        for name in _readers(circuit, edge.receiver):
            first, last = nodes[edge.sender, edge.position], nodes[name, edge.position]
            # Only strong lines take room in the rows between; others pass behind the nodes there.
            between = order[order.index(first.row) + 1 : order.index(last.row)] if number < READABLE else ()
            path = [first, *(PlacedNode("", "", _EDGE_ROOM + width, row, edge.position) for row in between), last]
            routes[-1].append(path)
            for node in path[1:-1]:
                rows[node.row].append(node)
            for one, other in pairwise(path):
                one.near.append(other)
                other.near.append(one)
            if (port := _port(edge)) is not None:
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
    lines = _lines(edges, widths, routes)
    right = max((node.x + node.width / 2 for row in rows.values() for node in row), default=_MARGIN + _LABELS)
    has_tokens = positions not in ([], [None])
    tokens = {at: circuit.tokens[at] if at < len(circuit.tokens) else str(at) for at in positions if at is not None}
    return CircuitPicture(
        round(right + _MARGIN, 1),
        height + (_TOKENS if has_tokens else 0),
        tuple(node for row in rows.values() for node in sorted(row, key=lambda node: node.x) if node.name),
        tuple(lines),
        tuple(_bands(rows)),
        tuple((tokens[at], x) for at, x in zip(positions, columns, strict=True) if at is not None),
        tuple(_links(circuit, nodes.values() if has_tokens else (), lines)),
    )


def _nodes_of(circuit: Circuit) -> dict[tuple[str, int | None], PlacedNode]:
    """Returns the nodes at the ends of edges, in the order of the model."""
    used = {(edge.sender, edge.position) for edge in circuit.edges}
    for edge in circuit.edges:
        used |= {(name, edge.position) for name in _readers(circuit, edge.receiver)}
    nodes = {}
    for name in circuit.nodes:
        row, label = row_and_label(name)
        width = max(_LEAST_WIDTH, _LETTER * len(label) + _PADDING)
        for position in sorted((at for one, at in used if one == name), key=lambda position: position or 0):
            nodes[name, position] = PlacedNode(name, label, width, row, position)
    return nodes


def _readers(circuit: Circuit, receiver: str) -> Sequence[str]:
    """Returns the nodes that a receiver belongs to: of heads that share keys, those that pass something on."""
    sending = {edge.sender for edge in circuit.edges}
    names = circuit.targets(receiver)
    return [name for name in names if name in sending] or names[:1]


def _port(edge: Edge) -> str | None:
    word = edge.receiver.rpartition(".")[2]
    return word if word in _PORTS else None


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


def _lines(
    edges: Sequence[Edge], widths: Sequence[float], routes: Sequence[list[list[PlacedNode]]]
) -> list[PlacedEdge]:
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    paths = [(path, _port(edge)) for edge, own in zip(edges, routes, strict=True) for path in own]
    for node in {id(path[at]): path[at] for path, _ in paths for at in (0, -1)}.values():
        _fan(starts, node, [path for path, _ in paths if path[0] is node], 1)
        _fan(ends, node, [path for path, port in paths if path[-1] is node and port is None], -2)
    found = []
    for edge, width, own in zip(edges, widths, routes, strict=True):
        line = ""
        for path in own:
            first, *between, last = path
            end = ends.get(id(path), 0.0) if (port := _port(edge)) is None else last.ports[port]
            points = [(starts[id(path)], first.y - NODE_HEIGHT / 2), *((node.x, node.y) for node in between)]
            line += _curve([*points, (end, last.y + NODE_HEIGHT / 2)])
        found.append(PlacedEdge(edge, own[0][0], tuple(path[-1] for path in own), width, line))
    return found


def _fan(ends: dict[int, float], node: PlacedNode, paths: list[list[PlacedNode]], next_: int) -> None:
    """Puts the ends of lines at a node side by side, in the order of what they lead to."""
    paths.sort(key=lambda path: path[next_].x)
    apart = min(_WIDEST, 0.72 * node.width / max(len(paths), 1))
    for number, path in enumerate(paths):
        ends[id(path)] = node.x + (number - (len(paths) - 1) / 2) * apart


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Returns a line that is vertical at each point, as the `d` of an SVG path."""
    parts = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x, y), (to_x, to_y) in pairwise(points):
        middle = (y + to_y) / 2
        parts.append(f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}")
    return "".join(parts)


def _bands(rows: dict[LayoutRow, list[PlacedNode]]) -> Iterator[tuple[str, float, float]]:
    room = NODE_HEIGHT / 2 + _MARGIN
    for stack, layer in dict.fromkeys(row[:2] for row in rows):
        if layer is not None:
            places = [nodes[0].y for row, nodes in rows.items() if row[:2] == (stack, layer)]
            label = f"{stack} {layer}" if stack else f"layer {layer}"
            yield label, min(places) - room, max(places) - min(places) + 2 * room


def _links(
    circuit: Circuit, nodes: Iterable[PlacedNode], lines: Sequence[PlacedEdge]
) -> Iterator[tuple[PlacedNode, PlacedNode, str]]:
    """Yields lines from where a component reads for other positions to where it writes what it read."""
    reads = {id(node) for line in lines if place_of(line.edge) is None for node in line.receivers}
    writes = list({id(line.sender): line.sender for line in lines}.values())
    for node in nodes:
        if id(node) not in reads:
            continue
        same = [other for other in writes if other.name == node.name]
        later = [other for other in same if (other.position or 0) >= (node.position or 0)]
        is_ahead = node.name.removesuffix("_out").partition(".heads[")[0] in circuit.ahead
        for other in same if is_ahead else later or same:
            if other is not node:
                half = node.width / 2 if other.x > node.x else -node.width / 2
                start, stop = node.x + half, other.x - half
                bend, top = (stop - start) / 4, node.y - NODE_HEIGHT / 2 - 14
                points = f"{start + bend:.1f} {top:.1f} {stop - bend:.1f} {top:.1f} {stop:.1f} {node.y:.1f}"
                yield node, other, f"M{start:.1f} {node.y:.1f}C{points}"


# -- SVG ---------------------------------------------------------------------------------------------------------------

_POSITIVE, _NEGATIVE = "#b04339", "#3669be"
"""The colors of edges that raise and lower the metric: both ends of the diverging colormap of heatmaps."""
_LINK = 'fill="none" stroke="#57606a" stroke-dasharray="2 4"'
_LEGEND, _LEAST_TOTAL = 62.0, 400.0


def svg_of(circuit: Circuit, most: int | None = None) -> str:
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
        parts.append(_text(10, y + tall / 2 + 4, label, 'fill="#57606a"'))
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
        parts.append(_text(14, y + 30, summary_of(circuit, len(shown.edges)), 'fill="#57606a"'))
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
