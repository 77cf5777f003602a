"""The `xarray.DataArray` that a sweep results in."""

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
    """Returns the names of the dimensions that the metric's numbers have of their own.

    Raises:
        ExperimentError: An axis has such a name, too.
    """
    dims = ["metric"] if baseline.names is not None else [f"metric_{n}" for n in range(baseline.values.ndim)]
    if taken := [name for name in dims if name in axes]:
        raise ExperimentError(
            f"the metric gives several numbers, which lie along dimension {taken[0]!r}: give the axis another name"
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
    """Returns the results as an array; NaN where a cell failed, or was not run.

    Its attributes: `baseline`, what the metric gives without patches; `metrics`, the names of these numbers, if there
    are several by name; `errors`, a dict with `cell` (the labels of a cell that failed) and `error` for each;
    `remarks`, what else is to be known.

    Raises:
        ExperimentError: All cells were run, and all of them failed: there is no number to be had.
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
    _tell(cells, results, len(errors))

    plain = [(name, tuple(map(plain_label, values))) for name, values in axes.items()]
    attrs: dict[str, Any] = {"baseline": baseline.values.tolist(), "remarks": list(remarks), "errors": errors}
    if baseline.names is not None:
        plain.append(("metric", baseline.names))
        attrs["metrics"] = list(baseline.names)  # which stay when one of them is picked
    sizes = [len(values) for values in axes.values()]
    return DataArray(
        data.reshape([*sizes, *baseline.values.shape]),
        _coordinates(tuple((name, values, tuple(map(repr, values))) for name, values in plain)),
        [*axes, *metric_dims(baseline, axes)],
        name=metric_name(metric),
        attrs=attrs,
    )


def _coordinates(labels: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...]) -> Coordinates:
    """Returns the coordinates of the dimensions, as `xarray` has them: a copy."""
    from xarray import Coordinates

    known = _known_coordinates(labels)
    own = {name: variable.copy(deep=False) for name, variable in known.variables.items()}
    return Coordinates(own, indexes=dict(known.xindexes))


@functools.lru_cache(maxsize=8)
def _known_coordinates(labels: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...]) -> Coordinates:
    # To make an index takes more time than all the rest of an array, and sweeps are mostly made over the same axes.
    # Labels are equal that are not the same: 1 and True, 0.0 and -0.0. Hence they are also given as texts.
    from xarray import Coordinates

    return Coordinates({name: coordinate(name, values) for name, values, _ in labels})


def _tell(cells: Sequence[Cell], results: Mapping[int, CellResult], failures: int) -> None:
    if not failures:
        return
    failed = [cell for cell in cells if cell.number in results and results[cell.number].measurement is None]
    first = f"{failed[0]}: {results[failed[0].number].error}"
    if failures == len(cells):
        kinds = len({results[cell.number].error for cell in failed})
        others = f" (and {kinds - 1} other error{'s' if kinds > 2 else ''})" if kinds > 1 else ""
        which = f"all {failures} cells failed, the first being" if failures > 1 else "the only cell failed:"
        raise ExperimentError(f"{which} {first}{others}")
    warn_each_time(
        f"{failures} of {len(cells)} cells failed and are NaN, the first being {first}; all of them are in "
        'attrs["errors"]',
        ExperimentWarning,
    )


def plain_label(value: Any) -> bool | int | float | str:
    """Returns the value of an axis as one that coordinates and files can hold.

    Example:
        >>> plain_label(np.int64(3)), plain_label("wte.output"), plain_label(slice(0, 2))
        (3, 'wte.output', 'slice(0, 2, None)')
    """
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and value.ndim == 0:
        value = value.item()
    return value if type(value) in (bool, int, float, str) else str(value)


def coordinate(name: str, values: Sequence[Any]) -> tuple[str, np.ndarray[Any, Any]]:
    """Returns the values of an axis as `xarray` takes coordinates; of mixed ones each keeps its type."""
    plain = [plain_label(value) for value in values]
    is_mixed = len({type(value) for value in plain}) > 1
    return (name, np.array(plain, dtype=object) if is_mixed else np.array(plain))


def metric_name(metric: Callable[[Any], Any]) -> str:
    """Returns what a metric is called: its `name`, that of the function, or its class.

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
