"""Sweeps: a metric for each combination of the values of some axes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpatch_notebook.errors import ExperimentError, SweepInterrupted
from graphpatch_notebook.experiments.engine import Checkpoint, Lost, Workers, check_executor, weights_digest
from graphpatch_notebook.experiments.engine.cells import (
    Cell,
    CellResult,
    Cells,
    Measurement,
    PatchCopies,
    PatchMap,
    axes_of,
    is_pure,
    patches_in,
)
from graphpatch_notebook.experiments.engine.inputs import (
    Inputs,
    check_graph,
    check_metric,
    check_metric_position,
    inputs_of,
    with_generation,
)
from graphpatch_notebook.experiments.engine.runner import Baseline, CellRunner, Request, with_entries
from graphpatch_notebook.experiments.results import data_array, metric_dims, metric_name, plain_label
from graphpatch_notebook.inspection.meanings import Meanings, meanings
from graphpatch_notebook.lazy_names import check_extra, extra
from graphpatch_notebook.options import check_input_names
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import declares
from graphpatch_notebook.patching.model_state import processes_of
from graphpatch_notebook.values import digest

if TYPE_CHECKING:
    from xarray import DataArray

_CHUNK = 32
"""How many cells that share forwards are one task of an executor."""
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
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_key: str = "",
    executor: Any = None,
    recipe: Any = None,
) -> DataArray:
    """Returns the metric for each combination of the values of `axes`: see `PatchableGraph.sweep`."""
    check_graph(pg)
    check_metric(metric)
    check_input_names(pg.nodes.root, inputs.kwargs, PatchableGraph.sweep)
    inputs = with_generation(pg, inputs_of(pg, inputs.args, inputs.kwargs), metric)
    check_metric_position(pg, inputs, metric)
    check_extra("xarray", "the result of a sweep")
    _check_options(batch, checkpoint_key)
    if executor is not None:
        check_executor(executor, recipe, pg)
    values = axes_of(axes)
    cells = Cells(values, make_patches)
    request = Request(inputs, metric, None if batch == 1 else batch)
    names: Meanings = {}
    made: Sequence[Cell] = cells  # each is made just before it runs, unless all must be known before
    if checkpoint is not None or executor is not None:
        made = with_entries(pg, cells, PatchCopies())
        names = meanings(pg.nodes, [entry.target for cell in made for entry in cell.entries or ()])
    runner = CellRunner(pg, request, made if executor is None else [])
    baseline = runner.baseline.measurement
    metric_dims(baseline, values)  # checks the names of axes before anything runs
    ledger = _Ledger(baseline)
    if checkpoint is not None:
        own = _identity(values, checkpoint_key, metric, baseline, inputs, pg, made) | {"names": names}
        ledger = _Ledger(baseline, *_opened(checkpoint, own, pg))
    if ledger.results:
        made = [cell for cell in made if cell.number not in ledger.results]
        runner = CellRunner(pg, request, made if executor is None else [])
    remarks: dict[str, None] = {}

    def run() -> None:
        if executor is None:
            for results in runner.run():
                ledger.baseline = runner.baseline.measurement
                ledger.keep(results)
        elif made:
            workers = Workers(executor, recipe, pg, functools.partial(_CellTask.of, request, baseline), names)
            _run_elsewhere(workers, list(_chunks(made, request)), ledger, remarks)

    shown: Any = nullcontext()
    if progress:  # a widget in a notebook, a line on stderr elsewhere
        tqdm = extra("tqdm.auto", "the progress of a sweep", ", or say progress=False").tqdm
        shown = tqdm(total=len(cells), initial=len(ledger.results), desc="sweep", unit="cell")
    with shown as ledger.progress:
        is_whole = _runs_through(run)
    told = [*remarks, *runner.remarks]
    if not is_whole:
        told.append(f"interrupted: {len(cells) - len(ledger.results)} of {len(cells)} cells did not run and are NaN")
    told, attrs = list(dict.fromkeys(told)), inputs.attrs(pg)
    result = data_array(values, cells.unmade, ledger.results, ledger.baseline, metric, told, attrs)
    if not is_whole:
        raise SweepInterrupted(_stopped(len(ledger.results), len(cells), checkpoint), result)
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


@dataclass(frozen=True)
class _CellTask:
    """Runs cells in a worker: given by number and patch map. Returns their results, and remarks."""

    pg: PatchableGraph
    request: Request

    @classmethod
    def of(cls, request: Request, baseline: Measurement, pg: PatchableGraph) -> _CellTask:
        """Returns it for a graph, whose metric without patches must be `baseline`, up to other kernels and devices."""
        found = Baseline.of(pg, request)
        mine, size = found.measurement.values, np.abs(baseline.values).max(initial=1e-6)
        is_low = any(parameter.dtype.itemsize < 4 for parameter in pg.parameters())
        tolerance = _OTHER_DEVICE_LOW if is_low else _OTHER_DEVICE
        if found.change is not None:
            raise ExperimentError(f"with executor=, runs must not change the model, nor draw numbers: {found.change}")
        if mine.shape != baseline.values.shape or not np.allclose(
            mine, baseline.values, tolerance, tolerance * size, equal_nan=True
        ):
            raise ExperimentError(
                f"without patches, the metric is {mine} in a worker and {baseline.values} here: is it the same model?"
            )
        return cls(pg, request)

    def __call__(self, cells: Sequence[tuple[int, PatchMap]]) -> tuple[list[CellResult], list[str]]:
        runner = CellRunner(self.pg, self.request, [Cell(number, {"cell": number}, each) for number, each in cells])
        return [result for results in runner.run() for result in results], runner.remarks


def _chunks(cells: Sequence[Cell], request: Request) -> Iterator[list[Cell]]:
    """Yields the cells of each task of an executor."""
    size = request.batch if isinstance(request.batch, int) else 1 if request.batch is None else _CHUNK
    shared = [cell for cell in cells if is_pure(cell.patches)]
    yield from (shared[start : start + size] for start in range(0, len(shared), size))
    yield from ([cell] for cell in cells if not is_pure(cell.patches))


def _run_elsewhere(workers: Workers, chunks: Sequence[list[Cell]], ledger: _Ledger, remarks: dict[str, None]) -> None:
    """Runs chunks of cells by an executor. The cells of a lost chunk run one by one: one may be the cause."""
    lost: list[list[Cell]] = []

    def take(number: int, found: Any) -> None:
        if not isinstance(found, Lost):
            ledger.keep(found[0])
            remarks.update(dict.fromkeys(found[1]))
        elif len(chunks[number]) > 1:
            lost.extend([cell] for cell in chunks[number])
        else:
            ledger.keep([CellResult(cell.number, None, found.reason) for cell in chunks[number]])

    results = workers.results(([(cell.number, cell.patches) for cell in chunk] for chunk in chunks), _AHEAD)
    try:
        for each in results:
            take(*each)
    except KeyboardInterrupt as interrupt:
        with suppress(KeyboardInterrupt):
            take(*results.throw(interrupt))
            for each in results:
                take(*each)
        raise
    if lost:
        _run_elsewhere(workers, lost, ledger, remarks)


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
        checkpoint = Checkpoint(name, own, Measurement.from_json)
        return checkpoint, _results(checkpoint)
    if not processes.are_same((os.fspath(name), own | {"numbers without patches": None})):  # last digits may differ
        raise ExperimentError(
            "checkpoint= is one folder of all processes, but they give other names, inputs, metrics or patches: give "
            "the same on all of them, or leave it out"
        )
    checkpoint = processes.on_first(lambda: Checkpoint(name, own, Measurement.from_json))
    return (checkpoint if processes.is_first else None), _results(checkpoint)


def _results(checkpoint: Checkpoint) -> dict[int, CellResult]:
    return {number: CellResult(number, found) for number, found in checkpoint.done.items()}


def _runs_through(run: Callable[[], None]) -> bool:
    """Calls `run` and returns whether it finished without an interrupt."""
    try:
        run()
    except KeyboardInterrupt:
        return False
    return True


def _check_options(batch: Any, checkpoint_key: Any) -> None:
    if batch is not None and batch != "auto" and (type(batch) is not int or batch < 1):
        raise ExperimentError(f'batch must be "auto", a number of cells, or None, not {batch!r}')
    if not isinstance(checkpoint_key, str):
        raise ExperimentError(f"checkpoint_key must be a text, not {checkpoint_key!r}")


def _stopped(done: int, total: int, checkpoint: str | os.PathLike[str] | None) -> str:
    again = f"; the same call continues from {os.fspath(checkpoint)!r}" if checkpoint is not None else ""
    return (
        f"stopped after {done} of {total} cells; the result is in .result of this exception (at a prompt: "
        f"import sys; sys.last_value.result){again}"
    )
