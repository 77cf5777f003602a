"""How the cells of a sweep share a forward: where their rows are, in all values that matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.execution import Entry
from graphpatch_notebook.execution.replay import NEVER, PLAIN, FrameNode, leaves_of
from graphpatch_notebook.experiments.engine.batch_rows import (
    Layout,
    Rows,
    RowsError,
    RowsRecording,
    layout_of,
    repeated_inputs,
    row_inputs,
    rows_of,
)
from graphpatch_notebook.experiments.engine.changed_positions import ChangedPositions, stand_ins
from graphpatch_notebook.experiments.engine.chunking import Work, overhead, rows_at_once
from graphpatch_notebook.experiments.engine.clean_run import Survey, paths_read_after, watched_run
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured

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
        is_assumed: Whether the rows are taken to be where batches are, in dimension 0, and no run on doubled inputs
            has told.
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

    Where every value that matters has the batch in dimension 0, that is believed until a run gives reason for doubt;
    else the model runs on doubled inputs.

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
    more = {**_read_after(pg, inputs, survey, targets), **_asks_for_identity(targets), **unreached}
    if may_assume:
        size = next(rows.size for rows in layout if rows is not None and rows.dim is not None)
        assumed = _assumed(survey, size)
        if assumed is not None:
            return RowWork(layout, *assumed, more, most, work, extra, instead, is_assumed=True)
    output, layouts, of_paths, problems = _doubled(pg, inputs, layout, survey, targets)
    return RowWork(layout, output, layouts, of_paths, {**problems, **more}, most, work, extra, instead)


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


def _assumed(survey: Survey, size: int) -> tuple[Layout, dict[FrameNode, Layout], dict[str, Rows]] | None:
    """Returns where rows are if all are in dimension 0; `None` where that cannot be."""

    def rows(value: Any) -> Layout | None:
        leaves = list(leaves_of(value))
        if all(leaf.dim() > 0 and leaf.shape[0] == size for leaf in leaves if isinstance(leaf, Tensor)):
            return tuple(Rows(0, size) if isinstance(leaf, Tensor) else None for leaf in leaves)
        return None

    output = rows(survey.output)
    if any(not isinstance(leaf, Tensor) and leaf is not None for leaf in leaves_of(survey.output)):
        return None  # perhaps the size of the batch
    kept = {
        node: rows(node.value) for node in survey.tree.root.walk() if node.problem is None and node.value is not None
    }
    marks = {path: mark.value for path, mark in survey.marks.items() if mark.came_up != NEVER}
    if output is None or None in kept.values():
        return None
    if any(not isinstance(value, Tensor) or rows(value) is None for value in marks.values()):
        return None
    return output, {node: layout for node, layout in kept.items() if layout}, dict.fromkeys(marks, Rows(0, size))


def _doubled(
    pg: PatchableGraph, inputs: Inputs, layout: Layout, survey: Survey, targets: Sequence[Target]
) -> tuple[Layout, Mapping[FrameNode, Layout], Mapping[str, Rows], Mapping[str, str]]:
    """Returns where rows are as a run on doubled inputs shows, and for paths whose values have none, why."""
    recording = RowsRecording(survey.tree)
    try:
        marks, output = watched_run(pg, repeated_inputs(inputs, layout, 2), targets, survey.tree, recording)
    except Exception as error:
        raise RowsError(f"on two rows it raises {type(error).__name__}: {error}") from None
    output_layout = layout_of(survey.output, output)
    for leaf, place in zip(leaves_of(output), output_layout, strict=True):
        if place is not None and place.dim is None and leaf.numel() > 0:
            raise RowsError(f"the output has a tensor of shape {tuple(leaf.shape)} that is one for all rows")
    reached = {path: mark.value for path, mark in survey.marks.items() if mark.came_up != NEVER}
    found = {path: _rows_of_mark(value, marks[path].value) for path, value in reached.items()}
    of_paths = {path: rows for path, rows in found.items() if isinstance(rows, Rows)}
    problems = {path: problem for path, problem in found.items() if isinstance(problem, str)}
    return output_layout, recording.layouts, of_paths, problems


def _rows_of_mark(single: Any, double: Any) -> Rows | str:
    """Returns where the rows are in a value, or why it has none."""
    if not isinstance(single, Tensor) or not isinstance(double, Tensor):
        return "it is no tensor"
    try:
        rows = rows_of(single, double)
    except RowsError as problem:
        return str(problem)
    return "its value is one for all rows" if rows.dim is None else rows


def _size(inputs: Inputs) -> tuple[int, str]:
    """Returns how many tokens the inputs have, or what is like a token, and the type of the device."""
    first = next(leaf for leaf in leaves_of((inputs.args, inputs.kwargs)) if isinstance(leaf, Tensor) and leaf.dim())
    is_vectors = first.is_floating_point() and first.dim() > 1
    return first.numel() // (first.shape[-1] or 1 if is_vectors else 1), first.device.type
