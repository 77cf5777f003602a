"""The plan of a patched run: a patch map, checked before anything runs, and which values of which frames are patched.

{path: patches, ...}  ->  [Entry, ...]  ->  Plan
                              └── FramePlan of each frame that a run must recognize, the root first
                                  ├── inputs, tensors, output, sites: the entries of this frame
                                  └── calls: module and call number -> FramePlan of the submodule's frame
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture import call_sites, packing_of
from graphpatch_notebook.capture.modules import Held, changed_model, exchange, held_now
from graphpatch_notebook.capture.records import (
    ATTENTION_IN_CONFIG,
    HELD_KINDS,
    CompositeCall,
    Frame,
    Site,
    attention_named_by,
)
from graphpatch_notebook.components import find
from graphpatch_notebook.components.dimensions import dimensions_of, shape_problem
from graphpatch_notebook.errors import GraphPatchError, PatchMapError, PatchValueError, UnknownPathError
from graphpatch_notebook.graphs import CompiledGraphModule
from graphpatch_notebook.inspection.resolution import (
    NodeMap,
    Target,
    Unresolvable,
    answer_to_alias,
    fixed_sizes_of,
    resolve,
    resolve_all,
)
from graphpatch_notebook.patches.kinds import (
    KeepingPatch,
    Patch,
    ProbePatch,
    declares,
    has_plain_fields,
    value_problem,
)
from graphpatch_notebook.patches.slices import index_problem, selection_problem
from graphpatch_notebook.patching.positions import CACHES, Restriction, caches_of, restriction_of
from graphpatch_notebook.paths import format_path, is_component_name, is_pattern, nearest
from graphpatch_notebook.torch_compat import takes_hooks
from graphpatch_notebook.values import ScalarSpec, TensorSpec, all_leaves, leaves

FUSED_MODULES = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
"""Modules that torch computes by other kernels in some runs than in others, with other rounding."""

"""Under which name `torch.compile` keeps a module in the one that it returns."""

# Without gradients, in eval mode, these do not call the modules in them, unless a function mode is on.
_FUSED = FUSED_MODULES[:2]


@dataclass(slots=True, eq=False)
class Entry:
    """The patches on one value."""

    target: Target
    patches: Sequence[Patch[Any]]
    # The steps and positions at which the patch (then the only one) has an effect; `None` for all.
    restriction: Restriction | None = None
    sources: Sequence[str] = ()  # the names of the values of the run that the patch (then the only one) reads
    is_source: bool = False  # whether the value is only kept for patches that read it
    # How the value is distributed over processes, if the model is sharded: patches see the whole value.
    placement: Any = None
    is_early: bool = False  # whether it comes before the other entries on the value: it is for the op that made it
    splice: Frame | None = None  # the frame of the module that it calls, if it is that of a splice
    # The sort key of entries on one value: what others read comes late, and patches that end the run last.
    rank: int = field(default=0, init=False)
    # The recorded shape, if the patches apply to all of such a tensor, and nothing else matters: a fast path.
    plain_shape: torch.Size | None = field(default=None, init=False)
    # The same, if the patches only keep the tensor (also one in a container): faster, since all values may be probed.
    kept_shape: torch.Size | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        target, node, spec = self.target, self.target.node, self.target.whole
        self.rank = (1 if self.is_source else 2 if self.patches[0].stops_run else 0) - 3 * self.is_early
        is_limited = self.restriction is not None or self.is_source or self.placement is not None or self.sources
        is_part = target.component and (target.index or target.component.layout)
        if is_limited or is_part or node.is_mutated_later:
            return
        if isinstance(spec, TensorSpec):
            self.plain_shape = None if target.dig else spec.shape
            if not node.is_in_place and all(declares(patch, "only_keeps") for patch in self.patches):
                self.kept_shape = spec.shape

    @property
    def observes_only(self) -> bool:
        """Whether no patch changes the value."""
        return self.kept_shape is not None or all(patch.observes_only for patch in self.patches)

    @property
    def keeps_whole(self) -> bool:
        """Whether a patch keeps the value itself: not a part of it, nor a copy from before the model writes into it."""
        target = self.target
        is_whole = not (target.index or target.layout)
        is_whole = is_whole and (self.restriction is None or self.restriction.positions is None)
        return is_whole and not self.target.node.is_mutated_later and any(patch.only_keeps for patch in self.patches)


def part_of(target: Target, value: Any, patches: Sequence[Patch[Any]] = ()) -> Any:
    """Returns the component's part of a value, in its axes: a view, or the value itself if that is all of it."""
    component, index = target.component, target.index
    if component is None or not (index or component.layout) or not isinstance(value, Tensor):
        return value
    try:
        value = component.seen(value)
    except RuntimeError as error:
        raise PatchValueError(
            f"{target.text!r}: the value here is of shape {tuple(value.shape)}: {error}{axes_note(target)}"
        ) from None
    if not index:
        return value
    shown = f"the value here, of shape {tuple(value.shape)},"
    problem = index_problem(index, value.shape) or selection_problem(
        index, value.shape, shown, allow_empty=any(patch.allow_empty for patch in patches)
    )
    if problem is not None:
        raise PatchValueError(f"{target.text!r}: {problem}")
    return value[index]


