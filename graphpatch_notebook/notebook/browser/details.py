"""The details of a row for the popup: notes, code, source lines, and the inputs and users of the value."""

from __future__ import annotations

import re
from collections.abc import Iterator

from graphpatch_notebook.capture.records import RECORD, CallNode, Frame, Node, Ref, SourceLine
from graphpatch_notebook.errors import GraphError, SessionError
from graphpatch_notebook.graphs import CompiledGraphModule
from graphpatch_notebook.inspection import data_flow
from graphpatch_notebook.inspection.locations import Location
from graphpatch_notebook.inspection.resolution import is_patchable
from graphpatch_notebook.inspection.source_text import signature_line
from graphpatch_notebook.notebook.browser.skeleton import PATCHABLE, Skeleton
from graphpatch_notebook.notebook.display.labels import file_label, visible
from graphpatch_notebook.notebook.messages import Details, Link, Source
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, TensorSpec, UnknownSpec, dtype_name, key_text, leaves

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
    if place.graph is not None:
        yield from _notes_of_graph(place.graph)
    elif place.node is not None:
        yield visible(_what(place, place.node))
        yield from _notes_of_value(place, place.node, skeleton, row)


def _notes_of_graph(frame: Frame) -> Iterator[str]:
    call = frame.call
    times = ""
    if call is not None and call.call_count > 1:
        times = f", called {call.call_count} times; this is call {call.call_index + 1}"
    yield f"the graph of {visible(type(frame.module).__name__)}{times}"
    if frame.opaque_reason is not None:
        yield f"opaque: {visible(frame.opaque_reason)}; its inputs, its output and what it calls can be patched"
    if frame.custom_failure is not None:
        yield visible(frame.custom_failure)
    if frame.is_edited:
        yield "this graph was edited: it runs in place of the module"
    elif frame.custom_graph is not None:
        yield "this graph runs in place of the module"
    if frame.conditions.training:
        yield "captured in train mode"
    yield from map(visible, map(str, frame.doubts))


def _what(place: Location, node: Node) -> str:
    owner = type(place.frame.module).__name__
    if place.dig:
        return f"a value in the {_words(node)} that {format_path(place.names)} holds"
    if node.kind == "op":
        call = node.composite
        opened = "" if call is None else f", a step of {call.name}" + ", which it opens" * call.is_fused
        return f"what {node.op} returned{opened}" if node.whole is node else f"a part of what {node.op} returned"
    if node.kind == "output":
        return f"what {owner} returned"
    if node.kind == "constant":
        return f"a constant in the code of {owner}"
    named = str(node.target) if node.kind in ("input", "parameter", "buffer", "attribute") else node.op
    return f"the {node.kind} {named} of {owner}"


def _words(node: Node) -> str:
    return node.spec.type.__name__ if isinstance(node.spec, ContainerSpec) else str(node.spec)


def _notes_of_value(place: Location, node: Node, skeleton: Skeleton, row: int) -> Iterator[str]:
    spec = place.spec
    if note := skeleton.note(row):
        yield note
    if isinstance(spec, ScalarSpec) and spec.is_number:
        yield f"its value was {spec.value!r}"
    if node.is_size:
        has_tensors = any(isinstance(leaf, TensorSpec) for _, leaf in leaves(node.spec))
        why = "the code unpacks it" if has_tensors else "it only carries sizes"
        yield f"{why}: hidden from the tree, unless it is asked for"
    if not is_patchable(node) and node.kind != "constant":
        yield "it cannot be patched: arithmetic on sizes happens in plain Python, where a patch cannot see it"
    elif isinstance(spec, ContainerSpec):
        yield f"a container ({spec}): patch the values in it"
    elif not skeleton.flags(row) & PATCHABLE:
        yield "it cannot be patched: " + ("it is a constant" if node.kind == "constant" else f"it is {_a(str(spec))}")
    elif isinstance(spec, UnknownSpec):
        yield "its value is not known yet: it was added to the graph and has not run"
    if isinstance(spec, TensorSpec) and spec.placement:
        yield f"over the processes of the model: {visible(spec.placement)}; its shape is that of the whole value"
    if node.is_mutated_later:
        yield "the model writes into this tensor later, which overwrites the changes of a patch there"
    if node.is_view_filled_later:
        yield "it is a view that the model writes into later: a patch detaches it from its base tensor"


def _a(what: str) -> str:
    return "neither a tensor nor a number but " + ("None" if what == "NoneType" else f"an object ({visible(what)})")


# --------------------------------------------------------------------------------------------------------------------
# Code


def _code(pg: PatchableGraph, place: Location) -> str:
    frame = place.graph or place.frame
    module = _graph_module(pg, frame)
    if module is None:
        return ""
    try:
        return _beginning(module) if place.graph is not None else _line_of(module, place)
    except GraphError as error:
        return f"# {error}"


def _beginning(module: CompiledGraphModule) -> str:
    """Returns the code of a graph, cut off after `_MOST_LINES` lines, since long code is slow to display."""
    lines = module.code.strip("\n").splitlines()
    more = len(lines) - _MOST_LINES
    if more <= 0:
        return "\n".join(lines)
    where = ".".join(filter(None, ("pg.graph", module.path, "_code")))
    return "\n".join([*lines[:_MOST_LINES], f"# ... {more:,} more lines: {where}"])


def _graph_module(pg: PatchableGraph, frame: Frame) -> CompiledGraphModule | None:
    modules = captured(pg).hierarchy.modules()
    return next((m for m in modules if isinstance(m, CompiledGraphModule) and m.frame is frame), None)


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
