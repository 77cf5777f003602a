"""Shows results in notebooks: the door to the widget of the layer above."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from graphpatch_notebook.experiments.grids import Wishes, grid_of, is_upward

if TYPE_CHECKING:
    from xarray import DataArray

    from graphpatch_notebook.notebook.heatmap_widget import ResultHeatmap


def show_heatmap(
    result: DataArray,
    *,
    tokens: Sequence[str] | None = None,
    rows: str | None = None,
    origin: str | None = None,
    center: float | str | None = "auto",
    limits: tuple[float, float] | None = None,
    title: str | None = None,
    labels: Mapping[str, str] | None = None,
    relative_to: str | float | None = None,
) -> ResultHeatmap:
    """Returns a heatmap of a result for the notebook: to point at, to make larger, and to click.

    A click on a cell, or Enter, selects it: `selected` has its coordinates then. A second one gives it up. A notebook
    that is opened without a kernel shows a table instead; outside of notebooks there is a line of text (`plot_heatmap`
    draws figures anywhere). Of a result with more than 256 rows or columns a cell is the strongest of a block.

    Args:
        result: A `DataArray` of real numbers with two dimensions.
        tokens: As for `plot_heatmap`, and so are all that follow.
        rows: The dimension that goes down.
        origin: Whether the first row is the `"lower"` or the `"upper"` one.
        center: The number that has no colour.
        limits: What the first and the last colour stand for.
        title: The title.
        labels: What dimensions and numbers are called.
        relative_to: What to take off all numbers.

    Raises:
        ExperimentError: The result does not have two dimensions, or tokens or options do not fit it.

    Example:
        >>> import xarray
        >>> result = xarray.DataArray([[1.0, 2.0]], {"path": ["h_0"]}, ["path", "position"], name="effect")
        >>> heatmap = show_heatmap(result, tokens=["The", " cat"])
        >>> heatmap.observe(lambda change: print("selected", change["new"]), "selected")
        >>> heatmap.selected = ("h_0", 1)  # what a click does
        selected ('h_0', 1)
    """
    from graphpatch_notebook.notebook.heatmap_widget import ResultHeatmap

    grid = grid_of(result, Wishes(center, limits, labels, relative_to), tokens=tokens, rows=rows)
    return ResultHeatmap(grid, title, is_upward=is_upward(grid, origin))
