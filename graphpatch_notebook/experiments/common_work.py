"""What all cells of a sweep have in common: the numbers without patches, recorded results, and where rows are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.execution import context as contexts
from graphpatch_notebook.execution.frame_effects import leaves_of
from graphpatch_notebook.execution.frame_results import NEVER, FrameNode
from graphpatch_notebook.execution.plan import Entry
from graphpatch_notebook.experiments.chunking import Work, overhead, rows_at_once
from graphpatch_notebook.experiments.inputs import Inputs
from graphpatch_notebook.experiments.kept_state import KeptState
from graphpatch_notebook.experiments.measurements import Measurement, measurement
from graphpatch_notebook.experiments.rows import (
    Layout,
    Rows,
    RowsError,
    RowsRecording,
    is_close,
    layout_of,
    repeated_inputs,
    row_inputs,
    rows_of,
)
from graphpatch_notebook.experiments.survey import Survey, survey, watched_run
from graphpatch_notebook.experiments.trimming import reads_last_position, trims, watched_metric
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.resolution import Target, Unresolvable, resolve

_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


@dataclass
class RowWork:
    """How interventions share a forward.

    Attributes:
        inputs: Where the rows are in the inputs.
        output: Where the rows are in the output.
        layouts: Where the rows are in what frames returned.
        of_paths: Where the rows are in the values that are patched.
        problems: For paths whose values have no rows, why.
        most: How many interventions one forward holds.
        overhead: What a run costs besides computing, in rows.
    """

    inputs: Layout
    output: Layout
    layouts: Mapping[FrameNode, Layout]
    of_paths: Mapping[str, Rows]
    problems: Mapping[str, str]
    most: int
    overhead: float

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


@dataclass
class CommonWork:
    """What all cells of a sweep have in common.

    Attributes:
        full_inputs: What the model runs on.
        inputs: The same, with what makes it leave out what the metric does not look at.
        baseline: What the metric gives without patches.
        survey: What a run told; `None` where cells must run as in a plain loop.
        work: What a run costs.
        rows: How cells share a forward; `None` where they do not.
        replays: Whether recorded results are used.
        keeps_last_logits: Whether `inputs` has the model compute the logits of the last position only.
        remarks: What is to be known, in words.
    """

    full_inputs: Inputs
    inputs: Inputs
    baseline: Measurement
    survey: Survey | None = None
    work: Work = field(default_factory=lambda: Work((), 1, 0))
    rows: RowWork | None = None
    replays: bool = True
    keeps_last_logits: bool = False
    remarks: list[str] = field(default_factory=list)


def common_work(
    pg: PatchableGraph,
    inputs: Inputs,
    metric: Callable[[Any], Any],
    paths: Sequence[str],
    *,
    batch: int | str | None,
    backward: bool,
) -> CommonWork:
    """Runs the model a few times without patches, and returns what that tells. The model's state stays as it was."""
    targets = _targets(pg, paths)
    state = KeptState(pg._module)
    try:
        return _looked_at(pg, inputs, metric, targets, state, batch, backward)
    finally:
        state.restore()


def _targets(pg: PatchableGraph, paths: Sequence[str]) -> list[Target]:
    targets: dict[str, Target] = {}
    for path in paths:
        try:
            target = resolve(pg._root_frame, path)
        except Unresolvable as problem:
            raise UnknownPathError(problem.message) from None
        targets[target.path] = target
    return list(targets.values())


def _looked_at(
    pg: PatchableGraph,
    inputs: Inputs,
    metric: Callable[[Any], Any],
    targets: Sequence[Target],
    state: KeptState,
    batch: int | str | None,
    backward: bool,
) -> CommonWork:
    fresh = inputs.fresh()
    output = pg(*fresh.args, **fresh.kwargs)
    baseline = measurement(metric(output))
    common = CommonWork(inputs, inputs, baseline)
    reason = _why_plain(pg) or state.change()
    if reason is None:
        only_last = batch is not None and reads_last_position(metric, output)
        reason = _survey(pg, common, metric, targets, batch, backward, only_last, state)
    if reason is not None:
        common.survey = None
        common.remarks.append(f"cells ran one by one, each as a whole: {reason}")
        return common
    assert common.survey is not None
    common.work = Work.of(common.survey.tree)
    if batch is not None:
        try:
            common.rows = _rows(pg, common, targets, batch)
        except Exception as error:
            why = (
                str(error) if isinstance(error, RowsError) else f"on two rows it raises {type(error).__name__}: {error}"
            )
            common.remarks.append(f"cells ran one by one: {why}")
        if common.rows is None and common.inputs is not inputs:
            # Alone, each cell has the very bits of the loop: nothing is left out of its run.
            common.inputs, common.keeps_last_logits = inputs, False
            common.survey = survey(pg, inputs, targets, with_gradients=backward)
    return common


