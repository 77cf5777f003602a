"""A grid drawn on the axes of a figure: cells, ticks, colour bar, and what cannot be told by colour."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpatch_notebook.experiments.centers import Center
from graphpatch_notebook.experiments.grids import Grid, Side
from graphpatch_notebook.experiments.tick_texts import glyphs_of_font, shown_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import Collection

DIVERGING, SEQUENTIAL = "RdBu_r", "Purples"
"""Both safe for the colour-blind; both with light for little, so that they print well in black and white."""
_MISSING, _HATCH = "0.88", "////"
_MOST_VECTORS = 20_000
"""More cells than this are stored as dots also in formats that know vectors: viewers choke on them."""
_OVERLAP = 0.25
"""How far cells reach under the next ones, as a share of them."""
_LEAST_FOR_MARKS = 0.13
_MARKED = 0.12
"""A mark is drawn in cells of this many inches, if they are by this share of the colours below the centre."""
_LEGEND = {"frameon": False, "borderpad": 0.1, "handletextpad": 0.4, "columnspacing": 1.2}
_WIDE, _TALL = 11.0, 8.5
"""The most inches that cells take up in a new figure."""
_WIDEST_CELL, _WIDE_ENOUGH = 0.62, 6.5
"""The most inches a cell gets, and all of them together, for labels of columns that then need not stand upright."""
_LEAST_TALL = 2.0
"""The least: what stands along a side in letters has to fit, too."""


@dataclass(frozen=True)
class Fonts:
    """Sizes of texts, in points, after what matplotlib is set to."""

    ticks: float
    labels: float
    title: float

    @classmethod
    def of_settings(cls) -> Fonts:
        """Returns those that fit the user's."""
        from matplotlib import rcParams

        size = float(rcParams["font.size"])
        return cls(0.8 * size, 0.9 * size, size)

    def width(self, text: str) -> float:
        """Returns about how many inches a tick label is wide."""
        return len(text) * self.ticks * 0.62 / 72

    def fitting(self, room: float) -> float:
        """Returns a size of tick labels that this many inches have room for, if it can be read; else the usual."""
        smaller = self.ticks * room / self.height
        return min(self.ticks, smaller) if smaller >= 0.65 * self.ticks else self.ticks

    @property
    def height(self) -> float:
        """How many inches a line of tick labels needs."""
        return self.ticks * 1.25 / 72


@dataclass(frozen=True)
class Layout:
    """Sizes, in inches.

    Attributes:
        figure: Width and height of a figure that holds a grid, or several of them.
        cell: Width and height of a cell.
    """

    figure: tuple[float, float]
    cell: tuple[float, float]

    @classmethod
    def of_grid(cls, grid: Grid, facets: tuple[int, int] = (1, 1)) -> Layout:
        """Returns sizes at which the cells of a grid can be told apart.

        Args:
            grid: The grid; one of several of the same form.
            facets: How many rows and columns of such grids there are.
        """
        fonts, has_glyph = Fonts.of_settings(), glyphs_of_font()
        row_count, column_count = grid.values.shape
        row_label, column_label = (
            max(map(fonts.width, shown_labels(side, has_glyph))) for side in (grid.rows, grid.columns)
        )
        cell = max(fonts.height * 1.35, min(0.34, column_label + 0.1))
        level = column_label + fonts.height / 2
        if level <= _WIDEST_CELL and level * column_count <= _WIDE_ENOUGH:
            cell = max(cell, level * 1.05)
        wide = min(max(column_count * cell, 2.0), _WIDE / min(facets[1], 3))
        height = max(fonts.height * 1.2, min(0.26, wide / column_count))
        tall = min(max(row_count * height, _LEAST_TALL), _TALL / min(facets[0], 3))
        is_upright = column_label > wide / column_count
        below = min(column_label, 1.6) if is_upright else fonts.height
        figure = facets[1] * (wide + 0.15) + row_label + 1.5, facets[0] * (tall + 0.3) + below + 0.6
        return cls(figure, (wide / column_count, tall / row_count))

    @classmethod
    def of_axes(cls, ax: Axes, grid: Grid) -> Layout:
        """Returns the sizes that axes have, as they are now."""
        box, dpi = ax.get_window_extent(), ax.figure.dpi
        rows, columns = grid.values.shape
        return cls((box.width / dpi, box.height / dpi), (box.width / dpi / columns, box.height / dpi / rows))


