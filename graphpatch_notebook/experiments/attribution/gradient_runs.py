"""The runs of an attribution: one without gradients on the clean inputs, and some with gradients between the two.

The nodes are scored in groups that fit into memory. For each group:

1. A clean run without gradients records the values (`CleanValues`).
2. A run on the corrupted inputs with gradients compares its values with these (`GradientRun`).
3. Integrated gradients take further runs, which are interpolated between the two at the roots.
4. In the backward pass of each run, hooks multiply the differences with the gradients.

For one-sided scores, each value is a group of its own, and the clean run is one on the corrupted inputs in which this
value is the clean one.

A *root* is a floating-point value that differs between the runs, although nothing that it is computed from differs. A
new leaf replaces it, so autograd never reaches the weights, whether they require gradients or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture.records import Node
from graphpatch_notebook.components import operations
from graphpatch_notebook.components.flow import Flow, walk
from graphpatch_notebook.errors import ExperimentError, PatchMapError
from graphpatch_notebook.experiments.attribution.rules import DerivativeRules, Method, rules_of
from graphpatch_notebook.experiments.attribution.scored_nodes import KeptDims, ScoredNode, Scores, flow_of
from graphpatch_notebook.experiments.attribution.secants import family_name
from graphpatch_notebook.experiments.engine.cells import noted_metric
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import CustomPatch, Patch
from graphpatch_notebook.patching import PatchContext
from graphpatch_notebook.patching.model_state import preserved
from graphpatch_notebook.patching.sharding import sharding_of
from graphpatch_notebook.torch_compat import version_of, without_torch_functions
from graphpatch_notebook.warning_places import collected_warnings

# -- routing -----------------------------------------------------------------------------------------------------------

Routing: TypeAlias = Literal["free", "frozen"]
_CHOICES = operations.CHOICES | {"argsort", "argmin", "min"}


class Choices(TorchFunctionMode):
    """The choices of a pair of runs: the indices that `topk`, `sort`, `argmax`, `max` and similar functions return.

    With frozen routing, the corrupted run takes the numbers of the clean run (such as the experts of a token), and its
    own values at these numbers. With free routing, nothing is done.
    """

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        if routing not in ("free", "frozen"):
            raise ExperimentError(f"routing must be 'free' or 'frozen', not {routing!r}")
        self._is_frozen = routing == "frozen"
        self._made: list[Tensor] = []
        self._left: Iterator[Tensor] | None = None

    def recorded(self) -> AbstractContextManager[Any]:
        """Returns a context manager for the model's run on the clean inputs, within the rules of the derivatives."""
        self._made, self._left = [], None
        return self if self._is_frozen else nullcontext()

    def held(self) -> AbstractContextManager[Any]:
        """Returns a context manager for each other run of the model."""
        self._left = iter(self._made)
        return self if self._is_frozen else nullcontext()

    def _decided(self, made: Tensor) -> Tensor:
        if self._left is None:
            self._made.append(made)
            return made
        clean = next(self._left, None)
        if clean is None or clean.shape != made.shape:
            shown = "nothing" if clean is None else f"numbers of shape {tuple(clean.shape)}"
            raise ExperimentError(
                f"the routing cannot be frozen: the corrupted run chooses numbers of shape {tuple(made.shape)}, where "
                f"the clean run chooses {shown}"
            )
        return clean

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, family_name(func)
        given = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)), None)
        if name not in _CHOICES or given is None or not given.is_floating_point() or "out" in kwargs:
            return func(*args, **kwargs)
        with without_torch_functions(), torch.no_grad():
            made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            return func(*args, **kwargs) if made.is_floating_point() else self._decided(made)
        numbers, at = self._decided(made[1]), 2 if name == "topk" else 1
        dim = kwargs.get("dim", args[at] if len(args) > at else -1)
        has_dim = numbers.dim() == given.dim()  # else without keepdim
        values = given.gather(dim, numbers if has_dim else numbers.unsqueeze(dim))
        return type(made)((values if has_dim else values.squeeze(dim), numbers))


# -- all runs ----------------------------------------------------------------------------------------------------------


