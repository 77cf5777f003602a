"""Sweeps: one number for each combination of the values of some axes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from graphpatch_notebook import interrupts
from graphpatch_notebook.errors import ExperimentError, SweepInterrupted
from graphpatch_notebook.experiments.engine.cells import CellResult, Cells, PatchMap, axes_of
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.plans import planned
from graphpatch_notebook.experiments.engine.runner import CellRunner
from graphpatch_notebook.experiments.executors.checkpoint import Checkpoint, identity
from graphpatch_notebook.experiments.executors.executors import Dispatch, check_executor, task_maker
from graphpatch_notebook.experiments.executors.scheduling import Ledger, Progress, remaining, run_here, shown_progress
from graphpatch_notebook.experiments.executors.worker import Reference, SweepWork
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.experiments.methods.arguments import (
    check_graph,
    check_input_names,
    check_inputs,
    check_metric,
    check_no_inputs,
)
from graphpatch_notebook.experiments.results.arrays import data_array, metric_dims
from graphpatch_notebook.patchable_graph import PatchableGraph, captured

if TYPE_CHECKING:
    from xarray import DataArray

_FEW = 4
"""Fewer cells do not share forwards: to find out how costs more."""


def sweep(
    pg: PatchableGraph,
    axes: Mapping[str, Any],
    make_patches: Callable[..., PatchMap],
    *inputs: Any,
    metric: Callable[[Any], Any],
    batch: int | str | None = "auto",
    progress: bool = True,
    backward: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_key: str = "",
    executor: Any = None,
    recipe: Any = None,
    **input_kwargs: Any,
) -> DataArray:
    """Returns what `metric` gives for each combination of the values of `axes`: `pg.sweep(...)` as a function.

    A sweep is the loop `for ...: with pg.patch(make_patches(...)): metric(pg(*inputs))`. Cells share work where that is
    known to change nothing: where their patches are `ZeroPatch`, `AddPatch` and `ReplacePatch`, which hold plain data
    and tensors. These are copied when they are made, so you may reuse tensors and patches. From the first other
    patch on (a `CustomPatch`, a `ProbePatch`, a kind of your own), each cell is made just before it runs, runs as a
    whole, once, and may use what earlier cells left behind. `attrs["remarks"]` says so.

    A cell that fails does not lose the others: it is NaN, `attrs["errors"]` says why, and one `ExperimentWarning` is
    given at the end. So does a cell that is made just before it runs and cannot be made, or names an unknown path.

    Args:
        pg: The graph.
        axes: From names to values, the dimensions of the result.
        make_patches: From a value of each axis to the patch map of a cell. It is called once for each cell, in order,
            but before earlier cells run as long as all are of the first kind: then it cannot use what the metric keeps
            of these, and if it changes the model or its inputs, that is an error.
        *inputs: What the model runs on, positional; or all of it as one `Inputs`.
        metric: From the output of the model to a number, an array of numbers, or a dict of numbers by name. It is
            called without patches first (more than once, where a part of the output may be left out), then once for
            each cell: in their order, if a call changes what it refers to, or if cells do not share forwards.
        batch: `"auto"`, the number of cells in one forward, or `None` for one after the other.
        progress: Whether to show how far it is, how many cells are done in a second, and how long it will take.
        backward: Whether the metric of each cell is differentiated, with gradients that add up. Neither with
            `checkpoint` nor with `executor`, which do not keep gradients.
        checkpoint: The name of a file in which each chunk of cells is kept when it is done. The same call goes on from
            it, after an interrupt, a crash or a power cut: cells that are done are not run again, cells that failed
            are. The file of another sweep (axes, patches, metric, inputs, weights, the metric without patches, or
            `checkpoint_key`) is refused and left as it is. Numbers are those of an uninterrupted sweep, bit for bit,
            in the same environment. All patch maps are made before any cell runs, as with `executor`: functions that
            use what others left behind do not find what cells left that ran earlier, or elsewhere.
        checkpoint_key: What else tells this sweep from another, say the version of what your functions do: change it
            when they change. Code is not looked at, so a key is needed with `checkpoint` unless patches are
            `ZeroPatch`, `AddPatch` and `ReplacePatch`, the metric is one of the package's, or of torch's such as
            `torch.sum`, and the inputs are plain data.
        executor: What runs the chunks: an executor as in `concurrent.futures`, with a method `submit` that returns a
            future. Threads share this process's graph. Other executors (processes, `joblib`'s, a Dask `Client` or its
            `get_executor()`) need a `recipe`, and no weights go through them. Where a worker is lost, its chunk is
            submitted again; where the executor breaks or has no worker left, the rest is run here, with an
            `ExperimentWarning`, but not what its workers may have been lost with.
        recipe: How another process gets the graph: a function without arguments that returns it, in the mode, dtype
            and with the weights that it has here, or the name of a file that `pg.save` wrote. Each process does it
            once, and its model must give what this one gives without patches, up to rounding: its cells fail
            otherwise.
        **input_kwargs: What the model runs on, by keyword.

    Raises:
        SweepInterrupted: On an interrupt, once cells are run; a `KeyboardInterrupt`, whose `.result` has what is done.
        ExperimentError: Something cannot be done like this, said before any cell is run; or all cells failed.
        UnknownPathError, PatchMapError: Before any cell is run: paths or patches that `pg.patch` would refuse.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph, ZeroPatch
        >>> pg = PatchableGraph(torch.nn.Linear(2, 2), torch.ones(1, 2))
        >>> result = pg.sweep(
        ...     {"unit": range(2)},
        ...     lambda unit: {"output": ZeroPatch(slice=(..., unit))},
        ...     torch.ones(1, 2),
        ...     metric=lambda output: (output == 0).sum(),
        ...     progress=False,
        ... )
        >>> result.dims, result.values
        (('unit',), array([1., 1.]))
    """
    check_graph(pg)
    check_metric(metric)
    given = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], Inputs) else Inputs(inputs, input_kwargs)
    check_no_inputs(
        batch=batch, progress=progress, backward=backward, checkpoint=checkpoint, checkpoint_key=checkpoint_key
    )
    check_input_names(pg, given.kwargs, sweep)
    check_inputs(pg, given)
    extra("xarray", "the result of a sweep")
    _check_options(batch, backward, checkpoint, checkpoint_key, executor)
    if executor is not None:
        check_executor(executor, recipe, pg)
    values = axes_of(axes)
    making = Cells(values, make_patches)
    cells = making.unmade
    plan = planned(pg, making, given, metric, is_all=checkpoint is not None or executor is not None, backward=backward)
    batch = batch if len(plan.shared) >= _FEW else None
    runner = CellRunner(pg, given, metric, plan.paths, batch=batch, backward=backward)
    metric_dims(runner.baseline, values)  # refuses names before anything is run
    file = None
    if checkpoint is not None:
        own = identity(values, checkpoint_key, metric, runner.baseline, given, captured(pg).module, plan.made)
        file = Checkpoint(checkpoint, own, cells)
    results = dict(file.done) if file is not None else {}
    chunks = list(remaining([*runner.chunks(plan.shared, plan.entries), *([cell] for cell in plan.alone)], results))
    dispatch = None
    if executor is not None and chunks:
        work = SweepWork(given, metric, plan.paths, batch, Reference.of(pg, given, runner.baseline))
        dispatch = Dispatch(executor, task_maker(executor, recipe, pg, work), runner)

    def run(shown: Progress) -> None:
        ledger = Ledger(runner.baseline, file, shown, results)
        run_here(runner, chunks, ledger) if dispatch is None else dispatch.run(chunks, ledger)
        for number in plan.later:
            ledger.keep([_made_and_run(runner, making, number)])

    is_whole = _runs_through(run, len(cells), len(results), progress)
    remarks = [*plan.remarks, *runner.remarks, *(dispatch.remarks if dispatch is not None else ())]
    remarks = list(dict.fromkeys(remarks))
    if not is_whole:
        remarks.append(f"interrupted: {len(cells) - len(results)} of {len(cells)} cells were not run and are NaN")
    result = None
    try:
        with interrupts.deferred():  # what is done does not get lost while it is put together
            result = data_array(values, cells, results, runner.baseline, metric, remarks)
    except KeyboardInterrupt:
        is_whole = False
    if result is None:  # the interrupt came before it could be deferred
        result = data_array(values, cells, results, runner.baseline, metric, remarks)
    if not is_whole:
        raise SweepInterrupted(_stopped(len(results), len(cells), checkpoint), result)
    return result


def _made_and_run(runner: CellRunner, cells: Cells, number: int) -> CellResult:
    try:
        cell = cells.made(number)
    except Exception as error:
        return CellResult(number, None, f"{type(error).__name__}: {error} (raised by make_patches)")
    return runner.run_whole(number, cell.patches)


def _runs_through(run: Callable[[Progress], None], total: int, done: int, is_shown: bool) -> bool:
    """Returns whether `run` comes to its end without an interrupt."""
    try:
        with shown_progress(total, done, is_shown) as shown:
            run(shown)
    except KeyboardInterrupt:
        return False
    return True


def _check_options(batch: Any, backward: bool, checkpoint: Any, checkpoint_key: Any, executor: Any) -> None:
    if batch is not None and batch != "auto" and (type(batch) is not int or batch < 1):
        raise ExperimentError(f'batch must be "auto", a number of cells, or None, not {batch!r}')
    if not isinstance(checkpoint_key, str):
        raise ExperimentError(f"checkpoint_key must be a text, not {checkpoint_key!r}")
    if backward and checkpoint is not None:
        raise ExperimentError(
            "backward=True accumulates gradients, which checkpoint= does not keep: they would lack the cells that were "
            "done before; use one of the two"
        )
    if backward and executor is not None:
        raise ExperimentError(
            "backward=True accumulates gradients in this process, executor= runs cells elsewhere; use one of the two"
        )


def _stopped(done: int, total: int, checkpoint: str | os.PathLike[str] | None) -> str:
    again = f"; the same call goes on from {os.fspath(checkpoint)!r}" if checkpoint is not None else ""
    return (
        f"stopped after {done} of {total} cells, which are in .result of this exception (at a prompt: "
        f"import sys; sys.last_value.result){again}"
    )
