"""Directions of values: the difference between two kinds of examples, and a model that does not write along one."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.components import NoWeightError, tensors_written
from graphpatch_notebook.errors import ExperimentError, GraphError
from graphpatch_notebook.experiments.datasets.batches import exact_means
from graphpatch_notebook.experiments.datasets.store import ActivationStore, StoredValues
from graphpatch_notebook.experiments.engine.inputs import (
    Examples,
    check_graph,
    check_problems,
    found_or_problems,
    targets,
)
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import CustomPatch, Patch, ReplacePatch
from graphpatch_notebook.patches.slices import PositionSelection
from graphpatch_notebook.patching.model_state import runs_where_the_model_is
from graphpatch_notebook.values import TensorSpec

_Array: TypeAlias = "np.ndarray[Any, Any]"
Mask: TypeAlias = "np.ndarray[Any, Any] | Tensor | list[bool]"
"""Booleans: one for each example of a store, or one for each row."""

_WRITERS = re.compile(r"(.+\.)?layers(\[0\]\.resid_pre|\[\d+\]\.[a-z_]+\d*_out)")
_UNKNOWN = re.compile(r"(.+\.)?layers\[[^]]*\](\.[a-z_]+\d*_out)?")
_LEAST = 1e-5
"""A direction this much shorter than the longest one of several, apart from the others, is rounding."""


def direction(
    source: PatchableGraph | ActivationStore,
    positive: Examples | Mask,
    negative: Examples | Mask | None = None,
    paths: Any = None,
    *,
    positions: PositionSelection | None = None,
    batch_size: int | None = None,
) -> dict[str, Tensor]:
    """Returns the mean of each value on some examples minus its mean on others: the direction from these to those.

    Each row, one position of one example, counts once; padding does not count. Sums are taken in float64.

    Args:
        source: A graph, which runs on both datasets; or a store, of which some rows are read.
        positive: The examples that the direction leads to: a dataset as for `record_to`, such as a list of texts with
            `batch_size`. Of a store, a mask: one boolean for each example, or else for each row
            (`store.token == 7`).
        negative: The examples that it leads away from, likewise. Of a store, `None` for all other rows.
        paths: A path, a pattern, or several. By default, the stream after each layer, or all values of the store.
        positions: The positions to average over, such as -1 for the end of each example; `None` for all.
        batch_size: As of `record_to`.

    Returns:
        By path, a tensor of dtype float32: of shape (channels), say, which `AddPatch(value=...)` takes. Of a graph, on
        the device of the value, and with dimensions of size 1 in values in which positions come after heads, as from
        `mean_values`. Of a store, on the CPU.

    Raises:
        UnknownPathError: A path does not exist; nothing ran.
        ExperimentError: There are no rows on one side; a mask has another shape; or as from `record_to`.

    Example:
        >>> from graphpatch_notebook import AddPatch
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(1, 2))
        >>> found = direction(pg, [torch.tensor([[1.0, 2.0], [3.0, 2.0]])], [torch.zeros(1, 2)], "sub_0.output")
        >>> found
        {'sub_0.output': tensor([2., 2.])}
        >>> with pg.patch({"sub_0.output": AddPatch(value=0.5 * found["sub_0.output"])}):
        ...     pg(torch.zeros(1, 2))
        tensor([[1., 1.]])

    Sources:
        Rimsky et al., "Steering Llama 2 via contrastive activation addition" (2024); Arditi et al., "Refusal in
        language models is mediated by a single direction" (2024).
    """
    if isinstance(source, ActivationStore):
        stored = [source[path] for path in ([paths] if isinstance(paths, str) else paths or source)]
        of_store = {}
        for each in stored:
            rows = _chosen(source, each, positive, "positive")
            others = ~rows if negative is None else _chosen(source, each, negative, "negative")
            at = each.is_among(position=positions)
            of_store[each.path] = (_mean(each, rows & at, "positive") - _mean(each, others & at, "negative")).float()
        return of_store
    check_graph(source)
    if negative is None:
        raise ExperimentError("give negative=, the examples that the direction leads away from")
    wanted: Any = "layers[*].resid_post" if paths is None else paths
    to, away = (
        exact_means(source, wanted, each, positions=positions, batch_size=batch_size) for each in (positive, negative)
    )
    devices = {path: _device(target) for path, target in targets(source, to).items()}
    return {path: (mean - away[path][0]).to(devices[path], torch.float32) for path, (mean, _) in to.items()}


def _device(target: Target) -> torch.device:
    """Returns the device that a value was on, if it is a real one."""
    device = target.spec.device if isinstance(target.spec, TensorSpec) else torch.device("cpu")
    return torch.device("cpu") if device.type == "meta" else device


def _chosen(store: ActivationStore, stored: StoredValues, mask: Any, what: str) -> _Array:
    """Returns which rows of a value a mask of examples, or of rows, has."""
    given: _Array = np.asarray(mask.cpu() if isinstance(mask, Tensor) else mask)
    if given.dtype != bool or given.shape not in ((store.examples,), (len(stored),)):
        raise ExperimentError(
            f"{what}, of shape {given.shape} ({given.dtype}), must be one boolean for each of the {store.examples} "
            f"examples, or for each of the {len(stored)} rows of {stored.path!r}: labels == 1, store.token == 7"
        )
    return given[stored.example] if len(given) == store.examples else given


def _mean(stored: StoredValues, chosen: _Array, what: str) -> Tensor:
    if not chosen.any():
        raise ExperimentError(f"no row of {stored.path!r} is {what} (at these positions)")
    total, start = torch.zeros(stored.shape[1:], dtype=torch.float64), 0
    for chunk in stored.chunks():
        total += chunk[torch.from_numpy(chosen[start : start + len(chunk)])].double().sum(0)
        start += len(chunk)
    return total / int(chosen.sum())


# -- removal -----------------------------------------------------------------------------------------------------------


@runs_where_the_model_is
def project_out(
    pg: PatchableGraph, direction: Tensor, paths: Any = None, *, weights: bool = False, **options: Any
) -> dict[str, Patch[Any]]:
    """Returns patches that remove a direction from values: a patch map for `pg.patch` or `pg.edit`.

    By default, from all that is written to the residual stream: its start, and what each layer adds. Then the stream
    has nothing along the direction, unless the model normalizes it after an addition (as BERT does): project out of
    `"layers[*].resid_*"` there.

    Args:
        pg: The graph.
        direction: Of shape (channels), of any length; or several of shape (directions, channels), whose span is
            removed.
        paths: A path, a pattern or several, of values whose last dimension, or channels by their component, has that
            size; `None` for all that is written to the stream.
        weights: Whether to replace weights instead: the matrices, biases and tables that what is written is a linear
            function of. The numbers are the same, up to rounding, and the forward costs nothing more. The patches hold
            edited copies of these weights, which `save_patches` can write.
        **options: Fields of the patches: `positions`, `steps`. Not with `weights`.

    Raises:
        UnknownPathError: A path does not exist.
        ExperimentError: The direction is zero, or does not have the channels of a value; not all that is written to the
            stream is known; with `weights`, a value is not a linear function of weights, such as behind a norm or of
            experts, or these are quantized. The message names each path.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> x, direction = torch.randn(1, 5, 8), torch.randn(8)
        >>> pg = PatchableGraph(model, x)
        >>> with torch.no_grad(), pg.patch(project_out(pg, direction)):
        ...     print((pg(x) @ direction).abs().max() < 1e-4)
        tensor(True)
        >>> list(project_out(pg, direction, "layers[1].mlp_out", weights=True))
        ['layers_1.linear2.weight', 'layers_1.linear2.bias']

    Source:
        Arditi et al., "Refusal in language models is mediated by a single direction" (2024).
    """
    check_graph(pg)
    basis = _basis(direction)
    if weights and options:
        raise ExperimentError(f"weights have no {', '.join(options)}: leave it out, or leave out weights=")
    found = targets(pg, _writers(pg) if paths is None else [paths] if isinstance(paths, str) else paths)
    dims, problems = found_or_problems(found, lambda _, target: _channels(target, basis.shape[1]))
    check_problems(problems, "the direction cannot be projected out:")
    if not weights:
        return {
            path: CustomPatch(
                partial(_without, basis.to(_device(found[path])), dim), requires_clone=False, by_row=True, **options
            )
            for path, dim in dims.items()
        }
    captured(pg).check_weights()
    tensors, problems = found_or_problems(found, lambda _, target: _tensors(pg, target))
    check_problems(problems, "no weights alone make these; project out of the values there (weights=False):")
    return {
        path: ReplacePatch(value=_without(basis, dim, weight.detach()))
        for each in tensors.values()
        for path, (weight, dim) in each.items()
    }


def _basis(direction: Tensor) -> Tensor:
    """Returns orthonormal rows with the span of one direction, or of several."""
    given = torch.as_tensor(direction).detach().cpu().double()
    rows = given[None] if given.dim() == 1 else given
    if rows.dim() != 2 or not rows.isfinite().all() or not rows.any():
        raise ExperimentError(
            f"direction, of shape {tuple(given.shape)}, must be finite and not zero, of shape (channels) or "
            "(directions, channels)"
        )
    _, lengths, axes = torch.linalg.svd(rows, full_matrices=False)
    basis: Tensor = axes[lengths > _LEAST * lengths[0]]
    return basis


def _without(basis: Tensor, dim: int, value: Tensor) -> Tensor:
    """Returns a value without what it has in the span of a basis, along one of its dimensions."""
    wide = value.movedim(dim, -1).to(torch.promote_types(value.dtype, torch.float32))
    axes = basis.to(wide)
    return (wide - (wide @ axes.T) @ axes).movedim(-1, dim).to(value.dtype)


def _writers(pg: PatchableGraph) -> list[str]:
    """Returns the components that make up the stream: its start, and what each layer adds."""
    components = pg.components
    unknown = {name: why for name, why in components.missing.items() if _UNKNOWN.fullmatch(name)}
    check_problems(unknown, "not all that is written to the stream is known; give paths=:")
    return [name for name in components if _WRITERS.fullmatch(name)]


def _channels(target: Target, size: int) -> int:
    """Returns the dimension of a value that a direction of this size is along, from the end."""
    shape = target.spec.shape if isinstance(target.spec, TensorSpec) else ()
    axes = () if target.component is None else [target.component.axes[dim] for dim in target.kept_dims]
    dim = axes.index("channel") if "channel" in axes else len(shape) - 1
    if not shape or shape[dim] != size:
        raise ValueError(f"the direction has {size} channels, and the value the shape {tuple(shape)}")
    return dim - len(shape)


def _tensors(pg: PatchableGraph, target: Target) -> dict[str, tuple[Tensor, int]]:
    try:
        return tensors_written(captured(pg).root, target.text)
    except (NoWeightError, GraphError) as problem:
        raise ValueError(str(problem)) from None