class WatchedRuns:
    """Passes the values of nodes, other than parameters, to a listener.

    Attributes:
        context: The patch context to run the model in.
        listener: Called with each node and its value; returns the value to use.
    """

    def __init__(self, pg: PatchableGraph, nodes: Sequence[ScoredNode]) -> None:
        self.listener: Callable[[ScoredNode, Any], Any] = _pass_on
        patches = {
            node.path: (_Watch if node.can_be_cut else _Look)(node, self) for node in nodes if not node.is_parameter
        }
        self.context = PatchContext(captured(pg), patches)
        own = [node for node in nodes if node.frame.has_own_graph and node.node.kind == "input" and node.can_be_cut]
        try:
            if own:
                with self.context:
                    pass
        except PatchMapError:  # edited graphs check the sizes of their inputs themselves
            for node in own:
                node.can_be_cut = False
            self.__init__(pg, nodes)  # type: ignore[misc]


class _Watch(Patch[Any]):
    """Passes each value to the current listener, which returns the value to use."""

    any_shape = True

    def __init__(self, node: ScoredNode, runs: WatchedRuns) -> None:  # faster than the one of a dataclass
        self.node, self.runs = node, runs

    def op(self, original_output: Any) -> Any:
        if type(original_output) is not Tensor:
            return self.runs.listener(self.node, original_output)
        with without_torch_functions():  # each call on it would go through the mode of the run
            return self.runs.listener(self.node, original_output)


class _Look(_Watch):
    """Passes each value to the current listener, and ignores what it returns."""

    observes_only = True


def _pass_on(_: ScoredNode, value: Any) -> Any:
    return value


