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
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture import INVOKE, call_sites, decomposition_of
from graphpatch_notebook.capture.inputs import given_input, with_input, with_other_tensor
from graphpatch_notebook.capture.observers import Swaps, apply_observer, invoke
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import (
    GraphPatchError,
    PatchValueError,
)
from graphpatch_notebook.patches.kinds import RunStopped
from graphpatch_notebook.patching.apply import MissingChildError, apply_at, apply_patch, value_at, write_back
from graphpatch_notebook.patching.patch_map import passing_input
from graphpatch_notebook.patching.plan import (
    EntriesByChain,
    Entry,
    FramePlan,
    OpEntries,
    PatchedCode,
    Plan,
    SiteEntries,
)
from graphpatch_notebook.patching.positions import GenerationSteps, HeldBackError
from graphpatch_notebook.patching.sharding import is_parallel_machinery
from graphpatch_notebook.patching.stand_in import bound_with, held_value, holding_tensors
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import function_mode_depth, takes_hooks, without_torch_functions
from graphpatch_notebook.values import ContainerSpec, Key, ValueSpec, rebuilt, replaced, take
from graphpatch_notebook.warning_places import level_of_caller, warn

if TYPE_CHECKING:
    from graphpatch_notebook.patching.context import PatchContext


class _Frame:
    """A frame that is running. Without a plan, nothing in it belongs to a node: neither calls nor ops are counted."""

    __slots__ = ("counts", "inputs", "plan", "sites")

    def __init__(self, plan: FramePlan | None, inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})) -> None:
        self.plan = plan
        self.sites = None if plan is None else plan.sites
        # How often each submodule was called, and each patched call site was reached, so far (by id).
        self.counts: dict[int, int] = {}
        self.inputs = inputs  # the arguments of its `forward`


