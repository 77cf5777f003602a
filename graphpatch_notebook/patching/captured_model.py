"""A captured model: the model, the records of its capture, and what is derived from these."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch.nn import Module

from graphpatch_notebook.capture import parameter_without_values
from graphpatch_notebook.capture.inputs import ExampleInputs
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import GraphError, UnknownPathError
from graphpatch_notebook.graphs import CompiledGraphModule, GraphModule, build_hierarchy, own_graphs
from graphpatch_notebook.graphs.build import connect_records
from graphpatch_notebook.inspection.node_map import NodeMap
from graphpatch_notebook.inspection.resolution import Target, Unresolvable
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patching.patch_map import entries_of, refuse_unjoined, targets_of
from graphpatch_notebook.patching.plan import Callers, Entry, Plan
from graphpatch_notebook.patching.sharding import sharding_of

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
        drawn: Sequence[str] | None = None,
        unstored: Mapping[str, str] | None = None,
    ) -> None:
        self.module = module
        self.root = root
        self.options = options
        self.sharding = sharding_of(root)  # `None` if each process runs all of the model
        self.examples = examples  # the example inputs; `None` if there were none, as for a loaded graph
        self.drawn = drawn  # the names of the random generators that the capture drew from; `None` if that is unknown
        # The paths of frames without a graph in the file it was loaded from, with the reasons.
        self.unstored = dict(unstored or {})
        self.permanent: tuple[
            PatchLists, ...
        ] = ()  # the patch maps that all calls have (`PatchableGraph.edit`), in order
        self._lacks_weights = bool(parameter_without_values(module))
        self._hierarchy: GraphModule | None = None
        self._derived: _Derived | None = None
        custom = [frame for frame in root.walk() if frame.custom_graph is not None]
        for frame in custom:
            connect_records(frame, frame.custom_graph)
        self._has_custom_graphs = bool(custom)

    def edited(self, patch_map: Any = None) -> CapturedModel:
        """Returns another captured model with the same graphs, and no contexts, whose calls also have these patches."""
        result = copy.copy(self)
        result._hierarchy = self.hierarchy
        if patch_map is not None:
            plan = self.plan(self.entries_of(patch_map))
            before = self.permanent_plan
            if (together := plan if before is None else before.with_more(plan.entries)).unjoined:
                refuse_unjoined(together)
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

    @property
    def edits(self) -> int:
        """How often graphs were edited."""
        return 0 if self._hierarchy is None else self._hierarchy.edits

    @property
    def runs_own_graphs(self) -> bool:
        """Whether there are graphs that replace their module: calls without patches run these, too."""
        return self._has_custom_graphs or (self._hierarchy is not None and self._hierarchy.calls_own_graphs)

    def renew(self) -> None:
        """Forgets what was derived from the records: these have changed."""
        self._derived = None

    # -- patches -------------------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> NodeMap:
        """All paths that can be patched."""
        return self._current().nodes

    @property
    def callers(self) -> Callers:
        """Which frames call which module."""
        return self._current().callers

    def entries_of(self, patch_map: Any) -> list[Entry]:
        """Returns the patches of a patch map with their targets: see `patch_map.entries_of`."""
        derived = self._current()
        return entries_of(derived.nodes, patch_map, derived.targets, self.sharding)

    def paths_of(self, text: str) -> list[str]:
        """Returns the paths, or names of components, of the targets of a text: see `targets_of`."""
        return [target.text for target in self.targets_of(text)]

    def targets_of(self, text: str) -> list[Target]:
        """Returns what a path, a component name, or a pattern leads to, in order, or raises an `UnknownPathError`."""
        derived = self._current()
        found = derived.targets.get(text)
        if found is None:
            try:
                found = derived.targets[text] = targets_of(derived.nodes, text)
            except Unresolvable as error:
                raise UnknownPathError(error.message) from None
            for target in found:
                derived.targets.setdefault(target.text, [target])
        return found

    def plan(self, entries: Sequence[Entry]) -> Plan:
        """Returns the plan of runs with the patches of `entries`."""
        derived = self._current()
        return derived.plan(entries) if entries else derived.without_patches

    @property
    def has_patched_calls(self) -> bool:
        """Whether calls outside of any context differ from those of the model."""
        runs_them_itself = getattr(self.module, "runs_its_graphs", False) and not self.edits  # a loaded graph
        return bool(self.permanent) or (self.runs_own_graphs and not runs_them_itself)

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
            derived = self._derived = _Derived(self.root, graphs, self.edits)
        return derived


@dataclass(eq=False)
class _Derived:
    """What is derived from the records of a capture, until a graph is edited: `edits` is how often that was."""

    root: Frame
    own_graphs: Sequence[CompiledGraphModule]
    edits: int
    targets: dict[str, list[Target]] = field(default_factory=dict)  # by the paths that were resolved so far
    permanent: Plan | None = None  # of the permanent patches, when it was first needed

    @functools.cached_property
    def callers(self) -> Callers:
        return Callers(self.root)

    @functools.cached_property
    def nodes(self) -> NodeMap:
        return NodeMap(self.root)

    @functools.cached_property
    def without_patches(self) -> Plan:
        """The plan of runs in which graphs that are their module run, without patches."""
        return self.plan(())

    def plan(self, entries: Sequence[Entry]) -> Plan:
        return Plan(self.root, entries, self.callers, self.own_graphs)
