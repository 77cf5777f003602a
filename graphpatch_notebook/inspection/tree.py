"""The tree of a capture, in lines: which nodes it shows, and which it folds if there are too many.

Frame or ValueSpec
  -> TreeEntry         a node, its label, its children    (`frame_entry`, `spec_entry`)
  -> Line ...          cut to a number of lines           (`tree_lines`)
  -> str, HTML                                            (`plain`, `colored`, `html`)

Plumbing: masks, indices, positions and flags, which prepare what a model computes, and which trees fold away.

Integers and booleans are plumbing. A tensor of floating-point numbers is, if it is computed from plumbing alone (a mask
that is added to scores), and if no linear map and no output of the model reads it: an image of bytes is not.
"""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch.nn import Module, ModuleDict, ModuleList, Sequential

from graphpatch_notebook.capture.inputs import passed_on
from graphpatch_notebook.capture.records import CallNode, Frame, Node, Ref, once_a_capture, refs_in
from graphpatch_notebook.components.operations import CREATIONS, LINEAR_MAPS, PRODUCTS
from graphpatch_notebook.paths import format_segment
from graphpatch_notebook.values import ContainerSpec, ObjectSpec, ScalarSpec, TensorSpec, UnknownSpec, ValueSpec, leaves

_WHOLE = frozenset([torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
_WEIGHTED = LINEAR_MAPS | PRODUCTS | {"embedding", "conv_transpose1d", "conv_transpose2d"}
_CREATIONS = CREATIONS | frozenset(
    "tensor scalar_tensor new_tensor full new_full full_like ones new_ones ones_like eye arange linspace".split()
)


@once_a_capture
def plumbing(root: Frame) -> Set[int]:
    """Returns the ids of the nodes of a capture that are plumbing; each capture is searched once.

    The tensors that the model is given, parameters, and what the model returns are never plumbing; the call of a module
    is, if everything in it is.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> class Masked(torch.nn.Module):
        ...     def forward(self, x):
        ...         mask = torch.ones(2, dtype=torch.bool)
        ...         bias = (~mask).float()
        ...         return x + bias
        >>> frame = PatchableGraph(Masked(), torch.ones(2)).nodes.root
        >>> found = plumbing(frame)
        >>> [node.name for node in frame.nodes if id(node) in found]
        ['mask', 'invert', 'bias']
    """
    search = _Search()
    search.sort_frame(root)
    return search.result() - {id(ref.node) for ref in refs_in(root.output)}


class _Search:
    """The search in one capture.

    Attributes:
        found: The ids of what is plumbing, or was given to the model as integers (`given`).
        made_of: Of the plumbing of floating-point numbers: what it is computed from.
        read: What linear maps read, and what frames return: not plumbing, if it is in `made_of`.
    """

    def __init__(self) -> None:
        self.found: set[int] = set()
        self.given: set[int] = set()
        self.made_of: dict[int, list[Node]] = {}
        self.read: list[Node] = []

    def result(self) -> set[int]:
        """Returns the ids of the plumbing, without values that other nodes read, and without the sources of these."""
        found, left = self.found - self.given, self.read
        while left:
            node = left.pop()
            if id(node) in found and id(node) in self.made_of:
                found.remove(id(node))
                left += self.made_of[id(node)]
        return found

    def sort_frame(self, frame: Frame) -> bool:
        """Finds the plumbing of a frame. Returns whether everything in the frame is plumbing."""
        is_all, found, before = True, self.found, len(self.made_of)
        for node in frame.nodes:
            kind = node.kind
            if kind == "output":
                continue
            if kind == "op" and node.op in _WEIGHTED:
                is_all = False
                if len(self.made_of) > before:
                    self.read += _sources(node)
            elif self._is_plumbing_call(node) if kind == "call" else self._is_plumbing(node, frame):
                found.add(id(node))
            elif kind != "constant":
                is_all = False
        if not is_all and len(self.made_of) > before:
            self.read += [ref.node for ref in refs_in(frame.output)]
        return is_all and len(frame.nodes) > 1

    def _is_plumbing_call(self, node: Node) -> bool:
        if not isinstance(node, CallNode) or not self.sort_frame(node.frame):
            return False
        returned = [ref.node for ref in refs_in(node.frame.output)]
        if any(id(one) in self.made_of for one in returned):
            self.made_of[id(node)] = returned
        return True

    def _is_plumbing(self, node: Node, frame: Frame) -> bool:
        kind, spec = node.kind, node.spec
        if kind == "parameter" or node.is_size:
            return node.is_size
        is_given = kind == "input" and frame.parent is None
        if type(spec) is TensorSpec:  # most nodes
            if spec.dtype in _WHOLE:
                if is_given:
                    self.given.add(id(node))
                return True
        elif not (inside := [leaf for _, leaf in leaves(spec)]):
            return False
        elif all(map(_is_whole, inside)):
            return True
        made_of = self._op_sources(node) if kind == "op" else _given_to(node, frame) if kind == "input" else None
        if made_of is None or not all(id(one) in self.found for one in made_of):
            return False
        self.made_of[id(node)] = made_of
        return True

    def _op_sources(self, node: Node) -> list[Node] | None:
        """Returns the values that an op is computed from; `None` if the op cannot be plumbing."""
        first = node.args[0] if node.args else None
        if type(first) is Ref and id(first.node) not in self.found:  # most ops; finding all sources takes long
            return None
        sources = _sources(node)
        return sources if sources or node.op in _CREATIONS else None


def _sources(node: Node) -> list[Node]:
    return [ref.node for ref in node.whole.sources]


def _given_to(node: Node, frame: Frame) -> list[Node] | None:
    """Returns the nodes of the caller that an input holds; `None` if it does not hold any."""
    given = passed_on(node, frame)
    return [ref.node for ref in refs_in(given[0])] or None if given is not None else None


def _is_whole(spec: ValueSpec) -> bool:
    if isinstance(spec, TensorSpec):
        return spec.dtype in _WHOLE
    return isinstance(spec, ScalarSpec) and isinstance(spec.value, int)


MAX_LINES = 200
# The longest group of nodes that is checked for repetition (layers with the ops between them, loops).
_LONGEST_PERIOD = 24
# Ops without a graph between them are folded only in a graph of so many nodes, and if they repeat so many times.
_LONG_GRAPH, _MANY_TIMES = 40, 4

Style: TypeAlias = Literal["name", "graph", "tensor", "container", "number", "object", "note", "line"]


@dataclass(slots=True)  # not frozen: setting its fields would take longer, and there is one for each node
class TreeEntry:
    """One node of the tree.

    Attributes:
        name: Its name, as a path writes it.
        label: The text behind the name.
        style: The style of the label, for its color.
        is_plumbing: Whether it prepares what the model computes: masks, indices, positions.
        size: How many entries there are from here on down.
        pattern: Equal for entries that look the same but for their own name.
    """

    name: str
    label: str
    style: Style
    children: tuple[TreeEntry, ...] = ()
    is_plumbing: bool = False
    size: int = field(init=False)
    pattern: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = 1 + sum([child.size for child in self.children])
        self.pattern = hash((self.label, *[(child.name, child.pattern) for child in self.children]))


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the tree, in parts with separate colors."""

    branch: str
    name: str
    label: str
    style: Style
    note: str = ""

    def parts(self) -> list[tuple[str, Style]]:
        """Returns the texts that make up the line."""
        label = f": {self.label}" if self.label and self.name else self.label
        return [
            p for p in ((self.branch, "line"), (self.name, "name"), (label, self.style), (self.note, "note")) if p[0]
        ]


# --------------------------------------------------------------------------------------------------------------------
# What is shown


def frame_entry(frame: Frame, name: str, *, show_all: bool = False) -> TreeEntry:
    """Returns the entry of a frame with everything that the tree shows of it.

    With `show_all`, these are also values that only carry sizes, constants, and inputs that the example did not have.
    """
    return _FrameEntries(plumbing(frame.root), show_all).of_frame(frame, name)


@dataclass(frozen=True, slots=True)
class _FrameEntries:
    """Makes the entries of frames, and of the frames below."""

    plumbing: Set[int]
    show_all: bool

    def of_frame(self, frame: Frame | None, name: str, is_plumbing: bool = False) -> TreeEntry:
        nodes = () if frame is None else (node for node in frame.nodes_and_splices if self.show_all or is_shown(node))
        return TreeEntry(name, _label_of(frame), "graph", tuple(map(self.of_node, nodes)), is_plumbing)

    def of_node(self, node: Node) -> TreeEntry:
        name, is_plumbing = format_segment(node.name), id(node) in self.plumbing
        if node.kind == "call":
            return self.of_frame(node.frame if isinstance(node, CallNode) else None, name, is_plumbing)
        entry = spec_entry(node.spec, name, show_all=self.show_all)
        entry.is_plumbing = is_plumbing
        return entry


def _label_of(frame: Frame | None) -> str:
    """Returns the class of a module, with the kind of its graph unless that is captured and whole."""
    if frame is None:
        return "opaque"
    kinds = {
        "opaque": frame.opaque_reason is not None,
        "edited graph": frame.is_edited,
        "custom graph": frame.custom_graph is not None and not getattr(type(frame.module), "is_loaded", False),
    }
    kind = next((f" ({kind})" for kind, is_it in kinds.items() if is_it), "")
    return type(frame.module).__name__ + kind


def spec_entry(spec: ValueSpec, name: str, *, show_all: bool = False) -> TreeEntry:
    """Returns the entry of a value: containers are opened, and without `show_all`, `None` and strings are left out."""
    inside: Iterable[TreeEntry] = ()
    if isinstance(spec, ContainerSpec):
        inside = (
            spec_entry(child, format_segment(text), show_all=show_all)
            for text, _, child in spec.children
            if show_all or not is_clutter(child)
        )
    return TreeEntry(name, str(spec), _style_of(spec), tuple(inside))


def is_shown(node: Node) -> bool:
    """Whether the tree shows `node` by default."""
    if node.kind in ("call", "output"):
        return True
    if node.kind == "input" and _is_flag(node.spec):
        return False
    return not node.is_size and node.kind != "constant" and not is_clutter(node.spec)


def is_clutter(spec: ValueSpec) -> bool:
    """Whether the value has no part to show or to patch."""
    if isinstance(spec, ContainerSpec):
        return all(is_clutter(child) or _is_flag(child) for _, _, child in spec.children)
    return isinstance(spec, ObjectSpec) or (isinstance(spec, ScalarSpec) and not spec.is_number)


def _is_flag(spec: ValueSpec) -> bool:
    # `use_cache`, `output_attentions`: most transformers have them as inputs, and they hide the interesting ones.
    return isinstance(spec, ScalarSpec) and isinstance(spec.value, bool)


def _style_of(spec: ValueSpec) -> Style:
    if isinstance(spec, TensorSpec):
        return "tensor"
    if isinstance(spec, ContainerSpec):
        return "container"
    return "object" if isinstance(spec, (ObjectSpec, UnknownSpec)) or not spec.is_number else "number"


# --------------------------------------------------------------------------------------------------------------------
# What is folded


@dataclass(slots=True)
class Row:
    """What a line shows: an entry, or a run of entries that look like earlier ones.

    `note` is the text behind the label of the entry; for a run, it is the whole text. `rows` are directly below.
    """

    entry: TreeEntry
    note: str = ""
    run: tuple[TreeEntry, ...] = ()
    rows: list[Row] = field(default_factory=list)


def opened(entry: TreeEntry, max_lines: int | None = MAX_LINES, depth: int | None = None) -> Row:
    """Returns the tree of `entry`, cut to a number of lines: each row has the rows below it."""
    top = Row(entry)
    is_small = depth is None and (max_lines is None or entry.size <= max_lines)
    _open_breadth_first(top, None if is_small else max_lines, depth)
    return top


def tree_lines(
    entry: TreeEntry, *, path: str, max_lines: int | None = MAX_LINES, depth: int | None = None
) -> list[Line]:
    """Returns the lines of the tree of `entry`.

    A tree of more than `max_lines` is cut: runs of graphs that look the same are folded into one line, then the
    deepest graphs are closed, and the last line says how to see more.

    Args:
        entry: The root of the tree.
        path: Its Python expression (`pg.graph.h_0`), for that last line.
        max_lines: The maximum number of lines; `None` for all.
        depth: How many levels below the root to open; `None` for all.
    """
    is_whole = depth is None and (max_lines is None or entry.size <= max_lines)
    top = opened(entry, max_lines, depth)
    lines: list[Line] = []
    _draw(top, "", "", lines)
    if not is_whole and (hidden := entry.size - len(lines) + _stand_in_lines(top)) > 0:
        more = f"… {_nodes(hidden, 'more ')}: {path}._tree(max_lines=None) shows them, pg.nodes lists all"
        lines.append(Line("", "", "", "note", more))
    return lines


def _open_breadth_first(top: Row, max_lines: int | None, depth: int | None) -> None:
    # The levels near the root are opened first, as they say most; what does not fit stays closed.
    queue = deque([(top, 0)])
    left = float("inf") if max_lines is None else max_lines - 2
    while queue:
        row, level = queue.popleft()
        if row.run or not row.entry.children:
            continue
        rows = _folded(row.entry.children) if max_lines is not None else [Row(c) for c in row.entry.children]
        if depth is not None and level >= depth and row.entry.style == "graph":
            rows = []
        elif level == 0 and len(rows) > left:
            rows = _without_middle(rows, int(left))
        if not rows or len(rows) > left:
            row.note = f" … {_nodes(row.entry.size - 1)}"
            continue
        left -= len(rows)
        row.rows = rows
        queue.extend((child, level + 1) for child in rows)


def _folded(entries: Sequence[TreeEntry]) -> list[Row]:
    """Returns a row for each entry, but one row for the plumbing, and one for each group of entries that repeats."""
    aside = tuple(entry for entry in entries if entry.is_plumbing)
    if not 2 <= len(aside) < len(entries):
        return _folded_runs(entries)
    note = f"plumbing: {_nodes(len(aside))} ({aside[0].name} … {aside[-1].name})"
    return [Row(aside[0], run=aside, note=note), *_folded_runs([entry for entry in entries if not entry.is_plumbing])]


def _folded_runs(entries: Sequence[TreeEntry]) -> list[Row]:
    """Returns a row for each entry, but one row for all repetitions of a group of entries."""
    keys = [(re.sub(r"_?\d+$", "", e.name), e.pattern) for e in entries]
    has_graph = [entry.style == "graph" for entry in entries]
    rows: list[Row] = []
    at = 0
    while at < len(entries):
        period, times = _repetition(keys, has_graph, at)
        rows += map(Row, entries[at : at + period])
        if times > 1:
            again = tuple(entries[at + period : at + period * times])
            rows.append(Row(again[0], run=again, note=_run_note(entries[at : at + period], again)))
        at += period * times
    return rows


def _repetition(keys: Sequence[tuple[str, int]], has_graph: Sequence[bool], at: int) -> tuple[int, int]:
    """Returns the length of the group of entries that repeats from `at` on, and the number of repetitions."""
    for period in range(1, min(_LONGEST_PERIOD, (len(keys) - at) // 2) + 1):
        group = keys[at : at + period]
        times = 1
        while keys[at + period * times : at + period * (times + 1)] == group:
            times += 1
        if times > 1 and any(has_graph[at : at + period]):
            return period, times
        if times >= _MANY_TIMES and len(keys) >= _LONG_GRAPH:
            return period, times
    return 1, 1


def _run_note(group: Sequence[TreeEntry], again: Sequence[TreeEntry]) -> str:
    times = len(again) // len(group)
    same = f"(same as {group[0].name}{' … ' + group[-1].name if len(group) > 1 else ''})"
    if len(group) > 1:
        return f"{again[0].name} … {again[-1].name}: {times} × {same}"
    label = f"{group[0].label} " if group[0].label else ""
    if times == 1:
        return f"{again[0].name}: {label}{same}"
    return f"{again[0].name} … {again[-1].name}: {times} × {label}{same}"


def _without_middle(rows: list[Row], most: int) -> list[Row]:
    tail = most // 4
    gap = rows[most - tail - 1 : len(rows) - tail]
    entries = tuple(entry for row in gap for entry in (row.run or (row.entry,)))
    return [
        *rows[: most - tail - 1],
        Row(entries[0], run=entries, note=f"… {_nodes(len(entries))}"),
        *rows[len(rows) - tail :],
    ]


def _stand_in_lines(row: Row) -> int:
    return bool(row.run) + sum(map(_stand_in_lines, row.rows))


def _nodes(count: int, which: str = "") -> str:
    return f"{count:,} {which}node{'s' * (count != 1)}"


# --------------------------------------------------------------------------------------------------------------------
# How it is drawn


def _draw(row: Row, branch: str, indent: str, lines: list[Line]) -> None:
    entry = row.entry
    lines.append(
        Line(branch, "", row.note, "note") if row.run else Line(branch, entry.name, entry.label, entry.style, row.note)
    )
    for position, child in enumerate(row.rows):
        is_last = position == len(row.rows) - 1
        _draw(child, indent + ("└─" if is_last else "├─"), indent + ("  " if is_last else "│ "), lines)


def is_color_terminal() -> bool:
    """Whether the standard output is a terminal that shows colors."""
    is_terminal = bool(getattr(sys.stdout, "isatty", bool)())
    return is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def css_color(color: str) -> str:
    """Returns the CSS declarations of a text color that can be read on a light and on a dark page.

    No color has enough contrast (4.5) to both white and black, so it is mixed with the text color of the page: darker
    on a light page, lighter on a dark one. Browsers that cannot mix show the color itself, with contrast 4 to both.
    """
    return f"color:{color};color:color-mix(in srgb,{color} 75%,currentColor)"


# For terminals, and for HTML.
_STYLES: dict[Style, tuple[str, str]] = {
    "name": ("", ""),
    "graph": ("\x1b[1;36m", f"{css_color('#2c7fb8')};font-weight:600"),
    "tensor": ("\x1b[32m", css_color("#3a8a4d")),
    "container": ("\x1b[33m", css_color("#a06a1c")),
    "number": ("\x1b[35m", css_color("#a05aa8")),
    "object": ("\x1b[35m", css_color("#a05aa8")),
    "note": ("\x1b[2m", "opacity:.7"),
    "line": ("\x1b[2m", "opacity:.5"),
}
_ANSI, CSS_STYLES = ({style: of[i] for style, of in _STYLES.items()} for i in range(2))


def plain(lines: Iterable[Line]) -> str:
    """Returns the tree as text."""
    return "\n".join("".join(text for text, _ in line.parts()) for line in lines)


def colored(lines: Iterable[Sequence[tuple[str, Style]]]) -> str:
    """Returns the parts of lines as text for a terminal, colored by ANSI codes."""
    return "\n".join("".join(_ansi(*part) for part in line) for line in lines)


def _ansi(text: str, style: Style) -> str:
    return f"{_ANSI[style]}{text}\x1b[0m" if _ANSI[style] else text


def html(lines: Iterable[Line]) -> str:
    """Returns the tree as HTML that needs no style sheet; all text is escaped."""
    body = "\n".join("".join(_span(*part) for part in line.parts()) for line in lines)
    return f'<pre style="line-height:1.25;white-space:pre;overflow-x:auto">{body}</pre>'


def _span(text: str, style: Style) -> str:
    import html as html_module  # a dictionary of all entities, for a tree that is shown

    escaped = html_module.escape(text)
    return f'<span style="{CSS_STYLES[style]}">{escaped}</span>' if CSS_STYLES[style] else escaped


def used_modules(root: Frame) -> set[int]:
    """Returns the ids of the modules that were called during the capture whose root frame is `root`."""
    return {id(frame.module) for frame in root.walk()}


def unused_modules(
    module: Module, used: Container[int], names: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Module]]:
    """Yields the submodules that were never called, the outermost of each, with the names that lead to them.

    Those inside of a submodule that was called are its own; empty containers are left out.

    Example:
        >>> model = ModuleDict({"used": Module(), "unused": Module(), "layers": ModuleList([Module()])})
        >>> [names for names, _ in unused_modules(model, {id(model), id(model["used"])})]
        [('unused',), ('layers',)]
    """
    for name, child in module.named_children():
        if id(child) in used:
            continue
        inside = [id(below) in used for below in child.modules()]
        if any(inside):
            yield from unused_modules(child, used, (*names, name))
        elif not (len(inside) == 1 and isinstance(child, (ModuleDict, ModuleList, Sequential))):
            yield (*names, name), child