@dataclass
class AttributionRuns:
    """Runs the model as often as an attribution needs it, and computes the scores.

    Attributes:
        watched: Runs of the graph that pass on the values of `nodes`.
        nodes: All nodes that hold floating-point tensors, in order of execution.
        kept: The dimensions of positions and heads, for paths that have them.
        fractions: The points between the corrupted run (0) and the clean run (1) at which gradients are taken.
        max_bytes: The memory limit for recorded values and their gradients.
        clean_metric, corrupted_metric: The metric of the two runs.
        scores: The score of each path: a scalar, or an array over heads, rows and positions.
        problems: Why a path has no score.
        roots: The paths at which the runs begin to differ.
        remarks: Warnings that were raised during the runs.
        fallbacks: Why the derivative of a function does not explain its whole change, by its name.
        changes: The change of the metric that the scores of a path should sum to, for one-sided scores.
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
    clean_metric: float = float("nan")
    corrupted_metric: float = float("nan")
    scores: dict[str, Scores] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    roots: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)
    changes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._choices = Choices(self.routing)
        self._roots = Roots(flow_of(self.pg.nodes.root))
        self._has_run = False
        self.scores = {node.path: np.zeros(()) for node in self.nodes if node.is_parameter}

    def run(self, *, is_one_sided: bool) -> None:
        """Computes the scores. The model and the random state are restored.

        If they are one-sided, each value is compared with the corrupted run in which it alone is restored.
        """
        model = captured(self.pg).module
        with collected_warnings() as messages, torch.inference_mode(False), preserved(model) as self._snapshot:
            (self._run_one_sided if is_one_sided else self._run_all)()
        self.watched.listener = _pass_on
        self.roots = list(dict.fromkeys(path for path, _ in self._roots.clean))
        # Paths that were not computed are in `problems`.
        self.remarks = [message for message in messages if "never fired" not in message]

    def _run_all(self) -> None:
        wanted = {node.path for node in self.nodes if node.is_compared and not node.is_parameter}
        while wanted:
            wanted = self._score(wanted)
        infinite = _not_finite(self.scores)
        while infinite:
            infinite = self._score(infinite, is_careful=True)
        for path in _not_finite(self.scores):
            self.problems[path] = f"its score is not finite: {self.scores.pop(path).sum()}"

    def _run_one_sided(self) -> None:
        wanted = {node.path: node for node in self.nodes if node.is_wanted and not node.is_parameter}
        clean = CleanValues(wanted, 2**62)
        with torch.no_grad():
            clean_metric = self._clean_number(self._output(clean, self.clean))
        self.problems |= clean.problems
        for path, node in wanted.items():
            if path not in clean.by_path:
                self.problems.setdefault(path, "it was not computed")
                continue
            if not node.can_be_cut:
                self.problems[path] = "it cannot be replaced: the state of a module, or a view that the model fills"
                continue
            self._roots = Roots(flow_of(self.pg.nodes.root))
            self._score({path}, restored=[value.tensor for value in clean.by_path[path]], is_careful=True)
            if path in self.scores:
                self.changes[path] = self.clean_metric - self.corrupted_metric
        self._roots = Roots(flow_of(self.pg.nodes.root))
        self.clean_metric = clean_metric

    def _score(self, wanted: set[str], *, restored: list[Tensor] | None = None, is_careful: bool = False) -> set[str]:
        """Scores as many paths as fit into memory, and returns the remaining ones.

        With `restored`, the clean run is one on the corrupted inputs in which the wanted path has these values.
        """
        # Interpolated runs need all roots.
        clean = CleanValues(wanted, self.max_bytes if self.fractions == [0.0] else 2**62)
        rules = rules_of(self.method)
        patched: AbstractContextManager[Any] = nullcontext()
        if restored is not None:
            values = iter(restored)
            patch = CustomPatch(custom_op=lambda value: next(values, value).clone())
            patched = self.pg.patch(dict.fromkeys(wanted, patch))
        with torch.no_grad(), rules.recording(), patched:
            self.clean_metric = self._clean_number(
                self._output(clean, self.clean if restored is None else self.corrupted)
            )
        run = GradientRun(clean, self._roots, self.kept, is_careful)
        metric = self._gradient_run(run, rules, 0.0)
        self.corrupted_metric = float(metric.detach())
        self.fallbacks |= rules.fallbacks
        if run.leaves and not metric.requires_grad and restored is None:
            raise no_gradient()
        for path in wanted - clean.left:
            problem = clean.problems.get(path) or _uneven(len(clean.by_path.get(path, ())), run.counts[path])
            if problem is not None:
                run.problems.setdefault(path, problem)
        clean.release()
        totals: dict[str, Scores] = {}
        for fraction in self.fractions:
            if fraction:
                del metric
                metric = self._gradient_run(run, rules_of(self.method), fraction)
            for path, score in run.scores(metric).items():
                totals[path] = totals.get(path, 0.0) + score / len(self.fractions)
        self.problems |= run.problems
        self.scores |= {path: np.asarray(score) for path, score in totals.items() if path not in run.problems}
        return clean.left

    def _clean_number(self, output: Any) -> float:
        """Returns the metric of the clean run, which must be one number on all processes: gradients are their sums."""
        with noted_metric(output):
            number = float(metric_number(self.metric(output)))
        sharding = sharding_of(captured(self.pg).root)
        if sharding is not None:
            numbers = sharding.processes.gathered(number)
            if not np.allclose(numbers, number, rtol=1e-3, atol=1e-6, equal_nan=True):
                raise ExperimentError(f"the metric differs between the processes: {numbers} on the clean inputs")
        return number

    def _output(self, listener: Callable[[ScoredNode, Any], Any], inputs: Inputs) -> Any:
        if self._has_run:
            self._snapshot.restore()  # all runs have the same random numbers and buffers
        self._has_run = True
        self.watched.listener = listener
        with self._choices.recorded() if inputs is self.clean else self._choices.held(), self.watched.context:
            return inputs.run(self.pg)

    def _gradient_run(self, run: GradientRun, rules: DerivativeRules, fraction: float) -> Tensor:
        run.start(fraction)
        with torch.enable_grad(), rules.applied():
            metric = metric_number(self.metric(self._output(run, self.corrupted)))
        run.is_over = True
        return metric


def _not_finite(scores: Mapping[str, Scores]) -> set[str]:
    """Returns the paths with scores that are not all finite."""
    if not scores or np.isfinite(np.concatenate([score.reshape(-1) for score in scores.values()])).all():
        return set()  # one look at all scores is faster than one at each
    return {path for path, score in scores.items() if not np.isfinite(score).all()}


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


def gradients_of(metric: Tensor, values: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the gradient of the metric at each value; `None` where the metric does not depend on it."""
    try:
        return list(torch.autograd.grad(metric, values, allow_unused=True))
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ExperimentError(f"the gradients of the metric cannot be computed: {error}") from error


