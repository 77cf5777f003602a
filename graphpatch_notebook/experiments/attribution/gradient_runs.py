"""The runs of an attribution: one without gradients on the clean inputs, and some with gradients between the two.

The nodes are scored in groups that fit into memory. For each group:

1. A clean run without gradients records the values (`CleanValues`).
2. A run on the corrupted inputs with gradients compares its values with these (`GradientRun`, `Differences`).
3. Integrated gradients take further runs, which are interpolated between the two at the roots.
4. The metric of each run is differentiated once, for all values of the group (`scores_of`).

For one-sided scores, each value is a group of its own, and the clean run is one on the corrupted inputs in which this
value is the clean one.

A *root* is a floating-point value that differs between the runs, although nothing that it is computed from differs. A
new leaf replaces it, so autograd never reaches the weights, whether they require gradients or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import Node as GradientNode

from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.checks.model_state import ModelSnapshot
from graphpatch_notebook.checks.sharding import sharding_of
from graphpatch_notebook.components.flow import Flow, walk
from graphpatch_notebook.errors import ExperimentError, PatchMapError
from graphpatch_notebook.execution import PatchContext
from graphpatch_notebook.experiments.attribution.choices import Choices, Routing
from graphpatch_notebook.experiments.attribution.rules import DerivativeRules, Method, rules_of
from graphpatch_notebook.experiments.attribution.scored_nodes import ScoredNode, Scores, flow_of
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import noted_metric
from graphpatch_notebook.inspection.resolution import resolve
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import CustomPatch, Patch
from graphpatch_notebook.torch_compat import version_of, without_torch_functions
from graphpatch_notebook.warning_places import collected_warnings


class WatchedRuns:
    """Runs a model and passes the values of nodes, other than parameters, to a listener.

    Attributes:
        captured: The captured model.
        context: The patch context to run in.
        listener: Called with each node and its value; returns the value to use.
    """

    def __init__(self, pg: PatchableGraph, nodes: Sequence[ScoredNode]) -> None:
        self.captured = captured(pg)
        self.listener: Callable[[ScoredNode, Any], Any] = _pass_on
        nodes = [node for node in nodes if not node.is_parameter]
        self.context = self._context(nodes)
        own = [node for node in nodes if node.frame.has_own_graph and node.node.kind == "input"]
        if own:
            try:
                with self.context:
                    pass
            except PatchMapError:  # edited graphs check the sizes of their inputs themselves
                for node in own:
                    node.can_be_cut = False
                self.context = self._context(nodes)

    def _context(self, nodes: Sequence[ScoredNode]) -> PatchContext:
        patches = {node.path: (WatchPatch if node.can_be_cut else LookPatch)(node, self) for node in nodes}
        return PatchContext(self.captured, patches)


class WatchPatch(Patch[Any]):
    """Passes each value to the current listener, which returns the value to use."""

    any_shape = True

    def __init__(self, node: ScoredNode, current: WatchedRuns) -> None:  # faster than the one of a dataclass
        self.node = node
        self.current = current

    def op(self, original_output: Any) -> Any:
        if type(original_output) is not Tensor:
            return self.current.listener(self.node, original_output)
        with without_torch_functions():  # each call on it would go through the mode of the run
            return self.current.listener(self.node, original_output)


class LookPatch(WatchPatch):
    """Passes each value to the current listener, and ignores what it returns."""

    observes_only = True


@dataclass
class AttributionResults:
    """The results of all runs.

    Attributes:
        clean: The metric of the clean run.
        corrupted: The metric of the corrupted run.
        scores: The score of each path: a scalar, or an array over heads and positions.
        problems: Why a path has no score.
        roots: The paths at which the runs begin to differ.
        remarks: Warnings that were raised during the runs.
        fallbacks: Why the derivative of a function does not explain its whole change, by its name.
        changes: The change of the metric that the scores of a path should sum to, for one-sided scores.
    """

    clean: float = float("nan")
    corrupted: float = float("nan")
    scores: dict[str, Scores] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    roots: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)
    changes: dict[str, float] = field(default_factory=dict)


@dataclass
class AttributionRuns:
    """Runs the model as often as an attribution needs it, and computes the scores.

    Attributes:
        watched: Runs of the graph that pass on the values of `nodes`.
        nodes: All nodes that hold floating-point tensors, in order of execution.
        kept: The dimensions of positions and heads, for paths that have them.
        fractions: The points between the corrupted run (0) and the clean run (1) at which gradients are taken.
        max_bytes: The memory limit for recorded values and their gradients.
        is_one_sided: Whether each value is compared with the corrupted run in which it alone is restored.
    """

    pg: PatchableGraph
    watched: WatchedRuns
    metric: Callable[[Any], Any]
    clean: Inputs
    corrupted: Inputs
    nodes: Sequence[ScoredNode]
    kept: Mapping[str, KeptDims]
    fractions: Sequence[float]
    max_bytes: int
    method: Method
    routing: Routing
    is_one_sided: bool = False

    def __post_init__(self) -> None:
        self._choices = Choices(self.routing)
        self._has_run = False
        self._flow = flow_of(self.pg.nodes.root)
        self._roots = Roots(self._flow)
        self._copied: set[str] = set()
        self._found = AttributionResults()
        self._found.scores = {node.path: np.zeros(()) for node in self.nodes if node.is_parameter}

    def run(self) -> AttributionResults:
        """Returns the scores. The model and the random state are restored."""
        self._state = ModelSnapshot(captured(self.pg).module)
        with collected_warnings() as messages, torch.inference_mode(False), afterwards(self._state.restore):
            (self._run_one_by_one if self.is_one_sided else self._run_all)()
        self.watched.listener = _pass_on
        self._found.roots = list(dict.fromkeys(path for path, _ in self._roots.clean))
        # Paths that were not computed are in `problems`.
        self._found.remarks = [message for message in messages if "never fired" not in message]
        return self._found

    def _run_all(self) -> None:
        wanted = {node.path for node in self.nodes if node.is_compared and not node.is_parameter}
        while wanted:
            wanted = self._score(wanted)
        infinite = _not_finite(self._found.scores)
        while infinite:
            infinite = self._score(infinite, is_careful=True)
        for path in _not_finite(self._found.scores):
            self._found.problems[path] = f"its score is not finite: {self._found.scores.pop(path).sum()}"

    def _run_one_by_one(self) -> None:
        wanted = {node.path: node for node in self.nodes if node.is_wanted and not node.is_parameter}
        left = set(wanted)
        while left:
            clean = CleanValues(left, left, self.max_bytes)
            with torch.no_grad():
                metric = self._clean_metric(self._output(clean, self.clean))
            self._found.problems |= clean.problems
            for path in left - clean.left - set(clean.problems):
                self._score_alone(wanted[path], [value.tensor for value in clean.by_path.get(path, ())])
            left = clean.left
            self._found.clean = metric

    def _score_alone(self, node: ScoredNode, clean: list[Tensor]) -> None:
        if not node.can_be_cut:
            problem = "it cannot be replaced: it is the state of a module, or a view that the model fills later"
            self._found.problems[node.path] = problem
            return
        left = {node.path}
        while left:
            self._roots = Roots(self._flow)
            left = self._score(left, restored=clean, is_careful=True)
        self._roots = Roots(self._flow)
        if node.path in self._found.scores:
            self._found.changes[node.path] = self._found.clean - self._found.corrupted

    def _score(self, wanted: set[str], *, restored: list[Tensor] | None = None, is_careful: bool = False) -> set[str]:
        """Scores as many paths as fit into memory, and returns the remaining ones.

        With `restored`, the clean run is one on the corrupted inputs in which the wanted path has these values.
        """
        # Interpolated runs need all roots.
        clean = CleanValues(wanted, self._copied, self.max_bytes if self.fractions == [0.0] else 2**62)
        rules = rules_of(self.method)
        with torch.no_grad(), rules.recording():
            if restored is None:
                output = self._output(clean, self.clean)
            else:
                values = iter(restored)
                patch = CustomPatch(custom_op=lambda value: next(values, value).clone())
                with self.pg.patch(dict.fromkeys(wanted, patch)):
                    output = self._output(clean, self.corrupted)
            with noted_metric(output):
                self._found.clean = self._clean_metric(output)
        differences = Differences(clean, is_careful)
        run = GradientRun(differences, self._roots)
        metric = self._gradient_run(run, rules)
        if run.edges and not metric.requires_grad:
            if restored is None:
                raise no_gradient()
            differences.problems |= dict.fromkeys(wanted, _UNREACHED)
        self._found.corrupted = float(metric.detach())
        self._found.fallbacks |= rules.fallbacks
        self._copied |= differences.rewritten
        left = clean.left | differences.rewritten
        for path in wanted - left:
            problem = clean.problems.get(path) or _uneven(len(clean.by_path.get(path, ())), run.counts[path])
            if problem is not None:
                differences.problems.setdefault(path, problem)
        for path in differences.rewritten:
            run.by_path.pop(path, None)
        differences.release()
        problems = dict(differences.problems)
        totals: dict[str, Scores] = {}
        for fraction in self.fractions:
            if fraction:
                del run, metric
                run = GradientRun(differences, self._roots, fraction, is_first=False)
                metric = self._gradient_run(run, rules_of(self.method))
            scores = scores_of(metric, run, differences, self.kept, problems)
            totals |= {path: totals.get(path, 0.0) + score / len(self.fractions) for path, score in scores.items()}
        self._found.problems |= problems
        self._found.scores |= {path: score for path, score in totals.items() if path not in problems}
        return left

    def _clean_metric(self, output: Any) -> float:
        """Returns the metric of the clean run, which must be one number on all processes: gradients are their sums."""
        number = float(metric_number(self.metric(output)))
        sharding = sharding_of(captured(self.pg).root)
        if sharding is not None:
            numbers = sharding.processes.gathered(number)
            if not np.allclose(numbers, number, rtol=1e-3, atol=1e-6, equal_nan=True):
                raise ExperimentError(f"the metric differs between the processes: {numbers} on the clean inputs")
        return number

    def _output(self, listener: Callable[[ScoredNode, Any], Any], inputs: Inputs) -> Any:
        if self._has_run:
            self._state.restore()  # all runs have the same random numbers and buffers
        self._has_run = True
        self.watched.listener = listener
        with self._choices.recorded() if inputs is self.clean else self._choices.held(), self.watched.context:
            return inputs.run(self.pg)

    def _gradient_run(self, run: GradientRun, rules: DerivativeRules) -> Tensor:
        with torch.enable_grad(), rules.applied():
            metric = metric_number(self.metric(self._output(run, self.corrupted)))
        run.is_over = True
        return metric


def _not_finite(scores: Mapping[str, Scores]) -> set[str]:
    """Returns the paths with scores that are not all finite."""
    if not scores or np.isfinite(np.concatenate([score.reshape(-1) for score in scores.values()])).all():
        return set()  # one look at all scores is faster than one at each
    return {path for path, score in scores.items() if not np.isfinite(score).all()}


def _pass_on(_: ScoredNode, value: Any) -> Any:
    return value


def _uneven(clean: int, corrupted: int) -> str | None:
    """Returns a message if a node was not computed equally often in both runs."""
    if clean == corrupted:
        return None if clean else "it was not computed"
    return f"it was computed {clean} times in the clean run, {corrupted} times in the corrupted run"


def no_gradient() -> ExperimentError:
    """Returns the error for a metric without a gradient."""
    return ExperimentError(
        "the metric has no gradient: it must compute a tensor from the output by operations that can be "
        "differentiated, without argmax, .item(), .detach() or torch.no_grad()"
    )


def metric_number(value: Any) -> Tensor:
    """Returns the result of a metric as a tensor without dimensions."""
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        shown = f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else repr(value)[:80]
        raise ExperimentError(
            f"the metric returned {type(value).__name__} {shown}: to have a gradient, it must return a floating-point "
            "tensor with a single number (not None, without .item(), and not the whole output of the model)"
        )
    return value.reshape(())


@dataclass(slots=True, eq=False)
class CleanValue:
    """One value of the clean run.

    Attributes:
        tensor: The value.
        version: The version counter of the tensor when it was recorded; `None` for a private copy.
    """

    tensor: Tensor
    version: int | None

    @property
    def is_current(self) -> bool:
        """Whether the tensor is unchanged since: the model may write into it through a view."""
        return self.version is None or version_of(self.tensor) == self.version


class CleanValues:
    """The listener of the clean run: keeps the values of wanted paths, in order of execution, up to a memory limit.

    The limit is for values and their gradients; one value is always kept. Values at the paths `copied` are copied: the
    model writes into them later.

    Attributes:
        by_path: The values, one for each time that the path was computed.
        left: Paths whose values exceed the limit.
        problems: Why the value of a path cannot have a score.
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
        cost = _cost(value)
        if cost > self._available and self._by_id:
            return None
        self._available -= cost
        if node.is_state or node.node.is_mutated_later or node.path in self._copied:
            kept = CleanValue(value.clone(), None)
        elif value.numel() * value.element_size() * 2 < value.untyped_storage().nbytes():
            kept = CleanValue(value.clone(), None)  # a view would keep the whole storage alive
        else:
            kept = CleanValue(value, version_of(value))  # not a copy, so ids stay unique while it is kept
        self._by_id[id(kept.tensor)] = kept
        return kept

    def release(self) -> None:
        """Frees all values."""
        self.by_path.clear()
        self._by_id.clear()


