"""The runs of an attribution: a clean one and corrupted ones for each group of nodes that memory is granted for.

clean run      without gradients: values                       (clean_values)
first run      on the corrupted inputs: differences, roots     (gradient_run)
further runs   of integrated gradients, between the two        (gradient_run)
backward       of each of these but for the integrated first   (reductions)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import Node as GradientNode

from graphpatch_notebook.capture.records import CallNode, Frame, Node, Ref, Structure, refs_in
from graphpatch_notebook.checks.model_state import ModuleState
from graphpatch_notebook.errors import ExperimentError, PatchMapError
from graphpatch_notebook.execution import PatchContext
from graphpatch_notebook.experiments.attribution.scored_nodes import ScoredNode, Scores
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import noted_metric
from graphpatch_notebook.experiments.methods.value_sources import SourceValue, sources_of
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.torch_compat import version_of, without_torch_functions
from graphpatch_notebook.warning_places import collected_warnings


class Stage:
    """Whom the patches of all runs tell what comes up: the one who watches the run that is on."""

    def __init__(self) -> None:
        self.listener: Callable[[ScoredNode, Any], Any] = _nobody


class WatchPatch(Patch[Any]):
    """Shows each value to whoever is on stage, who may put another one in its place."""

    any_shape = True

    def __init__(self, node: ScoredNode, stage: Stage) -> None:  # not that of a dataclass: there are thousands of these
        self.node = node
        self.stage = stage

    def op(self, original_output: Any) -> Any:
        if type(original_output) is not Tensor:
            return self.stage.listener(self.node, original_output)
        with without_torch_functions():  # else each look at it would go through the mode of the run
            return self.stage.listener(self.node, original_output)


class LookPatch(WatchPatch):
    """The same, where the value must stay."""

    observes_only = True


@dataclass
class Found:
    """What comes of the runs.

    Attributes:
        clean: What the metric gives for the clean run.
        corrupted: What it gives for the corrupted one.
        scores: By path: without dimensions, or by index along the dimension of the positions.
        problems: For paths without a score, the reason.
        roots: Where the runs begin to differ.
        remarks: What else is to be known, in words.
    """

    clean: float = float("nan")
    corrupted: float = float("nan")
    scores: dict[str, Scores] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    roots: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass
class Compared:
    """A group of nodes whose values are known in both runs.

    Attributes:
        differences: The differences.
        first: The run on the corrupted inputs, and what the metric gave for it; `None` once its graph is let go.
        left: The paths that are not of the group, but were to be.
    """

    differences: Differences
    first: tuple[GradientRun, Tensor] | None
    left: set[str]


class AttributionRuns:
    """All runs of one attribution.

    Args:
        pg: The graph.
        metric: From the output to a single number.
        clean: The clean inputs.
        corrupted: The corrupted ones.
        nodes: All nodes that hold floating-point tensors, in order of execution.
        kept: For paths with positions or heads, the dimensions of the value that these are.
        fractions: Where, on the way from corrupted to clean, gradients are taken: `[0.0]` for the corrupted run.
        max_bytes: How many bytes the values that are kept, and their gradients, may take.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        metric: Callable[[Any], Any],
        clean: Inputs,
        corrupted: Inputs,
        nodes: Sequence[ScoredNode],
        kept: Mapping[str, Kept],
        fractions: Sequence[float],
        max_bytes: int,
    ) -> None:
        self._pg = pg
        self._metric = metric
        self._clean = clean
        self._corrupted = corrupted
        self._nodes = [node for node in nodes if not node.is_parameter]
        self._kept = kept
        self._fractions = fractions
        self._max_bytes = max_bytes
        self._stage = Stage()
        self._roots = Roots()
        self._copied: set[str] = set()
        self._found = Found()
        self._found.scores = {node.path: np.zeros(()) for node in nodes if node.is_parameter}

    def run(self) -> Found:
        """Returns scores and problems. The model, and the random state, are as before."""
        context = self._context()
        with collected_warnings() as messages, torch.inference_mode(False), context:
            state = ModuleState(captured(self._pg).module)
            with afterwards(state.restore):
                self._run_all(state)
        self._stage.listener = _nobody
        self._found.roots = list(dict.fromkeys(path for path, _ in self._roots.clean))
        # What does not come up is told in the result.
        self._found.remarks = [message for message in messages if "never fired" not in message]
        return self._found

    def _context(self) -> PatchContext:
        context = self._pg.patch(self._patches())
        own = [node for node in self._nodes if node.frame.has_own_graph and node.node.kind == "input"]
        if not own:
            return context
        try:
            with context:
                return context
        except PatchMapError:  # edited graphs, which look at sizes of their inputs themselves
            for node in own:
                node.can_be_cut = False
            return self._pg.patch(self._patches())

    def _patches(self) -> dict[str | NodePath, Patch[Any]]:
        return {node.path: (WatchPatch if node.can_be_cut else LookPatch)(node, self._stage) for node in self._nodes}

    def _run_all(self, state: ModuleState) -> None:
        wanted = {node.path for node in self._nodes if node.is_compared}
        if list(self._fractions) != [0.0]:
            wanted = self._scored_on_the_way(wanted, state)
        while wanted:
            wanted = self._scored(wanted, state)
        infinite = {path for path, score in self._found.scores.items() if not np.isfinite(score).all()}
        while infinite:
            infinite = self._scored(infinite, state, is_careful=True)
        for path in [path for path, score in self._found.scores.items() if not np.isfinite(score).all()]:
            self._found.problems[path] = f"its score is not finite: {self._found.scores.pop(path).sum()}"

    # -- one group -----------------------------------------------------------------------------------------------------

    def _scored_on_the_way(self, wanted: set[str], state: ModuleState) -> set[str]:
        """Finds all roots, which are to be in place in each run on the way; scores the paths if all fit at once."""
        compared = self._compared(wanted, state)
        if not compared.left:
            self._score(compared, state)
            return set()
        left = compared.left
        del compared
        while left:
            left = self._compared(left, state).left
        return wanted

    def _scored(self, wanted: set[str], state: ModuleState, is_careful: bool = False) -> set[str]:
        """Scores as many of some paths as fit; returns the others."""
        compared = self._compared(wanted, state, is_careful)
        self._score(compared, state)
        return compared.left

    def _compared(self, wanted: set[str], state: ModuleState, is_careful: bool = False) -> Compared:
        """Runs the model on the clean inputs, and on the corrupted ones to see where they differ."""
        clean = CleanValues(wanted, self._copied, self._max_bytes)
        with torch.no_grad():
            output = self._output(clean, self._clean, state)
            with noted_metric(output):
                self._found.clean = float(_number(self._metric(output)))
        differences = Differences(clean, is_careful)
        run = GradientRun(differences, self._roots)
        metric = self._gradient_run(run, state)
        self._found.corrupted = float(metric.detach())
        self._copied |= differences.rewritten
        left = clean.left | differences.rewritten
        for path in wanted - left:
            problem = clean.problems.get(path) or _uneven(
                len(clean.by_path.get(path, ())), run.counts.get(path, -1) + 1
            )
            if problem is not None:
                differences.problems.setdefault(path, problem)
        for path in differences.rewritten:
            run.by_path.pop(path, None)
        differences.settle()
        return Compared(differences, (run, metric), left)

    def _score(self, compared: Compared, state: ModuleState) -> None:
        differences = compared.differences
        problems = dict(differences.problems)
        totals: dict[str, Scores] = {}
        first, compared.first = compared.first, None
        for fraction in self._fractions:
            if first is None or fraction:
                first = None
                run = GradientRun(differences, self._roots, fraction, is_first=False)
                metric = self._gradient_run(run, state)
            else:
                run, metric = first
            scores = scores_of(metric, run, differences, self._kept, problems)
            for path, score in scores.items():
                totals[path] = totals.get(path, 0.0) + score / len(self._fractions)
        self._found.problems |= problems
        self._found.scores |= {path: score for path, score in totals.items() if path not in problems}

    # -- one run -------------------------------------------------------------------------------------------------------

    def _output(self, listener: Callable[[ScoredNode, Any], Any], inputs: Inputs, state: ModuleState) -> Any:
        state.restore()  # the same random numbers, and the same buffers, in all runs
        fresh = inputs.fresh()
        self._stage.listener = listener
        return self._pg(*fresh.args, **fresh.kwargs)

    def _gradient_run(self, run: GradientRun, state: ModuleState) -> Tensor:
        with torch.enable_grad():
            metric = _number(self._metric(self._output(run, self._corrupted, state)))
        run.finish()
        if run.edges and not metric.requires_grad:
            raise ExperimentError(
                "the metric has no gradient: it must compute a tensor from the output by operations that can be "
                "differentiated, without argmax, .item(), .detach() or torch.no_grad()"
            )
        return metric


