"""The plan of a patched run: which values of which frames are patched.

[(target, patches), ...]  ->  RunPlan
                              └── FramePlan of the root
                                  ├── inputs, tensors, output, sites: the entries of this frame
                                  └── calls: module and call number -> FramePlan of the submodule's frame
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.nn import Module

from graphpatch_notebook.capture import call_sites, data_loop_of, data_loops, held_by
from graphpatch_notebook.capture.records import CompositeCall, Frame, Site, SourceLine
from graphpatch_notebook.errors import PatchMapError
from graphpatch_notebook.execution.positions import Restriction
from graphpatch_notebook.execution.splices import InsidePatch, joined_with_splices
from graphpatch_notebook.graphs import CompiledGraphModule
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patches.kinds import Patch, declares
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.sharded import Placement
from graphpatch_notebook.torch_compat import has_compiled_parts, is_any_compiled, may_compile, takes_hooks
from graphpatch_notebook.values import TensorSpec


@dataclass(slots=True, eq=False)
class Entry:
    """The patches on one value."""

    target: Target
    patches: Sequence[Patch[Any]]
    # The steps and positions at which the patch (then the only one) has an effect; `None` for all.
    restriction: Restriction | None = None
    # The recorded shape, if the patches apply to all of such a tensor, and nothing else matters.
    plain_shape: torch.Size | None = None
    observed_shape: torch.Size | None = None  # the same, if they only observe it
    # Whether the value is not simply the result of a call (written in place, or unpacked from it).
    is_special: bool = False
    # The operation of the only patch, if it only observes the result of a call.
    watch: Callable[[Any], Any] | None = None
    sources: Sequence[str] = ()  # the names of the values of the run that the patch (then the only one) reads
    is_source: bool = False  # whether the value is only kept for patches that read it
    # How the value is distributed over processes, if the model is sharded: patches see the whole value.
    placement: Placement | None = None
    is_early: bool = False  # whether it comes before the other entries on the value: it is for the op that made it
    # The sort key of entries on one value: what others read comes late, and patches that end the run last.
    rank: int = 0

    @property
    def shows_itself(self) -> bool:
        """Whether patches see the value itself: not a part of it, nor a copy from before the model writes into it."""
        is_whole = not self.target.index and (self.restriction is None or self.restriction.positions is None)
        return is_whole and not self.target.node.is_mutated_later

    def __post_init__(self) -> None:
        # Entries without restrictions take a fast path; probes, which may be on many nodes at once, a faster one.
        target, patches = self.target, self.patches
        node, spec = target.node, target.whole
        self.rank = (1 if self.is_source else 2 if patches[0].stops_run else 0) - 3 * self.is_early
        self.is_special = node.kind == "op" and (node.is_in_place or node.position is not None)
        if (
            self.restriction is not None
            or self.is_source
            or self.placement is not None
            or not isinstance(spec, TensorSpec)
        ):
            return
        if target.dig or (target.component and target.index) or node.is_mutated_later or node.is_view_filled_later:
            return
        self.plain_shape = spec.shape
        if not declares(patches[0], "only_keeps"):
            return
        if len(patches) == 1:
            self.observed_shape = spec.shape
            self.watch = None if self.is_special else patches[0].op
        elif all(declares(patch, "only_keeps") for patch in patches):
            self.observed_shape = spec.shape


FUSED_MODULES = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
"""Modules that torch computes by other kernels in some runs than in others, with other rounding."""

# Without gradients, in eval mode, these do not call the modules in them, unless a function mode is on.
_FUSED = FUSED_MODULES[:2]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class SiteEntries(list[Entry]):
    """The entries on what is called at one call site, at one occurrence."""

    __slots__ = ("inside", "watched")

    def __init__(self) -> None:
        super().__init__()
        self.watched: Entry | None = None  # the only entry, if it only observes the result of the call
        # What is patched inside of it: then the call is opened into its steps. Nothing else opens it.
        self.inside: FramePlan | None = None

    def add(self, entry: Entry) -> None:
        """Adds an entry, after those that are there."""
        self.watched = None if self or entry.watch is None else entry
        self.append(entry)


OpEntries: TypeAlias = "dict[int, SiteEntries]"
"""The entries on the ops of one call site, by occurrence."""
EntriesByChain: TypeAlias = "dict[tuple[int, ...] | None, OpEntries]"


class PatchedCode(dict[int, "EntriesByChain | None"]):
    """The entries of ops at the instructions of one code object, by `lasti`: filled during runs from `by_offset`."""

    __slots__ = ("_offsets", "by_offset")

    def __init__(self, offsets: Mapping[int, int]) -> None:
        super().__init__()
        self._offsets = offsets
        # Entries by the offset of the innermost step of their call site, then by the steps above it, then by the
        # occurrence.
        self.by_offset: dict[int, EntriesByChain] = {}

    def __missing__(self, lasti: int) -> EntriesByChain | None:
        found = self[lasti] = self.by_offset.get(self._offsets[lasti]) if self.by_offset else None
        return found


@dataclass(slots=True, eq=False)
class PatchedSites:
    """The call sites of one frame at which ops are patched."""

    # The call sites, by the id of the code object of their innermost step; and code without any that a run came to.
    by_code: dict[int, PatchedCode] = field(default_factory=dict)
    # How many calls have entries; zero if a call may come after the last of them that is to be reported.
    visits: int = 0
    _may_repeat: bool = False

    def entries_at(self, site: Site, occurrence: int) -> SiteEntries:
        """Returns the entries at one call site and occurrence, for new ones to be added."""
        (code, offset), *above = reversed(site.steps)
        chain = tuple(number for outer, at in above for number in (id(outer), at)) if above else ()
        patched = self.by_code.get(id(code))
        if patched is None:
            patched = self.by_code[id(code)] = PatchedCode(call_sites.facts_of(code).offsets)
        by_occurrence = patched.by_offset.setdefault(offset, {}).setdefault(chain, {})
        if occurrence not in by_occurrence:
            by_occurrence[occurrence] = SiteEntries()
            if not self._may_repeat:
                self._may_repeat = call_sites.may_repeat(site)
                self.visits = 0 if self._may_repeat else self.visits + 1
        return by_occurrence[occurrence]


@dataclass(slots=True, eq=False)
class OverrideGraph:
    """A graph that runs in place of a module's code (edited, or custom), with the entries on its nodes."""

    module: CompiledGraphModule  # the graph module that runs it
    entries: dict[str, list[Entry]] = field(default_factory=dict)  # entries by the node's name
    names: frozenset[str] = frozenset()  # the keys of `entries`


