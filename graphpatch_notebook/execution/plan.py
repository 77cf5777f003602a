"""The plan of a patched run: which values of which frames are patched.

[(target, patches), ...]  ->  Plan
                              └── FramePlan of each frame that a run must recognize, the root first
                                  ├── inputs, tensors, output, sites: the entries of this frame
                                  └── calls: module and call number -> FramePlan of the submodule's frame
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, TypeAlias

import torch
from torch.nn import Module

from graphpatch_notebook.capture import call_sites, held_by
from graphpatch_notebook.capture.records import CompositeCall, Frame, Site
from graphpatch_notebook.checks.sharding import ShardedValue
from graphpatch_notebook.errors import PatchMapError
from graphpatch_notebook.execution.positions import Restriction
from graphpatch_notebook.execution.splices import InsidePatch, joined_with_splices
from graphpatch_notebook.graphs import CompiledGraphModule
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patches.kinds import Patch, declares
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import has_compiled_parts, is_any_compiled, may_compile, takes_hooks
from graphpatch_notebook.values import TensorSpec

FUSED_MODULES = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
"""Modules that torch computes by other kernels in some runs than in others, with other rounding."""

# Without gradients, in eval mode, these do not call the modules in them, unless a function mode is on.
_FUSED = FUSED_MODULES[:2]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


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
    placement: ShardedValue | None = None
    is_early: bool = False  # whether it comes before the other entries on the value: it is for the op that made it
    # The sort key of entries on one value: what others read comes late, and patches that end the run last.
    rank: int = 0
    # The recorded shape, if the patches apply to all of such a tensor, and nothing else matters: a fast path.
    plain_shape: torch.Size | None = None
    # The operations of the patches, if they only keep such a tensor: a faster path, since all values may be probed.
    keep: Sequence[Callable[[Any], Any]] = ()

    def __post_init__(self) -> None:
        target, patches = self.target, self.patches
        node, spec = target.node, target.whole
        self.rank = (1 if self.is_source else 2 if patches[0].stops_run else 0) - 3 * self.is_early
        if self.restriction is not None or self.is_source or self.placement is not None:
            return
        is_part = target.dig or (target.component and target.index)
        if is_part or not isinstance(spec, TensorSpec) or node.is_mutated_later or node.is_view_filled_later:
            return
        self.plain_shape = spec.shape
        if not declares(patches[0], "only_keeps") or (
            node.kind == "op" and (node.is_in_place or node.position is not None)
        ):
            return
        if len(patches) == 1 or all(declares(patch, "only_keeps") for patch in patches):
            self.keep = [patch.op for patch in patches]

    @property
    def observes_only(self) -> bool:
        """Whether no patch changes the value."""
        return bool(self.keep) or all(patch.observes_only for patch in self.patches)

    @property
    def keeps_whole(self) -> bool:
        """Whether a patch keeps the value itself: not a part of it, nor a copy from before the model writes into it."""
        is_whole = not self.target.index and (self.restriction is None or self.restriction.positions is None)
        return is_whole and not self.target.node.is_mutated_later and any(patch.only_keeps for patch in self.patches)


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


@dataclass(slots=True, eq=False)
class FramePlan:
    """What is patched in one frame, and which frames below it hold patches."""

    frame: Frame
    # For each submodule (by id) and each of its calls in this frame (from zero), the plan of that frame.
    calls: dict[int, dict[int, FramePlan]] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)  # all entries of this frame
    inputs: dict[str, list[Entry]] = field(default_factory=dict)  # entries by parameter of `forward`
    # The entries on inputs that keep a tensor, whose gradient is to be that of this use of it.
    probed: list[Entry] = field(default_factory=list)
    # Entries on parameters, buffers and attributes, by attribute path.
    tensors: dict[str, list[Entry]] = field(default_factory=dict)
    output: list[Entry] = field(default_factory=list)  # entries on the output
    skips: list[Entry] = field(default_factory=list)  # the entries that replace the call
    # Entries on ops, by the id of the code object of the innermost step of their call site (and code without any that
    # a run reached); `None` if there are none.
    sites: dict[int, PatchedCode] | None = None
    graph: CompiledGraphModule | None = None  # the graph that runs in place of the module's code, if there is one
    in_graph: dict[str, list[Entry]] = field(default_factory=dict)  # entries on its nodes, by name
    positions: dict[str, int] = field(default_factory=dict)  # the positions in a call of `inputs`; -1 if by name
    packed: set[str] = field(default_factory=set)  # those of `tensors` that hold a quantized weight
    changes_inputs: bool = False  # whether a patch may change an input
    changes_output: bool = False
    # Whether nothing is patched in this frame but its output, so that the module runs as it is.
    is_bare: bool = False
    # Whether it runs under the function mode: its ops are patched, or what its fused kernel skips.
    needs_mode: bool = False

    def below(self) -> list[FramePlan]:
        """Returns the plans of the frames that are called from here."""
        return [plan for by_index in self.calls.values() for plan in by_index.values()]

    def add_call(self, plan: FramePlan) -> None:
        """Adds the plan of a frame that is called from here."""
        assert plan.frame.call is not None
        self.calls.setdefault(id(plan.frame.module), {})[plan.frame.call.call_index] = plan

    def add(self, entry: Entry) -> None:
        """Adds an entry of this frame."""
        self.entries.append(entry)
        node = entry.target.node
        if node.kind == "input" and entry.keeps_whole:
            self.probed.append(entry)
        if entry.patches[0].replaces_call:
            self.skips.append(entry)
        elif node.kind == "output":
            self.output.append(entry)
            self.changes_output = self.changes_output or not entry.observes_only
        elif self.graph is not None:
            is_changed_input = node.kind == "input" and not entry.observes_only
            if is_changed_input and (problem := self.graph.input_problem(node)) is not None:
                raise PatchMapError(f"{entry.target.path!r} {problem}; patch the nodes in the graph that use its value")
            self.in_graph.setdefault(node.name, []).append(entry)
        elif node.kind == "input":
            self.inputs.setdefault(node.target, []).append(entry)
            self.changes_inputs = self.changes_inputs or not entry.observes_only
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
        if at_call.inside is None:
            at_call.inside = FramePlan(self.frame)
        at_call.inside.entries.append(entry)
        return at_call.inside

    def _at(self, site: Site, occurrence: int) -> SiteEntries:
        """Returns the entries at one call site and occurrence, for new ones to be added."""
        (code, offset), *above = reversed(site.steps)
        chain = tuple(number for outer, at in above for number in (id(outer), at))
        if self.sites is None:
            self.sites = {}
        patched = self.sites.setdefault(id(code), PatchedCode(code))
        by_occurrence = patched.by_offset.setdefault(offset, {}).setdefault(chain, {})
        return by_occurrence.setdefault(occurrence, SiteEntries())

    def _runs_unfused(self) -> bool:
        below = self.below()
        if isinstance(self.frame.module, torch.nn.TransformerEncoder):  # its layers themselves are called
            below = [plan for plan in below if plan.sites is not None or plan.calls]
        return bool(below)

    def settle(self) -> None:
        """Derives the rest, when all entries are added to this plan and to those below it."""
        if self.inputs:
            for position, parameter in enumerate(self.frame.parameters):
                self.positions[parameter.name] = position if parameter.kind in _POSITIONAL else -1
        if self.tensors:
            self.packed = {path for path in self.tensors if held_by(self.frame.module, path) is not None}
        self.needs_mode = self.sites is not None or (isinstance(self.frame.module, _FUSED) and self._runs_unfused())
        self.is_bare = not (self.inputs or self.tensors or self.graph or self.skips or self.needs_mode)


@dataclass(frozen=True)
class Plan:
    """What a patched run needs: made once, and used each time that a context with the same patches is entered."""

    frames: Sequence[FramePlan]  # the frames that a run must recognize, the root first
    by_frame: dict[int, FramePlan]  # the same by the id of the frame
    entries: Sequence[Entry]
    callers: Callers  # which frames call which module
    own_graphs: Sequence[CompiledGraphModule]  # the graph modules whose graph runs in place of the module
    custom: dict[int, FramePlan]  # custom graphs by the id of the module that each replaces, in all its calls
    watched: dict[int, Module]  # the modules whose forwards must be seen, by id
    # The modules whose outputs, or inputs, are changed; and those where they are only kept (inputs with gradients).
    with_outputs: Sequence[Module]
    with_inputs: Sequence[Module]
    with_kept_outputs: Sequence[Module]
    with_kept_inputs: Sequence[Module]
    restricted: Sequence[Entry]  # those of the entries that are for some steps or positions only
    skips: Sequence[Entry]  # those of the entries that replace calls of modules
    unjoined: Sequence[Entry]  # patches on parts of a splice that is not among the patches

    @property
    def root(self) -> FramePlan:
        """The plan of the model's own frame."""
        return self.frames[0]

    @property
    def has_compiled_parts(self) -> bool:
        """Whether `torch.compile` compiled a module that a watched one is in, or one that runs under the mode.

        Others run as without patches. This is asked on each entry, so it does not look at all modules.
        """
        if not may_compile():
            return False
        root = self.root.frame.module
        for parent, name, child in self._links:
            if name not in parent._modules or parent._modules[name] is not child:
                return has_compiled_parts(root)  # it was replaced: by a compiled one, perhaps
        return is_any_compiled([root, *(child for _, _, child in self._links)])

    @functools.cached_property
    def _links(self) -> Sequence[tuple[Module, str, Module]]:
        """The modules on the way to the watched ones, and those under the mode, with their names in their parents."""
        found: dict[int, tuple[Module, str, Module]] = {}
        waiting = list(self.watched.values())
        waiting += [module for plan in self.frames if plan.needs_mode for module in plan.frame.module.modules()]
        for module in waiting:
            link = self.callers.parents.get(id(module))
            if link is not None and id(module) not in found:
                found[id(module)] = link
                waiting.append(link[0])
        return list(found.values())

    @functools.cached_property
    def sees_ops(self) -> bool:
        """Whether some frame runs under the function mode."""
        return any(plan.needs_mode for plan in self.frames)

    def with_more(self, entries: Sequence[Entry]) -> Plan:
        """Returns the plan for `entries` after the patches of this one."""
        if not entries:
            return self
        return make_plan(self.root.frame, [*self.entries, *entries], self.callers, self.own_graphs)