def _nobody(_: ScoredNode, value: Any) -> Any:
    return value


def _uneven(clean: int, corrupted: int) -> str | None:
    """Returns in words that a node did not come up as often in both runs, if so."""
    if clean == corrupted:
        return None if clean else "it never came up"
    if not clean or not corrupted:
        return f"it came up in the {'clean' if clean else 'corrupted'} run only"
    return f"it came up {clean} times in the clean run, {corrupted} times in the corrupted one"


def _number(value: Any) -> Tensor:
    if value is None:
        raise ExperimentError("the metric gave None: does it lack a return?")
    if not isinstance(value, Tensor):
        shown = f"{value!r} of type" if isinstance(value, (int, float)) else "a value of type"
        raise ExperimentError(
            f"the metric gave {shown} {type(value).__name__}: to have a gradient it must give a tensor with a single "
            "number (no .item(), no float(), not the whole output of the model)"
        )
    if value.numel() != 1:
        raise ExperimentError(
            f"the metric gave a tensor of shape {tuple(value.shape)}: it must give a single number, say its .mean()"
        )
    if not value.is_floating_point():
        raise ExperimentError(f"the metric gave a number of dtype {value.dtype}: it has no gradient")
    return value.reshape(())


@dataclass(slots=True, eq=False)
class CleanValue:
    """One value of the clean run.

    Attributes:
        tensor: The value.
        version: How often it had been written into; `None` where nobody else can write into it.
    """

    tensor: Tensor
    version: int | None

    @property
    def is_current(self) -> bool:
        """Whether it is still as it came up: the model may write into it through another tensor."""
        return self.version is None or version_of(self.tensor) == self.version