@dataclass(slots=True, eq=False)
class FramePlan:
    """What is patched in one frame, and which frames below it hold patches."""

    frame: Frame
    # For each submodule (by id) and each of its calls in this frame (from zero), the plan of that frame.
    calls: dict[int, dict[int, FramePlan]] = field(default_factory=dict)
    inputs: dict[str, list[Entry]] = field(default_factory=dict)  # entries by parameter of `forward`
    # Entries on parameters, buffers and attributes, by attribute path.
    tensors: dict[str, list[Entry]] = field(default_factory=dict)
    output: list[Entry] = field(default_factory=list)  # entries on the output
    sites: PatchedSites | None = None  # entries on ops, by call site; `None` if there are none
    override: OverrideGraph | None = None  # the graph that runs in place of the module's code, if there is one
    # Those of `inputs` that only observe a tensor, with where a call gives it: taken out of `inputs`.
    watched_inputs: list[tuple[int, str, Entry]] = field(default_factory=list)
    # Those of `tensors` that only observe a parameter of the module: taken out of `tensors`.
    watched_tensors: list[tuple[str, Entry]] = field(default_factory=list)
    # The entries on inputs with probes: each is shown a tensor that the module alone is given.
    probed_inputs: list[Entry] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)  # all entries of this frame
    skips: list[Entry] = field(default_factory=list)  # the entries that replace the call
    is_bare: bool = False  # whether nothing is patched in this frame but its output, so that the module runs as it is
    # Whether it runs under the function mode: its ops are patched, or what its fused kernel skips.
    needs_mode: bool = False

    @property
    def is_needed(self) -> bool:
        """Whether anything is patched, here or below, or an edited graph runs in place of the module in this frame."""
        is_edited = self.override is not None and self.frame.custom_graph is None
        return is_edited or any(plan.entries for plan in self.walk())

    def _runs_unfused(self) -> bool:
        below = [plan for by_index in self.calls.values() for plan in by_index.values()]
        if isinstance(self.frame.module, torch.nn.TransformerEncoder):  # its layers themselves are called
            return any(plan.sites is not None or plan.calls for plan in below)
        return bool(below)

    def position_of(self, name: str) -> int:
        """Returns the position of the argument `name` in a call, if it is passed by position; else -1."""
        for position, parameter in enumerate(self.frame.parameters):
            if parameter.name == name and parameter.kind in _POSITIONAL:
                return position
        return -1

    def walk(self) -> Iterator[FramePlan]:
        """Yields this plan and all below it."""
        waiting = [self]
        while waiting:
            plan = waiting.pop()
            yield plan
            if plan.calls:
                below = [inner for by_index in plan.calls.values() for inner in by_index.values()]
                waiting += reversed(below)

    def add(self, entry: Entry) -> None:
        """Adds an entry of this frame."""
        self.entries.append(entry)
        node = entry.target.node
        if node.kind == "input" and entry.shows_itself and any(patch.only_keeps for patch in entry.patches):
            self.probed_inputs.append(entry)
        if entry.patches[0].replaces_call:
            self.skips.append(entry)
        elif node.kind == "output":
            self.output.append(entry)
        elif self.override is not None:
            changes = not all(patch.observes_only for patch in entry.patches)
            problem = self.override.module.input_problem(node) if node.kind == "input" and changes else None
            if problem is not None:
                raise PatchMapError(f"{entry.target.path!r} {problem}; patch the nodes in the graph that use its value")
            self.override.entries.setdefault(node.name, []).append(entry)
        elif node.kind == "input":
            self.inputs.setdefault(node.target, []).append(entry)
        elif node.kind == "op":
            assert node.site is not None
            plan = self if node.composite is None else self._inside(node.composite, entry)
            plan._at(node.site, node.occurrence).add(entry)
        else:
            self.tensors.setdefault(node.target, []).append(entry)

    def _inside(self, call: CompositeCall | None, entry: Entry) -> FramePlan:
        """Returns the plan for the steps inside `call`, to which `entry` is added; this plan outside of such calls."""
        if call is None:
            return self
        at_call = self._inside(call.outer, entry)._at(call.site, call.occurrence)
        if at_call.inside is None:
            at_call.inside = FramePlan(self.frame)
        at_call.inside.entries.append(entry)
        return at_call.inside

    def _at(self, site: Site, occurrence: int) -> SiteEntries:
        if self.sites is None:
            self.sites = PatchedSites()
        return self.sites.entries_at(site, occurrence)

    def settle(self) -> None:
        """Derives the rest, when all entries are added to this plan and to those below it.

        Entries that only observe inputs and parameters are separated: if a model is probed, there are hundreds.
        """
        if self.override is not None:
            self.override.names = frozenset(self.override.entries)
        for name, entries in list(self.inputs.items()) if self.inputs else ():
            position = self.position_of(name)
            if len(entries) == 1 and entries[0].watch is not None and position >= 0:
                self.watched_inputs.append((position, name, entries[0]))
                del self.inputs[name]
        for path, entries in list(self.tensors.items()) if self.tensors else ():
            is_watched = len(entries) == 1 and entries[0].watch is not None
            is_plain = entries[0].target.node.kind == "parameter" and held_by(self.frame.module, path) is None
            if is_watched and is_plain:
                self.watched_tensors.append((path, entries[0]))
                del self.tensors[path]
        self.needs_mode = self.sites is not None or (isinstance(self.frame.module, _FUSED) and self._runs_unfused())
        given = self.inputs or self.watched_inputs or self.probed_inputs
        held = self.tensors or self.watched_tensors
        self.is_bare = not (given or held or self.override or self.skips or self.needs_mode)