def axes_note(target: Target) -> str:
    """Returns the end of a message: the axes of a component and those at its path, if their order differs."""
    component = target.component
    if component is None or component.layout is None:
        return ""
    seen, own = (", ".join(map(str, axes)) for axes in (component.axes, component.path_axes))
    return f"; its axes are ({seen}), and ({own}) at the path {component.path!r}"


class SiteEntries(list[Entry]):
    """The entries on what is called at one call site, at one occurrence."""

    __slots__ = ("inside",)

    def __init__(self) -> None:
        super().__init__()
        # What is patched inside of it: then the call is opened into its steps. Nothing else opens it.
        self.inside: FramePlan | None = None


OpEntries: TypeAlias = "dict[int, SiteEntries]"
"""The entries on the ops of one call site, by occurrence."""
EntriesByChain: TypeAlias = "dict[tuple[int, ...] | None, OpEntries]"
"""The same for all call sites at one instruction, by the call sites that lead there."""


class PatchedCode(dict[int, "EntriesByChain | None"]):
    """The entries of ops at the instructions of one code object, by `lasti`: filled during runs from `by_offset`."""

    __slots__ = ("_offsets", "by_offset")

    def __init__(self, code: CodeType | None = None) -> None:
        super().__init__()
        self._offsets = {} if code is None else call_sites.facts_of(code).offsets
        self.by_offset: dict[int, EntriesByChain] = {}

    def __missing__(self, lasti: int) -> EntriesByChain | None:
        found = self[lasti] = self.by_offset.get(self._offsets[lasti]) if self.by_offset else None
        return found


class FramePlan:
    """What is patched in one frame, and which frames below it hold patches.

    Attributes:
        calls: For each submodule (by id) and each of its calls in this frame (from zero), the plan of that frame.
        entries: All entries of this frame.
        inputs: Those on parameters of `forward`, by name.
        probed: Those that keep a tensor of an input, whose gradient is to be that of this use of it.
        tensors: Those on parameters, buffers and attributes, by attribute path.
        output: Those on the output.
        skips: Those that replace the call.
        sites: Those on ops, by the id of the code object of the innermost step of their call site (and code without
            any that a run reached); `None` if there are none.
        graph: The graph that runs in place of the module's code, if there is one.
        in_graph: The entries on its nodes, by name.
        changes_inputs: Whether a patch may change an input.
        is_packed: Whether the module packs its weight, which is not the value of the node then.
        is_bare: Whether nothing is patched in this frame but its output, so that the module runs as it is.
        needs_mode: Whether it runs under the function mode: its ops are patched, or what its fused kernel skips.
    """

    def __init__(self, frame: Frame, graph: CompiledGraphModule | None = None) -> None:
        self.frame, self.graph = frame, graph
        self.calls: dict[int, dict[int, FramePlan]] = {}
        self.entries: list[Entry] = []
        self.inputs: dict[str, list[Entry]] = {}
        self.probed: list[Entry] = []
        self.tensors: dict[str, list[Entry]] = {}
        self.output: list[Entry] = []
        self.skips: list[Entry] = []
        self.sites: dict[int, PatchedCode] | None = None
        self.in_graph: dict[str, list[Entry]] = {}
        self.changes_inputs = self.is_packed = self.is_bare = self.needs_mode = False

    def below(self) -> list[FramePlan]:
        """Returns the plans of the frames that are called from here."""
        return [plan for by_index in self.calls.values() for plan in by_index.values()]

    def add(self, entry: Entry) -> None:
        """Adds an entry of this frame."""
        self.entries.append(entry)
        node = entry.target.node
        changes_input = node.kind == "input" and not entry.observes_only
        if node.kind == "input" and entry.keeps_whole:
            self.probed.append(entry)
        if entry.patches[0].replaces_call:
            self.skips.append(entry)
        elif node.kind == "output":
            self.output.append(entry)
        elif self.graph is not None:
            if changes_input and (problem := self.graph.input_problem(node)) is not None:
                raise PatchMapError(f"{entry.target.path!r} {problem}; patch the nodes in the graph that use its value")
            self.in_graph.setdefault(node.name, []).append(entry)
        elif node.kind == "input":
            self.inputs.setdefault(node.target, []).append(entry)
            self.changes_inputs = self.changes_inputs or changes_input
        elif node.kind == "op":
            assert node.site is not None
            self._inside(node.composite, entry)._at(node.site, node.occurrence).append(entry)
        else:
            self.tensors.setdefault(node.target, []).append(entry)

    def _inside(self, call: CompositeCall | None, entry: Entry) -> FramePlan:
        """Returns the plan for the steps inside `call`, to which `entry` is added; this plan outside of such calls."""
        if call is None:
            return self
        at_call = self._inside(call.outer, entry)._at(call.site, call.occurrence)
        at_call.inside = at_call.inside or FramePlan(self.frame)
        at_call.inside.entries.append(entry)
        return at_call.inside

    def _at(self, site: Site, occurrence: int) -> SiteEntries:
        """Returns the entries at one call site and occurrence, for new ones to be added."""
        (code, offset), *above = reversed(site.steps)
        chain = tuple(number for outer, at in above for number in (id(outer), at))
        self.sites = {} if self.sites is None else self.sites
        if (patched := self.sites.get(id(code))) is None:
            patched = self.sites[id(code)] = PatchedCode(code)
        by_occurrence = patched.by_offset.setdefault(offset, {}).setdefault(chain, {})
        return by_occurrence.setdefault(occurrence, SiteEntries())

    def settle(self) -> None:
        """Derives the rest, when all entries are added to this plan and to those below it."""
        # Processes of one model may have written another order.
        self.inputs, self.tensors = dict(sorted(self.inputs.items())), dict(sorted(self.tensors.items()))
        self.is_packed = packing_of(self.frame.module) is not None
        is_fused = isinstance(self.frame.module, _FUSED) and bool(self.calls)
        self.needs_mode = self.sites is not None or is_fused
        self.is_bare = not (self.inputs or self.tensors or self.graph or self.skips or self.needs_mode)


