"""The plan of a patched run: which values of which frames are patched.

[(target, patches), ...]  ->  Plan
                              └── FramePlan of each frame that a run must recognize, the root first
                                  ├── inputs, tensors, output, sites: the entries of this frame
                                  └── calls: module and call number -> FramePlan of the submodule's frame
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.records import CompositeCall, Frame, Site
from graphpatch_notebook.errors import PatchMapError, PatchValueError
from graphpatch_notebook.graphs import CompiledGraphModule
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, resolve
from graphpatch_notebook.patches.kinds import Patch, SplicePatch, declares, inside_of
from graphpatch_notebook.patches.slices import index_problem, selection_problem
from graphpatch_notebook.patching.positions import Restriction
from graphpatch_notebook.torch_compat import takes_hooks
from graphpatch_notebook.values import TensorSpec

FUSED_MODULES = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
"""Modules that torch computes by other kernels in some runs than in others, with other rounding."""

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
    # The sort key of entries on one value: what others read comes late, and patches that end the run last.
    rank: int = field(default=0, init=False)
    # The recorded shape, if the patches apply to all of such a tensor, and nothing else matters: a fast path.
    plain_shape: torch.Size | None = field(default=None, init=False)
    # The operations of the patches, if they only keep such a tensor: a faster path, since all values may be probed.
    keep: Sequence[Callable[[Any], Any]] = field(default=(), init=False)

    def __post_init__(self) -> None:
        target, node, spec = self.target, self.target.node, self.target.whole
        self.rank = (1 if self.is_source else 2 if self.patches[0].stops_run else 0) - 3 * self.is_early
        is_limited = self.restriction is not None or self.is_source or self.placement is not None or self.sources
        is_part = target.dig or (target.component and target.index)
        if is_limited or is_part or node.is_mutated_later or node.is_view_filled_later:
            return
        if isinstance(spec, TensorSpec):
            self.plain_shape = spec.shape
            is_result = node.kind != "op" or not (node.is_in_place or node.position is not None)
            if is_result and all(declares(patch, "only_keeps") for patch in self.patches):
                self.keep = [patch.op for patch in self.patches]

    @property
    def observes_only(self) -> bool:
        """Whether no patch changes the value."""
        return bool(self.keep) or all(patch.observes_only for patch in self.patches)

    @property
    def keeps_whole(self) -> bool:
        """Whether a patch keeps the value itself: not a part of it, nor a copy from before the model writes into it."""
        is_whole = not self.target.index and (self.restriction is None or self.restriction.positions is None)
        return is_whole and not self.target.node.is_mutated_later and any(patch.only_keeps for patch in self.patches)


def part_of(target: Target, value: Any, patches: Sequence[Patch[Any]] = ()) -> Any:
    """Returns the component's part of a value: a view, or the value itself if the component is all of it."""
    index = target.index
    if not index or not isinstance(value, Tensor):
        return value
    shown = f"the value here, of shape {tuple(value.shape)},"
    problem = index_problem(index, value.shape) or selection_problem(
        index, value.shape, shown, allow_empty=any(patch.allow_empty for patch in patches)
    )
    if problem is not None:
        raise PatchValueError(f"{target.text!r}: {problem}")
    return value[index]


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
        self.changes_inputs = self.is_bare = self.needs_mode = False

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
        module, below = self.frame.module, self.below()
        if isinstance(module, torch.nn.TransformerEncoder):  # its layers themselves are called
            below = [plan for plan in below if plan.sites is not None or plan.calls]
        self.needs_mode = self.sites is not None or (isinstance(module, _FUSED) and bool(below))
        self.is_bare = not (self.inputs or self.tensors or self.graph or self.skips or self.needs_mode)


