"""The scores that are farthest from zero, of a result with one dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.grids import Numbers, Side, Wishes, numbers_of, sides_of
from graphpatch_notebook.experiments.plotted import checked


@dataclass(frozen=True)
class Bars:
    """The bars, the highest on top.

    Attributes:
        values: Of shape (bars,).
        side: What they are of.
        name: What the numbers are.
        remark: What is not drawn, in words; empty, if all is.
    """

    values: Numbers
    side: Side
    name: str
    remark: str


def bars_of(result: Any, top: int | None, wishes: Wishes) -> Bars:
    """Returns the scores that are farthest from zero.

    Raises:
        ExperimentError: The result has other dimensions, or no finite number.
    """
    array = checked(result, 1, "; plot_heatmap(result) draws one with two")
    values, scale = numbers_of(array, wishes)
    order = np.argsort(-np.abs(values), kind="stable")[: int(np.isfinite(values).sum())]
    if not len(order):
        raise ExperimentError(f"none of the {len(values):,} scores is finite")
    left_out = len(values) - len(order)
    order = order[:top]
    (side,) = sides_of(array.isel({array.dims[0]: order}), None, wishes)
    remark = f"{len(order):,} of {len(values):,}" if len(order) < len(values) else ""
    if left_out:
        remark += f", {left_out:,} without a finite number"
    return Bars(values[order], side, scale.name, remark)
