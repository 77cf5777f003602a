"""Patch contexts: which patches are active where, and what the model looks like meanwhile.

A context belongs to the thread (or task) that entered it: a context variable holds the active ones. For the length of
the block, the modules whose frames hold patches have their `forward` swapped, and a forward hook where their output is
patched; without a run of the `PatchableGraph` in this very context, both do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import Module

from graphpatch_notebook.capture.autograd_functions import apply_observer, visible_apply
from graphpatch_notebook.capture.forward_swap import Swaps, observer
from graphpatch_notebook.capture.records import SourceLine
from graphpatch_notebook.errors import (
    CheckpointWarning,
    GraphError,
    GraphPatchError,
    PatchNotFiredError,
    PatchNotFiredWarning,
    SharedGradientWarning,
)
from graphpatch_notebook.execution.captured_model import CapturedModel
from graphpatch_notebook.execution.frame_watch import new_run
from graphpatch_notebook.execution.live import Run
from graphpatch_notebook.execution.module_hooks import ModuleHooks
from graphpatch_notebook.execution.plan import Entry, Prepared
from graphpatch_notebook.execution.python_stack import forwards_may_be_wrapped
from graphpatch_notebook.execution.repetitions import Repetitions
from graphpatch_notebook.execution.steps import StepCount, Steps
from graphpatch_notebook.execution.tracebacks import explain, hide_way_to
from graphpatch_notebook.execution.unfired import unfired_entries
from graphpatch_notebook.interrupts import Block, completed
from graphpatch_notebook.torch_compat import (
    EagerCode,
    function_mode_depth,
    is_in_backward,
    pop_function_modes,
    restore_gradients,
    runs_hooks,
)
from graphpatch_notebook.warning_places import level_of_caller, warn, warn_each_time


class ActiveContext:
    """A patch context that was entered, with the plan of everything active in it (its own patches come last)."""

    def __init__(
        self,
        owner: CapturedModel,
        root: Module,
        prepared: Prepared,
        is_strict: bool,
        own: Sequence[Entry],
        step_count: StepCount,
        origin: object,
    ) -> None:
        self.owner = owner
        self.root = root
        self.prepared = prepared
        self.plan = prepared.plan
        self.callers = prepared.callers
        self.is_strict = is_strict
        self.swaps = Swaps(_recomputing)
        self.own = own
        self.step_count = step_count
        self.hooks = ModuleHooks()
        self.has_runs = False
        self.has_direct_calls = False
        self.is_used = False
        self.has_compiled_parts = prepared.callers.has_compiled_parts
        self.called_itself: Module | None = None
        self.block: Block | None = None
        self.awaits_backward = False
        self.is_left = False
        self.is_quiet = False
        self.after_call: tuple[Callable[[], None], ...] = ()
        self.origin = origin
        self.outer_observer = observer.get()
        self.told: set[str] = set()
        self.repetitions = Repetitions()
        self.data_loops: dict[SourceLine, list[str]] = {}


_active: ContextVar[tuple[ActiveContext, ...]] = ContextVar("graphpatch_contexts", default=())
_lock = threading.RLock()
_entered: list[ActiveContext] = []


def innermost(owner: CapturedModel) -> ActiveContext | None:
    """Returns the innermost active context of a captured model in this thread or task."""
    return next((context for context in reversed(_entered_here()) if context.owner is owner), None)


def _entered_here() -> tuple[ActiveContext, ...]:
    """Returns the active contexts of this thread or task, the innermost last.

    A task that was started inside of a block keeps a copy of the variable, and with it the context, when the block
    has ended: what was left stays left.
    """
    active = _active.get()
    return tuple(context for context in active if not context.is_left and not _is_over(context)) if active else active


def _is_over(context: ActiveContext) -> bool:
    """Takes a context back whose block was ended by an interrupt that kept it from doing so itself."""
    if context.block is None or not context.block.is_over():
        return False
    take_back(context)
    warn_each_time(
        "an interrupt ended a `with` block of patches without its `__exit__`: its patches were taken away only now",
        PatchNotFiredWarning,
    )
    return True


def entered_by(origin: object) -> tuple[ActiveContext, ...]:
    """Returns the contexts that `origin` entered in this thread or task and has not left, the innermost last."""
    return tuple(context for context in _active.get() if context.origin is origin)


def enter(captured: CapturedModel, prepared: Prepared, *, is_strict: bool, origin: object) -> ActiveContext:
    """Activates what is `prepared`, after the patches of the active contexts of the same captured model.

    Args:
        captured: The model.
        prepared: The patches.
        is_strict: Whether patches that never fire are errors.
        origin: Tells the context from others.
    """
    outer = innermost(captured)
    own, data_loops = prepared.entries, prepared.data_loops
    if outer is not None:
        prepared = outer.prepared.with_more(own)
        is_strict |= outer.is_strict
    step_count = outer.step_count if outer is not None else StepCount()
    context = ActiveContext(captured, captured.module, prepared, is_strict, own, step_count, origin)
    context.data_loops = data_loops
    if outer is not None:
        context.after_call = outer.after_call
    try:
        context.swaps.hold(prepared.watched)
        for module in _to_hook(prepared):
            context.hooks.hold(module)
        with _lock:
            _entered.append(context)
        _active.set((*_active.get(), context))
    except BaseException:
        take_back(context)
        raise
    return context


def _to_hook(prepared: Prepared) -> list[Module]:
    """Returns the modules of which inputs or output are patched by hooks, rather than in their swapped `forward`.

    Inputs, always: a model may hang hooks on its modules in the middle of a run (transformers does since 5.2, to
    collect hidden states), and these are to see patched inputs. It is too late then for a hook that comes first; not
    for one on outputs, which is to come last.
    """
    wraps = forwards_may_be_wrapped()
    return prepared.with_patched_inputs + [m for m in prepared.with_other_boundaries if wraps or runs_hooks(m)]


def leave(context: ActiveContext) -> None:
    """Takes back what `enter` did."""
    take_back(context)
    outer = innermost(context.owner)
    if outer is not None:
        outer.is_used |= context.is_used
    if context.awaits_backward:
        warn(
            "the model recomputes its forward in backward (activation checkpointing), and no backward ran inside the "
            "patch context: gradients of what was computed in it would be those of an unpatched recomputation; call "
            "backward() inside the `with` block",
            CheckpointWarning,
            stacklevel=level_of_caller(),
        )


def take_back(context: ActiveContext) -> None:
    """Makes the model what it was before `context` was entered, and says nothing."""
    completed(partial(_let_go, context))


def _let_go(context: ActiveContext) -> None:
    context.is_left, context.block = True, None
    context.hooks.let_go()
    context.swaps.let_go()
    with _lock:
        if context in _entered:
            _entered.remove(context)
    # What an interrupted call may have left there.
    if isinstance(observer.get(), Run) and observer.get() is not context.outer_observer:
        observer.set(context.outer_observer)
    _active.set(tuple(c for c in _active.get() if c is not context))


# -- runs --------------------------------------------------------------------------------------------------------------


def call_patched(
    context: ActiveContext, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls `function`, which runs the model, with the patches of `context`; reports those that never fired."""
    __tracebackhide__ = True
    plan, is_direct = context.plan, function is context.root
    steps = Steps(plan.frame, plan.restricted, context.step_count, is_direct) if plan.restricted else None
    run = new_run(context.root, plan, context.prepared.watched_ids, context.callers, context.hooks, steps)
    run.repetitions = context.repetitions
    context.has_runs = context.is_used = True
    outer, applied = observer.get(), apply_observer.get()
    is_inside = isinstance(outer, Run) and outer.root is context.root  # of another call of the same object
    modes, has_grad, eager = function_mode_depth(), torch.is_grad_enabled(), EagerCode()
    try:
        result = _observed(context, run, function, args, kwargs, eager)
    except BaseException as error:
        # An interrupt may come between any two instructions, also between those that take things back.
        observer.set(outer)
        apply_observer.set(applied)
        pop_function_modes(modes)
        eager.let_go()
        restore_gradients(has_grad, error)
        raise
    if context.is_left:
        raise GraphPatchError(
            "the patch context ended while this call ran in it, in another thread: some of its patches may be missing "
            "in the result; wait for the thread before the end of the `with` block"
        )
    context.awaits_backward |= run.is_checkpointed and run.has_changed and torch.is_grad_enabled()
    unfired = unfired_entries(run)
    if steps is not None:
        unfired = steps.settle(unfired, run.fired)
    if run.with_other_uses:
        _warn_of_other_uses(run.with_other_uses)
    if unfired:
        _report(f"{_patches(unfired)} never fired during this call", unfired, context)
    if context.after_call and not is_inside:
        for tell in context.after_call:
            tell()
    return result


