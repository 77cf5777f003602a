"""Ablation: the metric without a value, or without a part of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.engine.cells import PatchMap
from graphpatch_notebook.experiments.engine.inputs import (
    OverExamples,
    Paths,
    PositionDim,
    Positions,
    RowPositions,
    ValueParts,
    are_of_encoder,
    as_one,
    check_ablation,
    check_ends,
    check_generated,
    check_graph,
    check_is_used,
    check_metric,
    inputs_of,
    position_dims,
    record,
    row_dims,
    several_paths,
)
from graphpatch_notebook.experiments.methods.sweeps import run_sweep
from graphpatch_notebook.options import check_input_names
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches.kinds import ReplacePatch, ZeroPatch
from graphpatch_notebook.patching.model_state import runs_where_the_model_is

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
    positions: Positions | RowPositions = None,
    position_dim: PositionDim = None,
    batch_size: int | None = None,
    keep_examples: bool = False,
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
        paths: The values to remove, such as the outputs of all MLPs, or all heads: `layers[*].attn.heads[*].z`.
        *inputs: Positional inputs of the model. The first dimension of tensors is the batch. Or a dataset, as for
            `causal_trace`.
        metric: Maps the output of the model to a number (see `LogitDifference` and others), or to a dict of numbers.
        method: What replaces the value: `"zero"`; `"mean"`, the mean over the reference inputs; or `"resample"`, the
            value on the reference inputs, row by row (shuffle them, such as `ids[torch.randperm(len(ids))]`).
        reference: The inputs for `"mean"` and `"resample"`: a tuple of arguments, a dict of keyword arguments, or one
            value. Means include all entries of the batch, also padding.
        mean_over: Whether there is a mean for each position, or one for all positions. In the second case, the
            reference may have another length.
        positions: Ablates each of these positions: a number or several, or `True` for all. Negative numbers count from
            the end. With two dimensions, `(batch, columns)`, each row of the batch has positions of its own, and the
            result has the numbers of the columns as positions.
        position_dim: As for `causal_trace`.
        batch_size: As for `causal_trace`.
        keep_examples: As for `causal_trace`.
        batch: As for `pg.sweep`.
        progress: As for `pg.sweep`.
        checkpoint: As for `pg.sweep`.
        checkpoint_key: As for `pg.sweep`.
        executor: As for `pg.sweep`.
        recipe: As for `pg.sweep`.
        **input_kwargs: Keyword inputs of the model.

    Returns:
        An array with the dimension `path` (`layer` and `head` for components, such as `layers[*].attn.heads[*].z`), and
        `position` if requested. Its `attrs` contain `baseline`, the metric without ablation, and the `method`.

    Raises:
        ExperimentError: Before the sweep: the reference does not fit the inputs, or positions are out of range.
        UnknownPathError: A path does not exist. The message names the nearest ones.

    Example:
        >>> import torch
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
    check_input_names(pg.nodes.root, input_kwargs, ablate)
    check_ablation(method, reference, mean_over, ("zero", "mean", "resample"))
    if method != "mean" and mean_over != "batch":
        raise ExperimentError(f"mean_over is for method='mean', not {method!r}")
    datasets = {"inputs": as_one(inputs, input_kwargs)} | ({"reference": reference} if method == "resample" else {})
    if examples := OverExamples(datasets, batch_size, keep_examples):
        return examples.run(  # type: ignore[no-any-return]
            pg, ablate, paths, each={"metric": metric}, method=method, reference=reference, mean_over=mean_over,
            positions=positions, position_dim=position_dim, batch=batch, progress=progress, checkpoint=checkpoint,
            executor=executor, recipe=recipe,
        )  # fmt: skip
    check_metric(metric)
    check_generated(metric, has_positions=positions is not None)
    names = several_paths(pg, paths)
    given = inputs_of(pg, inputs, input_kwargs)
    is_pooled = mean_over != "batch"
    check_is_used(position_dim, is_used=positions is not None or is_pooled)
    dims = position_dims(pg, names, position_dim) if positions is not None or is_pooled else {}
    rows = {} if method == "zero" else row_dims(pg, names, dims)
    run = record(pg, given, names)
    run.warn_if_random()
    parts = ValueParts(pg, run.values, positions, dims)
    check_ends(pg, given, positions, is_encoder=are_of_encoder(pg, dims))
    instead: dict[str, Tensor] = {}
    if method != "zero":
        others = record(pg, inputs_of(pg, reference), names).values
        for name, value in run.values.items():
            pooled = [rows[name], *([dims[name]] if is_pooled else [])]
            fill = others[name]
            _check_reference(name, value, fill, pooled if method == "mean" else [])
            if method == "mean":
                fill = fill.mean(pooled, keepdim=True).expand_as(value.narrow(rows[name], 0, 1))
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


def _check_reference(path: str, value: Tensor, other: Tensor, free: Sequence[int]) -> None:
    """Checks that a value on the reference inputs differs in shape from that on the inputs in some dimensions only."""
    shapes = [[1 if dim in free else size for dim, size in enumerate(each.shape)] for each in (value, other)]
    if not value.is_floating_point() or shapes[0] != shapes[1]:
        raise ExperimentError(
            f"{path!r} is {value.dtype} of shape {tuple(value.shape)} on the inputs, and of shape {tuple(other.shape)} "
            "on the reference: give floating-point values, and a reference of the same length and, for 'resample', as "
            "many rows, or mean_over='batch and positions'"
        )
