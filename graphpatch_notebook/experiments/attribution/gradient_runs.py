"""The runs of an attribution: one without gradients on the clean inputs, and some with gradients between the two.

The nodes are scored in groups that fit into memory. For each group:

1. A clean run without gradients records the values (`CleanValues`).
2. A run on the corrupted inputs with gradients finds the roots; at its end, all values are compared (`GradientRun`).
3. Integrated gradients take further runs, which are interpolated between the two at the roots.
4. One backward pass of each run gives the gradients of all values, which are multiplied with the differences.

For one-sided scores, each value is a group of its own, and the clean run is one on the corrupted inputs in which this
value is the clean one.

A *root* is a floating-point value that differs between the runs, although nothing that it is computed from differs. A
new leaf replaces it, so autograd never reaches the weights, whether they require gradients or not.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture.records import Node
from graphpatch_notebook.components import operations
from graphpatch_notebook.components.flow import Flow
from graphpatch_notebook.errors import ExperimentError, collected_warnings
from graphpatch_notebook.experiments.attribution.rules import DerivativeRules, Method
from graphpatch_notebook.experiments.attribution.scored_nodes import KeptDims, ScoredNode, Scores, flow_of
from graphpatch_notebook.experiments.attribution.secants import family_name, has_memory
from graphpatch_notebook.experiments.engine.cells import noted_metric
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import CustomPatch, Patch
from graphpatch_notebook.patching import PatchContext
from graphpatch_notebook.patching.model_state import preserved, sharding_of
from graphpatch_notebook.torch_compat import version_of, without_torch_functions

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

    def in_run(self, *, is_clean: bool) -> AbstractContextManager[Any]:
        """Returns a context manager for a run of the model, within the rules of the derivatives."""
        if is_clean:
            self._made = []
        self._left = None if is_clean else iter(self._made)
        return self if self._is_frozen else nullcontext()

    def _decided(self, made: Tensor) -> Tensor:
        if self._left is None:
            self._made.append(made)
            return made
        clean = next(self._left, None)
        if clean is None or clean.shape != made.shape:
            raise ExperimentError(
                "the routing cannot be frozen: the corrupted run makes other choices than the clean run, such as "
                f"numbers of shape {tuple(made.shape)}"
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
        listener: Called with each node and its value; returns the value to use.
        context: The patch context to run the model in.
        keeping: The same for a run without gradients, in which the listener only keeps the values that are compared.
    """

    listener: Callable[[ScoredNode, Any], Any]

    def __init__(self, pg: PatchableGraph, nodes: Sequence[ScoredNode]) -> None:
        self._pg, self._nodes = pg, [node for node in nodes if not node.is_parameter]

    # Made when they are entered: a context that never is warns, and the metric of the clean run may fail.
    @functools.cached_property
    def context(self) -> PatchContext:
        patches = {node.path: (_Watch if node.can_be_cut else _Look)(node, self) for node in self._nodes}
        return PatchContext(captured(self._pg), patches)

    @functools.cached_property
    def keeping(self) -> PatchContext:
        kept = {node.path: _Keep(node, self) for node in self._nodes if node.is_compared}
        return PatchContext(captured(self._pg), kept)


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


