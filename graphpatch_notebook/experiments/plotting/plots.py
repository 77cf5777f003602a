"""Plots of results: heatmaps, heads, and bars with matplotlib; interactive heatmaps in notebooks."""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.attribution.ranking import names_in, ranked
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.experiments.plotting.grids import (
    DisplayOptions,
    Grid,
    Scale,
    Side,
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

    from graphpatch_notebook.experiments.circuits.circuit import Circuit
    from graphpatch_notebook.notebook.display.circuit import CircuitView
    from graphpatch_notebook.notebook.display.heatmap import ResultHeatmap
    from graphpatch_notebook.notebook.session.workspace import Workspace
    from graphpatch_notebook.notebook.views.attention import AttentionView
    from graphpatch_notebook.notebook.views.generation import GenerationView
    from graphpatch_notebook.notebook.views.lens import LensView
    from graphpatch_notebook.patchable_graph import PatchableGraph


_FOR_HEADS = "; for paths and heads at several positions, use plot_heads(result, facet='position')"
_ACROSS = 4
"""The number of grids in a row."""
_FOR_PAPER: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "path"}
"""TrueType fonts in PDF and PostScript, since journals refuse Type 3; outlines in SVG, which need no fonts."""


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
    """Draws a heatmap of a result with two dimensions, such as `("path", "position")`, and returns its axes.

    Notebooks show the figure at the end of the cell; elsewhere, save it with `save_figure(axes, file)`. The settings of
    matplotlib are not changed.

    Args:
        result: A `DataArray` of real numbers. Cells without a finite number (that failed or did not run) are hatched.
        tokens: The texts of the tokens: one for each position of the result, or those of the whole sequence. They are
            the tick labels, with spaces and invisible characters made visible.
        ax: The axes to draw into; by default, those of a new figure.
        rows: The vertical dimension; by default, the first. `rows="position"` draws as ROME does, with tokens from top
            to bottom and layers from left to right.
        origin: Whether the first row is the `"lower"` or the `"upper"` one. By default, lower for layers and upper for
            tokens.
        center: The number without color, from which colors diverge. `"auto"`: the metric without patches (the attribute
            `baseline` of the result), or zero for attribution scores and for numbers on both sides of zero. `None`:
            colors go from the minimum to the maximum.
        limits: The numbers of the first and the last color; by default, the minimum and the maximum. With a center,
            limits are symmetric around it.
        colormap: A colormap of matplotlib; by default, one that is safe for color-blind readers.
        title: The title.
        labels: Titles of dimensions, such as `{"path": "layer"}`, and of the numbers under the name of the result.
        relative_to: A number to subtract, or the name of an attribute: `"corrupted"`, `"baseline"`. Do not use
            `plot_heatmap(result - result.corrupted)`: a difference may keep the attributes, and with them the wrong
            center.
        colorbar: Whether to draw a color bar.

    Raises:
        ExperimentError: The result does not have two dimensions, tokens or options do not fit it (the message has a
            repair), or matplotlib is not installed.

    Example:
        >>> import xarray
        >>> paths = ["transformer.h_0.mlp.output", "transformer.h_1.mlp.output"]
        >>> result = xarray.DataArray([[0.1, 0.5], [0.3, 0.2]], {"path": paths}, ["path", "position"], name="logit")
        >>> axes = plot_heatmap(result, tokens=["The", " cat"])
        >>> [tick.get_text() for tick in axes.get_xticklabels()], [tick.get_text() for tick in axes.get_yticklabels()]
        (['The', '␣cat'], ['h_0', 'h_1'])

    Source:
        Meng et al., Locating and Editing Factual Associations in GPT (ROME), 2022, for the layout.
    """
    options = DisplayOptions(center, limits, labels, relative_to)
    grid = grid_of(result, options, tokens=tokens, rows=rows, instead=_FOR_HEADS)
    return _drawn(grid, ax, colormap, origin, title, colorbar=colorbar)