def make_plan(
    root: Frame, entries: Sequence[Entry], callers: Callers, own_graphs: Sequence[CompiledGraphModule] = ()
) -> Plan:
    """Returns the plan of a run with `entries`, in their order, and with `own_graphs`."""
    entries = joined_with_splices(entries)
    found = callers.frames_to_recognize(root, [*(g.frame for g in own_graphs), *(e.target.frame for e in entries)])
    plans = {id(frame): FramePlan(frame) for frame in found}
    for graph in own_graphs:
        plans[id(graph.frame)].graph = graph
    for plan in list(plans.values())[1:]:
        _nearest_above(plan.frame, plans).add_call(plan)
    for entry in sorted(entries, key=operator.attrgetter("rank")):
        if own_graphs:
            _refuse_before_hooks(entry, plans)
        plans[id(entry.target.frame)].add(entry)
    for plan in plans.values():
        plan.settle()
    outputs, inputs, kept_outputs, kept_inputs = [dict[int, Module]() for _ in range(4)]
    for plan in plans.values():
        module = plan.frame.module
        if not (plan.output or plan.inputs or plan.probed) or not takes_hooks(module):
            continue
        if plan.output:
            (outputs if plan.changes_output else kept_outputs)[id(module)] = module
        if plan.changes_inputs:
            inputs[id(module)] = module
        elif plan.probed:
            kept_inputs[id(module)] = module
    custom = {
        id(graph.frame.module): FramePlan(graph.frame, graph=graph)
        for graph in reversed(own_graphs)
        if graph.frame.custom_graph is not None
    }
    return Plan(
        list(plans.values()),
        plans,
        entries,
        callers,
        own_graphs,
        custom,
        {id(frame.module): frame.module for frame in found},
        list(outputs.values()),
        list(inputs.values()),
        list(kept_outputs.values()),
        [module for key, module in kept_inputs.items() if key not in inputs],
        [entry for entry in entries if entry.restriction is not None],
        [entry for entry in entries if entry.patches[0].replaces_call],
        [entry for entry in entries if isinstance(entry.patches[0], InsidePatch)],
    )


