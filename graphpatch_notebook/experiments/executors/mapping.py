"""A function of each batch of a dataset, here or on an executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from graphpatch_notebook.errors import ExperimentError, add_note
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import Measurement
from graphpatch_notebook.experiments.executors.checkpoint import weights_digest
from graphpatch_notebook.experiments.executors.dispatch import Dispatch, check_executor, task_maker
from graphpatch_notebook.experiments.executors.pickling import sendable
from graphpatch_notebook.experiments.executors.worker import Reference
from graphpatch_notebook.patchable_graph import PatchableGraph, captured

_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")
_AHEAD = 32
"""How many results may wait for an earlier one: so many are in memory."""


def map_batches(
    pg: PatchableGraph,
    function: Callable[[PatchableGraph, _Batch], _Result],
    batches: Iterable[_Batch],
    *,
    executor: Any = None,
    recipe: Any = None,
) -> Iterator[_Result]:
    """Yields `function(pg, batch)` for each batch, in order.

    With `executor=`, batches run in threads, in other processes or on a cluster, with the same results as here. At most
    32 results wait for an earlier one. A batch whose worker dies runs once more, on another worker.

    Args:
        pg: The graph.
        function: What to compute. For other processes it is pickled, and so is what it returns.
        batches: The batches, which are read when they are needed.
        executor: As for `pg.sweep`.
        recipe: As for `pg.sweep`.

    Raises:
        ExperimentError: The executor cannot be used, a worker has another model, or a batch ended its worker twice.
        Exception: What the function raises.

    Example:
        Scores over a dataset, with a running mean and standard error:

        >>> import torch
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from graphpatch_notebook.experiments import attribute, average
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), torch.ones(1, 2))
        >>> pairs = [(torch.randn(1, 2), torch.zeros(1, 2)) for _ in range(8)]
        >>> with ThreadPoolExecutor(2) as executor:
        ...     scores = map_batches(pg, lambda pg, pair: attribute(pg, torch.sum, *pair), pairs, executor=executor)
        ...     int(average(scores)["count"].max())
        8
    """
    if executor is None:
        return (function(pg, batch) for batch in batches)
    check_executor(executor, recipe, pg)
    return _elsewhere(pg, function, batches, executor, recipe)


def _elsewhere(
    pg: PatchableGraph,
    function: Callable[[PatchableGraph, Any], Any],
    batches: Iterable[Any],
    executor: Any,
    recipe: Any,
) -> Iterator[Any]:
    work = _BatchWork.of(pg, function)
    found = _InOrder()

    def run_here(pieces: Sequence[_Piece], found: _InOrder) -> None:
        found.keep(_BatchRunner(pg, function).run([(piece.number, piece.content) for piece in pieces]))

    task = task_maker(executor, recipe, pg, work, [("the function", function), ("the example inputs", work.examples)])

    def portions() -> Iterator[list[_Piece]]:
        for number, batch in enumerate(batches):
            found.begun = number + 1
            yield [_Piece(number, batch)]

    dispatch = Dispatch(executor, task, run_here)
    for _ in dispatch.run(portions(), found, lambda: found.begun - found.next < _AHEAD):
        yield from found.ready()
    yield from found.ready()


@dataclass(frozen=True)
class _Piece:
    number: int
    content: Any

    @property
    def name(self) -> str:
        return f"batch {self.number}"


@dataclass(frozen=True)
class _BatchResult:
    number: int
    value: Any
    error: BaseException | None = None


@dataclass
class _InOrder:
    """Gives results in the order of the batches.

    Attributes:
        next: The number of the next result.
        begun: How many batches were read.
    """

    next: int = 0
    begun: int = 0
    _waiting: dict[int, _BatchResult] = field(default_factory=dict)

    def keep(self, results: Sequence[_BatchResult]) -> None:
        """Keeps results."""
        self._waiting |= {result.number: result for result in results}

    def fail(self, pieces: Sequence[_Piece], text: str) -> None:
        """Keeps the reason why batches have no result: it is raised in their place."""
        self.keep([_BatchResult(piece.number, None, ExperimentError(text)) for piece in pieces])

    def show_workers(self, count: int) -> None:
        """Shows nothing."""

    def ready(self) -> Iterator[Any]:
        """Yields the results that no earlier one is missing for."""
        while (result := self._waiting.pop(self.next, None)) is not None:
            if result.error is not None:
                add_note(result.error, f"raised for batch {result.number}")
                raise result.error
            self.next += 1
            yield result.value


@dataclass(frozen=True)
class _BatchRunner:
    pg: PatchableGraph
    function: Callable[[PatchableGraph, Any], Any]
    remarks: Sequence[str] = ()

    def run(self, pieces: Sequence[tuple[int, Any]]) -> list[_BatchResult]:
        return [self._result(*piece) for piece in pieces]

    def _result(self, number: int, batch: Any) -> _BatchResult:
        try:
            return _BatchResult(number, self.function(self.pg, batch))
        except Exception as error:
            return _BatchResult(number, None, sendable(error))


@dataclass(frozen=True)
class _BatchWork:
    """The function, and what shows that a worker has the same model.

    Attributes:
        function: The function.
        examples: The example inputs of the capture; `None` if they are not known.
        reference: The output of the model on them.
        weights: A digest of the weights.
    """

    function: Callable[[PatchableGraph, Any], Any]
    examples: Inputs | None
    reference: Reference | None
    weights: str

    @classmethod
    def of(cls, pg: PatchableGraph, function: Callable[[PatchableGraph, Any], Any]) -> _BatchWork:
        given = captured(pg).examples
        examples = None if given is None else Inputs(given.args, given.kwargs)
        return cls(function, examples, _reference(pg, examples), weights_digest(pg))

    def runner(self, pg: PatchableGraph) -> _BatchRunner:
        return _BatchRunner(pg, self.function)

    def problem(self, pg: PatchableGraph, runner: _BatchRunner) -> str | None:
        if weights_digest(pg) != self.weights:
            return "its weights are others"
        found = _reference(pg, self.examples)
        return None if self.reference is None or found is None else self.reference.problem(found)


def _reference(pg: PatchableGraph, examples: Inputs | None) -> Reference | None:
    return None if examples is None else Reference.of(pg, examples, Measurement(np.zeros(())))
