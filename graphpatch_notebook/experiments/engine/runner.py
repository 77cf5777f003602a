"""Runs the cells of a sweep on one `PatchableGraph`, in one process.

Each cell has the numbers of `with pg.patch(make_patches(cell)): metric(pg(*inputs))`, up to rounding. Cells whose
patches declare themselves pure run together, by `SharedForwards`; others run alone, just after their patch map was
made. `make_patches` and `metric` must be pure functions. This is checked by running: one of the cells that ran together
runs again alone, and the metric is computed again for the run without patches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from graphpatch_notebook.capture.modules import all_modules, plain_tensors
from graphpatch_notebook.errors import PatchMapError, warn_each_time
from graphpatch_notebook.experiments.engine.cells import (
    Cell,
    CellResult,
    Measurement,
    PatchCopies,
    baseline_of,
    is_pure,
    measurement,
    own_tensors,
)
from graphpatch_notebook.experiments.engine.inputs import GenerationInputs, Inputs
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
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patching import Entry
from graphpatch_notebook.patching.model_state import ModelSnapshot

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