class CleanValues:
    """What watches the clean run.

    Args:
        wanted: The paths whose values are to be kept.
        copied: Those of them that the model writes into later, by whatever way: they are copied.
        max_bytes: How many bytes the values, and as many for their gradients, may take; one value is kept in any case.

    Attributes:
        by_path: The values that are kept, each time that they came up.
        left: Paths whose values did not fit.
        problems: Paths whose values can have no score, with the reason.
    """

    def __init__(self, wanted: Collection[str], copied: Collection[str], max_bytes: int) -> None:
        self._wanted = wanted
        self._copied = copied
        self._available = max_bytes
        self._by_id: dict[int, CleanValue] = {}
        self.by_path: dict[str, list[CleanValue]] = {}
        self.left: set[str] = set()
        self.problems: dict[str, str] = {}

    def __call__(self, node: ScoredNode, value: Any) -> Any:
        path = node.path
        if path not in self._wanted or path in self.left or path in self.problems:
            return value
        problem = node.problem(value)
        if problem is not None:
            self.problems[path] = problem
            self.by_path.pop(path, None)
            return value
        kept = self._kept(node, value)
        if kept is not None:
            self.by_path.setdefault(path, []).append(kept)
        else:
            self.left.add(path)
            self.by_path.pop(path, None)
        return value

    def _kept(self, node: ScoredNode, value: Tensor) -> CleanValue | None:
        known = self._by_id.get(id(value))
        if known is not None and known.tensor is value and known.is_current:
            return known
        cost = value.numel() * max(value.element_size(), 4) * 2
        if cost > self._available and self._by_id:
            return None
        self._available -= cost
        if node.is_state or node.node.is_mutated_later or node.path in self._copied:
            kept = CleanValue(value.clone(), None)
        elif value.numel() * value.element_size() * 2 < value.untyped_storage().nbytes():
            kept = CleanValue(value.clone(), None)  # else all of that storage would be kept for a part of it
        else:
            kept = CleanValue(value, version_of(value))  # the very tensor: its id is its own as long as it lives
        self._by_id[id(kept.tensor)] = kept
        return kept

    def release(self) -> None:
        """Lets all values go."""
        self.by_path.clear()
        self._by_id.clear()