def _observed(
    context: ActiveContext,
    run: Run,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    eager: EagerCode,
) -> Any:
    __tracebackhide__ = True
    token = observer.set(run)
    try:
        # A method may compile the model at its own discretion, as `generate` does with a static cache.
        is_plain = function is run.root and not context.has_compiled_parts
        if is_plain and not run.plan.sees_ops:
            return function(*args, **kwargs)
        if context.has_compiled_parts and not EagerCode.is_possible:
            raise GraphError(EagerCode.reason)
        if not is_plain:
            eager.hold()
        with visible_apply():
            return function(*args, **kwargs)
    except Exception as error:
        hide_way_to(error)
        if run.fired:  # else it has nothing to do with patches: a method refuses its arguments, say
            explain(error, run.root, [run.plan.frame], run.changed_so_far())
        raise
    finally:
        observer.reset(token)
        eager.let_go()


def _warn_of_other_uses(paths: list[str]) -> None:
    shown = ", ".join(map(repr, paths[:3])) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    warn(
        f"the gradients of probed inputs are those of other uses of the same tensors, too: {shown}. Their modules are "
        "given one tensor as several inputs, or in a list or dict, or run without gradients; probe what they compute",
        SharedGradientWarning,
        stacklevel=level_of_caller(),
    )


def _patches(unfired: Sequence[object]) -> str:
    return "a patch" if len(unfired) == 1 else f"{len(unfired)} patches"