@dataclass(frozen=True)
class RunPlan:
    """What a patched run needs: made once, and used each time that a context with the same patches is entered."""

    root: FramePlan
    entries: Sequence[Entry]
    callers: Callers  # which frames call which module
    own_graphs: Sequence[CompiledGraphModule]  # the graph modules whose graph runs in place of the module
    custom: dict[int, FramePlan]  # custom graphs by the id of the module that each replaces, in all its calls
    layout: Layout  # which frames are planned
    watched_ids: set[int]  # the ids of the modules whose calls must be seen
    with_patched_inputs: list[Module]  # the modules whose inputs are patched
    with_other_boundaries: list[Module]  # the other modules whose output is patched, or whose inputs are probed
    restricted: Sequence[Entry]  # those of the entries that are for some steps or positions only
    skips: Sequence[Entry]  # those of the entries that replace calls of modules
    has_parts_of_splices: bool  # whether there are patches on parts of a splice that is not among the patches
    sees_ops: bool  # whether ops are patched

    @property
    def has_compiled_parts(self) -> bool:
        """Whether `torch.compile` compiled a module that contains a watched one, or one that runs under the mode.

        Other modules run as without patches. This is asked on each entry, so it does not look at all modules.
        """
        if not may_compile():
            return False
        links = self.layout.links
        if links is None or self.root.needs_mode or is_any_compiled(self.layout.linked):
            return self.callers.has_compiled_parts
        for parent, name, module in links:
            children = parent._modules
            if name not in children or children[name] is not module:
                return self.callers.has_compiled_parts
        return bool(self.under_mode) and any(map(has_compiled_parts, self.under_mode))

    @functools.cached_property
    def under_mode(self) -> Sequence[Module]:
        """The modules with frames that run under the function mode, and that have submodules."""
        return [plan.frame.module for plan in self.root.walk() if plan.needs_mode and plan.frame.module._modules]

    def with_more(self, entries: Sequence[Entry]) -> RunPlan:
        """Returns the plan for `entries` after the patches of this one."""
        if not entries:
            return self
        return make_plan(self.root.frame, [*self.entries, *entries], self.callers, self.own_graphs)

    @functools.cached_property
    def data_loops(self) -> dict[SourceLine, list[str]]:
        """The paths that name iterations of loops over data, by the head of the loop."""
        found: dict[SourceLine, list[str]] = {}
        for entry in self.entries if self.entries and data_loops(self.entries[0].target.frame.root) else ():
            if (loop := data_loop_of(entry.target.frame, entry.target.node)) is not None:
                found.setdefault(loop, []).append(entry.target.path)
        return found