class Plan:
    """What a patched run needs: made once, and used each time that a context with the same patches is entered.

    Attributes:
        root: The plan of the model's own frame.
        by_frame: The plans of all frames that a run must recognize, by the id of the frame, the root first.
        entries: The patches, each with its target, in order.
        callers: Which frames call which module.
        own_graphs: The graph modules whose graph runs in place of the module.
        custom: Custom graphs by the id of the module that each replaces, in all its calls.
        watched: The modules whose forwards must be seen, by id.
        with_outputs: The modules whose outputs are patched, or only kept; and whether they are changed.
        with_inputs: The modules whose inputs are patched, or kept with gradients; and whether they are patched.
        restricted: Those of the entries that are for some steps or positions only.
        skips: Those of the entries that replace calls of modules.
        unjoined: Patches on parts of a splice that is not among the patches.
        sees_ops: Whether some frame runs under the function mode.
    """

    def __init__(
        self, root: Frame, entries: Sequence[Entry], callers: Callers, own_graphs: Sequence[CompiledGraphModule] = ()
    ) -> None:
        self.entries, self.callers, self.own_graphs = joined_with_splices(entries), callers, own_graphs
        wanted = [*(graph.frame for graph in own_graphs), *(entry.target.frame for entry in self.entries)]
        plans = {id(frame): FramePlan(frame) for frame in callers.frames_to_recognize(root, wanted)}
        self.by_frame, self.root = plans, plans[id(root)]
        for graph in own_graphs:
            plans[id(graph.frame)].graph = graph
        for plan in plans.values():
            if plan is not self.root and plan.frame.call is not None:
                calls = _nearest_above(plan.frame, plans).calls
                calls.setdefault(id(plan.frame.module), {})[plan.frame.call.call_index] = plan
        self.restricted: list[Entry] = []
        self.skips: list[Entry] = []
        self.unjoined: list[InsidePatch] = []
        for entry in sorted(self.entries, key=operator.attrgetter("rank")):
            plan = plans[id(entry.target.frame)]
            if own_graphs:
                _refuse_before_hooks(entry, plans)
            plan.add(entry)
            if entry.restriction is not None:
                self.restricted.append(entry)
            if entry.patches[0].replaces_call:
                self.skips.append(entry)
            if isinstance(entry.patches[0], InsidePatch):
                self.unjoined.append(entry.patches[0])
        self.watched: dict[int, Module] = {}
        self.with_outputs: dict[int, tuple[Module, bool]] = {}
        self.with_inputs: dict[int, tuple[Module, bool]] = {}
        for plan in plans.values():
            plan.settle()
            module = self.watched[id(plan.frame.module)] = plan.frame.module
            if plan.output and takes_hooks(module):
                _, is_changed = self.with_outputs.get(id(module), (module, False))
                is_changed = is_changed or not all(entry.observes_only for entry in plan.output)
                self.with_outputs[id(module)] = module, is_changed
            if (plan.changes_inputs or plan.probed) and takes_hooks(module):
                _, has_changes = self.with_inputs.get(id(module), (module, False))
                self.with_inputs[id(module)] = module, has_changes or plan.changes_inputs
        self.sees_ops = any(plan.needs_mode for plan in plans.values())
        self.custom = {
            id(graph.frame.module): FramePlan(graph.frame, graph)
            for graph in reversed(own_graphs)
            if graph.frame.custom_graph is not None
        }

    def with_more(self, entries: Sequence[Entry]) -> Plan:
        """Returns the plan for `entries` after the patches of this one."""
        together = [*self.entries, *entries]
        return Plan(self.root.frame, together, self.callers, self.own_graphs) if entries else self


def _nearest_above(frame: Frame, plans: dict[int, FramePlan]) -> FramePlan:
    """Returns the plan of the innermost frame around `frame` that has one; the root has one."""
    return next(plans[id(above)] for above in frame.frames_above() if above is not frame and id(above) in plans)


def _refuse_before_hooks(entry: Entry, plans: dict[int, FramePlan]) -> None:
    """Raises if hooks change a module's output, and the graph that calls it may have their operations as its own."""
    frame = entry.target.frame
    above = plans.get(id(frame.parent))
    graph = None if above is None else above.graph
    is_record = graph is not None and graph.frame.custom_graph is None
    if entry.target.node.kind == "output" and frame.conditions.hooks and is_record:
        raise PatchMapError(
            f"{entry.target.path!r} is what forward hooks of the module returned, and the graph that calls the module "
            "was edited: patch the operations of the hooks in that graph"
        )


