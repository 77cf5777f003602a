"""Captured models and patch contexts: which patches are active where, and what is swapped on the model in the block.

A context belongs to the thread (or task) that entered it: a context variable holds the active ones. For the length of
the block, the forwards of the modules whose frames hold patches are swapped, and the calls of those whose output is
patched; unless the `PatchableGraph` is called in the same context, both do nothing.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, TracebackType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture import call_sites, is_own, parameter_without_values
from graphpatch_notebook.capture.inputs import ExampleInputs
from graphpatch_notebook.capture.modules import Swaps, all_modules, observer, visible_apply
from graphpatch_notebook.capture.records import Frame, Node, Site
from graphpatch_notebook.errors import (
    GraphError,
    GraphPatchError,
    PatchNotFiredError,
    UnknownPathError,
    add_note,
    has_note,
    level_of_caller,
    warn,
    warn_each_time,
)
from graphpatch_notebook.graphs import CompiledGraphModule, GraphModule, build_hierarchy, own_graphs
from graphpatch_notebook.graphs.build import connect_records
from graphpatch_notebook.graphs.generated_code import name_assigned_at
from graphpatch_notebook.inspection.resolution import NodeMap, Target, Unresolvable
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.patches.kinds import Patch, RunStopped
from graphpatch_notebook.patching.model_state import sharding_of
from graphpatch_notebook.patching.plan import (
    Callers,
    Entry,
    Lookup,
    Plan,
    Splicing,
    entries_of,
    patches_that_keep,
    refuse_exchanged,
    refuse_with_cache,
)
from graphpatch_notebook.patching.positions import GenerationSteps, StepCount, Unreached
from graphpatch_notebook.patching.run import OperatorPatchError, Run
from graphpatch_notebook.patching.splices import Given, places_of, spliced, splicings
from graphpatch_notebook.patching.stand_in import original_of
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.texts import with_tokens
from graphpatch_notebook.torch_compat import (
    eager_code,
    function_mode_depth,
    is_any_compiled,
    is_in_backward,
    is_module_call,
    may_compile,
    runs_hooks,
    visible_flex_attention,
)
from graphpatch_notebook.values import ScalarSpec, describe

PatchLists: TypeAlias = "Mapping[Any, Sequence[Patch[Any]]]"


class CapturedModel:
    """What a `PatchableGraph` consists of: the interface that it offers to the rest of this package."""

    def __init__(
        self,
        module: Module,
        root: Frame,
        options: ExtractionOptions,
        *,
        examples: ExampleInputs | None = None,
        unstored: Mapping[str, str] | None = None,
    ) -> None:
        self.module = module
        self.root = root
        self.options = options
        self.sharding = sharding_of(root)  # `None` if each process runs all of the model
        self.examples = examples  # the example inputs; `None` if there were none, as for a loaded graph
        self.tokenizer: Any = None  # makes inputs of texts, and texts of tokens; `None` if none was given
        # The paths of frames without a graph in the file it was loaded from, with the reasons.
        self.unstored = dict(unstored or {})
        self.permanent: tuple[
            PatchLists, ...
        ] = ()  # the patch maps that all calls have (`PatchableGraph.edit`), in order
        self._lacks_weights = bool(parameter_without_values(module))
        self._hierarchy: GraphModule | None = None
        self._derived: _Derived | None = None
        for frame in [frame for frame in root.walk() if frame.custom_graph is not None]:
            connect_records(frame, frame.custom_graph)
            frame.note_own_graph()

    def edited(self, patch_map: Any = None) -> CapturedModel:
        """Returns another captured model with the same graphs, and no contexts, whose calls also have these patches."""
        result = copy.copy(self)
        result._hierarchy = self.hierarchy
        if patch_map is not None:
            self.plan(self.entries_of(patch_map))
            listed = {path: [p] if isinstance(p, Patch) else list(p) for path, p in patch_map.items()}
            result.permanent, result._derived = (*self.permanent, listed), None
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedModel:
        result = copy.copy(self)
        memo[id(self)] = result
        # The model first: the records of the capture refer to it, not the other way round.
        result.module = copy.deepcopy(self.module, memo)
        result.root = copy.deepcopy(self.root, memo)
        result.permanent = tuple(
            {str(path): copy.deepcopy(patches, memo) for path, patches in each.items()} for each in self.permanent
        )
        # Graphs that the user edited must be copied; others could be built again.
        result._hierarchy, result._derived = copy.deepcopy(self._hierarchy, memo), None
        return result

    def spliced(
        self,
        given: Given,
        recorded: Callable[[Sequence[str]], Mapping[str, Tensor]],
        *,
        name: str,
        has_error: bool,
        across: bool,
    ) -> CapturedModel:
        """Returns another captured model of the same module, with splices; `recorded` returns values by their paths."""
        if self.sharding is not None or self.runs_own_graphs:
            raise GraphError(
                "SAEs are spliced into the model's own code, which runs in one process, and not into graphs"
            )
        places = places_of(self._current().paths, given, across=across)
        values = recorded([path for place in places for path in (*place.encoded, *place.replaced)])
        result = copy.copy(self)
        result.root = spliced(self.root, places, values, name=name, has_error=has_error, across=across)
        result._hierarchy = result._derived = None
        result.plan(())
        return result

    def tokenized(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_generation: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the inputs of a call, with tokens in place of texts if there is a tokenizer."""
        if self.tokenizer is None or not args:
            return args, kwargs
        names = [parameter.name for parameter in self.root.parameters]
        return with_tokens(self.module, names, self.tokenizer, args, kwargs, is_generation=is_generation)

    def check_weights(self) -> None:
        """Raises a `GraphError` if the model cannot run, since its weights are on the meta device."""
        if self._lacks_weights:
            name = parameter_without_values(self.module)
            if name:
                raise GraphError(
                    f"the model has no weights: the parameter {name!r} is on the meta device. Names, shapes and code "
                    "can be inspected, and patches chosen; to run the model, load its weights first: "
                    "pg.load_state_dict(weights, assign=True)"
                )
            self._lacks_weights = False

    # -- graphs --------------------------------------------------------------------------------------------------------

    @property
    def hierarchy(self) -> GraphModule:
        """The hierarchy of graph modules, callable like the model."""
        if self._hierarchy is None:
            self._hierarchy = build_hierarchy(self.root)
        return self._hierarchy

    def graph_of(self, frame: Frame) -> GraphModule:
        """Returns the graph module of a frame."""
        spliced = (each for each in frame.frames_above() if each.is_spliced)
        top = next((build_hierarchy(each) for each in spliced), self.hierarchy)
        return next(each for each in top.modules() if isinstance(each, GraphModule) and each.frame is frame)

    @property
    def edits(self) -> int:
        """How often graphs were edited."""
        return self.root.capture.edits

    @property
    def runs_own_graphs(self) -> bool:
        """Whether there are graphs that replace their module: calls without patches run these, too."""
        return self.root.runs_own_graphs

    def renew(self) -> None:
        """Forgets what was derived from the records: these have changed."""
        self._derived = None

    # -- patches -------------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> NodeMap:
        """All paths that can be patched."""
        return self._current().paths.nodes

    @property
    def callers(self) -> Callers:
        """Which frames call which module."""
        return self._current().callers

    def entries_of(self, patch_map: Any) -> list[Entry]:
        """Returns the patches of a patch map with their targets: see `plan.entries_of`."""
        return entries_of(self._current().paths, patch_map, self.sharding)

    def paths_of(self, text: str) -> list[str]:
        """Returns the paths, or names of components, of the targets of a text."""
        return [target.text for target in self.targets_of(text)]

    def targets_of(self, text: str) -> list[Target]:
        """Returns what a path, a component name, or a pattern leads to, in order, or raises an `UnknownPathError`."""
        try:
            return self._current().paths.targets(text)
        except Unresolvable as error:
            raise UnknownPathError(error.message) from None

    def plan(self, entries: Sequence[Entry]) -> Plan:
        """Returns the plan of runs with the patches of `entries`."""
        derived = self._current()
        return derived.plan(entries) if entries else derived.without_patches

    def plan_of(self, patch_map: Any) -> Plan:
        """Returns the plan of runs with the patches of a patch map: see `plan.entries_of`."""
        patches, derived = patches_that_keep(patch_map), self._current()
        if not patches or self.sharding is not None or derived.splices:
            return self.plan(self.entries_of(patch_map))
        paths = tuple(map(str, patch_map))
        if (known := derived.known.get(paths)) is None:
            # Patches of its own: it must not keep what the patches of others keep.
            known = self.plan(self.entries_of({path: type(patch)() for path, patch in patch_map.items()}))
            if len(derived.known) >= _MOST_KNOWN:
                derived.known.clear()
            derived.known[paths] = known
        return known.with_patches(patches)

    @property
    def has_patched_calls(self) -> bool:
        """Whether calls outside of any context differ from those of the model."""
        runs_them_itself = getattr(self.module, "runs_its_graphs", False) and not self.edits  # a loaded graph
        own = self.runs_own_graphs and not runs_them_itself
        return bool(self.permanent) or own or not all(splice.is_idle for splice in self._current().splices)

    @property
    def permanent_paths(self) -> tuple[str, ...]:
        """The paths with permanent patches, each once."""
        return tuple(dict.fromkeys(str(path) for each in self.permanent for path in each))

    @property
    def permanent_plan(self) -> Plan | None:
        """The plan of runs with the permanent patches only; `None` if there are none."""
        if not self.permanent:
            return None
        derived = self._current()
        if derived.permanent is None:
            derived.permanent = derived.plan([entry for each in self.permanent for entry in self.entries_of(each)])
        return derived.permanent

    def is_current(self, plan: Plan) -> bool:
        """Whether no graph was edited since `plan` was made."""
        return plan.callers is self._current().callers

    def _current(self) -> _Derived:
        """Returns the values derived from the current records."""
        derived = self._derived
        if derived is None or derived.edits != self.edits:
            graphs = own_graphs(self.hierarchy) if self.runs_own_graphs else ()
            derived = self._derived = _Derived(Lookup(self.root), graphs, self.edits)
        return derived


