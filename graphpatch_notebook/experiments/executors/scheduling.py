"""Runs the chunks of a sweep in this thread, keeps their results, and shows the progress."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from graphpatch_notebook import interrupts
from graphpatch_notebook.errors import ExperimentWarning
from graphpatch_notebook.experiments.engine.cells import Cell, CellResult
from graphpatch_notebook.experiments.engine.measurements import Measurement
from graphpatch_notebook.experiments.engine.purity import is_pure
from graphpatch_notebook.experiments.engine.runner import CellRunner
from graphpatch_notebook.experiments.engine.side_effects import ReferredValues
from graphpatch_notebook.experiments.executors.checkpoint import Checkpoint
from graphpatch_notebook.experiments.executors.worker import CHANGES_STATE
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.warning_places import warn_each_time


class Progress(Protocol):
    """Receives completed-cell counts."""

    def update(self, n: int) -> object:
        """Adds `n` completed cells."""

    def set_postfix_str(self, s: str, refresh: bool = True) -> object:
        """Shows a text next to the count."""


class _Silent:
    def update(self, n: int) -> None:
        """Shows nothing."""

    def set_postfix_str(self, s: str, refresh: bool = True) -> None:
        """Shows nothing."""


@contextlib.contextmanager
def shown_progress(total: int, done: int, is_wanted: bool) -> Iterator[Progress]:
    """Shows a progress bar during the block: a widget in a notebook, a line on stderr elsewhere.

    Args:
        total: The number of cells.
        done: The number of cells that were completed before; the rate does not include these.
        is_wanted: Whether to show a bar.

    Raises:
        ExperimentError: A bar is requested, and tqdm is not installed. Nothing has run.
    """
    if not is_wanted:
        yield _Silent()
        return
    tqdm = extra("tqdm.auto", "the progress of a sweep", ", or say progress=False").tqdm
    with tqdm(total=total, initial=done, desc="sweep", unit="cell") as bar:
        yield bar


Chunks: TypeAlias = "Sequence[Sequence[Cell]]"


@dataclass
class Ledger:
    """The results of a sweep so far.

    Attributes:
        baseline: The measurement without patches; all others must have its shape and names.
        checkpoint: The file for the results, if there is one.
        progress: Shows the progress.
        results: The results, by the number of the cell.
    """

    baseline: Measurement
    checkpoint: Checkpoint | None
    progress: Progress
    results: dict[int, CellResult] = field(default_factory=dict)

    def keep(self, results: Sequence[CellResult]) -> None:
        """Keeps the results of a chunk, in memory and in the file; an interrupt is deferred until both are done.

        Results that are kept already are ignored: after an interrupt they may be given again.
        """
        results = [self._checked(result) for result in results if result.number not in self.results]
        with interrupts.deferred():
            self.results |= {result.number: result for result in results}
            if self.checkpoint is not None:
                self.checkpoint.append(results)
        self.progress.update(len(results))

    def fail(self, cells: Sequence[Cell], text: str) -> None:
        """Keeps the reason why cells failed."""
        self.keep([CellResult(cell.number, None, text) for cell in cells])

    def show_workers(self, count: int) -> None:
        """Shows how many workers have returned results."""
        self.progress.set_postfix_str(f"{count} worker{'s' if count > 1 else ''}", refresh=False)

    def _checked(self, result: CellResult) -> CellResult:
        if result.measurement is None or result.measurement.form == self.baseline.form:
            return result
        return CellResult(
            result.number,
            None,
            f"the metric gave numbers of shape {_form(result.measurement)} here, and {_form(self.baseline)} without "
            "patches",
        )


def _form(measurement: Measurement) -> str:
    shape, names = measurement.form
    return f"{shape}" if names is None else f"{shape} named {', '.join(names)}"


def remaining(chunks: Chunks, done: Mapping[int, CellResult]) -> Iterator[list[Cell]]:
    """Yields the remaining cells of each chunk. Chunks are not regrouped, since that could change rounding errors."""
    for chunk in chunks:
        if rest := [cell for cell in chunk if cell.number not in done]:
            yield rest


class Dispatched:
    """Iterates over the chunks that may run in any order, and in other processes; runs the others here, in order.

    To tell which, the first impure cell of each kind runs here: cells are of one kind if their patches have the same
    code. If it changes what its patches refer to, or draws from the shared generators, all further ones run here, too.

    Args:
        runner: Runs cells here, and notes whose patches change something: a `WatchedRunner`.
        chunks: The chunks. Impure cells are alone.
        ledger: Receives the results of the cells that run here.
        check: Raises an error if cells cannot run elsewhere.
    """

    def __init__(
        self, runner: CellRunner, chunks: Chunks, ledger: Ledger, check: Callable[[Sequence[Cell]], object]
    ) -> None:
        self._runner, self._waiting, self._ledger, self._check = runner, deque(chunks), ledger, check
        self._tried: set[frozenset[Any]] = set()
        self._expected = len(ledger.results)
        self._is_stateful = False

    def __iter__(self) -> Iterator[Sequence[Cell]]:
        while self._waiting:
            is_here, chunk = self._is_next_here(), self._waiting.popleft()
            self._expected += len(chunk)
            if not is_here:
                yield chunk
                continue
            self._check(chunk)
            code = _code_of(chunk[0])  # before a probe holds what it has seen
            results = self._runner.run([(cell.number, cell.patches) for cell in chunk])
            self._ledger.keep(results)
            if any(result.has_changed_state for result in results):
                if not self._is_stateful:
                    warn_each_time(MADE_BEFORE, ExperimentWarning)
                self._is_stateful = True
            elif all(result.error is None for result in results):
                self._tried.add(code)

    def may_begin(self) -> bool:
        """Whether the next chunk may begin: one that runs here may change what those before it read."""
        return not self._waiting or len(self._ledger.results) == self._expected or not self._is_next_here()

    def _is_next_here(self) -> bool:
        cell = self._waiting[0][0]
        return not is_pure(cell.patches) and (self._is_stateful or _code_of(cell) not in self._tried)


MADE_BEFORE = (
    f"patches of some cells {CHANGES_STATE}. With executor=, such cells run in this process, one after the other. "
    "With executor= or checkpoint=, make_patches is called for all cells before any runs: their numbers are those of a "
    "loop only if it does not read, or draw from, the same. Otherwise, give each cell what it needs, such as a "
    "generator of its own: torch.Generator().manual_seed(cell)"
)


def _code_of(cell: Cell) -> frozenset[Any]:
    return ReferredValues(cell.patches, most_bytes=0).code


def run_here(runner: CellRunner, chunks: Chunks, ledger: Ledger) -> None:
    """Runs the chunks in order. `ledger` has the results of completed chunks even if the run is interrupted."""
    for chunk in chunks:
        ledger.keep(runner.run([(cell.number, cell.patches) for cell in chunk]))
