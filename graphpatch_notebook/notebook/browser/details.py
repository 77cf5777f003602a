"""The details of a row for the popup: notes, code, source lines, and the inputs and users of the value."""

from __future__ import annotations

import re
from collections.abc import Iterator

from graphpatch_notebook.capture.records import RECORD, CallNode, Frame, Node, Ref, SourceLine
from graphpatch_notebook.errors import GraphError, SessionError
from graphpatch_notebook.graphs import CompiledGraphModule
from graphpatch_notebook.inspection import data_flow
from graphpatch_notebook.inspection.node_path import Location, signature_line
from graphpatch_notebook.inspection.resolution import is_patchable
from graphpatch_notebook.notebook.browser.skeleton import PATCHABLE, Skeleton
from graphpatch_notebook.notebook.display.labels import file_label, visible
from graphpatch_notebook.notebook.messages import Details, Link, Source
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import (
    ContainerSpec,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    ValueSpec,
    dtype_name,
    key_text,
    leaves,
)

_MOST_LINES = 2_000


def details(pg: PatchableGraph, skeleton: Skeleton, row: int) -> Details:
    """Returns the details of a row. Does not run the model.

    Example:
        >>> import torch
        >>> from graphpatch_notebook.notebook.browser.skeleton import skeleton_of
        >>> pg = PatchableGraph(torch.nn.ReLU(), torch.ones(2))
        >>> found = details(pg, skeleton_of(pg), 2)
        >>> found.path, found.code, found.users
        ('relu', 'relu = torch.nn.functional.relu(input_1, inplace = False)', [Link(row=3, text='output')])
    """
    if not 0 <= row < len(skeleton):
        raise SessionError(f"unknown row {row}: the tree has {len(skeleton):,}; show the graph again")
    place = skeleton.place(row)
    if place is None:
        return _of_unused(skeleton, row)
    spec = place.spec if isinstance(place.spec, TensorSpec) else None
    return Details(
        row,
        place.path,
        skeleton.kind(row),
        list(_notes(place, skeleton, row)),
        None if spec is None else list(spec.shape),
        None if spec is None else dtype_name(spec.dtype),
        None if spec is None else str(spec.device),
        _code(pg, place),
        [_source(line) for line in _source_lines(place)],
        list(_links(data_flow.sources(place), place, skeleton)),
        list(_links(data_flow.users(place), place, skeleton)),
    )


def _of_unused(skeleton: Skeleton, row: int) -> Details:
    above = skeleton.path(skeleton.parent(row) or 0)
    note = (
        f"{skeleton.op(row)}: the run on the example inputs did not call this module of {above or 'the model'}, so it "
        "does not have a graph; if its parameters were used, they are nodes of the graph that used them"
    )
    return Details(row, ".".join(filter(None, (above, skeleton.name(row)))), "unused", [note])


# --------------------------------------------------------------------------------------------------------------------
# Notes


def _notes(place: Location, skeleton: Skeleton, row: int) -> Iterator[str]:
    notes: list[str | None] = []
    if place.graph is not None:
        notes = _notes_of_graph(place.graph)
    elif place.node is not None:
        notes = [_what(place, place.node), skeleton.note(row), *_notes_of_value(place, place.node, skeleton, row)]
    yield from (visible(note) for note in notes if note)


def _notes_of_graph(frame: Frame) -> list[str | None]:
    call, reason = frame.call, frame.opaque_reason
    is_repeated = call is not None and call.call_count > 1
    times = f", called {call.call_count} times; this is call {call.call_index + 1}" if call and is_repeated else ""
    runs = "this graph was edited: it runs" if frame.is_edited else "this graph runs"
    return [
        f"the graph of {type(frame.module).__name__}{times}",
        None if reason is None else f"opaque: {reason}; its inputs, its output and what it calls can be patched",
        frame.custom_failure,
        f"{runs} in place of the module" if frame.is_edited or frame.custom_graph is not None else None,
        "captured in train mode" if frame.conditions.training else None,
        *map(str, frame.doubts),
    ]


def _what(place: Location, node: Node) -> str:
    owner = type(place.frame.module).__name__
    if place.dig:
        words = node.spec.type.__name__ if isinstance(node.spec, ContainerSpec) else str(node.spec)
        return f"a value in the {words} that {format_path(place.names)} holds"
    match node.kind:
        case "op":
            call = node.composite
            opened = "" if call is None else f", a step of {call.name}" + ", which it opens" * call.is_fused
            return f"what {node.op} returned{opened}" if node.whole is node else f"a part of what {node.op} returned"
        case "output":
            return f"what {owner} returned"
        case "constant":
            return f"a constant in the code of {owner}"
        case "input" | "parameter" | "buffer" | "attribute":
            return f"the {node.kind} {node.target} of {owner}"
    return f"the {node.kind} {node.op} of {owner}"


