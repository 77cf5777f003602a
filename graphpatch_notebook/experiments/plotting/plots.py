"""Pictures of results: heatmaps, grids of heads, and bars with matplotlib; heatmaps to click in notebooks."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.attribution.ranking import names_in, ranked
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.experiments.plotting.grids import (
    Grid,
    Scale,
    Side,
    Wishes,
    checked,
    facets_of,
    grid_of,
    is_upward,
    numbers_of,
    sides_of,
)
from graphpatch_notebook.experiments.plotting.labels import glyphs_of_font, shown_labels

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
    draw_bars(axes, values[order], side, size, (scale.name, side.title + (f"{remark})" if remark else "")))
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
        return ax, size_of(ax)
    table, size = new_axes(sides)
    return table[0, 0], size


def _drawn(
    grid: Grid, ax: Axes | None, colormap: Any, origin: str | None, title: str | None, *, colorbar: bool
) -> Axes:
    upward = is_upward(grid, origin)
    axes, size = _axes_for([grid.rows, grid.columns], ax)
    cells = draw_grid(axes, grid, size, colormap, is_upward=upward)
    if colorbar:
        draw_color_bar(axes, cells, grid.scale)
    draw_legend(axes, grid.scale, {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)})
    if title is not None:
        axes.set_title(title, loc="left", pad=None if grid.scale.missing is None else 20.0)
    return axes


def _drawn_facets(parts: Sequence[Grid], side: Side, colormap: Any, origin: str | None, title: str | None) -> Any:
    upward = is_upward(parts[0], origin)
    across = min(len(parts), _ACROSS)
    table, size = new_axes([parts[0].rows, parts[0].columns], (math.ceil(len(parts) / across), across))
    axes = table.flat[: len(parts)]
    for number, (ax, grid) in enumerate(zip(axes, parts, strict=True)):
        cells = draw_grid(ax, grid, size, colormap, is_upward=upward)
        is_bottom = number + across >= len(parts)
        name_facet(ax, side, number, is_left=number % across == 0, is_bottom=is_bottom)
    for empty in table.flat[len(parts) :]:
        empty.remove()
    draw_color_bar(axes, cells, parts[0].scale)
    draw_legend(axes[0].figure, parts[0].scale, {"loc": "outside lower right"})
    if title is not None:
        axes[0].figure.suptitle(title)
    return axes


_DIVERGING, _SEQUENTIAL = "RdBu_r", "Purples"
"""Both are safe for the color-blind."""
_POSITIVE, _NEGATIVE = "#b2182b", "#4393c3"
"""The two sides of the diverging map."""
_MISSING: Any = {"facecolor": "0.88", "edgecolor": "0.6", "hatch": "////", "linewidth": 0.0}
_PLAIN: Any = {"parse_math": False, "usetex": False}
"""For texts of users, in which `$` and backslashes mean nothing."""
_SMALL: Any = {"fontsize": "small", **_PLAIN}


def new_axes(sides: Sequence[Side], shape: tuple[int, int] = (1, 1)) -> tuple[Any, tuple[float, float]]:
    """Returns an array of axes of this shape in a new figure, and about how many inches wide and high each is.

    Args:
        sides: The rows, and the columns if there are any: they make the size.
        shape: How many axes stand below each other, and side by side.

    Raises:
        ExperimentError: matplotlib is not installed.
    """
    pyplot = extra("matplotlib.pyplot", "a plot")
    rows, columns = sides if len(sides) > 1 else (sides[0], None)
    wide = max(min(0.32 * len(columns.values), 11.0 / shape[1]), 2.0 if shape[1] > 1 else 3.0) if columns else 4.0
    tall = max(min(0.25 * len(rows.values), 8.5 / shape[0]), 2.0)
    beside, below = (0.0 if side is None else _length(shown_labels(side)) for side in (rows, columns))
    size = shape[1] * (wide + 0.2) + beside + 1.5, shape[0] * (tall + 0.3) + below + 1.0
    return pyplot.subplots(*shape, figsize=size, layout="constrained", squeeze=False)[1], (wide, tall)


def size_of(ax: Axes) -> tuple[float, float]:
    """Returns how many inches wide and high axes are now."""
    box, dpi = ax.get_window_extent(), ax.figure.dpi
    return box.width / dpi, box.height / dpi


def draw_grid(ax: Axes, grid: Grid, size: tuple[float, float], colormap: Any, *, is_upward: bool) -> Any:
    """Draws cells and labels, and returns what has the colors; without a number, one sees the hatched background.

    Args:
        ax: The axes.
        grid: The grid.
        size: How many inches wide and high the axes are.
        colormap: The colormap; `None`: one that fits.
        is_upward: Whether the first row is the lowest.
    """
    rows, columns = grid.values.shape
    cells = ax.pcolormesh(
        np.arange(columns + 1) - 0.5,
        np.arange(rows + 1) - 0.5,
        np.ma.masked_invalid(grid.values),
        cmap=colormap or (_SEQUENTIAL if grid.scale.center is None else _DIVERGING),
        clim=grid.scale.limits,
        rasterized=True,  # viewers of PDF and SVG show gaps between areas that touch
    )
    if grid.scale.missing is not None:
        ax.patch.set(**_MISSING)
    ax.set_ylim(*((-0.5, rows - 0.5) if is_upward else (rows - 0.5, -0.5)))
    _draw_rows(ax, grid.rows, size[1], grid.rows.title)
    labels = shown_labels(grid.columns, glyphs_of_font())
    is_text = grid.columns.is_tokens or any(isinstance(value, str) for value in grid.columns.values)
    is_upright = is_text and _length(labels) > size[0] / columns
    kept = _thinned(columns, size[0] / (_line() if is_upright else _length(labels)))
    ax.set_xticks(kept, [labels[index] for index in kept], rotation=90 if is_upright else 0, **_SMALL)
    ax.set_xlabel(_wrapped(grid.columns.title, size[0]), **_PLAIN)
    return cells


def draw_bars(ax: Axes, values: Any, side: Side, size: tuple[float, float], names: tuple[str, str]) -> None:
    """Draws bars, the first on top.

    Args:
        ax: The axes.
        values: The length of each bar.
        side: What the bars are of.
        size: How many inches wide and high the axes are.
        names: What the numbers are, and what the bars are.
    """
    ax.barh(np.arange(len(values)), values, color=np.where(values < 0, _NEGATIVE, _POSITIVE).tolist())
    ax.axvline(0.0, color=ax.spines["bottom"].get_edgecolor(), linewidth=0.8)
    ax.set_ylim(len(values) - 0.4, -0.6)
    ax.set_xlabel(_wrapped(names[0], size[0]), **_PLAIN)
    _draw_rows(ax, side, size[1], names[1])


def _draw_rows(ax: Axes, side: Side, height: float, title: str) -> None:
    labels = shown_labels(side, glyphs_of_font())
    kept = _thinned(len(labels), height / _line())
    ax.set_yticks(kept, [labels[index] for index in kept], **_SMALL)
    ax.set_ylabel(_wrapped(title, height), **_PLAIN)


def _thinned(count: int, room: float) -> list[int]:
    """Returns which of so many ticks have a label, where there is room for this many."""
    from matplotlib.ticker import MaxNLocator

    if count <= room:
        return list(range(count))
    places = MaxNLocator(max(int(room), 1), steps=[1, 2, 5, 10], integer=True).tick_values(0, count - 1)
    return [int(place) for place in places if 0 <= place < count]


def _line() -> float:
    """Returns how many inches a line of small text needs."""
    from matplotlib import rcParams

    return 1.1 * float(rcParams["font.size"]) / 72


def _length(labels: Sequence[str]) -> float:
    """Returns about how many inches the longest label needs, with a gap."""
    return 0.5 * _line() * (max(map(len, labels)) + 1)


def _wrapped(name: str, room: float = 3.0) -> str:
    """Returns a name in lines that fit this many inches."""
    return textwrap.fill(name, max(round(11 * room), 32)) or name


def draw_color_bar(axes: Any, cells: Any, scale: Scale) -> None:
    """Adds the color bar of one axes, or of an array of them, with the name of the numbers and of the center."""
    bar = cells.axes.figure.colorbar(cells, ax=axes)
    named = scale.center if scale.center is not None and scale.center.name else None
    bar.set_label(_wrapped(scale.name) + (f"\n(no colour: {named})" if named else ""), **_PLAIN)


def name_facet(ax: Axes, side: Side, number: int, *, is_left: bool, is_bottom: bool) -> None:
    """Writes over one of several axes which one it is; only the outer ones keep their labels."""
    ax.tick_params(labelleft=is_left, labelbottom=is_bottom)
    ax.xaxis.label.set_visible(is_bottom)
    ax.yaxis.label.set_visible(is_left)
    label = shown_labels(side, glyphs_of_font())[number]
    place = f"{side.values[number]}: {label}" if side.is_tokens and label != str(side.values[number]) else label
    ax.set_title(f"{side.name} {place}", fontsize="medium", **_PLAIN)


def draw_legend(drawn: Any, scale: Scale, place: dict[str, Any]) -> None:
    """Writes beside axes, or in a figure, what hatching means."""
    from matplotlib.patches import Patch

    if scale.missing is not None:
        handle = Patch(label=scale.missing, **_MISSING)
        drawn.legend(handles=[handle], frameon=False, fontsize="small", borderaxespad=0.1, **place)
