"""Sweeps: a metric for each combination of the values of some axes, and the runner of their cells in one process.

Each cell has the numbers of `with pg.patch(make_patches(cell)): metric(pg(*inputs))`, up to rounding. Cells whose
patches declare themselves pure run together, by `SharedForwards`; others run alone, just after their patch map was
made. `make_patches` and `metric` must be pure functions. This is checked by running: one of the cells that ran together
runs again alone, and the metric is computed again for the run without patches.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from graphpatch_notebook.capture.modules import all_modules, plain_tensors
from graphpatch_notebook.errors import (
    ExperimentError,
    PatchMapError,
    SweepInterrupted,
    check_extra,
    extra,
    warn_each_time,
)
from graphpatch_notebook.experiments.engine import Checkpoint, Lost, Workers, check_executor, weights_digest
from graphpatch_notebook.experiments.engine.cells import (
    Cell,
    CellResult,
    Cells,
    Measurement,
    PatchCopies,
    PatchMap,
    axes_of,
    baseline_of,
    is_pure,
    measurement,
    own_tensors,
    patches_in,
)
from graphpatch_notebook.experiments.engine.inputs import (
    GenerationInputs,
    Inputs,
    check_graph,
    check_metric,
    check_metric_position,
    inputs_of,
    with_generation,
)
from graphpatch_notebook.experiments.engine.shared import (
    CannotShareError,
    CleanRun,
    SharedForwards,
    check_may_share,
    clean_run,
    most_rows,
    reads_no_more,
    trimmed_inputs,
)
from graphpatch_notebook.experiments.results import data_array, metric_dims, metric_name, plain_label
from graphpatch_notebook.inspection.meanings import Meanings, meanings
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.options import check_input_names
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import declares
from graphpatch_notebook.patching import Entry
from graphpatch_notebook.patching.model_state import ModelSnapshot, processes_of
from graphpatch_notebook.values import digest

if TYPE_CHECKING:
    from xarray import DataArray

_FEW, _FEW_ALONE = 4, 16
"""With fewer cells, sharing costs more than it saves; the second is for inputs so large that each needs a forward."""

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
_COARSE = 3e-2

_MOST_SHOWN = 10
_UNFIT = "they patch values without rows, or steps or positions that one forward does not have"


@dataclass(frozen=True)
class Request:
    """What is asked of the cells of a sweep, on any graph: workers receive it.

    Attributes:
        inputs: The inputs of the model.
        metric: Maps the output of the model to numbers.
        batch: `"auto"`, the number of cells in one forward, or `None` for the loop.
    """

    inputs: Inputs
    metric: Callable[[Any], Any]
    batch: int | str | None = "auto"

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Sets torch's modes for runs in the block. Tensors made in inference mode have no version counter."""
        with torch.inference_mode(False), torch.no_grad():
            yield


# -- the run without patches -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Baseline:
    """The run without patches.

    Attributes:
        clean: The run.
        state: The state of the model, before and after.
        measurement: The metric.
        change: What the run, or the metric, changed in the model or in random generators, as a message.
        rounding: By how much the metric may differ in another run, relative to its numbers and absolutely.
    """

    clean: CleanRun
    state: ModelSnapshot
    measurement: Measurement
    change: str | None
    rounding: tuple[float, float]

    @classmethod
    def of(
        cls, pg: PatchableGraph, request: Request, targets: Mapping[str, Target] | None = None, most: int = 0
    ) -> Baseline:
        """Runs the model and the metric, and restores the state of the model.

        Args:
            pg: The graph.
            request: What is asked of the cells.
            targets: The values that cells patch which are to share forwards, by path; none for the loop.
            most: The number of cells that will share a forward, at most.

        Raises:
            ExperimentError: The metric does not return numbers.
        """
        state, inputs = ModelSnapshot(captured(pg).module), request.inputs
        targets = targets or {}
        rounding = 0.0, 0.0

        def is_same(one: Any, other: Any) -> bool:
            return measurement(one).is_close(measurement(other), *rounding)

        try:
            with request.modes():
                # Without outputs that the metric does not read, if cells are to share forwards.
                for given in trimmed_inputs(captured(pg).root, inputs, targets.values()) if targets else [inputs]:
                    clean = clean_run(pg, given, targets, most)
                    rounding = _rounding_of(pg, clean.output)
                    if given.kwargs == inputs.kwargs or reads_no_more(request.metric, clean, is_same):
                        break
                output, clean = clean.output, replace(clean, output=own_tensors(clean.output))
                found = baseline_of(request.metric, output)  # which may write into it
        finally:
            owners = state.random.changed()
            # Other threads draw from Python's generator, as those of Dask. If the model does, a cell shows it.
            drawn = ["the model draws random numbers"] if {*owners} - {"Python"} else []
            change = next(itertools.chain(drawn, map(str, state.changes())), None)
            if change is not None or owners:
                state.restore()
        return cls(clean, state, found, change, rounding)

    def is_close(self, one: Measurement | None, other: Measurement | None) -> bool:
        """Whether the metrics of two runs, of which both may have failed, differ by rounding alone."""
        return one is other or (one is not None and one.is_close(other, *self.rounding))

    def most_changed(self, results: Sequence[CellResult]) -> int:
        """Returns the number of the cell, among some, that changes the metric most."""
        base, own = self.measurement, [result.measurement for result in results]
        values = [each.values if each is not None and each.form == base.form else base.values for each in own]
        with np.errstate(invalid="ignore"):
            changes = np.nan_to_num(np.abs(np.stack(values) - base.values))
        return int(changes.reshape(len(results), -1).max(1, initial=0).argmax())


