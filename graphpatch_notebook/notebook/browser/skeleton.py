"""The skeleton of a capture: all rows of the tree as columns, small enough for one message.

records of the capture
  -> Skeleton          a row for each graph, node, value in a container, and module that was never called
  -> bytes             deflated JSON: `Columns` of js/src/kernel/protocol.ts
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Hashable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import torch

from graphpatch_notebook.capture.records import CallNode, Frame, Node
from graphpatch_notebook.components import find
from graphpatch_notebook.components.names import is_component_name, part_shape
from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.inspection.node_map import NodeMap, kept_for
from graphpatch_notebook.inspection.node_path import Location
from graphpatch_notebook.inspection.resolution import Unresolvable, is_patchable, nearest_paths, parse, resolve
from graphpatch_notebook.inspection.tree import is_clutter, is_shown, plumbing, unused_modules, used_modules
from graphpatch_notebook.notebook.display.tables import spec_label, visible
from graphpatch_notebook.notebook.messages import KINDS, ComponentRow, RowKind
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.paths import ParsedPath, format_path, format_segment, parse_path
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, TensorSpec, UnknownSpec, ValueSpec, dtype_name

_NUMBERS: dict[str, int] = {kind: number for number, kind in enumerate(KINDS)}
_GRAPH, _ITEM, _UNUSED = _NUMBERS["graph"], _NUMBERS["item"], _NUMBERS["unused"]

# In columns of positions in a table: the first position that was not used yet. Long runs of it compress well.
NEXT = -2

SIZE, HIDDEN, OPAQUE, PATCHABLE, MUTATED, VIEW_FILLED, PLUMBING = 1, 2, 4, 8, 16, 32, 64


class Skeleton:
    """The rows of the tree of one capture, parents before children, and the paths of the rows.

    Every path of `pg.nodes`, every graph and every container has exactly one row. Only the rows of modules that were
    never called do not have a path. Immutable. It refers to the records of the capture, not to the graph.

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
        self._rows = _Rows(nodes.root)
        self._names = self._rows.written_names()
        self._ops: list[str] = list(self._rows.ops)

    def __len__(self) -> int:
        return len(self._rows.name)

    @functools.cached_property
    def data(self) -> bytes:
        """The columns as deflated JSON."""
        rows = self._rows
        columns = {
            "names": self._names,
            "ops": list(map(visible, self._ops)),
            "specs": rows.specs,
            "name": _without_next(rows.name),
            "depth": rows.depth,
            "kind": rows.kind,
            "op": _without_next(rows.op),
            "spec": _without_next(rows.spec),
            "flags": rows.flags,
            "notes": {str(row): note for row, note in rows.notes.items()},
        }
        return zlib.compress(json.dumps(columns, separators=(",", ":")).encode())

    @property
    def node_count(self) -> int:
        """The number of values that can be patched: the length of `pg.nodes`."""
        return sum(bool(flags & PATCHABLE) for flags in self._rows.flags) - self._rows.absent_count

    # -- one row -------------------------------------------------------------------------------------------------------

    def kind(self, row: int) -> RowKind:
        """Returns the kind of a row, one of `KINDS`."""
        return KINDS[self._rows.kind[row]]

    def name(self, row: int) -> str:
        """Returns the name of a row, as it appears in paths."""
        return self._names[self._rows.name[row]]

    def op(self, row: int) -> str:
        """Returns the torch function of an op, the class of the module of a graph, else the kind."""
        return self._ops[self._rows.op[row]]

    def flags(self, row: int) -> int:
        """Returns the flags of a row: `SIZE`, `HIDDEN`, ..."""
        return self._rows.flags[row]

    def note(self, row: int) -> str | None:
        """Returns the note of a row, such as why a graph is opaque."""
        return self._rows.notes.get(row)

    def parent(self, row: int) -> int | None:
        """Returns the parent of a row; `None` for the root."""
        return self._rows.parent[row] if row else None

    def children(self, row: int) -> Iterator[int]:
        """Yields the children of a row."""
        depth = self._rows.depth
        for below in range(row + 1, len(depth)):
            if depth[below] <= depth[row]:
                return
            if depth[below] == depth[row] + 1:
                yield below

    def path(self, row: int) -> str:
        """Returns the path of a row; empty for the root, and for modules that were never called."""
        return "" if self._rows.kind[row] == _UNUSED else self._paths[row]

    def place(self, row: int) -> Location | None:
        """Returns the place in the capture that a row shows; `None` for a module that was never called."""
        if self._rows.kind[row] == _UNUSED:
            return None
        root = Location.of_root(self.nodes.root)
        if not row:
            return root
        parsed = parse_path(self.path(row))
        return root.below(*parsed.names).below(*parsed.dig)

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

    def components(self) -> list[ComponentRow]:
        """Returns the components that have a row, in their order.

        The first call for a capture finds them, which takes about a tenth of the time of the capture.
        """
        found = []
        for one in find(self.nodes.root).values():
            if (row := self.find(one.path)) is not None:
                axes = [one.axes[dim] or "unknown" for dim in one.kept_dims]
                found.append(ComponentRow(row, one.name, axes, list(part_shape(torch.Size(one.shape), one.index))))
        return found

    def packed_components(self) -> bytes:
        """Returns the components as deflated JSON."""
        return zlib.compress(msgspec.json.encode(self.components()), 9)

    def row_of_node(self, node: Node) -> int | None:
        """Returns the row of a node, or of the graph of a call."""
        return self._by_node.get(id(node))

    @functools.cached_property
    def _by_node(self) -> dict[int, int]:
        rows = self._rows
        nodes = enumerate(zip(rows.node, rows.kind, strict=True))
        # In reverse, so that the first of several rows wins.
        found = [(id(node), row) for row, (node, kind) in nodes if node is not None and kind != _ITEM]
        return dict(reversed(found))

    @functools.cached_property
    def _paths(self) -> list[str]:
        rows, names = self._rows, self._names
        paths = [""]
        for row in range(1, len(self)):
            above = rows.parent[row]
            is_first = rows.kind[row] == _ITEM and rows.kind[above] != _ITEM
            separator = ("|" if is_first else ".") if above else ""
            paths.append(f"{paths[above]}{separator}{names[rows.name[row]]}")
        return paths

    @functools.cached_property
    def _by_path(self) -> dict[str, int]:
        return {path: row for row, path in enumerate(self._paths) if self._rows.kind[row] != _UNUSED}