def _why_plain(pg: PatchableGraph) -> str | None:
    if pg._has_own_graphs():
        return "graphs of their own run in place of modules"
    if contexts.innermost(pg) is not None:
        return "other patches are active"
    if pg._current().callers.has_compiled_parts:
        return "parts of the model are compiled"
    return None


def _survey(
    pg: PatchableGraph,
    common: CommonWork,
    metric: Callable[[Any], Any],
    targets: Sequence[Target],
    batch: int | str | None,
    backward: bool,
    only_last: bool,
    state: KeptState,
) -> str | None:
    """Surveys a run that leaves out as much as can be; returns why cells must run as in a plain loop, if they must."""
    inputs = common.full_inputs
    more = trims(pg._root_frame, inputs, targets, only_last=only_last) if batch is not None else []
    for extra in [*more, {}]:
        trimmed = replace(inputs, kwargs={**inputs.kwargs, **extra}) if extra else inputs
        found = survey(pg, trimmed, targets, with_gradients=backward)
        common.keeps_last_logits = extra.get("logits_to_keep") == 1
        is_same = _gives(metric, found.output, common.baseline, last=common.keeps_last_logits)
        if is_same and (not extra or all(mark.came_up != NEVER for mark in found.marks.values())):
            common.inputs, common.survey = trimmed, found
            common.replays = not _is_fused(pg, targets)
            return found.state_change or state.change()
    return state.change() or "two runs of the model without patches do not give the same"


def _gives(metric: Callable[[Any], Any], output: Any, expected: Measurement, *, last: bool) -> bool:
    try:
        found = measurement(watched_metric(metric, output) if last else metric(output))
    except Exception:  # it looks at what was left out
        return False
    return found.form == expected.form and is_close(
        torch.from_numpy(found.values).float(), torch.from_numpy(expected.values).float()
    )


def _is_fused(pg: PatchableGraph, targets: Sequence[Target]) -> bool:
    """Whether frames may have run by torch's fused kernels in one run and without them in another."""
    sees_ops = any(target.node.kind == "op" for target in targets)
    return sees_ops and any(isinstance(module, _FUSED) for module in pg._module.modules())


def _rows(pg: PatchableGraph, common: CommonWork, targets: Sequence[Target], batch: int | str) -> RowWork:
    survey = common.survey
    assert survey is not None
    inputs = row_inputs(common.inputs)
    tokens, device = _size(common.inputs)
    most = rows_at_once(tokens, device) if batch == "auto" else int(batch)
    if most < 2:
        raise RowsError(f"one forward has {tokens:,} tokens already")
    recording = RowsRecording(survey.tree)
    doubled = repeated_inputs(common.inputs, inputs, 2)
    marks, output = watched_run(pg, doubled, targets, survey.tree, recording)
    layout = layout_of(survey.output, output)
    for leaf, place in zip(leaves_of(output), layout, strict=True):
        if place is not None and place.dim is None and leaf.numel() > 0:
            raise RowsError(f"the output has a tensor of shape {tuple(leaf.shape)} that is one for all rows")
    of_paths: dict[str, Rows] = {}
    problems: dict[str, str] = {}
    for path, mark in survey.marks.items():
        try:
            of_paths[path] = _rows_of_mark(mark.value, marks[path].value)
        except RowsError as problem:
            problems[path] = str(problem)
        mark.value = None
    return RowWork(
        inputs, layout, recording.layouts, of_paths, problems, most, overhead(Work.of(survey.tree), tokens, device)
    )


def _rows_of_mark(single: Any, double: Any) -> Rows:
    if not isinstance(single, Tensor) or not isinstance(double, Tensor):
        raise RowsError("it is no tensor")
    rows = rows_of(single, double)
    if rows.dim is None:
        raise RowsError("its value is one for all rows")
    return rows


def _size(inputs: Inputs) -> tuple[int, str]:
    """Returns how many tokens the inputs have, or what is like a token, and the type of the device."""
    first = next(leaf for leaf in leaves_of((inputs.args, inputs.kwargs)) if isinstance(leaf, Tensor) and leaf.dim())
    is_vectors = first.is_floating_point() and first.dim() > 1
    return first.numel() // (first.shape[-1] or 1 if is_vectors else 1), first.device.type
