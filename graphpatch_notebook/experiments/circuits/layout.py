"""Where the nodes and edges of a circuit go in its picture: layers upwards, tokens or components side by side.

names of senders and receivers
  -> rows                   one for each layer and kind of component, in the order of the model
  -> order within a row     few crossings: an edge over several rows has a place in each, as a node has
  -> coordinates            close to the neighbors in other rows, with a gap to those beside

Of edges with positions, a node is a component at a position, and all nodes of a position are in one column.

`svg` and the front end draw the same layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from graphpatch_notebook.components.names import parse_name
from graphpatch_notebook.experiments.circuits.circuit import READABLE, Circuit, Edge, place_of

NODE_HEIGHT = 36.0
PORTS = ("q", "k", "v")
LETTER = 6.9
"""About how wide a character is, in the font and size of labels."""
_PADDING, _LEAST_WIDTH = 18.0, 62.0
_PITCH = 92.0
"""From a row to the next."""
_GAP, _EDGE_ROOM = 16.0, 10.0
_MARGIN, _LABELS = 14.0, 66.0
_TOKENS, _BETWEEN = 24.0, 40.0
"""For the tokens, below, and from a column to the next."""
_ROUNDS = 12
_THINNEST, _WIDEST = 1.0, 8.0
_SPREAD, _APART = 0.36, 3.0
"""Edges without a named input begin and end over this part of a node's width, to each side, so far apart."""

LayoutRow: TypeAlias = "tuple[str, int | None, str]"
"""The stack, the layer and the kind of component that a row has."""


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


@dataclass
class PlacedNode:
    """A node of the picture.

    Attributes:
        name, label: The name of the component, and a short one.
        row: What it is placed by.
        x, y: Its center, from the left and from the top.
        ports: Its inputs at which edges end, of `q`, `k` and `v`.
        position: Its position; `None` for all.
    """

    name: str
    label: str
    row: LayoutRow
    width: float
    x: float = 0.0
    y: float = 0.0
    ports: tuple[str, ...] = ()
    position: int | None = None

    def port_x(self, port: str) -> float:
        """Returns where the edges into an input end."""
        return self.x + (PORTS.index(port) - 1) * 0.3 * self.width


@dataclass(frozen=True)
class PlacedEdge:
    """An edge of the picture.

    Attributes:
        sender: The number of the node where it begins.
        receivers: The numbers of the nodes where it ends: several, if heads share the keys or values that it ends at.
        width: The width of its line, which grows with the magnitude of its score.
        line: Its line, as the `d` of an SVG path.
    """

    edge: Edge
    sender: int
    receivers: tuple[int, ...]
    width: float
    line: str


@dataclass(frozen=True)
class PlacedLink:
    """A dotted line: from where a component reads for another position to where it writes what it read.

    `reader` and `writer` are the numbers of these nodes, and `line` is the `d` of an SVG path.
    """

    reader: int
    writer: int
    line: str


@dataclass(frozen=True)
class Band:
    """The rows of one layer: `y` and `height` of the area behind them, and the label at its left."""

    label: str
    y: float
    height: float


@dataclass(frozen=True)
class TokenColumn:
    """A position: its token, and its center from the left."""

    label: str
    x: float


@dataclass(frozen=True)
class CircuitLayout:
    """The picture of a circuit, in pixels.

    Attributes:
        nodes: The nodes, from the lowest row to the highest, each row from the left.
        edges: The edges, the strongest first.
        bands: The layers.
        columns: The positions, below the nodes; empty without positions.
        links: Lines from a component at a position to itself at those that attend to it.
    """

    width: float
    height: float
    nodes: tuple[PlacedNode, ...]
    edges: tuple[PlacedEdge, ...]
    bands: tuple[Band, ...]
    columns: tuple[TokenColumn, ...] = ()
    links: tuple[PlacedLink, ...] = ()


def lay_out(circuit: Circuit) -> CircuitLayout:
    """Returns the picture of a circuit."""
    return _Picture(circuit).layout()


@dataclass(eq=False)
class _Item:
    """What has a place in a row: a node, or an edge that passes through."""

    width: float
    row: int
    node: int | None = None
    x: float = 0.0
    column: int = 0
    below: list[_Item] = field(default_factory=list)
    above: list[_Item] = field(default_factory=list)


