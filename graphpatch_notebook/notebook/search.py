"""Finds the nodes of a capture that match a query, for `%graphpatch find` and the search field of the widget.

| term | finds nodes |
| --- | --- |
| `attn` | whose path, torch function or component name (`layers[3].attn.q`) contains this text, ignoring case |
| `h_*.attn` | that contain these texts in this order; in all terms, `*` is any text |
| `op:mul` | computed by this torch function; also `op:*norm` |
| `shape:64` | that are tensors with a dimension of this size |
| `shape:[1,*,64]` | that are tensors of this shape; `*` is any size |
| `is:parameter` | of this kind; `is:patched`, `is:opaque` (in a graph that is opaque), `is:size`, ... |
| `-term` | that do not match the term |

A node must match all terms of a query. Values that only carry sizes are found with `is:size` only. The front end has
the same grammar (js/src/tree/search.ts); tests/notebook/search/test_search_parity.py compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graphpatch_notebook.components import find as find_components
from graphpatch_notebook.inspection.resolution import NodeMap, NodeMeta, NodeRows, Unresolvable, kept_for, resolve
from graphpatch_notebook.notebook.display.tables import Column, Table, source_label, value_label, visible
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.paths import nearest
from graphpatch_notebook.values import ScalarSpec, TensorSpec

STATES = "patched opaque size tensor number input parameter buffer attribute op output".split()
KEYS = {"op": "op:mul", "shape": "shape:64", "is": "is:parameter"}
"""The keys of terms, each with an example."""

_TERM = re.compile(r"(-?)(shape:\[[^\]]*\](?!\S)|\S+)", re.IGNORECASE)
_KEY = re.compile(r"([A-Za-z]+):(.*)", re.DOTALL)
_SHAPE = re.compile(r"[0-9]+|\*|\[\s*(?:(?:[0-9]+|\*)\s*(?:,\s*|(?=\])))*\]")


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a query."""

    key: str  # one of `KEYS`, or `text`
    value: str
    is_excluded: bool = False


def parse_query(text: str) -> list[Term]:
    """Returns the terms of a query.

    Raises:
        ValueError: The text is not a valid query. The message is one line and suggests a correction.

    Example:
        >>> parse_query("mlp -op:mul")
        [Term(key='text', value='mlp', is_excluded=False), Term(key='op', value='mul', is_excluded=True)]
    """
    return [_term(word, bool(minus)) for minus, word in _TERM.findall(text)]


def _term(word: str, is_excluded: bool) -> Term:
    match = _KEY.fullmatch(word)
    if match is None:
        if word == "-":
            raise ValueError("there is nothing after '-': write -term to leave out what the term finds")
        return Term("text", word, is_excluded)
    key, value = match[1].lower(), match[2]
    shown = visible(word)
    if key not in KEYS:
        raise ValueError(f"unknown search key in {shown!r}: keys are {', '.join(KEYS)}; for the text write *{shown}")
    if not value or (key == "shape" and not _SHAPE.fullmatch(value)):
        raise ValueError(f"{shown!r} is not a search; write {KEYS[key]}" + ", or shape:[1,*,64]" * (key == "shape"))
    if key == "is" and value.lower() not in STATES:
        close = nearest(value.lower(), STATES, 1)[0]
        raise ValueError(f"unknown state {shown!r}; nearest: is:{close}; there are {', '.join(STATES)}")
    return Term(key, value, is_excluded)


# --------------------------------------------------------------------------------------------------------------------
# The nodes of a capture


