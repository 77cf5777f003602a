"""Patch contexts: which patches are active where, and the forwards and hooks on the model inside the block.

A context belongs to the thread (or task) that entered it: a context variable holds the active ones. For the length of
the block, the modules whose frames hold patches have their `forward` swapped, and a forward hook where their output is
patched; unless the `PatchableGraph` is called in the same context, both do nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch.nn import Module

from graphpatch_notebook.capture import is_own
from graphpatch_notebook.capture.observers import Swaps, ThreadState, observer, visible_apply
from graphpatch_notebook.errors import (
    CheckpointWarning,
    GraphError,
    GraphPatchError,
    PatchNotFiredWarning,
)
from graphpatch_notebook.execution.captured_model import CapturedModel
from graphpatch_notebook.execution.live.boundaries import ModuleHooks, Run, new_run
from graphpatch_notebook.execution.live.patched_operations import was_in_checkpoint
from graphpatch_notebook.execution.live.tracebacks import explain, hide_way_to
from graphpatch_notebook.execution.patch_map import Snapshot
from graphpatch_notebook.execution.plan import Entry, RunPlan
from graphpatch_notebook.execution.reports import Reports, count_of_patches, warn_of_data_loops, warn_of_other_uses
from graphpatch_notebook.execution.skipped_calls import refuse_with_cache
from graphpatch_notebook.execution.splices import check_splices
from graphpatch_notebook.execution.steps import GenerationSteps, StepCount, is_given_cache
from graphpatch_notebook.interrupts import Block, afterwards, discards_value
from graphpatch_notebook.patches.kinds import Patch, RunStopped
from graphpatch_notebook.torch_compat import (
    eager_code,
    function_mode_depth,
    is_in_backward,
    runs_hooks,
    visible_flex_attention,
)
from graphpatch_notebook.warning_places import level_of_caller, warn, warn_each_time


class PatchContext:
    """A context manager with patches, from `PatchableGraph.patch`. It can be entered again, also by several threads."""

    # The steps so far, if this context continues an earlier one. Set it before the context is entered.
    step_count: StepCount | None = None
    # Called after each call of the `PatchableGraph` in the context that returns, in its thread, before the caller has
    # the result; not for calls that such a call makes. Set it before the context is entered.
    after_call: Callable[[], None] | None = None
    is_quiet = False  # whether patches that never fire are not reported; set it before the context is entered
    is_of_one_call = False  # whether it is entered for one call outside of any block
    _was_entered = False

    def __init__(self, captured: CapturedModel, patch_map: Mapping[Any, Any], *, is_strict: bool = False) -> None:
        self._captured = captured
        self._patch_map = patch_map
        self.is_strict = is_strict  # whether patches that never fire are errors
        self._known: tuple[Snapshot, RunPlan] | None = None

    @classmethod
    def of_entries(
        cls, captured: CapturedModel, patch_map: Mapping[Any, Any], entries: Sequence[Entry]
    ) -> PatchContext:
        """Returns a context for a patch map whose entries are known."""
        context = cls(captured, patch_map)
        context._known = Snapshot(patch_map), captured.plan(entries)
        return context

    @classmethod
    def of_one_call(cls, captured: CapturedModel) -> PatchContext:
        """Returns a context for a call outside of any block, with the permanent patches and edited graphs only."""
        context = cls(captured, {})
        context.is_of_one_call = True
        if not captured.permanent:
            return context.quiet()
        context.step_count = captured.steps_outside
        return context

    def quiet(self) -> PatchContext:
        """Returns this context, set to not report patches that never fire."""
        self.is_quiet = True
        return self

    def __enter__(self) -> None:
        __tracebackhide__ = True
        self._was_entered = True
        plan = self._plan()
        context = ActiveContext(self._captured, plan, self)
        try:
            context.hold()
            context.block = Block.entered_by(sys._getframe(1))
            if plan.data_loops and not self.is_quiet:
                warn_of_data_loops(plan.data_loops, is_by_user=not is_own(sys._getframe(1).f_code))
        except BaseException:
            with afterwards(context.let_go):
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            context = self._leave_innermost()
        except BaseException:  # an interrupt; what `interrupts` offers would begin a line too late
            self._leave_innermost()
            raise
        if kind is None and context is not None:
            report_idle(context, is_by_user=not is_own(sys._getframe(1).f_code))

    def __repr__(self) -> str:
        if any(context.origin is self for context in _active.get()):
            return "<PatchContext, active>"
        return "<PatchContext, not active: its patches hold inside of a block, `with pg.patch(...):`>"

    def __del__(self) -> None:
        """Warns of a line that is only `pg.patch(...)`: its value is dropped at once."""
        if self._was_entered:
            return
        frame = sys._getframe().f_back
        if frame is not None and discards_value(frame):
            warn_each_time(
                "pg.patch(...) patches nothing by itself: call the model inside of `with pg.patch(...):`",
                PatchNotFiredWarning,
            )

    def _plan(self) -> RunPlan:
        """Returns the plan for the patch map: the same as before, unless it or a graph has changed."""
        __tracebackhide__ = True
        known = self._known
        if known is None or not self._captured.is_current(known[1]) or not known[0].is_current(self._patch_map):
            entries = self._captured.entries_of(self._patch_map)
            known = self._known = Snapshot(self._patch_map), self._captured.plan(entries)
        return known[1]

    def _leave_innermost(self) -> ActiveContext | None:
        for context in reversed(_active.get()):
            if context.origin is self:
                _leave(context)
                return context
        return None


class ActiveContext:
    """A patch context that was entered."""

    def __init__(self, captured: CapturedModel, plan: RunPlan, origin: PatchContext) -> None:
        outer = innermost(captured)
        self.captured = captured
        before = captured.permanent_plan if outer is None else outer.plan
        # All patches that are active in it: the permanent ones, those of the contexts around it, then its own.
        self.plan: RunPlan = plan if before is None else before.with_more(plan.entries)
        if self.plan.has_parts_of_splices:
            check_splices(self.plan.entries)
        self.own = plan.entries
        self.origin = origin  # what entered it
        self.block: Block | None = None  # the `with` block that it is entered by, if that is known
        self.hooks = ModuleHooks()
        self.has_compiled_parts = False  # whether `torch.compile` has compiled a module that matters to the patches
        self._swaps = Swaps(_recomputing)
        self.calls = _Calls()
        is_strict = origin.is_strict or (outer is not None and outer.reports.is_strict)
        # Reports its patches that do not fire.
        self.reports: Reports = Reports(is_strict=is_strict, is_quiet=origin.is_quiet)
        # The steps of a generation so far.
        self.step_count: StepCount = (origin.step_count or StepCount()) if outer is None else outer.step_count
        # Called after each call of the `PatchableGraph` in it.
        self.after_call: tuple[Callable[[], None], ...] = () if outer is None else outer.after_call
        if origin.after_call is not None:
            self.after_call = (*self.after_call, origin.after_call)
        self.is_left = False

    def hold(self) -> None:
        """Activates the patches, after those of the active contexts of the same model.

        Swaps the forwards of the modules that are watched, and puts hooks on those that need them.
        """
        plan = self.plan
        self.has_compiled_parts = plan.has_compiled_parts
        self._swaps.hold(plan.layout.watched)
        if plan.with_patched_inputs or plan.with_other_boundaries:
            for module in _to_hook(plan):
                self.hooks.hold(module)
        with _lock:
            _entered.append(self)
        _active.set((*_active.get(), self))

    def let_go(self) -> None:
        """Restores the model to its state before `hold`. Can be called again after an interrupt."""
        self.is_left, self.block = True, None
        self.hooks.let_go()
        self._swaps.let_go()
        with _lock:
            if self in _entered:
                _entered.remove(self)
        _active.set(tuple([c for c in _active.get() if c is not self]))


class _Calls:
    """The calls that were made in a context."""

    has_runs = False  # whether the `PatchableGraph` was called in it
    is_used = False  # the same, or in a context inside it
    direct: Module | None = None  # the module of the model that was called directly, without patches, first
    has_direct_with_gradients = False  # whether one was called directly while gradients were enabled
    awaits_backward = False  # whether backward will compute a patched call again (activation checkpointing)


# -- which contexts are active -----------------------------------------------------------------------------------------

_active: ContextVar[tuple[ActiveContext, ...]] = ContextVar("graphpatch_contexts", default=())
_lock = threading.RLock()
_entered: list[ActiveContext] = []


def innermost(captured: CapturedModel) -> ActiveContext | None:
    """Returns the innermost active context of a captured model in this thread or task."""
    for context in reversed(_entered_here() if _active.get() else ()):
        if context.captured is captured:
            return context
    return None


def active_patches(captured: CapturedModel) -> list[tuple[str, Patch[Any]]]:
    """Returns the patches of a call of the model at this moment, each with its path, in order."""
    context = innermost(captured)
    plan = context.plan if context is not None else captured.permanent_plan
    return [] if plan is None else [(entry.target.text, patch) for entry in plan.entries for patch in entry.patches]


def _entered_here() -> Sequence[ActiveContext]:
    """Returns the active contexts of this thread or task, the innermost last.

    A task that was started inside a block keeps a copy of the variable, and with it the context, after the block has
    ended: contexts that were left are not active in it.
    """
    return [context for context in _active.get() if not context.is_left and not _is_over(context)]


def _is_over(context: ActiveContext) -> bool:
    """Takes a context back if an interrupt ended its block without a call of `__exit__`."""
    if context.block is None or not context.block.is_over():
        return False
    with afterwards(context.let_go):
        pass
    warn_each_time(
        "an interrupt ended a `with` block of patches without its `__exit__`: its patches were taken away only now",
        PatchNotFiredWarning,
    )
    return True


def _to_hook(plan: RunPlan) -> list[Module]:
    """Returns the modules whose inputs or output are patched by hooks, rather than in their swapped `forward`.

    Inputs always are: a model may register hooks on its modules during a run (transformers does since 5.2, to collect
    hidden states), which must see patched inputs. Our hook on inputs must come before these, so it is registered now.
    A hook on the output must come last, so it can be registered later.
    """
    # Transformers before 5.2 wraps forwards, to collect hidden states: these must be the values before the patches.
    wraps = hasattr(sys.modules.get("transformers.utils.generic"), "OutputRecorder")
    return plan.with_patched_inputs + [m for m in plan.with_other_boundaries if wraps or runs_hooks(m)]


def _leave(context: ActiveContext) -> None:
    """Takes a context back, and warns of a backward pass that will not see its patches."""
    context.let_go()
    outer = innermost(context.captured)
    if outer is not None:
        outer.calls.is_used |= context.calls.is_used
    if context.calls.awaits_backward:
        warn(
            "the model recomputes its forward in backward (activation checkpointing), and no backward ran inside the "
            "patch context: gradients of what was computed in it would be those of an unpatched recomputation; call "
            "backward() inside the `with` block (`with pg.patch({}):`, if all patches are permanent)",
            CheckpointWarning,
            stacklevel=level_of_caller(),
        )


# -- runs --------------------------------------------------------------------------------------------------------------


def call_patched(
    context: ActiveContext, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls `function`, which runs the model, with the patches of `context`; reports those that never fired."""
    __tracebackhide__ = True
    root, plan, calls, reports = context.captured.module, context.plan, context.calls, context.reports
    is_direct = function is root
    is_alone = context.origin.is_of_one_call
    steps = (
        GenerationSteps(plan.root.frame, plan.restricted, context.step_count, is_direct, is_outside=is_alone)
        if plan.restricted
        else None
    )
    if plan.skips:
        has_cache = not is_direct or is_given_cache(plan.root.frame, args, kwargs)
        if has_cache and kwargs.get("use_cache") is not False:
            refuse_with_cache(plan.skips)
    run = new_run(root, plan, context.hooks, steps, reports.repetitions)
    calls.has_runs = calls.is_used = True
    outer = observer.get()
    is_inside = isinstance(outer, Run) and outer.root is root  # of another call of the same object
    needed = plan.entries
    try:
        result = _observed(run, function, args, kwargs, context.has_compiled_parts)
    except RunStopped as stop:
        if torch.is_grad_enabled() and was_in_checkpoint(stop):
            raise GraphPatchError(_STOPPED_IN_CHECKPOINT) from None
        result, run.applier.fired.has_stopped = stop.value, True
        needed = _entries_until(stop.patch, context)
    if context.is_left:
        raise GraphPatchError(
            "the patch context ended while this call ran in it, in another thread: some of its patches may be missing "
            "in the result; wait for the thread before the end of the `with` block"
        )
    fired = run.applier.fired
    fired.check_end()
    calls.awaits_backward |= run.is_checkpointed and fired.has_changed and torch.is_grad_enabled()
    unfired = fired.others(plan, needed, steps)
    if steps is not None:
        unfired = steps.settle(unfired, fired.ids)
    if fired.with_other_uses:
        warn_of_other_uses(fired.with_other_uses)
    # Methods that do not run the model (`get_input_embeddings`) are called on edited graphs, too.
    if unfired and (is_direct or fired.reached or not is_alone):
        reports.unfired(unfired, "during this call")
    if steps is not None:
        _report_unreached(steps, plan.restricted, reports)
    if context.after_call and not is_inside:
        for callback in context.after_call:
            callback()
    return result


