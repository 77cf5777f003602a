"""Sweeps: one number for each combination of the values of some axes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from graphpatch_notebook.errors import ExperimentError, SweepInterrupted
from graphpatch_notebook.experiments.cells import PatchMap, axes_of, cells_of
from graphpatch_notebook.experiments.checkpoint import Checkpoint, Identity
from graphpatch_notebook.experiments.data_arrays import data_array, metric_dims
from graphpatch_notebook.experiments.executors import Dispatch, check_executor, task_maker
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.experiments.fitness import Reference
from graphpatch_notebook.experiments.inputs import Inputs
from graphpatch_notebook.experiments.progress import shown_progress
from graphpatch_notebook.experiments.runner import CellRunner
from graphpatch_notebook.experiments.scheduling import Chunks, Ledger, remaining, run_here
from graphpatch_notebook.experiments.worker import Work
from graphpatch_notebook.patchable_graph import PatchableGraph

if TYPE_CHECKING:
    from xarray import DataArray


def sweep(
    pg: PatchableGraph,
    axes: Mapping[str, Any],
    make_patches: Callable[..., PatchMap],
    inputs: Inputs,
    *,
    metric: Callable[[Any], Any],
    batch: int | str | None = "auto",
    progress: bool = True,
    backward: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    executor: Any = None,
    recipe: Any = None,
) -> DataArray:
    """Returns what `metric` gives for each cell: see `PatchableGraph.sweep`."""
    extra("xarray", "the result of a sweep")
    _check_options(backward, checkpoint, executor, recipe)
    values = axes_of(axes)
    cells = cells_of(values, make_patches)
    paths = list(dict.fromkeys(str(path) for cell in cells for path in cell.patches))
    runner = CellRunner(pg, inputs, metric, paths, batch=batch, backward=backward)
    metric_dims(runner.baseline, values)  # refuses names before anything is run
    file = None
    if checkpoint is not None:
        file = Checkpoint(checkpoint, Identity.of(values, cells, metric, inputs, runner.baseline), cells)
    results = dict(file.done) if file is not None else {}
    chunks = list(remaining(runner.chunks(cells), results))
    run: Callable[[Chunks, Ledger], None] = functools.partial(run_here, runner)
    if executor is not None and chunks:
        work = Work(inputs, metric, paths, batch, Reference.of(pg, inputs, runner.baseline))
        run = Dispatch(executor, task_maker(executor, recipe, pg, work), runner).run
    is_interrupted = False
    try:
        with shown_progress(len(cells), len(results), progress) as shown:
            run(chunks, Ledger(runner.baseline, file, shown, results))
    except KeyboardInterrupt:
        is_interrupted = True
    remarks = list(runner.remarks)
    if is_interrupted:
        remarks.append(f"interrupted: {len(cells) - len(results)} of {len(cells)} cells were not run and are NaN")
    result = data_array(values, cells, results, runner.baseline, metric, remarks)
    if is_interrupted:
        raise SweepInterrupted(_stopped(len(results), len(cells), checkpoint), result)
    return result


def _check_options(backward: bool, checkpoint: Any, executor: Any, recipe: Any) -> None:
    if backward and checkpoint is not None:
        raise ExperimentError(
            "backward=True accumulates gradients, which checkpoint= does not keep: they would lack the cells that were "
            "done before; use one of the two"
        )
    if backward and executor is not None:
        raise ExperimentError(
            "backward=True accumulates gradients in this process, executor= runs cells elsewhere; use one of the two"
        )
    if executor is not None:
        check_executor(executor, recipe)


def _stopped(done: int, total: int, checkpoint: str | os.PathLike[str] | None) -> str:
    again = f"; the same call goes on from {os.fspath(checkpoint)!r}" if checkpoint is not None else ""
    return (
        f"stopped after {done} of {total} cells, which are in .result of this exception (at a prompt: "
        f"import sys; sys.last_value.result){again}"
    )