class Callers:
    """The frames that call each module, in a whole capture."""

    def __init__(self, root: Frame) -> None:
        self._frames: dict[int, list[Frame]] = {}
        for frame in root.walk():
            self._frames.setdefault(id(frame.module), []).append(frame)
        self._has_fused = any(isinstance(frames[0].module, _FUSED) for frames in self._frames.values())

    def frames_of(self, module: Module) -> list[Frame]:
        """Returns the frames of `module`, in order of execution."""
        return self._frames.get(id(module), [])

    def frames_to_recognize(self, root: Frame, wanted: Iterable[Frame]) -> list[Frame]:
        """Returns the root, the `wanted` frames, and the frames that a run needs to tell which call each of them is.

        A module that is called once in the whole capture needs no other frame. Calls of other modules are counted in
        the frame that calls them, so all frames are needed that call such a module. Modules that may run fused always
        are.
        """
        found = {id(root): root}
        waiting = list(wanted)
        for frame in waiting:
            if id(frame) in found:
                continue
            found[id(frame)] = frame
            calls = self.frames_of(frame.module)
            if len(calls) > 1:
                waiting += [call.parent for call in calls if call.parent is not None]
            if self._has_fused:
                waiting += [above for above in frame.frames_above() if isinstance(above.module, _FUSED)]
        return list(found.values())


# -- patches on the parts of splices -----------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class InsidePatch(Patch[Any]):
    """Patches on a part of a splice, until a plan joins them with the splice; `problem_without` is what is wrong else.

    The splice may be in the same patch map, in a context around it, or permanent: it is not known when a path is read.
    """

    name: str
    part: str
    patches: Sequence[Patch[Any]]
    problem_without: str

    def op(self, original_output: Any) -> Any:
        raise PatchValueError(self.problem_without)


def inside_splice(
    root: Frame, text: str, patches: Sequence[Patch[Any]], problem: str
) -> tuple[Target, InsidePatch] | None:
    """Returns the value with the splice, and the patches on a part of it, if `text` is the path of such a part.

    `problem` is what is wrong with the path if there is no splice.
    """
    found = inside_of(text)
    if found is None:
        return None
    path, name, part = found
    try:
        target = resolve(root, path)
    except Unresolvable:
        return None
    hint = f"{problem}; a SplicePatch(sae, name={name!r}) on {path!r} would have it, and there is none"
    return target, InsidePatch(name=name, part=part, patches=patches, problem_without=hint)


def is_part_of_splice(root: Frame, text: str) -> bool:
    """Whether a path can only be that of a part of a splice."""
    try:
        resolve(root, text)
    except Unresolvable:
        return inside_splice(root, text, (), "") is not None
    return False


def joined_with_splices(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Returns entries with the patches on parts of splices inside of these splices.

    Two splices of one name on a value, and changes of an error that is not added, are a `PatchMapError`.
    """
    found = [entry for entry in entries if not isinstance(entry.patches[0], InsidePatch)]
    if len(found) == len(entries):
        return entries
    for entry in entries:
        inside, path = entry.patches[0], entry.target.path
        if not isinstance(inside, InsidePatch):
            continue
        places = [
            (number, place)
            for number, other in enumerate(found)
            if (other.target.path, other.target.spec) == (path, entry.target.spec)
            for place, patch in enumerate(other.patches)
            if isinstance(patch, SplicePatch) and patch.name == inside.name
        ]
        if len(places) > 1:
            raise PatchMapError(f"{path!r} has {len(places)} splices named {inside.name!r}: give one name=")
        for number, place in places:
            patches: list[Any] = list(found[number].patches)
            if inside.part == "error" and not patches[place].error and not all(p.observes_only for p in inside.patches):
                raise PatchMapError(
                    f"{path!r}: the splice {inside.name!r} has error=False, so its error is not part of the value and "
                    "can only be probed: use SplicePatch(..., error=True)"
                )
            patches[place] = patches[place].with_inside(inside.part, inside.patches)
            found[number] = replace(found[number], patches=tuple(patches))
        if not places:
            found.append(entry)
    return found