# -- the clean run -----------------------------------------------------------------------------------------------------


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

    The limit is for values and their gradients; one value is always kept.

    Attributes:
        by_path: The values, one for each time that the path was computed.
        left: Paths whose values exceed the limit.
        problems: Why the value of a path cannot have a score.
    """

    def __init__(self, wanted: Collection[str], max_bytes: int) -> None:
        self._wanted = wanted
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
        kept = self._kept(node, value) if problem is None else None
        if kept is not None:
            self.by_path.setdefault(path, []).append(kept)
            return value
        if problem is not None:
            self.problems[path] = problem
        else:
            self.left.add(path)
        self.by_path.pop(path, None)
        return value

    def _kept(self, node: ScoredNode, value: Tensor) -> CleanValue | None:
        known = self._by_id.get(id(value))
        if known is not None and known.tensor is value and known.is_current:
            return known
        self._available -= value.numel() * max(value.element_size(), 4) * 2
        if self._by_id and (self.left or self._available < 0):  # the roots of a group are in it, or in one before it
            return None
        is_part = value.numel() * value.element_size() * 2 < value.untyped_storage().nbytes()  # which keeps all alive
        if node.is_state or node.node.is_mutated_later or is_part:
            kept = CleanValue(value.clone(), None)
        else:
            kept = CleanValue(value, version_of(value))  # not a copy, so ids stay unique while it is kept
        self._by_id[id(kept.tensor)] = kept
        return kept

    def release(self) -> None:
        """Frees all values."""
        self.by_path.clear()
        self._by_id.clear()


# -- runs with gradients -----------------------------------------------------------------------------------------------

_NO_GRADIENT = (
    "it differs between the runs, but only through operations without a gradient (integers, comparisons, .detach(), "
    "torch.no_grad)"
)
_SHARED = "the same tensor has another name and other uses, which cannot be separated here"
_REWRITTEN = "the model writes into the same memory later"
_UNREACHED = (
    "no gradient reaches it: the metric does not depend on it, or not through differentiable operations, or it is a "
    "view of a tensor that the model writes into"
)


class Roots:
    """The first values that differ between the runs.

    Attributes:
        clean: The clean values of the roots, by path and occurrence.
        followed: The nodes whose values depend on a root, also where the model detaches them.
    """

    def __init__(self, flow: Flow) -> None:
        self.clean: dict[tuple[str, int], Tensor] = {}
        self.followed: set[Node] = set()
        self._flow = flow

    def computed(self, node: ScoredNode) -> Node:
        """Returns the operation that computes the value of a node."""
        value = node.computed(self._flow)
        return node.node if value is None else value.node

    def may_begin_at(self, node: ScoredNode) -> bool:
        """Whether a value that differs, but has no gradient, becomes a root.

        It does not if it was computed from values that are followed: what a model detaches must stay without gradients,
        since such code does not expect them. But the result of a part that runs under `torch.no_grad` is a root for the
        parts after it.
        """
        own = self.computed(node)
        before = {own, *(value.node for value in self._flow.reads(own))}
        return node.can_be_cut and self.followed.isdisjoint(before)

    def is_only_name(self, node: ScoredNode, first: ScoredNode) -> bool:
        """Whether all operations that use a tensor, whose first name was `first`, are known to get it from a node."""
        flow, frame, own = self._flow, node.frame, self.computed(node)
        if self.computed(first) is not own or any(each.has_own_graph for each in frame.frames_above()):
            return False
        start, end = flow.start(frame), flow.order[frame.call or frame.output_node]
        users = [flow.order[user] for user in flow.users.get(own, ())]
        if node.node.kind == "output":
            return all(user > end for user in users)
        is_returned = any(place.value.node is own for place in flow.outputs(flow.root))
        return not is_returned and all(start <= user <= end for user in users)


class _Products(dict[tuple[str, int], Tensor]):
    """Differences times gradients, by path and occurrence: only those of the metric, for which it is open."""

    is_open = False


class GradientRun:
    """The listener of runs with gradients, at points between the corrupted run and the clean one.

    The first run is the corrupted one. Its values are compared with the clean ones, which finds the roots. At the roots
    of the other runs, `fraction` is 0 for the corrupted value, and 1 for the clean one.

    Attributes:
        problems: Why a path cannot have a score.
        differences: Clean value minus corrupted value, by path and occurrence, in float32 for half-precision values;
            `None` where both runs have the same bits.
        counts: How often each path was computed in this run.
        leaves: The leaves of the roots of this run.
        is_over: Whether the forward is over: values after this are recomputed in backward.
    """

    def __init__(self, clean: CleanValues, roots: Roots, kept: Mapping[str, KeptDims], is_careful: bool) -> None:
        self._clean, self._roots, self._kept, self._is_careful = clean, roots, kept, is_careful
        self._is_first = True
        self.problems: dict[str, str] = {}
        self.differences: dict[tuple[str, int], Tensor | None] = {}
        self._known: dict[Any, Tensor] = {}

    def start(self, fraction: float) -> None:
        """Begins a run."""
        self._fraction, self.is_over = fraction, False
        self._is_first = not fraction
        self.counts: Counter[str] = Counter()
        self.leaves: list[Tensor] = []
        self._products = _Products()
        self._depends: dict[Any, bool] = {None: False}
        self._named: dict[tuple[Any, int], ScoredNode] = {}

    def __call__(self, node: ScoredNode, value: Any) -> Any:
        path = node.path
        if self.is_over:  # recomputed in backward
            return _writable_copy(value.detach())[1] if (path, 0) in self._roots.clean else value
        key = (path, self.counts[path])
        self.counts[path] += 1
        if isinstance(value, Tensor) and value.requires_grad:
            value = self._under_own_name(node, value)
        if self._is_first and path in self._clean.by_path and path not in self.problems:
            problem = self._compare(node, key, value)
            if problem is not None:
                self.problems[path] = problem
        is_root = key in self._roots.clean
        if is_root:
            value = self._cut(node, value, self._roots.clean[key])
        difference = self.differences.get(key)
        if difference is not None and (is_root or self._is_first or self._depends_on_root(value)):
            products, kept, is_careful = self._products, self._kept.get(path), self._is_careful

            def multiply(gradient: Tensor | None) -> None:
                # Of several outputs of one function, some may not have one. A model may differentiate parts of itself.
                if gradient is not None and products.is_open:
                    products[key] = _summed(difference, gradient, kept, is_careful)

            value.register_hook(multiply)
        return value

    def _under_own_name(self, node: ScoredNode, value: Tensor) -> Tensor:
        """Returns the value, or a view of it if the same tensor has another name already.

        Other modules may use the tensor that a module is given (the residual stream). A patch on the module's input
        changes it for this module only, so its gradient must be that of this one use.
        """
        edge = (value.grad_fn, value.output_nr)
        if edge not in self._named or edge[0] is None or node.node.op == "requires_grad_":  # it returns the same tensor
            self._named.setdefault(edge, node)
            return value
        stays = node.node.is_mutated_later or node.node.is_in_place or value.layout is not torch.strided
        stays |= node.is_in_container  # a view would need a copy of the container
        if stays or not node.can_be_cut or not torch.is_grad_enabled():
            # With a view, the gradient of values that the model writes in place would be lost.
            if not self._roots.is_only_name(node, self._named[edge]):
                self.problems.setdefault(node.path, _SHARED)
            return value
        alias = value.view_as(value)
        self._named[alias.grad_fn, alias.output_nr] = node
        return alias

    def _compare(self, node: ScoredNode, key: tuple[str, int], value: Any) -> str | None:
        """Compares a value of the first run with the clean one; returns why it cannot have a score, if it cannot."""
        path, occurrence = key
        if occurrence >= len(self._clean.by_path[path]):
            return None
        clean = self._clean.by_path[path][occurrence]
        if not isinstance(value, Tensor) or not _are_alike(clean.tensor, value):
            return node.problem(value) or _unlike(clean.tensor, value)
        if not clean.is_current:
            return _REWRITTEN
        if key not in self._roots.clean and not self._depends_on_root(value):
            if _is_equal(clean.tensor, value):
                self.differences[key] = None
                return None
            if not torch.is_grad_enabled():
                return _NO_GRADIENT
            if self._roots.may_begin_at(node):
                self._roots.clean[key] = clean.tensor.detach()
        self._roots.followed.add(self._roots.computed(node))
        if key not in self._roots.clean and not value.requires_grad:
            return _NO_GRADIENT
        same = (id(clean), value.data_ptr(), value.stride(), version_of(value))  # of all names of these two
        if same not in self._known:
            self._known[same] = _difference(clean.tensor.detach(), value.detach(), self._is_careful)
        self.differences[key] = self._known[same]
        return None

    def _cut(self, node: ScoredNode, value: Tensor, clean: Tensor) -> Tensor:
        """Returns a tensor that depends on a new leaf only."""
        start = value.detach()
        if self._fraction:
            start = torch.where(start == clean, start, torch.lerp(start, clean, self._fraction))
        leaf, copied = _writable_copy(start)
        self.leaves.append(leaf)
        self._depends[copied.grad_fn] = True
        self._named[copied.grad_fn, copied.output_nr] = node
        return copied

    def _depends_on_root(self, value: Any) -> bool:
        """Whether a value depends on a root in the autograd graph. Hardly any node is visited twice."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return False
        known, starts = self._depends, [value.grad_fn]
        seen: list[Any] = []

        def sources(made: Any) -> list[Any]:
            return [] if made in known else [each for each, _ in made.next_functions]

        for node in walk(starts, sources):
            if known.get(node, False):
                known[value.grad_fn] = True
                return True
            seen.append(node)
        known.update(dict.fromkeys(seen, False))
        return False

    def scores(self, metric: Tensor) -> dict[str, Scores]:
        """Returns the scores of this run by path; adds paths without a gradient to `problems`."""
        self._products.is_open = True
        if self.leaves and metric.requires_grad:
            gradients_of(metric, self.leaves)
        self.leaves, self._depends, self._named, self._known = [], {}, {}, {}  # they keep the graph alive
        products, found = _as_arrays(self._products), dict[str, Scores]()
        for key, difference in self.differences.items():
            path = key[0]
            if path in self.problems:
                continue
            if key not in products and difference is not None and bool(difference.any()):
                self.problems[path] = _UNREACHED
            found[path] = found.get(path, np.zeros(())) + products.get(key, 0.0)
        return found


