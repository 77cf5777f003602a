"""The skeleton of a capture: all rows of the tree as columns, small enough for one message.

records of the capture
  -> Skeleton          a row for each graph, node, value in a container, and module that was never called
  -> bytes             deflated JSON: `Columns` of js/src/kernel/protocol.ts
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import itemgetter
from typing import Any

import msgspec
import torch

from graphpatch_notebook.capture.records import CallNode, Frame, Node, Ref
from graphpatch_notebook.components import find
from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.inspection.node_path import Location, sources_in
from graphpatch_notebook.inspection.resolution import (
    NodeMap,
    Unresolvable,
    is_patchable,
    kept_for,
    nearest_paths,
    parse,
    resolve,
)
from graphpatch_notebook.inspection.tree import is_clutter, is_shown, plumbing, unused_modules, used_modules
from graphpatch_notebook.notebook.display.tables import spec_label, visible
from graphpatch_notebook.notebook.messages import FLAGS, KINDS, NEXT, ComponentRow, Flow, RowKind
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.paths import ParsedPath, format_path, format_segment, is_component_name, parse_path
from graphpatch_notebook.values import (
    ContainerSpec,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    ValueSpec,
    dtype_name,
    key_text,
)

SIZE, HIDDEN, OPAQUE, PATCHABLE, MUTATED, VIEW_FILLED, PLUMBING = FLAGS.values()


class Skeleton:
    """The rows of the tree of one capture, parents before children, and the paths of the rows.

    Every path of `pg.nodes`, every graph and every container has exactly one row. Only the rows of modules that were
    never called do not have a path. Immutable. It refers to the records of the capture, not to the graph.

    The columns are lists: an object for each of 50,000 rows would take longer than everything else.

    Attributes:
        kind: The kind of each row.
        name: Its name, as it appears in paths.
        op: The torch function of an op, the class of the module of a graph, else the kind.
        flags: `SIZE`, `HIDDEN`, ...
        parent: The row that it is in; that of the root is 0.
        notes: By row, such as why a graph is opaque.

    Example:
        >>> import torch
        >>> pg = PatchableGraph(torch.nn.ReLU(), torch.ones(2))
        >>> skeleton = skeleton_of(pg)
        >>> [skeleton.path(row) for row in range(len(skeleton))]
        ['', 'input', 'relu', 'output']
        >>> skeleton.row("relu")
        2
    """

    def __init__(self, nodes: NodeMap) -> None:
        self.nodes = nodes
        self.kind: list[RowKind] = []
        self.name: list[str] = []
        self.op: list[str] = []
        self.flags: list[int] = []
        self.parent: list[int] = []
        self.notes: dict[int, str] = {}
        self._depth: list[int] = []
        self._spec: list[ValueSpec | None] = []
        self._node: list[Node | None] = []
        self._segment = functools.cache(format_segment)
        self._used, self._plumbing = used_modules(nodes.root), plumbing(nodes.root)
        self._add_graph("<root>", None, nodes.root, 0, 0)

    def __len__(self) -> int:
        return len(self.name)

    # -- creating rows -------------------------------------------------------------------------------------------------

    def _add(
        self, name: str, op: str, kind: RowKind, spec: ValueSpec | None, flags: int, node: Node | None, parent: int
    ) -> int:
        row = len(self.name)
        self.name.append(name)
        self.op.append(op)
        self.kind.append(kind)
        self._spec.append(spec)
        self.flags.append(flags)
        self._node.append(node)
        self.parent.append(parent)
        self._depth.append(self._depth[parent] + 1 if row else 0)
        return row

    def _add_graph(self, name: str, node: Node | None, frame: Frame, parent: int, flags: int) -> None:
        is_opaque = frame.opaque_reason is not None
        op = type(frame.module).__name__
        row = self._add(name, op, "graph", None, flags | OPAQUE * is_opaque, node, parent)
        if reasons := [visible(reason) for reason in (frame.opaque_reason, frame.custom_failure) if reason]:
            self.notes[row] = "; ".join(reasons)
        for one in frame.nodes_and_splices:
            own = PLUMBING * (id(one) in self._plumbing) + SIZE * one.is_size
            if isinstance(one, CallNode):
                self._add_graph(self._segment(one.name), one, one.frame, row, own)
            else:
                own += MUTATED * one.is_mutated_later + VIEW_FILLED * one.is_view_filled_later
                self._add_value(one, own, row)
        for names, module in unused_modules(frame.module, self._used):
            self._add(".".join(map(self._segment, names)), type(module).__name__, "unused", None, 0, None, row)

    def _add_value(self, node: Node, flags: int, parent: int) -> None:
        spec: ValueSpec = node.spec
        kind: Any = node.kind
        op, name = node.op if kind == "op" else kind, self._segment(node.name)
        if type(spec) is TensorSpec:  # most nodes; the general code takes twice as long
            more = HIDDEN * (not node.is_size) if kind == "constant" else PATCHABLE * node.is_live
            self._add(name, op, kind, spec, flags | more, node, parent)
            return
        inside = flags | PATCHABLE * is_patchable(node)
        is_absent = kind == "input" and spec == ScalarSpec(None)
        own = inside if is_absent or _is_leaf(spec) else flags
        row = self._add(name, op, kind, spec, own | HIDDEN * (not node.is_size and not is_shown(node)), node, parent)
        if is_absent:
            self.notes[row] = "the example did not have it"
        if isinstance(spec, ContainerSpec):
            self._add_items(spec, node, inside, row)

    def _add_items(self, container: ContainerSpec, node: Node, flags: int, parent: int) -> None:
        texts: set[str] = set()
        for text, _, spec in container.children:
            if text in texts:  # of keys with the same text (1 and "1"), a path refers to the first
                self.notes[parent] = f"several of its keys have the text {visible(text)}: a path refers to the first"
                continue
            texts.add(text)
            own = flags if _is_leaf(spec) else flags & ~PATCHABLE
            own |= HIDDEN * (not node.is_size and is_clutter(spec))
            row = self._add(self._segment(text), "item", "item", spec, own, node, parent)
            if isinstance(spec, ContainerSpec):
                self._add_items(spec, node, flags, row)

    # -- the message ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def data(self) -> bytes:
        """The columns as deflated JSON."""
        names, name = _tabled(self.name)
        ops, op = _tabled(self.op)
        tensors = functools.cache(_written)  # most values
        written = (tensors(one) if type(one) is TensorSpec else one and _written(one) for one in self._spec)
        specs, spec = _tabled(written)
        columns = {
            "names": names,
            "ops": list(map(visible, ops)),
            "specs": specs,
            "name": name,
            "depth": self._depth,
            "kind": list(map({kind: number for number, kind in enumerate(KINDS)}.__getitem__, self.kind)),
            "op": op,
            "spec": spec,
            "flags": self.flags,
            "notes": {str(row): note for row, note in self.notes.items()},
        }
        return zlib.compress(json.dumps(columns, separators=(",", ":")).encode())

    def components(self) -> list[ComponentRow]:
        """Returns the components that have a row, in their order, with the axes and shape of the value at the path.

        The first call for a capture finds them, which takes about a tenth of the time of the capture.
        """
        found = []
        for one in find(self.nodes.root).values():
            if (row := self.find(one.path)) is not None:
                axes, value = [axis or "unknown" for axis in one.path_axes], torch.empty(one.shape, device="meta")
                found.append(ComponentRow(row, one.name, axes, list(one.at_path(value).shape)))
        return found

    def packed_components(self) -> bytes:
        """Returns the components as deflated JSON."""
        return zlib.compress(msgspec.json.encode(self.components()), 9)

    def edges(self) -> Iterator[tuple[int, int]]:
        """Yields the row of each node with that of each value that it is computed from, in order, without duplicates.

        The value may be a part of another node's, or the output of a called graph. Edges are inside of one graph: what
        the inputs of a graph are, the edges of its call say.
        """
        for frame in self.nodes.root.walk(with_splices=True):
            for node in frame.nodes_and_splices:
                user = self._by_node[id(node)]
                for value in dict.fromkeys(map(self.row_of_ref, sources_in(frame, node))):
                    if value is not None:
                        yield user, value

    def packed_edges(self) -> bytes:
        """Returns the edges as deflated JSON: `Flow`."""
        edges = sorted(self.edges(), key=itemgetter(0))  # keeps the order of the arguments
        users = [user for user, _ in edges]
        steps = [user - before for user, before in zip(users, [0, *users], strict=False)]
        return zlib.compress(msgspec.json.encode(Flow(steps, [user - value for user, value in edges])), 9)

    # -- one row -------------------------------------------------------------------------------------------------------

    def children(self, row: int) -> Iterator[int]:
        """Yields the children of a row."""
        for below in range(row + 1, len(self)):
            if self._depth[below] <= self._depth[row]:
                return
            if self.parent[below] == row:
                yield below

    def path(self, row: int) -> str:
        """Returns the path of a row; empty for the root, and for modules that were never called."""
        return "" if self.kind[row] == "unused" else self._paths[row]

    def place(self, row: int) -> Location | None:
        """Returns the place in the capture that a row shows; `None` for a module that was never called."""
        if self.kind[row] == "unused":
            return None
        parsed = parse_path(self.path(row)) if row else ParsedPath(())
        return Location.of_root(self.nodes.root).below(*parsed.names).below(*parsed.dig)

    # -- which row -----------------------------------------------------------------------------------------------------

    def find(self, path: str) -> int | None:
        """Returns the row of a path in any spelling; `None` if it does not exist. The root is `""` or `<root>`."""
        row = self._by_path.get(path)
        if row is None:
            with suppress(Unresolvable):
                parsed = self._parsed(path)
                row = self._by_path.get(format_path(parsed.names, parsed.dig))
        return row

    def row(self, path: str) -> int:
        """Returns the row of a path.

        Raises:
            UnknownPathError: The path does not exist; the message lists the nearest paths.
        """
        row = self.find(path)
        if row is not None:
            return row
        try:
            close = ", ".join(map(repr, nearest_paths(self.nodes.root, str(self._parsed(path)))))
        except Unresolvable as problem:
            raise UnknownPathError(problem.message) from None
        raise UnknownPathError(f"there is no {path!r} in the tree" + (f"; nearest: {close}" if close else ""))

    def _parsed(self, path: str) -> ParsedPath:
        """Returns the parsed path, or the parsed path of the component with this name."""
        return parse(resolve(self.nodes.root, path).path if is_component_name(path) else path)

    def row_of_node(self, node: Node) -> int | None:
        """Returns the row of a node, or of the graph of a call."""
        return self._by_node.get(id(node))

    def row_of_ref(self, ref: Ref) -> int | None:
        """Returns the row of a value; for the result of a call, the output of its graph."""
        node = ref.node.frame.output_node if isinstance(ref.node, CallNode) else ref.node
        row = self.row_of_node(node)
        for key in ref.dig:
            text = format_path([key_text(key)])
            inside = () if row is None else self.children(row)
            found = next((child for child in inside if self.name[child] == text), None)
            if found is None:
                break
            row = found
        return row

    @functools.cached_property
    def _by_node(self) -> dict[int, int]:
        # In reverse, so that the first of several rows wins.
        nodes = reversed([*enumerate(zip(self._node, self.kind, strict=True))])
        return {id(node): row for row, (node, kind) in nodes if node is not None and kind != "item"}

    @functools.cached_property
    def _paths(self) -> list[str]:
        paths = [""]
        for row in range(1, len(self)):
            above = self.parent[row]
            is_first = self.kind[row] == "item" and self.kind[above] != "item"
            separator = ("|" if is_first else ".") if above else ""
            paths.append(f"{paths[above]}{separator}{self.name[row]}")
        return paths

    @functools.cached_property
    def _by_path(self) -> dict[str, int]:
        return {path: row for row, path in enumerate(self._paths) if self.kind[row] != "unused"}


def _tabled(values: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """Returns the different values, and the positions of all values in that table.

    The position is `NEXT` for each that follows all earlier ones, and -1 for `None`.
    """
    numbers: dict[Any, int] = {}
    column = []
    for value in values:
        number = -1 if value is None else numbers.get(value, NEXT)
        column.append(number)
        if number == NEXT:
            numbers[value] = len(numbers)
    return list(numbers), column


def _written(spec: ValueSpec) -> tuple[Any, ...]:
    """Returns the `Spec` of the front end."""
    if isinstance(spec, TensorSpec):
        placement = spec.badge and spec.placement
        label, shape = visible(spec_label(spec)), tuple(spec.shape)
        return (label, shape, dtype_name(spec.dtype), "tensor", *([visible(placement)] if placement else []))
    is_number = isinstance(spec, ScalarSpec) and spec.is_number
    what = "container" if isinstance(spec, ContainerSpec) else "number" if is_number else "object"
    return visible(spec_label(spec)), None, None, what


def _is_leaf(spec: ValueSpec) -> bool:
    return isinstance(spec, (TensorSpec, UnknownSpec)) or (isinstance(spec, ScalarSpec) and spec.is_number)


def skeleton_of(pg: PatchableGraph) -> Skeleton:
    """Returns the skeleton of `pg`, cached until a graph of `pg` is edited."""
    return kept_for(pg.nodes, Skeleton)