def make_plan(
    root: Frame, entries: Sequence[Entry], callers: Callers, own_graphs: Sequence[CompiledGraphModule] = ()
) -> RunPlan:
    """Returns the plan of a run with `entries`, in their order, and with `own_graphs`."""
    given, entries = entries, joined_with_splices(entries)
    has_parts = entries is not given and any(isinstance(entry.patches[0], InsidePatch) for entry in entries)
    wanted = [entry.target.frame for entry in entries]
    if own_graphs:
        wanted[:0] = [graph.frame for graph in own_graphs]
    layout = callers.layout(root, wanted)
    listed = [FramePlan(frame) for frame in layout.frames]
    plans = {id(plan.frame): plan for plan in listed}
    for graph in own_graphs:
        plans[id(graph.frame)].override = OverrideGraph(graph)
    for plan, above in zip(listed[1:], layout.above, strict=True):
        assert plan.frame.call is not None
        calls = listed[above].calls.setdefault(id(plan.frame.module), {})
        calls[plan.frame.call.call_index] = plan
    for entry in sorted(entries, key=operator.attrgetter("rank")):
        if own_graphs:
            _refuse_before_hooks(entry, plans)
        plans[id(entry.target.frame)].add(entry)
    sees_ops = False
    for plan in listed:
        plan.settle()
        sees_ops |= plan.sites is not None
    custom: dict[int, FramePlan] = {}
    for graph in own_graphs:
        if graph.frame.custom_graph is not None:
            custom.setdefault(id(graph.frame.module), FramePlan(graph.frame, override=OverrideGraph(graph)))
    with_patched_inputs: list[Module] = []
    with_other_boundaries: list[Module] = []
    for plan in listed:
        if (plan.inputs or plan.output or plan.probed_inputs) and takes_hooks(plan.frame.module):
            (with_patched_inputs if plan.inputs else with_other_boundaries).append(plan.frame.module)
    return RunPlan(
        listed[0],
        entries,
        callers,
        own_graphs,
        custom,
        layout,
        set(map(id, layout.watched)),
        with_patched_inputs,
        with_other_boundaries,
        [entry for entry in entries if entry.restriction is not None],
        [entry for entry in entries if entry.patches[0].replaces_call],
        has_parts,
        sees_ops,
    )


