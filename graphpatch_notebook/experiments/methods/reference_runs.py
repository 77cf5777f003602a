"""The values that some nodes have in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.checks.model_state import SharedRandomState
from graphpatch_notebook.errors import ExperimentError, ExperimentWarning, SweepInterrupted
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import Measurement, baseline_of, measurement
from graphpatch_notebook.experiments.engine.random_draws import draws_from_python
from graphpatch_notebook.experiments.methods.arguments import check_inputs
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import ProbePatch
from graphpatch_notebook.warning_places import warn_each_time

if TYPE_CHECKING:
    from xarray import DataArray


@dataclass(frozen=True)
class Recording:
    """What one run without patches gave.

    Attributes:
        values: The values of some paths: the model's own tensors, detached.
        measurement: What the metric gave.
        drawn: Of which generators the model drew random numbers.
    """

    values: Mapping[str, Tensor]
    measurement: Measurement
    drawn: Sequence[str] = ()

    def warn_if_random(self, pg: PatchableGraph) -> None:
        """Warns where the run, and so each later one, drew random numbers of its own."""
        if self.drawn:
            repair = "; call pg.eval() first" if pg.training else ""
            warn_each_time(
                f"the model draws random numbers (of {' and '.join(self.drawn)}), others in each run: what is compared "
                f"here differs by these, too{repair}",
                ExperimentWarning,
            )


def record(
    pg: PatchableGraph, inputs: Inputs, paths: Iterable[str], metric: Callable[[Any], Any] | None = None
) -> Recording:
    """Runs the model once, without gradients, and returns the values at `paths` and what the metric gives.

    Raises:
        ExperimentError: A value is no tensor.
        PatchNotFiredError: A path did not come up.
    """
    check_inputs(pg, inputs)
    probes: dict[str | NodePath, ProbePatch] = {path: ProbePatch() for path in paths}
    with torch.no_grad(), pg.patch(probes, strict=True):
        state = SharedRandomState()
        output = inputs.run(pg)
        after = SharedRandomState()
        given = measurement(0.0) if metric is None else baseline_of(metric, output)
    drawn = state.differing(after)
    if "Python" in drawn and not draws_from_python(lambda: inputs.run(pg), captured(pg).module):
        drawn.remove("Python")
    values = {}
    for path, probe in probes.items():
        value = probe.activation
        if not isinstance(value, Tensor):
            raise ExperimentError(f"{str(path)!r} holds {value!r}, which is no tensor: give paths of tensors")
        values[str(path)] = value.detach()
    return Recording(values, given, drawn)


Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


@dataclass(frozen=True)
class Comparison:
    """What the metric gives in the two runs.

    Args:
        clean: On the clean inputs.
        corrupted: On the corrupted ones.
        normalize: Whether results are told as shares of the way from `corrupted` (0) to `clean` (1).

    Raises:
        ExperimentError: There is no such way.
    """

    clean: Array
    corrupted: Array
    normalize: bool

    def __post_init__(self) -> None:
        with np.errstate(invalid="ignore"):  # of infinite numbers
            way = self.clean - self.corrupted
        if self.normalize and (not np.all(np.isfinite(way)) or np.any(way == 0)):
            raise ExperimentError(
                f"there is nothing to normalize by: the metric is {self.clean.tolist()} on the clean inputs and "
                f"{self.corrupted.tolist()} on the corrupted ones; leave normalize out, or change the inputs"
            )

    def result_of(self, run: Callable[[], DataArray], form: Callable[[DataArray], DataArray]) -> DataArray:
        """Returns what a sweep gives, with the numbers of the two runs in its `attrs`.

        Args:
            run: Does the sweep. If it is interrupted, what is done gets the same form.
            form: Takes away dimensions that nobody asked for, and keeps the `attrs`.
        """
        try:
            swept = run()
        except SweepInterrupted as stopped:
            stopped.result = self._finished(form(stopped.result))
            raise
        return self._finished(form(swept))

    def _finished(self, result: DataArray) -> DataArray:
        attrs, baseline = result.attrs, self.corrupted
        if self.normalize:
            result = (result - self.corrupted) / (self.clean - self.corrupted)
            result.name = f"{result.name}, normalized"
            baseline = np.zeros_like(baseline)
        ends = {"clean": self.clean, "corrupted": self.corrupted, "baseline": baseline}
        result.attrs = attrs | {name: numbers.tolist() for name, numbers in ends.items()}
        return result
