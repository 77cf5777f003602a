"""A patched run of the model's own code: identifies frames, and patches inputs, parameters and outputs.

Only frames on the path to a patched value are seen, and only those with patched ops run under a function mode
(`operations`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.inputs import given_input, with_input, with_other_tensor
from graphpatch_notebook.capture.observers import Swaps, apply_observer, invoke, observer
from graphpatch_notebook.checks.sharding import is_parallel_machinery
from graphpatch_notebook.errors import PatchShapeError
from graphpatch_notebook.execution.live.apply import Applier
from graphpatch_notebook.execution.live.frames import FrameRun, RunningFrames
from graphpatch_notebook.execution.live.patched_operations import LiveMode, is_in_checkpoint
from graphpatch_notebook.execution.live.stand_in import bound_with, held_value, holding_tensors, original_of, tensor_at
from graphpatch_notebook.execution.live.tracebacks import explain
from graphpatch_notebook.execution.plan import Entry, FramePlan, RunPlan
from graphpatch_notebook.execution.reports import Repetitions
from graphpatch_notebook.execution.skipped_calls import passing_input
from graphpatch_notebook.execution.steps import GenerationSteps
from graphpatch_notebook.interrupts import afterwards, holding
from graphpatch_notebook.torch_compat import runs_hooks, takes_hooks
from graphpatch_notebook.values import ContainerSpec, Key, ValueSpec, rebuilt, take


class Run:
    """One patched call of a model: sees the swapped `forward`s and the hooks of its modules."""

    def __init__(
        self,
        root: Module,
        plan: RunPlan,
        hooks: ModuleHooks,
        steps: GenerationSteps | None = None,
        repetitions: Repetitions | None = None,
    ) -> None:
        self.root = root
        self.plan = plan
        self.applier = Applier(RunningFrames(root, plan, repetitions or Repetitions()), steps)
        # Whether gradients were enabled at the start: reentrant checkpointing itself disables them.
        self.has_gradients = torch.is_grad_enabled()
        self.is_checkpointed = False  # whether a patched frame ran under activation checkpointing
        self._frames = self.applier.frames
        self._stack = self._frames.stack
        self._hooks = hooks
        self._with_patched_inputs: set[int] = set()
        self._awaiting_output: dict[int, list[tuple[int, FramePlan]]] = {}

    @property
    def is_patched(self) -> bool:
        """Whether there are patches. Loaded graphs read this, and the next, from the run that calls them."""
        return len(self.plan.entries) > 0

    @property
    def has_edited_graphs(self) -> bool:
        """Whether an edited graph runs in it."""
        return any(frame_plan.frame.is_edited for frame_plan in self.plan.root.walk())

    def on_forward(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs one frame, with the patches on its inputs, parameters, ops and output."""
        __tracebackhide__ = True
        if id(module) not in self.plan.watched_ids:  # swapped for another context
            return forward(*args, **kwargs)
        stack = self._stack
        if len(stack) == 1:
            self._begin(module, args, kwargs)
        plan = self._frames.plan_of(module)
        if self._awaiting_output:
            self._drop_abandoned(module)
        frame_run = FrameRun(plan, (args, kwargs))  # `tracebacks` finds it here
        stack.append(frame_run)
        try:
            if plan is None:
                return invoke(forward, args, kwargs)
            self.applier.fired.reached.add(id(plan.frame))
            if self.has_gradients and not self.is_checkpointed and is_in_checkpoint():
                self.is_checkpointed = True
            hooks_follow = bool(plan.output) and runs_hooks(module) and self._hooks_follow(module)
            output = self.run_frame(module, plan, forward, args, kwargs)
        except Exception as error:
            if len(stack) == 2:  # the outermost frame: the traceback shows the whole way down from here
                frames = self.plan.callers.frames_of(module) if plan is None else [plan.frame]
                explain(error, module, frames, self.applier.fired.changes(self.plan))
            raise
        finally:
            stack.pop()
        if hooks_follow:
            self._awaiting_output.setdefault(id(module), []).append((len(stack), plan))
            return output
        return self.applier.at_boundary(plan.output, output) if plan.output else output

    def on_inputs(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Applies the patches on a module's inputs before its own hooks, which see the patched inputs."""
        __tracebackhide__ = True
        plan, _ = self._frames.next_plan(module)
        self._with_patched_inputs.discard(id(module))  # of a call that another hook ended early
        if plan is None or not (plan.inputs or plan.watched_inputs) or plan.override is not None:
            return None
        if len(self._stack) == 1:
            self._begin(module, args, kwargs)
        if plan.probed_inputs and self.has_gradients:
            args, kwargs = _with_aliases(self.applier, plan, args, kwargs)
        _watch_inputs(self.applier, plan, args, kwargs)
        patched = _patched_inputs(self.applier, plan, args, kwargs)
        self._with_patched_inputs.add(id(module))  # last: a patch may call the module itself
        return patched

    def on_output(self, module: Module, output: Any) -> Any:
        """Applies the patches on a module's output, after the module's own hooks."""
        __tracebackhide__ = True
        waiting = self._awaiting_output.get(id(module))
        if not waiting or waiting[-1][0] != len(self._stack):
            return output
        return self.applier.at_boundary(waiting.pop()[1].output, output)

    def run_frame(
        self,
        module: Module,
        plan: FramePlan,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs one frame with all its patches except those on the output."""
        __tracebackhide__ = True
        if plan.is_bare:
            return invoke(forward, args, kwargs)
        applier = self.applier
        if plan.probed_inputs and self.has_gradients and id(module) not in self._with_patched_inputs:
            args, kwargs = _with_aliases(applier, plan, args, kwargs)
        skip = next(filter(applier.may_apply, reversed(plan.skips)), None) if plan.skips else None
        override = plan.override
        if override is not None and skip is None:
            patched = partial(applier.in_graph, override.entries)
            return override.module.run_patched(override.names, patched, args, kwargs)
        if self._with_patched_inputs and id(module) in self._with_patched_inputs:
            self._with_patched_inputs.discard(id(module))
        else:
            if plan.watched_inputs:
                _watch_inputs(applier, plan, args, kwargs)
            if plan.inputs:
                args, kwargs = _patched_inputs(applier, plan, args, kwargs)
        if skip is not None:
            with applier.unseen(), applier.frames.inside_one_node():
                return _skipped_output(applier, skip, args, kwargs)
        if plan.tensors or plan.watched_tensors:
            return self._run_with_tensors(module, plan, forward, args, kwargs)
        return self._invoke(plan, forward, args, kwargs)

    def _run_with_tensors(
        self,
        module: Module,
        plan: FramePlan,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs `forward` with patched parameters, buffers and attributes, on a stand-in if any is replaced."""
        __tracebackhide__ = True
        bound_to = getattr(forward, "__self__", None)  # a stand-in itself, if the calling frame runs on one
        module = bound_to if isinstance(bound_to, Module) else module
        replaced = _replacements(self.applier, plan, module)
        if not replaced:
            return self._invoke(plan, forward, args, kwargs)
        if is_parallel_machinery(forward):
            with holding_tensors(module, replaced):
                return self._invoke(plan, forward, args, kwargs)
        stand_in, bound = bound_with(module, replaced, forward)
        try:
            return self._invoke(plan, bound, args, kwargs)
        finally:
            stand_in.copy_changes_back()

    def _invoke(
        self, plan: FramePlan, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls `forward`: under the mode of this run, and all that it calls too, if it needs that."""
        __tracebackhide__ = True
        applier = self.applier
        if applier.is_under_mode or not plan.needs_mode:
            return invoke(forward, args, kwargs)
        mode, before = LiveMode(applier, has_gradients=self.has_gradients), apply_observer.get()
        applier.is_under_mode = True
        try:
            try:  # `holding`, written out
                apply_observer.set(mode)
                with mode:
                    return invoke(forward, args, kwargs)
            finally:
                apply_observer.set(before)
        finally:
            apply_observer.set(before)
            applier.is_under_mode = False

    def _begin(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes a call from outside any frame: of the model, or by a method of it."""
        if id(module) in self._with_patched_inputs:
            return  # noted when its inputs were patched
        steps = self.applier.steps
        if module is self.root:
            self.applier.values.clear()
            if steps is not None:
                steps.begin(args, kwargs)
        elif steps is not None:
            steps.outside(module, kwargs)

    def _hooks_follow(self, module: Module) -> bool:
        """Whether the module's own hooks run after this `forward`; then registers ours after them."""
        if not takes_hooks(module) or not is_called_by_module_call():
            return False
        self._hooks.hold(module)
        return True

    def _drop_abandoned(self, module: Module) -> None:
        """Forgets earlier calls of `module` without an output: a hook of the model raised, which was handled."""
        waiting = self._awaiting_output.get(id(module))
        while waiting and waiting[-1][0] >= len(self._stack):
            waiting.pop()


# -- what a module call is given --------------------------------------------------------------------------------------


def _watch_inputs(applier: Applier, plan: FramePlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Applies the entries on inputs that only observe."""
    with applier.unseen():
        for position, name, entry in plan.watched_inputs:
            if position < len(args):
                value = args[position]
            elif name in kwargs:
                value = kwargs[name]
            else:
                value = given_input(plan.frame.parameters, name, args, kwargs)
            applier.watch(entry, value)


def _patched_inputs(
    applier: Applier, plan: FramePlan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call with the entries on inputs applied."""
    __tracebackhide__ = True
    for name, entries in plan.inputs.items():
        given = given_input(plan.frame.parameters, name, args, kwargs)
        value = applier.at_boundary(entries, given)
        if value is not given:
            args, kwargs = with_input(plan.frame.parameters, name, value, args, kwargs)
    return args, kwargs


def _with_aliases(
    applier: Applier, plan: FramePlan, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call with a separate alias for each tensor that a patch observes.

    A caller may use the tensor elsewhere, too (the residual stream): the gradient of the alias is that of what the
    module does with it.
    """
    seen: set[int] = set()
    with_other_uses = applier.fired.with_other_uses
    with applier.unseen():
        for entry in plan.probed_inputs:
            value = given_input(plan.frame.parameters, entry.target.node.target, args, kwargs)
            try:
                for key in entry.target.dig:
                    value = take(value, key)
            except (LookupError, AttributeError, TypeError):  # reported when the patch is applied
                continue
            if not isinstance(value, Tensor) or not value.requires_grad or id(value) in seen:
                continue
            if not torch.is_grad_enabled():  # an alias would not have a gradient, and the module might read it
                with_other_uses.append(entry.target.path)
                continue
            alias = value.view_as(value)
            # A module may check whether two of its inputs are one tensor, so they stay one.
            args, count = with_other_tensor(args, value, alias)
            named = {name: with_other_tensor(given, value, alias) for name, given in kwargs.items()}
            kwargs = {name: given for name, (given, _) in named.items()}
            count += sum(each for _, each in named.values())
            if count:
                seen.add(id(alias))
            if count != 1:
                with_other_uses.append(entry.target.path)
    return args, kwargs


def _replacements(applier: Applier, plan: FramePlan, module: Module) -> dict[str, Tensor]:
    """Returns the tensors that patches put in place of parameters, buffers and attributes of `module`, by path."""
    __tracebackhide__ = True
    with applier.unseen():
        for path, entry in plan.watched_tensors:
            held = module._parameters
            applier.watch(entry, held[path] if path in held else tensor_at(module, path))
    found: dict[str, Tensor] = {}
    for path, entries in plan.tensors.items():
        with applier.unseen():
            value = held_value(module, path)
        patched = applier.at_boundary(entries, value)
        if patched is not value:
            found[path] = patched
    return found


# -- calls that a patch replaces ---------------------------------------------------------------------------------------


def _skipped_output(applier: Applier, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a call that `entry` replaces."""
    __tracebackhide__ = True
    target, patch = entry.target, entry.patches[-1]
    applier.fired.ids.add(id(entry))
    applier.fired.skipped.add(id(target.frame))
    applier.fired.has_changed = True
    name = passing_input(target)
    given = None if name is None else given_input(target.frame.parameters, name, args, kwargs)
    if not isinstance(given, Tensor) and not isinstance(getattr(patch, "value", None), Tensor):
        raise PatchShapeError(f"{target.text!r}: the call has no tensor as {name!r} to pass through: give value=")
    return _container(target.frame.output_node.spec, target.dig, patch.op(given))


def _container(spec: ValueSpec, dig: Sequence[Key], value: Any) -> Any:
    """Returns a container as recorded with `value` where `dig` leads, and `None` elsewhere."""
    if not dig:
        return value
    assert isinstance(spec, ContainerSpec)
    items = [_container(child, dig[1:], value) if key == dig[0] else None for _, key, child in spec.children]
    return rebuilt(spec.type, [key for _, key, _ in spec.children], items)


# -- runs whose frames are seen ----------------------------------------------------------------------------------------


class FrameWatch(Protocol):
    """Sees all frames of a run."""

    def begin(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any] | None:
        """Called when a frame begins; returns the function that replaces its `forward`, if there is one."""

    def returned(self, output: Any) -> None:
        """Called when the `forward` of the innermost frame returned, before patches on its output."""

    def end(self) -> None:
        """Called when the innermost frame has ended, also by an error."""


watch: ContextVar[FrameWatch | None] = ContextVar("graphpatch_frame_watch", default=None)
"""Sees the frames of the patched runs that begin in this context."""


@contextmanager
def frames_seen(frame_watch: FrameWatch, modules: Iterable[Module]) -> Iterator[None]:
    """Shows `frame_watch` the frames of these modules in patched runs in the block, not only those of patched ones."""
    swaps = Swaps()
    with afterwards(swaps.let_go), holding(watch, frame_watch):
        swaps.hold(module for module in modules if takes_hooks(module))
        yield


class WatchedRun(Run):
    """A patched run with a `FrameWatch` that sees all its frames."""

    frame_watch: FrameWatch

    def on_forward(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        __tracebackhide__ = True
        instead = self.frame_watch.begin(module, forward, args, kwargs)
        try:
            output = super().on_forward(module, instead or forward, args, kwargs)
            self.frame_watch.returned(output)
            return output
        finally:
            self.frame_watch.end()

    def run_frame(
        self, module: Module, plan: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        __tracebackhide__ = True
        output = super().run_frame(module, plan, forward, args, kwargs)
        self.frame_watch.returned(output)  # before the patches on the output
        return output


def new_run(*args: Any) -> Run:
    """Returns a patched run; a `FrameWatch` of this context sees its frames."""
    frames = watch.get()
    if frames is None:
        return Run(*args)
    run = WatchedRun(*args)
    run.frame_watch = frames
    return run


# -- hooks: on modules with hooks of their own, ours must come last; all contexts share one pair for each module -------

_lock = threading.Lock()
# By module (its id): what holds its hooks, and their handles.
_hooks: dict[int, tuple[set[ModuleHooks], list[RemovableHandle]]] = {}


class ModuleHooks:
    """The hooks that one context holds. As with `Swaps`, `let_go` can be called again after an interrupt."""

    def __init__(self) -> None:
        self._modules: dict[int, Module] = {}

    def hold(self, module: Module) -> None:
        """Sees the inputs and the output of `module`, after its own hooks, until `let_go`."""
        if id(module) in self._modules:
            return
        self._modules[id(module)] = module
        with _lock:
            holders, handles = _hooks.setdefault(id(module), (set(), []))
            holders.add(self)
            if not handles:
                handles.append(module.register_forward_pre_hook(_on_inputs, with_kwargs=True))
            if len(handles) == 1:
                handles.append(module.register_forward_hook(_on_output))

    def let_go(self) -> None:
        """Takes back all that `hold` did."""
        with _lock:
            for key in self._modules:
                holders, handles = _hooks.get(key, (set(), []))
                holders.discard(self)
                if not holders:
                    for handle in handles:
                        handle.remove()
                    _hooks.pop(key, None)
            self._modules.clear()


def _on_inputs(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    __tracebackhide__ = True
    if kwargs is None:  # another thread takes the hook away (or adds it) while this call goes through the hooks
        return None
    on_inputs = getattr(observer.get(), "on_inputs", None)
    return None if on_inputs is None else on_inputs(original_of(module), args, kwargs)


def _on_output(module: Module, _args: Any, output: Any) -> Any:
    __tracebackhide__ = True
    on_output = getattr(observer.get(), "on_output", None)
    return output if on_output is None else on_output(original_of(module), output)


_MODULE_FILE = Module.__call__.__code__.co_filename
_MODULE_CALLERS = {"_call_impl", "inner", "_slow_forward"}


def is_called_by_module_call() -> bool:
    """Whether the swapped `forward` was called by `Module.__call__`, which runs the module's hooks afterwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _MODULE_FILE:
            return code.co_name in _MODULE_CALLERS
        facts = call_sites.facts_of(code)
        if not (call_sites.is_own(code) or facts.is_offloading or facts.is_collecting):
            return False
        frame = frame.f_back
    return False