class Splicing(NamedTuple):
    """A splice: the entries that call it, and whether it has no effect unless something in these frames is patched."""

    frames: Sequence[Frame]
    entries: Sequence[Entry]
    is_idle: bool


class Plan:
    """What a patched run needs: made once, and used each time that a context with such patches is entered.

    Attributes:
        root: The plan of the model's own frame.
        by_frame: The plans of all frames that a run must recognize, by the id of the frame, the root first.
        callers: Which frames call which module.
        own_graphs: The graph modules whose graph runs in place of the module.
        custom: Custom graphs by the id of the module that each replaces, in all its calls.
        watched: The modules whose forwards must be seen, by id.
        unpatched: Modules that frames under the function mode call, and that run without it, by id: nothing in them is
            patched, or it enters the mode itself.
        with_outputs: The modules whose outputs are patched, or only kept; and whether they are changed.
        with_inputs: The modules whose inputs are patched, or kept with gradients; and whether they are patched.
        restricted: Those of the entries that are for some steps or positions only.
        skips: Those of the entries that replace calls of modules.
        splices: The splices of the capture.
        all_entries: The entries in the plans of frames: the patches, and what calls the splices in which something is
            patched.
        keep: What hands a value to the patches of an entry that only keep it.
        sees_ops: Whether some frame runs under the function mode.
        on_the_way: The frames that lead to patched values, each with one of the entries on these.
    """

    _patches: Mapping[Entry, Patch[Any]] | None = None
    _made: dict[Entry, Entry]

    def __init__(
        self,
        root: Frame,
        entries: Sequence[Entry],
        callers: Callers,
        own_graphs: Sequence[CompiledGraphModule] = (),
        splices: Sequence[Splicing] = (),
    ) -> None:
        self.entries, self.callers, self.own_graphs, self.splices = entries, callers, own_graphs, splices
        self.all_entries = _with_splices(entries, splices)
        self.keep = {entry: _keeping(entry.patches) for entry in self.all_entries if entry.kept_shape is not None}
        self.by_frame = plans = self._frames(root)
        self.root = plans[id(root)]
        ordered = sorted(self.all_entries, key=operator.attrgetter("rank"))
        for entry in ordered:
            if own_graphs:
                _refuse_before_hooks(entry, plans)
            plans[id(entry.target.frame)].add(entry)
        self.restricted = [entry for entry in ordered if entry.restriction is not None]
        self.skips = [entry for entry in ordered if entry.patches[0].replaces_call]
        self.watched: dict[int, Module] = {}
        self.with_outputs: dict[int, tuple[Module, bool]] = {}
        self.with_inputs: dict[int, tuple[Module, bool]] = {}
        for plan in plans.values():
            self._watch(plan)
        self.sees_ops = any(plan.needs_mode for plan in plans.values())
        self.unpatched = {
            id(call.frame.module): call.frame.module
            for plan in plans.values()
            if plan.sites is not None
            for call in plan.frame.calls()
            if id(call.frame.module) not in self.watched and callers.is_worth_leaving_mode(call.frame)
        }
        self.on_the_way = _on_the_way(self.all_entries)
        self.custom = {
            id(graph.frame.module): FramePlan(graph.frame, graph)
            for graph in reversed(own_graphs)
            if graph.frame.custom_graph is not None
        }

    def _frames(self, root: Frame) -> dict[int, FramePlan]:
        """Returns empty plans of the frames that a run must recognize, connected as the frames call each other."""
        wanted = [*(graph.frame for graph in self.own_graphs), *(entry.target.frame for entry in self.all_entries)]
        plans = {id(frame): FramePlan(frame) for frame in self.callers.frames_to_recognize(root, wanted)}
        for graph in self.own_graphs:
            plans[id(graph.frame)].graph = graph
        for plan in plans.values():
            if plan.frame is not root and plan.frame.call is not None:
                calls = (plans.get(id(plan.frame.parent)) or nearest_above(plan.frame, plans)).calls
                calls.setdefault(id(plan.frame.module), {})[plan.frame.call.call_index] = plan
        return plans

    def _watch(self, plan: FramePlan) -> None:
        """Completes the plan of a frame, and notes what must be seen of its module."""
        plan.settle()
        module = self.watched[id(plan.frame.module)] = plan.frame.module
        if plan.output and takes_hooks(module):
            _, is_changed = self.with_outputs.get(id(module), (module, False))
            is_changed = is_changed or not all(entry.observes_only for entry in plan.output)
            self.with_outputs[id(module)] = module, is_changed
        if (plan.changes_inputs or plan.probed) and takes_hooks(module):
            _, has_changes = self.with_inputs.get(id(module), (module, False))
            self.with_inputs[id(module)] = module, has_changes or plan.changes_inputs

    def with_patches(self, patches: Sequence[Patch[Any]]) -> Plan:
        """Returns this plan with other patches in its entries, which must be like those: far faster than a new plan."""
        result = copy.copy(self)
        del result.entries
        result._patches, result._made = dict(zip(self.all_entries, patches, strict=True)), {}
        result.keep = dict(zip(self.all_entries, [patch.op for patch in patches], strict=True))
        return result

    @functools.cached_property
    def entries(self) -> Sequence[Entry]:
        """The patches, each with its target, in order."""
        return [*map(self.own, self.all_entries)]  # after `with_patches`

    def own(self, entry: Entry) -> Entry:
        """Returns an entry of the plan of a frame with the patches of this plan: another one after `with_patches`."""
        if self._patches is None:
            return entry
        return self._made.get(entry) or self._made.setdefault(entry, Entry(entry.target, (self._patches[entry],)))

    def with_more(self, entries: Sequence[Entry]) -> Plan:
        """Returns the plan for `entries` after the patches of this one."""
        together = [*self.entries, *entries]
        return Plan(self.root.frame, together, self.callers, self.own_graphs, self.splices) if entries else self


