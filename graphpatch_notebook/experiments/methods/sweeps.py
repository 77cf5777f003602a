"""Sweeps: a metric for each combination of the values of some axes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpatch_notebook.checks.digests import digest
from graphpatch_notebook.checks.keywords import check_input_names
from graphpatch_notebook.checks.sharding import processes_of
from graphpatch_notebook.errors import ExperimentError, SweepInterrupted
from graphpatch_notebook.experiments.elsewhere import Checkpoint, Lost, Workers, check_executor, weights_digest
from graphpatch_notebook.experiments.engine.cells import Cell, CellResult, Cells, PatchMap, axes_of, patches_in
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import Measurement
from graphpatch_notebook.experiments.engine.purity import made_cells
from graphpatch_notebook.experiments.engine.runner import CellRunner
from graphpatch_notebook.experiments.engine.sweep_setup import SweepRequest
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.experiments.methods.arguments import check_graph, check_metric
from graphpatch_notebook.experiments.results.arrays import data_array, metric_dims, metric_name, plain_label
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import declares

if TYPE_CHECKING:
    from xarray import DataArray

_FEW, _FEW_ALONE = 4, 8
"""With fewer cells, sharing costs more than it saves: they run as in a plain loop. The second is for cells that share
recorded results alone, and no forwards."""
_AHEAD = 256
"""How many chunks an executor has at once: enough to keep a cluster busy."""
_OTHER_DEVICE, _OTHER_DEVICE_LOW = 1e-4, 2e-2
"""How much the metric may differ on another device or machine, relative to its largest number; in low precision."""


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
    values = axes_of(axes)
    making = Cells(values, make_patches)
    cells = making.unmade
    is_all = checkpoint is not None or executor is not None
    made = made_cells(pg, making, inputs, metric, is_all=is_all, backward=backward)
    request = SweepRequest(inputs, metric, made.paths, None if batch == 1 else batch, backward)
    request = _worthwhile(request, len(made.shared))
    runner = CellRunner(pg, request, look=made.look, baseline=made.baseline)
    metric_dims(runner.baseline, values)  # checks the names of axes before anything runs
    ledger = _Ledger(runner.baseline)
    if checkpoint is not None:
        own = _identity(values, checkpoint_key, metric, runner.baseline, inputs, pg, made.made)
        ledger = _Ledger(runner.baseline, *_opened(checkpoint, own, pg))
    results = ledger.results
    shared, alone = runner.chunks(made.shared, made.entries), [[cell] for cell in made.alone]
    workers, remarks = None, dict.fromkeys([*made.remarks, *runner.remarks])
    if executor is not None:
        workers = Workers(executor, recipe, pg, functools.partial(_CellTask.of, request, runner.baseline))

    def run() -> None:
        if workers is None:
            _run_in_order(runner, shared, alone, ledger)
        else:
            _run_elsewhere(workers, [*_remaining([*alone, *shared], results)], ledger, remarks)
        for number in made.later:
            ledger.keep([_made_and_run(runner, making, number)])

    with _shown_progress(len(cells), len(results), progress) as ledger.progress:
        is_whole = _runs_through(run)
    told = [*remarks, *runner.remarks]
    if not is_whole:
        told.append(f"interrupted: {len(cells) - len(results)} of {len(cells)} cells did not run and are NaN")
    result = data_array(values, cells, results, runner.baseline, metric, list(dict.fromkeys(told)))
    if not is_whole:
        raise SweepInterrupted(_stopped(len(results), len(cells), checkpoint), result)
    return result


@dataclass
class _Ledger:
    """The results of a sweep so far.

    Attributes:
        baseline: The measurement without patches; all others must have its shape and names.
        checkpoint: Where results are written, if anywhere.
        results: The results, by the number of the cell.
        progress: A progress bar, if there is one.
    """

    baseline: Measurement
    checkpoint: Checkpoint | None = None
    results: dict[int, CellResult] = field(default_factory=dict)
    progress: Any = None

    def keep(self, results: Sequence[CellResult]) -> None:
        """Keeps the results of a chunk, in memory and in the checkpoint."""
        before = len(self.results)
        results = [self._checked(result) for result in results]
        self.results |= {result.number: result for result in results}
        if self.checkpoint is not None:
            self.checkpoint.append(
                {each.number: each.measurement.to_json() for each in results if each.measurement is not None}
            )
        if self.progress is not None:
            self.progress.update(len(self.results) - before)

    def _checked(self, result: CellResult) -> CellResult:
        if result.measurement is None or result.measurement.form == self.baseline.form:
            return result
        shapes = f"{result.measurement.form} here, and {self.baseline.form} without patches"
        return CellResult(result.number, None, f"the metric gave numbers of shape and names {shapes}")


@contextmanager
def _shown_progress(total: int, done: int, is_wanted: bool) -> Iterator[Any]:
    """Shows a progress bar during the block, if it is wanted: a widget in a notebook, a line on stderr elsewhere."""
    if not is_wanted:
        yield None
        return
    tqdm = extra("tqdm.auto", "the progress of a sweep", ", or say progress=False").tqdm
    with tqdm(total=total, initial=done, desc="sweep", unit="cell") as bar:
        yield bar


@dataclass(frozen=True)
class _CellTask:
    """Runs cells in a worker: given by number and patch map. Returns their results, and remarks."""

    runner: CellRunner

    @classmethod
    def of(cls, request: SweepRequest, baseline: Measurement, pg: PatchableGraph) -> _CellTask:
        """Returns it for a graph, whose metric without patches must be `baseline`, up to other kernels and devices."""
        runner = CellRunner(pg, request)
        mine, size = runner.baseline.values, np.abs(baseline.values).max(initial=1e-6)
        is_low = any(parameter.dtype.itemsize < 4 for parameter in pg.parameters())
        tolerance = _OTHER_DEVICE_LOW if is_low else _OTHER_DEVICE
        if mine.shape != baseline.values.shape or not np.allclose(
            mine, baseline.values, tolerance, tolerance * size, equal_nan=True
        ):
            raise ExperimentError(
                f"without patches, the metric is {mine} in a worker and {baseline.values} here: is it the same model?"
            )
        return cls(runner)

    def __call__(self, cells: Sequence[tuple[int, PatchMap]]) -> tuple[list[CellResult], list[str]]:
        return self.runner.run(cells), list(self.runner.remarks)


def _run_elsewhere(workers: Workers, chunks: Sequence[list[Cell]], ledger: _Ledger, remarks: dict[str, None]) -> None:
    contents = ([(cell.number, cell.content) for cell in chunk] for chunk in chunks)
    for number, found in workers.results(contents, _AHEAD):
        if isinstance(found, Lost):
            ledger.keep([CellResult(cell.number, None, found.reason) for cell in chunks[number]])
        else:
            ledger.keep(found[0])
            remarks |= dict.fromkeys(found[1])


def _run_in_order(
    runner: CellRunner, shared: Sequence[list[Cell]], alone: Sequence[list[Cell]], ledger: _Ledger
) -> None:
    """Runs chunks of cells that may share work, and then those that run alone, in this process."""
    for chunk in _remaining(shared, ledger.results):
        ledger.keep(runner.run([(cell.number, cell.patches) for cell in chunk]))
    if shared:
        runner.check_order(shared[0][0], ledger.results.get(shared[0][0].number))
    for chunk in _remaining(alone, ledger.results):
        ledger.keep(runner.run([(cell.number, cell.patches) for cell in chunk]))


def _remaining(chunks: Sequence[list[Cell]], done: Mapping[int, CellResult]) -> Iterator[list[Cell]]:
    """Yields the remaining cells of each chunk. Chunks are not regrouped, since that could change rounding errors."""
    for chunk in chunks:
        if rest := [cell for cell in chunk if cell.number not in done]:
            yield rest


def _worthwhile(request: SweepRequest, count: int) -> SweepRequest:
    """Returns the request for this number of cells that may share work: as in a plain loop, if these are few."""
    may_share = request.batch is not None and request.why_alone is None
    return replace(request, paths=()) if count < (_FEW if may_share else _FEW_ALONE) else request


def _identity(
    axes: Mapping[str, Sequence[Any]],
    key: str,
    metric: Callable[[Any], Any],
    baseline: Measurement,
    inputs: Inputs,
    pg: PatchableGraph,
    cells: Sequence[Cell],
) -> dict[str, Any]:
    """Returns JSON data that identifies a sweep: its axes, the baseline, and digests of the rest.

    Raises:
        ExperimentError: Patches are functions, which only a key can identify, and there is no key.
    """
    patches = {type(patch).__name__: patch for cell in cells for patch in patches_in(cell.patches)}
    unknown = [name for name, patch in patches.items() if not declares(patch, "is_pure")]
    if unknown and not key:
        raise ExperimentError(
            f"checkpoint= does not see what a {unknown[0]} does: give a text that names this version of it, and change "
            'it when that changes: checkpoint="sweep", checkpoint_key="version 1"'
        )
    return {
        "axes": {name: [repr(plain_label(value)) for value in values] for name, values in axes.items()},
        "checkpoint_key": key,
        "metric": [metric_name(metric), digest(metric)],
        "inputs": digest(inputs.args, inputs.kwargs),
        "weights or modes": weights_digest(pg),
        "numbers without patches": baseline.to_json(),
        "patches": digest([cell.patches for cell in cells]),
    }


def _opened(
    name: str | os.PathLike[str], own: dict[str, Any], pg: PatchableGraph
) -> tuple[Checkpoint | None, dict[int, CellResult]]:
    """Returns the checkpoint of a sweep, which the first of several processes writes, and what is done."""
    if (processes := processes_of(captured(pg).root)) is None:
        checkpoint = Checkpoint(name, own)
        return checkpoint, _results(checkpoint)
    if not processes.are_same((os.fspath(name), own | {"numbers without patches": None})):  # last digits may differ
        raise ExperimentError(
            "checkpoint= is one folder of all processes, but they give other names, inputs, metrics or patches: give "
            "the same on all of them, or leave it out"
        )
    checkpoint = processes.on_first(lambda: Checkpoint(name, own))
    return (checkpoint if processes.is_first else None), _results(checkpoint)


def _results(checkpoint: Checkpoint) -> dict[int, CellResult]:
    return {number: CellResult(number, Measurement.from_json(data)) for number, data in checkpoint.done.items()}


def _made_and_run(runner: CellRunner, cells: Cells, number: int) -> CellResult:
    try:
        patches = cells.made(number)
    except Exception as error:
        return CellResult(number, None, f"{type(error).__name__}: {error} (raised by make_patches)")
    return runner.run_whole(number, patches)


def _runs_through(run: Callable[[], None]) -> bool:
    """Calls `run` and returns whether it finished without an interrupt."""
    try:
        run()
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