def _report_unreached(steps: GenerationSteps, restricted: Sequence[Entry], reports: Reports) -> None:
    """Reports the steps and positions that no call will come to any more."""
    if steps.before is not None:
        reports.unreached(steps.before, "in the calls before this one")
    if not steps.may_continue:
        reports.unreached(steps.count.take(restricted), "during this call")


def _entries_until(stopping: Patch[Any], context: ActiveContext) -> list[Entry]:
    """Returns the patches of the context in which `stopping` ended the run, and of those inside it.

    What ends a run for its own sake, as `pg.record` does, need not come to the patches of blocks around it, nor to
    permanent ones.
    """
    entries: list[Entry] = []
    for each in reversed(_entered_here()):
        if each.captured is context.captured:
            entries += each.own
            if any(patch is stopping for entry in each.own for patch in entry.patches):
                break
    return entries


_STOPPED_IN_CHECKPOINT = (
    "the run was stopped inside of a function under activation checkpointing, which runs again in backward: run "
    "without gradients (torch.no_grad), switch checkpointing off, or stop outside of that function"
)


def _observed(
    run: Run,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_compiled_parts: bool,
) -> Any:
    __tracebackhide__ = True
    if has_compiled_parts and not eager_code.is_possible:
        raise GraphError(eager_code.reason)
    restoring = [ThreadState().restore]
    # Written out instead of `afterwards`: this is in each patched call.
    try:
        try:
            observer.set(run)
            # Methods may compile the model themselves, as `generate` does with a static cache.
            if function is not run.root or has_compiled_parts:
                restoring.append(partial(eager_code.let_go, run))
                eager_code.hold(run)
            if len(restoring) > 1 or run.plan.sees_ops:
                restoring.append(partial(visible_apply.let_go, run))
                visible_apply.hold(run)
            elif function_mode_depth():
                restoring.append(partial(visible_flex_attention.let_go, run))
                visible_flex_attention.hold(run)
            return function(*args, **kwargs)
        except Exception as error:
            hide_way_to(error)
            fired = run.applier.fired
            if fired.ids:  # else patches did not cause it: a method may have refused its arguments
                explain(error, run.root, [run.plan.root.frame], fired.changes(run.plan))
            raise
        finally:
            for step in restoring:
                step()
    except BaseException:
        for step in restoring:  # again, if an interrupt arrived while they ran
            step()
        raise