def _keeping(patches: Sequence[Patch[Any]]) -> Callable[[Any], Any]:
    """Returns a function that hands a value to patches."""

    def keep(value: Any) -> None:
        for patch in patches:
            patch.op(value)

    return keep if len(patches) > 1 else patches[0].op


def _on_the_way(entries: Iterable[Entry]) -> list[tuple[Frame, Entry]]:
    """Returns the frames that lead to patched values, each once, with one of the entries on these."""
    found: dict[int, tuple[Frame, Entry]] = {}
    for entry in entries:
        frame: Frame | None = entry.target.frame
        while frame is not None and id(frame) not in found:
            found[id(frame)] = frame, entry
            frame = frame.parent
    return list(found.values())


def _with_splices(entries: Sequence[Entry], splices: Sequence[Splicing]) -> Sequence[Entry]:
    """Returns entries with those that call the splices that have an effect: something in them is patched, or always."""
    if not splices:
        return entries
    found, patched = list(entries), {id(f) for entry in entries for f in entry.target.frame.frames_above()}
    for splice in reversed(splices):  # later ones may read values in earlier ones
        if not splice.is_idle or any(id(frame) in patched for frame in splice.frames):
            found[len(entries) : len(entries)] = splice.entries
            patched |= {id(f) for entry in splice.entries for f in entry.target.frame.frames_above()}
    return found


def nearest_above(frame: Frame, plans: dict[int, FramePlan]) -> FramePlan:
    """Returns the plan of the innermost frame around `frame` that has one; the root has one."""
    return next(plans[id(above)] for above in frame.frames_above() if above is not frame and id(above) in plans)


def _refuse_before_hooks(entry: Entry, plans: dict[int, FramePlan]) -> None:
    """Raises if hooks change a module's output, and the graph that calls it may have their operations as its own."""
    frame = entry.target.frame
    above = plans.get(id(frame.parent))
    graph = None if above is None else above.graph
    is_record = graph is not None and graph.frame.custom_graph is None
    if entry.target.node.kind == "output" and is_record and frame.is_changed_by_hooks:
        raise PatchMapError(
            f"{entry.target.path!r} is what forward hooks of the module returned, and the graph that calls the module "
            "was edited: patch the operations of the hooks in that graph"
        )


