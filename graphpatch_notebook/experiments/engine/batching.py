"""How the cells of a sweep share a forward: where their rows are, in all values that matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from graphpatch_notebook.capture.records import HELD_KINDS, Frame
from graphpatch_notebook.checks.dimensions import Dimensions, NoBatchError, dimensions_of
from graphpatch_notebook.execution import Entry
from graphpatch_notebook.execution.replay import NEVER, PLAIN, FrameNode, leaves_of
from graphpatch_notebook.experiments.engine.batch_rows import (
    Layout,
    Rows,
    RowsError,
    row_inputs,
)
from graphpatch_notebook.experiments.engine.changed_positions import ChangedPositions, stand_ins
from graphpatch_notebook.experiments.engine.chunking import Work, overhead, rows_at_once
from graphpatch_notebook.experiments.engine.clean_run import Survey, paths_read_after
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.values import ContainerSpec, TensorSpec, ValueSpec, key_text, readable_children

Found: TypeAlias = "tuple[Layout, dict[FrameNode, Layout], dict[str, Rows], dict[str, str]]"
"""Where rows are in the output, in what frames return, and in patched values; why some of these have none."""

_SHARED = "its value is one for all rows"
_UNREACHED = "the model does not reach it on these inputs"


@dataclass
class RowWork:
    """How interventions share a forward.

    Attributes:
        inputs: Where the rows are in the inputs.
        output: Where the rows are in the output.
        layouts: Where the rows are in what frames returned.
        of_paths: Where the rows are in the values that are patched.
        problems: For paths whose values have no rows, or cannot be patched in rows, why.
        most: How many interventions one forward holds.
        work: What a run costs.
        overhead: What it costs besides computing, in rows.
        stand_ins: What computes only positions that patches change, in place of frames.
        is_assumed: Whether dimension 0 is taken for the batch because of its size.
        never_meet: Whether a test has shown that rows do not meet.
    """

    inputs: Layout
    output: Layout
    layouts: Mapping[FrameNode, Layout]
    of_paths: Mapping[str, Rows]
    problems: Mapping[str, str]
    most: int
    work: Work
    overhead: float
    stand_ins: dict[FrameNode, ChangedPositions]
    is_assumed: bool = False
    never_meet: bool = False

    def problem(self, entries: Sequence[Entry]) -> str | None:
        """Returns why a cell cannot share a forward, in words."""
        nodes: dict[int, str] = {}
        for entry in entries:
            path = entry.target.path
            if path in self.problems:
                return f"{path!r}: {self.problems[path]}"
            if nodes.setdefault(id(entry.target.node), path) != path:
                return f"{path!r}: other patches of the cell are on parts of the same value"
            where = entry.restriction
            if where is not None and (
                (where.steps is not None and 0 not in where.steps)
                or (where.positions is not None and where.dim == self.of_paths[path].dim)
            ):
                return f"{path!r}: the patch is for some steps, or for rows"
        return None


def row_work(
    pg: PatchableGraph,
    inputs: Inputs,
    survey: Survey,
    targets: Sequence[Target],
    batch: int | str,
    *,
    may_assume: bool = True,
) -> RowWork:
    """Returns how interventions share a forward.

    Where every value that matters is as long as the batch in dimension 0, that is taken to be the batch until a run
    gives reason for doubt; else `checks.dimensions` says which dimension it is.

    Raises:
        RowsError: They cannot, and why.
    """
    layout = row_inputs(inputs)
    tokens, device = _size(inputs)
    most = rows_at_once(tokens, device) if batch == "auto" else int(batch)
    if most < 2:
        raise RowsError(f"one forward has {tokens:,} tokens already")
    if any(not isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves_of(survey.output)):
        raise RowsError("the output holds an object that has no rows")
    instead = stand_ins(survey, most)
    if instead and batch == "auto":
        most = rows_at_once(tokens, device, is_sparse=True)
    work = Work.of(survey.tree, instead)
    extra = overhead(work, tokens, device)
    unreached = {path: _UNREACHED for path, mark in survey.marks.items() if mark.came_up == NEVER}
    held = {target.path: _SHARED for target in targets if target.node.kind in HELD_KINDS}
    more = {**_read_after(pg, inputs, survey, targets), **_asks_for_identity(targets), **unreached, **held}
    size = next(rows.size for rows in layout if rows is not None and rows.dim is not None)
    moving = [target.path for target in targets if target.path not in {**unreached, **held}]
    assumed = _assumed(survey, moving, size) if may_assume else None
    output, layouts, of_paths, problems = assumed or _looked_up(pg, survey, [t for t in targets if t.path in moving])
    problems = {**problems, **more}
    return RowWork(
        layout, output, layouts, of_paths, problems, most, work, extra, instead, is_assumed=assumed is not None
    )


def _asks_for_identity(targets: Sequence[Target]) -> dict[str, str]:
    """Returns the paths in modules that ask whether two of their inputs are the same object, which rows make others."""
    why = "nn.MultiheadAttention does another thing for inputs that are the same object"
    return {target.path: why for target in targets if _is_within(target.frame, nn.MultiheadAttention)}


def _is_within(frame: Frame | None, kind: type[nn.Module]) -> bool:
    while frame is not None and not isinstance(frame.module, kind):
        frame = frame.parent
    return frame is not None


def _read_after(pg: PatchableGraph, inputs: Inputs, survey: Survey, targets: Sequence[Target]) -> dict[str, str]:
    """Returns the paths after which Python looks at values: what it does then may be another thing for each cell."""
    why = "the model looks at values, and may do another thing for each cell"
    if survey.last_read == NEVER:
        # Nobody took note: the capture knows.
        has_doubts = any(frame.doubts for frame in captured(pg).root.walk())
        return dict.fromkeys(survey.marks, why) if has_doubts else {}
    if all(mark.came_up > survey.last_read for mark in survey.marks.values()):
        return {}
    return dict.fromkeys(paths_read_after(pg, inputs, targets), why)


def _assumed(survey: Survey, paths: Sequence[str], size: int) -> Found | None:
    """Returns where rows are if patched values and the output are in dimension 0 as long as the batch, else `None`."""

    def layout_of(value: Any) -> Layout | None:
        leaves = list(leaves_of(value))
        if all(leaf.dim() > 0 and leaf.shape[0] == size for leaf in leaves if isinstance(leaf, Tensor)):
            return tuple(Rows(0, size) if isinstance(leaf, Tensor) else None for leaf in leaves)
        return None

    output = layout_of(survey.output)
    if any(not isinstance(leaf, Tensor) and leaf is not None for leaf in leaves_of(survey.output)):
        return None  # perhaps the size of the batch
    values = [survey.marks[path].value for path in paths]
    if output is None or any(not isinstance(value, Tensor) or layout_of(value) is None for value in values):
        return None
    layouts = {node: layout_of(node.value) for node in _kept(survey)}
    return output, {node: own for node, own in layouts.items() if own}, dict.fromkeys(paths, Rows(0, size)), {}


def _kept(survey: Survey) -> list[FrameNode]:
    return [node for node in survey.tree.root.walk() if node.problem is None and node.value is not None]


def _looked_up(pg: PatchableGraph, survey: Survey, targets: Sequence[Target]) -> Found:
    """Returns where rows are as is known of the dimensions of captured values, and for paths that have none, why."""
    root = captured(pg).root
    known = dimensions_of(root)
    output = _layout(known, survey.output, root.output_node.spec)
    for leaf, place in zip(leaves_of(survey.output), output, strict=True):
        if place is not None and place.dim is None and leaf.numel() > 0:
            raise RowsError(f"the output has a tensor of shape {tuple(leaf.shape)} that is one for all rows")
    frames = _captured_frames(survey.tree.root, root)
    layouts = {}
    for node in _kept(survey):
        with suppress(RowsError):
            if node in frames:
                layouts[node] = _layout(known, node.value, frames[node].output_node.spec)
    of_paths: dict[str, Rows] = {}
    problems: dict[str, str] = {}
    for target in targets:
        value = survey.marks[target.path].value
        try:
            rows = _rows(known, value, target.spec) if isinstance(value, Tensor) else None
        except RowsError as problem:
            problems[target.path] = str(problem)
            continue
        if rows is not None and rows.dim is not None:
            of_paths[target.path] = rows
        else:
            problems[target.path] = "it is not a tensor" if rows is None else _SHARED
    return output, layouts, of_paths, problems


def _captured_frames(node: FrameNode, frame: Frame) -> dict[FrameNode, Frame]:
    """Returns the captured frames of the frames below one that is above the model, or whose own frame is `frame`."""
    found: dict[FrameNode, Frame] = {}
    calls = [frame] if node.module is None else [call.frame for call in frame.calls()]
    by_key = {(id(own.module), 0 if own.call is None else own.call.call_index): own for own in calls}
    for key, child in node.children.items():
        if key in by_key:
            found |= {child: by_key[key], **_captured_frames(child, by_key[key])}
    return found


def _layout(known: Dimensions, value: Any, spec: ValueSpec | None) -> Layout:
    """Returns where the rows are in a value made of containers, which are those of a captured value.

    Raises:
        RowsError: It is not known for one of its tensors.
    """
    inside = None if isinstance(value, (Tensor, *PLAIN)) else readable_children(value)
    if inside is None:
        return (_rows(known, value, spec) if isinstance(value, Tensor) else None,)
    found: list[Rows | None] = []
    for key, child in inside:
        own = spec.child(key_text(key)) if isinstance(spec, ContainerSpec) else None
        found += _layout(known, child, None if own is None else own[1])
    return tuple(found)


def _rows(known: Dimensions, value: Tensor, spec: ValueSpec | None) -> Rows:
    if not isinstance(spec, TensorSpec) or len(spec.shape) != value.dim():
        raise RowsError(f"a value of shape {tuple(value.shape)} was not captured like that")
    try:
        dim = known.batch_dim(spec)
    except NoBatchError as problem:
        raise RowsError(str(problem)) from None
    return Rows(None) if dim is None else Rows(dim, value.shape[dim])


def _size(inputs: Inputs) -> tuple[int, str]:
    """Returns how many tokens the inputs have, or what is like a token, and the type of the device."""
    first = next(leaf for leaf in leaves_of((inputs.args, inputs.kwargs)) if isinstance(leaf, Tensor) and leaf.dim())
    is_vectors = first.is_floating_point() and first.dim() > 1
    return first.numel() // (first.shape[-1] or 1 if is_vectors else 1), first.device.type
