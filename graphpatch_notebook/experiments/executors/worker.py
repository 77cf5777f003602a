"""Runs pieces of work in another process, on a graph that is built there, or in threads of this process.

A piece is a cell of a sweep, or a batch of a dataset. A process builds the graph of a recipe once, and each of its
threads makes one runner for a call. They are kept for further pieces, until one of another recipe or call arrives.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.capture.held_values import plain_tensors
from graphpatch_notebook.checks.model_state import ModuleState
from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.experiments.engine.cells import CellResult, PatchMap, patches_in
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import Measurement
from graphpatch_notebook.experiments.engine.purity import is_pure
from graphpatch_notebook.experiments.engine.runner import CellRunner
from graphpatch_notebook.experiments.engine.side_effects import ReferredValues, noticed_draws
from graphpatch_notebook.experiments.engine.sweep_setup import SweepRequest
from graphpatch_notebook.experiments.executors.pickling import packed, unpacked
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import declares
from graphpatch_notebook.warning_places import collected_warnings, warn_each_time

# -- whether a worker has the same model -------------------------------------------------------------------------------

_SAMPLES = 64
# The allowed difference between machines (other kernels or numbers of threads), relative to the largest number.
_TOLERANCE = 1e-4
_LOW_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Reference:
    """The metric and samples of the output of a model without patches, to check that two models are the same.

    The metric alone is not enough: a probability may be near zero for both models.

    Attributes:
        baseline: The metric without patches.
        samples: Some numbers of each tensor of the output.
        tolerance: The allowed difference, relative to the largest number.
        is_training: Whether the model is in training mode.
    """

    baseline: Measurement
    samples: np.ndarray[Any, np.dtype[np.float64]]
    tolerance: float
    is_training: bool

    @classmethod
    def of(cls, pg: PatchableGraph, inputs: Inputs, baseline: Measurement) -> Reference:
        """Returns the reference of a graph. Restores the state of the model."""
        fresh, state = inputs.fresh(), ModuleState(captured(pg).module)
        with torch.no_grad(), afterwards(state.restore):
            tensors = [t for t in plain_tensors(pg(*fresh.args, **fresh.kwargs)) if t.is_floating_point()]
        samples = [_some(tensor) for tensor in tensors]
        is_low = any(tensor.dtype.itemsize < 4 for tensor in (*tensors, *pg.parameters()))
        return cls(
            baseline,
            np.concatenate([*samples, np.zeros(0)]),
            _LOW_TOLERANCE if is_low else _TOLERANCE,
            bool(pg.training),
        )

    def problem(self, other: Reference) -> str | None:
        """Returns how `other`, of a worker, differs from this, as a message; `None` if the models are the same."""
        if other.is_training != self.is_training:
            modes = {True: "training", False: "evaluation"}
            return f"it is in {modes[other.is_training]} mode, and in {modes[self.is_training]} mode here"
        metrics = f"{_numbers_text(other.baseline.values)} there and {_numbers_text(self.baseline.values)} here"
        # A metric that subtracts may be as small as the rounding errors of the outputs.
        allowed = self.tolerance * max(_largest(self.samples), _largest(self.baseline.values))
        is_same_form = other.baseline.form == self.baseline.form
        if not is_same_form or not _is_close(self.baseline.values, other.baseline.values, allowed):
            return f"without patches the metric is {metrics}"
        if not _is_close(self.samples, other.samples, self.tolerance * _largest(self.samples)):
            return f"its outputs without patches are others than here (the metric is {metrics})"
        return None


def _largest(numbers: Any) -> float:
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=1e-6))


def _is_close(mine: Any, theirs: Any, allowed: float) -> bool:
    return mine.shape == theirs.shape and bool(np.allclose(mine, theirs, rtol=0, atol=allowed, equal_nan=True))


def _some(tensor: Tensor) -> np.ndarray[Any, Any]:
    flat = tensor.detach().reshape(-1)
    indices = torch.linspace(0, max(flat.numel() - 1, 0), min(_SAMPLES, flat.numel())).long()
    return np.array(flat[indices.to(flat.device)].to("cpu").double().numpy())


def _numbers_text(values: Any) -> str:
    numbers = values.reshape(-1).tolist()
    text = ", ".join(f"{number:.8g}" for number in numbers[:3])
    return text if len(numbers) == 1 else f"({text}{', ...' if len(numbers) > 3 else ''})"


# -- workers -----------------------------------------------------------------------------------------------------------


class Runner(Protocol):
    """Runs pieces of work on one graph, in one thread."""

    @property
    def remarks(self) -> Sequence[str]:
        """Messages for the user about how the pieces ran."""

    def run(self, pieces: Sequence[tuple[int, Any]]) -> Sequence[Any]:
        """Returns the result of each piece, given by its number and content."""


class SharedWork(Protocol):
    """The data that the pieces of one call share, except for the graph."""

    def runner(self, pg: PatchableGraph) -> Runner:
        """Returns a runner of the pieces on a graph."""

    def problem(self, pg: PatchableGraph, runner: Any) -> str | None:
        """Returns how the model of a graph differs from that of the call, as a message; `None` if it does not."""


@dataclass(frozen=True)
class Outcome:
    """What a worker returns.

    Attributes:
        results: The results of some pieces; pickled if the worker is another process.
        warnings: The messages of its warnings.
        remarks: The remarks of the runner so far.
        worker: Identifies the worker.
        seconds: How long the pieces took, without building the graph.
    """

    results: Any
    warnings: list[str]
    remarks: list[str]
    worker: str
    seconds: float


def _outcome(runner: Runner, pieces: Sequence[tuple[int, Any]], messages: list[str]) -> Outcome:
    begin = time.perf_counter()
    results = runner.run(pieces)
    seconds = time.perf_counter() - begin
    worker = f"{socket.gethostname()}:{os.getpid()}:{threading.get_ident()}"
    return Outcome(results, messages, list(runner.remarks), worker, seconds)


CHANGES_STATE = (
    "change what they refer to when they run, use an iterator, or draw from the generators that all code shares"
)
_STATEFUL = (
    f"patches of some cells {CHANGES_STATE}, which patches with the same code did not do here; with executor=, cells "
    "run in any order and in several workers, so their numbers may not be those of a loop: leave "
    "out executor= to get these"
)


class WatchedRunner(CellRunner):
    """Runs cells, and notes those whose patches change what they refer to, or draw from the shared generators.

    Attributes:
        has_drawn: Whether some have drawn.
    """

    has_drawn = False

    def run(self, cells: Sequence[tuple[int, PatchMap]]) -> list[CellResult]:
        refers = self._impure(cells)
        if refers is None and self._setup.clean is not None:  # nothing draws
            return super().run(cells)
        with noticed_draws() as drawn:
            results = super().run(cells)
        if drawn or (refers is not None and refers != self._impure(cells)):
            results = [replace(result, has_changed_state=True) for result in results]
            self.has_drawn = self.has_drawn or bool(drawn)
        return results

    def _impure(self, cells: Sequence[tuple[int, PatchMap]]) -> ReferredValues | None:
        given = [patch for _, patch_map in cells if not is_pure(patch_map) for patch in patches_in(patch_map)]
        # What a probe has seen is for the user, or for functions, which refer to it.
        found = [patch for patch in given if not declares(patch, "only_keeps")]
        return ReferredValues(*found, has_files=False) if found else None


class _WorkersRunner(WatchedRunner):
    """Runs cells in a worker, and warns of patches that change what they refer to: cells in other workers miss that."""

    def run(self, cells: Sequence[tuple[int, PatchMap]]) -> list[CellResult]:
        results = super().run(cells)
        if any(result.has_changed_state for result in results):
            warn_each_time(_STATEFUL, ExperimentWarning)
        return results


@dataclass(frozen=True)
class SweepWork:
    """The data that the cells of a sweep share, except for the graph.

    Attributes:
        request: What is asked of the cells.
        reference: The expected results without patches.
    """

    request: SweepRequest
    reference: Reference

    def runner(self, pg: PatchableGraph) -> CellRunner:
        """Returns a runner of the cells on a graph."""
        return _WorkersRunner(pg, self.request)

    def problem(self, pg: PatchableGraph, runner: CellRunner) -> str | None:
        """Returns how the model of a graph differs from that of the sweep, as a message; `None` if it does not."""
        return self.reference.problem(Reference.of(pg, self.request.inputs, runner.baseline))


class Turns:
    """Lets threads run a model together, and one thread at a time look at its state, which no other one runs then.

    A run in between would be taken for a change of the model, and put back.

    Example:
        >>> turns = Turns()
        >>> with turns.together(), turns.together():
        ...     pass
        >>> with turns.alone():
        ...     pass
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = self._waiting = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """For a block that runs the model: not while another thread is alone, or waits to be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For a block that must be the only one."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._running)
                yield
            finally:
                self._waiting -= 1
                self._changed.notify_all()


@dataclass
class SharedGraph:
    """Runs pieces in threads of this process, on one graph. Each thread has its own runner and patch contexts."""

    pg: PatchableGraph
    work: SharedWork
    _own: threading.local = field(default_factory=threading.local)
    _turns: Turns = field(default_factory=Turns)

    def run(self, pieces: Sequence[tuple[int, Any]]) -> Outcome:
        """Returns the results of some pieces."""
        with collected_warnings() as messages:
            runner: Runner | None = getattr(self._own, "runner", None)
            if runner is None:
                with self._turns.alone():
                    runner = self.work.runner(self.pg)
                    problem = self.work.problem(self.pg, runner)
                if problem is not None:  # such as autocast: it is per thread
                    raise ExperimentError(f"the model gives other numbers in a thread of the executor: {problem}")
                self._own.runner = runner
            with self._turns.together():
                return _outcome(runner, pieces, messages)


@dataclass
class _WorkerState:
    """The runners of a process for one call."""

    token: str
    recipe: bytes
    work: SharedWork
    runners: dict[int, Runner] = field(default_factory=dict)  # by thread


_lock = threading.RLock()
_turns = Turns()
_graphs: dict[bytes, PatchableGraph] = {}  # one at most, by recipe
_states: dict[str, _WorkerState] = {}  # one at most, by token


def run_pieces(token: str, recipe: bytes, work: bytes, pieces: bytes, attempt: int) -> Outcome:  # noqa: ARG001
    """Returns the results of some pieces. Executors receive this function.

    Args:
        token: Identifies the call.
        recipe: How to build the graph.
        work: A `SharedWork`.
        pieces: Pairs of number and content.
        attempt: The number of earlier attempts. Some schedulers identify a task by its arguments, and would return the
            error of the last attempt.

    Raises:
        ExperimentError: The graph cannot be built, or has another model.
    """
    with collected_warnings() as messages:
        runner = _runner(_state_of(token, recipe, work))
        with _turns.together():
            outcome = _outcome(runner, unpacked(pieces), messages)
    # As bytes: between processes of one machine, torch would share the memory of each tensor.
    return replace(outcome, results=packed([("what is returned", outcome.results)]))


def _state_of(token: str, recipe: bytes, work: bytes) -> _WorkerState:
    with _lock:
        if token not in _states:
            state = _WorkerState(token, recipe, unpacked(work)[0])
            _states.clear()
            _states[token] = state
        return _states[token]


def _runner(state: _WorkerState) -> Runner:
    thread = threading.get_ident()
    if thread not in state.runners:
        with _turns.alone(), _lock:
            is_new = state.recipe not in _graphs
            try:
                state.runners[thread] = _checked_runner(state)
            except ExperimentError:
                _graphs.pop(state.recipe, None)
                if is_new:
                    raise
                # The weights that the recipe loads may have changed since an earlier sweep.
                state.runners[thread] = _checked_runner(state)
    return state.runners[thread]


def _checked_runner(state: _WorkerState) -> Runner:
    if state.recipe not in _graphs:
        _graphs.clear()
        _graphs[state.recipe] = built(unpacked(state.recipe)[0])
    pg = _graphs[state.recipe]
    runner = state.work.runner(pg)
    if (problem := state.work.problem(pg, runner)) is not None:
        raise ExperimentError(
            f"the model that the recipe builds in a worker is not the one of this graph: {problem}. The recipe must "
            "build the same architecture, with the same weights, dtype and mode"
        )
    return runner


def built(recipe: Any) -> PatchableGraph:
    """Returns the graph that a recipe builds, or loads.

    Raises:
        ExperimentError: The recipe fails, or returns something else.
    """
    try:
        pg = PatchableGraph.load(recipe) if isinstance(recipe, (str, os.PathLike)) else recipe()
    except Exception as error:
        raise ExperimentError(f"the recipe failed in a worker: {type(error).__name__}: {error}") from error
    if not isinstance(pg, PatchableGraph):
        raise ExperimentError(f"the recipe must return a PatchableGraph, not {type(pg).__name__}")
    return pg