def plot_heads(
    result: DataArray,
    *,
    facet: str | None = None,
    tokens: Sequence[str] | None = None,
    ax: Axes | None = None,
    **options: Any,
) -> Any:
    """Draws a heatmap of attention heads, with a cell for each layer and head, and returns its axes.

    Args:
        result: A `DataArray` with a dimension `"head"` and one of paths or layers; with `facet`, a third one.
        facet: A dimension, such as `"position"`: draws a heatmap for each of its coordinates, with one color scale.
        tokens: The texts of the tokens, as titles of positions, as for `plot_heatmap`.
        ax: The axes to draw into, if there is no `facet`.
        **options: As for `plot_heatmap`: `origin`, `center`, `limits`, `colormap`, `title`, `labels`, `relative_to`.

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
        raise ExperimentError(f"heads need a dimension 'head'; the result has {', '.join(map(str, array.dims))}")
    if facet is None:
        return plot_heatmap(array.transpose(..., "head"), tokens=tokens, ax=ax, **options)
    if ax is not None:
        raise ExperimentError("facet= draws into several axes; remove ax=")
    colormap, origin, title = (options.pop(name, None) for name in ("colormap", "origin", "title"))
    parts, side = facets_of(array, DisplayOptions(**options), facet, tokens)
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
    """Draws the scores with the largest magnitude as bars, the largest on top, and returns the axes.

    Args:
        result: A `DataArray` with one dimension, such as the result of `attribute`.
        top: The number of bars; `None` for all.
        distinct: Whether names of one value with the same score share a bar, as for `top_scores`.
        ax: The axes to draw into; by default, those of a new figure.
        title: The title.
        labels: Titles of the dimension and the numbers.
        relative_to: A number to subtract, or the name of an attribute: `"corrupted"`, `"baseline"`.

    Raises:
        ExperimentError: The result has other dimensions, or no finite number. The message has a repair.

    Example:
        >>> import xarray
        >>> result = xarray.DataArray([0.1, -0.7, 0.3], {"path": ["a.output", "b.output", "c.output"]}, ["path"])
        >>> [tick.get_text() for tick in plot_scores(result, top=2).get_yticklabels()]
        ['b', 'c']
    """
    count: Any = top
    if count is not None and (not isinstance(count, int) or count < 1):
        raise ExperimentError(f"top={top!r} must be a number of bars, or None for all")
    array = checked(result, 1, "; plot_heatmap(result) draws two dimensions")
    options = DisplayOptions(0.0, None, labels, relative_to)
    values, scale = numbers_of(array, options)
    has_paths = distinct and "path" in array.coords and array.dims == ("path",)
    names = [(path,) for path in array.coords["path"].values.tolist()] if has_paths else [(None,)] * array.size
    ranks = ranked(values, names, names_in(array.attrs) if has_paths else {})
    if not ranks:
        raise ExperimentError(f"none of the {len(values):,} scores is finite")
    order = [rank.number for rank in ranks[:top]]
    (side,) = sides_of(array.isel({array.dims[0]: order}), None, options)
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
    """Saves the figure of a plot for publication, with embedded fonts and all labels inside.

    Args:
        drawn: The result of a plot function (axes or an array of axes), or a figure.
        file: The name of the file. The suffix determines the format: .pdf, .svg, .png, .eps, ...
        dpi: Dots per inch, for raster formats.

    Raises:
        ExperimentError: `drawn` is something else, or matplotlib does not support the format.

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
        raise ExperimentError(f"expected a figure or the result of a plot, not {type(drawn).__name__}")
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
    title: str | None = None,
    pg: PatchableGraph | None = None,
    **options: Any,
) -> ResultHeatmap:
    """Returns an interactive heatmap of a result for the notebook, with tooltips, zoom and selection.

    A click on a cell, or Enter, selects it: `selected` contains its coordinates. A second click clears the selection.
    Without a kernel, notebooks show a table instead; outside of notebooks, the heatmap is a line of text (use
    `plot_heatmap` there). In a result with more than 256 rows or columns, each cell shows the largest magnitude of a
    block.

    Args:
        result: A `DataArray` of real numbers with two dimensions.
        tokens: As for `plot_heatmap`, like all that follow.
        rows: The vertical dimension.
        origin: Whether the first row is the `"lower"` or the `"upper"` one.
        title: The title.
        pg: The graph that the result is of: cells then are a part of the selection of its views. A click selects the
            path, layer, head and position of the cell in all of them, and what is selected there is marked. Cells of
            paths and components can be patched, with the actions of the other views.
        **options: `center`, `limits`, `labels`, `relative_to`.

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

    grid = grid_of(result, DisplayOptions(**options), tokens=tokens, rows=rows)
    if pg is None:
        return ResultHeatmap(grid, title, is_upward=is_upward(grid, origin))
    from graphpatch_notebook.notebook.views.result_view import LinkedHeatmap

    workspace, _ = _for_view((), {})
    return LinkedHeatmap(result, grid, title, is_upward=is_upward(grid, origin), graph=pg, workspace=workspace)


def show_attention(
    pg: PatchableGraph,
    *inputs: Any,
    tokens: Any = None,
    layers: Sequence[int] | None = None,
    **input_kwargs: Any,
) -> AttentionView:
    """Returns an interactive view of the attention patterns of a model for the notebook.

    It shows all heads of all layers, and one large: queries go down from position 0, keys to the right. Point at a
    token to see what it looks at, and what looks at it; a click pins it. Shift overlays heads. The selection is that of
    all views of the graph, and can be patched: the view then shows the patterns without and with the chosen patches,
    or their difference. No attention implementation has to be chosen when the model is loaded.

    In a page without a kernel, heads and tokens can still be chosen if the patterns were sent whole, as they are for
    short inputs. Where scripts cannot run, there is a picture.

    Args:
        pg: The graph.
        *inputs: Inputs of the model, positional; by default, the example inputs of the graph.
        tokens: A tokenizer (an object with `decode` or `convert_ids_to_tokens`), the texts of the tokens, or those of
            each row of the batch. `None`: the tokenizer that was given to `pg.browse`, if one was.
        layers: The numbers of the layers to show; `None` for all.
        **input_kwargs: Inputs of the model, by keyword.

    Raises:
        GraphError: No attention patterns were found in the model; the message has the reason.
        SessionError: There are no inputs, a patch context is active, or a value of a chosen patch cannot be evaluated.
        Exception: Any error that the model raises on these inputs.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from graphpatch_notebook import PatchableGraph
        >>> from graphpatch_notebook.experiments import show_attention
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(5)[None])
        >>> show_attention(pg, torch.arange(4)[None], tokens=["The", " cat", " sat", " down"], layers=[1])
        <AttentionView of pg: 2 heads in 1 layer, 4 x 4>

    Source:
        Vig, A Multiscale Visualization of Attention in the Transformer Model (BertViz), 2019, and CircuitsVis, for the
        heads side by side and the tokens. The lengths of value vectors: Kobayashi et al., Attention is Not Only a
        Weight, 2020.
    """
    from graphpatch_notebook.notebook.views.attention import attention_of

    return attention_of(pg, *_for_view(inputs, input_kwargs), tokens=tokens, layers=layers)


def show_circuit(circuit: Circuit) -> CircuitView:
    """Returns an interactive picture of a circuit for the notebook.

    Layers go upwards. A slider leaves out the weak edges; pointing at a node or an edge shows its name, its score and
    its neighbors, and a click pins it: `selected` is its name. To patch components from the picture, show it in the
    browser of the model: `pg.browse(circuit=circuit)`. Without a kernel, notebooks show the picture of `to_svg`.

    Args:
        circuit: The circuit.

    Example:
        >>> from graphpatch_notebook.experiments import Circuit, Edge
        >>> edges = (Edge("@embed", "@logits", 2.0),)
        >>> view = show_circuit(Circuit(edges, {"@logits": ()}, candidates=1, clean=2.0, corrupted=0.0))
        >>> view.observe(lambda change: print("pinned", change["new"]), "selected")
        >>> view.selected = "@embed"  # what a click does
        pinned @embed
    """
    from graphpatch_notebook.notebook.display.circuit import CircuitView

    return CircuitView(circuit)


def show_lens(
    pg: PatchableGraph,
    *inputs: Any,
    target: int | str | Sequence[int | str] | None = None,
    stream: str | Sequence[str] = "residual",
    tokens: Any = None,
    row: int = 0,
    stack: str = "",
    **input_kwargs: Any,
) -> LensView:
    """Returns the logit lens as a view for the notebook: what each layer says at each position.

    Each cell has the most probable next token, if the state of this layer were the last one, and as color the
    probability or rank of the target. Pointing at a cell shows more tokens; a click selects it in all views of the
    graph, with actions to patch it. With patches, the view shows the lens without and with them, and the difference;
    it follows the patches that are chosen in any view. Without a kernel, what was computed can still be browsed; where
    scripts cannot run, it is a table.

    Args:
        pg: The graph.
        *inputs: Inputs of the model, positional; without inputs, those of the browser, or the example inputs.
        target: The token whose probability is shown: its number or text, one for all positions or one for each; `None`
            for the most probable next token of each position in the model's output.
        stream: `"residual"`, for the state after each layer, or `"attention"` or `"mlp"`, for what these write; or a
            list of them. The view computes others when they are chosen.
        tokens: A tokenizer (an object with `decode` or `convert_ids_to_tokens`), or the text of each position.
        row: The row of the batch.
        stack: The stack of layers, if the model has several.
        **input_kwargs: Inputs of the model, by keyword.

    Raises:
        ExperimentError: The layers or logits of the model are not known, or an argument does not fit.
        SessionError: There are no inputs, or a patch context is active.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from graphpatch_notebook import PatchableGraph
        >>> from graphpatch_notebook.experiments import show_lens
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> ids = torch.arange(6)[None]
        >>> pg = PatchableGraph(model, ids)
        >>> show_lens(pg, ids, target=3)
        <LensView of pg, residual, 3 x 6>

    Source:
        nostalgebraist, interpreting GPT: the logit lens (2020).
    """
    from graphpatch_notebook.notebook.views.lens import lens_of

    workspace, given = _for_view(inputs, input_kwargs)
    return lens_of(pg, workspace, given, target=target, stream=stream, tokens=tokens, row=row, stack=stack)


def show_generation(
    pg: PatchableGraph,
    *inputs: Any,
    max_new_tokens: int = 20,
    tokens: Any = None,
    score: Any = "log_probability",
    **input_kwargs: Any,
) -> GenerationView:
    """Returns a view of the tokens that the model generates, colored by a score of each step.

    Tokens are chosen greedily. Pointing at a token shows the probable ones of its step; a click on one of these
    branches there: the generation continues with that token, and both lines are shown. With patches, the lines without
    and with them are shown. Selected tokens can be patched: the patch acts in their steps only.

    Args:
        pg: The graph, of a model with a method `generate`.
        *inputs: Arguments of `generate`, positional: one prompt. Without inputs, those of the browser, or the example
            inputs.
        max_new_tokens: How many tokens are generated at most.
        tokens: A tokenizer (an object with `decode` or `convert_ids_to_tokens`).
        score: What the colors are: `"log_probability"` of the token, `"entropy"` of its step (both in nats), or a
            number for each step of the run without patches.
        **input_kwargs: Arguments of `generate`, by keyword.

    Raises:
        ExperimentError: The model cannot generate, or an argument does not fit.
        SessionError: There are no inputs, or a patch context is active.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from graphpatch_notebook import PatchableGraph
        >>> from graphpatch_notebook.experiments import show_generation
        >>> config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=20, bos_token_id=None, eos_token_id=None)
        >>> ids = torch.arange(6)[None]
        >>> pg = PatchableGraph(GPT2LMHeadModel(config).eval(), ids)
        >>> view = show_generation(pg, ids, max_new_tokens=3)
        >>> view.branch(1, 7)
        >>> [line["name"] for line in view.generation["lines"]]
        ['Without patches', 'Branch at step 1']
    """
    from graphpatch_notebook.notebook.views.generation import generation_of

    workspace, given = _for_view(inputs, input_kwargs)
    return generation_of(pg, workspace, given, max_new_tokens=max_new_tokens, tokens=tokens, score=score)


def _for_view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Workspace, Inputs | None]:
    """Returns the variables of the user, who called the caller, and the inputs; `None` for those of *Run*."""
    from graphpatch_notebook.notebook.views.linked import workspace_of_user

    return workspace_of_user(sys._getframe(2).f_globals), Inputs(args, kwargs) if args or kwargs else None


def _axes_for(sides: Sequence[Side], ax: Axes | None) -> tuple[Axes, tuple[float, float]]:
    """Returns the given or new axes, and their width and height in inches."""
    if ax is not None:
        box, dpi = ax.get_window_extent(), ax.figure.dpi
        return ax, (box.width / dpi, box.height / dpi)
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
"""Colormaps that are safe for color-blind readers."""
_POSITIVE, _NEGATIVE = "#b2182b", "#4393c3"
"""The two ends of the diverging colormap."""
_MISSING: Any = {"facecolor": "0.88", "edgecolor": "0.6", "hatch": "////", "linewidth": 0.0}
_PLAIN: Any = {"parse_math": False, "usetex": False}
"""For texts of users, in which `$` and backslashes have no meaning."""
_SMALL: Any = {"fontsize": "small", **_PLAIN}


def new_axes(sides: Sequence[Side], shape: tuple[int, int] = (1, 1)) -> tuple[Any, tuple[float, float]]:
    """Returns an array of axes in a new figure, and the approximate width and height of each in inches.

    The size depends on the rows and the columns, if any. `shape` is the number of rows and columns of axes.
    """
    pyplot = extra("matplotlib.pyplot", "a plot")
    rows, columns = sides if len(sides) > 1 else (sides[0], None)
    wide = max(min(0.32 * len(columns.values), 11.0 / shape[1]), 2.0 if shape[1] > 1 else 3.0) if columns else 4.0
    tall = max(min(0.25 * len(rows.values), 8.5 / shape[0]), 2.0)
    beside, below = (0.0 if side is None else _length(shown_labels(side)) for side in (rows, columns))
    size = shape[1] * (wide + 0.2) + beside + 1.5, shape[0] * (tall + 0.3) + below + 1.0
    return pyplot.subplots(*shape, figsize=size, layout="constrained", squeeze=False)[1], (wide, tall)


def draw_grid(ax: Axes, grid: Grid, size: tuple[float, float], colormap: Any, *, is_upward: bool) -> Any:
    """Draws cells and labels, and returns the colored mesh. Cells without a number show the hatched background.

    The size of the axes is in inches. If `is_upward`, the first row is the lowest.
    """
    rows, columns = grid.values.shape
    cells = ax.pcolormesh(
        np.arange(columns + 1) - 0.5,
        np.arange(rows + 1) - 0.5,
        np.ma.masked_invalid(grid.values),
        cmap=colormap or (_SEQUENTIAL if grid.scale.center is None else _DIVERGING),
        clim=grid.scale.limits,
        rasterized=True,  # viewers of PDF and SVG show gaps between adjacent areas
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
    """Draws labeled bars, the first on top.

    The size of the axes is in inches; `names` are those of the numbers and of the bars.
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
    """Returns the indices of ticks with a label, if there is room for `room` labels."""
    from matplotlib.ticker import MaxNLocator

    if count <= room:
        return list(range(count))
    places = MaxNLocator(max(int(room), 1), steps=[1, 2, 5, 10], integer=True).tick_values(0, count - 1)
    return [int(place) for place in places if 0 <= place < count]


