"""One patched call of a model, on the model's own code.

A `Run` sees the swapped forwards and calls of the modules on the way to patched values: it recognizes the frames of the
capture, and patches their inputs, parameters and outputs. It is also the function mode under which the frames with
patched ops run: it patches an op when its call site is reached.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture import INVOKE, call_sites, decomposition_of, unpacked
from graphpatch_notebook.capture.inputs import given_input, with_input, with_other_tensor
from graphpatch_notebook.capture.modules import Swaps, held_at, observer
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.components.dimensions import shape_problem, unpacked_shape
from graphpatch_notebook.components.operations import FUSED_ATTENTION
from graphpatch_notebook.errors import (
    GraphPatchError,
    PatchValueError,
    add_note,
    afterwards,
    holding,
    level_of_caller,
    warn,
)
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patches.kinds import Patch, RunStopped, WritingPatch, selects_nothing, shown_value
from graphpatch_notebook.patches.slices import index_text
from graphpatch_notebook.patching.model_state import holding_tensors, is_parallel_machinery
from graphpatch_notebook.patching.plan import (
    EntriesByChain,
    Entry,
    FramePlan,
    OpEntries,
    PatchedCode,
    Plan,
    SiteEntries,
    axes_note,
    nearest_above,
    part_of,
    passing_input,
)
from graphpatch_notebook.patching.positions import GenerationSteps, HeldBackError, Indices
from graphpatch_notebook.patching.stand_in import bound_with, held_value
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import function_mode_depth, takes_hooks, without_torch_functions
from graphpatch_notebook.values import (
    ContainerSpec,
    Key,
    ObjectSpec,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    ValueSpec,
    describe,
    rebuilt,
    replaced,
    take,
)

if TYPE_CHECKING:
    from graphpatch_notebook.patching.context import PatchContext


class _Frame:
    """A frame that is running. Without a plan, nothing in it belongs to a node: neither calls nor ops are counted."""

    __slots__ = ("counts", "plan", "sites")

    def __init__(self, plan: FramePlan | None) -> None:
        self.plan = plan
        self.sites = None if plan is None else plan.sites
        # How often each submodule was called, and each patched call site was reached, so far (by id).
        self.counts: dict[int, int] = {}


class OperatorPatchError(Exception):
    """Has a `TypeError` of a patch on the result of an operation (caught by the call of the `PatchableGraph`).

    In operators, torch takes a `TypeError` for an operand that it does not know: Python then calls the operator of the
    other operand, whose result would come back without the patch.
    """


class Run(TorchFunctionMode):
    """One patched call of a model."""

    def __init__(self, context: PatchContext, plan: Plan, steps: GenerationSteps | None = None) -> None:
        super().__init__()
        self.context = context  # reports repeated calls
        self.plan, self.keep = plan, plan.keep
        self.root = plan.root.frame.module
        self.steps = steps  # of a generation; `None` if no patch is for some of them only
        self._run_forward = frame_runner.get()
        # Whether gradients were enabled at the start: reentrant checkpointing itself disables them.
        self.has_gradients = torch.is_grad_enabled()
        self.stack = [_Frame(plan.root)]  # the frames that are running; the first is outside of all module calls
        self.values: dict[str, Any] = {}  # the values that patches of the run read, by name
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # the inputs, if the model itself is called
        self.is_under_mode = False  # whether this mode is on
        self._depth = 0  # how many function modes are on then
        self._calls: set[int] = set()  # the frame plans (by id) whose module is called, and has not begun its forward
        self._with_inputs: set[int] = set()  # the modules (by id) whose inputs are patched by a hook, likewise
        # What happened:
        self.fired: set[int] = set()  # the entries that fired (by id)
        self.missing: dict[int, str] = {}  # why entries did not find a value to patch (by id)
        self.reached: set[int] = set()  # the frames that ran (by id)
        self.skipped: set[int] = set()  # the frames that were skipped (by id)
        self.has_changed = False  # whether a patch changed a value
        self.is_checkpointed = False  # whether a patched frame ran under activation checkpointing
        self.has_stopped = False  # whether a patch ended the run
        self.ended_at = ""  # the path at which a patch ended the forward; the model may have gone on

    # -- frames --------------------------------------------------------------------------------------------------------

    def on_call(self, module: Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a module with its hooks, and patches its output: the value that its caller gets."""
        plan, _ = self._next_plan(module)
        if plan is None or not plan.output:
            return call(*args, **kwargs)
        self._calls.add(id(plan))
        try:
            output = call(*args, **kwargs)
        finally:
            self._calls.discard(id(plan))
        return self.at_boundary(plan.output, output)

    def on_inputs(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Patches the inputs of a module after its own pre-hooks, and before its own hooks see them."""
        plan, _ = self._next_plan(module)
        self._with_inputs.discard(id(module))  # of a call that another hook ended early
        if plan is None or not plan.inputs or plan.graph is not None:
            return None
        if len(self.stack) == 1:
            self._begin(module, args, kwargs)
        patched = self._patched_inputs(plan, args, kwargs)
        self._with_inputs.add(id(module))  # last: a patch may call the module itself
        return patched

    def on_forward(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs one frame, with its patches."""
        if id(module) not in self.plan.watched:  # swapped for another context, or for what sees all frames
            if self.is_under_mode and id(module) in self.plan.unpatched and function_mode_depth() == self._depth:
                return self._without_mode(module, forward, args, kwargs)
            return self._call(module, forward, args, kwargs)
        if len(self.stack) == 1:
            self._begin(module, args, kwargs)
        plan = self._plan_of(module)
        is_called = id(plan) in self._calls
        self._calls.discard(id(plan))
        self.stack.append(_Frame(plan))
        try:
            if plan is None:
                return self._call(module, forward, args, kwargs)
            self.reached.add(id(plan.frame))
            if self.has_gradients and not self.is_checkpointed:
                self.is_checkpointed = is_in_checkpoint()
            if plan.is_bare:  # not by `invoke`: no call site is looked up
                run = self._run_forward
                output = forward(*args, **kwargs) if run is None else run(module, forward, args, kwargs)
            else:
                output = self._run_patched(module, plan, forward, args, kwargs)
        finally:
            self.stack.pop()
        return output if is_called or not plan.output else self.at_boundary(plan.output, output)

    def _call(self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the `forward` of a frame, without patches on inputs and outputs."""
        run = self._run_forward
        return call_sites.invoke(forward, args, kwargs) if run is None else run(module, forward, args, kwargs)

    def _begin(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Counts a call from outside any frame: of the model, or by a method of it."""
        if id(module) in self._with_inputs:
            return  # counted when its inputs were patched
        if module is self.root:
            self.values.clear()
            if self.steps is not None:
                self.steps.begin(args, kwargs)
        elif self.steps is not None:
            self.steps.outside(module, kwargs)

    def _next_plan(self, module: Module) -> tuple[FramePlan | None, int]:
        """Returns the plan of the next frame of `module`, and the number of that call."""
        caller = self.stack[-1]
        index = caller.counts.get(id(module), 0)
        if len(self.stack) == 1:
            if module is self.root:
                return self.plan.root, index
            frames = self.plan.callers.frames_of(module)
            if len(frames) == 1:  # a method of the model calls it outside of all frames
                return self.plan.by_frame.get(id(frames[0])), index
        by_index = caller.plan.calls.get(id(module)) if caller.plan is not None else None
        return (None if by_index is None else by_index.get(index)), index

    def _plan_of(self, module: Module) -> FramePlan | None:
        """Returns the plan of the frame of `module` that begins now, and counts it."""
        caller = self.stack[-1]
        calls = None if caller.plan is None or len(self.stack) == 1 else caller.plan.calls.get(id(module))
        if calls is None:
            plan, index = self._next_plan(module)
        else:  # the usual case of `_next_plan`, inlined
            index = caller.counts.get(id(module), 0)
            plan = calls.get(index)
        caller.counts[id(module)] = index + 1
        if plan is None and index > 0 and caller.plan is not None:
            patched = [one for _, one in sorted(caller.plan.calls.get(id(module), {}).items()) if _is_patched(one)]
            if patched and patched[0].frame.call is not None and len(patched) == patched[0].frame.call.call_count:
                paths = [format_path(one.frame.path) for one in patched]
                self._report_repeated(paths, f"this {type(module).__name__} was called")
        return plan or self.plan.custom.get(id(module))

    def _report_repeated(self, paths: Sequence[str], what: str) -> None:
        times = "once" if len(paths) == 1 else f"{len(paths)} times"
        self.context.warn_once(
            f"{', '.join(map(repr, paths[:3]))}{', ...' * (len(paths) > 3)}: {what} {times} when it was captured, and "
            "more often in this run: what comes after that is not patched; to patch it, make the PatchableGraph with "
            "inputs that need as many calls",
            "repeated call",
        )

    def _run_patched(
        self,
        module: Module,
        plan: FramePlan,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs one frame with all its patches except those on the output."""
        skip = next(filter(self._may_apply, reversed(plan.skips)), None) if plan.skips else None
        if plan.graph is not None and skip is None:
            if plan.probed and self.has_gradients:
                args, kwargs = self._with_aliases(plan, args, kwargs)
            patched = partial(self._in_graph, plan.in_graph)
            return plan.graph.run_patched(frozenset(plan.in_graph), patched, args, kwargs)
        if id(module) in self._with_inputs:
            self._with_inputs.discard(id(module))
        elif plan.inputs:
            args, kwargs = self._patched_inputs(plan, args, kwargs)
        if skip is not None:
            return self._skipped_output(skip, args, kwargs)
        bound_to = getattr(forward, "__self__", None)  # a stand-in itself, if the calling frame runs on one
        holder = bound_to if isinstance(bound_to, Module) else module
        changed = self._changed_tensors(plan, holder) if plan.tensors else None
        if not changed:
            return self._invoke(module, plan, forward, args, kwargs)
        if is_parallel_machinery(forward):  # it is bound to the module: it would not see a stand-in
            with holding_tensors(holder, changed):
                return self._invoke(module, plan, forward, args, kwargs)
        stand_in, bound = bound_with(holder, changed, forward)
        try:
            return self._invoke(module, plan, bound, args, kwargs)
        finally:
            stand_in.copy_changes_back()

    def _changed_tensors(self, plan: FramePlan, module: Module) -> dict[str, Tensor]:
        """Returns the patched parameters, buffers and attributes that are other tensors now, by path."""
        changed: dict[str, Tensor] = {}
        for path, entries in plan.tensors.items():
            value = module._parameters.get(path)
            if type(value) is not Parameter or plan.is_packed:  # hardly any is
                with without_torch_functions():
                    if held_at(module, path) is None:  # a state that the model has not computed yet: nothing fires
                        continue
                    value = held_value(module, path)
            if (patched := self.at_boundary(entries, value)) is not value:
                changed[path] = patched
        return changed

    def _invoke(
        self, module: Module, plan: FramePlan, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Calls `forward`: under this mode, and all that it calls too, if it needs that."""
        if self.is_under_mode or not plan.needs_mode:
            return self._call(module, forward, args, kwargs)
        self.is_under_mode = True
        try:
            with self:
                return self._call(module, forward, args, kwargs)
        finally:
            self.is_under_mode = False

    def _without_mode(self, module: Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls `forward` without this mode, which is the innermost one: all calls of torch in it are faster."""
        depth = self._depth
        try:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.is_under_mode = False
            return self._call(module, forward, args, kwargs)
        finally:
            if function_mode_depth() < depth:  # else it was interrupted before
                self.__enter__()
            self.is_under_mode = True

    # -- inputs and skipped calls --------------------------------------------------------------------------------------

    def _patched_inputs(
        self, plan: FramePlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a call with the entries on inputs applied."""
        if plan.probed and self.has_gradients:
            args, kwargs = self._with_aliases(plan, args, kwargs)
        for name, entries in plan.inputs.items():
            given = given_input(plan.frame.parameters, name, args, kwargs)
            value = self.at_boundary(entries, given)
            if value is not given:
                args, kwargs = with_input(plan.frame.parameters, name, value, args, kwargs)
        return args, kwargs

    def _with_aliases(
        self, plan: FramePlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a call with a separate alias for each tensor that a patch keeps, if it may have a gradient.

        A caller may use the tensor elsewhere, too (the residual stream): the gradient of the alias is that of what the
        module does with it.
        """
        aliases: set[int] = set()
        for entry in plan.probed:
            value = given_input(plan.frame.parameters, entry.target.node.target, args, kwargs)
            try:
                for key in entry.target.dig:
                    value = take(value, key)
            except (LookupError, AttributeError, TypeError):  # reported when the patch is applied
                continue
            count = 0
            with without_torch_functions():
                if not isinstance(value, Tensor) or not value.requires_grad or id(value) in aliases:
                    continue
                if torch.is_grad_enabled():  # else an alias would not have a gradient, and the module might read it
                    alias = value.view_as(value)
                    # A module may check whether two of its inputs are one tensor, so they stay one.
                    (args, named), count = with_other_tensor((args, tuple(kwargs.values())), value, alias)
                    kwargs = dict(zip(kwargs, named, strict=True))
                    aliases.add(id(alias))
            if count != 1:
                message = _OTHER_USES.format(path=entry.target.path)
                warn(message, "shared gradient", stacklevel=level_of_caller())
        return args, kwargs

    def _skipped_output(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the result of a call that `entry` replaces."""
        target, patch = entry.target, entry.patches[-1]
        self.fired.add(id(entry))
        self.skipped.add(id(target.frame))
        self.has_changed = True
        name = passing_input(target)
        given = None if name is None else given_input(target.frame.parameters, name, args, kwargs)
        if not isinstance(given, Tensor) and not isinstance(getattr(patch, "value", None), Tensor):
            raise PatchValueError(f"{target.text!r}: the call has no tensor as {name!r} to pass through: give value=")
        with self._inside_one_node():
            return _container(target.frame.output_node.spec, target.dig, patch.op(given))

    # -- values --------------------------------------------------------------------------------------------------------

    def at_boundary(self, entries: Sequence[Entry], value: Any) -> Any:
        """Applies entries to a value of a frame."""
        for entry in entries:
            if entry.kept_shape is None:
                value = self.apply(entry, value)
                continue
            if self.is_under_mode:
                with without_torch_functions():  # to look at a tensor is a call of torch, too
                    is_kept = self._keep(entry, value)
            else:
                is_kept = self._keep(entry, value)
            value = value if is_kept else self.apply(entry, value)
        return value

    def _keep(self, entry: Entry, value: Any) -> bool:
        """Hands a value to patches that only keep it, if it is as recorded; returns whether it was."""
        if entry.target.dig:
            try:
                for key in entry.target.dig:
                    value = take(value, key)
            except (LookupError, AttributeError, TypeError):
                return False
        if not isinstance(value, Tensor) or value.shape != entry.kept_shape:
            return False
        self.fired.add(id(entry))  # before: the last patch of `pg.record` ends the run
        self.keep[entry](value)
        return True

    def apply(self, entry: Entry, value: Any) -> Any:
        """Applies one entry, and keeps that it fired, or why it could not."""
        # What is called here is not the model's: neither if a patch calls the model or a module of it, nor at a call
        # site that calls modules and ops (`for f in (self.linear, torch.tanh)`).
        self.stack.append(_Frame(None))
        try:
            if entry.splice is not None:
                patched = self._with_splice(entry, entry.splice, value)
            elif entry.plain_shape is not None and isinstance(value, Tensor) and value.shape == entry.plain_shape:
                patched = value
                for patch in self.plan.own(entry).patches:
                    patched = apply_patch(patch, entry.target, patched)
            elif entry.is_source:
                self.values[entry.target.text] = value_at(entry, value)
                patched = value
            else:
                patched = self._applied(entry, value)
        except MissingChildError as missing:
            self.missing[id(entry)] = str(missing)
            return value
        except HeldBackError:
            return value
        except RunStopped:
            self.fired.add(id(entry))
            self.ended_at = entry.target.text
            raise
        finally:
            self.stack.pop()
        self.fired.add(id(entry))
        self.has_changed |= patched is not value
        return patched

    def _with_splice(self, entry: Entry, splice: Frame, value: Any) -> Any:
        """Calls the module of a splice, in which values belong to the plan: as the model's own call of it would."""
        self.stack[-1] = _Frame(nearest_above(splice, self.plan.by_frame))
        self.stack[-1].sites = None  # the operations around the call are not the model's
        is_under_mode = self.is_under_mode
        self.is_under_mode = is_under_mode and function_mode_depth() >= self._depth  # the mode is off in its handler
        try:
            return self._applied(entry, value)
        finally:
            self.is_under_mode = is_under_mode

    def _applied(self, entry: Entry, value: Any) -> Any:
        entry = self.plan.own(entry)
        target, indices_in = entry.target, None
        if entry.restriction is not None:
            if self.steps is None:  # not a call of the `PatchableGraph`, but backward
                raise GraphPatchError(_RECOMPUTED_STEP.format(path=target.path))
            if not self.steps.admits(entry):
                raise HeldBackError
            if entry.restriction.positions is not None:
                indices_in = partial(self.steps.indices, entry)
        applied = self._with_values(entry) if entry.sources else entry
        patched = apply_at(applied, value, target.dig, indices_in)
        if patched is not value and target.node.is_view_filled_later:
            warn(_LOST_WRITES.format(path=target.path), "aliased view", stacklevel=2)
        return patched

    def _with_values(self, entry: Entry) -> Entry:
        """Returns an entry whose patch reads the values of this run."""
        missing = next((name for name in entry.sources if name not in self.values), None)
        if missing is not None:
            raise PatchValueError(
                f"{entry.target.text!r} reads {missing!r}, which was not computed before it in this forward (or, under "
                "activation checkpointing, in what backward runs again)"
            )
        (patch,) = entry.patches
        reading = patch.reading([self.values[name] for name in entry.sources])
        return Entry(entry.target, (reading,), entry.restriction, placement=entry.placement)

    def _may_apply(self, entry: Entry) -> bool:
        """Whether an entry may have an effect at the current step of a generation."""
        return entry.restriction is None or self.steps is None or self.steps.admits(entry)

    def _in_graph(self, entries_by_name: dict[str, list[Entry]], name: str, value: Any) -> Any:
        """Applies the entries on a node of a graph that is running."""
        entries, given = entries_by_name[name], unpacked(value)
        patched = self.at_boundary(entries, given)
        if entries[0].target.node.is_in_place:
            write_back(value, patched, entries[0].target)
        return value if patched is given else patched

    @contextmanager
    def _inside_one_node(self, inside: FramePlan | None = None) -> Iterator[None]:
        """Inside the block, no value belongs to the plan except those of `inside`."""
        self.stack.append(_Frame(inside))
        try:
            yield
        finally:
            self.stack.pop()

    # -- ops -----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._depth = function_mode_depth()
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        frame = self.stack[-1]
        if frame.sites is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        leaf = sys._getframe(1)
        # The fast path of `_entries_at`, inlined: most calls are at instructions where nothing is patched.
        code = frame.sites.get(id(leaf.f_code))
        if code is None:
            entries = self._entries_at(leaf)
        else:
            by_chain = code[leaf.f_lasti]
            entries = None if by_chain is None else self._entries_of(frame, by_chain, leaf)
        if entries is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if entries.inside is not None:
            result = self._open_call(entries.inside, func, args, kwargs or {})
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
        # The fast path of `_patched_result`, inlined: all values of a model may be probed.
        entry = entries[0] if len(entries) == 1 else None
        if (
            entry is None
            or entry.kept_shape is None  # before: nested tensors have no shape
            or not isinstance(result, Tensor)
            or result.shape != entry.kept_shape
        ):
            return self._patched_result(entries, result, args, kwargs or {})
        self.fired.add(id(entry))
        self.keep[entry](result)
        return result

    def on_apply(self, cls: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Applies patches on the call of an `autograd.Function`: one node, without nodes for the code inside it."""
        if not self.is_under_mode or function_mode_depth() < self._depth:  # an operator's own autograd function
            return apply(*args, **kwargs)
        entries = self._entries_at(sys._getframe(1))
        # Unlike in `__torch_function__`, the mode is on here; calls that patches make are not ops of the model, either.
        with self._inside_one_node():
            result = apply(*args, **kwargs)
            return result if entries is None else self._patched_result(entries, result, args, kwargs)

    def _open_call(
        self, inside: FramePlan, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a composite function step by step, with the patches `inside` it."""
        decomposition = decomposition_of(func)
        # Without one, the model calls another function here this time.
        if decomposition is None or not any(map(self._may_apply, inside.entries)):
            return func(*args, **kwargs)
        refusal = decomposition.refusal(args, kwargs)
        if refusal is not None:
            why = f"{decomposition.name} cannot be decomposed in this call: {refusal}"
            self.missing.update((id(entry), why) for entry in inside.entries)
            return func(*args, **kwargs)
        is_fused = any(entry.target.node.is_inner for entry in inside.entries)
        with self._inside_one_node(inside), self:  # the mode is off in its own handler
            return decomposition.steps(is_fused=is_fused)(*args, **kwargs)

    def _entries_at(self, leaf: FrameType) -> SiteEntries | None:
        """Returns the entries on the op that this Python frame calls, and counts the call."""
        frame = self.stack[-1]
        if frame.sites is None:
            return None
        code = frame.sites.get(id(leaf.f_code))
        while code is None:
            outer = call_sites.caller_of_hidden(leaf)
            if outer is None:
                frame.sites[id(leaf.f_code)] = _UNPATCHED
                return None
            leaf = outer
            code = frame.sites.get(id(leaf.f_code))
        by_chain = code[leaf.f_lasti]
        return None if by_chain is None else self._entries_of(frame, by_chain, leaf)

    def _entries_of(self, frame: _Frame, by_chain: EntriesByChain, leaf: FrameType) -> SiteEntries | None:
        """Returns the entries on the op at an instruction with patched ops, and counts the call."""
        above = leaf.f_back
        is_in_forward = above is not None and above.f_code is INVOKE
        by_occurrence = by_chain.get(() if is_in_forward else call_sites.chain(above))
        if by_occurrence is None:
            return None
        occurrence = frame.counts.get(id(by_occurrence), 0)
        frame.counts[id(by_occurrence)] = occurrence + 1
        entries = by_occurrence.get(occurrence)
        if entries is None and occurrence >= len(by_occurrence):
            self._check_repeated_op(by_occurrence)
        return entries

    def _check_repeated_op(self, by_occurrence: OpEntries) -> None:
        """Reports an op beyond those of the example at its call site, if these all have patches."""
        paths = [entries[0].target.path for _, entries in sorted(by_occurrence.items()) if entries]
        target = next((entries[0].target for entries in by_occurrence.values() if entries), None)
        if target is not None and len(paths) > max(
            n.occurrence for n in target.frame.nodes if n.site is target.node.site
        ):
            self._report_repeated(paths, f"this {target.node.op} was reached")

    def _patched_result(self, entries: list[Entry], result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for entry in entries:
            node = entry.target.node
            if node.is_in_place:
                value = node.written_of(args, kwargs)
            else:
                value = result if node.position is None else result[node.position]
            if entry.kept_shape is not None and self._keep(entry, value):
                continue
            try:
                patched = self.apply(entry, value)
            except TypeError as error:
                raise OperatorPatchError(error) from None
            if patched is value:
                continue
            if self.has_gradients and is_in_checkpoint():
                raise GraphPatchError(_RECOMPUTED.format(path=entry.target.path))
            if node.is_in_place:
                write_back(value, patched, entry.target)
            else:
                result = patched if node.position is None else replaced(result, node.position, patched)
        return result

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def unfired(self, needed: Plan) -> list[tuple[Entry, str]]:
        """Returns the entries of a plan that never fired, with the reasons."""
        if len(self.fired) == len(self.plan.all_entries):
            return []
        idle = {self.plan.own(e): e for e in self.plan.all_entries if id(e) not in self.fired and not e.is_source}
        return [
            (e, self.missing.get(id(idle[e])) or (self.steps and self.steps.why_not(e)) or self._why(e.target.frame))
            for e in needed.entries
            if e in idle
        ]

    def _why(self, frame: Frame) -> str:
        if self.has_stopped:
            return "the run was stopped before it"
        skipped = next((above for above in frame.frames_above() if id(above) in self.skipped), None)
        if skipped is not None:
            return f"{format_path(skipped.path)!r} was skipped"
        if id(frame) in self.reached:
            return "its module ran, but did not come to this operation"
        outermost = frame
        for above in frame.frames_above():
            if id(above) in self.reached:
                break
            outermost = above if id(above) in self.plan.by_frame else outermost
        return f"{format_path(outermost.path) or 'the model'!r} was not called"


_RECOMPUTED_STEP = (
    "{path!r} is recomputed in backward (activation checkpointing), where the step of a generation that it belongs to "
    "is not known: switch checkpointing off, or drop steps= and positions="
)
_OTHER_USES = (
    "the gradient of the probed input {path!r} includes that of other uses of the same tensor: the module is given one "
    "tensor as several inputs, or in a list or dict, or runs without gradients; probe what it computes"
)
_LOST_WRITES = (
    "{path!r} is a view through which the model later writes into another tensor. The patch replaces the view, so "
    "these writes are lost; patch the tensor after it is filled"
)
_RECOMPUTED = (
    "{path!r} is computed in a function under torch.utils.checkpoint, which runs again in backward, where it cannot be "
    "patched, so that gradients would be wrong: run without gradients (torch.no_grad), switch checkpointing off, or "
    "patch a value outside of that function"
)

_UNPATCHED = PatchedCode()
"""Stands for all code without a patched op."""


def _is_patched(plan: FramePlan) -> bool:
    return bool(plan.entries) or plan.frame.is_edited or any(map(_is_patched, plan.below()))


def _container(spec: ValueSpec, dig: Sequence[Key], value: Any) -> Any:
    """Returns a container as recorded with `value` where `dig` leads, and `None` elsewhere."""
    if not dig:
        return value
    assert isinstance(spec, ContainerSpec)
    items = [_container(child, dig[1:], value) if key == dig[0] else None for _, key, child in spec.children]
    return rebuilt(spec.type, [key for _, key, _ in spec.children], items)


_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


def is_in_checkpoint() -> bool:
    """Whether activation checkpointing lies between the calling frame and this one: it runs again in backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not INVOKE:
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            return True
        frame = frame.f_back
    return False


# -- runs whose frames are seen ----------------------------------------------------------------------------------------

RunForward: TypeAlias = "Callable[[Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]"
"""Runs the `forward` of a frame (by `invoke`), or does something else in its place: is given the module, `forward`, and
its arguments, as patched."""

frame_runner: ContextVar[RunForward | None] = ContextVar("graphpatch_frame_runner", default=None)
"""Runs the frames of the patched runs that begin in this context."""


@contextmanager
def frames_seen(run: RunForward, modules: Iterable[Module]) -> Iterator[None]:
    """Has `run` run the frames of these modules in patched runs in the block, not only those of patched modules."""
    swaps = Swaps()
    with holding(frame_runner, run), afterwards(swaps.release):
        swaps.hold(module for module in modules if takes_hooks(module))
        yield


# -- patches on one value: paths into containers, copies, checks, and errors with the path -----------------------------

IndicesIn: TypeAlias = Callable[[Any], Indices]
"""Finds the positions of an entry in a value."""


class MissingChildError(Exception):
    """The container in this run does not hold the value to patch (caught inside the package)."""


def _child(value: Any, key: Key) -> Any:
    try:
        return take(value, key)
    except (LookupError, AttributeError, TypeError) as error:
        raise MissingChildError(f"the {type(value).__name__} in this run does not hold {key!r}") from error


def value_at(entry: Entry, value: Any) -> Any:
    """Returns the value that `entry` patches, taken from the value of its node."""
    for key in entry.target.dig:
        value = _child(value, key)
    if isinstance(value, Tensor):
        value = _heads_apart(entry, value)
        value = value if entry.placement is None else entry.placement.whole(value)
    value = part_of(entry.target, value, entry.patches)
    # The model writes into this tensor later: what was read must stay as it was.
    return value.clone() if entry.target.node.is_mutated_later and isinstance(value, Tensor) else value


def apply_at(entry: Entry, value: Any, dig: tuple[Key, ...], indices_in: IndicesIn | None) -> Any:
    """Returns `value` with the patches of `entry` applied to what `dig` leads to; the same object if nothing changed.

    Containers on the way are copied, never written into. If the value has none of the positions of the patch, raises a
    `HeldBackError`, and a `MissingChildError` if there is no such value.
    """
    if not dig:
        return _apply(entry, value, indices_in)
    child = _child(value, dig[0])
    patched = apply_at(entry, child, dig[1:], indices_in)
    return value if patched is child else replaced(value, dig[0], patched)


def apply_to_rows(entry: Entry, value: Tensor, *, is_own: bool = False) -> Any:
    """Applies an entry to some rows of its value, in step 0 of a generation; errors are those of `apply_at`.

    If nothing else refers to the rows (`is_own`), patches write into them, not into a copy.
    """
    if entry.restriction is None or entry.restriction.positions is None:
        return _apply(entry, value, None, is_own=is_own)
    indices = entry.restriction.indices(0, value.shape[entry.restriction.dim])
    return _patched(entry, value, indices) if indices else value


def _apply(entry: Entry, value: Any, indices_in: IndicesIn | None, *, is_own: bool = False) -> Any:
    apart = _heads_apart(entry, value) if isinstance(value, Tensor) else value

    def apply(given: Any) -> Any:
        if isinstance(given, Tensor) and isinstance(entry.target.whole, TensorSpec):
            _check_shape(entry, given)
        return _patched(entry, given, None if indices_in is None else indices_in(given), is_own=is_own)

    sharded = entry.placement if isinstance(value, Tensor) else None
    patched = apply(apart) if sharded is None else sharded.applied(apart, apply, entry)
    if apart is value or patched is apart:
        return value if patched is apart else patched
    if not isinstance(patched, Tensor) or patched.shape != apart.shape:
        raise PatchValueError(
            f"{entry.target.text!r}: the model packs heads that share keys at this step, and takes a value "
            f"{shown_value(apart)}; the patch made one {shown_value(patched)}"
        )
    return patched.reshape(value.shape)


def _heads_apart(entry: Entry, value: Tensor) -> Tensor:
    """Returns a value of an attention call with the heads in the dimension where they were captured.

    In a decoding step with a mask, transformers (since 5.1) packs the heads that share keys.
    """
    target, node = entry.target, entry.target.node
    is_attention = node.is_inner or node.op in FUSED_ATTENTION
    if not is_attention or not isinstance(target.whole, TensorSpec) or value.shape == target.whole.shape:
        return value
    heads = None if entry.placement is None else entry.placement.size_here(1)
    shape = unpacked_shape(target.frame, node, target.whole, value.shape, heads)
    return value if shape is None else value.reshape(shape)


def _patched(entry: Entry, value: Any, indices: Indices | None, *, is_own: bool = False) -> Any:
    """Returns the value with the patches applied to the component's part of it, and only at some positions."""
    target = entry.target
    part = patched = part_of(target, value, entry.patches)
    if indices is None:
        for patch in entry.patches:
            patched = apply_patch(patch, target, patched, is_own=is_own)
    else:
        patched = _apply_patch_at(entry, indices, part)
    if part is value:
        return patched
    if patched is part and not any(_is_read_with_gradient(patch, target, value) for patch in entry.patches):
        return value  # it was written into, or not changed
    if not target.index:
        return _at_path(patched, entry.patches[-1], target, part)
    assert target.component is not None
    # A clone keeps the strides: the last bits of what the model computes next may depend on them.
    whole = value.clone()
    target.component.seen(whole)[target.index] = _checked(
        patched, entry.patches[-1], target, part, f"on a part of {target.path!r}"
    )
    return whole


def _at_path(patched: Any, patch: Patch[Any], target: Target, given: Tensor) -> Any:
    """Returns a value that was patched as a component is seen as the model has it."""
    if target.component is None or not isinstance(patched, Tensor):
        return patched
    if patched.dim() != given.dim():
        _checked(patched, patch, target, given, f"on {target.path!r}, whose axes have another order,")
    return target.component.at_path(patched)


# -- at some positions -------------------------------------------------------------------------------------------------


def _apply_patch_at(entry: Entry, indices: Indices, value: Tensor) -> Tensor:
    """Applies the patch of an entry to the part of a value that it means, and keeps its effect at some indices only."""
    target, (patch,), restriction = entry.target, entry.patches, entry.restriction
    assert restriction is not None
    dim, row_dim = (
        each if each is None or target.component is None else target.kept_dims.index(each)
        for each in (restriction.dim, restriction.row_dim)
    )
    assert dim is not None
    rows: list[list[int]] = [indices] if row_dim is None else indices  # type: ignore[list-item, assignment]
    if row_dim is not None and len(rows) != value.shape[row_dim]:
        raise PatchValueError(
            f"{target.text!r}: positions has {len(rows)} rows, but the value here, of shape {tuple(value.shape)}, has "
            f"{value.shape[row_dim]} in dimension {row_dim}; give positions for each row of the batch"
        )
    is_all = row_dim is None and rows[0] == list(range(value.shape[dim]))
    if is_all and patch.observes_only:
        apply_patch(patch, target, value)
        return value
    shape = [1] * value.dim()
    if row_dim is not None:
        shape[row_dim] = len(rows)
    if not patch.observes_only:
        where = f"with positions={patch.positions!r}"
        patched = _checked(apply_patch(patch, target, value), patch, target, value, where)
        shape[dim] = value.shape[dim]
        chosen = torch.zeros(len(rows), shape[dim], dtype=torch.bool)
        for number, row in enumerate(rows):
            chosen[number, row] = True
        mask = _along(chosen.to(value.device), shape, dim, row_dim)
        return patched if is_all or patched is value else torch.where(mask, patched, value)
    if len(set(map(len, rows))) > 1:
        raise PatchValueError(
            f"{target.text!r}: at this step, the rows have different numbers of the positions to read: {indices}"
        )
    has_gradient = _is_read_with_gradient(patch, target, value)
    if has_gradient and any(len(set(row)) < len(row) for row in rows):
        raise PatchValueError(
            f"{target.text!r}: positions={patch.positions!r} has a position twice, and both copies would get its "
            "gradient; give each position once, or run in torch.no_grad()"
        )
    shape[dim] = len(rows[0])
    sizes = [*value.shape[:dim], len(rows[0]), *value.shape[dim + 1 :]]
    index = _along(torch.tensor(rows, device=value.device), shape, dim, row_dim).expand(sizes)
    taken = value.gather(dim, index)
    patch.op(taken)
    return value.clone().scatter_(dim, index, taken) if has_gradient else value


def _along(table: Tensor, shape: Sequence[int], dim: int, row_dim: int | None) -> Tensor:
    """Returns a table of rows and positions in a shape that has its sizes in these two dimensions, else ones."""
    return (table if row_dim is None or row_dim < dim else table.T).reshape(shape)


def _is_read_with_gradient(patch: Patch[Any], target: Target, value: Any) -> bool:
    """Whether a patch keeps a part of a value that gets a gradient: the model must use the part, for it to have one."""
    if not patch.only_keeps or not torch.is_grad_enabled() or not isinstance(value, Tensor) or not value.requires_grad:
        return False
    node = target.node
    return not (node.is_mutated_later or node.is_in_place)


# -- one patch ---------------------------------------------------------------------------------------------------------


def apply_patch(patch: Patch[Any], target: Target, value: Any, *, is_own: bool = False) -> Any:
    """Returns the result of one patch; errors name the path, and what the patch was given."""
    if patch.observes_only:
        # The model writes into this tensor later: what was observed must stay as it was.
        patch.op(value.clone() if target.node.is_mutated_later and isinstance(value, Tensor) else value)
        return value
    if not isinstance(value, Tensor) or not isinstance(target.whole, TensorSpec):
        _check_kind(patch, target, value)
    if selects_nothing(patch, value):
        return value  # not a copy: what is written into a view later would miss it
    given = value.clone() if patch.requires_clone and not is_own and isinstance(value, Tensor) else value
    try:
        patched = patch.op(given)
        if patched is None and isinstance(value, Tensor) and target.node.kind != "input" and not patch.any_shape:
            raise PatchValueError(
                f"{type(patch).__name__} returned None for a value {shown_value(value)}: is a return statement "
                "missing? To put None in place of the value, give any_shape=True"
            )
        return patched
    except GraphPatchError as error:
        raise type(error)(f"{target.text!r}: {error}") from (None if isinstance(patch, WritingPatch) else error)
    except (StopIteration, StopAsyncIteration):  # which the interpreter treats specially
        raise
    except Exception as error:
        if isinstance(patch, WritingPatch) and isinstance(error, (RuntimeError, IndexError, TypeError, ValueError)):
            # The message has all of the error's text, and its traceback is inside this package.
            raise PatchValueError(_cannot_write(patch, target, value, error)) from None
        shown = f"{type(patch).__name__} on {target.text!r} ({target.node.op})"
        add_note(error, f"raised by {shown}: the value here is {shown_value(value)}")
        raise


def _cannot_write(patch: Patch[Any], target: Target, value: Any, error: Exception) -> str:
    """Returns why a built-in patch, which raised `error`, cannot be applied to a tensor."""
    index, new = getattr(patch, "slice", None), getattr(patch, "value", None)
    part = "" if index is None else f", slice [{index_text(index)}]"
    given = "" if new is None else f", the patch's value is {shown_value(new)}"
    move = f" (move the patch's value there: value.to({str(value.device)!r}))"
    why = f"{error}{move * (isinstance(new, Tensor) and new.device != value.device)}"
    where = f"{type(patch).__name__} on {target.text!r} ({target.node.op})"
    return f"{where}: the value here is {shown_value(value)}{part}{given}: {why}{axes_note(target)}"


def _checked(patched: Any, patch: Patch[Any], target: Target, value: Tensor, where: str) -> Tensor:
    if isinstance(patched, Tensor) and patched.shape == value.shape and patched.dtype == value.dtype:
        return patched
    raise PatchValueError(
        f"{target.text!r}: {type(patch).__name__} {where} was given a value {shown_value(value)} and returned one "
        f"{shown_value(patched)}; a patch on a part of a value must keep its shape and dtype"
    )


def _check_kind(patch: Patch[Any], target: Target, value: Any) -> None:
    """Raises a `PatchValueError` if a number was captured where a tensor is now, or the other way round."""
    spec, is_tensor = target.spec, isinstance(value, Tensor) and isinstance(describe(value), TensorSpec)
    if not isinstance(patch, WritingPatch) or patch.any_shape or isinstance(spec, UnknownSpec):
        return
    kinds = TensorSpec if is_tensor else (ScalarSpec, ObjectSpec)
    is_same = isinstance(spec, kinds) or is_tensor == isinstance(spec, TensorSpec)
    if not is_same and not (target.node.kind == "input" and is_tensor):  # which the example did not have
        raise PatchValueError(
            f"{target.text!r} ({target.node.op}) was {spec} when it was captured, but is of type "
            f"{type(value).__name__} now; patch another node, or make the PatchableGraph with such inputs"
        )


def _check_shape(entry: Entry, value: Tensor) -> None:
    """Raises a `PatchValueError` if a value does not have the shape that its name implies for these inputs."""
    target = entry.target
    if value.shape == target.whole.shape or all(patch.any_shape for patch in entry.patches):  # type: ignore[union-attr]
        return
    run = observer.get()
    problem = shape_problem(target.frame, target.whole, value.shape, run.given if isinstance(run, Run) else None)
    if problem is not None:
        raise PatchValueError(
            f"{target.text!r} ({target.node.op}) was of shape {tuple(target.whole.shape)} when it was captured, and is "  # type: ignore[union-attr]
            f"of shape {tuple(value.shape)} now: {problem}, so the name may mean another value here; if this is "
            "intended, give the patch any_shape=True"
        )


def write_back(wrote: Tensor, patched: Any, target: Target) -> None:
    """Writes the patched value of an in-place op back into the tensor that the op wrote into."""
    if patched is wrote:
        return
    if not isinstance(patched, Tensor) or patched.shape != wrote.shape:
        shown = tuple(patched.shape) if isinstance(patched, Tensor) else type(patched).__name__
        raise PatchValueError(
            f"{target.text!r} ({target.node.op}) writes in place into a tensor of shape {tuple(wrote.shape)}; "
            f"a patch on it must keep that shape, not give {shown}"
        )
    wrote.copy_(patched)
