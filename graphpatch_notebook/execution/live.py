"""A patched run: the model's own code runs, and patches are applied where their values come up.

Only frames on the way to a patched value are seen at all, and only those with patched ops run under a function mode.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.autograd_functions import apply_observer
from graphpatch_notebook.capture.call_sites import invoke
from graphpatch_notebook.capture.custom_graphs import RECORD, run_custom
from graphpatch_notebook.capture.functions import raw_name, writes_in_place
from graphpatch_notebook.capture.inputs import bind, given_input, signature_of, with_input
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import PatchValueError, RepeatedCallWarning
from graphpatch_notebook.execution.apply import MissingChildError, apply_entry, write_back
from graphpatch_notebook.execution.module_hooks import ModuleHooks
from graphpatch_notebook.execution.plan import Callers, Entry, FramePlan, OpEntries
from graphpatch_notebook.execution.stand_in import StandIn
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import runs_hooks, without_torch_functions
from graphpatch_notebook.values import replaced


_UNSEEN = nullcontext()


class FrameRun:
    """One frame of a patched run."""

    __slots__ = ("calls", "occurrences", "plan")

    def __init__(self, plan: FramePlan | None) -> None:
        self.plan = plan
        self.calls: dict[int, int] = {}
        self.occurrences: dict[int, int] = {}


class Run:
    """One patched call of a model. Observes the swapped `forward`s in its context."""

    def __init__(self, root: Module, plan: FramePlan, callers: Callers, hooks: ModuleHooks) -> None:
        self.hooks = hooks
        self.root = root
        self.plan = plan
        self.callers = callers
        self.stack: list[FrameRun] = [FrameRun(plan)]
        self.fired: set[int] = set()
        self.missing: dict[int, str] = {}
        self.reached: set[int] = set()
        self._with_patched_inputs: set[int] = set()
        self._awaiting_output: dict[int, list[FramePlan]] = {}
        self._warned: set[int] = set()
        self._mode: LiveMode | None = None
        # Asked at the start: reentrant checkpointing itself switches gradients off.
        self._may_be_checkpointed = torch.is_grad_enabled()
        self.is_checkpointed = False

    # -- module calls --------------------------------------------------------------------------------------------------

    def on_forward(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs one frame, with the patches that stand on its inputs, parameters and ops."""
        plan = self._plan_of(module)
        self.stack.append(FrameRun(plan))
        try:
            if plan is None:
                return invoke(forward, args, kwargs)
            self.reached.add(id(plan.frame))
            if self._may_be_checkpointed and not self.is_checkpointed and _is_in_checkpoint():
                self.is_checkpointed = True
            hooks_follow = bool(plan.output) and self._hooks_follow(module)
            output = self._run(plan, forward, args, kwargs)
        finally:
            self.stack.pop()
        if hooks_follow:
            self._awaiting_output.setdefault(id(module), []).append(plan)
            return output
        return self._apply(plan.output, output) if plan.output else output

    def _hooks_follow(self, module: Module) -> bool:
        """Whether the module's own hooks run after this `forward`; then ours is made to follow them."""
        if not runs_hooks(module) or not takes_hooks(module) or not _is_called_by_module_call():
            return False
        self.hooks.hold(module)
        return True

    def on_inputs(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Applies the patches on a module's inputs where its own hooks are to see them too."""
        plan, _ = self._next_plan(module)
        if plan is None or not plan.inputs or plan.has_custom_graph:
            return None
        self._with_patched_inputs.add(id(module))
        return self._patched_inputs(plan, args, kwargs)

    def on_output(self, module: Module, output: Any) -> Any:
        """Applies the patches on a module's output, after the module's own hooks."""
        waiting = self._awaiting_output.get(id(module))
        if not waiting:
            return output
        return self._apply(waiting.pop().output, output)

    def _plan_of(self, module: Module) -> FramePlan | None:
        """Returns the plan of the frame that begins now, and counts it."""
        plan, index = self._next_plan(module)
        caller = self.stack[-1]
        caller.calls[id(module)] = index + 1
        if plan is None and index > 0 and caller.plan is not None:
            self._warn_if_repeated(module, caller.plan.calls.get(id(module)))
        return plan

    def _next_plan(self, module: Module) -> tuple[FramePlan | None, int]:
        """Returns the plan of the next frame of `module`, and which call of it that is."""
        caller = self.stack[-1]
        key = id(module)
        index = caller.calls.get(key, 0)
        is_outermost = len(self.stack) == 1
        if is_outermost and module is self.root:
            return self.plan, index
        by_index = caller.plan.calls.get(key) if caller.plan is not None else None
        if by_index is not None:
            return by_index.get(index), index
        return (self._plan_without_caller(module) if is_outermost else None), index

    def _plan_without_caller(self, module: Module) -> FramePlan | None:
        """The plan of a module that is called from outside any frame, as by other methods of the model."""
        frames = self.callers.frames_of(module)
        if len(frames) != 1:
            return None
        return next((plan for plan in self.plan.walk() if plan.frame is frames[0]), None)

    def _warn_if_repeated(self, module: Module, by_index: dict[int, FramePlan] | None) -> None:
        if by_index is None:
            return
        call = next(iter(by_index.values())).frame.call
        if call is None or call.call_count > 1 or id(module) in self._warned:
            return
        self._warned.add(id(module))
        path = format_path(next(iter(by_index.values())).frame.path)
        warnings.warn(
            f"{path!r} was called once when it was captured, but is called again in this run: its patches apply to "
            "the first call only; make the PatchableGraph with inputs that call it as often to patch each call",
            RepeatedCallWarning,
            stacklevel=2,
        )

    def _run(self, plan: FramePlan, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plan.has_custom_graph:
            return self._run_custom(plan, forward, args, kwargs)
        if id(plan.frame.module) in self._with_patched_inputs:
            self._with_patched_inputs.discard(id(plan.frame.module))
        elif plan.inputs:
            args, kwargs = self._patched_inputs(plan, args, kwargs)
        if plan.tensors:
            return self._run_on_stand_in(plan, forward, args, kwargs)
        return self._run_ops(plan, forward, args, kwargs)

    def _run_ops(
        self, plan: FramePlan, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not plan.leaves or self._mode is not None:
            return invoke(forward, args, kwargs)
        self._mode = mode = LiveMode(self)
        outer = apply_observer.set(mode)
        try:
            with mode:
                return invoke(forward, args, kwargs)
        finally:
            apply_observer.reset(outer)
            self._mode = None

    @contextmanager
    def inside_one_node(self) -> Iterator[None]:
        """For the length of the block, nothing that comes up is one of the plan's values."""
        self.stack.append(FrameRun(None))
        try:
            yield
        finally:
            self.stack.pop()

    def _patched_inputs(
        self, plan: FramePlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for name, entries in plan.inputs.items():
            position = plan.position_of(name)
            if 0 <= position < len(args):
                given = args[position]
            else:
                given = given_input(plan.frame.parameters, name, args, kwargs)
            value = self._apply(entries, given)
            if value is not given:
                args, kwargs = with_input(plan.frame.parameters, name, value, args, kwargs)
        return args, kwargs

    def _run_on_stand_in(
        self, plan: FramePlan, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # Usually the module; another object where the calling frame runs on a stand-in.
        module = getattr(forward, "__self__", None) or plan.frame.module
        if not isinstance(module, Module):
            module = plan.frame.module
        replacements: dict[str, Tensor] = {}
        for path, entries in plan.tensors.items():
            value = module._parameters[path] if path in module._parameters else _tensor_at(module, path)
            patched = self._apply(entries, value)
            if patched is not value:
                replacements[path] = patched
        if not replacements:
            return self._run_ops(plan, forward, args, kwargs)
        stand_in = StandIn(module, replacements)
        bound_forward = stand_in.bind(forward)
        try:
            return self._run_ops(plan, bound_forward, args, kwargs)
        finally:
            stand_in.hand_on_changes()

    def _run_custom(
        self, plan: FramePlan, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        bound = bind(signature_of(forward), args, kwargs)
        if bound is None:
            return invoke(forward, args, kwargs)

        def on_value(node: Any, value: Any) -> Any:
            record = node.meta.get(RECORD)
            return value if record is None else self._apply(plan.custom.get(record.name, ()), value)

        return run_custom(plan.frame.custom_graph, plan.frame.module, bound, on_value)

    def _apply(self, entries: Sequence[Entry], value: Any) -> Any:
        """Applies entries at the boundary of a frame, where a mode of the run may be on."""
        for entry in entries:
            if self.is_observed(entry, value):
                continue
            value = self.apply(entry, value)
        return value

    def is_observed(self, entry: Entry, value: Any) -> bool:
        """Takes the short way for patches that only look at a tensor; says whether it was one."""
        shape = entry.observed_shape
        if shape is None or not isinstance(value, Tensor):
            return False
        # Reading the shape is a torch call like any other, and would be seen.
        with _UNSEEN if self._mode is None else without_torch_functions():
            if value.shape != shape:
                return False
            for patch in entry.patches:
                patch.op(value)
        self.fired.add(id(entry))
        return True

    def apply(self, entry: Entry, value: Any) -> Any:
        """Applies one entry and notes that it fired, or why it could not."""
        try:
            patched = apply_entry(entry, value)
        except MissingChildError as missing:
            self.missing[id(entry)] = str(missing)
            return value
        self.fired.add(id(entry))
        return patched

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def unfired(self) -> list[tuple[Entry, str]]:
        """Returns the entries that never fired, each with the reason in words."""
        if len(self.fired) == self.plan.count:
            return []
        return [
            (entry, self.missing.get(id(entry)) or self._why(plan.frame))
            for plan in self.plan.walk()
            for entry in plan.entries()
            if id(entry) not in self.fired
        ]

    def _why(self, frame: Frame) -> str:
        if id(frame) in self.reached:
            return "its module ran, but did not come to this operation"
        outermost = frame
        while outermost.parent is not None and id(outermost.parent) not in self.reached:
            outermost = outermost.parent
        return f"{format_path(outermost.path) or 'the model'!r} was not called"


def _tensor_at(module: Module, path: str) -> Any:
    *parents, name = path.split(".")
    for parent in parents:
        child = module._modules.get(parent)  # an attribute of that name may be something else: `half`, say
        module = child if child is not None else getattr(module, parent)
    for holder in (module._parameters, module._buffers, module.__dict__):
        if name in holder:
            return holder[name]
    raise PatchValueError(f"{type(module).__name__} no longer has the {name!r} that was captured")


def _is_in_checkpoint() -> bool:
    """Whether `torch.utils.checkpoint` stands between the calling frame and this one: it will run again in backward."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not call_sites.is_invoke(frame.f_code):
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back
    return False


_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


def takes_hooks(module: Module) -> bool:
    """Whether forward hooks can be registered on `module`: scripted modules take none."""
    return not isinstance(module, torch.jit.ScriptModule)


_MODULE_CALLERS = {"_call_impl", "inner", "_slow_forward"}


def _is_called_by_module_call() -> bool:
    """Whether the swapped `forward` was called by `Module.__call__`, which runs the module's hooks afterwards."""
    frame = call_sites.caller(2).f_back  # the caller of `on_forward` is the swapped forward itself
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_MODULE_FILE):
            return code.co_name in _MODULE_CALLERS
        if not (call_sites.is_own(code) or code.co_filename.endswith(_ACCELERATE_FILE)):
            return False
        frame = frame.f_back
    return False


_MODULE_FILE = Module.__call__.__code__.co_filename
_ACCELERATE_FILE = "hooks.py"


class LiveMode(TorchFunctionMode):
    """Applies patches where the call sites of their ops come up: one mode for the whole run, however deep it goes."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.stack = run.stack
        self.fired = run.fired

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        entries = self._entries_at(sys._getframe(1))
        result = func(*args, **kwargs) if kwargs else func(*args)
        if entries is None:
            return result
        entry = entries[0]
        # The short way of `is_observed`, written out: this runs for every op of a model that is probed whole.
        if entry.watch is not None and len(entries) == 1 and type(result) is Tensor:
            if result.shape == entry.observed_shape:
                self.fired.add(id(entry))
                entry.watch(result)
                return result
        return self._patched(entries, func, result, args, kwargs or {})

    def on_apply(self, cls: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Applies patches on the call of an `autograd.Function`; what happens inside belongs to its one node."""
        entries = self._entries_at(sys._getframe(1))
        # Unlike in `__torch_function__`, the mode is on here: nor are the patches' own calls ops of the model.
        with self.run.inside_one_node():
            result = apply(*args, **kwargs)
            return result if entries is None else self._patched(entries, apply, result, args, kwargs)

    def _entries_at(self, leaf: FrameType) -> list[Entry] | None:
        """Returns the entries on the op that is called from this Python frame, and counts that it came up."""
        frame = self.stack[-1]
        plan = frame.plan
        if plan is None or not plan.leaves:
            return None
        codes = plan.by_lasti
        by_lasti = codes.get(id(leaf.f_code))
        while by_lasti is None:
            outer = call_sites.caller_of_hidden(leaf)
            if outer is None:
                return None
            leaf = outer
            by_lasti = codes.get(id(leaf.f_code))
        by_chain = by_lasti.get(leaf.f_lasti)
        if by_chain is None:
            by_offset = plan.leaves[id(leaf.f_code)]
            by_chain = by_lasti[leaf.f_lasti] = by_offset.get(call_sites.offset_in(leaf), _NOTHING)
        if not by_chain:
            return None
        by_occurrence = by_chain.get(call_sites.chain_above(leaf))
        if by_occurrence is None:
            return None
        key = id(by_occurrence)
        occurrences = frame.occurrences
        occurrence = occurrences.get(key, 0)
        occurrences[key] = occurrence + 1
        return by_occurrence.get(occurrence)

    def _patched(
        self,
        entries: list[Entry],
        func: Callable[..., Any],
        result: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        for entry in entries:
            node = entry.target.node
            if not entry.is_special and self.run.is_observed(entry, result):
                continue
            if node.is_in_place:
                wrote = _written(raw_name(func), result, args, kwargs)
                write_back(wrote, self.run.apply(entry, wrote), entry.target)
            elif node.element is not None:
                position = node.element[1]
                result = _with_element(result, position, self.run.apply(entry, result[position]))
            else:
                result = self.run.apply(entry, result)
        return result


_NOTHING: dict[tuple[int, ...], OpEntries] = {}


def _with_element(result: Any, position: int, patched: Any) -> Any:
    return result if patched is result[position] else replaced(result, position, patched)


def _written(name: str, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    return args[0] if writes_in_place(name, kwargs) or result is args[0] else result
