"""The scores that are farthest from zero, of a result with one dimension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.grids import Numbers, Side, Wishes, numbers_of, sides_of
from graphpatch_notebook.experiments.plotted import checked
from graphpatch_notebook.experiments.ranking import ranked
from graphpatch_notebook.experiments.value_names import names_in

if TYPE_CHECKING:
    from xarray import DataArray


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


def bars_of(result: Any, top: int | None, wishes: Wishes, *, distinct: bool = True) -> Bars:
    """Returns the scores that are farthest from zero; with `distinct`, those of one value under several names once.

    Raises:
        ExperimentError: The result has other dimensions, or no finite number.
    """
    array = checked(result, 1, "; plot_heatmap(result) draws one with two")
    values, scale = numbers_of(array, wishes)
    ranks = ranked(values, *_labels(array)) if distinct else ranked(values, [(None,)] * len(values))
    if not ranks:
        raise ExperimentError(f"none of the {len(values):,} scores is finite")
    left_out = int((~np.isfinite(values)).sum())
    total = len(ranks) + left_out
    order = [rank.number for rank in ranks[:top]]
    (side,) = sides_of(array.isel({array.dims[0]: order}), None, wishes)
    remark = f"{len(order):,} of {total:,}" if len(order) < total else ""
    if left_out:
        remark += f", {left_out:,} without a finite number"
    return Bars(values[order], side, scale.name, remark)


def _labels(array: DataArray) -> tuple[list[tuple[Any, ...]], Mapping[str, str]]:
    """Returns what the scores are of, and the names of one value among these."""
    if "path" not in array.dims or "path" not in array.coords:
        return [(None,)] * array.size, {}
    return [(path,) for path in array.coords["path"].values.tolist()], names_in(array.attrs)
