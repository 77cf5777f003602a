"""Bars drawn on the axes of a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphpatch_notebook.experiments.bars import Bars
from graphpatch_notebook.experiments.heat_axes import Fonts, thinned, wrapped
from graphpatch_notebook.experiments.tick_texts import glyphs_of_font, shown_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_POSITIVE, _NEGATIVE = "#b2182b", "#4393c3"
"""The sides of the diverging map of heatmaps; in black and white the hatching tells them apart."""
_TALL = 10.0
"""The most inches that bars take up in a new figure."""


def figure_size(bars: Bars) -> tuple[float, float]:
    """Returns the width and height, in inches, of a figure in which each bar has its label."""
    fonts = Fonts.of_settings()
    label = max(map(fonts.width, shown_labels(bars.side, glyphs_of_font())))
    return label + 4.0, min(max(len(bars.values) * fonts.height * 1.25, 2.0), _TALL) + 0.8


def draw_bars(ax: Axes, bars: Bars, title: str | None) -> None:
    """Draws the bars, the first on top, those below zero hatched."""
    fonts = Fonts.of_settings()
    count = len(bars.values)
    drawn = ax.barh(np.arange(count), bars.values, height=0.74, color=_POSITIVE)
    for bar, value in zip(drawn, bars.values, strict=True):
        if value < 0:
            bar.set(facecolor=_NEGATIVE, edgecolor="white", hatch="////", linewidth=0.0)
    ax.axvline(0.0, color=ax.spines["bottom"].get_edgecolor(), linewidth=0.8)
    ax.set_ylim(count - 0.4, -0.6)
    ax.margins(x=0.03)
    box, dpi = ax.get_window_extent(), ax.figure.dpi
    width, height = box.width / dpi, box.height / dpi / count
    labels = shown_labels(bars.side, glyphs_of_font())
    kept = thinned(count, fonts.height / height)
    ax.set_yticks(kept, [labels[index] for index in kept], fontsize=fonts.ticks, parse_math=False, usetex=False)
    ax.tick_params(length=2.5, pad=2, labelsize=fonts.ticks)
    ax.spines[["top", "right"]].set_visible(False)
    side = bars.side.title + (f" ({bars.remark})" if bars.remark else "")
    ax.set_ylabel(wrapped(side, height * count), fontsize=fonts.labels, parse_math=False, usetex=False)
    ax.set_xlabel(wrapped(bars.name, width), fontsize=fonts.labels, parse_math=False, usetex=False)
    if title is not None:
        ax.set_title(title, fontsize=fonts.title, loc="left")