def report_idle(context: ActiveContext, *, is_by_user: bool) -> None:
    """Reports the patches of a context that was left: those for steps or positions that no direct call reached.

    All of them, if the model itself was called in it and the `PatchableGraph` never was: calling both is meant as a
    comparison, but calling the model only is taken for a mistake.
    """
    calls, reports = context.calls, context.reports
    # With `after_call`, the caller has seen that no call was made.
    if calls.direct is not None and context.own and not calls.is_used and not context.after_call:
        reports.give(
            f"{count_of_patches(context.own)} never fired in this context: the {type(calls.direct).__name__} itself "
            "was called in it, which is never patched, and the PatchableGraph was not: call pg(...), or a method of it",
            context.own,
        )
        return
    if context.origin.is_of_one_call:  # the next call may be the next step
        return
    # Permanent patches are reported by blocks of the user, not by each cell of a sweep.
    is_outermost = is_by_user and innermost(context.captured) is None
    entries = context.plan.entries if is_outermost else context.own
    reports.unreached(context.step_count.take(entries), "in this context")


# -- activation checkpointing: forwards that run again during backward -------------------------------------------------


def _recomputing(module: Module) -> Run | None:
    """Returns a run for an unobserved `forward`, if it recomputes a patched forward during backward."""
    if not is_in_backward():
        _note_direct_call(module)
        return None
    # Backward may run in a thread of the autograd engine, which does not have the context variable.
    here = _entered_here()
    candidates = here or tuple(_entered)
    mine = [c for c in candidates if id(module) in c.plan.watched_ids and c.calls.has_runs]
    if not mine:
        return None
    context = mine[-1]
    is_ambiguous = any(c.captured is not context.captured for c in mine) or (not here and len(mine) > 1)
    if context.calls.has_direct_with_gradients or is_ambiguous:
        raise GraphPatchError(
            f"{type(module).__name__} is recomputed in backward (activation checkpointing), and it is ambiguous "
            "whether for a patched call or for another one: run backward inside the one context of its forward, and do "
            "not call the original model in that context"
        )
    context.calls.awaits_backward = False
    frames = context.plan.callers.frames_of(module)
    if len(frames) > 1 and any(plan.frame in frames for plan in context.plan.root.walk()):
        raise GraphPatchError(
            f"{type(module).__name__} is called several times and recomputed in backward (activation checkpointing): "
            "which call is recomputed is not known; switch checkpointing off to patch it"
        )
    return Run(context.captured.module, context.plan, context.hooks)


def _note_direct_call(module: Module) -> None:
    for context in _entered_here():
        if id(module) in context.plan.watched_ids:
            context.calls.direct = context.calls.direct or module
            context.calls.has_direct_with_gradients |= torch.is_grad_enabled()