def _refuse_before_hooks(entry: Entry, plans: Mapping[int, FramePlan]) -> None:
    """Raises if hooks change a module's output, and the graph that calls it has these operations as its own."""
    frame, call = entry.target.frame, entry.target.frame.call
    above = plans.get(id(frame.parent))
    if entry.target.node.kind != "output" or not frame.conditions.hooks or above is None or above.override is None:
        return
    if call is None or call.site is None or call not in above.frame.nodes:
        return
    steps = call.site.steps
    after = above.frame.nodes[above.frame.nodes.index(call) + 1 :]
    made = [n for n in after if n.site is not None and n.site != call.site and n.site.steps[: len(steps)] == steps]
    if made:
        raise PatchMapError(
            f"{entry.target.path!r} is what forward hooks of the module returned, and their operations are part of the "
            f"graph that calls it, which was edited: patch {format_path((*above.frame.path, made[-1].name))!r}, "
            "which is what the last of them computed"
        )


Link: TypeAlias = "tuple[Module, str, Module]"
"""A module, the name of one of its submodules, and that submodule."""


@dataclass(frozen=True)
class Layout:
    """Which frames are planned if certain ones hold patches."""

    frames: Sequence[Frame]  # the frames, the root first
    above: Sequence[int]  # for each but the root, the number of the frame whose plan holds its plan
    watched: Sequence[Module]  # the modules whose calls must be seen to identify these frames
    # The modules around these and around those that call them, up to the model; `None` if that is most of the model.
    links: Sequence[Link] | None

    @functools.cached_property
    def linked(self) -> Sequence[Module]:
        """The modules at the ends of the links."""
        found = [self.frames[0].module, *(module for _, _, module in self.links or ())]
        return list({id(module): module for module in found}.values())


def _keep(frame: Frame, frames: dict[int, Frame], callers: Callers) -> None:
    """Adds `frame` to those that are planned, and the frames above it that are needed to identify it.

    A call of a module that is called once in the whole capture needs no other frame. If a run calls it more often, it
    counts as a repeated call, from any caller. Modules that may run fused are always planned.
    """
    while id(frame) not in frames:
        frames[id(frame)] = frame
        is_unique = callers.has_one_frame(frame.module)
        above = frame.parent
        while above is not None and is_unique and not isinstance(above.module, _FUSED):
            above = above.parent
        if above is None:
            return
        frame = above


def _nearest_above(frame: Frame, numbers: Mapping[int, int]) -> int:
    """Returns the number of the innermost frame around `frame` among those that are planned."""
    above = frame.parent
    while above is not None and id(above) not in numbers:
        above = above.parent
    assert above is not None
    return numbers[id(above)]