Occurrence: TypeAlias = "tuple[str, int]"
"""A path, and how often it came up before in the same run."""

_NO_GRADIENT = (
    "it differs between the runs, but by what cannot be differentiated (whole numbers, comparisons, .detach(), "
    "torch.no_grad)"
)
_SHARED = "the same tensor as under another name, which is used elsewhere too, and cannot be told apart from it here"


class Roots:
    """Where the runs begin to differ, and what is known of what follows from that.

    Attributes:
        clean: The clean values at the roots.
        tracked: The nodes (by id) that autograd traces back to a root.
        untracked: Those whose values differ, but were computed while gradients were switched off.
        flow: What the records tell.
    """

    def __init__(self) -> None:
        self.clean: dict[Occurrence, Tensor] = {}
        self.tracked: set[int] = set()
        self.untracked: set[int] = set()
        self.flow = ValueFlow()

    def may_begin_at(self, node: ScoredNode) -> bool:
        """Whether a value that differs without a gradient is to be a root.

        Not if it was computed from tracked values all the same: what a model detaches, counts or sorts must stay free
        of gradients, which such code does not expect. But where a part of the model is run under `torch.no_grad`, what
        comes of it is a root for the part behind it.
        """
        if not node.can_be_cut:
            return False
        if any(id(inner) in self.untracked for inner in self.flow.made_of(node)):
            return True
        return not self.flow.comes_from(node, self.tracked)


class Differences:
    """The differences of the values of a group of nodes, each tensor once.

    Attributes:
        tensors: Clean value - corrupted value; half-precision values in float32.
        by_path: For each path the numbers of its differences, each time that it came up; `None` where the values are
            the same in both runs, bit for bit.
        problems: Paths that can have no score, with the reason.
        rewritten: Paths whose clean value the model has written into later, without a mark of that in the records.
    """

    def __init__(self, clean: CleanValues, is_careful: bool) -> None:
        self.clean = clean
        self.is_careful = is_careful
        self.tensors: list[Tensor] = []
        self.by_path: dict[str, list[int | None]] = {}
        self.problems: dict[str, str] = {}
        self.rewritten: set[str] = set()
        self._known: dict[tuple[int, Any], int] = {}

    def add(self, clean: CleanValue, value: Tensor, origin: Any) -> int:
        """Returns the number of the difference; the same where both values came up before under another name.

        Args:
            clean: The value of the clean run.
            value: The value of the corrupted run.
            origin: The same object for all names of that value.
        """
        key = (id(clean), origin)
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.tensors)
            self.tensors.append(self._difference(clean.tensor.detach(), value.detach()))
        return number

    def settle(self) -> None:
        """Lets the values themselves go, and the graph of the corrupted run."""
        self.clean.release()
        self._known.clear()

    def _difference(self, clean: Tensor, value: Tensor) -> Tensor:
        if clean.element_size() < 4:
            clean, value = clean.float(), value.float()
        difference = clean - value
        # Infinities that both runs have (of masked scores) are no difference.
        return torch.where(clean == value, 0, difference) if self.is_careful else difference


