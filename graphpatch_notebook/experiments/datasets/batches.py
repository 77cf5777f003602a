"""Datasets: any iterable of batches; the rows of values of a model, and the means of values and of results.

A row of a value belongs to one position of one example, or to one example.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError, extra
from graphpatch_notebook.experiments.engine import map_batches
from graphpatch_notebook.experiments.engine.inputs import Examples, Inputs, batches_of, check_graph
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.slices import PositionSelection, Selection, selection
from graphpatch_notebook.patching import (
    DECODER_TOKENS,
    CapturedModel,
    input_of,
    mask_of,
    row_and_position_dims,
    token_inputs,
)
from graphpatch_notebook.patching.model_state import runs_where_the_model_is

if TYPE_CHECKING:
    from xarray import DataArray, Dataset

_Array: TypeAlias = "np.ndarray[Any, Any]"


def numbered(batches: Iterable[Inputs], first: int = 0) -> Iterator[tuple[int, Inputs]]:
    """Yields each batch with the number of its first example; the first batch begins at `first`."""
    for batch in batches:
        yield first, batch
        first += batch.rows or 0


@dataclass(frozen=True)
class ExampleRows:
    """The rows of a batch: which example and position each belongs to.

    Attributes:
        examples: The number of the example in the dataset, of shape (rows).
        positions: The position in its sequence, of shape (rows).
        kept: Which entries of (examples, positions) of the batch they are, of that shape; padding is left out.
        ids: The tokens of the batch, of that shape; -1 if they are not known, as of a model that does not take tokens.
    """

    examples: Tensor
    positions: Tensor
    kept: Tensor
    ids: Tensor

    @classmethod
    def whole(cls, first: int, count: int) -> ExampleRows:
        """Returns one row for each of some examples, without positions."""
        unknown = torch.full((count, 1), -1)
        return cls(torch.arange(first, first + count), unknown[:, 0], unknown < 0, unknown)

    @property
    def tokens(self) -> Tensor:
        """The token, of shape (rows)."""
        return self.ids[self.kept]


class RowReader:
    """Splits values of a model into rows, one for each position of each example. It can be pickled.

    Attributes:
        by_path: By path, the dimensions of the recorded value that hold the batch and the positions; the latter is
            `None` if the value has one row for each example. Both may be one dimension.

    Raises:
        UnknownPathError: A path does not exist, or a pattern matches nothing.
        ExperimentError: It is not known which dimension holds the batch.
    """

    def __init__(self, pg: PatchableGraph, patterns: Any, positions: PositionSelection | None) -> None:
        check_graph(pg)
        model = captured(pg)
        self._positions = None if positions is None else _chosen(positions)
        listed = [patterns] if isinstance(patterns, str) or not isinstance(patterns, Iterable) else patterns
        targets: dict[str, Target] = {}
        for pattern in map(str, listed):
            targets |= {target.text: target for target in model.targets_of(pattern)}
        if not targets:
            raise ExperimentError(
                "there is nothing to record: give a path, or a pattern such as 'layers[*].resid_post'"
            )
        found = {path: _dims(model, target) for path, target in targets.items()}
        self.by_path = {path: (row_dim, position_dim) for path, (row_dim, position_dim, _) in found.items()}
        sequences = {is_encoder: path for path, (_, dim, is_encoder) in found.items() if dim is not None}
        if len(sequences) > 1:
            raise ExperimentError(
                f"{sequences[True]!r} has the positions of the encoder, and {sequences[False]!r} those of the decoder: "
                "ask for them one after the other"
            )
        self._tokens = token_inputs(model.root, is_encoder=True in sequences)
        if any(each.row for each in self._tokens):
            raise ExperimentError(
                f"the examples are not the first dimension of {self._tokens[0].name!r}: wrap the model in one that "
                "transposes it"
            )

    def rows(self, pg: PatchableGraph, batch: Inputs, first: int) -> ExampleRows:
        """Returns the rows of a batch whose first example has the number `first`."""
        root, args, kwargs = captured(pg).root, batch.args, batch.kwargs
        given = {each: input_of(root, each.name, args, kwargs) for each in self._tokens}
        found = next((each for each, value in given.items() if value is not None), None)
        if found is None:
            return ExampleRows.whole(first, batch.rows or 0)
        name, tokens = found.name, given[found].movedim(found.positions, 1)
        count, length = tokens.shape[:2]
        mask = mask_of(root, "decoder_attention_mask" if name in DECODER_TOKENS else "attention_mask", args, kwargs)
        kept = torch.ones(count, length, dtype=torch.bool)
        if isinstance(mask, Tensor) and mask.shape == kept.shape:
            kept &= mask.cpu().bool()
        if self._positions is not None:
            columns, from_end = np.arange(length), -kept.flip(1).cumsum(1).flip(1).numpy()
            kept &= torch.from_numpy(is_at(self._positions, columns, from_end))
        example, position = kept.nonzero(as_tuple=True)
        # The model shifts labels to get its tokens.
        has_ids = tokens.ndim == 2 and not tokens.is_floating_point() and name != "labels"
        ids = tokens.cpu() if has_ids else torch.full((count, length), -1)
        return ExampleRows(example + first, position, kept, ids)

    def of_value(self, path: str, value: Tensor, rows: ExampleRows) -> Tensor:
        """Returns the rows of a value, of shape (rows, ...): copies on the CPU."""
        row_dim, position_dim = self.by_path[path]
        if position_dim is None:
            return value.detach().movedim(row_dim, 0).to("cpu", copy=True)
        return self.by_position(path, value.detach(), rows.kept.shape)[rows.kept.to(value.device)].cpu()

    def by_position(self, path: str, value: Tensor, shape: torch.Size) -> Tensor:
        """Returns a view of a value with positions whose first dimensions are the examples and positions.

        `shape` has their numbers. Raises an `ExperimentError` if the value has others.
        """
        row_dim, position_dim = self.by_path[path]
        assert position_dim is not None  # else the value is in `without_positions`
        view = value.movedim(row_dim, 0)
        if row_dim != position_dim:
            view = view.movedim(position_dim + (position_dim < row_dim), 1)
        elif len(view) == shape.numel():
            view = view.unflatten(0, shape)
        if view.shape[:2] != shape:
            raise ExperimentError(
                f"{path!r} has {tuple(view.shape[:2])} examples and positions on a batch of {tuple(shape)}"
            )
        return view

    def broadcastable(self, path: str, row: Tensor) -> Tensor:
        """Returns one row of a value with dimensions of size 1 for examples and positions, but a vector of channels."""
        whole = row
        for dim in sorted({dim for dim in self.by_path[path] if dim is not None}):
            whole = whole.unsqueeze(dim)
        return row if row.dim() < 2 and row.numel() == whole.shape[-1] else whole

    @property
    def without_positions(self) -> list[str]:
        """The paths of values that have one row for each example."""
        return [path for path, (_, dim) in self.by_path.items() if dim is None]


def _chosen(positions: PositionSelection) -> Selection:
    try:
        found = selection(positions, "positions")
    except ValueError as error:
        raise ExperimentError(str(error)) from None
    if found.rows is not None:
        raise ExperimentError("positions are the same for all examples here: give one list of them")
    return found


def is_at(chosen: Selection, position: _Array, from_end: _Array) -> _Array:
    """Whether each row is at one of some positions.

    Args:
        chosen: The positions. Negative ones count from the end of each example, before padding.
        position: The position of each row.
        from_end: The same, counted from the end of its example: -1 for the last row.

    Example:
        >>> is_at(selection([0, -1], "positions"), np.arange(4), np.arange(-4, 0)).tolist()
        [True, False, False, True]
    """
    numbers: Any = chosen.chosen
    if not isinstance(numbers, slice):
        found: _Array = np.isin(position, [number for number in numbers if number >= 0])
        return found | np.isin(from_end, [number for number in numbers if number < 0])
    start = numbers.start or 0
    after = (position if start >= 0 else from_end) - start
    found = (after >= 0) & (after % (numbers.step or 1) == 0)
    stop = numbers.stop
    return found if stop is None else found & ((position if stop >= 0 else from_end) < stop)


def _dims(model: CapturedModel, target: Target) -> tuple[int, int | None, bool]:
    try:
        row_dim, position_dim, is_encoder = row_and_position_dims(model.root, target)
    except ValueError as error:
        raise ExperimentError(f"{target.text!r}: {error}") from None
    kept = target.kept_dims
    if row_dim not in kept:
        raise ExperimentError(f"{target.text!r} takes a part of dimension {row_dim}, which has the examples")
    return kept.index(row_dim), None if position_dim is None else kept.index(position_dim), is_encoder


def read_batch(
    reader: RowReader, dtype: torch.dtype | None, pg: PatchableGraph, numbered: tuple[int, Inputs]
) -> tuple[ExampleRows, dict[str, Tensor]]:
    """Returns the rows of a batch, given with the number of its first example, and by path those of each value."""
    first, batch = numbered
    rows, fresh = reader.rows(pg, batch, first), batch.fresh()
    with torch.no_grad():
        recording = pg.record(list(reader.by_path), *fresh.args, dtype=dtype, **fresh.kwargs)
    if missing := [path for path in reader.by_path if path not in recording]:
        raise ExperimentError(f"the model did not compute {missing[0]!r} on a batch of the dataset")
    return rows, {path: reader.of_value(path, recording[path], rows) for path in reader.by_path}


# -- means -------------------------------------------------------------------------------------------------------------


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
        positions: The positions to average over, as for `record_to`; `None` for all.
        batch_size: As of `record_to`.
        executor: Runs batches elsewhere, as for `pg.sweep`.
        recipe: As for `pg.sweep`.

    Returns:
        By path, a tensor that broadcasts over the batch and the positions of the value: of shape (channels), say, or
        (1, heads, 1, channels) where positions come after heads. Its dtype is that of the value, or torch's default for
        values that are not floating-point: half of several booleans may be true.

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
    options = {"positions": positions, "batch_size": batch_size, "executor": executor, "recipe": recipe}
    return {path: mean.to(dtype) for path, (mean, dtype) in exact_means(pg, patterns, dataset, **options).items()}


@runs_where_the_model_is
def exact_means(
    pg: PatchableGraph,
    patterns: Any,
    dataset: Examples,
    *,
    positions: PositionSelection | None,
    batch_size: int | None,
    executor: Any = None,
    recipe: Any = None,
) -> dict[str, tuple[Tensor, torch.dtype]]:
    """Returns the means of `mean_values` in float64 (or complex128), each with the dtype that it is to have."""
    reader = RowReader(pg, patterns, positions)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    dtypes: dict[str, torch.dtype] = {}
    batches = numbered(batches_of(pg, dataset, batch_size))
    for each in map_batches(pg, functools.partial(_sums, reader), batches, executor=executor, recipe=recipe):
        for path, (total, count, dtype) in each.items():
            if sums.setdefault(path, torch.zeros_like(total)).shape != total.shape:
                raise ExperimentError(
                    f"a row of {path!r} has the shape {tuple(sums[path].shape)} in one batch, and {tuple(total.shape)} "
                    "in another: pad all batches to one length"
                )
            sums[path], counts[path] = sums[path] + total, counts.get(path, 0) + count
            dtypes[path] = dtype
    if not any(counts.values()):
        raise ExperimentError("the dataset has no examples, or none at these positions")
    return {path: (reader.broadcastable(path, sums[path] / counts[path]), dtypes[path]) for path in sums}


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
    xarray, given = extra("xarray", "a mean of results"), list(results)
    if not given:
        raise ExperimentError("there are no results to average")
    try:
        together = xarray.concat([each.astype(np.float64) for each in given], "result", join="exact")
    except ValueError as error:
        raise ExperimentError(f"results have different coordinates: {error}") from error
    with warnings.catch_warnings(), xarray.set_options(keep_attrs=True):
        warnings.simplefilter("ignore", RuntimeWarning)  # NaN where there are too few
        count, deviation = together.count("result"), together.std("result", ddof=1)
        found = {"mean": together.mean("result"), "standard_error": deviation / count**0.5, "count": count}
    return xarray.Dataset(found)  # type: ignore[no-any-return]
