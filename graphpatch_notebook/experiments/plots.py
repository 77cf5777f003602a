"""Pictures of results with matplotlib: heatmaps, head grids, and the bars of the highest scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments import bar_axes, heat_axes
from graphpatch_notebook.experiments.bars import bars_of
from graphpatch_notebook.experiments.figures import new_axes, new_table, require_matplotlib
from graphpatch_notebook.experiments.grids import Grid, Side, Wishes, facets_of, grid_of, is_upward
from graphpatch_notebook.experiments.plotted import checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from xarray import DataArray

_FOR_HEADS = "; for an array of paths and heads at several positions there is plot_heads(result, facet='position')"
_ACROSS = 4
"""How many grids stand side by side."""


def plot_heatmap(
    result: DataArray,
    *,
    tokens: Sequence[str] | None = None,
    ax: Axes | None = None,
    rows: str | None = None,
    origin: str | None = None,
    center: float | str | None = "auto",
    limits: tuple[float, float] | None = None,
    colormap: str | Colormap | None = None,
    title: str | None = None,
    labels: Mapping[str, str] | None = None,
    relative_to: str | float | None = None,
    colorbar: bool = True,
) -> Axes:
    """Returns the axes of a heatmap of a result with two dimensions, such as `("path", "position")`.

    Nothing is shown: notebooks show the figure at the end of the cell; elsewhere `save_figure(axes, file)` saves it.
    The settings of matplotlib stay as they are.

    Args:
        result: A `DataArray` of real numbers. Cells without a finite number (failed ones, ones that were not run) are
            hatched.
        tokens: Texts of the tokens: one for each position of the result, or those of the whole sequence. They become
            the ticks, with spaces and what cannot be seen made visible.
        ax: Where to draw; without, a new figure of a fitting size.
        rows: The dimension that goes down; the first, if none is given. `rows="position"` draws as ROME does: tokens
            down, layers to the right.
        origin: Whether the first row is the `"lower"` or the `"upper"` one. If nothing is given, layers go up, and
            tokens down.
        center: The number that has no colour, colours diverging from it. `"auto"`: what the metric gives where nothing
            is patched or restored (the attribute `baseline` of the result), zero for attribution scores and for
            numbers on both sides of it; `None`: none, colours go from the least to the greatest number.
        limits: What the first and the last colour stand for; the least and the greatest number, if nothing is given.
            Around a centre, colours always reach as far on both sides.
        colormap: A colormap of matplotlib; without, one that is safe for the colour-blind.
        title: The title.
        labels: What dimensions are called, `{"path": "layer"}`, and, under the result's own name, the numbers.
        relative_to: What to take off all numbers: one, or the name of an attribute: `"corrupted"`, `"baseline"`. Not
            `plot_heatmap(result - result.corrupted)`: a difference may keep the attributes, and with them the number
            that has no colour.
        colorbar: Whether there is a colour bar.

    Raises:
        ExperimentError: The result does not have two dimensions, tokens or options do not fit it (the message says
            how to mend it), or matplotlib is missing.

    Example:
        >>> import xarray
        >>> paths = ["transformer.h_0.mlp.output", "transformer.h_1.mlp.output"]
        >>> result = xarray.DataArray([[0.1, 0.5], [0.3, 0.2]], {"path": paths}, ["path", "position"], name="logit")
        >>> axes = plot_heatmap(result, tokens=["The", " cat"])
        >>> [tick.get_text() for tick in axes.get_xticklabels()], [tick.get_text() for tick in axes.get_yticklabels()]
        (['The', '␣cat'], ['h_0', 'h_1'])

    Source:
        Meng et al., Locating and Editing Factual Associations in GPT (ROME), 2022, for the form of the picture.
    """
    wishes = Wishes(center, limits, labels, relative_to)
    grid = grid_of(result, wishes, tokens=tokens, rows=rows, instead=_FOR_HEADS)
    return _drawn(grid, ax, colormap, origin, title, colorbar=colorbar)


def plot_heads(
    result: DataArray,
    *,
    facet: str | None = None,
    tokens: Sequence[str] | None = None,
    ax: Axes | None = None,
    origin: str | None = None,
    center: float | str | None = "auto",
    limits: tuple[float, float] | None = None,
    colormap: str | Colormap | None = None,
    title: str | None = None,
    labels: Mapping[str, str] | None = None,
    relative_to: str | float | None = None,
) -> Any:
    """Returns the axes of a picture of attention heads: a cell for each layer and head.

    Args:
        result: A `DataArray` with a dimension `"head"` and one of paths or layers; with `facet`, a third one.
        facet: The dimension for each coordinate of which there is a grid, all in the same colours; such as
            `"position"`.
        tokens: Texts of the tokens, as titles of the grids of positions: as for `plot_heatmap`.
        ax: Where to draw, without `facet`.
        origin: As for `plot_heatmap`, and so are all that follow.
        center: The number that has no colour.
        limits: What the first and the last colour stand for.
        colormap: A colormap of matplotlib.
        title: The title.
        labels: What dimensions and numbers are called.
        relative_to: What to take off all numbers.

    Returns:
        The axes; with `facet`, an array of them, one for each coordinate.

    Raises:
        ExperimentError: The result does not have these dimensions; or as for `plot_heatmap`.

    Example:
        >>> import numpy, xarray
        >>> result = xarray.DataArray(numpy.eye(4), dims=["layer", "head"], name="effect")
        >>> plot_heads(result).get_xlabel()
        'head'
    """
    array = checked(result, 2 if facet is None else 3, "" if facet is not None else "; or give facet=, a dimension")
    if "head" not in array.dims:
        raise ExperimentError(f"heads stand along a dimension 'head'; the result has {', '.join(map(str, array.dims))}")
    wishes = Wishes(center, limits, labels, relative_to)
    if facet is None:
        grid = grid_of(array.transpose(..., "head"), wishes, tokens=tokens)
        return _drawn(grid, ax, colormap, origin, title, colorbar=True)
    if ax is not None:
        raise ExperimentError("with facet= there are several axes: leave ax= out")
    parts, side = facets_of(array, wishes, facet, tokens)
    return _drawn_facets(parts, side, colormap, origin, title)


def plot_scores(
    result: DataArray,
    *,
    top: int | None = 20,
    distinct: bool = True,
    ax: Axes | None = None,
    title: str | None = None,
    labels: Mapping[str, str] | None = None,
    relative_to: str | float | None = None,
) -> Axes:
    """Returns the axes of a picture of the scores that are farthest from zero, as bars, the farthest on top.

    Args:
        result: A `DataArray` with one dimension, such as what `attribute` gives for each path.
        top: How many to draw; `None`: all.
        distinct: Whether names of one value with one score take one bar, as for `top_scores`.
        ax: Where to draw; without, a new figure.
        title: The title.
        labels: What the dimension and the numbers are called.
        relative_to: What to take off all numbers: one, or the name of an attribute: `"corrupted"`, `"baseline"`.

    Raises:
        ExperimentError: The result has other dimensions or no finite number; the message says how to mend it.

    Example:
        >>> import xarray
        >>> result = xarray.DataArray([0.1, -0.7, 0.3], {"path": ["a.output", "b.output", "c.output"]}, ["path"])
        >>> [tick.get_text() for tick in plot_scores(result, top=2).get_yticklabels()]
        ['b', 'c']
    """
    count: Any = top
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ExperimentError(f"top={top!r} must be a number of bars, or None for all")
    bars = bars_of(result, top, Wishes(0.0, None, labels, relative_to), distinct=distinct)
    require_matplotlib()
    axes = ax if ax is not None else new_axes(*bar_axes.figure_size(bars))
    bar_axes.draw_bars(axes, bars, title)
    return axes


def _drawn(
    grid: Grid, ax: Axes | None, colormap: Any, origin: str | None, title: str | None, *, colorbar: bool
) -> Axes:
    require_matplotlib()
    upward = is_upward(grid, origin)
    layout = heat_axes.Layout.of_grid(grid)
    axes = ax if ax is not None else new_axes(*layout.figure)
    cells = heat_axes.draw_cells(axes, grid, colormap, is_upward=upward)
    if ax is not None:
        layout = heat_axes.Layout.of_axes(axes, grid)
    if colorbar:
        heat_axes.draw_colour_bar(axes, cells, [grid], layout.cell[1] * len(grid.values))
    heat_axes.draw_ticks(axes, grid, layout.cell)
    has_marks = heat_axes.draw_marks(axes, grid, layout.cell)
    heat_axes.draw_legend(axes, grid, title, has_marks=has_marks)
    return axes


def _drawn_facets(parts: Sequence[Grid], side: Side, colormap: Any, origin: str | None, title: str | None) -> Any:
    require_matplotlib()
    upward = is_upward(parts[0], origin)
    across = min(len(parts), _ACROSS)
    shape = (math.ceil(len(parts) / across), across)
    layout = heat_axes.Layout.of_grid(parts[0], shape)
    table = new_table(*layout.figure, shape)
    axes = table.flat[: len(parts)]
    marked = []
    for number, (one, grid) in enumerate(zip(axes, parts, strict=True)):
        cells = heat_axes.draw_cells(one, grid, colormap, is_upward=upward)
        heat_axes.draw_ticks(one, grid, layout.cell)
        marked.append(heat_axes.draw_marks(one, grid, layout.cell))
        is_bottom = number + across >= len(parts)
        heat_axes.name_facet(one, side, number, is_left=number % across == 0, is_bottom=is_bottom)
    for empty in table.flat[len(parts) :]:
        empty.remove()
    heat_axes.draw_colour_bar(axes, cells, parts, layout.figure[1] - 0.6)
    heat_axes.draw_figure_legend(axes[0].figure, parts, title, has_marks=any(marked))
    return axes