def _cost(value: Tensor) -> int:
    """Returns how many bytes a value and its gradient take."""
    return value.numel() * max(value.element_size(), 4) * 2


_NO_GRADIENT = (
    "it differs between the runs, but only through operations without a gradient (integers, comparisons, .detach(), "
    "torch.no_grad)"
)
_SHARED = "the same tensor has another name and other uses, which cannot be separated here"


class Roots:
    """The first values that differ between the runs, and the values that depend on them.

    Attributes:
        clean: The clean values of the roots.
        tracked: The nodes that autograd traces back to a root.
        untracked: The nodes whose values differ, but were computed without gradients.
    """

    def __init__(self, flow: Flow) -> None:
        self.clean: dict[tuple[str, int], Tensor] = {}
        self.tracked: set[Node] = set()
        self.untracked: set[Node] = set()
        self._flow = flow

    def computed(self, node: ScoredNode) -> Node:
        """Returns the operation that computes the value of a node."""
        own = node.node
        if own.kind == "output" and node.frame.opaque_reason is not None and node.frame.call is not None:
            own = node.frame.call
        dig = resolve(self._flow.root, node.path).dig if node.is_in_container else ()
        value = self._flow.resolve(own, dig)
        return own if value is None else value.node

    def may_begin_at(self, node: ScoredNode) -> bool:
        """Whether a value that differs, but has no gradient, becomes a root.

        It does not if it was computed from tracked values: what a model detaches, counts or sorts must stay without
        gradients, since such code does not expect them. But the result of a part that runs under `torch.no_grad` is a
        root for the parts after it.
        """
        own = self.computed(node)
        sources = {own, *(value.node for value in self._flow.reads(own))}
        before = walk([own], lambda made: (value.node for value in self._flow.reads(made)))
        return node.can_be_cut and (not sources.isdisjoint(self.untracked) or self.tracked.isdisjoint(before))

    def has_one_use(self, node: ScoredNode) -> bool:
        """Whether the value of a node is known to have a single use in its frame: an operation, a call, the output."""
        frame, own = node.frame.parent if node.node.kind == "output" else node.frame, self.computed(node)
        if frame is None or frame.opaque_reason is not None or frame.has_own_graph:
            return frame is None
        flow, uses, inner = self._flow, 0, set[Frame]()
        for user in flow.users.get(own, ()):
            around = list(flow.frame_of[user].frames_above())
            if frame in around[1:]:
                inner.add(around[around.index(frame) - 1])
            uses += around[0] is frame
        places = [*flow.outputs(frame), *(place for each in inner for place in flow.inputs(each))]
        return uses + sum(place.value.node is own for place in places) == 1


