"""Runs the chunks of a sweep in this thread, keeps their results, and shows the progress."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from graphpatch_notebook import interrupts
from graphpatch_notebook.experiments.engine.cells import Cell, CellResult
from graphpatch_notebook.experiments.engine.measurements import Measurement
from graphpatch_notebook.experiments.engine.runner import CellRunner
from graphpatch_notebook.experiments.executors.checkpoint import Checkpoint
from graphpatch_notebook.experiments.extras import extra


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


def run_here(runner: CellRunner, chunks: Chunks, ledger: Ledger) -> None:
    """Runs the chunks in order. `ledger` has the results of completed chunks even if the run is interrupted."""
    for chunk in chunks:
        ledger.keep(runner.run([(cell.number, cell.patches) for cell in chunk]))
