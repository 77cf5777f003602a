"""The linear paths of a model: the terms of values that are sums.

From a value that a component reads, additions, scalings by constants, and operations that only rearrange lead back to
what other components added to the residual stream (`Writer`). A norm on the way is that of another sum (`NormOfSum`).
This works for any model with these operations, whatever the names of its layers are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.capture.observers import original_forward
from graphpatch_notebook.capture.records import Node, Ref, map_leaves
from graphpatch_notebook.checks.sharding import is_distributed
from graphpatch_notebook.components import Projection
from graphpatch_notebook.components.chain import Norm, Trails
from graphpatch_notebook.components.flow import Flow, Value, called, walk
from graphpatch_notebook.components.operations import ADDITIONS, NONLINEARITIES, NORMS, SAME_VALUES, SCALINGS, VIEWS
from graphpatch_notebook.components.weights import held_tensor
from graphpatch_notebook.errors import ExperimentError, GraphError
from graphpatch_notebook.values import ContainerSpec, ScalarSpec

_IN_ORDER = frozenset(
    "view reshape flatten unflatten squeeze unsqueeze view_as reshape_as getitem expand expand_as".split()
)
_MOVES = frozenset("transpose permute swapaxes swapdims movedim moveaxis roll flip".split())
_ALTERED = frozenset("where clamp clip masked_fill nan_to_num".split())
_DIVISIONS = frozenset("div truediv itruediv div_".split())
_OF_CONSTANTS = VIEWS | SAME_VALUES | ADDITIONS | SCALINGS | NONLINEARITIES | {"sub", "rsub", "neg"}
_MOST_TERMS = 20_000


class NoPathError(ExperimentError):
    """There is a path between two components, but not a linear one, for this reason."""


@dataclass(frozen=True, slots=True, eq=False)
class Writer:
    """What a component adds to the residual stream: one sender, or one for each head.

    Attributes:
        value: What is added; for heads, the sum of what they write.
        path: The path of the value that is recorded: `value` itself, or what the linear map of the heads reads.
        projection: The linear map of the heads.
        stream: The stack that it belongs to: what the names of its layers begin with.
        steps: The operations on its value before it is added to the stream.
    """

    names: tuple[str, ...]
    value: Value
    path: str
    projection: Projection | None = None
    stream: str = ""
    steps: tuple[StreamStep, ...] = ()

    def change(self, now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Tensor:
        """Returns the value of each sender in one run, minus its value in another: `(senders, rows, channels)`."""
        rows = rows_of(now[self.path] - before[self.path])
        if self.projection is None:
            return rows[None]
        weight, heads = self.projection.weight(), self.projection.heads.to(rows.device)
        return torch.stack([rows[:, index_of(numbers)] @ weight[index_of(numbers)] for numbers in heads])


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """A multiplication of the stream with constants, or a division by them.

    Attributes:
        factors: The numbers, and the tensors that the model holds.
    """

    flow: Flow
    factors: tuple[float | Value, ...]
    is_division: bool = False

    def on(self, rows: Tensor) -> Tensor:
        """Returns rows times the constants; their shape is `(..., rows, channels)`."""
        for factor in self.factors:
            known = factor if not isinstance(factor, Value) else _row_of(_constant(self.flow, factor))
            rows = rows / known if self.is_division else rows * known
        return rows

    def back(self, gradients: Tensor) -> Tensor:
        """Returns the gradients of the factor that is not constant."""
        return self.on(gradients)


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """An operation, with plain arguments, that only moves the rows of the stream to other places."""

    node: Node
    source: Value

    def order(self, rows: Tensor) -> Tensor:
        """Returns the row of the source for each row of the result."""
        shape, count = self.source.shape[:-1], rows.shape[-2]
        if math.prod(shape) != count:
            raise NoPathError(f"{self.node.name} moves positions; give inputs of the shape of the example")
        numbers = torch.arange(count, device=rows.device).view(*shape, 1).expand(*shape, 2)
        made = self.node.whole
        moved: Tensor = made.target(numbers, *made.args[1:], **made.kwargs)
        if moved.shape[-1] != 2:
            raise NoPathError(f"{self.node.name} moves channels")
        return moved[..., 0].reshape(-1)

    def on(self, rows: Tensor) -> Tensor:
        return rows[..., self.order(rows), :]

    def back(self, gradients: Tensor) -> Tensor:
        return gradients[..., self.order(gradients).argsort(), :]


StreamStep: TypeAlias = "Scaling | Move"


@dataclass(frozen=True, slots=True, eq=False)
class NormOfSum:
    """A norm of a sum.

    Attributes:
        number: The number of its operation in order of execution.
        path: The path of what it normalizes.
        source: That, as a sum.
        function: The norm, of a tensor of the shape of the recorded one, or of more rows.
    """

    number: int
    path: str
    source: Sum
    function: Any


@dataclass(frozen=True, slots=True, eq=False)
class Summand:
    """A summand: what a component writes, or a norm of another sum, after some steps."""

    source: Writer | NormOfSum
    steps: tuple[StreamStep, ...] = ()

    def on(self, rows: Tensor) -> Tensor:
        """Returns rows of the source after all steps."""
        for step in self.steps:
            rows = step.on(rows)
        return rows

    def back(self, gradients: Tensor) -> Tensor:
        """Returns the gradients of the source, from those of the sum."""
        for step in reversed(self.steps):
            gradients = step.back(gradients)
        return gradients


Sum: TypeAlias = "tuple[Summand, ...]"


class LinearPaths:
    """Finds the terms of values that are sums, up to what `writers` write."""

    def __init__(self, trails: Trails, writers: Mapping[Value, Writer]) -> None:
        self._trails = trails
        self._flow = trails.flow
        self.writers = writers
        self._known: dict[Value, Sum] = {}
        self._depends: dict[Node, bool] = {}

    def of(self, value: Value) -> Sum:
        """Returns the terms of a value, up to a sum that is the same in all runs.

        Raises:
            NoPathError: It depends on a writer in another way.
        """
        # Not by recursion alone: the stream of a deep model is a long chain of additions.
        for before in self._chain(value):
            self._known.setdefault(before, self._made(before))
        return self._known[value]

    def _chain(self, value: Value) -> list[Value]:
        """Returns the values that a value is computed from and that are not known yet, in order of execution."""

        def unknown(each: Value) -> list[Value]:
            return [source for source in self._sources(each) if source not in self._known and self.depends(source)]

        return sorted(walk([value], unknown), key=lambda each: self._flow.order[each.node])

    def _sources(self, value: Value) -> list[Value]:
        if value in self.writers or value in self._known:
            return []
        if (norm := self._trails.norms.get(value)) is not None:
            return [norm.given.value]
        is_step = value.op in ADDITIONS or value.op in SCALINGS or value.op in NORMS or is_same(value)
        return self._flow.moving(value.node) if is_step else []

    def depends(self, value: Value) -> bool:
        """Whether a value depends on what a component writes."""
        if value in self.writers:
            return True
        waiting, writing = [value.node], {writer.node for writer in self.writers}
        while waiting:
            node = waiting[-1]
            if node in self._depends:
                waiting.pop()
                continue
            if node in writing:
                self._depends[node] = True
                continue
            reads = [read.node for read in self._flow.reads(node)] if node.kind in ("op", "call", "element") else []
            unknown = [read for read in reads if read not in self._depends]
            if unknown:
                waiting += unknown
            else:
                self._depends[node] = any(self._depends[read] for read in reads)
        return self._depends[value.node]

    def _made(self, value: Value) -> Sum:
        if (writer := self.writers.get(value)) is not None:
            return (Summand(writer),)
        if not self.depends(value):
            return ()
        if (norm := self._trails.norms.get(value)) is not None:
            return self._of_norm(value, norm)
        if value.op in NORMS:
            return self._of_norm_call(value)
        found: Sum | None = None
        if value.op in ADDITIONS:
            found = self._of_addition(value)
        elif value.op in SCALINGS:
            found = self._of_scaling(value)
        elif is_same(value):
            found = self._of_view(value)
        if found is None:
            raise NoPathError(f"{self._flow.path(value)} ({value.op or value.node.kind}) is not linear in the stream")
        if len(found) > _MOST_TERMS:
            raise NoPathError(f"{self._flow.path(value)} is a sum of more than {_MOST_TERMS} terms")
        return found

    def _of_addition(self, value: Value) -> Sum | None:
        reads = self._flow.reads(value.node)
        alpha = value.node.whole.kwargs.get("alpha", 1)
        terms: Sum = ()
        for number, read in enumerate(reads):
            own = self._sum_of(read)
            if own and (read.size != value.size or read.shape[-1:] != value.shape[-1:]):
                return None
            if number == 1 and alpha != 1 and own:
                if not isinstance(alpha, (int, float)):
                    return None
                own = _with(own, Scaling(self._flow, (float(alpha),)))
            terms += own
        return terms

    def _only_source(self, value: Value) -> Value | None:
        """Returns the part of the stream that an operation reads, if it is one value with as many rows and channels."""
        moving = [read for read in self._flow.reads(value.node) if self.depends(read)]
        is_alike = len(moving) == 1 and moving[0].size == value.size and moving[0].shape[-1:] == value.shape[-1:]
        return moving[0] if is_alike else None

    def _of_scaling(self, value: Value) -> Sum | None:
        made, source = value.node.whole, self._only_source(value)
        if source is None:
            return None
        factors: list[float | Value] = []
        for number, given in enumerate(made.args):
            known = self._flow.resolve(given.node, given.dig) if isinstance(given, Ref) else given
            if known == source:
                if value.op in _DIVISIONS and number:
                    return None
                continue
            if isinstance(known, Value) and isinstance(known.spec, ScalarSpec):
                known = known.spec.value
            if isinstance(known, Value) and not (_is_row(known) and _is_constant(self._flow, known)):
                return None
            if not isinstance(known, (int, float, Value)):
                return None
            factors.append(known)
        step = Scaling(self._flow, tuple(factors), value.op in _DIVISIONS)
        return _with(self._sum_of(source), step)

    def _of_view(self, value: Value) -> Sum | None:
        source = self._only_source(value)
        if source is None or value.op not in _MOVES:
            return None if source is None else self._sum_of(source)
        made = value.node.whole
        if any(isinstance(given, Ref) for given in (*made.args[1:], *made.kwargs.values())):
            return None
        return _with(self._sum_of(source), Move(made, source))

    def _of_norm(self, value: Value, norm: Norm) -> Sum:
        frame, given = norm.frame, norm.given
        call = frame.call
        assert call is not None
        refs = [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, Ref)]
        if len(refs) != 1:
            raise NoPathError(f"the norm at {self._flow.path(value)} takes several arguments")

        def function(rows: Tensor) -> Any:
            if any(is_distributed(held) for held in frame.module.parameters(recurse=False)):
                raise ExperimentError(
                    f"edges need the function of the norm at {self._flow.path(value)}, whose weights are only whole "
                    "while the model runs (FSDP, sequence parallelism): use attribute(), or the model in one process"
                )
            args, kwargs = map_leaves((call.args, call.kwargs), lambda g: rows if isinstance(g, Ref) else g)
            return called(frame, original_forward(frame.module), args, kwargs)

        return self._normed(value, given.value, given.path, function)

    def _of_norm_call(self, value: Value) -> Sum:
        moving = [read for read in self._flow.reads(value.node) if self.depends(read)]
        if len(moving) != 1:
            raise NoPathError(f"the norm at {self._flow.path(value)} reads several values")
        made, source = value.node.whole, moving[0]

        def argument(given: Any, rows: Tensor) -> Any:
            if not isinstance(given, Ref):
                return given
            known = self._flow.resolve(given.node, given.dig)
            if known is not None and known == source:
                return rows
            if known is None or isinstance(known.spec, (ScalarSpec, ContainerSpec)):
                raise NoPathError(f"an argument of {self._flow.path(value)} depends on sizes")
            return _constant(self._flow, known)

        def function(rows: Tensor) -> Any:
            args, kwargs = map_leaves((made.args, made.kwargs), lambda given: argument(given, rows))
            return made.target(*args, **kwargs)

        return self._normed(value, source, self._flow.boundary_path(source), function)

    def _normed(self, value: Value, source: Value, path: str, function: Any) -> Sum:
        if source.shape != value.shape:
            raise NoPathError(f"{self._flow.path(value)} changes the shape of the stream")
        terms = self._sum_of(source)
        return (Summand(NormOfSum(self._flow.order[value.node], path, terms, function)),)

    def _sum_of(self, value: Value) -> Sum:
        if value not in self._known:
            self._known[value] = self._made(value)
        return self._known[value]


def _with(terms: Sum, step: StreamStep) -> Sum:
    return tuple(Summand(term.source, (*term.steps, step)) for term in terms)


def is_same(value: Value) -> bool:
    """Whether an operation returns the values that it reads, possibly in other rows."""
    if value.op in _ALTERED:
        return False
    return value.op in SAME_VALUES or value.op in _MOVES or value.op in _IN_ORDER & VIEWS


def _is_row(value: Value) -> bool:
    return value.size == 1 or (bool(value.shape) and value.size == value.shape[-1])


def _row_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1) if tensor.numel() > 1 else tensor.reshape(())


def _constant(flow: Flow, value: Value) -> Tensor:
    """Returns a tensor that the model holds, or computes from such tensors."""
    return held_tensor(flow, value, _OF_CONSTANTS)


def _is_constant(flow: Flow, value: Value) -> bool:
    try:
        return flow.is_held(value) and _constant(flow, value) is not None
    except GraphError:
        return False


def in_order(value: Value, source: Value) -> bool:
    """Whether a value has the rows of its source, in the same order."""
    is_view = value.op in _IN_ORDER or value.op in SAME_VALUES - _ALTERED
    return is_view and value.size == source.size and value.shape[-1:] == source.shape[-1:]


def rows_of(value: Tensor) -> Tensor:
    """Returns a value with all dimensions before the last one, the channels, flattened: a view if possible."""
    return value.reshape(-1, value.shape[-1])


def index_of(numbers: Tensor) -> slice | Tensor:
    """Returns numbers as a slice, if they are consecutive."""
    first, last = int(numbers[0]), int(numbers[-1])
    is_range = last - first + 1 == len(numbers) and bool((numbers.diff() == 1).all())
    return slice(first, last + 1) if is_range else numbers
