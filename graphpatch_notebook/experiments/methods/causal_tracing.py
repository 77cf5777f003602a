"""Causal tracing: the effect of restoring one value of a clean run in a corrupted run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.engine.cells import PatchMap
from graphpatch_notebook.experiments.engine.inputs import (
    MetricRange,
    OverExamples,
    Paths,
    PositionDim,
    Positions,
    RowPositions,
    ValueParts,
    are_of_encoder,
    check_ends,
    check_generated,
    check_graph,
    check_is_used,
    check_metric,
    check_metric_position,
    check_same_shapes,
    inputs_of,
    position_cells,
    position_dims,
    record,
    several_paths,
)
from graphpatch_notebook.experiments.methods.sweeps import run_sweep
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches.kinds import AddPatch, Patch, ReplacePatch
from graphpatch_notebook.patching.model_state import runs_where_the_model_is

if TYPE_CHECKING:
    from xarray import DataArray


@dataclass(frozen=True)
class Noise:
    """A corruption for `causal_trace`: Gaussian noise, added to the value at a path in the clean run.

    Args:
        path: The value to which noise is added, usually the output of the token embedding.
        scale: The standard deviation of the noise, in the units of the value. By default three times that of the clean
            value over all its entries, as in ROME.
        positions: The positions to which noise is added: a number or several (in ROME, the tokens of the subject);
            `None` for all. Negative numbers count from the end.
        samples: The number of times noise is drawn. All cells use the same draws; metrics are means over them.
        seed: The seed of the random generator.

    Raises:
        ExperimentError: The scale or the number of samples is not positive.

    Example:
        >>> Noise("transformer.wte.output", positions=range(2, 5)).samples
        10
    """

    path: str | NodePath
    _: KW_ONLY
    scale: float | None = None
    positions: Positions | RowPositions = None
    samples: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise ExperimentError(f"the scale of noise must be a positive number, not {self.scale!r}")
        if type(self.samples) is not int or self.samples < 1:
            raise ExperimentError(f"samples must be a positive integer, not {self.samples!r}")

    def patches(self, clean: Tensor, index: tuple[Any, ...]) -> list[AddPatch]:
        """Returns a patch for each sample, which adds noise to the part of the clean value at `index`."""
        if not clean.is_floating_point():
            raise ExperimentError(
                f"noise can be added to floating point numbers, but {str(self.path)!r} has {clean.dtype}"
            )
        scale = self.scale if self.scale is not None else 3 * clean.double().std().item()
        # Drawn on the CPU, so that draws do not depend on the device.
        generator = torch.Generator().manual_seed(self.seed)
        shape = clean[index].shape
        draws = [torch.randn(shape, generator=generator) * scale for _ in range(self.samples)]
        return [AddPatch(value=draw.to(clean.device, clean.dtype), slice=index) for draw in draws]


@runs_where_the_model_is
def causal_trace(
    pg: PatchableGraph,
    clean: Any,
    corrupted: Any,
    paths: Paths,
    positions: Positions | RowPositions,
    metric: Callable[[Any], Any],
    *,
    window: int = 1,
    normalize: bool = False,
    position_dim: PositionDim = None,
    batch_size: int | None = None,
    keep_examples: bool = False,
    **options: Any,
) -> DataArray:
    """Returns the metric on the corrupted inputs with one clean value restored at a time.

    The values at `paths` are recorded in a run on the clean inputs. Then, for each path and position, the model runs on
    the corrupted inputs with the value of that path at that position replaced by the clean one.

    Args:
        pg: The graph.
        clean: The clean inputs: a tuple of arguments, a dict of keyword arguments, or one value. Or a dataset: with
            `batch_size`, the inputs of all examples, which are cut into batches along their first dimension, or a list
            of texts; without, a list or another iterable of such inputs, one for each batch.
        corrupted: Other inputs of the same shapes, such as with some tokens changed (for a dataset, in the same form);
            or `Noise`, for the clean inputs with noise added to a value.
        paths: The paths to restore, such as the outputs of all layers, in order; or heads: `layers[*].attn.heads[*].z`.
        positions: The positions to restore: a number or several; `None` (or `True`) for each position; `False` to
            restore all positions at once. Negative numbers count from the end. With two dimensions, `(batch, columns)`,
            they are those of each row of the batch: `[[3], [5], [2]]` restores another position in each row. `Noise`
            takes them, too.
        metric: Maps the output of the model to a number (see `LogitDifference` and others), or to a dict of numbers.
            For a dataset, there may be a list of metrics, one for each batch.
        window: The number of adjacent paths of the list that are restored at once, centered at the path of the cell.
            ROME uses 10 for the outputs of MLPs and attention. At the ends of the list, the window is smaller.
        normalize: Returns (value - corrupted) / (clean - corrupted): 0 if nothing is restored, 1 if everything is.
        position_dim: The sequence dimension of the values: one number for all paths, or a dict by path. Only needed for
            models without `input_ids` or `inputs_embeds`, and where it is ambiguous (an error says so).
        batch_size: How many examples of a dataset are one batch.
        keep_examples: Returns the results of all batches, along the dimension `example`, in place of their mean.
        **options: As for `pg.sweep`: `batch`, `progress`, `checkpoint`, `checkpoint_key`,
            `executor`, `recipe`. For a dataset, an executor runs batches.

    Returns:
        An array with the dimensions `path` (`layer` and `head` for components) and `position` (counted from the start,
        but as given for a dataset; the number of the column for positions by row). Its `attrs` contain `corrupted`, the
        metric with nothing restored (for `Noise`, the mean over samples), and `clean`, the metric on the clean inputs.
        For a dataset, it is the mean over the batches, weighted by their rows; the coordinates `low` and `high` are the
        ends of a confidence interval of 95% (bootstrap over batches: with `batch_size=1`, over examples).

    Raises:
        ExperimentError: Before the sweep: values differ in shape between clean and corrupted inputs, positions are out
            of range, or the metric cannot be normalized.
        UnknownPathError: A path does not exist. The message names the nearest ones.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Flatten())
        >>> clean, corrupted = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 0.0]])
        >>> pg = PatchableGraph(model, clean)
        >>> causal_trace(pg, clean, corrupted, ["sub_0.output"], None, torch.sum, position_dim=1).values
        array([[1., 2.]])

    Source:
        Meng et al., Locating and Editing Factual Associations in GPT, 2022.
    """
    check_graph(pg)
    if examples := OverExamples({"clean": clean, "corrupted": corrupted}, batch_size, keep_examples):
        return examples.run(  # type: ignore[no-any-return]
            pg, causal_trace, each={"metric": metric}, paths=paths, positions=positions, window=window,
            normalize=normalize, position_dim=position_dim, **options,
        )  # fmt: skip
    check_metric(metric)
    if type(window) is not int or window < 1:
        raise ExperimentError(f"window must be a positive number of paths, not {window!r}")
    names = several_paths(pg, paths)
    inputs = inputs_of(pg, clean)
    noise = corrupted if isinstance(corrupted, Noise) else None
    chosen = None if positions is False else True if positions is None else positions
    noisy_paths = [] if noise is None else [str(noise.path)]
    placed = [*noisy_paths, *(names if chosen is not None else ())]
    check_is_used(position_dim, is_used=bool(placed))
    dims = position_dims(pg, placed, position_dim)
    is_encoder = are_of_encoder(pg, dims)
    check_metric_position(pg, inputs, metric)
    check_generated(metric, has_positions=bool(placed))
    run = record(pg, inputs, [*names, *noisy_paths], metric)
    run.warn_if_random()
    values = {name: run.values[name] for name in names}
    parts = ValueParts(pg, values, chosen, {path: dims[path] for path in values if path in dims})
    check_ends(pg, inputs, chosen, is_encoder=is_encoder)
    axes, corruptions = parts.axes, []
    if noise is None:
        inputs = inputs_of(pg, corrupted)
        check_ends(pg, inputs, chosen, is_encoder=is_encoder)
        other = record(pg, inputs, names, metric)
        check_same_shapes(values, other.values)
        reference = other.measurement.values
    else:
        corruptions = _corruptions(pg, noise, run.values, dims)
        check_ends(pg, inputs, noise.positions, is_encoder=is_encoder)
        samples = {"sample": range(noise.samples)}
        noisy = run_sweep(pg, samples, corruptions.__getitem__, inputs, metric=metric, progress=False)
        reference, axes = np.asarray(_mean_of_samples(noisy).values), samples | axes
    restoring = _Restoring(list(axes), values, window, parts, corruptions)
    comparison = MetricRange(run.measurement.values, reference, normalize)
    return comparison.result_of(
        lambda: run_sweep(pg, axes, restoring, inputs, metric=metric, **options),
        lambda swept: _mean_of_samples(swept).assign_attrs(inputs_of(pg, clean).attrs(pg)),
    )


@dataclass(frozen=True)
class _Restoring:
    """Makes the patch map of a cell: a callable from its labels.

    Attributes:
        axes: The names of the axes, in the order of the labels.
        values: The clean values, by path.
        window: The number of adjacent paths that are restored at once.
        parts: The parts of values that are restored.
        corruptions: The patches that add noise, for each sample.
    """

    axes: list[str]
    values: Mapping[str, Tensor]
    window: int
    parts: ValueParts
    corruptions: Sequence[Mapping[str, AddPatch]]

    def __call__(self, *labels: Any) -> PatchMap:
        cell = dict(zip(self.axes, labels, strict=True))
        patches: dict[str, list[Patch[Any]]] = {}
        if self.corruptions:
            patches = {where: [patch] for where, patch in self.corruptions[cell["sample"]].items()}
        names = list(self.values)
        first = names.index(cell["path"]) - self.window // 2
        for name in names[max(0, first) : first + self.window]:
            where = self.parts.index(name, cell)
            # A copy, since pickling a view would send its whole storage to another process.
            patch = ReplacePatch(value=self.values[name][where].clone(), slice=where)
            patches[name] = [*patches.get(name, ()), patch]
        return patches


def _corruptions(
    pg: PatchableGraph, noise: Noise, values: Mapping[str, Tensor], dims: Mapping[str, int]
) -> list[dict[str, AddPatch]]:
    path = str(noise.path)
    cells = position_cells(pg, noise.positions, values, {path: dims[path]})
    index: list[Any] = [slice(None)] * values[path].ndim
    cells.place(index, path, cells.labels)
    return [{path: patch} for patch in noise.patches(values[path], tuple(index))]


def _mean_of_samples(swept: DataArray) -> DataArray:
    # A cell that failed for one draw must stay NaN.
    with np.errstate(invalid="ignore"):  # infinite metrics
        return swept.mean("sample", skipna=False, keep_attrs=True) if "sample" in swept.dims else swept