# --------------------------------------------------------------------------------------------------------------------
# Creating rows


class _Numbered(dict[Any, int]):
    """Assigns consecutive numbers to keys."""

    def __missing__(self, key: Hashable) -> int:
        number = self[key] = len(self)
        return number


class _Rows:
    """The columns, as lists: an object for each of 50,000 rows would take longer than everything else."""

    def __init__(self, root: Frame) -> None:
        # The name of a node, or all names on the way to a module that was never called.
        self.names = _Numbered()
        self.ops = _Numbered()
        self.specs: list[list[Any]] = []
        self._tensors: dict[TensorSpec, int] = {}
        self._others = _Numbered()
        self.name: list[int] = []
        self.depth: list[int] = []
        self.kind: list[int] = []
        self.op: list[int] = []
        self.spec: list[int] = []
        self.flags: list[int] = []
        self.parent: list[int] = []
        self.node: list[Node | None] = []
        self.notes: dict[int, str] = {}
        self.absent_count = 0
        self._used = used_modules(root)
        self._plumbing = plumbing(root)
        self._add_graph("<root>", type(root.module).__name__, None, root, 0, 0)

    def written_names(self) -> list[str]:
        """Returns the names as they appear in paths."""
        root = self.name[0]
        return [
            "<root>" if number == root else ".".join(map(format_segment, (name,) if isinstance(name, str) else name))
            for name, number in self.names.items()
        ]

    def _add(self, name: Any, op: str, kind: int, spec: int, flags: int, node: Node | None, parent: int) -> int:
        row = len(self.name)
        self.name.append(self.names[name])
        self.op.append(self.ops[op])
        self.kind.append(kind)
        self.spec.append(spec)
        self.flags.append(flags)
        self.node.append(node)
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1 if row else 0)
        return row

    def _add_graph(self, name: Any, op: str, node: Node | None, frame: Frame | None, parent: int, flags: int) -> None:
        is_opaque = frame is None or frame.opaque_reason is not None
        name = ("<root>",) if node is None else name  # differs from the name of any node
        row = self._add(name, op, _GRAPH, -1, flags | OPAQUE * is_opaque, node, parent)
        if frame is None:
            self.notes[row] = "nothing is known of this call: it was added to the graph"
            return
        reasons = [reason for reason in (frame.opaque_reason, frame.custom_failure) if reason]
        if reasons:
            self.notes[row] = "; ".join(map(visible, reasons))
        self._add_nodes(frame, row)
        for names, module in unused_modules(frame.module, self._used):
            self._add(names, type(module).__name__, _UNUSED, -1, 0, None, row)

    def _add_nodes(self, frame: Frame, parent: int) -> None:
        add, tensors, plumbing = self._add, self._tensors, self._plumbing
        for node in frame.nodes:
            kind, spec = node.kind, node.spec
            flags = PLUMBING if id(node) in plumbing else 0
            if kind == "call" and isinstance(node, CallNode):
                op = type(node.frame.module).__name__
                self._add_graph(node.name, op, node, node.frame, parent, flags + SIZE * node.is_size)
                continue
            flags += MUTATED * node.is_mutated_later + VIEW_FILLED * node.is_view_filled_later
            if node.is_size:
                flags += SIZE
            op = node.op if kind == "op" else kind
            if type(spec) is TensorSpec:  # most nodes; the general code takes twice as long
                number = tensors.get(spec)
                if number is None:
                    number = self._number_of(spec)
                if kind == "constant":
                    flags += 0 if node.is_size else HIDDEN
                elif node.is_live:
                    flags += PATCHABLE
                add(node.name, op, _NUMBERS[kind], number, flags, node, parent)
            else:
                self._add_other(node, op, flags, parent)

    def _add_other(self, node: Node, op: str, flags: int, parent: int) -> None:
        spec, can_be_patched = node.spec, is_patchable(node)
        is_absent = node.kind == "input" and isinstance(spec, ScalarSpec) and spec.value is None
        own = flags | PATCHABLE * (can_be_patched and (is_absent or _is_leaf(spec)))
        own |= HIDDEN * (not node.is_size and not is_shown(node))
        row = self._add(node.name, op, _NUMBERS[node.kind], self._number_of(spec), own, node, parent)
        if is_absent:
            self.absent_count += can_be_patched
            self.notes[row] = "the example did not have it"
        if isinstance(spec, ContainerSpec):
            self._add_items(spec, node, flags | PATCHABLE * can_be_patched, row)

    def _add_items(self, container: ContainerSpec, node: Node, flags: int, parent: int) -> None:
        texts: set[str] = set()
        for text, _, spec in container.children:
            if text in texts:  # of keys with the same text (1 and "1"), a path refers to the first
                self.notes[parent] = f"several of its keys have the text {visible(text)}: a path refers to the first"
                continue
            texts.add(text)
            own = flags if _is_leaf(spec) else flags & ~PATCHABLE
            own |= HIDDEN * (not node.is_size and is_clutter(spec))
            row = self._add(text, "item", _ITEM, self._number_of(spec), own, node, parent)
            if isinstance(spec, ContainerSpec):
                self._add_items(spec, node, flags, row)

    def _number_of(self, spec: ValueSpec) -> int:
        """Returns the position of a spec in the table."""
        if type(spec) is TensorSpec and (known := self._tensors.get(spec)) is not None:
            return known
        shape, dtype, placement = None, None, ""
        if isinstance(spec, TensorSpec):
            shape, dtype, placement = tuple(spec.shape), dtype_name(spec.dtype), spec.badge and spec.placement
        written = (visible(spec_label(spec)), shape, dtype, _what(spec), *([visible(placement)] if placement else []))
        number = self._others[written]
        if number == len(self.specs):
            self.specs.append(list(written))
        if type(spec) is TensorSpec:
            self._tensors[spec] = number
        return number


def _without_next(column: list[int]) -> list[int]:
    """Returns a column of positions with `NEXT` for each position that follows all earlier ones."""
    written, following = [], 0
    for position in column:
        is_next = position == following
        written.append(NEXT if is_next else position)
        following += is_next
    return written


def _is_leaf(spec: ValueSpec) -> bool:
    return isinstance(spec, (TensorSpec, UnknownSpec)) or (isinstance(spec, ScalarSpec) and spec.is_number)


def _what(spec: ValueSpec) -> str:
    if isinstance(spec, TensorSpec):
        return "tensor"
    if isinstance(spec, ContainerSpec):
        return "container"
    return "number" if isinstance(spec, ScalarSpec) and spec.is_number else "object"


# --------------------------------------------------------------------------------------------------------------------
# Caching


def skeleton_of(pg: PatchableGraph) -> Skeleton:
    """Returns the skeleton of `pg`, cached until a graph of `pg` is edited."""
    return kept_for(pg.nodes, Skeleton)
