"""Has the chunks of a sweep run, here or by an executor, and keeps what is done."""

from __future__ import annotations

from collections.abc import Sequence

from graphpatch_notebook.experiments.cells import Cell, CellResult
from graphpatch_notebook.experiments.runner import CellRunner


def run_chunks(runner: CellRunner, chunks: Sequence[Sequence[Cell]]) -> dict[int, CellResult]:
    """Returns the results of all cells, by number."""
    results: dict[int, CellResult] = {}
    for chunk in chunks:
        for result in runner.run([(cell.number, cell.patches) for cell in chunk]):
            results[result.number] = result
    return results