def _rounding_of(pg: PatchableGraph, output: Any) -> tuple[float, float]:
    """Returns by how much a metric of an output may differ in another run, relative to its numbers and absolutely."""
    found = [each for each in plain_tensors((output,)) if each.layout is torch.strided and not each.is_nested]
    tensors = [each for each in found if each.is_floating_point()]
    weights = [each for one in all_modules(captured(pg).module) for each in one._parameters.values()]
    kinds = {each.dtype for each in (*tensors, *weights) if each is not None and each.is_floating_point()}
    relative = max((_ROUNDING.get(kind, _COARSE) for kind in kinds), default=1e-9)
    largest = [each.detach().abs().max().item() for each in tensors if each.numel()]
    return relative, relative * max(filter(math.isfinite, largest), default=0.0)


# -- the runs of cells -------------------------------------------------------------------------------------------------


class CellRunner:
    """Runs cells. It makes patch maps at first, up to one that is not pure, and runs the model without patches.

    Args:
        pg: The graph.
        request: What is asked of the cells.
        cells: The cells. Their patch maps are made as they are read, perhaps twice.

    Attributes:
        baseline: The run without patches.
        remarks: Messages for the user about how the cells ran.

    Raises:
        UnknownPathError, PatchMapError: Patch maps are invalid; one error lists all problems.
        ExperimentError: The metric does not return numbers.
    """

    def __init__(self, pg: PatchableGraph, request: Request, cells: Sequence[Cell]) -> None:
        self.remarks: list[str] = []
        self._pg, self._request, self._cells = pg, request, cells
        self._copies = PatchCopies()
        self._shared: list[Cell] = []
        self._entries: list[list[Entry]] = []
        self._has_run = False
        self._why: str | None = None  # why cells run as in a plain loop
        self._targets: dict[str, Target] = {}
        most = 0
        try:
            if request.batch is None or isinstance(request.inputs, GenerationInputs):
                raise CannotShareError
            self._add(itertools.takewhile(lambda cell: is_pure(cell.patches), cells))
            most = min(most_rows(request.inputs, request.batch), len(cells))
            if len(cells) < (_FEW if most > 1 else _FEW_ALONE):
                raise CannotShareError
            check_may_share(pg)
            self._targets = {entry.target.path: entry.target for own in self._entries for entry in own}
        except CannotShareError as reason:
            self._why = str(reason)
        self.baseline = Baseline.of(pg, request, self._targets, most)

    def run(self) -> Iterator[list[CellResult]]:
        """Yields the results of cells, of some perhaps twice: if a check fails, all run again as in a plain loop."""
        if self._why is None and self.baseline.change is not None:
            repair = "; call pg.eval() first" if self._pg.training else ""
            self._why = f"{self.baseline.change}, or the metric does{repair}"
        if self._why is not None:
            yield from self._loop(self._cells, self._why)
            return
        for number in range(len(self._shared), len(self._cells)):
            cell = self._cells[number]
            if is_pure(cell.patches):
                self._add([cell])
            else:
                yield [self._alone(cell)]
        try:
            yield from self._share()
        except CannotShareError as reason:
            yield from self._loop(self._shared, str(reason))
        except _DifferentError as error:
            warn_each_time(f"the sweep runs again as a loop (batch=None does so at once): {error}", "experiment")
            yield from self._loop(self._cells, str(error))

    def _add(self, cells: Iterable[Cell]) -> None:
        """Adds pure cells, with copies of their patch maps."""
        made = with_entries(self._pg, cells, self._copies)
        self._shared += made
        self._entries += [cell.entries or [] for cell in made]

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    # -- alone -----------------------------------------------------------------------------------------------------

    def _loop(self, cells: Iterable[Cell], why: str) -> Iterator[list[CellResult]]:
        if why:
            self._remark(f"cells ran one by one: {why}")
        if self.baseline.clean.inputs.kwargs != self._request.inputs.kwargs:
            self.baseline = Baseline.of(self._pg, self._request)  # of all outputs, as the cells
        for cell in cells:
            yield [self._alone(cell)]

    def _alone(self, cell: Cell, *, is_check: bool = False) -> CellResult:
        """Runs a cell as in a plain loop. A cell that fails does not affect the others."""
        request = self._request
        context = self._pg.patch(cell.patches)
        context.is_quiet = is_check
        with request.modes():
            try:
                with context:
                    value = request.metric(request.inputs.run(self._pg))
                return CellResult(cell.number, measurement(value))
            except Exception as error:
                if isinstance(error, PatchMapError) and not self._has_run:
                    raise
                return CellResult(cell.number, None, f"{type(error).__name__}: {error}")
            finally:
                self._has_run = True

    # -- together --------------------------------------------------------------------------------------------------

    def _share(self) -> Iterator[list[CellResult]]:
        """Yields the results of pure cells.

        Raises:
            CannotShareError: They cannot share forwards. None has run.
            _DifferentError: One has another number when it runs again.
        """
        cells, entries, batch = self._shared, self._entries, self._request.batch
        if len(cells) < _FEW or not self._targets or batch is None:
            raise CannotShareError
        state = self.baseline.state
        try:
            forwards = SharedForwards(self._pg, self.baseline.clean, self._targets, batch)
            first, found = self._first(forwards)
            yield found
            rest = [number for number in range(len(cells)) if number not in {*first}]
            fitting = [number for number in rest if forwards.fits(entries[number])]
            groups = forwards.groups([entries[number] for number in fitting])[::-1]  # those patched last come first
            if not fitting and not first:  # nothing would tell that the metric reads an output that was skipped
                raise CannotShareError(_UNFIT)
            if not groups:
                self._check(first, found)
            for count, group in enumerate(groups):
                numbers = [fitting[each] for each in group]
                found = self._together(forwards, numbers)
                if count == 0:
                    self._check(numbers, found)
                yield found
            if others := [cells[number] for number in rest if number not in {*fitting}]:
                self._remark(f"{len(others):,} of {len(cells):,} cells ran one by one: {_UNFIT}")
                yield from ([self._alone(cell)] for cell in others)
            # Not every function that is not pure shows in one cell.
            with self._request.modes():
                again = self._measured(own_tensors(self.baseline.clean.output))
            if not self.baseline.is_close(self.baseline.measurement, again):
                raise _DifferentError("the metric is not a pure function: it is another number for the same output")
        finally:
            if next(state.changes(), None) is not None:
                state.restore()

    def _first(self, forwards: SharedForwards) -> tuple[list[int], list[CellResult]]:
        """Runs the first forward; without cells, if it fails with some: for one of them, or for lack of memory."""
        why = ""
        for first in (forwards.first(self._entries), []):
            try:
                return first, self._results(forwards, first)
            except CannotShareError:
                raise
            except Exception as error:
                why = f"on several rows it raises {type(error).__name__}: {error}"
        raise CannotShareError(why)

    def _together(self, forwards: SharedForwards, numbers: Sequence[int]) -> list[CellResult]:
        """Runs cells, given by their numbers, in one forward."""
        half = len(numbers) // 2
        try:
            return self._results(forwards, numbers)
        except Exception as error:  # for lack of memory, or one cell alone is the cause
            self._remark(f"some cells ran one by one: together they raised {type(error).__name__}")
        if not half:
            return [self._alone(self._shared[number]) for number in numbers]
        return [*self._together(forwards, numbers[:half]), *self._together(forwards, numbers[half:])]

    def _results(self, forwards: SharedForwards, numbers: Sequence[int]) -> list[CellResult]:
        """Runs the model, and the metric for the rows of each cell."""
        cells, found = [self._shared[number] for number in numbers], []
        with self._request.modes(), forwards.run([self._entries[number] for number in numbers]) as (outputs, more):
            for at, (cell, output) in enumerate(zip(cells, outputs, strict=True)):
                own = self._measured(output)
                is_enough = more is None or self.baseline.is_close(own, self._measured(more[at]))
                found.append(CellResult(cell.number, own if is_enough else None))
        return [
            self._alone(cell) if each.measurement is None else each for each, cell in zip(found, cells, strict=True)
        ]

    def _measured(self, output: Any) -> Measurement | None:
        """Returns the metric; `None` if it fails, as it may read an output that was skipped."""
        try:
            return measurement(self._request.metric(output))
        except Exception:
            return None

    def _check(self, numbers: Sequence[int], found: Sequence[CellResult]) -> None:
        """Runs the cell again that changes the metric most.

        Raises:
            _DifferentError: Its metric is another one now.
        """
        number = self.baseline.most_changed(found)
        cell = self._shared[numbers[number]]
        before, after = found[number].measurement, self._alone(cell, is_check=True).measurement
        if not self.baseline.is_close(before, after):
            shown = [each if each is None else each.values.tolist() for each in (before, after)]
            raise _DifferentError(
                f"cell {cell} has the metric {shown[0]} among others, and {shown[1]} when it runs again alone: "
                "the metric is not a pure function, or the rows of a batch depend on each other"
            )