def draw_cells(ax: Axes, grid: Grid, colormap: Any, *, is_upward: bool) -> Collection:
    """Draws the cells, hatched where there is no number, and returns what has their colours."""
    from matplotlib import colormaps
    from matplotlib.colors import Colormap
    from matplotlib.patches import Rectangle

    name = colormap or (DIVERGING if grid.scale.center is not None else SEQUENTIAL)
    chosen = name if isinstance(name, Colormap) else colormaps[name]
    low, high = grid.scale.limits
    rows, columns = grid.values.shape
    cells = _dots(ax, grid) if grid.values.size > _MOST_VECTORS else _rectangles(ax, grid)
    cells.set(cmap=chosen, clim=(low, high))
    if grid.scale.missing is not None:
        # One area behind all cells, which is seen where there is none: as cheap for thousands as for one.
        box = Rectangle((-0.5, -0.5), columns, rows, facecolor=_MISSING, edgecolor="0.6", hatch=_HATCH, linewidth=0.0)
        box.set_zorder(cells.get_zorder() - 0.5)
        ax.add_patch(box)
    ax.set_xlim(-0.5, columns - 0.5)
    ax.set_ylim(*((-0.5, rows - 0.5) if is_upward else (rows - 0.5, -0.5)))
    return cells


def _dots(ax: Axes, grid: Grid) -> Collection:
    rows, columns = grid.values.shape
    edges = np.arange(columns + 1) - 0.5, np.arange(rows + 1) - 0.5
    return ax.pcolormesh(*edges, np.ma.masked_invalid(grid.values), rasterized=True)


def _rectangles(ax: Axes, grid: Grid) -> Collection:
    """Draws a rectangle for each cell, row by row, that reaches under those drawn after it.

    Viewers of PDF and SVG show hairlines between rectangles that only touch. Lines around them in their own colours
    would hide these, but leave specks at the corners, as dots of lines and of areas are rounded differently.
    """
    from matplotlib.collections import PolyCollection

    rows, columns = grid.values.shape
    has_number = np.pad(~grid.is_missing, ((0, 1), (0, 1)))
    is_covered = has_number[1:, :-1] & has_number[:-1, 1:] & has_number[1:, 1:]  # by the cells that come after it
    more = np.where(is_covered, _OVERLAP, 0.0)
    top, left = (place - 0.5 for place in np.mgrid[:rows, :columns].astype(float))
    bottom, right = top + 1 + more, left + 1 + more
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    vertices = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=-2)
    cells = PolyCollection(list(vertices.reshape(-1, 4, 2)), edgecolors="none", linewidths=0.0, antialiased=False)
    cells.set_array(np.ma.masked_invalid(grid.values).ravel())
    ax.add_collection(cells, autolim=False)
    return cells


def draw_ticks(ax: Axes, grid: Grid, cell: tuple[float, float]) -> None:
    """Labels the rows and columns: as many as there is room for, beside cells of this width and height (in inches)."""
    fonts, has_glyph = Fonts.of_settings(), glyphs_of_font()
    wide, tall = cell
    rows, columns = grid.values.shape
    # Texts of users: `$` is no mathematics, and a backslash no command.
    plain: dict[str, Any] = {"parse_math": False, "usetex": False}
    labels = shown_labels(grid.rows, has_glyph)
    size = fonts.fitting(tall)
    kept = thinned(rows, fonts.height * size / fonts.ticks / tall)
    ax.set_yticks(kept, [labels[index] for index in kept], fontsize=size, **plain)
    labels = shown_labels(grid.columns, has_glyph)
    needed = max(map(fonts.width, labels)) + fonts.height / 2
    is_upright = not _is_numbers(grid.columns) and needed > wide
    size = fonts.fitting(wide) if is_upright else fonts.ticks
    kept = thinned(columns, (fonts.height * size / fonts.ticks if is_upright else needed) / wide)
    place = {"rotation": 90} if is_upright else {"verticalalignment": "baseline"}  # of letters of all heights the same
    ax.set_xticks(kept, [labels[index] for index in kept], fontsize=size, **place, **plain)
    ax.tick_params(length=2.5, pad=2)
    ax.tick_params(axis="x", pad=2 if is_upright else 2 + 0.76 * size)
    ax.set_xlabel(wrapped(grid.columns.title, columns * wide), fontsize=fonts.labels, **plain)
    ax.set_ylabel(wrapped(grid.rows.title, rows * tall), fontsize=fonts.labels, **plain)


def thinned(count: int, step: float) -> list[int]:
    """Returns which of so many ticks stay when only every `step`-th has room: round numbers of them.

    Example:
        >>> thinned(5, 0.8), thinned(12, 4.2)
        ([0, 1, 2, 3, 4], [0, 5, 10])
    """
    least = math.ceil(step - 1e-9)
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power >= least:
                return list(range(0, count, digit * power))
        power *= 10


def _is_numbers(side: Side) -> bool:
    return not side.is_tokens and not any(isinstance(value, str) for value in side.values)


