"""Pictures of results: heatmaps, grids of heads, and bars with matplotlib; heatmaps to click in notebooks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.attribution.ranking import ranked
from graphpatch_notebook.experiments.attribution.value_names import names_in
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.experiments.plotting import drawing
from graphpatch_notebook.experiments.plotting.grids import (
    Grid,
    Side,
    Wishes,
    facets_of,
    grid_of,
    is_upward,
    numbers_of,
    sides_of,
)
from graphpatch_notebook.experiments.plotting.plotted import checked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from xarray import DataArray

    from graphpatch_notebook.notebook.display.heatmap import ResultHeatmap

_FOR_HEADS = "; for an array of paths and heads at several positions there is plot_heads(result, facet='position')"
_ACROSS = 4
"""How many grids stand side by side."""
_FOR_PAPER: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "path"}
"""TrueType in PDF and PostScript, as journals refuse Type 3; outlines in SVG, which look the same anywhere."""


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
    array = checked(result, 1, "; plot_heatmap(result) draws one with two")
    wishes = Wishes(0.0, None, labels, relative_to)
    values, scale = numbers_of(array, wishes)
    has_paths = distinct and "path" in array.coords and array.dims == ("path",)
    names = [(path,) for path in array.coords["path"].values.tolist()] if has_paths else [(None,)] * array.size
    ranks = ranked(values, names, names_in(array.attrs) if has_paths else {})
    if not ranks:
        raise ExperimentError(f"none of the {len(values):,} scores is finite")
    order = [rank.number for rank in ranks[:top]]
    (side,) = sides_of(array.isel({array.dims[0]: order}), None, wishes)
    left_out = int(np.isnan(values).sum())
    total = len(ranks) + left_out
    remark = f" ({len(order):,} of {total:,}" if len(order) < total else ""
    remark += f", {left_out:,} without a finite number" if left_out else ""
    axes, size = _axes_for([side], ax)
    drawing.draw_bars(axes, values[order], side, size, (scale.name, side.title + (f"{remark})" if remark else "")))
    if title is not None:
        axes.set_title(title, loc="left")
    return axes


def save_figure(drawn: Any, file: str | os.PathLike[str], *, dpi: int = 300) -> None:
    """Saves the figure that something was drawn in, for paper: fonts embedded, and no label cut off.

    Args:
        drawn: What a plot gave: axes, an array of axes; or a figure.
        file: The file; its suffix says the format: .pdf, .svg, .png, .eps...
        dpi: Dots per inch, where the format has dots.

    Raises:
        ExperimentError: `drawn` is none of these, or matplotlib knows no such format.

    Example:
        >>> import tempfile, xarray
        >>> from graphpatch_notebook.experiments import plot_heatmap
        >>> axes = plot_heatmap(xarray.DataArray([[1.0, 2.0]], dims=["path", "position"]))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_figure(axes, f"{folder}/trace.pdf")
    """
    extra("matplotlib.pyplot", "a plot")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    first = drawn.flat[0] if hasattr(drawn, "flat") else drawn
    figure = first if isinstance(first, Figure) else getattr(first, "figure", None)
    if figure is None:
        raise ExperimentError(f"a figure or what a plot gave is saved, not {type(drawn).__name__}")
    name = os.fspath(file)
    known = figure.canvas.get_supported_filetypes()
    suffix = Path(name).suffix.lstrip(".").lower()
    if suffix not in known:
        raise ExperimentError(f"{name!r} must end with a format of matplotlib: {', '.join(f'.{end}' for end in known)}")
    with rc_context(_FOR_PAPER):
        figure.savefig(name, dpi=dpi, bbox_inches="tight", pad_inches=0.03)


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
    from graphpatch_notebook.notebook.display.heatmap import ResultHeatmap

    grid = grid_of(result, Wishes(center, limits, labels, relative_to), tokens=tokens, rows=rows)
    return ResultHeatmap(grid, title, is_upward=is_upward(grid, origin))


def _axes_for(sides: Sequence[Side], ax: Axes | None) -> tuple[Axes, tuple[float, float]]:
    """Returns where to draw, given or new, and how many inches wide and high it is."""
    if ax is not None:
        return ax, drawing.size_of(ax)
    table, size = drawing.new_axes(sides)
    return table[0, 0], size


def _drawn(
    grid: Grid, ax: Axes | None, colormap: Any, origin: str | None, title: str | None, *, colorbar: bool
) -> Axes:
    upward = is_upward(grid, origin)
    axes, size = _axes_for([grid.rows, grid.columns], ax)
    cells = drawing.draw_grid(axes, grid, size, colormap, is_upward=upward)
    if colorbar:
        drawing.draw_color_bar(axes, cells, grid.scale)
    drawing.draw_legend(axes, grid.scale, {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)})
    if title is not None:
        axes.set_title(title, loc="left", pad=None if grid.scale.missing is None else 20.0)
    return axes


def _drawn_facets(parts: Sequence[Grid], side: Side, colormap: Any, origin: str | None, title: str | None) -> Any:
    upward = is_upward(parts[0], origin)
    across = min(len(parts), _ACROSS)
    table, size = drawing.new_axes([parts[0].rows, parts[0].columns], (math.ceil(len(parts) / across), across))
    axes = table.flat[: len(parts)]
    for number, (ax, grid) in enumerate(zip(axes, parts, strict=True)):
        cells = drawing.draw_grid(ax, grid, size, colormap, is_upward=upward)
        is_bottom = number + across >= len(parts)
        drawing.name_facet(ax, side, number, is_left=number % across == 0, is_bottom=is_bottom)
    for empty in table.flat[len(parts) :]:
        empty.remove()
    drawing.draw_color_bar(axes, cells, parts[0].scale)
    drawing.draw_legend(axes[0].figure, parts[0].scale, {"loc": "outside lower right"})
    if title is not None:
        axes[0].figure.suptitle(title)
    return axes