class _Keep(_Look):
    """Passes each value to a listener that only keeps it."""

    only_keeps = True


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
        infinite: The paths whose scores are not finite, which are among these.
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
    choices: Choices
    clean_metric: float = float("nan")
    corrupted_metric: float = float("nan")
    scores: dict[str, Scores] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    infinite: set[str] = field(default_factory=set)
    remarks: list[str] = field(default_factory=list)
    fallbacks: dict[str, str] = field(default_factory=dict)
    changes: dict[str, float] = field(default_factory=dict)

    def run(self, *, is_one_sided: bool) -> None:
        """Computes the scores. The model and the random state are restored.

        If they are one-sided, each value is compared with the corrupted run in which it alone is restored.
        """
        self._start()
        self.scores = {node.path: np.zeros(()) for node in self.nodes if node.is_parameter}
        model = captured(self.pg).module
        with collected_warnings() as messages, torch.inference_mode(False), preserved(model) as self._snapshot:
            (self._run_one_sided if is_one_sided else self._run_all)()
        # Paths that were not computed are in `problems`.
        self.remarks = [message for message in messages if "never fired" not in message]

    @property
    def roots(self) -> list[str]:
        """The paths at which the runs begin to differ."""
        return list(dict.fromkeys(path for path, _ in self._run.roots))

    def _start(self) -> None:
        self._run = GradientRun(flow_of(self.pg.nodes.root), self.kept)

    def _run_all(self) -> None:
        wanted = {node.path for node in self.nodes if node.is_compared and not node.is_parameter}
        while wanted:
            wanted = self._score(wanted)
        infinite = _not_finite(self.scores)
        while infinite:
            infinite = self._score(infinite, is_careful=True)
            self.infinite = _not_finite(self.scores)
        for path in self.infinite:
            self.problems[path] = f"its score is not finite ({self.scores.pop(path).sum()}): {_OVERFLOW}"

    def _run_one_sided(self) -> None:
        wanted = {node.path: node for node in self.nodes if node.is_wanted and not node.is_parameter}
        clean = CleanValues(wanted, 2**62)
        with torch.no_grad():
            clean_metric = self._clean_number(self._output(clean, self.clean))
        clean.end()
        self.problems |= clean.problems
        for path, node in wanted.items():
            if path not in clean.values:
                self.problems.setdefault(path, "it was not computed")
            elif not node.can_be_cut:
                self.problems[path] = "it cannot be replaced: the state of a module, or a view that the model fills"
            else:
                self._start()
                self._score({path}, restored=iter([value for value, _ in clean.values[path]]), is_careful=True)
                if path in self.scores:
                    self.changes[path] = self.clean_metric - self.corrupted_metric
        self._start()
        self.clean_metric = clean_metric

    def _score(
        self, wanted: set[str], *, restored: Iterator[Tensor] | None = None, is_careful: bool = False
    ) -> set[str]:
        """Scores as many paths as fit into memory, and returns the remaining ones.

        With `restored`, the clean run is one on the corrupted inputs in which the wanted path has these values.
        """
        # Interpolated runs need all roots.
        clean, run = CleanValues(wanted, self.max_bytes if self.fractions == [0.0] else 2**62), self._run
        rules, inputs = DerivativeRules(self.method), self.clean
        patches: dict[Any, Any] = {}
        if restored is not None:
            patch = CustomPatch(custom_op=lambda value: next(restored, value).clone())
            inputs, patches = self.corrupted, dict.fromkeys(wanted, patch)
        with torch.no_grad(), rules.recording(), self.pg.patch(patches) if patches else nullcontext():
            self.clean_metric = self._clean_number(self._output(clean, inputs))
        clean.end()
        run.compare_with(clean, is_careful=is_careful)
        metric = self._metric_at(0.0, rules)
        self.corrupted_metric = float(metric.detach())
        self.fallbacks |= rules.fallbacks
        if run.leaves and not metric.requires_grad and restored is None:
            raise no_gradient()
        for path in wanted - clean.left:
            before, now = len(clean.values.get(path, ())), run.counts[path]
            if before != now or not now:
                problem = f"it was computed {before} times in the clean run, {now} times in the corrupted run"
                run.problems.setdefault(path, clean.problems.get(path) or (problem if before or now else _ABSENT))
        clean.release()
        totals: dict[str, Scores] = {}
        for fraction in self.fractions:
            if fraction:
                del metric
                metric = self._metric_at(fraction, DerivativeRules(self.method))
            found, count = run.scores(metric), len(self.fractions)
            mean = found if count == 1 else {path: totals.get(path, 0.0) + each / count for path, each in found.items()}
            totals |= {path: np.asarray(score) for path, score in mean.items()}
        self.problems |= run.problems
        self.scores |= {path: score for path, score in totals.items() if path not in run.problems}
        return clean.left

    def _clean_number(self, output: Any) -> float:
        """Returns the metric of the clean run, which must be one number on all processes: gradients are their sums."""
        with noted_metric(output):
            number = float(metric_number(self.metric(output)))
        if (sharding := sharding_of(captured(self.pg).root)) is not None:
            numbers = sharding.processes.gathered(number)
            if not np.allclose(numbers, number, rtol=1e-3, atol=1e-6, equal_nan=True):
                raise ExperimentError(f"the metric differs between the processes: {numbers} on the clean inputs")
        return number

    def _output(self, listener: CleanValues | GradientRun, inputs: Inputs) -> Any:
        self._snapshot.restore()  # all runs have the same random numbers and buffers
        self.watched.listener = listener
        context = self.watched.keeping if isinstance(listener, CleanValues) else self.watched.context
        with self.choices.in_run(is_clean=inputs is self.clean), context:
            return inputs.run(self.pg)

    def _metric_at(self, fraction: float, rules: DerivativeRules) -> Tensor:
        """Returns the metric of a run with gradients."""
        self._run.start(fraction)
        with torch.enable_grad(), rules.applied():
            metric = metric_number(self.metric(self._output(self._run, self.corrupted)))
        self._run.over()
        return metric