class _DifferentError(Exception):
    """A cell has another number when it runs again (caught inside the package)."""


# -- patch maps --------------------------------------------------------------------------------------------------------


def with_entries(pg: PatchableGraph, cells: Iterable[Cell], copies: PatchCopies) -> list[Cell]:
    """Returns cells with copies of their patch maps, and the entries of these.

    Raises:
        UnknownPathError, PatchMapError: Patch maps are invalid; one error lists all problems.
    """
    found: list[Cell] = []
    failing: dict[str, list[Cell]] = {}
    for cell in cells:
        try:
            if cell.entries is None:
                copied = copies.of(cell)
                found.append(replace(copied, entries=captured(pg).entries_of(copied.patches)))
            else:
                found.append(cell)
        except PatchMapError as error:  # one error tells of all cells
            kind = type(error)
            failing.setdefault(str(error), []).append(cell)
    if failing:
        lines = [
            f"{own[0]}{f' and {len(own) - 1:,} more cells' * (len(own) > 1)}: {why}" for why, own in failing.items()
        ]
        more = [f"... and {len(lines) - _MOST_SHOWN:,} more problems"] * (len(lines) > _MOST_SHOWN)
        raise kind("\n".join([*lines[:_MOST_SHOWN], *more]))
    return found


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
    inputs = _checked_inputs(pg, inputs, metric)
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

    def run() -> None:
        if executor is None:
            for results in runner.run():
                ledger.baseline = runner.baseline.measurement
                ledger.keep(results)
        elif made:
            workers = Workers(executor, recipe, pg, functools.partial(_CellTask.of, request, baseline), names)
            _run_elsewhere(workers, list(_chunks(made, request)), ledger)

    with _progress_bar(len(cells), len(ledger.results)) if progress else nullcontext() as ledger.progress:
        is_whole = _runs_through(run)
    told, count = dict.fromkeys([*ledger.remarks, *runner.remarks]), len(ledger.results)
    if not is_whole:
        told[f"interrupted: {len(cells) - count} of {len(cells)} cells did not run and are NaN"] = None
    result = data_array(values, cells.unmade, ledger.results, ledger.baseline, metric, list(told), inputs.attrs(pg))
    if not is_whole:
        raise SweepInterrupted(_stopped(count, len(cells), checkpoint), result)
    return result


