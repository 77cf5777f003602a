"""Runs the model a few times without patches, and returns the setup that the pure cells of a sweep start with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.capture.held_values import all_modules
from graphpatch_notebook.checks.model_state import ModuleState
from graphpatch_notebook.checks.sharding import sharding_of
from graphpatch_notebook.errors import ExperimentError, UnknownPathError
from graphpatch_notebook.execution import FUSED_MODULES, NEVER, has_hooks, innermost, own_tensors
from graphpatch_notebook.experiments.engine.batching import Batching, batching_of, most_cells
from graphpatch_notebook.experiments.engine.clean_run import CleanRun, Mark, clean_run
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import Measurement, baseline_of, measurement
from graphpatch_notebook.experiments.engine.rows import RowsError
from graphpatch_notebook.experiments.engine.side_effects import Drawing, ReferredValues, change_by
from graphpatch_notebook.experiments.engine.trimming import is_part, last_position_value, trims
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, resolve
from graphpatch_notebook.interrupts import on_error
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.torch_compat import has_global_hooks, is_any_compiled, may_compile

_ONE_BY_ONE = "cells ran one by one, each in full"


@dataclass(frozen=True)
class SweepRequest:
    """What is asked of the pure cells of a sweep, on any graph: workers receive it.

    Attributes:
        inputs: The inputs of the model.
        metric: Maps the output of the model to numbers.
        paths: All paths that pure cells patch; none if they are to run as in a plain loop.
        batch: `"auto"`, the number of cells in one forward, or `None` for one cell at a time.
        backward: Whether gradients of the metric are accumulated.
    """

    inputs: Inputs
    metric: Callable[[Any], Any]
    paths: Sequence[str]
    batch: int | str | None = "auto"
    backward: bool = False

    @functools.cached_property
    def why_alone(self) -> str | None:
        """Why cells that may share forwards cannot do so with these inputs, as a message."""
        if self.batch is not None:
            try:
                most_cells(self.inputs, self.batch)
            except RowsError as problem:
                return str(problem)
        return None

    def baseline(self, pg: PatchableGraph) -> Measurement:
        """Runs the model without patches of its own, and returns the metric."""
        return baseline_of(self.metric, self.inputs.run(pg))


@dataclass(frozen=True)
class SweepSetup:
    """How the cells of a sweep run. If a check fails while they run, the runner switches to a simpler setup.

    Attributes:
        pg: The graph.
        request: What is asked of the cells.
        inputs: The inputs of the model, which may have added arguments that skip outputs the metric does not read.
        baseline: The metric without patches.
        clean: The run without patches; `None` if cells run as in a plain loop.
        batching: How cells share a forward; `None` if they do not.
        replays: Whether recorded results are used.
        keeps_last_logits: Whether the model computes the logits of the last position only.
        has_same_bits: Whether single cells may run on `inputs`, too: without patches these give the same bits.
        remarks: Messages for the user about how cells run.
        state: The model before; `None` if cells do not share forwards.
    """

    pg: PatchableGraph
    request: SweepRequest
    inputs: Inputs
    baseline: Measurement
    clean: CleanRun | None = None
    batching: Batching | None = None
    replays: bool = False
    keeps_last_logits: bool = False
    has_same_bits: bool = True
    remarks: tuple[str, ...] = ()
    state: ModuleState | None = None

    @property
    def is_trimmed(self) -> bool:
        """Whether runs skip outputs."""
        return self.inputs is not self.request.inputs

    def remarked(self, text: str) -> SweepSetup:
        """Returns the same setup with another remark."""
        return self if text in self.remarks else replace(self, remarks=(*self.remarks, text))

    def without_replay(self) -> SweepSetup:
        """Returns the setup for a model that returns something else with recorded results."""
        remark = "every cell ran in full: with recorded results, the model does not return the same output"
        return replace(self, replays=False).remarked(remark)

    def without_batch(self, why: str) -> SweepSetup:
        """Returns the setup in which cells do not share forwards."""
        if self.is_trimmed:
            return self.plain(why)
        return replace(self, batching=None).remarked(f"cells ran one by one: {why}")

    def plain(self, why: str) -> SweepSetup:
        """Returns the setup in which each cell runs as in a plain loop."""
        # The old baseline may be of trimmed inputs.
        with self.pg.patch({}).quiet():
            baseline = self.request.baseline(self.pg)
        plain = SweepSetup(self.pg, self.request, self.request.inputs, baseline, remarks=self.remarks)
        return plain.remarked(f"{_ONE_BY_ONE}: {why}")

    def with_batch_looked_up(self) -> SweepSetup:
        """Returns the setup with the batch dimensions of `checks.dimensions` instead of assumed ones."""
        assert self.clean is not None
        targets = [resolve(captured(self.pg).root, path) for path in self.clean.marks]
        return self._with_batch(targets, may_assume=False)

    def _with_batch(self, targets: Sequence[Target], *, may_assume: bool = True) -> SweepSetup:
        assert self.clean is not None
        assert self.request.batch is not None
        batching = batching_of(self.pg, self.inputs, self.clean, targets, self.request.batch, may_assume=may_assume)
        return replace(self, batching=batching)


def sweep_setup(
    pg: PatchableGraph, request: SweepRequest, look: ModuleState | None = None, known: Measurement | None = None
) -> SweepSetup:
    """Runs the model a few times without patches, restores its state, and returns the setup.

    Args:
        pg: The graph.
        request: What is asked of the cells.
        look: A partial snapshot of the model, if it is unchanged since, and `why_plain` gave no reason.
        known: The metric without patches, if it is known.
    """
    targets = _targets(pg, request.paths)
    state = ModuleState(captured(pg).module)
    with on_error(state.restore):
        why = why_plain(pg) if look is None else None
        setup = _setup_after_clean_run(pg, request, targets, state, why, known)
        if setup.clean is None or setup.clean.last_read:  # else the model ran once, and has changed nothing
            state.restore()
    if request.backward and setup.baseline.values.size != 1:
        raise ExperimentError("backward=True needs a metric that gives one number, as a tensor")
    return setup if setup.batching is None else replace(setup, state=state)


def _targets(pg: PatchableGraph, paths: Sequence[str]) -> list[Target]:
    targets: dict[str, Target] = {}
    for path in paths:
        try:
            target = resolve(captured(pg).root, path)
        except Unresolvable as problem:
            raise UnknownPathError(problem.message) from None
        targets[target.path] = target
    return list(targets.values())


def _setup_after_clean_run(
    pg: PatchableGraph,
    request: SweepRequest,
    targets: Sequence[Target],
    state: ModuleState,
    why: str | None,
    known: Measurement | None,
) -> SweepSetup:
    def plain(baseline: Measurement) -> SweepSetup:
        return SweepSetup(pg, request, request.inputs, baseline)

    if not targets:
        return plain(known or request.baseline(pg))
    referred = ReferredValues(request.metric)
    if why is not None:
        state.restore()
        return plain(request.baseline(pg)).remarked(f"{_ONE_BY_ONE}: {why}")
    why_alone = request.why_alone
    may_share = request.batch is not None and why_alone is None
    setup = _trimmed(pg, request, targets, state, known, may_share=may_share)
    assert setup.clean is not None
    reason: object = setup.clean.state_change or change_by(lambda: request.baseline(pg), captured(pg).module, state)
    memory = None if reason is not None else referred.change_by_call(request.metric)
    if reason is not None or memory is not None:
        state.restore()
        is_asked_again = memory is None or setup.is_trimmed
        baseline = request.baseline(pg) if is_asked_again else setup.baseline
        is_random = isinstance(reason, Drawing)
        return plain(baseline).remarked(f"{_ONE_BY_ONE}: {reason or memory}{', or the metric does' * is_random}")
    if may_share:
        try:
            return setup._with_batch(targets)
        except RowsError as problem:
            why_alone = str(problem)
            if setup.is_trimmed:
                setup = _trimmed(pg, request, targets, state, known, may_share=False)
    return setup if why_alone is None else setup.remarked(f"cells ran one by one: {why_alone}")


def why_plain(pg: PatchableGraph) -> str | None:
    """Returns why all cells must run as in a plain loop, as a message; `None` if cells may share work."""
    modules = all_modules(captured(pg).module)
    if has_global_hooks() or any(map(has_hooks, modules)):
        return "there are hooks on modules, which may keep what they see"
    if captured(pg).runs_own_graphs:
        return "graphs of their own run in place of modules"
    if captured(pg).permanent or innermost(captured(pg)) is not None:
        return "other patches are active"
    if may_compile() and is_any_compiled(modules):
        return "parts of the model are compiled"
    if sharding_of(captured(pg).root) is not None:
        return "the model is sharded over processes, all of which must run the same modules"
    return None


def _trimmed(
    pg: PatchableGraph,
    request: SweepRequest,
    targets: Sequence[Target],
    state: ModuleState,
    known: Measurement | None,
    *,
    may_share: bool,
) -> SweepSetup:
    """Returns the setup, without batches, for the run that skips the most outputs.

    Cells that do not share forwards have the same bits as in a plain loop. They skip the cache alone, if the bits stay
    the same: frames that write into it would have to run in each cell.
    """
    inputs, metric = request.inputs, request.metric
    holds_fused = any(isinstance(module, FUSED_MODULES) for module in all_modules(captured(pg).module))
    # Torch's fused kernels may have run in the clean run and not in patched ones, or the reverse.
    is_fused = holds_fused and any(target.node.kind == "op" for target in targets)
    full = known or (request.baseline(pg) if is_fused else None)
    # Under a mode, torch does not use its fused kernels, so the numbers would differ.
    notes_reads = may_share and not holds_fused

    def run(given: Inputs) -> CleanRun:
        keeps_pairs = notes_reads and not request.backward
        return clean_run(pg, given, targets, notes_reads=notes_reads, keeps_pairs=keeps_pairs, state=state)

    extras = trims(captured(pg).root, inputs, targets, keeps_logits=not may_share)
    # A cell that fails on trimmed inputs runs again, which must not accumulate its gradients twice.
    for extra in extras if may_share or not (is_fused or request.backward) else []:
        given = replace(inputs, kwargs={**inputs.kwargs, **extra})
        clean = run(given)
        if not all(_may_skip_cache(target, clean.marks[target.path]) for target in targets):
            continue
        if keeps_last := "logits_to_keep" in extra:
            value = last_position_value(metric, own_tensors(clean.output))
            if value is None:
                continue
            baseline = full or measurement(value)
        else:
            whole = inputs.run(pg) if full is None or not may_share else None
            has_same_bits = may_share or is_part(clean.output, whole, torch.equal)
            baseline = full = full or baseline_of(metric, whole)
            if not has_same_bits or not _gives(metric, own_tensors(clean.output), full):
                continue
        return SweepSetup(
            pg,
            request,
            given,
            baseline,
            replace(clean, returned=None),
            replays=not is_fused,
            keeps_last_logits=keeps_last,
            has_same_bits=not may_share,
        )
    clean = run(inputs)
    baseline = full or baseline_of(metric, clean.returned)
    return SweepSetup(pg, request, inputs, baseline, replace(clean, returned=None), replays=not is_fused)


def _may_skip_cache(target: Target, mark: Mark) -> bool:
    """Whether a patched value occurred, and is not a mask or position, which may depend on the cache.

    The first input of the model, such as its tokens, is neither.
    """
    if mark.occurred == NEVER or not isinstance(mark.value, Tensor):
        return False
    is_first = target.frame.parent is None and target.node.name == target.frame.parameters[0].name
    return mark.value.is_floating_point() or is_first


def _gives(metric: Callable[[Any], Any], output: Any, expected: Measurement) -> bool:
    try:
        return measurement(metric(output)).is_close(expected)
    except Exception:  # it reads an output that was skipped
        return False
