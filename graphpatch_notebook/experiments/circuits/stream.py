"""The residual stream as sums: what a change of what components write changes where others read.

From a value that a component reads, additions and operations that only rearrange lead back to what components added to
the stream (`Writer`). Norms and scalings by constants on the way are steps of their own (`StreamStep`), which read such
sums, too. This works for any model with these operations, whatever the names of its layers are.

Tensors here are rows, `(..., rows, channels)`: all dimensions of a value before its channels are one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.capture.modules import original_forward
from graphpatch_notebook.capture.records import Ref, map_leaves
from graphpatch_notebook.components import Projection
from graphpatch_notebook.components.flow import Norm, Trails, Value, called, walk
from graphpatch_notebook.components.operations import ADDITIONS, NONLINEARITIES, NORMS, SAME_VALUES, SCALINGS, VIEWS
from graphpatch_notebook.components.weights import held_tensor, index_of
from graphpatch_notebook.errors import ExperimentError, GraphError
from graphpatch_notebook.patching.model_state import is_distributed

_IN_ORDER = frozenset(
    "view reshape flatten unflatten squeeze unsqueeze view_as reshape_as getitem expand expand_as".split()
)
_SAME = SAME_VALUES - frozenset("where clamp clip masked_fill nan_to_num".split())
_DIVISIONS = frozenset("div truediv itruediv div_".split())
_OF_CONSTANTS = VIEWS | SAME_VALUES | ADDITIONS | SCALINGS | NONLINEARITIES | {"sub", "rsub", "neg"}


class NoPathError(ExperimentError):
    """There is a path between two components, but not a linear one, for this reason."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamStep:
    """An operation on a part of the stream.

    Attributes:
        value: Its result.
        terms: The summands of what it reads: values that components write, and results of steps.
        function: The operation: of rows; if it is a norm, of a tensor like the recorded one, or of more rows.
        norm: The path of what it reads, if it is a norm; all others are linear.
    """

    value: Value
    terms: tuple[Value, ...]
    function: Callable[[Tensor], Any]
    norm: str = ""

    def changed(self, change: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Returns the change of the result for a change of what it reads in a run with these values."""
        if not self.norm:
            return self.function(change)  # type: ignore[no-any-return]
        read = values[self.norm]
        after = self.function((rows_of(read) + change).reshape(-1, *read.shape[1:]).to(read.dtype))
        return after.reshape(change.shape) - rows_of(self.function(read))  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Decoder:
    """The linear map that an SAE decodes latents by: like a `Projection`, with a latent in place of each head."""

    decode: Callable[[Tensor], Tensor]
    heads: Tensor
    channels: int
    like: Tensor

    @functools.cached_property
    def indices(self) -> list[slice | Tensor]:
        """The numbers of each latent, as `index_of` gives them."""
        return list(map(index_of, self.heads))

    def weight(self) -> Tensor:
        """Returns its matrix, with a row for each latent.

        Raises:
            NoPathError: It is not linear.
        """
        each = torch.eye(self.channels, dtype=self.like.dtype, device=self.like.device)
        some = torch.linspace(0, 1, self.channels, dtype=self.like.dtype, device=self.like.device)[None]
        with torch.no_grad():
            none = self.decode(torch.zeros_like(some))
            weight = self.decode(each) - none
            if not torch.allclose(self.decode(some), some @ weight + none, rtol=1e-3, atol=1e-3):
                raise NoPathError("its SAE does not decode latents by a linear map")
        return weight


@dataclass(frozen=True, slots=True, eq=False)
class Writer:
    """What a component adds to the residual stream: one sender, or one for each head, or each latent of an SAE.

    Attributes:
        value: What is added; for heads, the sum of what they write.
        path: The path of the value that is recorded: `value` itself, or what the linear map of the heads reads.
        projection: The linear map of the heads, or latents.
        stream: The stack that it belongs to: what the names of its layers begin with.
    """

    names: tuple[str, ...]
    value: Value
    path: str
    projection: Projection | Decoder | None = None
    stream: str = ""

    def change(self, now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Tensor:
        """Returns the value of each sender in one run, minus its value in another: `(senders, rows, channels)`."""
        change = now[self.path] - before[self.path]
        if self.projection is None:
            return rows_of(change)[None]
        weight, heads = self.projection.weight(), self.projection.indices
        rows = rows_of(change, self.projection)
        return torch.stack([rows[:, numbers] @ weight[numbers] for numbers in heads])


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """A value of the stream as a sum, up to what is the same in all runs.

    Attributes:
        terms: The summands: values that components write, and results of steps.
        steps: All steps on the way, in order of execution.
        writers: All writers that it is computed from, by value.
    """

    terms: tuple[Value, ...]
    steps: tuple[StreamStep, ...]
    writers: Mapping[Value, Writer]

    @property
    def norms(self) -> dict[str, Sum]:
        """What the norms on the way read, by its path."""
        numbered = enumerate(self.steps)
        return {step.norm: Sum(step.terms, self.steps[:at], self.writers) for at, step in numbered if step.norm}

    def direct(self, terms: Sequence[Value]) -> list[Writer]:
        """Returns the writers among summands."""
        return [self.writers[value] for value in terms if value in self.writers]

    def change(self, written: Callable[[list[Writer]], Tensor | None], values: Mapping[str, Tensor]) -> Tensor | None:
        """Returns the change of the sum in a run with these values; `None` if nothing changes.

        Args:
            written: Returns the sum of the changes of writers, or `None`.
            values: The values of what norms read, by path.
        """
        known: dict[Value, Tensor] = {}

        def total(terms: Sequence[Value]) -> Tensor | None:
            found = written(self.direct(terms))  # all at once: one product with the matrix of what is kept
            for part in (known[value] for value in terms if value in known):
                found = part if found is None else found + part
            return found

        for step in self.steps:
            change = total(step.terms)
            if change is not None:
                known[step.value] = step.changed(change, values)
        return total(self.terms)


class LinearPaths:
    """Finds the sums that values are, up to what `writers` write."""

    def __init__(
        self, trails: Trails, writers: Mapping[Value, Writer], parts: Mapping[Value, tuple[Value, ...]] | None = None
    ) -> None:
        self._trails = trails
        self._flow = trails.flow
        self.writers, self._parts = dict(writers), dict(parts or {})
        self._sums: dict[Value, Sum] = {}
        self._terms: dict[Value, tuple[Value, ...]] = {}
        self._steps: dict[Value, StreamStep] = {}
        self._nodes, self._next = list(self._flow.order), 0
        self._moving = {value.node for value in (*writers, *self._parts)}

    def depends(self, value: Value) -> bool:
        """Whether a value depends on what a component writes."""
        end = self._flow.order[value.node] + 1
        for node in self._nodes[self._next : end]:
            if node.kind in ("op", "call", "element") and any(
                read.node in self._moving for read in self._flow.reads(node)
            ):
                self._moving.add(node)
        self._next = max(self._next, end)
        return value.node in self._moving

    def of(self, value: Value) -> Sum:
        """Returns a value as a sum.

        Raises:
            NoPathError: It depends on a writer in another way.
        """
        if value not in self._sums:
            # Not by recursion: the stream of a deep model is a long chain of additions.
            for each in sorted(walk([value], self._sources), key=lambda each: self._flow.order[each.node]):
                if each not in self._terms:
                    self._terms[each] = self._made(each)
            terms = self._terms[value]
            on_the_way = list(walk(terms, lambda each: self._steps[each].terms if each in self._steps else ()))
            steps = sorted(
                (self._steps[each] for each in on_the_way if each in self._steps),
                key=lambda step: self._flow.order[step.value.node],
            )
            writers = {each: self.writers[each] for each in on_the_way if each in self.writers}
            self._sums[value] = Sum(terms, tuple(steps), writers)
        return self._sums[value]

    def _sources(self, value: Value) -> list[Value]:
        """Returns the parts of the stream that a linear operation or a norm reads, if they are not known yet."""
        if value in self.writers or value in self._parts or value in self._terms or not self.depends(value):
            return []
        if (norm := self._trails.norms.get(value)) is not None:
            return [norm.given.value]
        is_step = value.op in ADDITIONS | SCALINGS | NORMS | _SAME | _IN_ORDER
        return [read for read in self._flow.reads(value.node) if self.depends(read)] if is_step else []

    def _made(self, value: Value) -> tuple[Value, ...]:
        if value in self.writers:
            return (value,)
        if value in self._parts:
            return self._parts[value]
        if not self.depends(value):
            return ()
        sources, op, made = self._sources(value), value.op, value.node.whole
        if (norm := self._trails.norms.get(value)) is not None or op in NORMS:
            return self._of_norm(value, sources, norm)
        if sources and all(read.size == value.size and read.shape[-1:] == value.shape[-1:] for read in sources):
            terms = tuple(term for source in sources for term in self._terms[source])
            if op in ADDITIONS and made.kwargs.get("alpha", 1) == 1 and len(set(terms)) == len(terms):
                return terms
            if op in _SAME | _IN_ORDER and len(sources) == 1:
                return self._terms[sources[0]]
            if op in SCALINGS and self._is_scaled(value, sources[0]):
                return self._step(value, sources[0], self._scaling(value, sources[0]))
        raise NoPathError(f"{self._flow.path(value)} ({op or value.node.kind}) is not linear in the stream")

    def _step(
        self, value: Value, source: Value, function: Callable[[Tensor], Any], norm: str = ""
    ) -> tuple[Value, ...]:
        self._steps[value] = StreamStep(value, self._terms[source], function, norm)
        return (value,)

    def _is_scaled(self, value: Value, source: Value) -> bool:
        """Whether an operation multiplies its source by constants, or divides it by them."""
        made, others = value.node.whole, [read for read in self._flow.reads(value.node) if read != source]
        first = made.args[0] if made.args else None
        is_first = isinstance(first, Ref) and self._flow.resolve(first.node, first.dig) == source
        if made.kwargs or (value.op in _DIVISIONS and not is_first):
            return False
        try:
            for read in others:
                held_tensor(self._flow, read, _OF_CONSTANTS)
        except GraphError:
            return False
        is_row = all(read.size == 1 or read.shape[-1:] == (read.size,) for read in others)
        return is_row and len(self._flow.reads(value.node)) == len(others) + 1

    def _scaling(self, value: Value, source: Value) -> Callable[[Tensor], Any]:
        def argument(read: Value, rows: Tensor) -> Tensor:
            if read == source:
                return rows.clone() if value.node.whole.is_in_place else rows
            constant = held_tensor(self._flow, read, _OF_CONSTANTS)
            return constant.reshape(-1) if constant.numel() > 1 else constant.reshape(())

        return lambda rows: self._flow.rerun(value.node, lambda read: argument(read, rows))

    def _of_norm(self, value: Value, sources: Sequence[Value], norm: Norm | None) -> tuple[Value, ...]:
        where = self._flow.path(value)
        if len(sources) != 1 or sources[0].shape != value.shape:
            raise NoPathError(f"the norm at {where} reads several values, or changes the shape of the stream")
        if norm is not None:
            return self._step(value, sources[0], self._of_module(norm, where), norm.given.path)

        def function(rows: Tensor) -> Any:
            def argument(read: Value) -> Tensor:
                return rows if read == sources[0] else held_tensor(self._flow, read, _OF_CONSTANTS)

            return self._flow.rerun(value.node, argument)

        return self._step(value, sources[0], function, self._flow.boundary_path(sources[0]))

    def _of_module(self, norm: Norm, where: str) -> Callable[[Tensor], Any]:
        frame = norm.frame
        call = frame.call
        assert call is not None
        if sum(isinstance(given, Ref) for given in (*call.args, *call.kwargs.values())) != 1:
            raise NoPathError(f"the norm at {where} takes several arguments")

        def function(rows: Tensor) -> Any:
            if any(map(is_distributed, frame.module.parameters(recurse=False))):
                raise ExperimentError(
                    f"edges need the function of the norm at {where}, whose weights are only whole while the model "
                    "runs (FSDP, sequence parallelism): use attribute(), or the model in one process"
                )
            args, kwargs = map_leaves((call.args, call.kwargs), lambda given: rows if isinstance(given, Ref) else given)
            return called(frame, original_forward(frame.module), args, kwargs)

        return function


def in_order(value: Value, source: Value) -> bool:
    """Whether a value has the rows of its source, in the same order."""
    return value.op in _IN_ORDER | _SAME and value.size == source.size and value.shape[-1:] == source.shape[-1:]


def rows_of(value: Tensor, projection: Projection | Decoder | None = None) -> Tensor:
    """Returns a value with all dimensions before its channels flattened, as a view if possible.

    The channels are the last dimension, or those that belong to a projection.
    """
    return value.reshape(-1, value.shape[-1] if projection is None else projection.channels)
