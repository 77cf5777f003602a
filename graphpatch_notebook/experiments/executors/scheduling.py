"""Runs the chunks of a sweep here, keeps what is done, and shows how far it is."""

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
    """Is told of cells that are done."""

    def update(self, n: int) -> object:
        """Says that `n` more cells are done."""


class _Silent:
    def update(self, n: int) -> None:
        """Shows nothing."""


@contextlib.contextmanager
def shown_progress(total: int, done: int, is_wanted: bool) -> Iterator[Progress]:
    """Shows a bar for the length of the block: a widget in a notebook, a line on stderr elsewhere.

    Args:
        total: How many cells there are.
        done: How many of them were done before: the rate, and so the estimate, leaves these out.
        is_wanted: Whether there is to be a bar.

    Raises:
        ExperimentError: A bar is wanted, and tqdm is not installed. Better an error before anything has run than a
            sweep of hours without its bar.
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
    """What is done of a sweep.

    Attributes:
        baseline: What all measurements must look like.
        checkpoint: The file in which it is kept, if there is one.
        progress: Shows how far the sweep is.
        results: By the number of the cell.
    """

    baseline: Measurement
    checkpoint: Checkpoint | None
    progress: Progress
    results: dict[int, CellResult] = field(default_factory=dict)

    def keep(self, results: Sequence[CellResult]) -> None:
        """Keeps the results of a chunk; an interrupt comes before or after, never between memory and file.

        What is kept already is left out: after an interrupt it may be given again.
        """
        results = [self._checked(result) for result in results if result.number not in self.results]
        with interrupts.deferred():
            self.results |= {result.number: result for result in results}
            if self.checkpoint is not None:
                self.checkpoint.append(results)
        self.progress.update(len(results))

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
    """Yields what remains of the chunks; they are not divided again, so that numbers stay the same bit for bit."""
    for chunk in chunks:
        if rest := [cell for cell in chunk if cell.number not in done]:
            yield rest


def run_here(runner: CellRunner, chunks: Chunks, ledger: Ledger) -> None:
    """Runs the chunks one after the other, and keeps what is done in `ledger`, also of a run that is interrupted."""
    for chunk in chunks:
        ledger.keep(runner.run([(cell.number, cell.patches) for cell in chunk]))
