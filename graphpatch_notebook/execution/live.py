"""A patched run: the model's own code runs, and patches are applied to its values.

Only frames on the way to a patched value are seen at all, and only those with patched ops run under a function mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from graphpatch_notebook.capture.autograd_functions import apply_observer
from graphpatch_notebook.capture.call_sites import invoke
from graphpatch_notebook.execution.apply import Applier
from graphpatch_notebook.execution.boundary import patched_inputs, replacements, watch_inputs, with_aliases
from graphpatch_notebook.execution.frames import FrameRun, RunningFrames
from graphpatch_notebook.execution.live_mode import LiveMode
from graphpatch_notebook.execution.module_hooks import ModuleHooks, takes_hooks
from graphpatch_notebook.execution.plan import FramePlan, RunPlan
from graphpatch_notebook.execution.python_stack import is_called_by_module_call, is_in_checkpoint
from graphpatch_notebook.execution.repetitions import Repetitions
from graphpatch_notebook.execution.stand_in import bound_with
from graphpatch_notebook.execution.steps import Steps
from graphpatch_notebook.execution.tracebacks import explain
from graphpatch_notebook.interrupts import holding
from graphpatch_notebook.torch_compat import runs_hooks


class Run:
    """One patched call of a model: sees the swapped `forward`s and the hooks of its modules.

    Attributes:
        root: The model.
        plan: What is patched.
        applier: Applies the patches.
        has_gradients: Whether gradients were enabled at the start: reentrant checkpointing itself disables them.
        is_checkpointed: Whether a patched frame ran under activation checkpointing.
    """

    def __init__(
        self,
        root: Module,
        plan: RunPlan,
        hooks: ModuleHooks,
        steps: Steps | None = None,
        repetitions: Repetitions | None = None,
    ) -> None:
        self.root = root
        self.plan = plan
        self.applier = Applier(RunningFrames(root, plan, repetitions or Repetitions()), steps)
        self.has_gradients = torch.is_grad_enabled()
        self.is_checkpointed = False
        self._frames = self.applier.frames
        self._stack = self._frames.stack
        self._hooks = hooks
        self._with_patched_inputs: set[int] = set()
        self._awaiting_output: dict[int, list[tuple[int, FramePlan]]] = {}

    def on_forward(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs one frame, with the patches on its inputs, parameters, ops and output."""
        __tracebackhide__ = True
        if id(module) not in self.plan.watched_ids:  # swapped for another context
            return forward(*args, **kwargs)
        stack = self._stack
        if self.applier.steps is not None and len(stack) == 1:
            self._count_step(module, args, kwargs)
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
            hooks_follow = bool(plan.output) and self._hooks_follow(module)
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
        """Applies the patches on a module's inputs where its own hooks are to see them too."""
        __tracebackhide__ = True
        plan, _ = self._frames.next_plan(module)
        self._with_patched_inputs.discard(id(module))  # of a call that another hook broke off
        if plan is None or not (plan.inputs or plan.watched_inputs) or plan.override is not None:
            return None
        if self.applier.steps is not None and len(self._stack) == 1:
            self._count_step(module, args, kwargs)
        self._with_patched_inputs.add(id(module))
        if plan.probed_inputs and self.has_gradients:
            args, kwargs = with_aliases(self.applier, plan, args, kwargs)
        watch_inputs(self.applier, plan, args, kwargs)
        return patched_inputs(self.applier, plan, args, kwargs)

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
        applier = self.applier
        if plan.probed_inputs and self.has_gradients and id(module) not in self._with_patched_inputs:
            args, kwargs = with_aliases(applier, plan, args, kwargs)
        override = plan.override
        if override is not None:
            patched = partial(applier.in_graph, override.entries)
            return override.module.run_patched(override.names, patched, args, kwargs)
        if self._with_patched_inputs and id(module) in self._with_patched_inputs:
            self._with_patched_inputs.discard(id(module))
        else:
            if plan.watched_inputs:
                watch_inputs(applier, plan, args, kwargs)
            if plan.inputs:
                args, kwargs = patched_inputs(applier, plan, args, kwargs)
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
        """Runs `forward` with patched parameters, buffers and attributes, on a stand-in where any is replaced."""
        __tracebackhide__ = True
        bound_to = getattr(forward, "__self__", None)  # a stand-in itself where the calling frame runs on one
        module = bound_to if isinstance(bound_to, Module) else module
        replaced = replacements(self.applier, plan, module)
        if not replaced:
            return self._invoke(plan, forward, args, kwargs)
        stand_in, bound = bound_with(module, replaced, forward)
        try:
            return self._invoke(plan, bound, args, kwargs)
        finally:
            stand_in.hand_on_changes()

    def _invoke(
        self, plan: FramePlan, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls `forward`: under the mode of this run, and all that it calls too, if it needs that."""
        __tracebackhide__ = True
        applier = self.applier
        if applier.is_under_mode or not plan.needs_mode:
            return invoke(forward, args, kwargs)
        mode = LiveMode(applier, has_gradients=self.has_gradients)
        applier.is_under_mode = True
        try:
            with holding(apply_observer, mode), mode:
                return invoke(forward, args, kwargs)
        finally:
            applier.is_under_mode = False

    def _count_step(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes a call from outside any frame: of the model, or by a method of it."""
        steps = self.applier.steps
        assert steps is not None
        if id(module) in self._with_patched_inputs:
            return  # counted when its inputs were patched
        if module is self.root:
            steps.begin(args, kwargs)
        else:
            steps.outside(module, kwargs)

    def _hooks_follow(self, module: Module) -> bool:
        """Whether the module's own hooks run after this `forward`; then ours is made to follow them."""
        if not runs_hooks(module) or not takes_hooks(module) or not is_called_by_module_call():
            return False
        self._hooks.hold(module)
        return True

    def _drop_abandoned(self, module: Module) -> None:
        """Forgets earlier calls of `module` whose output never came: a hook of the model raised, and was handled."""
        waiting = self._awaiting_output.get(id(module))
        while waiting and waiting[-1][0] >= len(self._stack):
            waiting.pop()
