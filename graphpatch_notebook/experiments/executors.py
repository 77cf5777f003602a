"""Has chunks run by an executor: threads of this process, processes of this machine, or a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import queue
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.nn import Module

from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.execution.context import innermost
from graphpatch_notebook.experiments.cells import Cell, CellResult
from graphpatch_notebook.experiments.parcels import RECIPE, packed
from graphpatch_notebook.experiments.runner import CellRunner
from graphpatch_notebook.experiments.scheduling import Chunks, Ledger, run_here
from graphpatch_notebook.experiments.worker import SharedGraph, Work, run_parcel
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.warning_places import warn_each_time

_ATTEMPTS = 3  # the last one alone, lest a chunk that kills its worker take others with it again
_IN_FLIGHT = 256  # enough for any cluster to be busy; what waits here costs nothing to cancel
# How the loss of a worker looks, with schedulers that need not be installed here.
_LOSSES = (CancelledError, asyncio.CancelledError, ConnectionError, EOFError)
_NAMES_OF_LOSSES = ("KilledWorker", "CommClosedError", "FutureLostError", "WorkerStartTimeoutError")

Task = Callable[[Sequence[Cell], int], "tuple[Any, ...]"]
"""From some cells, and how often they were submitted before, to the arguments of `submit`."""


def check_executor(executor: Any, recipe: Any, pg: PatchableGraph) -> None:
    """Makes sure that an executor can be used, with this recipe, for this graph.

    Raises:
        ExperimentError: It cannot.
    """
    if innermost(pg) is not None:
        raise ExperimentError(
            "the patches of a context hold for the thread that entered it, and executor= runs cells elsewhere: leave "
            "the with block, and have make_patches return these patches too"
        )
    if not callable(getattr(executor, "submit", None)):
        raise ExperimentError(
            f"executor= takes an executor, with a method submit that returns a future, not {type(executor).__name__}"
        )
    if isinstance(executor, ThreadPoolExecutor):
        return
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


def task_maker(executor: Any, recipe: Any, pg: PatchableGraph, work: Work) -> Task:
    """Returns what makes tasks for an executor.

    Raises:
        ExperimentError: Something that would have to be sent holds a model, or cannot be sent.
    """
    if isinstance(executor, ThreadPoolExecutor):
        shared = SharedGraph(pg, work)
        return lambda cells, _: (shared.run, [(cell.number, cell.patches) for cell in cells])
    if isinstance(recipe, (str, os.PathLike)):
        recipe = str(Path(recipe).expanduser().absolute())
    packed_recipe = packed([("the recipe", recipe)])
    packed([("the metric", work.metric), ("what the model runs on", work.inputs)])  # for messages that tell which
    packed_work = packed([("the sweep", work)])
    token = uuid.uuid4().hex  # another sweep of the same arguments is another: weights may have changed

    def task(cells: Sequence[Cell], attempt: int) -> tuple[Any, ...]:
        return (run_parcel, token, packed_recipe, packed_work, _packed_cells(cells), attempt)

    return task


def _packed_cells(cells: Sequence[Cell]) -> bytes:
    # Named one by one, and together: what several cells hold is sent once.
    return packed(
        (f"the patch map of {cell}", (cell.number, {str(path): patch for path, patch in cell.patches.items()}))
        for cell in cells
    )


@dataclass(eq=False)
class _Portion:
    cells: Sequence[Cell]
    attempt: int = 0
    future: Any = None

    @property
    def is_suspect(self) -> bool:
        return self.attempt == _ATTEMPTS - 1


def _submitter(executor: Any) -> Callable[..., Any]:
    """Returns what submits to an executor.

    In distributed (seen in 2026.8) a future of `Client.get_executor()` never ends where the result is lost with its
    worker and the scheduler gives up on the task: the error escapes from what transmits it. The futures of the client
    itself do end, so these are used; `test_executors` kills workers at all times.
    """
    if type(executor).__module__ == "distributed.cfexecutor" and hasattr(executor, "_client"):
        return functools.partial(executor._client.submit, **getattr(executor, "_kwargs", {}))
    return executor.submit  # type: ignore[no-any-return]


class Dispatch:
    """Hands the chunks of one sweep to an executor, and what comes back to a ledger.

    Chunks whose worker is lost are submitted again, at last each alone; where the executor itself is broken, the rest
    is run here.

    Args:
        executor: The executor.
        task: Makes the tasks.
        runner: Runs cells here.

    Attributes:
        remarks: Those of the runners that ran cells elsewhere, in order, as keys.
    """

    def __init__(self, executor: Any, task: Task, runner: CellRunner) -> None:
        self._submitted = _submitter(executor)
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
        """Has all chunks run. `ledger` keeps what is done, also when this is interrupted; futures are cancelled then.

        Raises:
            ExperimentError: The first chunk that came back shows that none can be run like this.
        """
        self._ledger = ledger
        self._waiting.extend(map(_Portion, chunks))
        try:
            while self._breakage is None and (self._waiting or self._out):
                self._submit()
                if self._out and self._breakage is None:
                    self._take(self._next())
        except KeyboardInterrupt:
            self._take_what_is_there()
            raise
        finally:
            for portion in self._out:
                with contextlib.suppress(Exception):
                    portion.future.cancel()
            for message in self._messages:
                warn_each_time(message, ExperimentWarning)
        if self._breakage is not None:
            self._run_rest_here()

    def _submit(self) -> None:
        while self._waiting and len(self._out) < _IN_FLIGHT and self._breakage is None:
            portion = self._waiting[0]
            if self._out and (portion.is_suspect or next(iter(self._out)).is_suspect):
                return
            task = self._task(portion.cells, portion.attempt)
            try:
                portion.future = self._submitted(*task)
            except Exception as error:
                if not self._has_results and not self._out:
                    raise ExperimentError(f"executor= takes no work: {type(error).__name__}: {error}") from error
                self._breakage = error
                return
            self._out[self._waiting.popleft()] = None
            portion.future.add_done_callback(lambda _, portion=portion: self._done.put(portion))

    def _next(self) -> _Portion:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._done.get(timeout=1.0)  # on Windows no interrupt gets through to a wait without an end

    def _take(self, portion: _Portion) -> None:
        try:
            results, messages, remarks = portion.future.result()
        except (Exception, asyncio.CancelledError) as error:
            self._take_failure(portion, error)
        else:
            self._has_results = True
            self._ledger.keep(results)
            self._messages |= dict.fromkeys(messages)
            self.remarks |= dict.fromkeys(remarks)
            del self._out[portion]

    def _take_failure(self, portion: _Portion, error: BaseException) -> None:
        if isinstance(error, BrokenExecutor):
            self._breakage = error  # the portion stays among those that are out
            return
        is_lost = isinstance(error, _LOSSES) or type(error).__name__ in _NAMES_OF_LOSSES
        if is_lost and portion.attempt + 1 < _ATTEMPTS:
            del self._out[portion]
            self._waiting.append(_Portion(portion.cells, portion.attempt + 1))  # behind all that is new
            return
        if not self._has_results and not is_lost:
            raise ExperimentError(f"no cell can be run by this executor: {error}") from error
        text = f"{type(error).__name__}: {error}"
        if is_lost:
            text = f"its worker was lost {_ATTEMPTS} times, at last with nothing else to do: {text}"
        self._ledger.keep([CellResult(cell.number, None, text) for cell in portion.cells])
        del self._out[portion]

    def _take_what_is_there(self) -> None:
        for portion in list(self._out):
            if portion.future.done() and not portion.future.cancelled():
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    self._ledger.keep(portion.future.result()[0])
                    del self._out[portion]

    def _run_rest_here(self) -> None:
        self._take_what_is_there()
        rest = [portion.cells for portion in (*self._out, *self._waiting)]
        warn_each_time(
            f"the executor is broken ({type(self._breakage).__name__}: {self._breakage}); {sum(map(len, rest))} cells "
            "that it has not done are run in this process",
            ExperimentWarning,
        )
        run_here(self._runner, rest, self._ledger)