_WORTH_LEAVING_MODE = 5
"""How many operations a module must have: to leave and enter the mode takes as long as a few of them under it."""


class Callers:
    """The frames that call each module, in a whole capture.

    Attributes:
        held: What is held on the way to each frame, by its id, where that was looked at: it was as it was captured.
    """

    def __init__(self, root: Frame) -> None:
        self.held: dict[int, list[Held]] = {}
        self._operations: dict[int, int] = {}  # in each frame and those that it calls
        self._frames: dict[int, list[Frame]] = {}
        for frame in root.walk(with_splices=True):
            self._frames.setdefault(id(frame.module), []).append(frame)
        self._has_fused = any(isinstance(frames[0].module, _FUSED) for frames in self._frames.values())

    def frames_of(self, module: Module) -> list[Frame]:
        """Returns the frames of `module`, in order of execution."""
        return self._frames.get(id(module), [])

    def is_worth_leaving_mode(self, frame: Frame) -> bool:
        """Whether a frame has so many operations that it is faster to leave the function mode for it."""
        return not self._has_fused and self._operations_in(frame) >= _WORTH_LEAVING_MODE

    def _operations_in(self, frame: Frame) -> int:
        if (found := self._operations.get(id(frame))) is None:
            own = sum(node.kind == "op" for node in frame.nodes)
            found = own + sum(self._operations_in(call.frame) for call in frame.calls())
            self._operations[id(frame)] = found
        return found

    def frames_to_recognize(self, root: Frame, wanted: Iterable[Frame]) -> list[Frame]:
        """Returns the root, the `wanted` frames, and the frames that a run needs to tell which call each of them is.

        A module that is called once in the whole capture needs no other frame. Calls of other modules are counted in
        the frame that calls them, so all frames that call such a module are needed, and all of its own: it is watched
        in each of them, and what is patched inside of one is found there. Modules that may run fused always are.
        """
        found = {id(root): root}
        waiting = list(wanted)
        for frame in waiting:
            if id(frame) in found:
                continue
            found[id(frame)] = frame
            calls = self.frames_of(frame.module)
            if len(calls) > 1:
                waiting += [*calls, *(call.parent for call in calls if call.parent is not None)]
            if self._has_fused:
                waiting += [above for above in frame.frames_above() if isinstance(above.module, _FUSED)]
        return list(found.values())


_UNKNOWN: list[Held] = [({}, "", object())]


def refuse_exchanged(plan: Plan) -> None:
    """Raises a `GraphError` if a module on the way to a patched value is not the one that was captured at its path.

    Or if that computes attention in another way, of which the captured names are not.
    """
    known = plan.callers.held
    for frame, entry in plan.on_the_way:
        for holder, name, there in known.get(id(frame), _UNKNOWN):
            if holder.get(name) is not there:
                break
        else:  # as when it was last looked at
            continue
        (now, held), before, attention = held_now(frame), frame.conditions.attention, attention_named_by(frame.module)
        if now in (None, frame.module) and before in (None, attention):
            config = frame.module.__dict__.get("config")
            attributes = getattr(config, "__dict__", {})
            known[id(frame)] = [
                *held, (frame.module.__dict__, "config", config), (attributes, ATTENTION_IN_CONFIG, attention)
            ]  # fmt: skip
            continue
        change = exchange(frame, now) or f"its attention is {attention!r}, and was {before!r}"
        raise changed_model(entry.target.text, frame, change)


# -- patch maps: checked, all of it, before anything runs --------------------------------------------------------------

_Meant: TypeAlias = "list[tuple[str, Sequence[Any], list[Target]]]"
"""The keys of a patch map, with the patches and what the key means."""


def entries_of(paths: Lookup, patch_map: Any, sharding: Any) -> list[Entry]:
    """Returns the entries of a patch map, from paths, `NodePath`s or patterns to patches, or raises one error.

    `sharding` is `sharding_of` the model.
    """
    if type(patch_map) is not dict and not isinstance(patch_map, Mapping):
        raise PatchMapError(f"a patch map is a dict from paths to patches, not {type(patch_map).__name__}")
    root = paths.root
    problems: list[str] = []
    kind = PatchMapError
    meant: _Meant = []
    entries: list[Entry] = []
    for path, patches in patch_map.items():
        text = path if type(path) is str else str(path)
        listed = [patches] if isinstance(patches, Patch) else patches
        try:
            meant.append((text, listed, paths.targets(text, listed)))
        except Unresolvable as error:
            problems.append(error.message)
            kind = UnknownPathError
    for _, patches, targets in _without_replaced(meant, problems):
        for target in targets:
            entries += _entries(root, target, patches, problems)
    entries += sources_of(paths, entries, problems)
    if sharding is not None:
        entries = [sharding.placed(entry, problems) for entry in entries]
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise kind(f"{len(problems)} problems in this patch map:{listed}" if len(problems) > 1 else problems[0])
    return entries


