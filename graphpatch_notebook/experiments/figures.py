"""Figures that look right on paper: of a size that fits what is in them, saved with fonts that journals take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.extras import extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FOR_PAPER: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "path"}
"""TrueType in PDF and PostScript, as journals refuse Type 3; outlines in SVG, which look the same anywhere."""


def require_matplotlib() -> None:
    """Makes sure that there is matplotlib.

    Raises:
        ExperimentError: There is none.
    """
    extra("matplotlib.pyplot", "a plot")


def new_axes(width: float, height: float) -> Axes:
    """Returns the axes of a new figure, which notebooks show at the end of the cell.

    Args:
        width: In inches.
        height: In inches.
    """
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def new_table(width: float, height: float, shape: tuple[int, int]) -> Any:
    """Returns an array of axes, of a shape (rows, columns), in a new figure of this size in inches."""
    from matplotlib import pyplot

    return pyplot.subplots(*shape, figsize=(width, height), layout="constrained", squeeze=False)[1]


def save_figure(drawn: Any, file: str | os.PathLike[str], *, dpi: int = 300) -> None:
    """Saves the figure that something was drawn in, for paper: fonts embedded, no label cut off.

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
    require_matplotlib()
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