class Run(TorchFunctionMode):
    """One patched call of a model."""

    def __init__(self, context: PatchContext, plan: Plan, steps: GenerationSteps | None = None) -> None:
        super().__init__()
        self.context = context  # reports repeated calls
        self.plan = plan
        self.root = plan.root.frame.module
        self.steps = steps  # of a generation; `None` if no patch is for some of them only
        self.frame_watch = watch.get()
        # Whether gradients were enabled at the start: reentrant checkpointing itself disables them.
        self.has_gradients = torch.is_grad_enabled()
        self.stack = [_Frame(plan.root)]  # the frames that are running; the first is outside of all module calls
        self.values: dict[str, Any] = {}  # the values that patches of the run read, by name
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

    @property
    def is_patched(self) -> bool:
        """Whether there are patches. Loaded graphs read this, and the next, from the run that calls them."""
        return len(self.plan.entries) > 0

    @property
    def has_edited_graphs(self) -> bool:
        """Whether an edited graph runs in it."""
        return any(plan.frame.is_edited for plan in self.plan.by_frame.values())

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
        if self.frame_watch is None:
            return self._run_frame(module, forward, args, kwargs)
        forward = self.frame_watch.begin(module, forward, args, kwargs) or forward
        try:
            output = self._run_frame(module, forward, args, kwargs)
            self.frame_watch.returned(output)
            return output
        finally:
            self.frame_watch.end()

    def _run_frame(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if id(module) not in self.plan.watched:  # swapped for another context
            return forward(*args, **kwargs)
        if len(self.stack) == 1:
            self._begin(module, args, kwargs)
        plan = self._plan_of(module)
        is_called = id(plan) in self._calls
        self._calls.discard(id(plan))
        self.stack.append(_Frame(plan, (args, kwargs)))
        try:
            if plan is None:
                return invoke(forward, args, kwargs)
            self.reached.add(id(plan.frame))
            if self.has_gradients and not self.is_checkpointed:
                self.is_checkpointed = is_in_checkpoint()
            if plan.is_bare:
                output = invoke(forward, args, kwargs)
            else:
                output = self._run_patched(module, plan, forward, args, kwargs)
            if self.frame_watch is not None:
                self.frame_watch.returned(output)  # before the patches on the output
        finally:
            self.stack.pop()
        return output if is_called or not plan.output else self.at_boundary(plan.output, output)

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
        plan, index = self._next_plan(module)
        caller = self.stack[-1]
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
            return self._invoke(plan, forward, args, kwargs)
        if is_parallel_machinery(forward):
            with holding_tensors(holder, changed):
                return self._invoke(plan, forward, args, kwargs)
        stand_in, bound = bound_with(holder, changed, forward)
        try:
            return self._invoke(plan, bound, args, kwargs)
        finally:
            stand_in.copy_changes_back()

    def _changed_tensors(self, plan: FramePlan, module: Module) -> dict[str, Tensor]:
        """Returns the patched parameters, buffers and attributes that are other tensors now, by path."""
        changed: dict[str, Tensor] = {}
        for path, entries in plan.tensors.items():
            with without_torch_functions():
                value = held_value(module, path)
            if (patched := self.at_boundary(entries, value)) is not value:
                changed[path] = patched
        return changed

    def _invoke(
        self, plan: FramePlan, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls `forward`: under this mode, and all that it calls too, if it needs that."""
        if self.is_under_mode or not plan.needs_mode:
            return invoke(forward, args, kwargs)
        token = apply_observer.set(self)
        self.is_under_mode = True
        try:
            with self:
                return invoke(forward, args, kwargs)
        finally:
            apply_observer.reset(token)
            self.is_under_mode = False

    # -- inputs and skipped calls --------------------------------------------------------------------------------------

    def _patched_inputs(
        self, plan: FramePlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns a call with the entries on inputs applied."""
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
        for entry in plan.probed if self.has_gradients else ():
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
            if entry.keep and not self.is_under_mode and isinstance(value, Tensor) and value.shape == entry.plain_shape:
                self.fired.add(id(entry))  # before: the last patch of `pg.record` ends the run
                for keep in entry.keep:
                    keep(value)
            else:
                value = self.apply(entry, value)
        return value

    def apply(self, entry: Entry, value: Any) -> Any:
        """Applies one entry, and keeps that it fired, or why it could not."""
        caller = self.stack[-1]
        # What is called here is not the model's: neither if a patch calls the model or a module of it, nor at a call
        # site that calls modules and ops (`for f in (self.linear, torch.tanh)`).
        self.stack.append(_Frame(None))
        try:
            if isinstance(value, Tensor) and value.shape == entry.plain_shape:
                patched = value
                for patch in entry.patches:
                    patched = apply_patch(patch, entry.target, patched)
            elif entry.is_source:
                self.values[entry.target.text] = value_at(entry, value)
                patched = value
            else:
                patched = self._applied(entry, value, caller)
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

    def _applied(self, entry: Entry, value: Any, caller: _Frame) -> Any:
        target, indices_in = entry.target, None
        if entry.restriction is not None:
            if self.steps is None:  # not a call of the `PatchableGraph`, but backward
                raise GraphPatchError(_RECOMPUTED_STEP.format(path=target.path))
            if not self.steps.admits(entry):
                raise HeldBackError
            if entry.restriction.positions is not None:
                indices_in = partial(self.steps.indices, entry)
        is_here = caller.plan is not None and caller.plan.frame is target.frame
        inputs = caller.inputs if is_here and target.node.kind == "op" and not target.dig else None
        applied = self._with_values(entry) if entry.sources else entry
        patched = apply_at(applied, value, target.dig, indices_in, inputs)
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
        entries = entries_by_name[name]
        patched = self.at_boundary(entries, value)
        if entries[0].target.node.is_in_place:
            write_back(value, patched, entries[0].target)
        return patched

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
        return self._patched_result(entries, result, args, kwargs or {})

    def on_apply(self, cls: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Applies patches on the call of an `autograd.Function`: one node, without nodes for the code inside it."""
        if function_mode_depth() < self._depth:  # an operator's own autograd function
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
            # The fast path of `at_boundary`, inlined: this runs for every op of a model that is probed whole.
            if entry.keep and isinstance(result, Tensor) and result.shape == entry.plain_shape:
                self.fired.add(id(entry))
                for keep in entry.keep:
                    keep(result)
                continue
            node = entry.target.node
            if node.is_in_place:
                value = node.written_of(args, kwargs)
            else:
                value = result if node.position is None else result[node.position]
            patched = self.apply(entry, value)
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

    def unfired(self, needed: Sequence[Entry]) -> list[tuple[Entry, str]]:
        """Returns the needed entries that never fired, with the reasons."""
        if len(self.fired) == len(self.plan.entries):
            return []
        idle = [entry for entry in needed if id(entry) not in self.fired and not entry.is_source]
        return [
            (e, self.missing.get(id(e)) or (self.steps and self.steps.why_not(e)) or self._why(e.target.frame))
            for e in idle
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


class FrameWatch(Protocol):
    """Sees all frames of a run."""

    def begin(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[..., Any] | None:
        """Called when a frame begins; returns the function that replaces its `forward`, if there is one."""

    def returned(self, output: Any) -> None:
        """Called when the `forward` of the innermost frame returned, before patches on its output; maybe after, too."""

    def end(self) -> None:
        """Called when the innermost frame has ended, also by an error."""


watch: ContextVar[FrameWatch | None] = ContextVar("graphpatch_frame_watch", default=None)
"""Sees the frames of the patched runs that begin in this context."""


@contextmanager
def frames_seen(frame_watch: FrameWatch, modules: Iterable[Module]) -> Iterator[None]:
    """Shows `frame_watch` the frames of these modules in patched runs in the block, not only those of patched ones."""
    swaps, token = Swaps(), watch.set(frame_watch)
    try:
        swaps.hold(module for module in modules if takes_hooks(module))
        yield
    finally:
        swaps.let_go()
        watch.reset(token)