class GradientRun:
    """What watches one run with gradients.

    Args:
        differences: Filled if `is_first`, else only read.
        roots: Where the runs begin to differ: added to if `is_first`.
        fraction: What is put at the roots: 0 for the corrupted value, 1 for the clean one.
        is_first: Whether this is the run whose values are compared with the clean ones.

    Attributes:
        counts: How often each path came up.
        edges: The gradient edges of the values.
        slots: For each edge, the difference that its gradient is for.
        by_path: For each path the numbers of its slots, each time that it came up; `None` where it has no gradient, or
            needs none.
    """

    def __init__(self, differences: Differences, roots: Roots, fraction: float = 0.0, *, is_first: bool = True) -> None:
        self._differences = differences
        self._clean: Mapping[str, list[CleanValue]] = differences.clean.by_path
        self._roots = roots
        self._fraction = fraction
        self._is_first = is_first
        self.counts: dict[str, int] = {}
        self._depends: dict[Any, bool] = {None: False}
        self._origins: dict[tuple[Any, int], tuple[Any, int]] = {}
        self._named: dict[tuple[Any, int], ScoredNode] = {}
        self._shared: set[tuple[Any, int]] = set()
        self._kept_alive: list[Tensor] = []
        self.is_over = False
        self._slots: dict[tuple[Any, int, int], int] = {}
        self.edges: list[GradientEdge] = []
        self.slots: list[int] = []
        self.by_path: dict[str, list[int | None]] = {}

    def __call__(self, node: ScoredNode, value: Any) -> Any:
        path = node.path
        if self.is_over:  # recomputed in backward
            is_root = (path, 0) in self._roots.clean
            return _written_into_at_will(value.detach()) if is_root else value
        occurrence = self.counts[path] = self.counts.get(path, -1) + 1
        if isinstance(value, Tensor) and value.requires_grad:
            value = self._under_own_name(node, value)
        is_root = (path, occurrence) in self._roots.clean
        known = self._clean if self._is_first else self._differences.by_path
        if not is_root and (path not in known or path in self._differences.problems):
            return value
        problem = self._problem(node, occurrence, value)
        if problem is not None:
            self._differences.problems.setdefault(path, problem)
            return value
        if is_root:
            value, edge = self._cut(node, value, self._roots.clean[path, occurrence])
            self._note(path, occurrence, value, edge)
            return value
        return self._compared(node, occurrence, value)

    def finish(self) -> None:
        """Says that the forward is over: what comes up from now on is recomputed in backward."""
        self.is_over = True
        self._depends.clear()
        self._origins.clear()
        self._named.clear()
        self._shared.clear()

    # -- values --------------------------------------------------------------------------------------------------------

    def _under_own_name(self, node: ScoredNode, value: Tensor) -> Tensor:
        """Returns the value, or a view of it where the same tensor came up before under another name.

        What a module is given may be used by others, too (the residual stream): a patch on the module's input would
        change it for the module only, and so its gradient is to be that of this one use.
        """
        edge = (value.grad_fn, value.output_nr)
        if edge[0] is None or node.node.op == "requires_grad_":  # which makes no value
            return value
        before, self._named[edge] = self._named.get(edge), node
        if before is None:
            self._origins[edge] = edge
            return value
        stays = node.node.is_mutated_later or node.node.is_in_place or value.layout is not torch.strided
        stays |= node.is_in_container  # which would have to be another one
        if stays or not node.can_be_cut or not torch.is_grad_enabled():
            # A view would keep the gradient of what the model writes into it to itself.
            if not torch.is_grad_enabled() or not self._roots.flow.has_one_use(before):
                self._shared.add(edge)
            if edge in self._shared:
                self._differences.problems.setdefault(node.path, _SHARED)
            return value
        alias = value.view_as(value)
        alias_edge = (alias.grad_fn, alias.output_nr)
        self._named[alias_edge] = node
        self._origins[alias_edge] = self._origins[edge]
        return alias

    def _compared(self, node: ScoredNode, occurrence: int, value: Tensor) -> Tensor:
        path, differences = node.path, self._differences
        if not self._is_first:
            if value.requires_grad and self._depends_on_root(value):
                self._note(path, occurrence, value, self._edge(value))
            else:
                self.by_path.setdefault(path, []).append(None)
            return value
        clean = self._clean[path]
        if occurrence >= len(clean):
            return value
        if not clean[occurrence].is_current:
            differences.rewritten.add(path)
        if value.requires_grad and self._depends_on_root(value):
            self._roots.tracked.add(id(node.node))
            self._note(path, occurrence, value, self._edge(value))
        elif torch.equal(clean[occurrence].tensor, value):
            differences.by_path.setdefault(path, []).append(None)
            self.by_path.setdefault(path, []).append(None)
        elif path in differences.rewritten:
            pass  # which of the two it is will be known when the value is copied in time
        elif not torch.is_grad_enabled():
            self._roots.untracked.add(id(node.node))
            differences.problems[path] = _NO_GRADIENT
        elif self._roots.may_begin_at(node):
            self._roots.tracked.add(id(node.node))
            self._roots.clean[path, occurrence] = clean[occurrence].tensor.detach()
            value, edge = self._cut(node, value, clean[occurrence].tensor)
            self._note(path, occurrence, value, edge)
        else:
            differences.problems[path] = _NO_GRADIENT
        return value

    def _problem(self, node: ScoredNode, occurrence: int, value: Any) -> str | None:
        clean = self._clean.get(node.path, ())
        if occurrence >= len(clean) or not isinstance(value, Tensor):
            return node.problem(value)
        mine = clean[occurrence].tensor  # in which nothing was wrong
        if mine.shape == value.shape and mine.dtype == value.dtype and mine.device == value.device:
            return None
        return node.problem(value) or _unlike(mine, value)

    def _cut(self, node: ScoredNode, value: Tensor, clean: Tensor) -> tuple[Tensor, GradientEdge]:
        """Returns a tensor that depends on a new leaf only, and the leaf's edge."""
        start = value.detach()
        if self._fraction:
            start = torch.where(start == clean, start, torch.lerp(start, clean.detach(), self._fraction))
        copied = _written_into_at_will(start)
        edge = GradientEdge(_node_of(copied), copied.output_nr)
        self._depends[copied.grad_fn] = True
        self._origins[edge.node, edge.output_nr] = (edge.node, edge.output_nr)
        self._named[edge.node, edge.output_nr] = node
        return copied, edge

    def _edge(self, value: Tensor) -> GradientEdge:
        node = _node_of(value)
        if BackwardCFunction in type(node).__mro__:
            # The Python object of such a node does not keep it alive; a view of the value does.
            self._kept_alive.append(value.view_as(value))
        return GradientEdge(node, value.output_nr)

    def _note(self, path: str, occurrence: int, value: Tensor, edge: GradientEdge) -> None:
        differences = self._differences
        if self._is_first:
            clean = self._clean.get(path)
            if clean is None or occurrence >= len(clean):  # a root of an earlier group
                return
            key = (edge.node, edge.output_nr)
            number: int | None = differences.add(clean[occurrence], value, self._origins.get(key, key))
            differences.by_path.setdefault(path, []).append(number)
        else:
            numbers = differences.by_path.get(path)
            if numbers is None:
                return
            number = numbers[occurrence] if occurrence < len(numbers) else None
        slot = None if number is None else self._slot(edge, number)
        self.by_path.setdefault(path, []).append(slot)

    def _slot(self, edge: GradientEdge, number: int) -> int:
        key = (edge.node, edge.output_nr, number)
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = len(self.slots)
            self.edges.append(edge)
            self.slots.append(number)
        return slot

    def _depends_on_root(self, value: Tensor) -> bool:
        """Whether autograd leads from a value to a root. Each node of its graph is looked at once."""
        known = self._depends
        waiting: list[Any] = [value.grad_fn]
        while waiting:
            node = waiting[-1]
            if node in known:
                waiting.pop()
                continue
            inner = [other for other, _ in node.next_functions]
            if any(known.get(other, False) for other in inner):
                known[node] = True
            elif all(other in known for other in inner):
                known[node] = False
            else:
                waiting += [other for other in inner if other not in known]
        return known[value.grad_fn]


