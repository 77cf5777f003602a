"""Sweeps: a metric for each combination of the values of some axes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphpatch_notebook import interrupts
from graphpatch_notebook.checks.keywords import check_input_names
from graphpatch_notebook.errors import ExperimentError, ExperimentWarning, SweepInterrupted
from graphpatch_notebook.experiments.engine.cells import Cell, CellResult, Cells, PatchMap, axes_of, patches_in
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.purity import MadeCells, made_cells, why_in_order
from graphpatch_notebook.experiments.engine.runner import CellRunner
from graphpatch_notebook.experiments.engine.sweep_setup import SweepRequest
from graphpatch_notebook.experiments.executors.checkpoint import Checkpoint, identity
from graphpatch_notebook.experiments.executors.dispatch import Dispatch, check_executor, task_maker
from graphpatch_notebook.experiments.executors.scheduling import (
    MADE_BEFORE,
    Dispatched,
    Ledger,
    Progress,
    remaining,
    run_here,
    shown_progress,
)
from graphpatch_notebook.experiments.executors.worker import Reference, SweepWork, WatchedRunner
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.experiments.methods.arguments import check_graph, check_metric
from graphpatch_notebook.experiments.results.arrays import data_array, metric_dims
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.sharded import processes_of
from graphpatch_notebook.warning_places import warn_each_time

if TYPE_CHECKING:
    from xarray import DataArray

_FEW, _FEW_ALONE = 4, 8
"""With fewer cells, sharing costs more than it saves: they run as in a plain loop. The second is for cells that share
recorded results alone, and no forwards."""


def run_sweep(
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
    checkpoint_key: str = "",
    executor: Any = None,
    recipe: Any = None,
) -> DataArray:
    """Returns the metric for each combination of the values of `axes`: see `PatchableGraph.sweep`."""
    check_graph(pg)
    check_metric(metric)
    check_input_names(pg.nodes.root, inputs.kwargs, PatchableGraph.sweep)
    extra("xarray", "the result of a sweep")
    _check_options(batch, backward, checkpoint, checkpoint_key, executor)
    if executor is not None:
        check_executor(executor, recipe, pg)
        executor = _usable(executor, pg, inputs, metric)
    values = axes_of(axes)
    making = Cells(values, make_patches)
    cells = making.unmade
    is_all = checkpoint is not None or executor is not None
    made = made_cells(pg, making, inputs, metric, is_all=is_all, backward=backward)
    _check_probes(made.alone if executor is not None else ())
    request = SweepRequest(inputs, metric, made.paths, None if batch == 1 else batch, backward)
    request = _worthwhile(request, len(made.shared))
    runner = (WatchedRunner if is_all else CellRunner)(pg, request, look=made.look, baseline=made.baseline)
    metric_dims(runner.baseline, values)  # checks the names of axes before anything runs
    file: Checkpoint | None = None
    results: dict[int, CellResult] = {}
    if checkpoint is not None:
        own = identity(values, checkpoint_key, metric, runner.baseline, inputs, pg, made.made)
        file, results = _opened(checkpoint, own, cells, pg)
    shared, alone = runner.chunks(made.shared, made.entries), [[cell] for cell in made.alone]
    dispatch = None
    if executor is not None and (chunks := list(remaining([*alone, *shared], results))):
        work = SweepWork(request, Reference.of(pg, inputs, runner.baseline))
        task = task_maker(executor, recipe, pg, work, [("the metric", metric), ("what the model runs on", inputs)])
        dispatch = Dispatch(executor, task, lambda cells, ledger: run_here(runner, [cells], ledger))

    def run(shown: Progress) -> None:
        ledger = Ledger(runner.baseline, file, shown, results)
        if dispatch is None:
            _run_in_order(runner, shared, alone, ledger)
        else:
            dispatched = Dispatched(runner, chunks, ledger, lambda cells: task(cells, 0))
            deque(dispatch.run(dispatched, ledger, dispatched.may_begin), maxlen=0)
        for number in made.later:
            ledger.keep([_made_and_run(runner, making, number)])

    is_whole = _runs_through(run, len(cells), len(results), progress)
    _warn_of_draws(made, runner)
    all_remarks = [*made.remarks, *runner.remarks, *(dispatch.remarks if dispatch is not None else ())]
    remarks = list(dict.fromkeys(all_remarks))
    if not is_whole:
        remarks.append(f"interrupted: {len(cells) - len(results)} of {len(cells)} cells did not run and are NaN")
    result, is_finished = _in_spite_of_interrupts(
        lambda: data_array(values, cells, results, runner.baseline, metric, remarks)
    )
    if not (is_whole and is_finished):
        raise SweepInterrupted(_stopped(len(results), len(cells), checkpoint), result)
    return result


def _run_in_order(
    runner: CellRunner, shared: Sequence[list[Cell]], alone: Sequence[list[Cell]], ledger: Ledger
) -> None:
    """Runs chunks of cells that may share work, and then those that run alone, in this process."""
    run_here(runner, [*remaining(shared, ledger.results)], ledger)
    if shared:
        runner.check_order(shared[0][0], ledger.results.get(shared[0][0].number))
    run_here(runner, [*remaining(alone, ledger.results)], ledger)


def _warn_of_draws(made: MadeCells, runner: CellRunner) -> None:
    """Warns if making all patch maps, before any cell ran, has drawn from the generators that patches draw from."""
    if made.draws and isinstance(runner, WatchedRunner) and runner.has_drawn:
        warn_each_time(MADE_BEFORE, ExperimentWarning)


def _in_spite_of_interrupts(make: Callable[[], DataArray]) -> tuple[DataArray, bool]:
    """Returns the result, which an interrupt now must not lose, and whether there was none."""
    result, is_finished = None, True
    try:
        with interrupts.deferred():
            result = make()
    except KeyboardInterrupt:
        is_finished = False
    return (make() if result is None else result), is_finished  # it may come before it could be deferred


def _usable(executor: Any, pg: PatchableGraph, inputs: Inputs, metric: Callable[[Any], Any]) -> Any:
    """Returns the executor; `None`, with a warning, if cells must run in order."""
    if (why := why_in_order(pg, inputs, metric)) is None:
        return executor
    warn_each_time(_IN_ORDER.format(why), ExperimentWarning)
    return None


def _worthwhile(request: SweepRequest, count: int) -> SweepRequest:
    """Returns the request for this number of cells that may share work: as in a plain loop, if these are few."""
    may_share = request.batch is not None and request.why_alone is None
    return replace(request, paths=()) if count < (_FEW if may_share else _FEW_ALONE) else request


def _check_probes(cells: Sequence[Cell]) -> None:
    """Checks that no patch keeps values of several cells: in another order, they would be of any of these."""
    keeping: dict[int, Cell] = {}
    for cell in cells:
        for patch in patches_in(cell.patches):
            if isinstance(patch, Patch) and patch.only_keeps and keeping.setdefault(id(patch), cell) is not cell:
                raise ExperimentError(
                    f"several cells ({keeping[id(patch)]}; {cell}) have the same {type(patch).__name__}: with "
                    "executor= they run in any order, so it would hold what any of them kept. Make one for each cell, "
                    "or leave out executor="
                )


_IN_ORDER = (
    "executor= is not used: {}, so cells depend on those before them, and run in this process, one after the other"
)

_LOST_STATE = (
    "patches of cells that are done in checkpoint={file!r} changed what they refer to when they ran, or used an "
    "iterator; the other cells run without that, so their numbers may not be those of a loop: delete the file to get "
    "these"
)


def _opened(
    name: str | os.PathLike[str], own: dict[str, Any], cells: Sequence[Cell], pg: PatchableGraph
) -> tuple[Checkpoint | None, dict[int, CellResult]]:
    """Returns the file of a sweep, which the first of several processes writes, and what is done."""
    if (processes := processes_of(captured(pg).root)) is None:
        file = Checkpoint(name, own, cells)
        return file, _warned_of(file, cells)
    if not processes.are_same((os.fspath(name), own | {"baseline": None})):  # whose last digits may differ
        raise ExperimentError(
            "checkpoint= is one file of all processes, but they give other names, inputs, metrics or patches: give the "
            "same on all of them, or leave it out"
        )
    file = processes.on_first(lambda: Checkpoint(name, own, cells))
    return (file if processes.is_first else None), _warned_of(file, cells)


def _warned_of(file: Checkpoint, cells: Sequence[Cell]) -> dict[int, CellResult]:
    """Returns what is done; warns if the other cells would need what these have changed."""
    if len(file.done) < len(cells) and any(result.has_changed_state for result in file.done.values()):
        warn_each_time(_LOST_STATE.format(file=str(file.file)), ExperimentWarning)
    return dict(file.done)


def _made_and_run(runner: CellRunner, cells: Cells, number: int) -> CellResult:
    try:
        patches = cells.made(number)
    except Exception as error:
        return CellResult(number, None, f"{type(error).__name__}: {error} (raised by make_patches)")
    return runner.run_whole(number, patches)


def _runs_through(run: Callable[[Progress], None], total: int, done: int, is_shown: bool) -> bool:
    """Calls `run` and returns whether it finished without an interrupt."""
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
            "backward=True accumulates gradients, which checkpoint= does not keep, so those of earlier cells would be "
            "missing; use one of the two"
        )
    if backward and executor is not None:
        raise ExperimentError(
            "backward=True accumulates gradients here, but executor= runs cells elsewhere; use one of the two"
        )


def _stopped(done: int, total: int, checkpoint: str | os.PathLike[str] | None) -> str:
    again = f"; the same call continues from {os.fspath(checkpoint)!r}" if checkpoint is not None else ""
    return (
        f"stopped after {done} of {total} cells; the result is in .result of this exception (at a prompt: "
        f"import sys; sys.last_value.result){again}"
    )
