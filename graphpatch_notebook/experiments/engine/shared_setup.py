"""What all cells of a sweep have in common: the numbers without patches, recorded results, and where rows are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from graphpatch_notebook.checks.model_state import ModuleState
from graphpatch_notebook.errors import ExperimentError, UnknownPathError
from graphpatch_notebook.execution import innermost
from graphpatch_notebook.execution.replay import NEVER, all_modules, has_hooks, own_tensors
from graphpatch_notebook.experiments.engine.batch_rows import RowsError
from graphpatch_notebook.experiments.engine.batching import RowWork, row_work
from graphpatch_notebook.experiments.engine.clean_run import Mark, Survey, survey
from graphpatch_notebook.experiments.engine.function_values import ReferredValues
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import Measurement, baseline_of, measurement
from graphpatch_notebook.experiments.engine.random_draws import change_by
from graphpatch_notebook.experiments.engine.trimming import last_position_value, trims
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, resolve
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.torch_compat import has_global_hooks

_MEMORY = "the metric, or the model, changes what the metric refers to when it is called"
_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


@dataclass
class CommonWork:
    """What all cells of a sweep have in common.

    Attributes:
        full_inputs: What the model runs on.
        inputs: The same, with what makes it leave out what the metric does not look at.
        baseline: What the metric gives without patches.
        survey: What a run told; `None` where cells must run as in a plain loop.
        rows: How cells share a forward; `None` where they do not.
        replays: Whether recorded results are used.
        keeps_last_logits: Whether `inputs` has the model compute the logits of the last position only.
        remarks: What is to be known, in words.
    """

    full_inputs: Inputs
    inputs: Inputs
    baseline: Measurement = field(init=False)
    survey: Survey | None = None
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
    state = ModuleState(captured(pg).module)
    with afterwards(state.restore):
        common = _looked_at(pg, inputs, metric, targets, state, batch, backward)
    if backward and common.baseline.values.size != 1:
        raise ExperimentError("backward=True needs a metric that gives one number, as a tensor")
    return common


def _targets(pg: PatchableGraph, paths: Sequence[str]) -> list[Target]:
    targets: dict[str, Target] = {}
    for path in paths:
        try:
            target = resolve(captured(pg).root, path)
        except Unresolvable as problem:
            raise UnknownPathError(problem.message) from None
        targets[target.path] = target
    return list(targets.values())


def _looked_at(
    pg: PatchableGraph,
    inputs: Inputs,
    metric: Callable[[Any], Any],
    targets: Sequence[Target],
    state: ModuleState,
    batch: int | str | None,
    backward: bool,
) -> CommonWork:
    common = CommonWork(inputs, inputs)
    if not targets:
        common.baseline = _baseline(pg, inputs, metric)
        return common
    referred = ReferredValues(metric)
    reason: object = (
        why_plain(pg)
        or _survey(pg, common, metric, targets, state, batch, backward)
        or change_by(lambda: _baseline(pg, inputs, metric), captured(pg).module, state)
    )
    has_memory = reason is None and referred != ReferredValues(metric)
    if reason is not None or has_memory:
        state.restore()
        if not has_memory or common.inputs is not inputs:
            common.baseline = _baseline(pg, inputs, metric)
        common.inputs, common.keeps_last_logits, common.survey = inputs, False, None
        common.remarks.append(f"cells ran one by one, each as a whole: {reason or _MEMORY}")
        return common
    assert common.survey is not None
    if batch is not None:
        try:
            common.rows = row_work(pg, common.inputs, common.survey, targets, batch)
        except RowsError as reason:
            common.remarks.append(f"cells ran one by one: {reason}")
            leave_nothing_out(pg, common, metric, targets)
    return common


def leave_nothing_out(
    pg: PatchableGraph, common: CommonWork, metric: Callable[[Any], Any], targets: Sequence[Target]
) -> None:
    """Sees to it that cells run on the whole inputs: alone, each has the very bits of the loop."""
    if common.inputs is common.full_inputs:
        return
    common.inputs, common.keeps_last_logits = common.full_inputs, False
    common.survey = survey(pg, common.inputs, targets)
    common.baseline = baseline_of(metric, common.survey.take_returned())


def _baseline(pg: PatchableGraph, inputs: Inputs, metric: Callable[[Any], Any]) -> Measurement:
    return baseline_of(metric, inputs.run(pg))


def why_plain(pg: PatchableGraph) -> str | None:
    """Returns why nothing may be shared whatever the cells patch, in words; `None` where something may."""
    if has_global_hooks() or any(has_hooks(module) for module in all_modules(captured(pg).module)):
        return "there are hooks on modules, which may keep what they see"
    if captured(pg).runs_own_graphs:
        return "graphs of their own run in place of modules"
    if innermost(captured(pg)) is not None:
        return "other patches are active"
    if captured(pg).callers.has_compiled_parts:
        return "parts of the model are compiled"
    return None


def _survey(
    pg: PatchableGraph,
    common: CommonWork,
    metric: Callable[[Any], Any],
    targets: Sequence[Target],
    state: ModuleState,
    batch: int | str | None,
    backward: bool,
) -> str | None:
    """Surveys a run that leaves out as much as can be; returns why cells must run as in a plain loop, if they must."""
    inputs = common.full_inputs
    holds_fused = any(isinstance(module, _FUSED) for module in all_modules(captured(pg).module))
    # Frames may have run by torch's fused kernels in one run and without them in another.
    is_fused = holds_fused and any(target.node.kind == "op" for target in targets)
    full = _baseline(pg, inputs, metric) if is_fused else None
    for extra in [*(trims(captured(pg).root, inputs, targets) if batch is not None else []), {}]:
        trimmed = replace(inputs, kwargs={**inputs.kwargs, **extra}) if extra else inputs
        # Torch's fused kernels are not used under a mode: their numbers would be others.
        notes_reads = batch is not None and not holds_fused
        keeps_pairs = notes_reads and not backward
        found = survey(pg, trimmed, targets, notes_reads=notes_reads, keeps_pairs=keeps_pairs, state=state)
        if extra and not all(map(_is_far_from_inputs, found.marks.values())):
            continue
        value = None
        if keeps_last := "logits_to_keep" in extra:
            value = last_position_value(metric, own_tensors(found.output))
            if value is None:
                continue
        elif extra:
            full = full or _baseline(pg, inputs, metric)
            if not _gives(metric, own_tensors(found.output), full):
                continue
        common.inputs, common.survey, common.keeps_last_logits = trimmed, found, keeps_last
        common.baseline = full or (measurement(value) if keeps_last else baseline_of(metric, found.take_returned()))
        common.replays = not is_fused
        break
    assert common.survey is not None
    return common.survey.state_change


def _is_far_from_inputs(mark: Mark) -> bool:
    """Whether what is patched came up, and is no mask or position: without a cache, models look at those otherwise."""
    return mark.came_up != NEVER and isinstance(mark.value, Tensor) and mark.value.is_floating_point()


def _gives(metric: Callable[[Any], Any], output: Any, expected: Measurement) -> bool:
    try:
        return measurement(metric(output)).is_close(expected)
    except Exception:  # it looks at what was left out
        return False
