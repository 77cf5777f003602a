"""Submits pieces of work to an executor (threads, processes or a cluster), and again if a worker is lost."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import queue
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch.nn import Module

from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.execution import innermost
from graphpatch_notebook.experiments.executors.clusters import (
    Cluster,
    RayExecutor,
    WorkersLostError,
    is_end_of_ray,
    is_of_ray,
)
from graphpatch_notebook.experiments.executors.pickling import RECIPE, packed, unpacked
from graphpatch_notebook.experiments.executors.worker import Outcome, SharedGraph, SharedWork, run_pieces
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.sharded import sharding_of
from graphpatch_notebook.warning_places import warn_each_time


class Piece(Protocol):
    """A piece of work: a cell of a sweep, or a batch."""

    @property
    def number(self) -> int:
        """Its place among all pieces."""

    @property
    def content(self) -> Any:
        """What a runner is given."""

    @property
    def name(self) -> str:
        """The name of its content in messages."""


class PieceResults(Protocol):
    """Receives the results of pieces."""

    def keep(self, results: Any) -> None:
        """Keeps the results of some pieces."""

    def fail(self, pieces: Any, text: str) -> None:
        """Keeps the reason why pieces have no result."""

    def show_workers(self, count: int) -> None:
        """Shows how many workers have returned results."""


_PAUSE = 1.0  # seconds
_LOOKS = 5.0  # seconds between two looks for lost workers
_IN_FLIGHT = 256  # enough to keep a cluster busy; pieces that wait here need not be canceled
_RESTARTS = 3  # of a cluster, while a portion runs
_WORTH = 2.0  # seconds
# Errors for a lost worker. Schedulers need not be installed, so some are compared by name.
_LOSSES = (CancelledError, asyncio.CancelledError, ConnectionError, EOFError)
_TIMEOUTS = (TimeoutError, asyncio.TimeoutError)  # the same class since Python 3.11
_NAMES_OF_LOSSES = ("KilledWorker", "CommClosedError", "FutureLostError", "WorkerStartTimeoutError")

Task = Callable[[Sequence[Piece], int], "tuple[Any, ...]"]
"""Maps some pieces, and the number of earlier attempts, to the arguments of `submit`."""


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
            f"executor= takes an executor, with a method submit that returns a future, not {type(executor).__name__}; "
            "such as concurrent.futures.ThreadPoolExecutor(2)"
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
            f"recipe= is the model itself ({type(recipe).__name__}): its weights would be sent to other processes. Say "
            f"how to build it where it runs:\n{RECIPE}"
        )
    if not callable(recipe) and not isinstance(recipe, (str, os.PathLike)):
        raise ExperimentError(
            "recipe= takes a function without arguments that returns a PatchableGraph, or the name of a file, not "
            f"{type(recipe).__name__}:\n{RECIPE}"
        )


def task_maker(
    executor: Any, recipe: Any, pg: PatchableGraph, work: SharedWork, parts: Sequence[tuple[str, Any]]
) -> Task:
    """Returns a function that makes tasks for an executor.

    Args:
        executor: The executor.
        recipe: How a worker builds the graph.
        pg: The graph, for threads.
        work: The work.
        parts: What the work consists of, each with its name for messages.

    Raises:
        ExperimentError: A part of the tasks holds a model, or cannot be pickled.
    """
    if isinstance(executor, ThreadPoolExecutor):
        shared = SharedGraph(pg, work)
        return lambda pieces, _: (shared.run, [(piece.number, piece.content) for piece in pieces])
    if isinstance(recipe, (str, os.PathLike)):
        recipe = str(Path(recipe).expanduser().absolute())
    packed_recipe = packed([("the recipe", recipe)])
    packed(parts)  # an error names the part
    packed_work = packed([("the work", work)])
    token = uuid.uuid4().hex  # unique even for the same arguments: weights may have changed

    def task(pieces: Sequence[Piece], attempt: int) -> tuple[Any, ...]:
        # Each part has a name for errors, and one pickler for all sends shared objects once.
        content = packed((piece.name, (piece.number, piece.content)) for piece in pieces)
        return (run_pieces, token, packed_recipe, packed_work, content, attempt)

    return task


@dataclass(eq=False)
class _Portion:
    """Pieces that are submitted together.

    Attributes:
        pieces: The pieces.
        attempt: How often their worker was lost. Then they run with nothing else to do, so that what kills its worker
            does not affect others; those of a portion that was lost twice run one by one.
        restarts: How often the cluster was restarted while they ran.
    """

    pieces: Sequence[Any]
    attempt: int = 0
    restarts: int = 0
    future: Any = None
    fetches: int = 0

    @property
    def is_suspect(self) -> bool:
        return self.attempt > 0

    def again(self) -> list[_Portion]:
        """Returns the portions to run after this one was lost with its worker; none if it was lost often enough."""
        if self.attempt == 0:
            return [_Portion(self.pieces, 1)]
        return [_Portion([piece], self.attempt + 1) for piece in self.pieces] if len(self.pieces) > 1 else []


class Dispatch:
    """Submits the pieces of one call to an executor, and passes on the results.

    If a worker is lost, its pieces are submitted again, once, with nothing else running. If the executor is broken, or
    no worker of a cluster is left, the remaining pieces run in this process, unless they may have killed a worker.

    Args:
        executor: The executor.
        task: Makes the tasks.
        run_here: Runs pieces in this process, and keeps the results.

    Attributes:
        remarks: The remarks of the runners of all workers, in order, as keys.
    """

    def __init__(self, executor: Any, task: Task, run_here: Callable[[Sequence[Any], Any], object]) -> None:
        self._executor = executor
        self._cluster = Cluster.of(executor)
        self._submitted = executor.submit if self._cluster is None else self._cluster.submit
        self._is_elsewhere = not isinstance(executor, ThreadPoolExecutor)
        self._context = getattr(executor, "_mp_context", None) or multiprocessing.get_context("spawn")
        self._task = task
        self._run_here = run_here
        self._results: PieceResults
        self._new: Iterator[Sequence[Any]] | None = None
        self._may_begin: Callable[[], bool] = lambda: True
        self._again: deque[_Portion] = deque()
        self._out: dict[_Portion, None] = {}
        self._done: queue.SimpleQueue[_Portion] = queue.SimpleQueue()
        self._breakage: BaseException | None = None
        self._looked = 0.0
        self._messages: dict[str, None] = {}
        self._workers: set[str] = set()
        self._seconds = 0.0  # of work
        self.remarks: dict[str, None] = {}

    def run(
        self, portions: Iterable[Sequence[Any]], results: PieceResults, may_begin: Callable[[], bool] = lambda: True
    ) -> Iterator[None]:
        """Runs all portions, each a few pieces. After an interrupt, completed results are kept, and futures canceled.

        Args:
            portions: The portions. They are read when there is something to submit.
            results: Receives the results.
            may_begin: Whether another one may be read now.

        Yields:
            After each portion.

        Raises:
            ExperimentError: The first portion failed in a way that all others would.
        """
        self._results, self._new, self._may_begin = results, iter(portions), may_begin
        begin = time.monotonic()
        try:
            yield from self._run_by_executor()
            if self._breakage is not None:
                yield from self._run_rest()
            elif self._is_elsewhere and time.monotonic() - begin > max(_WORTH, self._seconds):
                self.remarks[
                    f"executor= took {time.monotonic() - begin:.0f} s for work of {self._seconds:.1g} s, since workers "
                    "start, and build the model, first: without executor= this call would be faster"
                ] = None
        finally:
            for message in self._messages:
                warn_each_time(message, ExperimentWarning)

    def _run_by_executor(self) -> Iterator[None]:
        try:
            self._look_after_workers()
            while not self._is_broken:
                self._submit()
                if not self._out:
                    if self._new is None and not self._again:
                        break
                elif not self._is_broken:
                    self._take_next()
                yield
            self._take_what_is_there()
        except KeyboardInterrupt:
            self._take_what_is_there()
            raise
        finally:
            for portion in self._out:
                with contextlib.suppress(Exception):
                    # Released tasks do not run; `cancel` of a cluster would wait forever if the client is closed.
                    (portion.future.cancel if self._cluster is None else portion.future.release)()

    @property
    def _is_broken(self) -> bool:
        return self._breakage is not None

    def _next(self) -> _Portion | None:
        """Returns the next portion to submit, if there is one: those that were lost come after all new ones."""
        if self._new is not None and self._may_begin():
            pieces = next(self._new, None)
            if pieces is not None:
                return _Portion(pieces)
            self._new = None
        return self._again.popleft() if self._again else None

    def _submit(self) -> None:
        while len(self._out) < _IN_FLIGHT and not any(portion.is_suspect for portion in self._out):
            portion = self._next()
            if portion is None:
                return
            if self._out and portion.is_suspect:
                self._again.appendleft(portion)
                return
            task = self._task(portion.pieces, portion.attempt)
            try:
                portion.future = self._submitted(*task)
            except Exception as error:
                if isinstance(error, ExperimentError):
                    raise
                if self._cluster is not None or (not self._workers and not self._out):
                    raise ExperimentError(f"executor= does not accept work: {type(error).__name__}: {error}") from error
                self._breakage = error
                self._again.appendleft(portion)
                return
            self._out[portion] = None
            portion.future.add_done_callback(lambda _, portion=portion: self._done.put(portion))

    def _take_next(self) -> None:
        try:
            portion = self._done.get(timeout=_PAUSE)  # on Windows, a wait without a timeout cannot be interrupted
        except queue.Empty:
            self._look_after_workers()
        else:
            self._take(portion)
            if time.monotonic() - self._looked > _LOOKS and not self._is_broken:
                self._look_after_workers()

    def _look_after_workers(self) -> None:
        self._looked = time.monotonic()
        try:
            if isinstance(self._executor, RayExecutor):
                self._executor.check()
            elif self._cluster is not None:
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
                self._look_after_workers()
                if portion.future.status not in ("error", "cancelled") and isinstance(error, (*_LOSSES, *_TIMEOUTS)):
                    self._done.put(portion)
                    return
            self._take_failure(portion, error)
        else:
            self._keep(outcome)
            del self._out[portion]

    def _keep(self, outcome: Outcome) -> None:
        self._workers.add(outcome.worker)
        self._seconds += outcome.seconds
        self._messages |= dict.fromkeys(outcome.warnings)
        self.remarks |= dict.fromkeys(outcome.remarks)
        self._results.show_workers(len(self._workers))
        self._results.keep(unpacked(outcome.results)[0] if isinstance(outcome.results, bytes) else outcome.results)

    def _take_failure(self, portion: _Portion, error: BaseException) -> None:
        if isinstance(error, BrokenExecutor):
            self._breakage = error  # the portion stays in `_out`
            return
        if is_end_of_ray(error):
            self._breakage = WorkersLostError([str(error)], set())
            return
        if portion.future.cancelled() and portion.restarts < _RESTARTS:  # such as by `client.restart`
            del self._out[portion]
            self._again.append(_Portion(portion.pieces, portion.attempt, portion.restarts + 1))
            return
        is_lost = isinstance(error, _LOSSES) or type(error).__name__ in _NAMES_OF_LOSSES or is_of_ray(error)
        is_lost = is_lost or portion.future.cancelled()
        if is_lost and (again := portion.again()):
            del self._out[portion]
            self._again.extend(again)
            return
        if not self._workers and not is_lost:
            raise ExperimentError(f"this executor cannot run anything: {error}") from error
        text = f"{type(error).__name__}: {error}"
        if is_lost:
            text = f"its worker was lost {portion.attempt + 1} times, the last time with no other work running: {text}"
        self._results.fail(portion.pieces, text)
        del self._out[portion]

    def _take_what_is_there(self) -> None:
        for portion in list(self._out):
            if portion.future.done() and not portion.future.cancelled():
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    self._keep(self._outcome(portion))
                    del self._out[portion]

    def _run_rest(self) -> Iterator[None]:
        """Runs the remaining pieces here, except for those that may have killed a worker: they could kill this one."""
        breakage = self._breakage
        rest = [*self._out, *self._again]
        if isinstance(breakage, WorkersLostError):
            suspects = [one for one in rest if one.attempt > 0 or getattr(one.future, "key", None) in breakage.keys]
            fate = "are not run"
        else:
            suspects = [*self._out] if isinstance(breakage, BrokenExecutor) and self._is_elsewhere else []
            fate = "are run in another process, one after the other"
        rest = [one for one in rest if one not in suspects]
        count = sum(len(one.pieces) for one in suspects)
        told = f"{count} that workers may have been lost with {fate}; " if suspects else ""
        warn_each_time(
            f"the executor is broken ({type(breakage).__name__}: {breakage}); {told}all others that it has not done "
            "are run in this process",
            ExperimentWarning,
        )
        if isinstance(breakage, WorkersLostError):
            for one in suspects:
                self._results.fail(
                    one.pieces, f"its worker was lost, and no other is left; here it may end this process: {breakage}"
                )
        else:
            yield from self._run_in_another_process(suspects)
        for one in rest:
            self._run_here(one.pieces, self._results)
            yield
        while self._new is not None:
            if self._may_begin():
                pieces = next(self._new, None)
                if pieces is None:
                    return
                self._run_here(pieces, self._results)
            yield

    def _run_in_another_process(self, portions: list[_Portion]) -> Iterator[None]:
        waiting = deque(portions)
        while waiting:
            executor = ProcessPoolExecutor(1, self._context)
            try:
                while waiting:
                    portion = waiting.popleft()
                    future = executor.submit(*self._task(portion.pieces, portion.attempt + 1))
                    while not wait([future], _PAUSE).done:
                        pass
                    self._keep(future.result())
                    yield
            except BrokenExecutor as error:
                if len(portion.pieces) > 1:
                    waiting.extend(_Portion([piece], portion.attempt + 1) for piece in portion.pieces)
                else:
                    self._results.fail(
                        portion.pieces, f"its process was lost twice, the last time with no other work running: {error}"
                    )
            except ExperimentError as error:
                self._results.fail(portion.pieces, f"{type(error).__name__}: {error}")
            finally:
                executor.shutdown(wait=False, cancel_futures=True)