def _report(what: str, unfired: list[tuple[Entry, str]], context: ActiveContext) -> None:
    _tell(f"{what}: " + "; ".join(f"{entry.target.path!r}: {why}" for entry, why in unfired), context)


def _tell(message: str, context: ActiveContext) -> None:
    if context.is_quiet:
        return
    if context.is_strict:
        raise PatchNotFiredError(message)
    if message not in context.told:
        context.told.add(message)
        warn_each_time(message, PatchNotFiredWarning)


def report_idle(context: ActiveContext) -> None:
    """Reports the patches of a context that was left: those for steps or positions that came up in no direct call.

    All of them, where the model itself was called in it and the `PatchableGraph` never was: who calls both wants to
    compare, but who calls the model only has taken the one for the other.
    """
    module = context.called_itself
    # Who is told of each call tells of none, too.
    if module is not None and context.own and not context.is_used and not context.after_call:
        _tell(
            f"{_patches(context.own)} never fired in this context: the {type(module).__name__} itself was called in "
            "it, which is never patched, and the PatchableGraph was not: call pg(...), or a method of it",
            context,
        )
        return
    idle = context.step_count.take_idle(context.own)
    if idle:
        _report(f"{_patches(idle)} never fired in this context", idle, context)


# -- activation checkpointing: forwards that run again during backward -------------------------------------------------


def _recomputing(module: Module) -> Run | None:
    """Returns a run for a `forward` that nobody observes but that recomputes, in backward, what was patched before."""
    if not is_in_backward():
        _note_direct_call(module)
        return None
    # Backward may run in a thread of the autograd engine, which has no context of ours.
    here = _entered_here()
    candidates = here or tuple(_entered)
    mine = [c for c in candidates if id(module) in c.prepared.watched_ids and c.has_runs]
    if not mine:
        return None
    context = mine[-1]
    is_ambiguous = any(c.owner is not context.owner for c in mine) or (not here and len(mine) > 1)
    if context.has_direct_calls or is_ambiguous:
        raise GraphPatchError(
            f"{type(module).__name__} is recomputed in backward (activation checkpointing), and it cannot be told "
            "whether for a patched call or for another one: run backward inside the one context of its forward, and "
            "do not call the original model in that context"
        )
    context.awaits_backward = False
    frames = context.callers.frames_of(module)
    if len(frames) > 1 and any(plan.frame in frames for plan in context.plan.walk()):
        raise GraphPatchError(
            f"{type(module).__name__} is called several times and recomputed in backward (activation checkpointing): "
            "it cannot be told which call is recomputed; switch checkpointing off to patch it"
        )
    return Run(context.root, context.plan, context.prepared.watched_ids, context.callers, context.hooks)


def _note_direct_call(module: Module) -> None:
    for context in _entered_here():
        if id(module) in context.prepared.watched_ids:
            context.called_itself = context.called_itself or module
            context.has_direct_calls |= torch.is_grad_enabled()
