"""Finds the nodes of a capture that match a query, for `%graphpatch find` and the search field of the widget."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from functools import cached_property
from typing import Any, cast, overload

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.components import find as find_components
from graphpatch_notebook.components.names import is_component_name
from graphpatch_notebook.components.operations import FUSED_ATTENTION
from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.inspection.aliases import INSIDE_ATTENTION
from graphpatch_notebook.inspection.node_map import NodeMap, NodeMeta, NodeRows, kept_for
from graphpatch_notebook.inspection.resolution import nearest_paths
from graphpatch_notebook.notebook.display.labels import op_label, source_label, value_label
from graphpatch_notebook.notebook.display.tables import Column, Table
from graphpatch_notebook.notebook.search.query import NODE_KINDS, Term, matches_sizes, parse_query
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.paths import ParsedPath, nearest, parse_path
from graphpatch_notebook.values import ScalarSpec, TensorSpec, dtype_name

_COLUMNS = (
    Column("path", is_whole=True),
    Column("op", "graph", is_cut=True),
    Column("value", "tensor"),
    Column("source", "note", is_cut=True, is_optional=True),
)


class FoundNodes(Table[NodeMeta]):
    """The nodes that match a query, in order of execution: a sequence of `NodeMeta` that displays as a table."""

    def __init__(
        self, query: str, columns: NodeColumns, positions: Sequence[int], hints: Callable[[], Iterable[str]] = tuple
    ) -> None:
        super().__init__(
            _COLUMNS,
            _Metas(columns.rows, positions),
            _cells,
            title=f"{len(positions):,} node{'s' * (len(positions) != 1)}" + (f" for {query}" if query.strip() else ""),
            notes=lambda: () if positions else hints(),
            empty="nothing found" if query.strip() else "no nodes",
            how_to_narrow="narrow the query",
        )
        self.query = query
        self._paths = columns.rows.paths
        self._positions = positions

    @property
    def paths(self) -> list[str]:
        """The paths of all found nodes, as `pg.patch` takes them."""
        return [self._paths[position] for position in self._positions]


def find(pg: PatchableGraph, query: str, patched_paths: Collection[str] = ()) -> FoundNodes:
    """Returns the nodes of `pg` that match all terms of a query (`notebook/search/query.py`), in order of execution.

    Example:
        >>> import torch
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()), torch.ones(1, 2))
        >>> find(pg, "shape:[1,3] -op:relu").paths
        ['sub_0.linear', 'sub_0.output', 'sub_1.input', 'sub_1.output', 'output']
    """
    terms = parse_query(query)
    index = index_of(pg)
    patched = frozenset(patched_paths)
    asks_for_sizes = any(term.kind == "is" and term.value == "size" for term in terms if not term.is_excluded)
    columns = index.all_nodes if asks_for_sizes else index.without_sizes
    rows = columns.matching(terms, patched)
    return FoundNodes(query, columns, rows, lambda: _hints(index, terms, patched))


# --------------------------------------------------------------------------------------------------------------------
# Properties of nodes


class NodeColumns:
    """The properties of the nodes of a capture that terms test: one list a property, computed at its first use."""

    def __init__(self, rows: NodeRows) -> None:
        self.rows = rows

    @cached_property
    def texts(self) -> list[str]:
        """The path and the torch function of each node, in lower case, separated by a line break."""
        return [f"{path}\n{op}".lower() for path, op in zip(self.rows.paths, self.ops, strict=True)]

    @property
    def component_names(self) -> dict[str, str]:
        """The names of the components in lower case, by path. Finding them takes time, so few queries ask for them."""
        return _component_names(self.rows.frames[0].root) if self.rows.frames else {}

    @cached_property
    def ops(self) -> list[str]:
        """The names of the torch functions in lower case; empty for nodes that are not ops."""
        return [n.op.lower() if n.kind == "op" else "" for n in self.rows.nodes]

    @cached_property
    def module_classes(self) -> list[str]:
        """The class names of the modules that contain the nodes, in lower case."""
        return [type(frame.module).__name__.lower() for frame in self.rows.frames]

    @cached_property
    def dtypes(self) -> list[str]:
        """The names of the dtypes, such as `float32`; empty for values that are not tensors."""
        return [dtype_name(spec.dtype) if isinstance(spec, TensorSpec) else "" for spec in self.rows.specs]

    def words_from(self, prefix: str) -> list[str]:
        """Returns the names in paths and of torch functions that begin with `prefix`, unless they need quotes."""
        names = {name for path in self.rows.paths for name in path.split(".")} | {*self.ops}
        return sorted(name for name in names if name.startswith(prefix) and re.fullmatch(r"[^\W\d][\w.]*", name))

    def matching(self, terms: Sequence[Term], patched: Set[str]) -> list[int]:
        """Returns the positions of the nodes that match all terms."""
        positions: Sequence[int] = range(len(self.rows.paths))
        for term in terms:
            if not positions:
                break
            has = self._test(term, patched)
            is_wanted = not term.is_excluded
            positions = [position for position in positions if has(position) is is_wanted]
        return list(positions)

    def _test(self, term: Term, patched: Set[str]) -> Callable[[int], bool]:
        """Returns a function of a position: whether the node there matches the term, ignoring `is_excluded`."""
        value: Any = term.value
        rows, paths = self.rows, self.rows.paths
        match term.kind:
            case "text":
                texts, names, parts = self.texts, self.component_names, value.split("*")
                meant = self._paths_of_components(value)
                if len(parts) > 1:
                    return lambda at: has_parts(f"{texts[at]}\n{names.get(paths[at], '')}", parts) or paths[at] in meant
                meant |= {path for path, own in names.items() if value in own}
                return lambda at: value in texts[at] or paths[at] in meant
            case "exact":
                meant = self._paths_of_components(value)
                found = find_components(rows.frames[0].root) if rows.frames else {}
                meant |= {found[name].path for name in found if has_names(name, value)}
                return lambda at: has_names(paths[at], value) or paths[at] in meant
            case "op":
                return is_among(self.ops, value)
            case "module":
                return is_among(self.module_classes, value)
            case "dtype":
                return is_among(self.dtypes, value)
            case "shape":
                specs = rows.specs
                return lambda at: isinstance(spec := specs[at], TensorSpec) and matches_sizes(value, spec.shape)
            case "is":
                return self._state_test(value, patched)

    def _paths_of_components(self, text: str) -> set[str]:
        """Returns the paths of the components that a name with numbers means, such as `layers[-1].attn.heads[2].z`."""
        if not is_component_name(text):
            return set()
        try:
            return {component.path for component in find_components(self.rows.frames[0].root).lookup(text)}
        except (UnknownPathError, IndexError):  # the hints say why
            return set()

    def _state_test(self, state: str, patched: Set[str]) -> Callable[[int], bool]:
        rows = self.rows
        match state:
            case "patched":
                return lambda at: rows.paths[at] in patched
            case "opaque":
                return lambda at: rows.frames[at].opaque_reason is not None
            case "size":
                return lambda at: rows.nodes[at].is_size
            case "tensor":
                return lambda at: isinstance(rows.specs[at], TensorSpec)
            case "number":
                return lambda at: isinstance(rows.specs[at], ScalarSpec)
            case _:
                return lambda at: rows.nodes[at].kind == state


def _component_names(root: Frame) -> dict[str, str]:
    """Returns the names of the components in lower case by path, separated by line breaks; they are found once."""
    findings = root.capture.findings
    if _component_names not in findings:
        found: dict[str, str] = {}
        for name, component in find_components(root).items():
            before = f"{found[component.path]}\n" if component.path in found else ""
            found[component.path] = before + name.lower()
        findings[_component_names] = found
    return cast(dict[str, str], findings[_component_names])


class NodeIndex:
    """The properties of the nodes of one capture, computed when the first query needs them."""

    def __init__(self, nodes: NodeMap) -> None:
        self.nodes = nodes

    @cached_property
    def all_nodes(self) -> NodeColumns:
        """All nodes that can be patched."""
        return NodeColumns(NodeRows.of(self.nodes.root, with_sizes=True))

    @cached_property
    def without_sizes(self) -> NodeColumns:
        """The nodes that carry more than sizes."""
        return NodeColumns(NodeRows.of(self.nodes.root, with_sizes=False))

    @cached_property
    def sizes(self) -> NodeColumns:
        """The nodes that carry only sizes."""
        return NodeColumns(NodeRows.of(self.nodes.root, only_sizes=True))

    def prepare(self) -> None:
        """Computes the texts that plain words are searched in, so that the first query does not wait for them."""
        for columns in (self.without_sizes, self.sizes):
            _ = columns.texts


def index_of(pg: PatchableGraph) -> NodeIndex:
    """Returns the index of `pg`. It is cached, and computed again when the graphs are edited."""
    return kept_for(pg.nodes, NodeIndex)


# --------------------------------------------------------------------------------------------------------------------
# The table


class _Metas(Sequence[NodeMeta]):
    """The `NodeMeta` of some rows, created when they are read."""

    def __init__(self, rows: NodeRows, positions: Sequence[int]) -> None:
        self._rows, self._positions = rows, positions

    @overload
    def __getitem__(self, position: int) -> NodeMeta: ...

    @overload
    def __getitem__(self, position: slice) -> Sequence[NodeMeta]: ...

    def __getitem__(self, position: int | slice) -> NodeMeta | Sequence[NodeMeta]:
        if isinstance(position, slice):
            return list(map(self._rows.meta, self._positions[position]))
        return self._rows.meta(self._positions[position])

    def __len__(self) -> int:
        return len(self._positions)


def _cells(meta: NodeMeta) -> list[str]:
    value = value_label(meta.shape, meta.dtype, meta.value)
    return [meta.path, op_label(meta.kind, meta.op), value, source_label(meta.source_lines, meta.module_class)]


def _hints(index: NodeIndex, terms: Sequence[Term], patched: Set[str]) -> Iterator[str]:
    """Yields suggestions for a query that finds nothing."""
    if hidden := index.sizes.matching(terms, patched):
        yield f"{len(hidden):,} found that only carry sizes: add is:size"
        return
    columns = index.without_sizes
    ops = sorted({*columns.ops} - {""})
    for term in terms:
        if term.kind not in ("text", "exact", "op") or term.is_excluded or columns.matching([term], patched):
            continue
        value = str(term.value)
        if value.lower() in _INSIDE and (fused := FUSED_ATTENTION & {*ops}):
            shown = ", ".join(dict.fromkeys(node.name for node in columns.rows.nodes if node.is_inner))
            closed = ", and not shown: leave decompose out of the ExtractionOptions"
            yield f"it is computed inside {min(fused)}" + (f": see {shown}" if shown else closed)
        if value in NODE_KINDS:
            yield f"{value} is a kind of node, not a torch function: write is:{value}"
        elif term.kind == "op":
            yield f"no torch function is named {value}; nearest: {', '.join(nearest(value, ops))}"
        elif is_component_name(value):
            try:
                find_components(index.nodes.root).lookup(value)
            except UnknownPathError as error:
                yield str(error)
        else:
            close = nearest_paths(index.nodes.root, ParsedPath(tuple(re.split(r"[.|]", value))))
            yield f"no path or torch function contains {value}" + (f"; nearest: {', '.join(close)}" if close else "")


_INSIDE = INSIDE_ATTENTION | {"softmax"}


# --------------------------------------------------------------------------------------------------------------------
# Matching of paths and names


def has_names(path: str, wanted: str) -> bool:
    """Whether `path` contains `wanted`, one or more whole names separated by dots.

    Example:
        >>> has_names("h_0.mlp.act.mul", "mlp.act"), has_names("h_0.mlp.act", "ml"), has_names('out|"a.b"', "a.b")
        (True, False, True)
    """
    if '"' not in path:
        return wanted in path and f".{wanted.replace('|', '.')}." in f".{path.replace('|', '.')}."
    parsed = parse_path(path)
    names = [*parsed.names, *parsed.dig]
    parts = re.split(r"[.|]", wanted)
    return wanted in names or any(names[i : i + len(parts)] == parts for i in range(len(names)))


def has_parts(text: str, parts: Iterable[str]) -> bool:
    """Whether `text` contains all parts in this order: a pattern with `*` between the parts.

    Example:
        >>> has_parts("h_0.mlp.act", ["h_", ".act"]), has_parts("h_0.mlp.act", ["act", "mlp"])
        (True, False)
    """
    start = 0
    for part in parts:
        found = text.find(part, start)
        if found < 0:
            return False
        start = found + len(part)
    return True


def is_among(names: Sequence[str], pattern: str) -> Callable[[int], bool]:
    """Returns a function of a position: whether the name there matches the pattern. `*` matches any text."""
    parts = pattern.split("*")
    wanted = {name for name in set(names) if name and _is_made(name, parts)}
    return lambda at: names[at] in wanted


def _is_made(name: str, parts: Sequence[str]) -> bool:
    """Whether a name consists of these parts in this order, with any text between them."""
    if len(parts) == 1:
        return name == parts[0]
    first, *middle, last = parts
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    return has_parts(name[len(first) : len(name) - len(last)], middle)