_OVERFLOW = "where half precision overflows, try a smaller metric, or the model in bfloat16 or float32"
_ABSENT = "it was not computed"


def _not_finite(scores: Mapping[str, Scores]) -> set[str]:
    """Returns the paths with scores that are not all finite."""
    return {
        path for path, score in scores.items() if not (np.isfinite(score).all() if score.ndim else math.isfinite(score))
    }


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


def gradients_of(metric: Tensor, values: Sequence[Tensor] | Sequence[GradientEdge]) -> list[Tensor | None]:
    """Returns the gradient of the metric at each value; `None` where the metric does not depend on it."""
    try:
        return list(torch.autograd.grad(metric, values, allow_unused=True))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ExperimentError(f"the gradients of the metric cannot be computed: {error}") from error


# -- the clean run -----------------------------------------------------------------------------------------------------

_Recorded: TypeAlias = "tuple[Tensor, int | None]"
"""A value, and the version counter of the tensor when it was recorded."""


def _is_current(recorded: _Recorded) -> bool:
    """Whether the tensor is unchanged since: the model may write into it through a view."""
    tensor, version = recorded
    return version_of(tensor) == version


class CleanValues:
    """The listener of the clean run: keeps the values of wanted paths, in order of execution, up to a memory limit.

    The limit is for values and their gradients; one value is always kept.

    Attributes:
        values: By path, the values, one for each time that it was computed.
        left: Paths whose values exceed the limit.
        problems: Why the value of a path cannot have a score.
    """

    def __init__(self, wanted: Collection[str], max_bytes: int) -> None:
        self._wanted, self._available = set(wanted), max_bytes
        self._visited: list[tuple[ScoredNode, Any, int | None]] = []
        self._unseen = max_bytes // 16  # entries, of eight bytes at most: fewer than this fit in any case
        self._by_id: dict[int, _Recorded] = {}
        self.values: dict[str, list[_Recorded]] = {}
        self.left: set[str] = set()
        self.problems: dict[str, str] = {}

    def __call__(self, node: ScoredNode, value: Any) -> Any:
        if node.path in self._wanted:
            self._visited.append((node, value, version_of(value)))
            self._unseen -= value.numel() if isinstance(value, Tensor) else 0
            if self._unseen < 0 or node.is_state or node.node.is_mutated_later:
                self.end()
        return value

    def end(self) -> None:
        """Keeps the values that were visited, as far as they fit."""
        for node, value, version in self._visited:
            path = node.path
            if path not in self._wanted:
                continue
            problem = node.problem(value)
            recorded = self._recorded(node, value, version) if problem is None else None
            if recorded is not None:
                self.values.setdefault(path, []).append(recorded)
                continue
            self._wanted.remove(path)
            self.values.pop(path, None)
            if problem is None:
                self.left.add(path)
            else:
                self.problems[path] = problem
        self._visited.clear()

    def _recorded(self, node: ScoredNode, value: Tensor, version: int | None) -> _Recorded | None:
        known = self._by_id.get(id(value))
        if known is not None and known[0] is value and known[1] == version:
            return known
        self._available -= value.numel() * max(value.element_size(), 4) * 2
        if self._by_id and (self.left or self._available < 0):  # the roots of a group are in it, or in one before it
            return None
        is_part = value.numel() * value.element_size() * 2 < value.untyped_storage().nbytes()  # which keeps all alive
        # Ids are unique while the tensors are kept, if these are not copies.
        if (node.is_state or node.node.is_mutated_later or is_part) and version_of(value) == version:
            value = value.clone()
            version = version_of(value)
        recorded = self._by_id[id(value)] = value, version
        return recorded

    def release(self) -> None:
        """Frees all values."""
        self.values.clear()
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
_Key: TypeAlias = "tuple[str, int]"
"""A path, and how often it was computed before."""
_Edge: TypeAlias = "tuple[Any, int]"
"""Where the gradient of a value comes from: its `grad_fn`, and which of the results of that it is."""
_Visited: TypeAlias = "tuple[ScoredNode, _Key, Any, int | None]"
"""A value of the corrupted run, and its version counter then."""


