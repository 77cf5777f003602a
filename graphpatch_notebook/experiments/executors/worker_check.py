"""Whether the model that another process, or thread, runs is the one that a sweep is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.execution.replay import tensors_in
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import Measurement
from graphpatch_notebook.patchable_graph import PatchableGraph

_SAMPLES = 64
# What other kernels, and other numbers of threads, may make of the same weights, relative to the largest number.
_TOLERANCE = 1e-4
_LOW_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Reference:
    """What a model gives on the inputs of a sweep, without patches.

    Metrics alone would not tell models apart: a probability may be next to nothing in both.

    Attributes:
        baseline: Of the metric.
        samples: Some numbers of each tensor of the output.
        tolerance: How far others may be off, relative to the largest number.
        is_training: Whether the model is in training mode.
    """

    baseline: Measurement
    samples: np.ndarray[Any, np.dtype[np.float64]]
    tolerance: float
    is_training: bool

    @classmethod
    def of(cls, pg: PatchableGraph, inputs: Inputs, baseline: Measurement) -> Reference:
        """Returns the reference of a graph."""
        fresh = inputs.fresh()
        with torch.no_grad():
            tensors = [t for t in tensors_in(pg(*fresh.args, **fresh.kwargs)) if t.is_floating_point()]
        samples = [_some(tensor) for tensor in tensors]
        is_low = any(tensor.dtype.itemsize < 4 for tensor in (*tensors, *pg.parameters()))
        return cls(
            baseline,
            np.concatenate([*samples, np.zeros(0)]),
            _LOW_TOLERANCE if is_low else _TOLERANCE,
            bool(pg.training),
        )

    def problem(self, other: Reference) -> str | None:
        """Returns in which way `other`, made elsewhere, is of another model, in words; `None` where it is of this."""
        if other.is_training != self.is_training:
            modes = {True: "training", False: "evaluation"}
            return f"it is in {modes[other.is_training]} mode, and in {modes[self.is_training]} mode here"
        metrics = f"{_shown(other.baseline.values)} there and {_shown(self.baseline.values)} here"
        # Where a metric subtracts, what is left may be as small as what rounding makes of the outputs.
        allowed = self.tolerance * max(_largest(self.samples), _largest(self.baseline.values))
        is_same_form = other.baseline.form == self.baseline.form
        if not is_same_form or not _is_close(self.baseline.values, other.baseline.values, allowed):
            return f"without patches the metric is {metrics}"
        if not _is_close(self.samples, other.samples, self.tolerance * _largest(self.samples)):
            return f"its outputs without patches are others than here (the metric is {metrics})"
        return None


def _largest(numbers: Any) -> float:
    return float(np.abs(numbers[np.isfinite(numbers)]).max(initial=1e-6))


def _is_close(mine: Any, theirs: Any, allowed: float) -> bool:
    return mine.shape == theirs.shape and bool(np.allclose(mine, theirs, rtol=0, atol=allowed, equal_nan=True))


def _some(tensor: Tensor) -> np.ndarray[Any, Any]:
    flat = tensor.detach().reshape(-1)
    indices = torch.linspace(0, max(flat.numel() - 1, 0), min(_SAMPLES, flat.numel())).long()
    return np.array(flat[indices.to(flat.device)].to("cpu").double().numpy())


def _shown(values: Any) -> str:
    numbers = values.reshape(-1).tolist()
    text = ", ".join(f"{number:.8g}" for number in numbers[:3])
    return text if len(numbers) == 1 else f"({text}{', ...' if len(numbers) > 3 else ''})"
