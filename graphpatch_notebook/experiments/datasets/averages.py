"""Means over datasets: of values of a model, and of results."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.datasets.batches import Dataset as Examples
from graphpatch_notebook.experiments.datasets.batches import RowReader, batches_of, numbered, read_batch
from graphpatch_notebook.experiments.elsewhere import map_batches
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.patchable_graph import PatchableGraph, runs_where_the_model_is
from graphpatch_notebook.patches.selections import PositionSelection

if TYPE_CHECKING:
    from xarray import DataArray, Dataset


@runs_where_the_model_is
def mean_values(
    pg: PatchableGraph,
    patterns: Any,
    dataset: Examples,
    *,
    positions: PositionSelection | None = None,
    batch_size: int | None = None,
    executor: Any = None,
    recipe: Any = None,
) -> dict[str, Tensor]:
    """Returns the mean of each value over the examples and positions of a dataset.

    For mean ablation with `ReplacePatch(value=means[path])`. Memory holds one batch. Padding, where the
    `attention_mask` is 0, does not count. Sums are taken in float64.

    Args:
        pg: The graph.
        patterns: A path, a pattern such as `"layers[*].mlp_out"`, or several.
        dataset: As of `record_to`.
        positions: The positions to average over; `None` for all.
        batch_size: As of `record_to`.
        executor: Runs batches elsewhere, as for `pg.sweep`.
        recipe: As for `pg.sweep`.

    Returns:
        By path, a tensor of the shape of one row of the value: (channels), say. Its dtype is that of the value, or
        torch's default for values that are not floating-point: half of several booleans may be true.

    Raises:
        UnknownPathError: A path does not exist, or a pattern matches nothing; nothing ran.
        ExperimentError: The dataset is empty, or it is not known where the batch is in a value.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2, 3))
        >>> mean_values(pg, "sub_0.output", torch.tensor([[-1.0, 2.0], [3.0, 4.0], [5.0, 0.0]]), batch_size=2)
        {'sub_0.output': tensor([2.6667, 2.0000])}
    """
    reader = RowReader(pg, patterns, positions)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    dtypes: dict[str, torch.dtype] = {}
    batches = numbered(batches_of(dataset, batch_size))
    for each in map_batches(pg, functools.partial(_sums, reader), batches, executor=executor, recipe=recipe):
        for path, (total, count, dtype) in each.items():
            if path in sums and sums[path].shape != total.shape:
                raise ExperimentError(
                    f"a row of {path!r} has the shape {tuple(sums[path].shape)} in one batch, and {tuple(total.shape)} "
                    "in another: pad all batches to one length"
                )
            sums[path] = sums[path] + total if path in sums else total
            counts[path] = counts.get(path, 0) + count
            dtypes[path] = dtype
    if not any(counts.values()):
        raise ExperimentError("the dataset has no examples, or none at these positions")
    return {path: (total / counts[path]).to(dtypes[path]) for path, total in sums.items()}


def _sums(
    reader: RowReader, pg: PatchableGraph, batch: tuple[int, Inputs]
) -> dict[str, tuple[Tensor, int, torch.dtype]]:
    """Returns the sum of the rows of each value on a batch, their number, and the dtype of their mean."""
    result = {}
    for path, value in read_batch(reader, None, pg, batch)[1].items():
        exact = torch.complex128 if value.is_complex() else torch.float64
        dtype = value.dtype if value.is_floating_point() or value.is_complex() else torch.get_default_dtype()
        result[path] = value.sum(0, dtype=exact), len(value), dtype
    return result


def average(results: Iterable[DataArray]) -> Dataset:
    """Returns the mean of results, such as those of `attribute` on many batches, and its standard error.

    Results are read one at a time, so a generator keeps one in memory.

    Args:
        results: Results with the same dimensions and coordinates, each with the same weight.

    Returns:
        A Dataset with `mean`, `standard_error` (of the mean; NaN for one result) and `count`, the number of results in
        which a cell is not NaN.

    Raises:
        ExperimentError: There are none, or they have different coordinates.

    Example:
        >>> from xarray import DataArray
        >>> result = average(DataArray([x, 0.0], {"layer": [0, 1]}, ["layer"]) for x in (1.0, 2.0, 3.0))
        >>> result["mean"].values.tolist(), result["standard_error"].values.round(3).tolist()
        ([2.0, 0.0], [0.577, 0.0])
    """
    import numpy as np
    from xarray import Dataset

    first: DataArray | None = None
    # Welford's method: exact where a sum of squares would cancel.
    for result in results:
        values = result.values.astype(np.float64)
        if first is None:
            first, count, mean, squares = result, np.zeros(result.shape), np.zeros(result.shape), np.zeros(result.shape)
        elif result.dims != first.dims or not all(
            np.array_equal(result[dim].values, first[dim].values) for dim in first.dims
        ):
            raise ExperimentError(f"results have different coordinates: {result.coords} and {first.coords}")
        is_known = ~np.isnan(values)
        count += is_known
        step = np.where(is_known, values - mean, 0.0)
        mean = mean + step / np.maximum(count, 1)
        squares += np.where(is_known, step * (values - mean), 0.0)
    if first is None:
        raise ExperimentError("there are no results to average")
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(count > 1, np.sqrt(squares / (count - 1) / count), np.nan)
    columns = {"mean": np.where(count > 0, mean, np.nan), "standard_error": error, "count": count.astype(int)}
    return Dataset({name: first.copy(data=column) for name, column in columns.items()})