class GradientRun:
    """The listener of runs with gradients, at points between the corrupted run and the clean one.

    The first run of each group is the corrupted one. Its values are compared with the clean ones, which finds the
    roots. At the roots of the other runs, the fraction is 0 for the corrupted value, and 1 for the clean one.

    Attributes:
        roots: The clean values at which the runs begin to differ, of all groups.
        problems: Why a path cannot have a score.
        counts: How often each path was computed in this run.
        leaves: The leaves of the roots of this run.
        is_over: Whether the forward is over: values after this are recomputed in backward.
    """

    def __init__(self, flow: Flow, kept: Mapping[str, KeptDims]) -> None:
        self._flow, self._kept = flow, kept
        self.roots: dict[_Key, Tensor] = {}
        self._followed: set[Node] = set()  # their values depend on a root, also where the model detaches them

    def compare_with(self, clean: CleanValues, *, is_careful: bool) -> None:
        """Begins a group, whose values are compared with those of a clean run."""
        self._clean, self._is_careful = clean.values, is_careful
        self.problems: dict[str, str] = {}
        # Clean value minus corrupted value, in float32 for half precision; `None` where both have the same bits.
        self._differences: dict[_Key, Tensor | None] = {}

    def start(self, fraction: float) -> None:
        """Begins a run."""
        self._fraction, self.is_over = fraction, False
        self.counts: Counter[str] = Counter()
        self.leaves: list[Tensor] = []
        self._visited: deque[_Visited] = deque()  # the values that are yet to be compared
        self._edges: dict[_Key, _Edge] = {}
        self._depends: dict[Any, bool] = {None: False}
        self._named: dict[_Edge, ScoredNode] = {}

    def __call__(self, node: ScoredNode, value: Any) -> Any:
        path = node.path
        if self.is_over:  # recomputed in backward
            return _writable_copy(value.detach())[1] if (path, 0) in self.roots else value
        at = self.counts[path]
        self.counts[path] = at + 1
        key = (path, at)
        has_gradient = isinstance(value, Tensor) and value.requires_grad
        if has_gradient:
            value = self._under_own_name(node, value)
        is_compared = not self._fraction and at < len(self._clean.get(path, ())) and path not in self.problems
        is_connected = has_gradient and (is_compared or key in self._differences) and self._depends_on_root(value)
        if is_compared and (is_connected or self._differs(node, key, value)):
            self._visited.append((node, key, value, version_of(value)))
            if node.node.is_mutated_later:
                self._compare()
        if key in self.roots:
            value, is_connected = self._cut(node, value, self.roots[key]), True
        if is_connected:
            self._edges[key] = value.grad_fn, value.output_nr
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
        # With a view, the gradient of values that the model writes in place would be lost, and that of an item needs a
        # copy of its container.
        stays = node.node.is_mutated_later or node.node.is_in_place or node.is_in_container or not node.can_be_cut
        if stays or value.layout is not torch.strided or not torch.is_grad_enabled():
            if not self._is_only_name(node, self._named[edge]):
                self.problems.setdefault(node.path, _SHARED)
            return value
        alias = value.view_as(value)
        self._named[alias.grad_fn, alias.output_nr] = node
        return alias

    def _is_only_name(self, node: ScoredNode, first: ScoredNode) -> bool:
        """Whether all operations that use a tensor, whose first name was `first`, are known to get it from a node."""
        flow, frame, own = self._flow, node.frame, node.operation
        if first.operation is not own or any(each.has_own_graph for each in frame.frames_above()):
            return False
        start, end = flow.start(frame), flow.order[frame.call or frame.output_node]
        users = [flow.order[user] for user in flow.users.get(own, ())]
        if node.node.kind == "output":
            return all(user > end for user in users)
        is_returned = any(place.value.node is own for place in flow.outputs(flow.root))
        return not is_returned and all(start <= user <= end for user in users)

    def _differs(self, node: ScoredNode, key: _Key, value: Any) -> bool:
        """Whether a value that does not depend on a root differs from the clean one; finds roots."""
        path, at = key
        clean = self._clean[path][at]
        if key in self.roots or self._problem(node, clean, value) is not None:  # which is kept with the other values
            return True
        with without_torch_functions():  # derivative rules would take it for a step of the model
            if torch.equal(clean[0], value):
                self._differences[key] = None
                return False
        if not torch.is_grad_enabled():
            self.problems[path] = _NO_GRADIENT
            return False
        # What the model detaches must stay without gradients, since such code does not expect them. But the result
        # of a part that runs under `torch.no_grad` is a root for the parts after it.
        self._compare()
        operation = node.operation
        before = {operation, *(read.node for read in self._flow.reads(operation))}
        if node.can_be_cut and self._followed.isdisjoint(before):
            self.roots[key] = clean[0].detach()
        return True

    def _problem(self, node: ScoredNode, clean: _Recorded, value: Any) -> str | None:
        """Returns why a value cannot be compared with that of the clean run, or `None`."""
        if not isinstance(value, Tensor) or _form(clean[0]) != _form(value):
            return node.problem(value) or f"{_shown(clean[0])} in the clean run, {_shown(value)} in the corrupted"
        return None if _is_current(clean) else _REWRITTEN

    def _compare(self) -> None:
        """Subtracts the values that were visited from those of the clean run."""
        known: dict[Any, Tensor] = {}  # by what all names of two values have in common
        while self._visited:
            node, key, value, version = self._visited.popleft()
            path, at = key
            if path in self.problems:
                continue
            recorded = self._clean[path][at]
            problem = self._problem(node, recorded, value)
            if problem is None and version_of(value) != version:  # which it did not when it was captured
                problem = _REWRITTEN
            if problem is None:
                self._followed.add(node.operation)
                problem = None if value.requires_grad or key in self.roots else _NO_GRADIENT
            if problem is not None:
                self.problems[path] = problem
                continue
            clean = recorded[0]
            same = (id(clean), value.data_ptr(), value.stride())
            if same not in known:
                wide = [each.detach().float() if each.element_size() < 4 else each.detach() for each in (clean, value)]
                # Masked scores are infinite in both runs, which does not count as a difference.
                known[same] = (
                    torch.where(clean == value, 0, wide[0] - wide[1]) if self._is_careful else wide[0] - wide[1]
                )
            self._differences[key] = known[same]

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

    def _depends_on_root(self, value: Tensor) -> bool:
        """Whether a value depends on a root in the autograd graph. Hardly any node is visited twice."""
        known = self._depends
        start = value.grad_fn
        if start in known:
            return known[start]
        waiting: list[Any] = [start]
        for node in waiting:  # nearest first
            for before, _ in node.next_functions:
                is_known = known.get(before)
                if is_known:
                    known[start] = True
                    return True
                if is_known is None:
                    waiting.append(before)
        known.update(dict.fromkeys(waiting, False))
        return False

    def over(self) -> None:
        """Ends the forward of a run."""
        self.is_over = True
        self._compare()

    def scores(self, metric: Tensor) -> dict[str, Scores]:
        """Returns the scores of this run by path; adds paths without a gradient to `problems`."""
        edges = {key: edge for key, edge in self._edges.items() if self._differences.get(key) is not None}
        gradients: list[Tensor | None] = []
        if self.leaves and metric.requires_grad:
            leaves = [get_gradient_edge(leaf) for leaf in self.leaves]
            gradients = gradients_of(metric, [*leaves, *(GradientEdge(*edge) for edge in edges.values())])[
                len(leaves) :
            ]
        self.leaves, self._depends, self._named, self._edges = [], {}, {}, {}  # they keep the graph alive
        products, found, nothing = self._products(edges, gradients), dict[str, Scores](), np.zeros(())
        for key, difference in self._differences.items():
            path = key[0]
            if path in self.problems:
                continue
            product = products.get(key)
            if product is None:
                product = nothing
                if difference is not None and bool(difference.any()):
                    self.problems[path] = _UNREACHED
            found[path] = np.asarray(found[path] + product) if path in found else product
        return found

    def _products(self, keys: Iterable[_Key], gradients: Sequence[Tensor | None]) -> dict[_Key, Scores]:
        """Returns the sums of differences times gradients, where there is a gradient."""
        names: dict[_Key, Any] = {}
        found: dict[Any, Tensor] = {}  # many names are of one value with one use
        for key, gradient in zip(keys, gradients, strict=False):
            difference = self._differences[key]
            if gradient is None or difference is None:  # of several outputs of one function, some may not have any
                continue
            kept, same = self._kept.get(key[0]), key
            if type(gradient) is Tensor and has_memory(gradient):
                same = (id(difference), gradient.data_ptr(), gradient.stride(), id(kept))  # type: ignore[assignment]
            names[key] = same
            if same not in found:
                found[same] = _summed(difference, gradient, kept, self._is_careful)
        arrays = dict(zip(found, _as_arrays(found.values()), strict=True))
        return {key: arrays[same] for key, same in names.items()}