def _notes_of_value(place: Location, node: Node, skeleton: Skeleton, row: int) -> list[str | None]:
    spec = place.spec
    has_tensors = any(isinstance(leaf, TensorSpec) for _, leaf in leaves(node.spec))
    why = "the code unpacks it" if has_tensors else "it only carries sizes"
    is_number = isinstance(spec, ScalarSpec) and spec.is_number
    placement = spec.placement if isinstance(spec, TensorSpec) else ""
    return [
        f"its value was {spec.value!r}" if isinstance(spec, ScalarSpec) and is_number else None,
        f"{why}: hidden from the tree, unless it is asked for" if node.is_size else None,
        _why_not_patchable(spec, node, bool(skeleton.flags(row) & PATCHABLE)),
        f"over the processes of the model: {placement}; its shape is that of the whole value" if placement else None,
        "the model writes into this tensor later, which overwrites the changes of a patch there"
        if node.is_mutated_later
        else None,
        "it is a view that the model writes into later: a patch detaches it from its base tensor"
        if node.is_view_filled_later
        else None,
    ]


def _why_not_patchable(spec: ValueSpec | None, node: Node, can_be_patched: bool) -> str | None:
    if not is_patchable(node) and node.kind != "constant":
        return "it cannot be patched: arithmetic on sizes happens in plain Python, where a patch cannot see it"
    if isinstance(spec, ContainerSpec):
        return f"a container ({spec}): patch the values in it"
    if not can_be_patched:
        what = "None" if str(spec) == "NoneType" else f"an object ({spec})"
        what = "a constant" if node.kind == "constant" else f"neither a tensor nor a number but {what}"
        return f"it cannot be patched: it is {what}"
    is_new = isinstance(spec, UnknownSpec)
    return "its value is not known yet: it was added to the graph and has not run" if is_new else None


# --------------------------------------------------------------------------------------------------------------------
# Code


def _code(pg: PatchableGraph, place: Location) -> str:
    modules, frame = captured(pg).hierarchy.modules(), place.graph or place.frame
    for module in modules:
        if isinstance(module, CompiledGraphModule) and module.frame is frame:
            try:
                return _beginning(module) if place.graph is not None else _line_of(module, place)
            except GraphError as error:
                return f"# {error}"
    return ""


def _beginning(module: CompiledGraphModule) -> str:
    """Returns the code of a graph, cut off after `_MOST_LINES` lines, since long code is slow to display."""
    lines = module.code.strip("\n").splitlines()
    more = len(lines) - _MOST_LINES
    if more <= 0:
        return "\n".join(lines)
    where = ".".join(filter(None, ("pg.graph", module.path, "_code")))
    return "\n".join([*lines[:_MOST_LINES], f"# ... {more:,} more lines: {where}"])


def _line_of(module: CompiledGraphModule, place: Location) -> str:
    """Returns the line of the code of a graph that computes the value of a node."""
    node, lines = place.node, module.code.strip("\n").splitlines()
    assert node is not None  # only the root graph does not have a node
    if node.kind == "input":
        return lines[0].strip()
    if node.kind == "output":
        return next((line.strip() for line in reversed(lines) if line.strip().startswith("return")), "")
    names = {n.name for n in module.graph.nodes if n.meta.get(RECORD) is node} or {node.name}
    makes = re.compile(rf"\s*(?:.*;  )?({'|'.join(map(re.escape, names))})(?: : [^=]+)? = ")
    # After two spaces, fx deletes values.
    return next((re.sub(r";  [\w\s=]+ = None$", "", line).strip() for line in lines if makes.match(line)), "")


def _source_lines(place: Location) -> list[SourceLine]:
    node = place.node
    if node is None:
        return []
    if node.site is not None:
        return node.site.source_lines()
    line = signature_line(place.frame.module) if node.kind in ("input", "output") else None
    return [line] if line is not None else []


def _source(line: SourceLine) -> Source:
    label = file_label(line.file)
    is_cell = label == "cell" or label.startswith("In[")
    return Source(visible(label if is_cell else line.file), line.line, visible(line.function), line.text)


# --------------------------------------------------------------------------------------------------------------------
# Links


def _links(refs: list[Ref], place: Location, skeleton: Skeleton) -> Iterator[Link]:
    """Yields a link for each value with a row, without duplicates."""
    here = format_path(place.frame.path)
    seen: set[int] = set()
    for ref in refs:
        row = _row(ref, skeleton)
        if row is not None and row not in seen:
            seen.add(row)
            path = skeleton.path(row)
            # As seen from the graph; the whole path if it is outside of the graph.
            yield Link(row, path.removeprefix(f"{here}.") if here else path)


def _row(ref: Ref, skeleton: Skeleton) -> int | None:
    """Returns the row of a value; for the result of a call, the output of its graph."""
    node = ref.node
    if isinstance(node, CallNode):
        node = node.frame.output_node
    row = skeleton.row_of_node(node)
    spec = node.spec
    for key in ref.dig:
        if row is None or not isinstance(spec, ContainerSpec):
            break
        found = next((child for _, other, child in spec.children if other == key), None)
        text = format_path([key_text(key)])
        inside = next((child for child in skeleton.children(row) if skeleton.name(child) == text), None)
        if found is None or inside is None:
            break
        row, spec = inside, found
    return row