class Differences:
    """The differences between the clean and the corrupted values of a group of nodes; each tensor is stored once.

    Attributes:
        tensors: Clean value minus corrupted value; in float32 for half-precision values.
        by_path: For each path, the indices of its differences, one for each time it was computed; `None` where both
            runs have the same bits.
        problems: Why a path cannot have a score.
        rewritten: Paths whose clean value the model changed later in a way that the capture did not record.
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
        """Returns the index of the difference of two values.

        It is the same for all names of these two: `origin` is an object that all names of the corrupted value share.
        """
        key = (id(clean), origin)
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.tensors)
            self.tensors.append(_difference(clean.tensor.detach(), value.detach(), self.is_careful))
        return number

    def release(self) -> None:
        """Frees the values and the autograd graph of the corrupted run."""
        self.clean.release()
        self._known.clear()


def _difference(clean: Tensor, value: Tensor, is_careful: bool) -> Tensor:
    difference = clean.float() - value.float() if clean.element_size() < 4 else clean - value
    # Masked scores are infinite in both runs, which does not count as a difference.
    return torch.where(clean == value, 0, difference) if is_careful else difference


class GradientRun:
    """The listener of one run with gradients.

    In the first run of a pair, its values are compared with the clean ones, which fills in `differences`, and extends
    `roots`; the others only read these. At the roots, `fraction` is 0 for the corrupted value, and 1 for the clean one.

    Attributes:
        counts: How often each path was computed.
        edges: The gradient edges of values that differ.
        numbers: For each edge, the index of the difference that its gradient is multiplied with.
        by_path: For each path, the indices of its edges, one for each time it was computed; `None` where it has no
            gradient, or does not need one.
        is_over: Whether the forward is over: values after this are recomputed in backward.
    """

    def __init__(self, differences: Differences, roots: Roots, fraction: float = 0.0, *, is_first: bool = True) -> None:
        self._differences = differences
        self._clean: Mapping[str, list[CleanValue]] = differences.clean.by_path
        self._roots = roots
        self._fraction = fraction
        self._is_first = is_first
        self.counts: Counter[str] = Counter()
        self._depends: dict[Any, bool] = {None: False}
        self._origins: dict[tuple[Any, int], tuple[Any, int]] = {}
        self._named: dict[tuple[Any, int], ScoredNode] = {}
        self._shared: set[tuple[Any, int]] = set()
        self._kept_alive: list[Tensor] = []
        self.is_over = False
        self.edges: list[GradientEdge] = []
        self.numbers: list[int] = []
        self.by_path: dict[str, list[int | None]] = {}

    def __call__(self, node: ScoredNode, value: Any) -> Any:
        path = node.path
        if self.is_over:  # recomputed in backward
            is_root = (path, 0) in self._roots.clean
            return _writable_copy(value.detach()) if is_root else value
        occurrence = self.counts[path]
        self.counts[path] += 1
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
        if is_root and not torch.is_grad_enabled():
            self._differences.problems[path] = _NO_GRADIENT
            return value
        if is_root:
            value, edge = self._cut(node, value, self._roots.clean[path, occurrence])
            self._note(path, occurrence, value, edge)
            return value
        return self._compared(node, occurrence, value)

    # -- values --------------------------------------------------------------------------------------------------------

    def _under_own_name(self, node: ScoredNode, value: Tensor) -> Tensor:
        """Returns the value, or a view of it if the same tensor has another name already.

        Other modules may use the tensor that a module is given (the residual stream). A patch on the module's input
        changes it for this module only, so its gradient must be that of this one use.
        """
        edge = (value.grad_fn, value.output_nr)
        if edge[0] is None or node.node.op == "requires_grad_":  # it returns the same tensor
            return value
        before, self._named[edge] = self._named.get(edge), node
        if before is None:
            self._origins[edge] = edge
            return value
        stays = node.node.is_mutated_later or node.node.is_in_place or value.layout is not torch.strided
        stays |= node.is_in_container  # a view would need a copy of the container
        if stays or not node.can_be_cut or not torch.is_grad_enabled():
            # With a view, the gradient of values that the model writes in place would be lost.
            if not torch.is_grad_enabled() or not self._roots.has_one_use(before):
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
            self._roots.tracked.add(self._roots.computed(node))
            self._note(path, occurrence, value, self._edge(value))
        elif _is_equal(clean[occurrence].tensor, value):
            differences.by_path.setdefault(path, []).append(None)
            self.by_path.setdefault(path, []).append(None)
        elif path in differences.rewritten:
            pass  # decided when the value is copied before it is changed
        elif not torch.is_grad_enabled():
            self._roots.untracked.add(self._roots.computed(node))
            differences.problems[path] = _NO_GRADIENT
        elif self._roots.may_begin_at(node):
            self._roots.tracked.add(self._roots.computed(node))
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
        mine = clean[occurrence].tensor  # checked in the clean run
        if _are_alike(mine, value):
            return None
        return node.problem(value) or _unlike(mine, value)

    def _cut(self, node: ScoredNode, value: Tensor, clean: Tensor) -> tuple[Tensor, GradientEdge]:
        """Returns a tensor that depends on a new leaf only, and the gradient edge of that leaf."""
        start = value.detach()
        if self._fraction:
            start = torch.where(start == clean, start, torch.lerp(start, clean.detach(), self._fraction))
        copied = _writable_copy(start)
        edge = GradientEdge(_node_of(copied), copied.output_nr)
        self._depends[copied.grad_fn] = True
        self._origins[edge.node, edge.output_nr] = (edge.node, edge.output_nr)
        self._named[edge.node, edge.output_nr] = node
        return copied, edge

    def _edge(self, value: Tensor) -> GradientEdge:
        node = _node_of(value)
        if BackwardCFunction in type(node).__mro__:
            # The Python object of a custom function's node does not keep it alive; a view of the value does.
            self._kept_alive.append(value.view_as(value))
        return GradientEdge(node, value.output_nr)

    def _note(self, path: str, occurrence: int, value: Tensor, edge: GradientEdge) -> None:
        differences, number = self._differences, None
        if self._is_first:
            clean = self._clean.get(path, ())
            if occurrence >= len(clean):  # a root of an earlier group
                return
            key = (edge.node, edge.output_nr)
            number = differences.add(clean[occurrence], value, self._origins.get(key, key))
            differences.by_path.setdefault(path, []).append(number)
        elif path not in differences.by_path:  # a root of an earlier group
            return
        elif occurrence < len(differences.by_path[path]):
            number = differences.by_path[path][occurrence]
        if number is None:
            self.by_path.setdefault(path, []).append(None)
            return
        self.by_path.setdefault(path, []).append(len(self.edges))
        self.edges.append(edge)
        self.numbers.append(number)

    def _depends_on_root(self, value: Tensor) -> bool:
        """Whether a value depends on a root in the autograd graph. Visits each node once."""
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


def _is_equal(one: Tensor, other: Tensor) -> bool:
    with without_torch_functions():  # derivative rules would take it for a step of the model
        return torch.equal(one, other)


def _node_of(value: Tensor) -> GradientNode:
    assert value.grad_fn is not None
    return value.grad_fn


def _writable_copy(value: Tensor) -> Tensor:
    """Returns a copy of a new leaf with this value. The model may write into a copy, but not into a leaf."""
    if value.is_inference():  # from a part of the model that runs in inference mode
        value = value.clone()
    return value.requires_grad_().clone()


def _are_alike(mine: Tensor, value: Tensor) -> bool:
    return mine.shape == value.shape and mine.dtype == value.dtype and mine.device == value.device


def _unlike(mine: Tensor, value: Tensor) -> str:
    if mine.shape != value.shape:
        return f"of shape {tuple(mine.shape)} in the clean run, of shape {tuple(value.shape)} in the corrupted run"
    return f"{mine.dtype} on {mine.device} in the clean run, {value.dtype} on {value.device} in the corrupted run"


@dataclass(frozen=True)
class KeptDims:
    """The dimensions of a value that scores are not summed over. In scores, heads come first.

    Attributes:
        position: The sequence dimension.
        heads: The dimension that is split into equal parts, one for each head.
        count: The number of heads.
        row: The dimension of the batch, if each row has positions of its own.
        columns: Then the position in each row, for each column.
    """

    position: int | None = None
    heads: int | None = None
    count: int = 1
    row: int | None = None
    columns: tuple[tuple[int, ...], ...] = ()

    def summed(self, product: Tensor) -> Tensor:
        """Returns the sum of a tensor over all other dimensions."""
        if self.row is not None and self.position is not None:
            by_row = product.movedim((self.row, self.position), (0, 1))
            rows = torch.arange(len(by_row), device=product.device)[:, None]
            columns = torch.tensor(self.columns, device=product.device).T
            product = by_row[rows, columns].movedim((0, 1), (self.row, self.position))
        kept = [] if self.position is None else [self.position]
        if self.heads is not None:
            product = product.unflatten(self.heads, (self.count, -1))
            kept = [self.heads, *(dim + (dim > self.heads) for dim in kept)]
        others = [dim for dim in range(product.dim()) if dim not in kept]
        sums = product.sum(others) if others else product
        return sums.T if kept != sorted(kept) else sums


_UNREACHED = (
    "no gradient reaches it: the metric does not depend on it, or not through differentiable operations, or it is a "
    "view of a tensor that the model writes into"
)


def scores_of(
    metric: Tensor, run: GradientRun, differences: Differences, kept: Mapping[str, KeptDims], problems: dict[str, str]
) -> dict[str, Scores]:
    """Returns the scores of one run by path; adds paths without a gradient to `problems`."""
    gradients = gradients_of(metric, run.edges) if run.edges and metric.requires_grad else []
    known: dict[Any, Tensor] = {}  # several names of one tensor often share one gradient
    parts: dict[str, list[Tensor]] = {}
    for path, numbers in run.by_path.items():
        if path in differences.problems:
            continue
        parts[path] = []
        for edge, number in zip(numbers, differences.by_path[path], strict=True):
            if number is None:
                continue
            difference, gradient = differences.tensors[number], None if edge is None else gradients[edge]
            if gradient is not None:
                key = (number, kept.get(path), gradient.data_ptr(), gradient.stride())
                if key not in known:
                    known[key] = _reduced(difference, gradient, kept.get(path), differences.is_careful)
                parts[path].append(known[key])
            elif edge is None or bool(difference.any()):
                problems[path] = _UNREACHED
    arrays = _as_arrays(list(known.values()))
    return {
        path: np.asarray(sum(arrays[id(part)] for part in found)) if found else np.zeros(())
        for path, found in parts.items()
        if path not in problems
    }


def gradients_of(metric: Tensor, values: Sequence[Tensor] | Sequence[GradientEdge]) -> list[Tensor | None]:
    """Returns the gradient of the metric at each value; `None` where the metric does not depend on it."""
    try:
        return list(torch.autograd.grad(metric, values, allow_unused=True))
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ExperimentError(f"the gradients of the metric cannot be computed: {error}") from error


def _reduced(difference: Tensor, gradient: Tensor, kept: KeptDims | None, is_careful: bool) -> Tensor:
    gradient = gradient.to(difference.dtype)
    if kept is None and not is_careful:
        return torch.dot(difference.reshape(-1), gradient.reshape(-1))
    product = difference * gradient
    if is_careful:  # 0 * inf is 0 here: infinite differences without a gradient, and the reverse
        product = torch.where((difference == 0) | (gradient == 0), 0, product)
    return product.sum() if kept is None else kept.summed(product)


def _as_arrays(tensors: Sequence[Tensor]) -> dict[int, Scores]:
    """Returns all tensors as arrays, by their ids, with one transfer for each device."""
    arrays: dict[int, Scores] = {}
    for device in {tensor.device for tensor in tensors}:
        present = [tensor for tensor in tensors if tensor.device == device]
        flat = torch.cat([tensor.reshape(-1) for tensor in present]).to("cpu").double()
        for tensor, part in zip(present, flat.split([tensor.numel() for tensor in present]), strict=True):
            arrays[id(tensor)] = part.reshape(tensor.shape).numpy()
    return arrays