def _is_equal(one: Tensor, other: Tensor) -> bool:
    with without_torch_functions():  # derivative rules would take it for a step of the model
        return torch.equal(one, other)


def _writable_copy(value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a new leaf with this value, and a copy of it: the model may write into a copy, but not into a leaf."""
    leaf = (value.clone() if value.is_inference() else value).requires_grad_()  # from a part in inference mode
    return leaf, leaf.clone()


def _are_alike(clean: Tensor, value: Tensor) -> bool:
    return clean.shape == value.shape and clean.dtype == value.dtype and clean.device == value.device


def _unlike(clean: Tensor, value: Tensor) -> str:
    forms = [f"of shape {tuple(each.shape)} ({each.dtype} on {each.device})" for each in (clean, value)]
    return f"{forms[0]} in the clean run, {forms[1]} in the corrupted run"


def _difference(clean: Tensor, value: Tensor, is_careful: bool) -> Tensor:
    difference = clean.float() - value.float() if clean.element_size() < 4 else clean - value
    # Masked scores are infinite in both runs, which does not count as a difference.
    return torch.where(clean == value, 0, difference) if is_careful else difference


def _summed(difference: Tensor, gradient: Tensor, kept: KeptDims | None, is_careful: bool) -> Tensor:
    """Returns the sum of a difference times a gradient over all dimensions that are not kept."""
    gradient = gradient.to(difference.dtype)
    if kept is None and not is_careful:
        return torch.dot(difference.reshape(-1), gradient.reshape(-1))
    product = difference * gradient
    if is_careful:  # 0 * inf is 0 here: infinite differences without a gradient, and the reverse
        product = torch.where((difference == 0) | (gradient == 0), 0, product)
    return product.sum() if kept is None else kept.summed(product)


def _as_arrays(tensors: Mapping[tuple[str, int], Tensor]) -> dict[tuple[str, int], Scores]:
    """Returns all tensors as arrays, with one transfer from each device."""
    arrays: dict[tuple[str, int], Scores] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        present = [(key, tensor) for key, tensor in tensors.items() if tensor.device == device]
        parts = torch.cat([tensor.reshape(-1) for _, tensor in present]).cpu().double()
        sizes = [tensor.numel() for _, tensor in present]
        for (key, tensor), part in zip(present, parts.split(sizes), strict=True):
            arrays[key] = part.reshape(tensor.shape).numpy()
    return arrays