class Callers:
    """The frames that call each module, in a whole capture."""

    def __init__(self, root: Frame) -> None:
        self._frames: dict[int, list[Frame]] = {}
        for frame in root.walk():
            self._frames.setdefault(id(frame.module), []).append(frame)
        self._root = root.module
        self._layouts: dict[tuple[int, ...], Layout] = {}

    @property
    def has_compiled_parts(self) -> bool:
        """Whether `torch.compile` compiled any of the modules that are now in the model, even after the capture."""
        return has_compiled_parts(self._root)

    def frames_of(self, module: Module) -> list[Frame]:
        """Returns the frames of `module`, in order of execution."""
        return self._frames.get(id(module), [])

    def has_one_frame(self, module: Module) -> bool:
        """Whether `module` is called once in the whole capture."""
        return len(self.frames_of(module)) == 1

    def layout(self, root: Frame, wanted: Iterable[Frame]) -> Layout:
        """Returns the frames to plan if the frames in `wanted` have patches."""
        distinct = {id(frame): frame for frame in wanted}
        key = (id(root), *distinct)
        known = self._layouts.get(key)
        if known is None:
            if len(self._layouts) >= _FEW:
                self._layouts.clear()
            known = self._layouts[key] = self._laid_out(root, distinct.values())
        return known

    def _laid_out(self, root: Frame, wanted: Iterable[Frame]) -> Layout:
        found = {id(root): root}
        for frame in wanted:
            _keep(frame, found, self)
        for frame in self._calling_frames(found):
            _keep(frame, found, self)
        numbers = {key: number for number, key in enumerate(found)}
        frames = list(found.values())
        above = [_nearest_above(frame, numbers) for frame in frames[1:]]
        watched = self._modules_to_watch(frames)
        calling = [outer.module for frame in frames for outer in frame.frames_above()]
        return Layout(frames, above, watched, self._links_to([*watched, *calling]))

    @functools.cached_property
    def _links(self) -> dict[int, list[Link]]:
        """The links to each module, by its id."""
        found: dict[int, list[Link]] = {}
        for parent in self._root.modules():
            for name, child in parent._modules.items():
                if child is not None:
                    found.setdefault(id(child), []).append((parent, name, child))
        return found

    def _links_to(self, modules: Iterable[Module]) -> list[Link] | None:
        """Returns all links on the paths from the model down to `modules`; `None` if these are most of its links."""
        found: dict[int, list[Link]] = {}
        waiting = [*modules, self._root]
        for module in waiting:
            if id(module) not in found:
                links = found[id(module)] = self._links.get(id(module), [])
                waiting += [parent for parent, _, _ in links]
        is_most = 2 * len(found) > len(self._links)
        return None if is_most else [link for links in found.values() for link in links]

    def _calling_frames(self, planned: Mapping[int, Frame]) -> Iterator[Frame]:
        """Yields the frames that call a module with several frames, if one of these is planned.

        This includes frames that are added during the iteration. Their modules are watched, so that a call in one of
        them is not mistaken for a call in a frame above it.
        """
        seen: set[int] = set()
        while new := [frame.module for frame in planned.values() if id(frame.module) not in seen]:
            for module in new:
                if id(module) not in seen:
                    seen.add(id(module))
                    frames = self.frames_of(module)
                    yield from (f.parent for f in frames if len(frames) > 1 and f.parent is not None)

    def _modules_to_watch(self, planned: Iterable[Frame]) -> list[Module]:
        """Returns the modules whose calls must be observed to identify the planned frames.

        These are the modules of the planned frames, and all that call one of these: otherwise a call from elsewhere
        would be mistaken for one of the calls that the plan counts.
        """
        watched = {id(frame.module): frame.module for frame in planned}
        for module in list(watched.values()):
            frames = self.frames_of(module)
            for frame in frames if len(frames) > 1 else ():
                if frame.parent is not None:
                    watched.setdefault(id(frame.parent.module), frame.parent.module)
        return list(watched.values())


_FEW = 16
