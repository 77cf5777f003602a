"""Ablation: the metric without a value, or without a part of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.engine.cells import PatchMap
from graphpatch_notebook.experiments.engine.inputs import Inputs, inputs_of
from graphpatch_notebook.experiments.methods.arguments import (
    Paths,
    check_graph,
    check_input_names,
    check_metric,
    several_paths,
)
from graphpatch_notebook.experiments.methods.heads import ValueParts
from graphpatch_notebook.experiments.methods.positions import (
    PositionDim,
    Positions,
    RowPositions,
    check_is_used,
    position_dims,
    row_dims,
)
from graphpatch_notebook.experiments.methods.reference_runs import record
from graphpatch_notebook.experiments.methods.sweeps import run_sweep
from graphpatch_notebook.patchable_graph import PatchableGraph, runs_where_the_model_is
from graphpatch_notebook.patches.kinds import ReplacePatch, ZeroPatch

if TYPE_CHECKING:
    from xarray import DataArray

AblationMethod: TypeAlias = Literal["zero", "mean", "resample"]


@runs_where_the_model_is
def ablate(
    pg: PatchableGraph,
    paths: Paths,
    *inputs: Any,
    metric: Callable[[Any], Any],
    method: AblationMethod = "zero",
    reference: Any = None,
    mean_over: Literal["batch", "batch and positions"] = "batch",
    seed: int | None = None,
    heads: int | None = None,
    positions: Positions | RowPositions = None,
    position_dim: PositionDim = None,
    batch: int | str | None = "auto",
    progress: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_key: str = "",
    executor: Any = None,
    recipe: Any = None,
    **input_kwargs: Any,
) -> DataArray:
    """Returns the metric with one value, or one part of a value, removed at a time.

    Args:
        pg: The graph.
        paths: The values to remove, such as the outputs of all MLPs; with `heads`, values with separate heads
            (`h_0.attn.c_proj.x`, the input of the output projection, not its output).
        *inputs: Positional inputs of the model. The first dimension of tensors is the batch.
        metric: Maps the output of the model to a number (see `LogitDifference` and others), or to a dict of numbers.
        method: What replaces the value: `"zero"`; `"mean"`, the mean over the reference inputs; or `"resample"`, the
            value on the reference inputs, row by row.
        reference: The inputs for `"mean"` and `"resample"`: a tuple of arguments, a dict of keyword arguments, or one
            value. Means include all entries of the batch, also padding.
        mean_over: Whether there is a mean for each position, or one for all positions. In the second case, the
            reference may have another length.
        seed: Draws the rows of the reference at random, without replacement if there are enough. By default, they are
            taken in order.
        heads: The number of attention heads: ablates each of this number of equal parts of the last dimension, or each
            entry of the head dimension in attention patterns; components (`layers[*].attn.heads[*].z`) need no number.
            It is an error if the graph shows that heads are mixed in
            a value, as after the output projection; for custom attention kernels, the graph does not show this.
        positions: Ablates each of these positions: a number or several, or `True` for all. Negative numbers count from
            the end. With two dimensions, `(batch, columns)`, each row of the batch has positions of its own, and the
            result has the numbers of the columns as positions.
        position_dim: As for `causal_trace`.
        batch: As for `pg.sweep`.
        progress: As for `pg.sweep`.
        checkpoint: As for `pg.sweep`.
        checkpoint_key: As for `pg.sweep`.
        executor: As for `pg.sweep`.
        recipe: As for `pg.sweep`.
        **input_kwargs: Keyword inputs of the model.

    Returns:
        An array with the dimension `path` (`layer` and `head` for components, such as `layers[*].attn.heads[*].z`), and
        `head` and `position` if requested. Its `attrs` contain `baseline`, the
        metric without ablation, and the `method`.

    Raises:
        ExperimentError: Before the sweep: the reference does not fit the inputs, values cannot be split into this
            number of heads, or positions are out of range.
        UnknownPathError: A path does not exist. The message names the nearest ones.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> pg = PatchableGraph(torch.nn.ReLU(), x)
        >>> ablate(pg, ["output"], x, metric=torch.sum, heads=2, progress=False).values
        array([[7., 3.]])

    Source:
        Wang et al., Interpretability in the Wild, 2022 (mean ablation); Chan et al., Causal Scrubbing, 2022
        (resampling).
    """
    check_graph(pg)
    check_metric(metric)
    check_input_names(pg, input_kwargs, ablate)
    _check_method(method, reference, mean_over, seed)
    names = several_paths(pg, paths)
    given = Inputs(inputs, input_kwargs)
    is_pooled = mean_over != "batch"
    check_is_used(position_dim, is_used=positions is not None or is_pooled)
    dims = position_dims(pg, names, position_dim) if positions is not None or is_pooled else {}
    rows = {} if method == "zero" else row_dims(pg, names, dims, "the rows of the batch are unknown:")
    run = record(pg, given, names)
    run.warn_if_random(pg)
    values = run.values
    parts = ValueParts(pg, values, given.rows, heads, positions, dims)
    instead: dict[str, Tensor] = {}
    if method != "zero":
        fills = _Fills(given, inputs_of(reference), rows, dims if is_pooled else {}, seed)
        others = record(pg, fills.reference, names).values
        fill = fills.mean if method == "mean" else fills.resampled
        instead = {name: fill(name, values[name], others[name]) for name in names}
    result = run_sweep(
        pg, parts.axes, _Ablation(parts, values, instead), given, metric=metric, batch=batch, progress=progress,
        checkpoint=checkpoint, checkpoint_key=checkpoint_key, executor=executor, recipe=recipe,
    )  # fmt: skip
    result.attrs["method"] = method
    return result


@dataclass(frozen=True)
class _Ablation:
    """Makes the patch map of a cell: a callable from its labels.

    Attributes:
        parts: The parts that are ablated.
        values: The original values, by path.
        instead: The values that replace them, of the same shape except that there may be one row for the whole batch;
            empty for zeros.
    """

    parts: ValueParts
    values: Mapping[str, Tensor]
    instead: Mapping[str, Tensor]

    def __call__(self, *labels: Any) -> PatchMap:
        cell = dict(zip(self.parts.axes, labels, strict=True))
        path = cell["path"]
        index = self.parts.index(path, cell)
        where = None if len(cell) == 1 else index
        if path not in self.instead:
            return {path: ZeroPatch(slice=where)}
        value = self.instead[path]
        if self.parts.has_rows:
            value = value.expand_as(self.values[path])  # a mean has one row for all
        # A copy, since pickling a view would send its whole storage to another process.
        return {path: ReplacePatch(value=value[index].clone(), slice=where)}


class _Fills:
    """The replacements of values, computed from the values on the reference inputs.

    `row_dims` has the batch dimension by path; `pooled_dims` the sequence dimension, if means are also over positions.
    With a seed, rows are drawn.
    """

    def __init__(
        self,
        inputs: Inputs,
        reference: Inputs,
        row_dims: Mapping[str, int],
        pooled_dims: Mapping[str, int],
        seed: int | None,
    ) -> None:
        self.reference = reference
        self._row_dims, self._pooled_dims = row_dims, pooled_dims
        self._rows, self._reference_rows = _batch_size(inputs, "the inputs"), _batch_size(reference, "reference")
        self._seed = seed

    def mean(self, path: str, value: Tensor, other: Tensor) -> Tensor:
        """Returns the mean of `other` over the batch, in the shape of `value` with one row."""
        self._check(path, value, other)
        row = self._row_dims[path]
        pooled = [self._pooled_dims[path]] if path in self._pooled_dims else []
        return other.mean((row, *pooled), keepdim=True).expand_as(value.narrow(row, 0, 1))

    def resampled(self, path: str, value: Tensor, other: Tensor) -> Tensor:
        """Returns the rows of `other` that replace those of `value`."""
        self._check(path, value, other)
        return other.index_select(self._row_dims[path], self._drawn_rows().to(other.device))

    def _drawn_rows(self) -> Tensor:
        rows, count = self._rows, self._reference_rows
        if self._seed is not None:
            generator = torch.Generator().manual_seed(self._seed)
            if count < rows:
                return torch.randint(count, (rows,), generator=generator)
            return torch.randperm(count, generator=generator)[:rows]
        if count != rows:
            raise ExperimentError(
                f"the reference has {count} rows and the inputs have {rows}; give as many, or draw rows with seed=0"
            )
        return torch.arange(rows)

    def _check(self, path: str, value: Tensor, other: Tensor) -> None:
        if not value.is_floating_point() and not value.is_complex():
            raise ExperimentError(
                f"{path!r} has dtype {value.dtype}; only floating-point values have other methods than 'zero'"
            )
        row = self._row_dims[path]
        for tensor, rows, what in ((value, self._rows, "inputs"), (other, self._reference_rows, "reference")):
            if tensor.shape[row] != rows:
                raise ExperimentError(
                    f"{path!r} has shape {tuple(tensor.shape)} on the {what}, but the batch has {rows} rows; give "
                    "another path"
                )
        shapes = [list(tensor.shape) for tensor in (value, other)]
        for shape in shapes:
            for dim in (row, self._pooled_dims.get(path, row)):
                shape[dim] = 1
        if shapes[0] != shapes[1]:
            raise ExperimentError(
                f"{path!r} has shape {tuple(value.shape)} on the inputs and {tuple(other.shape)} on the reference; "
                "give a reference of the same length, or use mean_over='batch and positions'"
            )


def _batch_size(inputs: Inputs, what: str) -> int:
    if inputs.rows is None:
        raise ExperimentError(f"the batch size of {what} is unknown, since they contain no tensors")
    return inputs.rows


def _check_method(method: str, reference: Any, mean_over: str, seed: int | None) -> None:
    if method not in ("zero", "mean", "resample"):
        raise ExperimentError(f"method must be 'zero', 'mean' or 'resample', not {method!r}")
    if mean_over not in ("batch", "batch and positions"):
        raise ExperimentError(f"mean_over must be 'batch' or 'batch and positions', not {mean_over!r}")
    if method == "zero" and reference is not None:
        raise ExperimentError("method='zero' takes no reference; did you mean method='mean' or 'resample'?")
    if method != "zero" and reference is None:
        raise ExperimentError(f"method={method!r} needs reference inputs: reference=...")
    if method != "mean" and mean_over != "batch":
        raise ExperimentError(f"mean_over is for method='mean', not {method!r}")
    if method != "resample" and seed is not None:
        raise ExperimentError(f"seed is for method='resample', not {method!r}")
    if seed is not None and type(seed) is not int:
        raise ExperimentError(f"seed must be an integer, not {seed!r}")