def draw_colour_bar(axes: Any, cells: ScalarMappable, drawn: Sequence[Grid], room: float) -> None:
    """Adds the colour bar, with the name of the numbers; of a diverging one, the part that occurs.

    Args:
        axes: The axes that it belongs to: one, or several.
        cells: What is coloured.
        drawn: The grids that have these colours.
        room: How many inches it is high.
    """
    grid = drawn[0]
    fonts = Fonts.of_settings()
    figure = (axes.flat[0] if hasattr(axes, "flat") else axes).figure
    bar = figure.colorbar(cells, ax=axes, pad=0.02, aspect=24)
    values = np.concatenate([one.values[~one.is_missing] for one in drawn])
    low, high = grid.scale.limits
    if grid.scale.center is not None and len(values):
        reach = (high - low) * 0.05
        seen = min(values.min(), grid.scale.center.value - reach), max(values.max(), grid.scale.center.value + reach)
        bar.ax.set_ylim(max(low, seen[0]), min(high, seen[1]))
        bar.ax.axhline(grid.scale.center.value, color="0.25", linewidth=0.8)
    bar.ax.tick_params(labelsize=fonts.ticks, length=2.5, pad=2)
    words = wrapped(grid.scale.name, room) + (
        f"\n(no colour: {grid.scale.center})" if _is_named(grid.scale.center) else ""
    )
    bar.set_label(words, fontsize=fonts.labels, parse_math=False, usetex=False)


def _is_named(center: Center | None) -> bool:
    return center is not None and bool(center.name)


def wrapped(name: str, room: float) -> str:
    """Returns a long name in several lines, each no longer than this many inches."""
    letters = int(room * 72 / (Fonts.of_settings().labels * 0.55))
    return "\n".join(textwrap.wrap(name, max(letters, 12))) or name


def draw_marks(ax: Axes, grid: Grid, cell: tuple[float, float]) -> bool:
    """Draws a minus in each cell well below the centre, if others are above it; returns whether it did.

    Light and dark is all that black and white leaves of a diverging map: the same on both sides of the centre.
    """
    if grid.scale.center is None or not _has_both_sides(grid) or min(cell) < _LEAST_FOR_MARKS:
        return False
    share = (grid.values - grid.scale.center.value) / (grid.scale.limits[1] - grid.scale.center.value)
    for is_dark in (False, True):
        found = np.argwhere((share < -_MARKED) & ((share < -0.55) == is_dark))
        ax.plot(
            found[:, 1],
            found[:, 0],
            linestyle="none",
            marker="_",
            markersize=min(min(cell) * 72 * 0.45, 7),
            markeredgewidth=0.9,
            color="white" if is_dark else "0.15",
        )
    return True


def _has_both_sides(grid: Grid) -> bool:
    assert grid.scale.center is not None
    values = grid.values[~grid.is_missing]
    reach = _MARKED * (grid.scale.limits[1] - grid.scale.center.value)
    return (
        bool(len(values))
        and values.min() < grid.scale.center.value - reach
        and values.max() > grid.scale.center.value + reach
    )


def name_facet(ax: Axes, side: Side, number: int, *, is_left: bool, is_bottom: bool) -> None:
    """Writes over the axes of one grid of several which one it is; only the outer ones keep their labels."""
    ax.tick_params(labelleft=is_left, labelbottom=is_bottom)
    ax.xaxis.label.set_visible(is_bottom)
    ax.yaxis.label.set_visible(is_left)
    label = shown_labels(side, glyphs_of_font())[number]
    place = f"{side.values[number]}: {label}" if side.is_tokens and label != str(side.values[number]) else label
    fonts = Fonts.of_settings()
    ax.set_title(f"{side.name} {place}", fontsize=fonts.labels, pad=3, parse_math=False, usetex=False)


def draw_legend(ax: Axes, grid: Grid, title: str | None, *, has_marks: bool) -> None:
    """Writes the title, and beside it what hatching and marks mean."""
    fonts = Fonts.of_settings()
    handles = _handles([grid], has_marks=has_marks)
    if handles:
        style = _LEGEND | {"fontsize": fonts.ticks, "ncols": len(handles)}
        ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1, **style)
    if title is not None:
        ax.set_title(title, fontsize=fonts.title, loc="left", pad=fonts.ticks * 1.9 if handles else 5.0)


def draw_figure_legend(figure: Any, grids: Sequence[Grid], title: str | None, *, has_marks: bool) -> None:
    """Writes title and legend of a figure of several grids."""
    fonts = Fonts.of_settings()
    handles = _handles(grids, has_marks=has_marks)
    if handles:
        style = _LEGEND | {"fontsize": fonts.ticks, "ncols": len(handles)}
        figure.legend(handles=handles, loc="outside lower right", **style)
    if title is not None:
        figure.suptitle(title, fontsize=fonts.title)


def _handles(grids: Sequence[Grid], *, has_marks: bool) -> list[Any]:
    from matplotlib import rcParams
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    center = grids[0].scale.center
    missing = list(dict.fromkeys(grid.scale.missing for grid in grids if grid.scale.missing is not None))
    handles: list[Any] = []
    if has_marks and center is not None:
        words = f"below {center}"
        style: dict[str, Any] = {"linestyle": "none", "marker": "_", "markersize": 6}
        handles.append(Line2D([], [], color=rcParams["text.color"], label=words, **style))
    if missing:
        words = " or ".join(missing)
        handles.append(Patch(facecolor=_MISSING, edgecolor="0.6", hatch=_HATCH, linewidth=0.0, label=words))
    return handles