def patches_that_keep(patch_map: Any) -> list[Patch[Any]]:
    """Returns the patches of a patch map if all are usual ones that keep values: plans depend on the paths only then.

    Else an empty list.
    """
    found = list(patch_map.values()) if type(patch_map) is dict else []
    for patch in found:
        kind = type(patch)
        if kind.__init__ is not KeepingPatch.__init__ or "only_keeps" not in kind.__dict__:
            return []
        get = patch.__dict__.get  # `has_plain_fields`, inlined: all values may be probed
        is_plain = get("steps") is get("positions") is get("position_dim") is None
        if not (is_plain and type(get("any_shape")) is type(get("allow_empty")) is bool):
            return []
    return found


@dataclass(eq=False)
class Lookup:
    """What paths mean in a capture; each is resolved once."""

    root: Frame
    _known: dict[str, list[Target]] = field(default_factory=dict)

    @functools.cached_property
    def nodes(self) -> NodeMap:
        """All paths that can be patched."""
        return NodeMap(self.root)

    def targets(self, text: str, patches: Any = None) -> list[Target]:
        """Returns the targets of a path, a component name, or a pattern of paths, in order; raises an `Unresolvable`.

        If `patches` are given for it that replace calls, it may be the path of a module.
        """
        if (found := self._known.get(text)) is not None:
            return found
        if not is_pattern(text) or is_component_name(text) or text in self.nodes:  # keys of dicts may hold any text
            found = self._named(text, patches)
        else:
            found = self._matching(text)
        if not _are_for_calls(patches):
            self._known |= {target.text: [target] for target in found} | {text: found}
        return found

    def _named(self, text: str, patches: Any) -> list[Target]:
        try:
            return resolve_all(self.root, text)
        except Unresolvable:
            call = target_of_call(self.root, text) if _are_for_calls(patches) else None
            if call is not None:
                return [call]
            bare = text.rpartition("[")[0]
            if is_pattern(bare) and self.nodes.matching(bare):
                raise Unresolvable(f"{text!r}: for a part of the values at {bare!r}, give patches slice=") from None
            raise

    def _matching(self, text: str) -> list[Target]:
        nodes, root = self.nodes, self.root
        if found := nodes.matching(text):
            return [resolve(root, path) for path in found]
        with suppress(UnknownPathError):  # names of components, such as `**.attn.pattern`, if no path is like this
            return [resolve(root, component.name) for component in find(root).lookup(text)]
        answer = answer_to_alias(root, text)
        if answer is None:
            deeper = nodes.matching(f"{text}|**") or nodes.matching(f"**.{text}")
            answer = f"nearest: {', '.join(map(repr, deeper[:3] or nearest(text, list(nodes))))}"
        raise Unresolvable(f"the pattern {text!r} matches no value; {answer}")


# -- keys that mean several values -------------------------------------------------------------------------------------


def _without_replaced(meant: _Meant, problems: list[str]) -> _Meant:
    """Returns the keys; those that may mean several values, without values that another key changes by a path."""
    several = [[one.path for one in targets] != [text] and bool(_SEVERAL.search(text)) for text, _, targets in meant]
    if not any(several):
        return meant
    own = {
        _identity(target)
        for (_, patches, targets), may in zip(meant, several, strict=True)
        if not may and not (len(patches) and all(isinstance(patch, Patch) and patch.observes_only for patch in patches))
        for target in targets
    }
    found: _Meant = []
    for (text, patches, targets), may in zip(meant, several, strict=True):
        left = [target for target in targets if _identity(target) not in own] if may else targets
        keeping = next((patch for patch in patches if isinstance(patch, Patch) and patch.only_keeps), None)
        if keeping is not None and len(left) > 1:
            name = type(keeping).__name__
            problems.append(
                f"{text!r} means {len(left)} values, which one {name} would keep in one place: use pg.record({text!r}, "
                f"*inputs), or give each path a {name} of its own"
            )
            left = []
        found.append((text, patches, left))
    return found


def _identity(target: Target) -> tuple[str, str]:
    return target.path, repr(target.index)  # slices have no hash before Python 3.12


_SEVERAL = re.compile(r"[*,:]")
"""What a pattern has, or the name of components with lists or slices of layers, heads or experts."""


# -- values that other patches read ------------------------------------------------------------------------------------