def _node_of(value: Tensor) -> GradientNode:
    assert value.grad_fn is not None
    return value.grad_fn


def _written_into_at_will(value: Tensor) -> Tensor:
    """Returns a copy of a leaf with this value: the model may write into it, which it may not into a leaf."""
    if value.is_inference():  # from a part of the model that runs in inference mode
        value = value.clone()
    return value.requires_grad_().clone()


def _unlike(mine: Tensor, value: Tensor) -> str:
    if mine.shape != value.shape:
        return f"of shape {tuple(mine.shape)} in the clean run, of shape {tuple(value.shape)} in the corrupted one"
    return f"{mine.dtype} on {mine.device} in the clean run, {value.dtype} on {value.device} in the corrupted one"


@dataclass(frozen=True)
class Kept:
    """The dimensions of a value whose entries get scores of their own; heads come first in these.

    Attributes:
        position: The one that runs along the sequence.
        heads: The one that heads lie in, each in as many entries.
        count: How many heads there are.
    """

    position: int | None = None
    heads: int | None = None
    count: int = 1

    def summed(self, product: Tensor) -> Tensor:
        """Returns the sums of a tensor over what is not kept."""
        kept = [] if self.position is None else [self.position]
        if self.heads is not None:
            product = product.unflatten(self.heads, (self.count, -1))
            kept = [self.heads, *(dim + (dim > self.heads) for dim in kept)]
        others = [dim for dim in range(product.dim()) if dim not in kept]
        sums = product.sum(others) if others else product
        return sums.T if kept != sorted(kept) else sums


