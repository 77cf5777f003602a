"""Runs the cells of a sweep on one `PatchableGraph`, in one process.

Each cell has the numbers of `with pg.patch(make_patches(cell)): metric(pg(*inputs))`, up to rounding. Cells whose
patches declare themselves pure run together, by a `SharedPlan`; others run alone, just after their patch map was made.
`make_patches` and `metric` must be pure functions. This is checked by running: one of the cells that ran together runs
again alone, and the first cell runs again at the end.
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
from torch import Tensor

from graphpatch_notebook.capture.held_values import all_modules, plain_tensors
from graphpatch_notebook.errors import ExperimentError, PatchMapError, UnknownPathError
from graphpatch_notebook.experiments.engine.cells import (
    Cell,
    CellResult,
    Measurement,
    PatchCopies,
    baseline_of,
    is_pure,
    measurement,
    patches_in,
)
from graphpatch_notebook.experiments.engine.changed_positions import least_vectors
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.plan import (
    CleanRun,
    SharedPlan,
    check_may_share,
    most_rows,
    reads_no_more,
    trimmed_inputs,
)
from graphpatch_notebook.experiments.engine.rows import CannotShareError
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import declares
from graphpatch_notebook.patching import Entry, FrameNode, own_tensors
from graphpatch_notebook.patching.model_state import ModelSnapshot
from graphpatch_notebook.warning_places import warn_each_time

_FEW, _FEW_ALONE = 4, 16
"""With fewer cells, sharing costs more than it saves; the second is for inputs so large that each needs a forward."""

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
_COARSE = 3e-2

_MOST_SHOWN = 10


@dataclass(frozen=True)
class Request:
    """What is asked of the cells of a sweep, on any graph: workers receive it.

    Attributes:
        inputs: The inputs of the model.
        metric: Maps the output of the model to numbers.
        batch: `"auto"`, the number of cells in one forward, or `None` for the loop.
        backward: Whether gradients of the metric are accumulated.
    """

    inputs: Inputs
    metric: Callable[[Any], Any]
    batch: int | str | None = "auto"
    backward: bool = False

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Sets torch's modes for runs in the block. Tensors made in inference mode have no version counter."""
        with torch.inference_mode(False), torch.set_grad_enabled(self.backward):
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
    def of(cls, pg: PatchableGraph, request: Request, targets: Mapping[str, Target]) -> Baseline:
        """Runs the model and the metric, and restores the state of the model.

        Args:
            pg: The graph.
            request: What is asked of the cells.
            targets: The values that cells patch which are to share forwards, by path; none for the loop.

        Raises:
            ExperimentError: The metric does not return numbers.
        """
        state = ModelSnapshot(captured(pg).module)
        try:
            with request.modes():
                clean, rounding = _clean_run(pg, request, targets)
                output, clean = clean.output, replace(clean, output=own_tensors(clean.output))
                found = baseline_of(request.metric, output)  # which may write into it
        finally:
            drawn = ["the model draws random numbers"] if state.random.changed() else []
            change = next(itertools.chain(drawn, map(str, state.changes())), None)
            if change is not None:
                state.restore()
        if request.backward and found.values.size != 1:
            raise ExperimentError("backward=True needs a metric that gives one number, as a tensor")
        return cls(clean, state, found, change, rounding)

    def is_close(self, one: Measurement | None, other: Measurement | None) -> bool:
        """Whether the metrics of two runs differ by rounding alone."""
        return one is other or (one is not None and other is not None and _is_close(one, other, self.rounding))

    def effect(self, result: CellResult) -> float:
        """Returns by how much a cell changes the metric."""
        own, base = result.measurement, self.measurement
        if own is None or own.form != base.form:
            return 0.0
        with np.errstate(invalid="ignore"):
            change = float(np.abs(own.values - base.values).max(initial=0.0))
        return 0.0 if math.isnan(change) else change