def sources_of(paths: Lookup, entries: Sequence[Entry], problems: list[str]) -> list[Entry]:
    """Records in entries which values their patches read, and returns entries that keep these values."""
    found: dict[str, Entry] = {}
    for entry in [one for one in entries if type(one.patches[0]).sources is not Patch.sources]:
        own, patch, entry.plain_shape = entry.target, entry.patches[0], None
        for text in patch.sources:
            try:
                source, *more = paths.targets(text)
                if more:
                    raise ValueError(f"the source {text!r} means several values: name one")
                if source.seen_as == own.seen_as:
                    continue  # it reads the value that it is given
                if not _order_in_forward(source) < _order_in_forward(own):
                    raise ValueError(f"it reads {text!r}, which does not come before {own.text!r} in the forward")
                entry.sources = (*entry.sources, source.text)
                found[source.text] = Entry(source, (ProbePatch(),), is_source=True)
                if isinstance(source.spec, TensorSpec) and isinstance(own.spec, TensorSpec) and not patch.any_shape:
                    like = torch.empty(source.spec.shape, device="meta")
                    if len(patch.sources) == 1 and (problem := patch.reading([like]).problem(own.spec.shape)):
                        raise ValueError(problem)
            except (Unresolvable, ValueError) as error:
                problems.append(f"{own.text!r}: {type(patch).__name__}: {error}")
    return list(found.values())


def _order_in_forward(target: Target) -> tuple[int, ...]:
    """Returns the position of a value in the forward pass, for comparison: its place in each frame around it."""
    frames = list(target.frame.frames_above())[::-1]
    calls = [frame.parent.nodes_and_splices.index(frame.call) for frame in frames if frame.parent and frame.call]
    node = target.node
    if node.kind == "input":
        return (*calls, -2)
    return (*calls, -1 if node.kind in HELD_KINDS else target.frame.nodes_and_splices.index(node.whole))


# -- the patches on one value ------------------------------------------------------------------------------------------


def _entries(root: Frame, target: Target, patches: Sequence[Patch[Any]], problems: list[str]) -> list[Entry]:
    """Returns one entry for all the patches on a value, or one for each if some are restricted, or end the run."""
    one = patches[0] if type(patches) is list and len(patches) == 1 else None
    if isinstance(one, Patch) and declares(one, "only_keeps") and has_plain_fields(one):
        return [Entry(target, (one,))]
    if found := problems_of(target, patches):
        problems += found
        return []
    if not any(map(_stands_alone, patches)):
        return [Entry(target, tuple(patches))] if patches else []
    entries = []
    for patch in patches:
        try:
            _check_fields(type(patch))
            restriction = restriction_of(root, target, patch)
            if restriction is None or not restriction.is_empty:
                entries.append(Entry(target, (patch,), restriction))
        except ValueError as problem:
            problems.append(f"{target.text!r}: {type(patch).__name__}: {problem}")
    return entries


def _stands_alone(patch: Patch[Any]) -> bool:
    """Whether a patch has an entry of its own."""
    is_restricted = patch.__dict__.get("steps") is not None or patch.__dict__.get("positions") is not None
    return is_restricted or patch.stops_run or patch.replaces_call or bool(patch.sources)


def _check_fields(kind: type[Patch[Any]]) -> None:
    """Raises a `ValueError` if a class of patches redefines a field of `Patch`."""
    for name in ("steps", "positions", "position_dim"):
        if inspect.getattr_static(kind, name) is not inspect.getattr_static(Patch, name) or (
            kind.__dataclass_fields__[name] is not Patch.__dataclass_fields__[name]
        ):
            raise ValueError(f"every patch has a field {name!r}, which this class redefines: rename that of the class")


def problems_of(target: Target, patches: Any) -> list[str]:
    """Returns messages about a list of patches on a value, each with its path."""
    spec = target.whole if target.component is None else target.spec
    shape = spec.shape if isinstance(spec, TensorSpec) else None
    # Of one neuron at each position, the last dimension is that of the positions.
    has_channels = (
        target.component is None
        or not target.index
        or target.component.kept_dims[-1:] == [len(target.component.shape) - 1]
    )

    def check(patch: Patch[Any]) -> None:
        sizes = None if patch.any_shape else shape
        if (problem := patch.problem(sizes)) is not None:
            raise ValueError(problem)
        if patch.replaces_call:
            check_call(target, patch)
            return
        problem = patch.selection_problem(sizes, "")
        if problem is not None and sizes is not None:
            # Runs of the model find out which sizes depend on the inputs: only if the answer depends on it.
            shown = f"the value recorded here, of shape {tuple(sizes)},"
            problem = patch.selection_problem(fixed_sizes_of(target), shown)
        if problem is None and sizes is not None:
            value, index = getattr(patch, "value", None), getattr(patch, "slice", None)
            problem = value_problem(value, sizes, index, has_channels=has_channels)
        if problem is not None:
            raise ValueError(problem + axes_note(target))

    return _problems_of(target.path if target.component is None else target.text, patches, check)


