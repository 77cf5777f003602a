"""Experiments between two runs: on clean inputs, and on corrupted ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from graphpatch_notebook.errors import ExperimentError, SweepInterrupted

if TYPE_CHECKING:
    from xarray import DataArray

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