def _clean_run(
    pg: PatchableGraph, request: Request, targets: Mapping[str, Target]
) -> tuple[CleanRun, tuple[float, float]]:
    """Runs the model: without outputs that the metric does not read, if cells are to share forwards."""
    inputs = request.inputs
    most = 0 if torch.is_grad_enabled() or not targets else most_rows(inputs, request.batch or 1)

    def is_kept(node: FrameNode, value: Tensor) -> bool:
        return most > 0 and least_vectors(node.module, value) <= most * (value.numel() // max(1, *value.shape[-1:]))

    def is_same(one: Any, other: Any) -> bool:
        return _is_close(measurement(one), measurement(other), rounding)

    for given in trimmed_inputs(captured(pg).root, inputs, targets.values()) if targets else [inputs]:
        clean = CleanRun.of(pg, given, targets, is_kept)
        rounding = _rounding_of(pg, clean.output)
        if given.kwargs == inputs.kwargs or reads_no_more(request.metric, clean, is_same):
            break
    return clean, rounding


def _rounding_of(pg: PatchableGraph, output: Any) -> tuple[float, float]:
    """Returns by how much a metric of an output may differ in another run, relative to its numbers and absolutely."""
    tensors = [
        each.detach()
        for each in plain_tensors((output,))
        if each.layout is torch.strided and each.is_floating_point() and each.numel()
    ]
    weights = [
        each for one in all_modules(captured(pg).module) for each in one._parameters.values() if each is not None
    ]
    kinds = {each.dtype for each in (*tensors, *weights) if each.is_floating_point()}
    relative = max((_ROUNDING.get(kind, _COARSE) for kind in kinds), default=1e-9)
    largest = [number for each in tensors if math.isfinite(number := each.abs().max().item())]
    return relative, relative * max(largest, default=0.0)


def _is_close(one: Measurement, other: Measurement, rounding: tuple[float, float]) -> bool:
    relative, absolute = rounding
    is_like = one.form == other.form
    return is_like and bool(np.allclose(one.values, other.values, rtol=relative, atol=absolute, equal_nan=True))


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
        self._copies = PatchCopies(keeps_gradients=request.backward)
        self._shared: list[Cell] = []
        self._entries: list[list[Entry]] = []
        self._has_run = False
        self._why: str | None = None  # why cells run as in a plain loop
        targets: dict[str, Target] = {}
        try:
            if request.batch is None:
                raise CannotShareError
            self._add(itertools.takewhile(lambda cell: is_pure(cell.patches), cells))
            if len(cells) < (_FEW if most_rows(request.inputs, request.batch) > 1 else _FEW_ALONE):
                raise CannotShareError
            check_may_share(pg)
            targets = {entry.target.path: entry.target for own in self._entries for entry in own}
        except CannotShareError as reason:
            self._why = str(reason)
        self._targets = targets
        self.baseline = Baseline.of(pg, request, targets)

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
        gradients = _Gradients.of(self._pg, self._request, self._shared)
        cells, why = self._cells, None
        try:
            yield from self._share()
        except _DifferentError as error:
            why = str(error)
            self.baseline = Baseline.of(self._pg, self._request, {})  # of all outputs
        except CannotShareError as reason:
            cells, why = self._shared, str(reason)
        finally:
            if next(self.baseline.state.changes(), None) is not None:
                self.baseline.state.restore()
        if why is not None:
            gradients.restore()
            yield from self._loop(cells, why)

    def _add(self, cells: Iterable[Cell]) -> None:
        """Adds pure cells, with copies of their patch maps."""
        copied = [self._copies.of(cell) for cell in cells]
        self._shared += copied
        self._entries += entries_of(self._pg, copied)

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)

    # -- alone -----------------------------------------------------------------------------------------------------

    def _loop(self, cells: Iterable[Cell], why: str) -> Iterator[list[CellResult]]:
        if why:
            self._remark(f"cells ran one by one: {why}")
        for cell in cells:
            yield [self._alone(cell)]

    def _alone(self, cell: Cell, *, is_check: bool = False) -> CellResult:
        """Runs a cell as in a plain loop. A cell that fails does not affect the others."""
        request = self._request
        context = self._pg.patch(cell.patches)
        with request.modes():
            try:
                with context.quiet() if is_check else context:
                    value = request.metric(request.inputs.run(self._pg))
                    if request.backward and not is_check:
                        _backward([value])
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
            yield from ([self._alone(cell)] for cell in cells)
            return
        with self._request.modes():
            is_by_entry = all(declares(patch, "by_entry") for cell in cells for patch in patches_in(cell.patches))
            plan = SharedPlan(self._pg, self.baseline.clean, self._targets, batch, len(cells), is_by_entry=is_by_entry)
        # Rows that are only for checks must not have gradients, which may be infinite.
        first = [] if self._request.backward else plan.first(entries)
        try:
            found = self._results(plan, first)
        except CannotShareError:
            raise
        except Exception:  # of a cell perhaps, or for lack of memory
            first, found = [], []
            try:
                self._results(plan, [])
            except CannotShareError:
                raise
            except Exception as error:
                raise CannotShareError(f"on several rows it raises {type(error).__name__}: {error}") from None
        yield found
        rest = [number for number in range(len(cells)) if number not in {*first}]
        fitting = [number for number in rest if plan.fits(entries[number])]
        groups = [[fitting[each] for each in group] for group in plan.groups([entries[number] for number in fitting])]
        others = [number for number in rest if number not in {*fitting}]
        if not groups and found:
            self._check(first, found)
        for count, group in enumerate(groups):
            found = self._together(plan, group)
            if count == 0:
                self._check(group, found)
            yield found
        if others:
            self._remark(f"{len(others):,} of {len(cells):,} cells ran one by one: they patch values without rows")
            yield from ([self._alone(cells[number])] for number in others)
        if not self.baseline.is_close(self.baseline.measurement, self._measured_again()):
            raise self._different(
                "the metric gives another number for the same output than before: it is not a pure function"
            )

    def _together(self, plan: SharedPlan, numbers: Sequence[int]) -> list[CellResult]:
        """Runs cells, given by their numbers, in one forward."""
        try:
            return self._results(plan, numbers)
        except torch.OutOfMemoryError:
            half = len(numbers) // 2
            if half:
                return [*self._together(plan, numbers[:half]), *self._together(plan, numbers[half:])]
        except Exception as error:  # one cell alone may be the cause
            self._remark(f"some cells ran one by one: together they raised {type(error).__name__}")
        return [self._alone(self._shared[number]) for number in numbers]

    def _results(self, plan: SharedPlan, numbers: Sequence[int]) -> list[CellResult]:
        """Runs the model, and the metric for the rows of each cell."""
        cells = [self._shared[number] for number in numbers]
        with self._request.modes(), plan.run([self._entries[number] for number in numbers]) as outputs:
            found = [self._measured(cell, output) for cell, output in zip(cells, outputs, strict=True)]
            if values := [value for _, value in filter(None, found)] if self._request.backward else []:
                _backward(values)
        return [each[0] if each else self._alone(cell) for each, cell in zip(found, cells, strict=True)]

    def _measured(self, cell: Cell, output: Any) -> tuple[CellResult, Any] | None:
        """Returns the result for the output of a cell, and what the metric returned; `None` if it failed."""
        try:
            value = self._request.metric(output)
            return CellResult(cell.number, measurement(value)), value
        except Exception:  # it may read an output that was skipped
            return None

    def _measured_again(self) -> Measurement | None:
        """Returns the metric of the run without patches; `None` if it fails now."""
        try:
            with self._request.modes():
                return measurement(self._request.metric(own_tensors(self.baseline.clean.output)))
        except Exception:
            return None

    def _check(self, numbers: Sequence[int], found: Sequence[CellResult]) -> None:
        """Runs the cell again that changes the metric most.

        Raises:
            _DifferentError: Its metric is another one now.
        """
        number = max(range(len(numbers)), key=lambda each: self.baseline.effect(found[each]))
        cell = self._shared[numbers[number]]
        before, after = found[number].measurement, self._alone(cell, is_check=True).measurement
        if not self.baseline.is_close(before, after):
            shown = [each if each is None else each.values.tolist() for each in (before, after)]
            raise self._different(
                f"cell {cell} has the metric {shown[0]} among others, and {shown[1]} when it runs again alone: "
                "the metric is not a pure function, or the rows of a batch depend on each other"
            )

    def _different(self, why: str) -> _DifferentError:
        warn_each_time(f"the sweep runs again as a loop (batch=None does so at once): {why}", "experiment")
        return _DifferentError(why)


