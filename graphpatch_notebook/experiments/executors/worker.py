"""Where chunks of a sweep are run: in another process, on a graph that is built there, or in threads of this one.

A process builds the graph of a recipe once, and each of its threads makes one `CellRunner` for a sweep. They are kept
for the next chunk, until one of another recipe, or sweep, comes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.engine.cells import CellResult, PatchMap
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.runner import CellRunner
from graphpatch_notebook.experiments.executors.pickling import unpacked
from graphpatch_notebook.experiments.executors.worker_check import Reference
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.warning_places import collected_warnings

Outcome: TypeAlias = "tuple[list[CellResult], list[str], list[str]]"
"""The results of a chunk, the warnings that were given, and the remarks of the runner so far."""


@dataclass(frozen=True)
class Work:
    """What the chunks of a sweep have in common, besides the graph.

    Attributes:
        inputs: As of `CellRunner`, like the next three.
        metric: See there.
        paths: See there.
        batch: See there.
        reference: What the model must give without patches.
    """

    inputs: Inputs
    metric: Callable[[Any], Any]
    paths: Sequence[str]
    batch: int | str | None
    reference: Reference

    def runner(self, pg: PatchableGraph) -> CellRunner:
        """Returns what runs the cells on a graph."""
        return CellRunner(pg, self.inputs, self.metric, self.paths, batch=self.batch)

    def problem(self, pg: PatchableGraph, runner: CellRunner) -> str | None:
        """Returns in which way a graph is not that of the sweep: no number of it may get among the others."""
        return self.reference.problem(Reference.of(pg, self.inputs, runner.baseline))


@dataclass
class SharedGraph:
    """Runs chunks in threads of this process, on one graph: each thread has a runner, and contexts, of its own."""

    pg: PatchableGraph
    work: Work
    _own: threading.local = field(default_factory=threading.local)

    def run(self, cells: Sequence[tuple[int, PatchMap]]) -> Outcome:
        """Returns the results of some cells."""
        with collected_warnings() as messages:
            runner: CellRunner | None = getattr(self._own, "runner", None)
            if runner is None:
                runner = self.work.runner(self.pg)
                if (problem := self.work.problem(self.pg, runner)) is not None:  # autocast, say, is one thread's
                    raise ExperimentError(f"the model gives other numbers in a thread of the executor: {problem}")
                self._own.runner = runner
            return runner.run(cells), messages, list(runner.remarks)


@dataclass
class _Bench:
    """What a process has made for one sweep."""

    token: str
    recipe: bytes
    work: Work
    runners: dict[int, CellRunner] = field(default_factory=dict)  # by thread


_lock = threading.RLock()
_graphs: dict[bytes, PatchableGraph] = {}  # one at most, by recipe
_benches: dict[str, _Bench] = {}  # one at most, by token


def run_parcel(token: str, recipe: bytes, work: bytes, cells: bytes, attempt: int) -> Outcome:  # noqa: ARG001
    """Returns the results of some cells: what is submitted to executors.

    Args:
        token: Tells sweeps apart.
        recipe: How to build the graph.
        work: A `Work`.
        cells: Pairs of number and patch map.
        attempt: How often these cells were submitted before. Some schedulers know a task by its arguments, and would
            hand out the failure of the last attempt.

    Raises:
        ExperimentError: The graph cannot be built, or is not that of the sweep.
    """
    with collected_warnings() as messages:
        bench = _bench(token, recipe, work)
        runner = _runner(bench)
        return runner.run(unpacked(cells)), messages, list(runner.remarks)


def _bench(token: str, recipe: bytes, work: bytes) -> _Bench:
    with _lock:
        if token not in _benches:
            bench = _Bench(token, recipe, unpacked(work)[0])
            _benches.clear()
            _benches[token] = bench
        return _benches[token]


def _runner(bench: _Bench) -> CellRunner:
    thread = threading.get_ident()
    with _lock:
        if thread not in bench.runners:
            is_new = bench.recipe not in _graphs
            try:
                bench.runners[thread] = _checked_runner(bench)
            except ExperimentError:
                _graphs.pop(bench.recipe, None)
                if is_new:
                    raise
                # What the recipe reads may have changed since it was built for another sweep.
                bench.runners[thread] = _checked_runner(bench)
        return bench.runners[thread]


def _checked_runner(bench: _Bench) -> CellRunner:
    if bench.recipe not in _graphs:
        _graphs.clear()
        _graphs[bench.recipe] = built(unpacked(bench.recipe)[0])
    pg = _graphs[bench.recipe]
    runner = bench.work.runner(pg)
    if (problem := bench.work.problem(pg, runner)) is not None:
        raise ExperimentError(
            f"the model that the recipe builds in a worker is not the one of this sweep: {problem}. The recipe must "
            "build the same architecture, with the same weights, dtype and mode"
        )
    return runner


def built(recipe: Any) -> PatchableGraph:
    """Returns the graph that a recipe builds, or loads.

    Raises:
        ExperimentError: It does not.
    """
    try:
        pg = PatchableGraph.load(recipe) if isinstance(recipe, (str, os.PathLike)) else recipe()
    except Exception as error:
        raise ExperimentError(f"the recipe failed in a worker: {type(error).__name__}: {error}") from error
    if not isinstance(pg, PatchableGraph):
        raise ExperimentError(f"the recipe must return a PatchableGraph, not {type(pg).__name__}")
    return pg