def _checked_inputs(pg: PatchableGraph, inputs: Inputs, metric: Any) -> Inputs:
    """Checks the graph, the metric and the inputs of a sweep, and returns the inputs as the metric asks for them."""
    check_graph(pg)
    check_metric(metric)
    check_input_names(pg.nodes.root, inputs.kwargs, PatchableGraph.sweep)
    found = with_generation(pg, inputs_of(pg, inputs.args, inputs.kwargs), metric)
    check_metric_position(pg, found, metric)
    check_extra("xarray", "the result of a sweep")
    return found


def _progress_bar(total: int, done: int) -> Any:
    """Returns a progress bar: a widget in a notebook, a line on stderr elsewhere."""
    tqdm = extra("tqdm.auto", "the progress of a sweep", ", or say progress=False").tqdm
    return tqdm(total=total, initial=done, desc="sweep", unit="cell")


@dataclass
class _Ledger:
    """The results of a sweep so far.

    Attributes:
        baseline: The measurement without patches; all others must have its shape and names.
        checkpoint: Where results are written, if anywhere.
        results: The results, by the number of the cell.
        remarks: What executors remarked.
        progress: A progress bar, if there is one.
    """

    baseline: Measurement
    checkpoint: Checkpoint | None = None
    results: dict[int, CellResult] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
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


def _run_elsewhere(workers: Workers, chunks: Sequence[list[Cell]], ledger: _Ledger) -> None:
    """Runs chunks of cells by an executor. The cells of a lost chunk run one by one: one may be the cause."""
    lost: list[list[Cell]] = []

    def take(number: int, found: Any) -> None:
        if not isinstance(found, Lost):
            ledger.keep(found[0])
            ledger.remarks += found[1]
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
        _run_elsewhere(workers, lost, ledger)


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
