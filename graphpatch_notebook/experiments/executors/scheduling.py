"""Has the chunks of a sweep run, here or by an executor, and keeps what is done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from graphpatch_notebook import interrupts
from graphpatch_notebook.experiments.engine.cells import Cell, CellResult
from graphpatch_notebook.experiments.engine.measurements import Measurement
from graphpatch_notebook.experiments.engine.runner import CellRunner
from graphpatch_notebook.experiments.executors.checkpoint import Checkpoint
from graphpatch_notebook.experiments.executors.progress import Progress

Chunks: TypeAlias = "Sequence[Sequence[Cell]]"


@dataclass
class Ledger:
    """What is done of a sweep.

    Attributes:
        baseline: What all measurements must look like.
        checkpoint: The file in which it is kept, if there is one.
        progress: Who is told.
        results: By the number of the cell.
    """

    baseline: Measurement
    checkpoint: Checkpoint | None
    progress: Progress
    results: dict[int, CellResult] = field(default_factory=dict)

    def keep(self, results: Sequence[CellResult]) -> None:
        """Keeps the results of a chunk; an interrupt comes before or after, never between memory and file.

        What is kept already is left out: who was interrupted may not know whether it was.
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
    """Yields what remains of the chunks; they are not put together anew, so that numbers stay the same bit for bit."""
    for chunk in chunks:
        if rest := [cell for cell in chunk if cell.number not in done]:
            yield rest


def run_here(runner: CellRunner, chunks: Chunks, ledger: Ledger) -> None:
    """Runs the chunks one after the other, and keeps what is done in `ledger`, also of a run that is interrupted."""
    for chunk in chunks:
        ledger.keep(runner.run([(cell.number, cell.patches) for cell in chunk]))