Part = tuple[int, Kept | None]
"""The number of a slot, and what of its value is kept."""

_UNREACHED = (
    "no gradient reaches it: the metric does not depend on it, or not in a way that can be differentiated, or the "
    "model writes into a tensor of which it is a view"
)


def scores_of(
    metric: Tensor, run: GradientRun, differences: Differences, kept: Mapping[str, Kept], problems: dict[str, str]
) -> dict[str, Scores]:
    """Returns the scores of one run by path, for its gradients alone; adds to `problems` what has none."""
    wanted = {path: slots for path, slots in run.by_path.items() if path not in differences.problems}
    parts = dict.fromkeys(
        (slot, kept.get(path)) for path, slots in wanted.items() for slot in slots if slot is not None
    )
    by_part = _by_part(metric, run, differences, parts)
    scores: dict[str, Scores] = {}
    for path, slots in wanted.items():
        found = []
        for slot, number in zip(slots, differences.by_path[path], strict=True):
            if number is None:
                found.append(np.zeros(()))
            elif slot is None or (score := by_part[slot, kept.get(path)]) is None:
                problems[path] = _UNREACHED
            else:
                found.append(score)
        if path not in problems:
            scores[path] = found[0] if len(found) == 1 else np.sum(np.broadcast_arrays(*found), axis=0)
    return scores


def _by_part(
    metric: Tensor, run: GradientRun, differences: Differences, parts: Iterable[Part]
) -> dict[Part, Scores | None]:
    """Returns the score of each part; `None` for one that differs between the runs, but has no gradient."""
    if not run.edges:
        return {}
    gradients = _gradients(metric, run)
    tensors: dict[Part, Tensor | None] = {}
    known: dict[Any, Tensor] = {}  # names of one tensor often have one gradient, too
    for slot, kept in parts:
        number, gradient = run.slots[slot], gradients[slot]
        difference = differences.tensors[number]
        if gradient is None:
            tensors[slot, kept] = None if bool(difference.any()) else difference.new_zeros(())
            continue
        key = (number, kept, gradient.data_ptr(), gradient.stride())
        if key not in known:
            known[key] = _reduced(difference, gradient, kept, differences.is_careful)
        tensors[slot, kept] = known[key]
    return _as_arrays(tensors)


