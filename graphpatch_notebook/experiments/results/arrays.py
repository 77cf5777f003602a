"""Results as labeled arrays: the `xarray.DataArray` that a sweep returns."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.experiments.engine.cells import Cell, CellResult
from graphpatch_notebook.experiments.engine.measurements import Measurement
from graphpatch_notebook.warning_places import warn_each_time

if TYPE_CHECKING:
    from xarray import Coordinates, DataArray


def metric_dims(baseline: Measurement, axes: Mapping[str, Any]) -> list[str]:
    """Returns the names of the dimensions that the metric adds to the result.

    Raises:
        ExperimentError: An axis has the same name.
    """
    dims = ["metric"] if baseline.names is not None else [f"metric_{n}" for n in range(baseline.values.ndim)]
    if taken := [name for name in dims if name in axes]:
        raise ExperimentError(
            f"the metric returns several numbers, along the dimension {taken[0]!r}; give the axis another name"
        )
    return dims


def data_array(
    axes: Mapping[str, Sequence[Any]],
    cells: Sequence[Cell],
    results: Mapping[int, CellResult],
    baseline: Measurement,
    metric: Callable[[Any], Any],
    remarks: Sequence[str],
) -> DataArray:
    """Returns the results as an array, with NaN for cells that failed or did not run.

    Its attributes: `baseline`, the metric without patches; `metrics`, the names of several metrics; `errors`, a list of
    dicts with `cell` (the labels of a cell that failed) and `error`; `remarks`, a list of texts.

    Raises:
        ExperimentError: All cells failed.
    """
    from xarray import DataArray

    data = np.full([len(cells), *baseline.values.shape], np.nan)
    errors = []
    for cell in cells:
        result = results.get(cell.number)
        if result is not None and result.measurement is not None:
            data[cell.number] = result.measurement.values
        elif result is not None:
            labels = {name: plain_label(value) for name, value in cell.labels.items()}
            errors.append({"cell": labels, "error": result.error})
    _report_failures(cells, results, len(errors))

    plain = [(name, tuple(map(plain_label, values))) for name, values in axes.items()]
    attrs: dict[str, Any] = {"baseline": baseline.values.tolist(), "remarks": list(remarks), "errors": errors}
    if baseline.names is not None:
        plain.append(("metric", baseline.names))
        attrs["metrics"] = list(baseline.names)  # kept when one of them is selected
    sizes = [len(values) for values in axes.values()]
    return DataArray(
        data.reshape([*sizes, *baseline.values.shape]),
        _coordinates(tuple((name, values, tuple(map(repr, values))) for name, values in plain)),
        [*axes, *metric_dims(baseline, axes)],
        name=metric_name(metric),
        attrs=attrs,
    )


def _coordinates(labels: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...]) -> Coordinates:
    """Returns the coordinates of the dimensions: a copy."""
    from xarray import Coordinates

    known = _known_coordinates(labels)
    own = {name: variable.copy(deep=False) for name, variable in known.variables.items()}
    return Coordinates(own, indexes=dict(known.xindexes))


@functools.lru_cache(maxsize=8)
def _known_coordinates(labels: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...]) -> Coordinates:
    # Making an index takes longer than the rest of the array, and sweeps often have the same axes.
    # The key has labels also as texts, since 1 == True and 0.0 == -0.0.
    from xarray import Coordinates

    return Coordinates({name: coordinate(name, values) for name, values, _ in labels})


def _report_failures(cells: Sequence[Cell], results: Mapping[int, CellResult], failures: int) -> None:
    if not failures:
        return
    failed = [cell for cell in cells if cell.number in results and results[cell.number].measurement is None]
    first = f"{failed[0]}: {results[failed[0].number].error}"
    if failures == len(cells):
        kinds = len({results[cell.number].error for cell in failed})
        others = f" (and {kinds - 1} other error{'s' if kinds > 2 else ''})" if kinds > 1 else ""
        which = f"all {failures} cells failed, the first one:" if failures > 1 else "the only cell failed:"
        raise ExperimentError(f"{which} {first}{others}")
    warn_each_time(
        f"{failures} of {len(cells)} cells failed and are NaN, the first one: {first}; all errors are in "
        'attrs["errors"]',
        ExperimentWarning,
    )


def plain_label(value: Any) -> bool | int | float | str:
    """Converts the value of an axis to a bool, int, float or text, as coordinates and files need.

    Example:
        >>> plain_label(np.int64(3)), plain_label("wte.output"), plain_label(slice(0, 2))
        (3, 'wte.output', 'slice(0, 2, None)')
    """
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and value.ndim == 0:
        value = value.item()
    return value if type(value) in (bool, int, float, str) else str(value)


def coordinate(name: str, values: Sequence[Any]) -> tuple[str, np.ndarray[Any, Any]]:
    """Returns the values of an axis as a coordinate for `xarray`; mixed values keep their types."""
    plain = [plain_label(value) for value in values]
    is_mixed = len({type(value) for value in plain}) > 1
    return (name, np.array(plain, dtype=object) if is_mixed else np.array(plain))


def metric_name(metric: Callable[[Any], Any]) -> str:
    """Returns the name of a metric: its attribute `name`, or the name of the function or class.

    Example:
        >>> metric_name(max), metric_name(functools.partial(max, 1))
        ('max', 'max')
    """
    while isinstance(metric, functools.partial):
        metric = metric.func
    for name in (getattr(metric, "name", None), getattr(metric, "__name__", None)):
        if isinstance(name, str):
            return name
    return type(metric).__name__