_MOST_KNOWN = 16


@dataclass(eq=False)
class _Derived:
    """What is derived from the records of a capture, until a graph is edited: `edits` is how often that was."""

    paths: Lookup
    own_graphs: Sequence[CompiledGraphModule]
    edits: int
    permanent: Plan | None = None  # of the permanent patches, when it was first needed
    # The plans of patch maps that only keep values, by their paths.
    known: dict[tuple[str, ...], Plan] = field(default_factory=dict)

    @functools.cached_property
    def callers(self) -> Callers:
        return Callers(self.paths.root)

    @functools.cached_property
    def without_patches(self) -> Plan:
        """The plan of runs in which graphs that are their module run, without patches."""
        return self.plan(())

    @functools.cached_property
    def splices(self) -> Sequence[Splicing]:
        """What plans need of the splices of the capture."""
        return splicings(self.paths)

    def plan(self, entries: Sequence[Entry]) -> Plan:
        return Plan(self.paths.root, entries, self.callers, self.own_graphs, self.splices)


# -- contexts ----------------------------------------------------------------------------------------------------------


class PatchContext:
    """A context manager with patches, from `PatchableGraph.patch`. It can be entered again, also by several threads.

    Each block has its own state: a copy of the context, which `innermost` returns inside of the block.
    """

    # Called after each call of the `PatchableGraph` in the context that returns, in its thread, before the caller has
    # the result; not for calls that such a call makes. Set it before the context is entered.
    after_call: Callable[[], None] | None = None
    is_quiet = False  # whether patches that never fire are not reported; set it before the context is entered
    _was_entered = False

    def __init__(
        self,
        captured: CapturedModel,
        patch_map: Mapping[Any, Any],
        *,
        is_strict: bool = False,
        is_of_one_call: bool = False,
        entries: Sequence[Entry] | None = None,
    ) -> None:
        self.captured = captured
        self._patch_map = patch_map
        if isinstance(patch_map, Mapping):  # anything else is an error on entry
            self._patch_map = {p: list(given) if isinstance(given, list) else given for p, given in patch_map.items()}
        self.is_strict = is_strict  # whether patches that never fire are errors
        self._is_of_one_call = is_of_one_call  # whether it is entered for one call outside of any block
        self._own_plan = None if entries is None else captured.plan(entries)

    def quiet(self) -> PatchContext:
        """Returns this context, set to not report patches that never fire."""
        self.is_quiet = True
        return self

    def __enter__(self) -> None:
        self._was_entered = True
        try:
            if self._own_plan is None or not self.captured.is_current(self._own_plan):
                self._own_plan = self.captured.plan_of(self._patch_map)
            block = object.__new__(type(self))
            block.__dict__ |= self.__dict__
            block._begin(self, self._own_plan)
        except GraphPatchError as error:
            call_sites.hide_frames(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        block = next((block for block in reversed(_active.get()) if block.origin is self), None)
        if block is not None:
            block._end()
            if kind is None:
                block._report_idle(sys._getframe(1).f_code)

    def __repr__(self) -> str:
        if any(block.origin is self for block in _active.get()):
            return "<PatchContext, active>"
        return "<PatchContext, not active: its patches hold inside of a block, `with pg.patch(...):`>"

    def __del__(self) -> None:
        if not self._was_entered and not sys.is_finalizing():
            warn_each_time(
                "a pg.patch(...) was never entered, so it patched nothing: call the model inside of "
                "`with pg.patch(...):`",
                "not fired",
            )

    # -- one block -----------------------------------------------------------------------------------------------------

    origin: PatchContext | None = None  # the context of which this is a block
    plan: Plan  # all patches that are active in it: the permanent ones, those of the blocks around it, then its own
    step_count: StepCount | None
    _after_calls: tuple[Callable[[], None], ...] = ()  # what to call after each call, outer blocks first

    def _begin(self, origin: PatchContext, own: Plan) -> None:
        outer = innermost(self.captured)
        self.origin, self.is_over = origin, False
        self._take(own, outer)
        self.step_count = None if outer is None else outer.step_count
        if self.step_count is None and self.plan.restricted:
            self.step_count = StepCount()
            for block in _active_blocks():  # the next block inside of these goes on counting
                block.step_count = self.step_count if block.captured is self.captured else block.step_count
        self.is_strict |= outer is not None and outer.is_strict
        self._after_calls = () if outer is None else outer._after_calls
        if self.after_call is not None:
            self._after_calls = (*self._after_calls, self.after_call)
        self.is_used = False  # whether the `PatchableGraph` was called in it, or in a block inside it
        self._direct: Module | None = None  # the module of the model that was called directly, without patches, first
        self._has_direct_with_gradients = False  # whether one was called directly while gradients were enabled
        self._awaits_backward = False  # whether backward will compute a patched call again (activation checkpointing)
        self._reported: set[str] = set()
        self._swaps = Swaps(_recomputing)
        self._handles: list[Any] = []
        try:
            self._swap()
            _blocks.append(self)
            _active.set((*_active.get(), self))
        except BaseException:
            self._end()
            raise

    def _take(self, own: Plan, outer: PatchContext | None) -> None:
        """Sets the plan of this block, which adds to that of the block around it."""
        before = self.captured.permanent_plan if outer is None else outer.plan
        self.own = own
        self.plan = own if before is None else before.with_more(own.entries)
        refuse_exchanged(self.plan)

    def _swap(self) -> None:
        """Swaps and hooks what runs with the plan need."""
        # The model may register hooks in a run (transformers does, to collect hidden states): these see outputs
        # before they are patched, and patched inputs. What is only kept is changed by no hook but those there are.
        plan = self.plan
        hooked = {key for key, module in plan.watched.items() if runs_hooks(module)}
        called = [module for key, (module, is_changed) in plan.with_outputs.items() if is_changed or key in hooked]
        self._swaps.hold([*plan.watched.values(), *plan.unpatched.values()], called)
        for key, (module, is_patched) in plan.with_inputs.items():
            if is_patched or key in hooked:
                self._handles.append(module.register_forward_pre_hook(self._on_inputs, with_kwargs=True))

    def _restore(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._swaps.release()

    def _follow_edits(self) -> None:
        """Makes the plans of this block and those around it anew, if graphs were edited in it: no stale code runs."""
        outer = None
        for block in _active_blocks():
            if block.captured is self.captured:
                own = self.captured.plan_of(block._patch_map)
                block._restore()
                block._take(own, outer)
                block._swap()
                outer = block

    def _on_inputs(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """The forward pre-hook of this block on modules whose inputs are patched."""
        run = observer.get()
        # No keyword arguments: another thread adds the hook, or takes it away, at this moment.
        if kwargs is None or not isinstance(run, Run) or run.context is not self:
            return None
        return run.on_inputs(original_of(module), args, kwargs)

    def _end(self) -> None:
        """Restores the model, and warns of a backward pass that will not see the patches."""
        self.is_over = True
        _active.set(tuple([block for block in _active.get() if block is not self]))
        if self in _blocks:
            _blocks.remove(self)
        self._restore()
        if (outer := innermost(self.captured)) is not None:
            outer.is_used |= self.is_used
        if self._awaits_backward:
            warn(_AWAITS_BACKWARD, "checkpoint", stacklevel=level_of_caller())

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls `function`, which runs the model, with the patches of this block; reports those that never fired."""
        if not self.captured.is_current(self.plan):
            self._follow_edits()
        plan, outer, is_direct = self.plan, observer.get(), function is self.captured.module
        if plan.skips and kwargs.get("use_cache") is not False:
            refuse_with_cache(plan, function, args, kwargs)
        steps = None
        if plan.restricted:
            assert self.step_count is not None
            steps = GenerationSteps(
                plan.root.frame, plan.restricted, self.step_count, is_direct, is_outside=self._is_of_one_call
            )
        run, needed = Run(self, plan, steps), plan
        run.given = (args, kwargs) if is_direct else None
        self.is_used = True
        try:
            result = self._observed(run, function, args, kwargs)
        except RunStopped as stop:
            # What ends a run for its own sake, as `pg.record` does, need not come to the patches of blocks around it.
            result, run.has_stopped, needed = stop.value, True, self.own
        if self.is_over:
            raise GraphPatchError(
                "the patch context ended while this call ran in it, in another thread: some of its patches may be "
                "missing in the result; wait for the thread before the end of the `with` block"
            )
        if run.ended_at and not run.has_stopped:
            raise GraphPatchError(_STOP_HANDLED.format(path=run.ended_at))
        if run.is_checkpointed and torch.is_grad_enabled():
            if run.has_stopped:
                raise GraphPatchError(_STOPPED_IN_CHECKPOINT)
            self._awaits_backward |= run.has_changed
        self._report_call(run, is_direct, needed)
        if not (isinstance(outer, Run) and outer.root is run.root):  # inside of another call of the same object
            for callback in self._after_calls:
                callback()
        return result

    def _observed(self, run: Run, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Methods may compile the model themselves, as `generate` does with a static cache.
        is_eager = function is not run.root or (
            may_compile() and (run.plan.sees_ops or is_any_compiled(all_modules(run.root)))
        )
        token = observer.set(run)
        try:
            if not (is_eager or run.plan.sees_ops or function_mode_depth()):
                return function(*args, **kwargs)
            with (
                eager_code if is_eager else nullcontext(),
                visible_apply if is_eager or run.plan.sees_ops else visible_flex_attention,
            ):
                return function(*args, **kwargs)
        except OperatorPatchError as failed:
            failure: Exception = failed.args[0]
        except Exception as error:
            explain(error, run)
            raise
        finally:
            observer.reset(token)
        explain(failure, run)
        raise failure  # here, for it to keep its own context

    # -- reports -------------------------------------------------------------------------------------------------------

    def _report_call(self, run: Run, is_direct: bool, needed: Plan) -> None:
        """Reports the patches that never fired in a call."""
        unfired = run.unfired(needed)
        if run.steps is not None:
            unfired = run.steps.settle(unfired, run.fired)
        # Methods that do not run the model (`get_input_embeddings`) are called on edited graphs, too.
        if not (is_direct or run.reached or not self._is_of_one_call):
            unfired = []
        if run.steps is not None and (not is_direct or self._is_of_one_call):
            unfired += run.steps.count.take(self.plan.restricted)
        self._report(unfired, "during this call")

    def _report_idle(self, code: CodeType) -> None:
        """Reports patches of a block that ended in `code`: those for steps or positions that no direct call reached.

        All of them, if the model itself was called in it and the `PatchableGraph` never was: calling both is meant as a
        comparison, but calling the model only is taken for a mistake.
        """
        # With `after_call`, the caller has seen that no call was made.
        if self._direct is not None and not self.is_used and not self._after_calls:
            why = f"only the {type(self._direct).__name__} itself was called, without patches: call pg(...)"
            self._report([(entry, why) for entry in self.own.entries], "in this context")
        elif self.step_count is not None and not self._is_of_one_call:  # else the next call may be the next step
            # Permanent patches are reported by blocks of the user, not by each cell of a sweep.
            is_outermost = not is_own(code) and innermost(self.captured) is None
            self._report(
                self.step_count.take(self.plan.entries if is_outermost else self.own.entries), "in this context"
            )

    def _report(self, unfired: Unreached, where: str) -> None:
        """Reports patches, each message once; as an error if the context is strict."""
        if not unfired or self.is_quiet:
            return
        count = "a patch" if len(unfired) == 1 else f"{len(unfired)} patches"
        reasons = "; ".join(f"{entry.target.text!r}: {why}" for entry, why in unfired)
        message = f"{count} never fired {where}: {reasons}"
        if self.is_strict:
            error = PatchNotFiredError(message)
            error.paths = tuple(entry.target.text for entry, _ in unfired)
            raise error
        self.warn_once(message, "not fired")

    def warn_once(self, message: str, kind: str) -> None:
        """Gives a warning, once in the block."""
        if message not in self._reported:
            self._reported.add(message)
            warn_each_time(message, kind)


_AWAITS_BACKWARD = (
    "the model recomputes its forward in backward (activation checkpointing), and no backward ran inside the patch "
    "context: gradients of what was computed in it would be those of an unpatched recomputation; call backward() "
    "inside the `with` block (`with pg.patch({}):`, if all patches are permanent)"
)
_STOP_HANDLED = (
    "the forward was to end at {path!r}, but the model handled that as an error and went on (`except:` or `except "
    "BaseException:`), so that it returned another value: probe the value, or write `except Exception:` in the model"
)
_STOPPED_IN_CHECKPOINT = (
    "the run was stopped inside of a model under activation checkpointing, which runs again in backward: run without "
    "gradients (torch.no_grad), or switch checkpointing off"
)


# -- which blocks are active -------------------------------------------------------------------------------------------

_active: ContextVar[tuple[PatchContext, ...]] = ContextVar("graphpatch_contexts", default=())
_blocks: list[PatchContext] = []  # the same in all threads


def _active_blocks() -> Sequence[PatchContext]:
    """Returns the active blocks of this thread or task, the innermost last.

    A task that was started inside a block keeps a copy of the variable after the block has ended.
    """
    return [block for block in _active.get() if not block.is_over]


def innermost(captured: CapturedModel) -> PatchContext | None:
    """Returns the innermost active block of a captured model in this thread or task."""
    for block in reversed(_active.get()):
        if block.captured is captured and not block.is_over:
            return block
    return None


def active_patches(captured: CapturedModel) -> list[tuple[str, Patch[Any]]]:
    """Returns the patches of a call of the model at this moment, each with its path, in order."""
    block = innermost(captured)
    plan = block.plan if block is not None else captured.permanent_plan
    return [] if plan is None else [(entry.target.text, patch) for entry in plan.entries for patch in entry.patches]


# -- activation checkpointing: forwards that run again during backward -------------------------------------------------


def _recomputing(module: Module) -> Run | None:
    """Returns a run for an unobserved `forward`, if it recomputes a patched forward during backward."""
    here = _active_blocks()
    if not is_in_backward():
        for block in here:
            if id(module) in block.plan.watched:
                block._direct = block._direct or module
                block._has_direct_with_gradients |= torch.is_grad_enabled()
        return None
    # Backward may run in a thread of the autograd engine, which does not have the context variable.
    mine = [block for block in here or _blocks if id(module) in block.plan.watched and block.is_used]
    if not mine:
        return None
    block = mine[-1]
    frames = block.plan.callers.frames_of(module)
    if (
        block._has_direct_with_gradients
        or any(other.captured is not block.captured for other in mine)
        or (len(mine) > 1 and not here)
        or (len(frames) > 1 and any(id(frame) in block.plan.by_frame for frame in frames))
    ):
        raise GraphPatchError(
            f"{type(module).__name__} is recomputed in backward (activation checkpointing), and it is ambiguous for "
            "which call: run backward inside the one context of its forward, do not call the original model in that "
            "context, and switch checkpointing off to patch a module that is called several times"
        )
    block._awaits_backward = False
    return Run(block, block.plan)


# -- which node raised an error: found when one passes, so that runs without errors do not cost time -------------------

_MOST_NAMED = 4


def explain(error: Exception, run: Run) -> None:
    """Adds a note that names the node to an error of a run, and the patches that were applied before."""
    # Errors with a meaning to the interpreter must not change; our own name their path themselves.
    if isinstance(error, (GraphPatchError, StopIteration, StopAsyncIteration)) or has_note(error) or not run.reached:
        return
    patched = [
        f"{entry.target.path!r} ({type(patch).__name__})"
        for entry in run.plan.entries
        if id(entry) in run.fired
        for patch in entry.patches
        if not patch.observes_only
    ]
    with contextlib.suppress(Exception):  # the user must see the error, even if the note fails
        before = f"\n  patched before: {_listed(patched)}" if patched else ""
        add_note(error, _failure(error, run) + before)


def _failure(error: Exception, run: Run) -> str:
    """Returns the note: the nodes of the innermost module's frames whose line of the user's code raised the error."""
    module: Module = run.root
    step: tuple[CodeType, int] | None = None  # the innermost call site of the user's code in its forward
    name = call = ""  # the node of a graph that runs in place of the code; the arguments, if the mode saw the call
    entry = error.__traceback__
    while entry is not None:
        code, found, lasti = entry.tb_frame.f_code, entry.tb_frame.f_locals, entry.tb_lasti
        number, entry = entry.tb_lineno, entry.tb_next
        if is_module_call(code):
            module, step, name = original_of(found["self"]), None, ""
        elif (assigned := name_assigned_at(code, number)) is not None:
            name = assigned
        elif found.get("self") is run and code.co_name in ("__torch_function__", "on_apply") and step is not None:
            call = _arguments_text(found["args"], found["kwargs"] or {})
            break
        elif call_sites.facts_of(code).is_users:
            step = code, call_sites.facts_of(code).offsets[lasti]
    frames = run.plan.callers.frames_of(module)
    nodes = [(one, node) for one in frames for node in one.nodes if node.whole is node and _is_at(node, step, name)]
    line = "" if step is None else str(Site((step,)).source_lines()[0])
    if nodes:
        (_, first), names = nodes[0], [repr(format_path((*one.path, node.name))) for one, node in nodes]
        line = line if first.site is None else str(first.site.source_lines()[-1])
        what = f"{' or '.join(names[:_MOST_NAMED])}{' or others' * (len(names) > _MOST_NAMED)} ({first.op})"
    else:
        where = _listed([repr(format_path(frame.path) or "the model") for frame in frames])
        what = f"code of {where} ({type(module).__name__})" if where else f"code of a {type(module).__name__}"
    return "\n  ".join(filter(None, [f"raised by {what}", line, call]))


def _is_at(node: Node, step: tuple[CodeType, int] | None, name: str) -> bool:
    if name:
        return node.name == name
    return node.kind == "op" and node.site is not None and node.site.steps[-1:] == (step,)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + f", and {len(names) - _MOST_NAMED} more" * (len(names) > _MOST_NAMED)


_MOST_LISTED = 8


def _arguments_text(args: Iterable[Any], kwargs: dict[str, Any]) -> str:
    """Returns a description of the arguments of a call: tensors by their shapes, numbers by their values."""
    named = [("", value) for value in args] + [(f"{name}=", value) for name, value in kwargs.items()]
    specs = [(name, describe(value)) for name, value in named[:_MOST_LISTED]]
    texts = [f"{name}{repr(spec.value) if isinstance(spec, ScalarSpec) else spec}" for name, spec in specs]
    return f"arguments: {', '.join(texts)}{', ...' * (len(named) > _MOST_LISTED)}"