def _gradients(metric: Tensor, run: GradientRun) -> list[Tensor | None]:
    try:
        return list(torch.autograd.grad(metric, run.edges, allow_unused=True))
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ExperimentError(f"the gradients of the metric cannot be computed: {error}") from error


def _reduced(difference: Tensor, gradient: Tensor, kept: Kept | None, is_careful: bool) -> Tensor:
    gradient = gradient.to(difference.dtype)
    if kept is None and not is_careful:
        return torch.dot(difference.reshape(-1), gradient.reshape(-1))
    product = difference * gradient
    if is_careful:  # infinite differences that do not matter, and infinite gradients of what does not differ
        product = torch.where((difference == 0) | (gradient == 0), 0, product)
    return product.sum() if kept is None else kept.summed(product)


def _as_arrays(tensors: Mapping[Part, Tensor | None]) -> dict[Part, Scores | None]:
    """Returns the numbers of all tensors: one transfer for each device."""
    arrays: dict[Part, Scores | None] = dict.fromkeys(tensors)
    by_device: dict[torch.device, list[Part]] = {}
    for part, tensor in tensors.items():
        if tensor is not None:
            by_device.setdefault(tensor.device, []).append(part)
    for parts in by_device.values():
        present = [tensor for part in parts if (tensor := tensors[part]) is not None]
        flat = torch.cat([tensor.reshape(-1) for tensor in present]).to("cpu").double().numpy()
        end = 0
        for part, tensor in zip(parts, present, strict=True):
            start, end = end, end + tensor.numel()
            arrays[part] = flat[start:end].reshape(tuple(tensor.shape))
    return arrays


_NO_USE = ("requires_grad_",)
_HOLDERS = (tuple, list, dict, slice, Structure)


class ValueFlow:
    """Follows values through the records of a capture, across frames."""

    def __init__(self) -> None:
        self._uses: dict[int, Counter[int]] = {}

    def has_one_use(self, node: ScoredNode) -> bool:
        """Whether the value of a node is known to be used once, under this name."""
        used, frame = node.node, node.frame
        if node.node.kind == "output":
            if frame.call is None or frame.parent is None:
                return True
            used, frame = frame.call, frame.parent
        if frame.opaque_reason is not None or frame.has_own_graph:
            return False
        uses = self._uses.get(id(frame))
        if uses is None:
            uses = self._uses[id(frame)] = Counter(id(ref.node) for ref in refs_in(frame.output))
            for inner in frame.nodes:
                if inner.op not in _NO_USE:
                    for value in (*inner.args, *inner.kwargs.values()):
                        if type(value) is Ref:
                            uses[id(value.node)] += 1
                        elif isinstance(value, _HOLDERS):
                            uses.update(id(ref.node) for ref in refs_in(value))
        return uses[id(used)] == 1

    def comes_from(self, node: ScoredNode, sources: Collection[int]) -> bool:
        """Whether a value is computed, by whatever operations, from one of some nodes (by id)."""
        waiting = list(_made_of(node.node, node.frame))
        seen: set[int] = set()
        while waiting:
            inner, frame = waiting.pop()
            if id(inner) in sources:
                return True
            if id(inner) not in seen:
                seen.add(id(inner))
                waiting += _made_of(inner, frame)
        return False

    def made_of(self, node: ScoredNode) -> list[Node]:
        """Returns the nodes that a value is directly made of; for a call, the output node of what is called."""
        direct = (inner for inner, _ in _made_of(node.node, node.frame))
        return [_returned(inner) for inner in direct]


def _returned(node: Node) -> Node:
    """Returns the output node of what is called, for a call."""
    return node.frame.output_node if isinstance(node, CallNode) and node.frame.nodes else node


def _made_of(node: Node, frame: Frame) -> Iterator[tuple[Node, Frame]]:
    if node.kind == "output" and frame.opaque_reason is not None:
        yield from ((inner, frame) for inner in frame.nodes if inner.kind in ("input", "call"))
    else:
        yield from ((source.node, source.frame) for source in sources_of(SourceValue(node, frame)))