@dataclass(frozen=True)
class _Route:
    """One line of an edge: from a node through places in the rows between to a node."""

    edge: int
    items: tuple[_Item, ...]
    port: str


class _Picture:
    def __init__(self, circuit: Circuit) -> None:
        self.edges = sorted(circuit.edges, key=lambda edge: -abs(edge.score))
        self.tokens, self.ahead = circuit.tokens, circuit.ahead
        senders = {(edge.sender, edge.position) for edge in self.edges}
        # Of the heads that share keys or values, those that pass something on: at this position, or at another one.
        sending = {sender for sender, _ in senders}
        targets = {
            (edge.receiver, edge.position): [
                (name, edge.position)
                for name in [one for one in circuit.targets(edge.receiver) if one in sending]
                or circuit.targets(edge.receiver)[:1]
            ]
            for edge in self.edges
        }
        used = senders.union(*targets.values())
        positions = {position for _, position in used if position is not None}
        self.positions: list[int | None] = [*sorted(positions)] or [None]
        self.nodes = [
            _placed(name, position) for name in circuit.nodes for position in self.positions if (name, position) in used
        ]
        self.index = {(node.name, node.position): index for index, node in enumerate(self.nodes)}
        self.rows = list(dict.fromkeys(node.row for node in self.nodes))
        self.items: list[list[_Item]] = [[] for _ in self.rows]
        self.of_node = [
            _Item(node.width, self.rows.index(node.row), at, column=self.positions.index(node.position))
            for at, node in enumerate(self.nodes)
        ]
        for item in self.of_node:
            self.items[item.row].append(item)
        self.routes = [
            self._route(number, edge, self.index[target])
            for number, edge in enumerate(self.edges)
            for target in targets[edge.receiver, edge.position]
        ]

    def _route(self, number: int, edge: Edge, target: int) -> _Route:
        """Returns a line. The strongest lines get space in the rows between; others pass behind the nodes there."""
        first, last = self.of_node[self.index[edge.sender, edge.position]], self.of_node[target]
        room = _EDGE_ROOM + self._thickness(edge)
        rows = range(first.row + 1, last.row) if number < READABLE else ()
        between = [_Item(room, row, column=first.column) for row in rows]
        for item in between:
            self.items[item.row].append(item)
        items = (first, *between, last)
        if len(items) == last.row - first.row + 1:
            for lower, upper in pairwise(items):
                lower.above.append(upper)
                upper.below.append(lower)
        word = edge.receiver.rpartition(".")[2]
        port = word if word in PORTS else ""
        if port:
            node = self.nodes[target]
            node.ports = tuple(one for one in PORTS if one in {*node.ports, port})
        return _Route(number, items, port)

    def layout(self) -> CircuitLayout:
        self._order()
        self._place()
        items = [item for row in self.items for item in row]
        left = min((item.x - item.width / 2 for item in items), default=0.0)
        right = max((item.x + item.width / 2 for item in items), default=0.0)
        for item in items:
            item.x = round(item.x - left + _MARGIN + _LABELS, 1)
        for node, item in zip(self.nodes, self.of_node, strict=True):
            node.x, node.y = item.x, self._y(item.row)
        order = sorted(range(len(self.nodes)), key=lambda at: (self.of_node[at].row, self.nodes[at].x))
        number = {before: now for now, before in enumerate(order)}
        return CircuitLayout(
            round(right - left + 2 * _MARGIN + _LABELS, 1),
            2 * _MARGIN
            + NODE_HEIGHT
            + _PITCH * max(len(self.rows) - 1, 0)
            + (0 if self.positions == [None] else _TOKENS),
            tuple(self.nodes[at] for at in order),
            tuple(self._placed_edges(number)),
            tuple(self._bands()),
            tuple(self._columns()),
            tuple(self._links()),
        )

    def _y(self, row: int) -> float:
        return _MARGIN + NODE_HEIGHT / 2 + _PITCH * (len(self.rows) - 1 - row)

    # -- order within rows ---------------------------------------------------------------------------------------------

    def _order(self) -> None:
        """Sorts each row by the mean place of its neighbors below, then above, ..., and keeps the best order."""
        best, fewest = [list(row) for row in self.items], self._crossings()
        for round_ in range(_ROUNDS):
            if fewest == 0:
                break
            is_upward = round_ % 2 == 0
            for row in self.items if is_upward else reversed(self.items):
                self._sort(row, is_upward=is_upward)
            crossings = self._crossings()
            if crossings < fewest:
                best, fewest = [list(row) for row in self.items], crossings
        self.items = best

    def _sort(self, row: list[_Item], *, is_upward: bool) -> None:
        place = {id(item): index / max(len(one) - 1, 1) for one in self.items for index, item in enumerate(one)}

        def wanted(item: _Item) -> float:
            near = [place[id(other)] for other in (item.below if is_upward else item.above)]
            return sum(near) / len(near) if near else place[id(item)]

        row.sort(key=lambda item: (item.column, wanted(item)))

    def _crossings(self) -> int:
        place = {id(item): index for row in self.items for index, item in enumerate(row)}
        count = 0
        for row in self.items:
            lines = sorted((place[id(item)], place[id(upper)]) for item in row for upper in item.above)
            count += sum(
                one[1] > other[1] and one[0] < other[0] for at, one in enumerate(lines) for other in lines[at + 1 :]
            )
        return count

    # -- coordinates ---------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        if self.positions != [None]:
            self._place_by_column()
            return
        for row in self.items:
            offsets = _offsets(row)
            for item, offset in zip(row, offsets, strict=True):
                item.x = offset - offsets[-1] / 2
        for round_ in range(_ROUNDS):
            for row in self.items if round_ % 2 == 0 else reversed(self.items):
                self._pull(row)

    def _place_by_column(self) -> None:
        """Puts the items of each position above one another, in the middle of its column."""
        left = 0.0
        for column in range(len(self.positions)):
            parts = [[item for item in row if item.column == column] for row in self.items]
            offsets = [_offsets(part) for part in parts]
            wide = [
                own[-1] + (part[0].width + part[-1].width) / 2 if part else 0.0
                for part, own in zip(parts, offsets, strict=True)
            ]
            middle = left + max(wide) / 2
            for part, own, width in zip(parts, offsets, wide, strict=True):
                for item, offset in zip(part, own, strict=False):
                    item.x = middle - width / 2 + part[0].width / 2 + offset
            left += max(wide) + _BETWEEN

    def _pull(self, row: list[_Item]) -> None:
        """Moves the items of a row as close to their neighbors as their order and the gaps allow."""
        offsets = _offsets(row)
        # Without the gaps, what is left is an isotonic regression: blocks of items that touch, each at its mean.
        blocks: list[tuple[float, float, int]] = []
        for item, offset in zip(row, offsets, strict=True):
            near = item.below + item.above
            # An edge that passes through stays straight rather than a node in the middle of all its neighbors.
            weight = 4.0 if item.node is None else 1.0
            wanted = sum(other.x for other in near) / len(near) if near else item.x
            block = (wanted - offset, weight, 1)
            while blocks and blocks[-1][0] >= block[0]:
                mean, heavy, count = blocks.pop()
                total = heavy + block[1]
                block = ((mean * heavy + block[0] * block[1]) / total, total, count + block[2])
            blocks.append(block)
        means = [mean for mean, _, count in blocks for _ in range(count)]
        for item, offset, mean in zip(row, offsets, means, strict=True):
            item.x = mean + offset

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _placed_edges(self, renumbered: dict[int, int]) -> Iterable[PlacedEdge]:
        starts, stops = self._spread()
        for number, edge in enumerate(self.edges):
            lines, receivers = [], []
            for at, route in enumerate(self.routes):
                if route.edge != number:
                    continue
                first, last = route.items[0], route.items[-1]
                between = [(item.x, self._y(item.row)) for item in route.items[1:-1]]
                below, above = self._y(first.row) - NODE_HEIGHT / 2, self._y(last.row) + NODE_HEIGHT / 2
                lines.append(_curve([(starts[at], below), *between, (stops[at], above)]))
                receivers.append(renumbered[last.node or 0])
            sender = renumbered[self.index[edge.sender, edge.position]]
            yield PlacedEdge(edge, sender, tuple(receivers), self._thickness(edge), "".join(lines))

    def _thickness(self, edge: Edge) -> float:
        largest = max(abs(edge.score) for edge in self.edges) or 1.0
        return round(_THINNEST + (_WIDEST - _THINNEST) * abs(edge.score) / largest, 2)

    def _spread(self) -> tuple[list[float], list[float]]:
        """Returns where each line begins and ends: at a port, or next to others, in the order of their neighbors."""
        starts, stops = [0.0] * len(self.routes), [0.0] * len(self.routes)
        leaving: dict[int, list[int]] = {}
        entering: dict[int, list[int]] = {}
        for at, route in enumerate(self.routes):
            first, last = route.items[0].node or 0, route.items[-1].node or 0
            leaving.setdefault(first, []).append(at)
            if route.port:
                stops[at] = self.nodes[last].port_x(route.port)
            else:
                entering.setdefault(last, []).append(at)
        for ends, lines_of, next_ in ((starts, leaving, 1), (stops, entering, -2)):
            for node, lines in lines_of.items():
                lines.sort(key=lambda at, next_=next_: self.routes[at].items[next_].x)  # type: ignore[misc]
                self._fan(ends, node, lines)
        return starts, stops

    def _fan(self, ends: list[float], node: int, lines: list[int]) -> None:
        """Puts the ends of lines side by side, closer together where a node has less room than they need."""
        widths = [self._thickness(self.edges[self.routes[at].edge]) + _APART for at in lines]
        scale = min(1.0, 2 * _SPREAD * self.nodes[node].width / sum(widths))
        x = self.nodes[node].x - scale * sum(widths) / 2
        for at, width in zip(lines, widths, strict=True):
            ends[at] = x + scale * width / 2
            x += scale * width

    def _columns(self) -> Iterable[TokenColumn]:
        for number, position in enumerate(self.positions):
            if position is not None:
                label = self.tokens[position] if position < len(self.tokens) else str(position)
                items = [item for row in self.items for item in row if item.column == number]
                ends = [side for item in items for side in (item.x - item.width / 2, item.x + item.width / 2)]
                yield TokenColumn(label, round((min(ends) + max(ends)) / 2, 1))

    def _links(self) -> Iterable[PlacedLink]:
        """Yields lines from where a component reads for other positions to where it writes what it read."""
        reads = {route.items[-1].node for route in self.routes if place_of(self.edges[route.edge]) is None}
        writes = {route.items[0].node for route in self.routes}
        for at, node in enumerate(self.nodes):
            if at not in reads or node.position is None:
                continue
            same = [other for other in writes if other is not None and self.nodes[other].name == node.name]
            later = [other for other in same if (self.nodes[other].position or 0) >= node.position]
            attention = node.name.removesuffix("_out").partition(".heads[")[0]
            for other in same if attention in self.ahead else later or same:
                if other != at:
                    first, last = node, self.nodes[other]
                    side = 1 if last.x > first.x else -1
                    start, stop = first.x + side * first.width / 2, last.x - side * last.width / 2
                    bend, top = (stop - start) / 4, node.y - NODE_HEIGHT / 2 - 14
                    line = (
                        f"M{start:.1f} {node.y:.1f}C{start + bend:.1f} {top:.1f} "
                        f"{stop - bend:.1f} {top:.1f} {stop:.1f} {node.y:.1f}"
                    )
                    yield PlacedLink(at, other, line)

    def _bands(self) -> Iterable[Band]:
        layers: dict[tuple[str, int], list[int]] = {}
        for number, (stack, layer, _) in enumerate(self.rows):
            if layer is not None:
                layers.setdefault((stack, layer), []).append(number)
        room = NODE_HEIGHT / 2 + _MARGIN
        for (stack, layer), rows in layers.items():
            top, bottom = self._y(max(rows)) - room, self._y(min(rows)) + room
            yield Band(f"{stack} {layer}".strip() if stack else f"layer {layer}", top, bottom - top)


def _placed(name: str, position: int | None) -> PlacedNode:
    row, label = row_and_label(name)
    return PlacedNode(name, label, row, max(_LEAST_WIDTH, LETTER * len(label) + _PADDING), position=position)


def _offsets(row: Sequence[_Item]) -> list[float]:
    """Returns the distance of each item from the first one, if they are as close as possible."""
    offsets = [0.0]
    for left, right in pairwise(row):
        gap = _GAP if left.node is not None and right.node is not None else _GAP / 2
        offsets.append(offsets[-1] + left.width / 2 + right.width / 2 + gap)
    return offsets


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Returns a line that is vertical at each point, as the `d` of an SVG path."""
    (x, y), *others = points
    parts = [f"M{x:.1f} {y:.1f}"]
    for to_x, to_y in others:
        middle = (y + to_y) / 2
        parts.append(f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}")
        x, y = to_x, to_y
    return "".join(parts)
