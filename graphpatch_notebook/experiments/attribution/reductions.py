"""From gradients to scores: the metric is differentiated once, for all values that a run has noted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.attribution.gradient_run import Differences, GradientRun

Scores = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Kept:
    """The dimensions of a value whose entries get scores of their own; heads come first in these.

    Attributes:
        position: The one that runs along the sequence.
        heads: The one that heads lie in, each in as many entries.
        count: How many heads there are.
    """

    position: int | None = None
    heads: int | None = None
    count: int = 1

    def summed(self, product: Tensor) -> Tensor:
        """Returns the sums of a tensor over what is not kept."""
        kept = [] if self.position is None else [self.position]
        if self.heads is not None:
            product = product.unflatten(self.heads, (self.count, -1))
            kept = [self.heads, *(dim + (dim > self.heads) for dim in kept)]
        others = [dim for dim in range(product.dim()) if dim not in kept]
        sums = product.sum(others) if others else product
        return sums.T if kept != sorted(kept) else sums


Part = tuple[int, Kept | None]
"""The number of a slot, and what of its value is kept."""

_UNREACHED = (
    "no gradient reaches it: the metric does not depend on it, or not in a way that can be differentiated, or the "
    "model writes into a tensor of which it is a view"
)


def scores_of(
    metric: Tensor, run: GradientRun, differences: Differences, kept: Mapping[str, Kept], problems: dict[str, str]
) -> dict[str, Scores]:
    """Returns the scores of one run by path, for its gradients alone; adds to `problems` what has none."""
    wanted = {path: slots for path, slots in run.by_path.items() if path not in differences.problems}
    parts = dict.fromkeys(
        (slot, kept.get(path)) for path, slots in wanted.items() for slot in slots if slot is not None
    )
    by_part = _by_part(metric, run, differences, parts)
    scores: dict[str, Scores] = {}
    for path, slots in wanted.items():
        found = []
        for slot, number in zip(slots, differences.by_path[path], strict=True):
            if number is None:
                found.append(np.zeros(()))
            elif slot is None or (score := by_part[slot, kept.get(path)]) is None:
                problems[path] = _UNREACHED
            else:
                found.append(score)
        if path not in problems:
            scores[path] = found[0] if len(found) == 1 else np.sum(np.broadcast_arrays(*found), axis=0)
    return scores


def _by_part(
    metric: Tensor, run: GradientRun, differences: Differences, parts: Iterable[Part]
) -> dict[Part, Scores | None]:
    """Returns the score of each part; `None` for one that differs between the runs, but has no gradient."""
    if not run.edges:
        return {}
    gradients = _gradients(metric, run)
    tensors: dict[Part, Tensor | None] = {}
    known: dict[Any, Tensor] = {}  # names of one tensor often have one gradient, too
    for slot, kept in parts:
        number, gradient = run.slots[slot], gradients[slot]
        difference = differences.tensors[number]
        if gradient is None:
            tensors[slot, kept] = None if bool(difference.any()) else difference.new_zeros(())
            continue
        key = (number, kept, gradient.data_ptr(), gradient.stride())
        if key not in known:
            known[key] = _reduced(difference, gradient, kept, differences.is_careful)
        tensors[slot, kept] = known[key]
    return _as_arrays(tensors)


def _gradients(metric: Tensor, run: GradientRun) -> list[Tensor | None]:
    try:
        return list(torch.autograd.grad(metric, run.edges, allow_unused=True))
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ExperimentError(f"the gradients of the metric cannot be computed: {error}") from error


def _reduced(difference: Tensor, gradient: Tensor, kept: Kept | None, is_careful: bool) -> Tensor:
    gradient = gradient.to(difference.dtype)
    if kept is None and not is_careful:
        return torch.dot(difference.reshape(-1), gradient.reshape(-1))
    product = difference * gradient
    if is_careful:  # infinite differences that do not matter, and infinite gradients of what does not differ
        product = torch.where((difference == 0) | (gradient == 0), 0, product)
    return product.sum() if kept is None else kept.summed(product)


def _as_arrays(tensors: Mapping[Part, Tensor | None]) -> dict[Part, Scores | None]:
    """Returns the numbers of all tensors: one transfer for each device."""
    arrays: dict[Part, Scores | None] = dict.fromkeys(tensors)
    by_device: dict[torch.device, list[Part]] = {}
    for part, tensor in tensors.items():
        if tensor is not None:
            by_device.setdefault(tensor.device, []).append(part)
    for parts in by_device.values():
        present = [tensor for part in parts if (tensor := tensors[part]) is not None]
        flat = torch.cat([tensor.reshape(-1) for tensor in present]).to("cpu").double().numpy()
        end = 0
        for part, tensor in zip(parts, present, strict=True):
            start, end = end, end + tensor.numel()
            arrays[part] = flat[start:end].reshape(tuple(tensor.shape))
    return arrays
