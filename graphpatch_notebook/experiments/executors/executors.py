"""Runs chunks on an executor: threads of this process, processes of this machine, or a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import queue
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.nn import Module

from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.execution import innermost
from graphpatch_notebook.experiments.engine.cells import Cell, CellResult
from graphpatch_notebook.experiments.engine.runner import CellRunner
from graphpatch_notebook.experiments.executors.pickling import RECIPE, packed
from graphpatch_notebook.experiments.executors.scheduling import Chunks, Ledger, run_here
from graphpatch_notebook.experiments.executors.worker import Outcome, SharedGraph, SweepWork, run_chunk
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.sharded import sharding_of
from graphpatch_notebook.warning_places import warn_each_time

# -- Dask clusters -----------------------------------------------------------------------------------------------------

_LONGEST_LOOK = 10.0  # seconds
_PATIENCE = 5.0  # seconds without a worker
_PATIENCE_WITH_NANNIES = 60.0  # they restart lost workers


class WorkersLostError(Exception):
    """No worker is left.

    Attributes:
        keys: The keys of the tasks that were on a worker when it was lost.
    """

    def __init__(self, workers: Sequence[str], keys: set[str]) -> None:
        names = f" ({', '.join(workers)})" if workers else ""
        super().__init__(f"all its workers were lost{names}")
        self.keys = keys


@dataclass
class Cluster:
    """Submits tasks to a Dask cluster, and checks for lost workers.

    Args:
        client: The client.
        options: Keyword arguments for `client.submit`.
    """

    client: Any
    options: dict[str, Any]
    _workers: dict[str, bool] = field(default_factory=dict)  # by address: whether they have a nanny
    _lost: float | None = None  # the time when the last worker was lost

    @classmethod
    def of(cls, executor: Any) -> Cluster | None:
        """Returns the cluster of an executor; `None` for executors of other kinds.

        In distributed (seen in 2026.8) a future of `Client.get_executor()` never completes if its result is lost
        with a worker and the scheduler gives up on the task: the future does not receive the error. The futures of the
        client itself do complete, so these are used; `test_executors` kills workers at various times.
        """
        if type(executor).__module__ == "distributed.cfexecutor" and hasattr(executor, "_client"):
            return cls(executor._client, getattr(executor, "_kwargs", {}))
        return cls(executor, {}) if hasattr(executor, "run_on_scheduler") else None

    @property
    def submit(self) -> Callable[..., Any]:
        """The function that submits a task."""
        return functools.partial(self.client.submit, **self.options)

    def check(self, keys: Sequence[str]) -> None:
        """Checks that the cluster can still run tasks. Call it repeatedly: it compares with the workers seen before.

        If there never was a worker, the first one may still start.

        Args:
            keys: The keys of tasks.

        Raises:
            WorkersLostError: No worker is left.
            ExperimentError: The client is closed, by its user or because the scheduler is gone.
        """
        if self.client.status in ("closed", "closing"):
            raise ExperimentError(
                "the client of the cluster was closed, or lost its scheduler, before all cells were run; what is done "
                "is in the file of checkpoint=, if you gave one"
            )
        try:
            # A timeout for `Client.sync`, which may wait forever if the client is closed during the call.
            workers, suspects = self.client.run_on_scheduler(_look(), list(keys), callback_timeout=_LONGEST_LOOK)
        except Exception:  # the scheduler may be lost, which the next check reports
            return
        if workers or not (self._workers or suspects):
            self._workers, self._lost = workers, None
            return
        self._lost = time.monotonic() if self._lost is None else self._lost
        if time.monotonic() - self._lost > (_PATIENCE_WITH_NANNIES if any(self._workers.values()) else _PATIENCE):
            raise WorkersLostError(list(self._workers), set(suspects))


def _look() -> Callable[..., tuple[dict[str, bool], list[str]]]:
    # A nested function is pickled by its code: the scheduler may lack this package.
    def look(keys: list[str], dask_scheduler: Any) -> tuple[dict[str, bool], list[str]]:
        tasks = dask_scheduler.tasks
        workers = {address: worker.nanny is not None for address, worker in dask_scheduler.workers.items()}
        return workers, [key for key in keys if key in tasks and tasks[key].suspicious]

    return look


# -- executors ---------------------------------------------------------------------------------------------------------

_ATTEMPTS = 3  # the last one alone, so that a chunk that kills its worker does not affect others
_PAUSE = 1.0  # seconds
_IN_FLIGHT = 256  # enough to keep a cluster busy; chunks that wait here need not be canceled
# Errors for a lost worker. Schedulers need not be installed, so some are compared by name.
_LOSSES = (CancelledError, asyncio.CancelledError, ConnectionError, EOFError)
_TIMEOUTS = (TimeoutError, asyncio.TimeoutError)  # the same class since Python 3.11
_NAMES_OF_LOSSES = ("KilledWorker", "CommClosedError", "FutureLostError", "WorkerStartTimeoutError")

Task = Callable[[Sequence[Cell], int], "tuple[Any, ...]"]
"""Maps some cells, and the number of earlier attempts, to the arguments of `submit`."""


def check_executor(executor: Any, recipe: Any, pg: PatchableGraph) -> None:
    """Checks that an executor can be used with this recipe for this graph.

    Raises:
        ExperimentError: It cannot be used.
    """
    if innermost(captured(pg)) is not None:
        raise ExperimentError(
            "the patches of a context hold for the thread that entered it, and executor= runs cells elsewhere: leave "
            "the with block, and have make_patches return these patches too"
        )
    if not callable(getattr(executor, "submit", None)):
        raise ExperimentError(
            f"executor= takes an executor, with a method submit that returns a future, not {type(executor).__name__}"
        )
    if sharding_of(captured(pg).root) is not None:
        raise ExperimentError(
            "the model is sharded over processes, which run cells in one order: executor= would mix that up; leave it "
            "out"
        )
    if isinstance(executor, ThreadPoolExecutor):
        return
    if captured(pg).permanent:
        raise ExperimentError(
            "this graph has permanent patches, and recipe= builds one without them in other processes: sweep over the "
            "graph that edit() was called on, and have make_patches return these patches too"
        )
    if recipe is None:
        raise ExperimentError(
            f"{type(executor).__name__} runs cells in other processes; say with recipe= how to build the graph there, "
            f"so that no weights need to be sent:\n{RECIPE}"
        )
    if isinstance(recipe, Module):
        raise ExperimentError(
            f"recipe= is the model itself ({type(recipe).__name__}): its weights would go through the scheduler. Say "
            f"how to build it where it runs:\n{RECIPE}"
        )
    if not callable(recipe) and not isinstance(recipe, (str, os.PathLike)):
        raise ExperimentError(
            "recipe= takes a function without arguments that returns a PatchableGraph, or the name of a file, not "
            f"{type(recipe).__name__}:\n{RECIPE}"
        )


def task_maker(executor: Any, recipe: Any, pg: PatchableGraph, work: SweepWork) -> Task:
    """Returns a function that makes tasks for an executor.

    Raises:
        ExperimentError: A part of the tasks holds a model, or cannot be pickled.
    """
    if isinstance(executor, ThreadPoolExecutor):
        shared = SharedGraph(pg, work)
        return lambda cells, _: (shared.run, [(cell.number, cell.patches) for cell in cells])
    if isinstance(recipe, (str, os.PathLike)):
        recipe = str(Path(recipe).expanduser().absolute())
    packed_recipe = packed([("the recipe", recipe)])
    packed(
        [("the metric", work.request.metric), ("what the model runs on", work.request.inputs)]
    )  # an error names the part
    packed_work = packed([("the sweep", work)])
    token = uuid.uuid4().hex  # unique even for the same arguments: weights may have changed

    def task(cells: Sequence[Cell], attempt: int) -> tuple[Any, ...]:
        return (run_chunk, token, packed_recipe, packed_work, _packed_cells(cells), attempt)

    return task


def _packed_cells(cells: Sequence[Cell]) -> bytes:
    # Each part has a name for errors, and one pickler for all sends shared objects once.
    return packed(
        (f"the patch map of {cell}", (cell.number, {str(path): patch for path, patch in cell.patches.items()}))
        for cell in cells
    )


@dataclass(eq=False)
class _Portion:
    cells: Sequence[Cell]
    attempt: int = 0
    future: Any = None
    fetches: int = 0

    @property
    def is_suspect(self) -> bool:
        return self.attempt == _ATTEMPTS - 1


class Dispatch:
    """Submits the chunks of one sweep to an executor, and adds the results to a ledger.

    If a worker is lost, its chunks are submitted again, the last time each alone. If the executor is broken, or no
    worker of a cluster is left, the remaining cells run in this process, unless they may have killed a worker.

    Args:
        executor: The executor.
        task: Makes the tasks.
        runner: Runs cells in this process.

    Attributes:
        remarks: The remarks of the runners of all workers, in order, as keys.
    """

    def __init__(self, executor: Any, task: Task, runner: CellRunner) -> None:
        self._cluster = Cluster.of(executor)
        self._submitted = executor.submit if self._cluster is None else self._cluster.submit
        self._is_elsewhere = not isinstance(executor, ThreadPoolExecutor)
        self._context = getattr(executor, "_mp_context", None) or multiprocessing.get_context("spawn")
        self._task = task
        self._runner = runner
        self._waiting: deque[_Portion] = deque()
        self._out: dict[_Portion, None] = {}
        self._done: queue.SimpleQueue[_Portion] = queue.SimpleQueue()
        self._breakage: BaseException | None = None
        self._has_results = False
        self._messages: dict[str, None] = {}
        self.remarks: dict[str, None] = {}
        self._ledger: Ledger

    def run(self, chunks: Chunks, ledger: Ledger) -> None:
        """Runs all chunks. After an interrupt, `ledger` has the completed results, and futures are canceled.

        Raises:
            ExperimentError: The first chunk failed in a way that all others would.
        """
        self._ledger = ledger
        self._waiting.extend(map(_Portion, chunks))
        try:
            self._run_by_executor()
            if self._breakage is not None:
                self._run_rest()
        finally:
            for message in self._messages:
                warn_each_time(message, ExperimentWarning)

    def _run_by_executor(self) -> None:
        try:
            self._look_after_cluster()
            while self._breakage is None and (self._waiting or self._out):
                self._submit()
                if self._out and self._breakage is None:
                    self._take_next()
            self._take_what_is_there()
        except KeyboardInterrupt:
            self._take_what_is_there()
            raise
        finally:
            for portion in self._out:
                with contextlib.suppress(Exception):
                    # Released tasks do not run; `cancel` of a cluster would wait forever if the client is closed.
                    (portion.future.cancel if self._cluster is None else portion.future.release)()

    def _submit(self) -> None:
        while self._waiting and len(self._out) < _IN_FLIGHT and self._breakage is None:
            portion = self._waiting[0]
            if self._out and (portion.is_suspect or next(iter(self._out)).is_suspect):
                return
            task = self._task(portion.cells, portion.attempt)
            try:
                portion.future = self._submitted(*task)
            except Exception as error:
                if self._cluster is not None or (not self._has_results and not self._out):
                    raise ExperimentError(f"executor= takes no work: {type(error).__name__}: {error}") from error
                self._breakage = error
                return
            self._out[self._waiting.popleft()] = None
            portion.future.add_done_callback(lambda _, portion=portion: self._done.put(portion))

    def _take_next(self) -> None:
        try:
            portion = self._done.get(timeout=_PAUSE)  # on Windows, a wait without a timeout cannot be interrupted
        except queue.Empty:
            self._look_after_cluster()
        else:
            self._take(portion)

    def _look_after_cluster(self) -> None:
        if self._cluster is not None:
            try:
                self._cluster.check([portion.future.key for portion in self._out])
            except WorkersLostError as error:
                self._breakage = error

    def _outcome(self, portion: _Portion) -> Outcome:
        """Returns a result. If it was lost with its worker, it is computed again, or this times out."""
        if self._cluster is None:
            return portion.future.result()  # type: ignore[no-any-return]
        portion.fetches += 1
        return portion.future.result(timeout=_PAUSE * min(2**portion.fetches, 16))  # type: ignore[no-any-return]

    def _take(self, portion: _Portion) -> None:
        try:
            outcome = self._outcome(portion)
        except (Exception, asyncio.CancelledError) as error:
            if self._cluster is not None:
                self._look_after_cluster()
                if portion.future.status not in ("error", "cancelled") and isinstance(error, (*_LOSSES, *_TIMEOUTS)):
                    self._done.put(portion)
                    return
            self._take_failure(portion, error)
        else:
            self._has_results = True
            self._keep(outcome)
            del self._out[portion]

    def _keep(self, outcome: Outcome) -> None:
        results, messages, remarks = outcome
        self._ledger.keep(results)
        self._messages |= dict.fromkeys(messages)
        self.remarks |= dict.fromkeys(remarks)

    def _take_failure(self, portion: _Portion, error: BaseException) -> None:
        if isinstance(error, BrokenExecutor):
            self._breakage = error  # the portion stays in `_out`
            return
        is_lost = isinstance(error, _LOSSES) or type(error).__name__ in _NAMES_OF_LOSSES or portion.future.cancelled()
        if is_lost and portion.attempt + 1 < _ATTEMPTS:
            del self._out[portion]
            self._waiting.append(_Portion(portion.cells, portion.attempt + 1))  # after all new chunks
            return
        if not self._has_results and not is_lost:
            raise ExperimentError(f"no cell can be run by this executor: {error}") from error
        text = f"{type(error).__name__}: {error}"
        if is_lost:
            text = f"its worker was lost {_ATTEMPTS} times, at last with nothing else to do: {text}"
        self._fail(portion, text)
        del self._out[portion]

    def _take_what_is_there(self) -> None:
        for portion in list(self._out):
            if portion.future.done() and not portion.future.cancelled():
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    self._keep(self._outcome(portion))
                    del self._out[portion]

    def _run_rest(self) -> None:
        """Runs the remaining chunks here, except for those that may have killed a worker: they could kill this one."""
        breakage = self._breakage
        rest = [*self._out, *self._waiting]
        if isinstance(breakage, WorkersLostError):
            suspects = [one for one in rest if one.attempt > 0 or getattr(one.future, "key", None) in breakage.keys]
            fate = "are not run"
        else:
            suspects = [*self._out] if isinstance(breakage, BrokenExecutor) and self._is_elsewhere else []
            fate = "are run in another process, one after the other"
        rest = [one for one in rest if one not in suspects]
        told = f"{_count(suspects)} cells that workers may have been lost with {fate}; " if suspects else ""
        warn_each_time(
            f"the executor is broken ({type(breakage).__name__}: {breakage}); {told}{_count(rest)} cells that it has "
            "not done are run in this process",
            ExperimentWarning,
        )
        if isinstance(breakage, WorkersLostError):
            for one in suspects:
                self._fail(one, f"its worker was lost, and no other is left; here it may end this process: {breakage}")
        else:
            self._run_in_another_process(suspects)
        run_here(self._runner, [one.cells for one in rest], self._ledger)

    def _run_in_another_process(self, portions: list[_Portion]) -> None:
        waiting = deque(portions)
        while waiting:
            executor = ProcessPoolExecutor(1, self._context)
            try:
                while waiting:
                    portion = waiting.popleft()
                    future = executor.submit(*self._task(portion.cells, portion.attempt + 1))
                    while not wait([future], _PAUSE).done:
                        pass
                    self._keep(future.result())
            except BrokenExecutor as error:
                self._fail(portion, f"its process was lost twice, at last with nothing else to do: {error}")
            except Exception as error:
                self._fail(portion, f"{type(error).__name__}: {error}")
            finally:
                executor.shutdown(wait=False, cancel_futures=True)

    def _fail(self, portion: _Portion, text: str) -> None:
        self._ledger.keep([CellResult(cell.number, None, text) for cell in portion.cells])


def _count(portions: Sequence[_Portion]) -> int:
    return sum(len(portion.cells) for portion in portions)
