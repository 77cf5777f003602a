"""A patched run: the model's own code runs, and patches are applied where their values come up.

Only frames on the way to a patched value are seen at all, and only those with patched ops run under a function mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.autograd_functions import apply_observer
from graphpatch_notebook.capture.call_sites import invoke
from graphpatch_notebook.capture.inputs import given_input, with_input, with_other_tensor
from graphpatch_notebook.checks.dimensions import Inputs
from graphpatch_notebook.errors import GraphPatchError
from graphpatch_notebook.execution.apply import MissingChildError, apply_entry, write_back
from graphpatch_notebook.execution.live_mode import LiveMode
from graphpatch_notebook.execution.module_hooks import ModuleHooks, takes_hooks
from graphpatch_notebook.execution.plan import Callers, Entry, FramePlan
from graphpatch_notebook.execution.python_stack import is_called_by_module_call, is_in_checkpoint
from graphpatch_notebook.execution.repetitions import Repetitions
from graphpatch_notebook.execution.stand_in import bound_with, held_value, tensor_at
from graphpatch_notebook.execution.steps import HeldBackError, Steps
from graphpatch_notebook.execution.tracebacks import explain
from graphpatch_notebook.torch_compat import runs_hooks, without_torch_functions
from graphpatch_notebook.values import take

_NOTHING_TO_HIDE = nullcontext()


class FrameRun:
    """One frame of a patched run.

    Attributes:
        plan: What is patched in it; `None` if nothing is.
        counts: How often each submodule was called, and each patched call site came up, so far (by id).
        inputs: The arguments of its `forward`.
    """

    __slots__ = ("counts", "inputs", "plan")

    def __init__(self, plan: FramePlan | None, inputs: Inputs = ((), {})) -> None:
        self.plan = plan
        self.counts: dict[int, int] = {}
        self.inputs = inputs


class Run:
    """One patched call of a model. Observes the swapped `forward`s in its context."""

    def __init__(
        self,
        root: Module,
        plan: FramePlan,
        watched: set[int],
        callers: Callers,
        hooks: ModuleHooks,
        steps: Steps | None = None,
    ) -> None:
        self.root = root
        self.steps = steps
        self.watched = watched
        self.plan = plan
        self.callers = callers
        self.hooks = hooks
        self.stack: list[FrameRun] = [FrameRun(plan)]
        self.fired: set[int] = set()
        self.missing: dict[int, str] = {}
        self.reached: set[int] = set()
        self.with_other_uses: list[str] = []
        self._with_patched_inputs: set[int] = set()
        self._awaiting_output: dict[int, list[tuple[int, FramePlan]]] = {}
        self.repetitions = Repetitions()
        self._mode: LiveMode | None = None
        # Asked at the start: reentrant checkpointing itself switches gradients off.
        self.has_gradients = torch.is_grad_enabled()
        self.is_checkpointed = False
        self.has_changed = False

    # -- module calls --------------------------------------------------------------------------------------------------

    def on_forward(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs one frame, with the patches that stand on its inputs, parameters, ops and output."""
        __tracebackhide__ = True
        if id(module) not in self.watched:  # swapped for another context
            return forward(*args, **kwargs)
        if self.steps is not None and len(self.stack) == 1:
            self._count_step(module, args, kwargs)
        plan = self._plan_of(module)
        stack = self.stack
        if self._awaiting_output:
            self._drop_abandoned(module)
        run = FrameRun(plan, (args, kwargs))  # `tracebacks` reads this variable, and `plan`
        stack.append(run)
        try:
            if plan is None:
                return invoke(forward, args, kwargs)
            self.reached.add(id(plan.frame))
            if self.has_gradients and not self.is_checkpointed and is_in_checkpoint():
                self.is_checkpointed = True
            hooks_follow = bool(plan.output) and self._hooks_follow(module)
            output = self._run(module, plan, forward, args, kwargs)
        except Exception as error:
            if len(stack) == 2:  # the outermost frame: the traceback shows the whole way down from here
                frames = self.callers.frames_of(module) if plan is None else [plan.frame]
                explain(error, module, frames, self.changed_so_far())
            raise
        finally:
            stack.pop()
        if hooks_follow:
            self._awaiting_output.setdefault(id(module), []).append((len(stack), plan))
            return output
        return self._apply(plan.output, output) if plan.output else output

    def changed_so_far(self) -> list[str]:
        """Returns in words the patches that were applied in this run so far, but for those that only look."""
        fired = (entry for plan in self.plan.walk() for entry in plan.entries if id(entry) in self.fired)
        return [
            f"{entry.target.path!r} ({type(patch).__name__})"
            for entry in fired
            for patch in entry.patches
            if not patch.observes_only
        ]

    def _count_step(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes a call from outside any frame: of the model, or by a method of it."""
        assert self.steps is not None
        if id(module) in self._with_patched_inputs:
            return  # counted when its inputs were patched
        if module is self.root:
            self.steps.begin(args, kwargs)
        else:
            self.steps.outside(module, kwargs)

    def _hooks_follow(self, module: Module) -> bool:
        """Whether the module's own hooks run after this `forward`; then ours is made to follow them."""
        if not runs_hooks(module) or not takes_hooks(module) or not is_called_by_module_call():
            return False
        self.hooks.hold(module)
        return True

    def on_inputs(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Applies the patches on a module's inputs where its own hooks are to see them too."""
        __tracebackhide__ = True
        plan, _ = self._next_plan(module)
        self._with_patched_inputs.discard(id(module))  # of a call that another hook broke off
        if plan is None or not (plan.inputs or plan.watched_inputs) or plan.own_graph is not None:
            return None
        if self.steps is not None and len(self.stack) == 1:
            self._count_step(module, args, kwargs)
        self._with_patched_inputs.add(id(module))
        if plan.probed_inputs and self.has_gradients:
            args, kwargs = self._with_aliases(plan, args, kwargs)
        self._watch_inputs(plan, args, kwargs)
        return self._patched_inputs(plan, args, kwargs)

    def on_output(self, module: Module, output: Any) -> Any:
        """Applies the patches on a module's output, after the module's own hooks."""
        __tracebackhide__ = True
        waiting = self._awaiting_output.get(id(module))
        if not waiting or waiting[-1][0] != len(self.stack):
            return output
        return self._apply(waiting.pop()[1].output, output)

    def _drop_abandoned(self, module: Module) -> None:
        """Forgets earlier calls of `module` whose output never came: a hook of the model raised, and was handled."""
        waiting = self._awaiting_output.get(id(module))
        while waiting and waiting[-1][0] >= len(self.stack):
            waiting.pop()

    def _plan_of(self, module: Module) -> FramePlan | None:
        """Returns the plan of the frame that begins now, and counts it."""
        plan, index = self._next_plan(module)
        caller = self.stack[-1]
        caller.counts[id(module)] = index + 1
        if plan is None and index > 0 and caller.plan is not None:
            self.repetitions.of_module(module, index, caller.plan.calls.get(id(module)))
        return self.plan.custom.get(id(module)) if plan is None else plan

    def _next_plan(self, module: Module) -> tuple[FramePlan | None, int]:
        """Returns the plan of the next frame of `module`, and which call of it that is."""
        caller = self.stack[-1]
        key = id(module)
        index = caller.counts.get(key, 0)
        if len(self.stack) == 1:
            if module is self.root:
                return self.plan, index
            if self.callers.has_one_frame(module):
                return self._plan_without_caller(module), index
        by_index = caller.plan.calls.get(key) if caller.plan is not None else None
        return (None if by_index is None else by_index.get(index)), index

    def _plan_without_caller(self, module: Module) -> FramePlan | None:
        """The plan of a module that other methods of the model call from outside any frame: each of these calls."""
        (frame,) = self.callers.frames_of(module)
        by_index = self.plan.calls.get(id(module))
        plans = self.plan.walk() if by_index is None else by_index.values()
        return next((plan for plan in plans if plan.frame is frame), None)

    def _run(
        self,
        module: Module,
        plan: FramePlan,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        __tracebackhide__ = True
        if plan.probed_inputs and self.has_gradients and id(module) not in self._with_patched_inputs:
            args, kwargs = self._with_aliases(plan, args, kwargs)
        if plan.own_graph is not None:
            return plan.own_graph.run_patched(plan.graph_names, partial(self._in_graph, plan.graph), args, kwargs)
        if self._with_patched_inputs and id(module) in self._with_patched_inputs:
            self._with_patched_inputs.discard(id(module))
        else:
            if plan.watched_inputs:
                self._watch_inputs(plan, args, kwargs)
            if plan.inputs:
                args, kwargs = self._patched_inputs(plan, args, kwargs)
        if plan.tensors or plan.watched_tensors:
            return self._run_with_tensors(module, plan, forward, args, kwargs)
        return self._invoke(plan, forward, args, kwargs)

    def _invoke(
        self, plan: FramePlan, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls `forward`: under the mode of this run, and all that it calls too, if it needs that."""
        __tracebackhide__ = True
        if self._mode is not None or not plan.needs_mode:
            return invoke(forward, args, kwargs)
        self._mode = mode = LiveMode(self)
        outer = apply_observer.get()
        try:
            try:
                apply_observer.set(mode)
                with mode:
                    return invoke(forward, args, kwargs)
            finally:
                apply_observer.set(outer)
                self._mode = None
        finally:
            apply_observer.set(outer)  # once more, if an interrupt came in between

    @contextmanager
    def inside_one_node(self, inside: FramePlan | None = None) -> Iterator[None]:
        """For the length of the block, nothing that comes up is one of the plan's values, but those of `inside`."""
        self.stack.append(FrameRun(inside))
        try:
            yield
        finally:
            self.stack.pop()

    def _watch_inputs(self, plan: FramePlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._unseen():
            for position, name, entry in plan.watched_inputs:
                if position < len(args):
                    value = args[position]
                elif name in kwargs:
                    value = kwargs[name]
                else:
                    value = given_input(plan.frame.parameters, name, args, kwargs)
                self._watch(entry, value)

    def _with_aliases(
        self, plan: FramePlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a call with an alias of its own for each tensor that a patch looks at.

        A caller may use the tensor elsewhere, too (the residual stream): the gradient of the alias is that of what
        the module does with it.
        """
        seen: set[int] = set()
        with self._unseen():
            for entry in plan.probed_inputs:
                value = given_input(plan.frame.parameters, entry.target.node.target, args, kwargs)
                try:
                    for key in entry.target.dig:
                        value = take(value, key)
                except (LookupError, AttributeError, TypeError):  # told where the patch is applied
                    continue
                if not isinstance(value, Tensor) or not value.requires_grad or id(value) in seen:
                    continue
                if not torch.is_grad_enabled():  # an alias would have no gradient, and the module might ask for one
                    self.with_other_uses.append(entry.target.path)
                    continue
                alias = value.view_as(value)
                # A module may ask whether two of its inputs are one tensor: then they stay one.
                args, count = with_other_tensor(args, value, alias)
                named = {name: with_other_tensor(given, value, alias) for name, given in kwargs.items()}
                kwargs = {name: given for name, (given, _) in named.items()}
                count += sum(each for _, each in named.values())
                if count:
                    seen.add(id(alias))
                if count != 1:
                    self.with_other_uses.append(entry.target.path)
        return args, kwargs

    def _watch(self, entry: Entry, value: Any) -> None:
        """Applies an entry that only looks at a tensor."""
        if isinstance(value, Tensor) and value.shape == entry.observed_shape:
            self.fired.add(id(entry))
            entry.watch(value)  # type: ignore[misc]  # is given wherever this is called
        else:
            self.apply(entry, value)

    def _unseen(self) -> AbstractContextManager[None]:
        """The engine's looks at tensors are torch calls like any other, and would be seen by the mode."""
        return _NOTHING_TO_HIDE if self._mode is None else without_torch_functions()

    def _patched_inputs(
        self, plan: FramePlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        __tracebackhide__ = True
        for name, entries in plan.inputs.items():
            given = given_input(plan.frame.parameters, name, args, kwargs)
            value = self._apply(entries, given)
            if value is not given:
                args, kwargs = with_input(plan.frame.parameters, name, value, args, kwargs)
        return args, kwargs

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
        with self._unseen():
            for path, entry in plan.watched_tensors:
                held = module._parameters
                self._watch(entry, held[path] if path in held else tensor_at(module, path))
        replacements = self._replacements(module, plan)
        if not replacements:
            return self._invoke(plan, forward, args, kwargs)
        stand_in, bound = bound_with(module, replacements, forward)
        try:
            return self._invoke(plan, bound, args, kwargs)
        finally:
            stand_in.hand_on_changes()

    def _replacements(self, module: Module, plan: FramePlan) -> dict[str, Tensor]:
        """Returns the tensors that patches put in place of those that `module` holds, by attribute path."""
        found: dict[str, Tensor] = {}
        for path, entries in plan.tensors.items():
            with self._unseen():
                value = held_value(module, path)
            patched = self._apply(entries, value)
            if patched is not value:
                found[path] = patched
        return found

    def _in_graph(self, entries_by_name: dict[str, list[Entry]], name: str, value: Any) -> Any:
        """Applies the entries on a node of a graph that runs."""
        __tracebackhide__ = True
        entries = entries_by_name[name]
        patched = self._apply(entries, value)
        target = entries[0].target
        if target.node.is_in_place:
            write_back(value, patched, target)
        return patched

    def _apply(self, entries: Sequence[Entry], value: Any) -> Any:
        """Applies entries at the boundary of a frame, where a mode of the run may be on."""
        __tracebackhide__ = True
        for entry in entries:
            if self.is_observed(entry, value):
                continue
            # A call site may call modules and ops (`for f in (self.linear, torch.tanh)`): the patches' own torch calls
            # must not be counted there.
            with _NOTHING_TO_HIDE if self._mode is None else self.inside_one_node():
                value = self.apply(entry, value)
        return value

    def is_observed(self, entry: Entry, value: Any) -> bool:
        """Takes the short way for patches that only look at a tensor; says whether it was one."""
        shape = entry.observed_shape
        if shape is None or not isinstance(value, Tensor):
            return False
        with self._unseen():
            if value.shape != shape:
                return False
            for patch in entry.patches:
                patch.op(value)
        self.fired.add(id(entry))
        return True

    def apply(self, entry: Entry, value: Any) -> Any:
        """Applies one entry and notes that it fired, or why it could not."""
        __tracebackhide__ = True
        try:
            patched = apply_entry(entry, value, self._steps_for(entry), self._inputs_for(entry))
        except MissingChildError as missing:
            self.missing[id(entry)] = str(missing)
            return value
        except HeldBackError:
            return value
        self.fired.add(id(entry))
        self.has_changed |= patched is not value
        return patched

    def _steps_for(self, entry: Entry) -> Steps | None:
        """Returns what an entry for some steps or positions goes by; raises where this is no step that it is for."""
        steps = self.steps
        if entry.restriction is None:
            return None
        if steps is None:  # no call of the `PatchableGraph`, but backward
            raise GraphPatchError(_RECOMPUTED_STEP.format(path=entry.target.path))
        if not steps.admits(entry):
            raise HeldBackError
        return steps

    def _inputs_for(self, entry: Entry) -> Inputs | None:
        """Returns the arguments of the frame that runs, if the entry stands on one of its ops."""
        frame_run, target = self.stack[-1], entry.target
        is_here = frame_run.plan is not None and frame_run.plan.frame is target.frame
        return frame_run.inputs if is_here and target.node.kind == "op" and not target.dig else None

    def may_apply(self, entry: Entry) -> bool:
        """Whether an entry may have an effect at the current step of a generation."""
        return entry.restriction is None or self.steps is None or self.steps.admits(entry)


_RECOMPUTED_STEP = (
    "{path!r} is recomputed in backward (activation checkpointing), where it cannot be told which step of a generation "
    "it belongs to: switch checkpointing off, or drop steps= and positions="
)