class NodeIndex:
    """The nodes of a capture that can be patched, with the texts that terms are searched in."""

    def __init__(self, nodes: NodeMap) -> None:
        self.root = nodes.root
        self.rows = NodeRows(nodes.root)
        self.ops = [node.op.lower() if node.kind == "op" else "" for node in self.rows.nodes]
        self._texts = [f"{path}\n{op}".lower() for path, op in zip(self.rows.paths, self.ops, strict=True)]
        self._sizes = [at for at, node in enumerate(self.rows.nodes) if node.is_size]
        self._others = [at for at, node in enumerate(self.rows.nodes) if not node.is_size]

    @cached_property
    def texts(self) -> list[str]:
        """The path, torch function and component names of each node, in lower case. Finding components takes time."""
        names: dict[str, str] = {}
        for name, component in find_components(self.root).items():
            names[component.path] = f"{names.get(component.path, '')}\n{name.lower()}"
        return [text + names.get(path, "") for path, text in zip(self.rows.paths, self._texts, strict=True)]

    def words_from(self, prefix: str) -> list[str]:
        """Returns the names in paths and of torch functions that begin with `prefix`."""
        names = {name for at in self._others for name in (self.ops[at], *self.rows.paths[at].split("."))}
        return sorted(name for name in names if name.startswith(prefix) and re.fullmatch(r"[^\W\d][\w.]*", name))

    def matching(
        self, terms: Sequence[Term], patched: Set[str] = frozenset(), *, only_sizes: bool = False
    ) -> list[int]:
        """Returns the positions of the nodes that match all terms; with `only_sizes`, the values that carry sizes."""
        asks_for_sizes = any(
            not term.is_excluded and (term.key, term.value.lower()) == ("is", "size") for term in terms
        )
        positions = self._sizes if only_sizes or asks_for_sizes else self._others
        for term in terms:
            if not positions:
                break
            has = self._test(term, patched)
            positions = [at for at in positions if has(at) is not term.is_excluded]
        return positions

    def _test(self, term: Term, patched: Set[str]) -> Callable[[int], bool]:
        """Returns a function of a position: whether the node there matches the term, ignoring `is_excluded`."""
        rows, value = self.rows, term.value.lower()
        nodes, specs = rows.nodes, rows.specs
        match term.key, value:
            case "text", _:
                texts, parts = self.texts, value.split("*")
                return lambda at: has_parts(texts[at], parts)
            case "op", _:
                ops, parts = self.ops, f"\n{value}\n".split("*")  # a whole name
                wanted = {op for op in {*ops} if op and has_parts(f"\n{op}\n", parts)}
                return lambda at: ops[at] in wanted
            case "shape", _:
                sizes = re.findall(r"[0-9]+|\*", value)
                return lambda at: (
                    isinstance(spec := specs[at], TensorSpec) and _fits(spec.shape, sizes, value[0] == "[")
                )
            case _, "patched":
                return lambda at: rows.paths[at] in patched
            case _, "opaque":
                return lambda at: rows.frames[at].opaque_reason is not None
            case _, "size":
                return lambda at: nodes[at].is_size
            case _, "tensor" | "number":
                kind = TensorSpec if value == "tensor" else ScalarSpec
                return lambda at: isinstance(specs[at], kind)
        return lambda at: nodes[at].kind == value


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


def _fits(shape: Sequence[int], sizes: Sequence[str], is_whole: bool) -> bool:
    if is_whole:
        return len(shape) == len(sizes) and all(one in ("*", str(size)) for one, size in zip(sizes, shape, strict=True))
    return len(shape) > 0 and (sizes == ["*"] or int(sizes[0]) in shape)


def index_of(pg: PatchableGraph) -> NodeIndex:
    """Returns the index of `pg`. It is cached, and computed again when the graphs are edited."""
    return kept_for(pg.nodes, NodeIndex)


# --------------------------------------------------------------------------------------------------------------------
# The table


_COLUMNS = (
    Column("path"),
    Column("op", "graph", is_cut=True),
    Column("value", "tensor"),
    Column("source", "note", is_cut=True),
)


class FoundNodes(Table[NodeMeta]):
    """The nodes that match a query, in order of execution: a sequence of `NodeMeta` that displays as a table."""

    def __init__(self, query: str, rows: NodeRows, positions: Sequence[int], notes: Iterable[str] = ()) -> None:
        super().__init__(
            _COLUMNS,
            _Metas(rows, positions),
            _cells,
            title=f"{len(positions):,} node{'s' * (len(positions) != 1)}" + (f" for {query}" if query.strip() else ""),
            notes=notes,
            empty="nothing found" if query.strip() else "no nodes",
            how_to_narrow="narrow the query",
        )
        self.query = query
        self.paths = [rows.paths[position] for position in positions]
        """The paths of all found nodes, as `pg.patch` takes them."""


def find(pg: PatchableGraph, query: str, patched_paths: Collection[str] = ()) -> FoundNodes:
    """Returns the nodes of `pg` that match all terms of a query, in order of execution.

    Example:
        >>> import torch
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()), torch.ones(1, 2))
        >>> find(pg, "shape:[1,3] -op:relu").paths
        ['sub_0.linear', 'sub_0.output', 'sub_1.input', 'sub_1.output', 'output']
    """
    terms, index, patched = parse_query(query), index_of(pg), frozenset(patched_paths)
    found = index.matching(terms, patched)
    return FoundNodes(query, index.rows, found, () if found else [*_hints(index, terms)])


class _Metas(Sequence[NodeMeta]):
    """The `NodeMeta` of some rows, created when they are read."""

    def __init__(self, rows: NodeRows, positions: Sequence[int]) -> None:
        self._rows, self._positions = rows, positions

    def __getitem__(self, position: Any) -> Any:
        chosen = self._positions[position]
        return self._rows.meta(chosen) if isinstance(chosen, int) else list(map(self._rows.meta, chosen))

    def __len__(self) -> int:
        return len(self._positions)


def _cells(meta: NodeMeta) -> list[str]:
    value = value_label(meta.shape, meta.dtype, meta.value)
    return [
        meta.path,
        meta.op if meta.kind == "op" else meta.kind,
        value,
        source_label(meta.source_lines, meta.module_class),
    ]


def _hints(index: NodeIndex, terms: Sequence[Term]) -> Iterator[str]:
    """Yields why the names in a query that finds nothing lead nowhere: `terms` match no node together."""
    for term in terms:
        if term.key == "text" and not term.is_excluded and (len(terms) == 1 or not index.matching([term])):
            try:
                yield f"{term.value} is {resolve(index.root, term.value).path}: find that"
            except Unresolvable as problem:
                yield problem.message
