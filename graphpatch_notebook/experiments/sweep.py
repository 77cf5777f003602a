"""Sweeps: one number for each combination of the values of some axes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.experiments.cells import Cell, CellResult, PatchMap, axes_of, cells_of
from graphpatch_notebook.experiments.inputs import Inputs
from graphpatch_notebook.experiments.measurements import Measurement
from graphpatch_notebook.experiments.runner import CellRunner
from graphpatch_notebook.experiments.scheduling import run_chunks
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.warning_places import level_of_caller, warn

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
    progress: bool = True,  # noqa: ARG001
    backward: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,  # noqa: ARG001
    executor: Any = None,  # noqa: ARG001
    recipe: Any = None,  # noqa: ARG001
) -> DataArray:
    """Returns what `metric` gives for each cell: see `PatchableGraph.sweep`."""
    values = axes_of(axes)
    cells = cells_of(values, make_patches)
    paths = list(dict.fromkeys(str(path) for cell in cells for path in cell.patches))
    runner = CellRunner(pg, inputs, metric, paths, batch=batch, backward=backward)
    results = run_chunks(runner, runner.chunks(cells))
    return _data_array(values, cells, results, runner, metric)


def _data_array(
    axes: Mapping[str, Sequence[Any]],
    cells: Sequence[Cell],
    results: Mapping[int, CellResult],
    runner: CellRunner,
    metric: Callable[[Any], Any],
) -> DataArray:
    from xarray import DataArray

    example: Measurement = runner.baseline
    sizes = [len(values) for values in axes.values()]
    data = np.full([len(cells), *example.values.shape], np.nan)
    errors = []
    for cell in cells:
        result = results.get(cell.number)
        if result is None:
            continue
        if result.measurement is None:
            errors.append({"cell": str(cell), "error": result.error})
        elif result.measurement.form != example.form:
            raise ExperimentError(f"the metric gave {result.measurement.values.shape} numbers for {cell}")
        else:
            data[cell.number] = result.measurement.values
    dims = [*axes, *_metric_dims(example)]
    coords: dict[str, Any] = {name: _coordinate(name, values) for name, values in axes.items()}
    if example.names is not None:
        coords["metric"] = list(example.names)
    name = getattr(metric, "__name__", type(metric).__name__)
    array = DataArray(data.reshape([*sizes, *example.values.shape]), coords, dims, name=name)
    array.attrs |= {"baseline": example.values.tolist(), "remarks": list(runner.remarks), "errors": errors}
    if errors:
        first = errors[0]
        warn(
            f"{len(errors)} of {len(cells)} cells failed: {first['cell']}: {first['error']}",
            ExperimentWarning,
            stacklevel=level_of_caller(),
        )
    return array


def _metric_dims(example: Measurement) -> list[str]:
    if example.names is not None:
        return ["metric"]
    return [f"metric_{number}" for number in range(example.values.ndim)]


def _coordinate(name: str, values: Sequence[Any]) -> Any:
    plain = [value if isinstance(value, (bool, int, float, str)) else str(value) for value in values]
    return (name, np.array(plain, dtype=object) if len({type(value) for value in plain}) > 1 else np.array(plain))