def _nearest_above(frame: Frame, plans: dict[int, FramePlan]) -> FramePlan:
    """Returns the plan of the innermost frame around `frame` that has one; the root has one."""
    above = frame.parent
    while above is not None and id(above) not in plans:
        above = above.parent
    return plans[id(above)]


def _refuse_before_hooks(entry: Entry, plans: dict[int, FramePlan]) -> None:
    """Raises if hooks change a module's output, and the graph that calls it has these operations as its own."""
    frame, call = entry.target.frame, entry.target.frame.call
    above = plans.get(id(frame.parent))
    if entry.target.node.kind != "output" or not frame.conditions.hooks or above is None or above.graph is None:
        return
    if call is None or call.site is None or call not in above.frame.nodes:
        return
    steps = call.site.steps
    after = above.frame.nodes[above.frame.nodes.index(call) + 1 :]
    made = [n for n in after if n.site is not None and n.site != call.site and n.site.steps[: len(steps)] == steps]
    if made:
        raise PatchMapError(
            f"{entry.target.path!r} is what forward hooks of the module returned, and their operations are part of the "
            f"graph that calls it, which was edited: patch {format_path((*above.frame.path, made[-1].name))!r}"
        )


class Callers:
    """The frames that call each module, in a whole capture."""

    def __init__(self, root: Frame) -> None:
        self._root = root.module
        self._frames: dict[int, list[Frame]] = {}
        for frame in root.walk():
            self._frames.setdefault(id(frame.module), []).append(frame)
        self._has_fused = any(isinstance(frames[0].module, _FUSED) for frames in self._frames.values())

    @functools.cached_property
    def parents(self) -> dict[int, tuple[Module, str, Module]]:
        """The parent of each submodule (by id), its name there, and the submodule."""
        modules = self._root.modules()
        return {id(child): (m, name, child) for m in modules for name, child in m._modules.items() if child is not None}

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