class _DifferentError(Exception):
    """A cell has another number when it runs again (caught inside the package)."""


@dataclass(frozen=True)
class _Gradients:
    """The gradients before a sweep that accumulates more."""

    saved: Sequence[tuple[Tensor, Tensor | None]]

    @classmethod
    def of(cls, pg: PatchableGraph, request: Request, cells: Sequence[Cell]) -> _Gradients:
        """Returns those of the model, of the inputs and of values in patches; none without `backward`."""
        if not request.backward:
            return cls([])
        held = [value for cell in cells for patch in patches_in(cell.patches) for value in vars(patch).values()]
        tensors = (*pg.parameters(), *plain_tensors((held, request.inputs.args)))
        leaves = {id(tensor): tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf}
        return cls([(leaf, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves.values()])

    def restore(self) -> None:
        """Puts them back."""
        for tensor, gradient in self.saved:
            tensor.grad = gradient


def _backward(values: Sequence[Any]) -> None:
    if not all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
        raise ExperimentError("backward=True needs a metric that gives one number, as a tensor")
    total = torch.stack([value.reshape(()) for value in values]).sum()
    if total.requires_grad:
        total.backward()


# -- patch maps --------------------------------------------------------------------------------------------------------


def made_before(pg: PatchableGraph, cells: Iterable[Cell]) -> list[Cell]:
    """Returns cells with their patch maps, which are all made and checked before any cell runs.

    Raises:
        UnknownPathError, PatchMapError: Patch maps are invalid; one error lists all problems.
    """
    copies = PatchCopies()
    made = [copies.of(cell) for cell in cells]
    entries_of(pg, made)
    return made


def entries_of(pg: PatchableGraph, cells: Sequence[Cell]) -> list[list[Entry]]:
    """Returns the entries of each cell; raises one error that lists all problems of patch maps."""
    found: list[list[Entry]] = []
    failing: dict[str, list[Cell]] = {}
    kinds: set[type[PatchMapError]] = set()
    for cell in cells:
        try:
            found.append(captured(pg).entries_of(cell.patches))
        except PatchMapError as error:  # one error tells of all cells
            failing.setdefault(str(error), []).append(cell)
            kinds.add(UnknownPathError if isinstance(error, UnknownPathError) else PatchMapError)
    if failing:
        lines = [
            f"{own[0]}{f' and {len(own) - 1:,} more cells' * (len(own) > 1)}: {text}" for text, own in failing.items()
        ]
        more = [f"... and {len(lines) - _MOST_SHOWN:,} more problems"] * (len(lines) > _MOST_SHOWN)
        raise min(kinds, key=lambda kind: kind is PatchMapError)("\n".join([*lines[:_MOST_SHOWN], *more]))
    return found