def _problems_of(path: str, patches: Any, check: Callable[[Patch[Any]], None]) -> list[str]:
    if isinstance(patches, type) and issubclass(patches, Patch):
        patches = [patches]
    if not isinstance(patches, Sequence) or isinstance(patches, (str, bytes)):
        return [f"{path!r}: give a patch or a list of patches, not {type(patches).__name__}{_repair(patches)}"]
    found = []
    for patch in patches:
        if isinstance(patch, Patch):
            try:
                check(patch)
            except ValueError as problem:
                found.append(f"{path!r}: {type(patch).__name__}: {problem}")
        elif isinstance(patch, type):
            found.append(f"{path!r}: {patch.__name__} is a class; write {patch.__name__}(...)")
        else:
            shown = f"a Tensor of shape {tuple(patch.shape)}" if isinstance(patch, Tensor) else repr(patch)
            found.append(f"{path!r}: {shown} is not a Patch{_repair(patch)}")
    return found


def _repair(given: Any) -> str:
    """Returns how to write a patch with the object that was given instead of one."""
    if isinstance(given, (Tensor, bool, int, float, complex)):
        return "; write ReplacePatch(value) to put it there"
    if hasattr(given, "encode") and hasattr(given, "decode"):
        return "; write pg.splice({path: it}) for a graph with it"
    return "; write CustomPatch(function) to apply it" if callable(given) else ""


# -- calls of modules that a patch replaces ----------------------------------------------------------------------------


def _are_for_calls(patches: Any) -> bool:
    """Whether all patches replace calls: then a path may be that of a module."""
    is_list = isinstance(patches, (list, tuple)) and len(patches) > 0
    return is_list and all(isinstance(patch, Patch) and patch.replaces_call for patch in patches)


def target_of_call(root: Frame, text: str) -> Target | None:
    """Returns the output of the call that `text` names: the path of a module, or of an output that is a container.

    A module that returns several tensors, or none, is `Unresolvable`.
    """
    for frame in root.walk():
        output = (*frame.path, frame.output_node.name)
        if text in (format_path(frame.path), format_path(output)):
            break
    else:
        return None
    spec = frame.output_node.spec
    digs = [dig for dig, leaf in leaves(spec) if isinstance(leaf, TensorSpec)]
    if len(digs) != 1:
        raise Unresolvable(
            f"{text!r} returns {len(digs)} tensors ({spec}), and a patch that replaces its call makes one: patch the "
            "modules in it, or what follows"
        )
    return resolve(root, format_path(output, digs[0]))


def check_call(target: Target, patch: Patch[Any]) -> None:
    """Raises a `ValueError` if a patch cannot replace the call that returns a value."""
    frame, whole = target.frame, target.frame.output_node.spec
    if target.node.kind != "output" or target.index:
        raise ValueError("it replaces a call of a module: give the path of the module, or of its output")
    if frame.parent is None:
        raise ValueError("the model itself cannot be skipped")
    others = [spec for _, spec in all_leaves(whole) if spec is not target.whole]
    if not isinstance(target.whole, TensorSpec) or any(
        not isinstance(spec, ScalarSpec) or spec.value is not None for spec in others
    ):
        raise ValueError(
            f"the module returns {whole}, of which more than one tensor would be needed: patch the modules in it"
        )
    value = getattr(patch, "value", None)
    if not isinstance(value, Tensor):
        if passing_input(target) is None:
            raise ValueError(
                "its first input does not have the shape and dtype of its output at all sizes, so it cannot pass "
                "through: give value="
            )
    elif value.dtype != target.whole.dtype:
        raise ValueError(f"the module returns {target.whole.dtype}, and value is {value.dtype}: use value.to(...)")
    elif not patch.any_shape and (problem := shape_problem(frame, target.whole, value.shape)) is not None:
        raise ValueError(f"value, of shape {tuple(value.shape)}, cannot be its output: {problem}")


def passing_input(target: Target) -> str | None:
    """Returns the first tensor among the inputs of the frame, if it has the form of the value at all sizes."""
    first = next((node for node in target.frame.inputs() if isinstance(node.spec, TensorSpec)), None)
    if first is None or not isinstance(first.spec, TensorSpec) or not isinstance(target.whole, TensorSpec):
        return None
    known = dimensions_of(target.frame.root)
    extents = known.extents(first.spec)
    is_alike = first.spec.dtype == target.whole.dtype and extents == known.extents(target.whole)
    return first.target if is_alike and None not in extents else None


def refuse_with_cache(plan: Plan, function: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises a `GraphPatchError` if a call is to be skipped that fills the cache of a generation."""
    if function is plan.root.frame.module and not caches_of(plan.root.frame, args, kwargs):
        return
    for entry in plan.skips:
        if any(parameter.name in CACHES for frame in entry.target.frame.walk() for parameter in frame.parameters):
            raise GraphPatchError(
                f"{format_path(entry.target.frame.path)!r} fills a cache, which would lack its keys if skipped in a "
                "generation: say use_cache=False, or skip modules that take no cache"
            )
