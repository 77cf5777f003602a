"""Ablation: the metric without a value, or without a part of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.engine.cells import PatchMap
from graphpatch_notebook.experiments.engine.inputs import Inputs, inputs_of
from graphpatch_notebook.experiments.methods.arguments import (
    Paths,
    PositionDim,
    Positions,
    RowPositions,
    check_graph,
    check_is_used,
    check_metric,
    position_dims,
    row_dims,
    several_paths,
)
from graphpatch_notebook.experiments.methods.heads import ValueParts
from graphpatch_notebook.experiments.methods.reference_runs import record
from graphpatch_notebook.experiments.methods.sweeps import run_sweep
from graphpatch_notebook.options import check_input_names
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
        >>> ablate(pg, ["output"], x, metric=torch.sum, progress=False).values
        array([0.])

    Source:
        Wang et al., Interpretability in the Wild, 2022 (mean ablation); Chan et al., Causal Scrubbing, 2022
        (resampling).
    """
    check_graph(pg)
    check_metric(metric)
    check_input_names(pg.nodes.root, input_kwargs, ablate)
    _check_method(method, reference, mean_over, seed)
    names = several_paths(pg, paths)
    given = Inputs(inputs, input_kwargs)
    is_pooled = mean_over != "batch"
    check_is_used(position_dim, is_used=positions is not None or is_pooled)
    dims = position_dims(pg, names, position_dim) if positions is not None or is_pooled else {}
    rows = {} if method == "zero" else row_dims(pg, names, dims)
    run = record(pg, given, names)
    run.warn_if_random()
    parts = ValueParts(pg, run.values, heads, positions, dims)
    instead: dict[str, Tensor] = {}
    if method != "zero":
        others = record(pg, inputs_of(reference), names).values
        for name, value in run.values.items():
            pooled = [rows[name], *([dims[name]] if is_pooled else [])]
            _check_reference(name, value, others[name], pooled if method == "mean" else [rows[name]])
            if method == "mean":
                fill = others[name].mean(pooled, keepdim=True).expand_as(value.narrow(rows[name], 0, 1))
            else:
                fill = _resampled(others[name], rows[name], value.shape[rows[name]], seed)
            instead[name] = fill
    result = run_sweep(
        pg, parts.axes, _Ablation(parts, run.values, instead), given, metric=metric, batch=batch, progress=progress,
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


def _resampled(other: Tensor, dim: int, rows: int, seed: int | None) -> Tensor:
    """Returns as many rows of a value on the reference inputs as the inputs have: in order, or drawn."""
    count = other.shape[dim]
    if seed is None and count != rows:
        raise ExperimentError(
            f"the reference has {count} rows and the inputs have {rows}; give as many, or draw rows with seed=0"
        )
    generator = torch.Generator().manual_seed(seed or 0)
    drawn = torch.arange(rows)
    if seed is not None:
        several = count < rows
        drawn = (
            torch.randint(count, (rows,), generator=generator)
            if several
            else torch.randperm(count, generator=generator)
        )
    return other.index_select(dim, drawn[:rows].to(other.device))


def _check_reference(path: str, value: Tensor, other: Tensor, free: Sequence[int]) -> None:
    """Checks that a value on the reference inputs differs in shape from that on the inputs in some dimensions only."""
    shapes = [[1 if dim in free else size for dim, size in enumerate(each.shape)] for each in (value, other)]
    if not value.is_floating_point() or shapes[0] != shapes[1]:
        raise ExperimentError(
            f"{path!r} is {value.dtype} of shape {tuple(value.shape)} on the inputs, and of shape {tuple(other.shape)} "
            "on the reference: give floating-point values, and a reference of the same length, or "
            "mean_over='batch and positions'"
        )


def _check_method(method: str, reference: Any, mean_over: str, seed: int | None) -> None:
    if method not in ("zero", "mean", "resample") or mean_over not in ("batch", "batch and positions"):
        raise ExperimentError(
            f"method must be 'zero', 'mean' or 'resample', not {method!r}; mean_over 'batch' or 'batch and positions', "
            f"not {mean_over!r}"
        )
    if (method == "zero") is not (reference is None):
        raise ExperimentError("method='mean' and 'resample' need reference inputs, reference=...; 'zero' takes none")
    if (method != "mean" and mean_over != "batch") or (method != "resample" and seed is not None):
        raise ExperimentError(f"mean_over is for method='mean', and seed for method='resample', not {method!r}")