def _line() -> float:
    """Returns the height of a line of small text in inches."""
    from matplotlib import rcParams

    return 1.1 * float(rcParams["font.size"]) / 72


def _length(labels: Sequence[str]) -> float:
    """Returns the approximate length of the longest label in inches, with a gap."""
    return 0.5 * _line() * (max(map(len, labels)) + 1)


def _wrapped(name: str, room: float = 3.0) -> str:
    """Returns a name, wrapped to `room` inches."""
    return textwrap.fill(name, max(round(11 * room), 32)) or name


def draw_color_bar(axes: Any, cells: Any, scale: Scale) -> None:
    """Adds the color bar of axes, with the names of the numbers and of the center."""
    bar = cells.axes.figure.colorbar(cells, ax=axes)
    named = scale.center if scale.center is not None and scale.center.name else None
    bar.set_label(_wrapped(scale.name) + (f"\n(no color: {named})" if named else ""), **_PLAIN)


def name_facet(ax: Axes, side: Side, number: int, *, is_left: bool, is_bottom: bool) -> None:
    """Sets the title of one of several axes, and hides the labels of inner axes."""
    ax.tick_params(labelleft=is_left, labelbottom=is_bottom)
    ax.xaxis.label.set_visible(is_bottom)
    ax.yaxis.label.set_visible(is_left)
    label = shown_labels(side, glyphs_of_font())[number]
    place = f"{side.values[number]}: {label}" if side.is_tokens and label != str(side.values[number]) else label
    ax.set_title(f"{side.name} {place}", fontsize="medium", **_PLAIN)


def draw_legend(drawn: Any, scale: Scale, place: dict[str, Any]) -> None:
    """Adds a legend for hatched cells to axes or a figure."""
    from matplotlib.patches import Patch

    if scale.missing is not None:
        handle = Patch(label=scale.missing, **_MISSING)
        drawn.legend(handles=[handle], frameon=False, fontsize="small", borderaxespad=0.1, **place)