def _writable_copy(value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a new leaf with this value, and a copy of it: the model may write into a copy, but not into a leaf."""
    leaf = (value.clone() if value.is_inference() else value).requires_grad_()  # from a part in inference mode
    return leaf, leaf.clone()


def _form(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.device


def _shown(value: Tensor) -> str:
    return f"of shape {tuple(value.shape)} ({value.dtype} on {value.device})"


def _summed(difference: Tensor, gradient: Tensor, kept: KeptDims | None, is_careful: bool) -> Tensor:
    """Returns the sum of a difference times a gradient over all dimensions that are not kept."""
    gradient = gradient.to(difference.dtype)
    if kept is None and not is_careful:
        return torch.dot(difference.reshape(-1), gradient.reshape(-1))
    product = difference * gradient
    if is_careful:  # 0 * inf is 0 here: infinite differences without a gradient, and the reverse
        product = torch.where((difference == 0) | (gradient == 0), 0, product)
    return product.sum() if kept is None else kept.summed(product)


def _as_arrays(tensors: Collection[Tensor]) -> list[Scores]:
    """Returns all tensors as arrays, with one transfer."""
    if not tensors:
        return []
    device = next(iter(tensors)).device
    flat = torch.cat([tensor.reshape(-1).to(device) for tensor in tensors]).cpu().double().numpy() + 0.0  # no -0.0
    ends = itertools.accumulate(tensor.numel() for tensor in tensors)
    return [flat[end - tensor.numel() : end].reshape(tensor.shape) for tensor, end in zip(tensors, ends, strict=True)]
