"""Grids and bars drawn with matplotlib: new figures, cells, labels, color bar, and legend."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.experiments.plotting.grids import Grid, Scale, Side
from graphpatch_notebook.experiments.plotting.tick_texts import glyphs_of_font, shown_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
