"""Plots of results: heatmaps of values and heads with matplotlib; interactive heatmaps in notebooks."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpatch_notebook.errors import ExperimentError, extra
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.grids import Grid, Scale, Side, grid_of, shown_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from xarray import DataArray

    from graphpatch_notebook.experiments.circuits.attribution_graph import AttributionGraph
    from graphpatch_notebook.experiments.circuits.circuit import Circuit
    from graphpatch_notebook.experiments.datasets.feature_pages import FeaturePage
    from graphpatch_notebook.notebook.session.workspace import Workspace
    from graphpatch_notebook.notebook.views.attention import AttentionView
    from graphpatch_notebook.notebook.views.generation import GenerationView
    from graphpatch_notebook.notebook.views.lens import LensView
    from graphpatch_notebook.notebook.views.results import CircuitView, ResultHeatmap
    from graphpatch_notebook.notebook.views.tokens import TokensView
    from graphpatch_notebook.patchable_graph import PatchableGraph


_ACROSS = 4
"""The number of grids in a row."""


def plot_heatmap(
    result: DataArray,
    *,
    tokens: Sequence[str] | None = None,
    ax: Axes | None = None,
    center: float | str | None = "auto",
    title: str | None = None,
    relative_to: str | float | None = None,
) -> Axes:
    """Draws a heatmap of a result with two dimensions, such as `("path", "position")`, and returns its axes.

    Notebooks show the figure at the end of the cell; `axes.figure.savefig(file)` saves it. The settings of
    matplotlib are not changed. The first dimension is vertical: `plot_heatmap(result.T)` draws tokens from top to
    bottom and layers from left to right, as ROME does. All else is as in any plot of matplotlib:
    `axes.set_xlabel("layer")`, `axes.invert_yaxis()`, `axes.collections[0].set(cmap="viridis", clim=(0, 1))`.

    Args:
        result: A `DataArray` of real numbers. Cells without a finite number (that failed or did not run) are hatched.
        tokens: The texts of the tokens: one for each position of the result, or those of the whole sequence. They are
            the tick labels, with spaces and invisible characters made visible. Results of a graph with a tokenizer, on
            one sequence, have them.
        ax: The axes to draw into; by default, those of a new figure.
        center: The number without color, from which colors diverge. `"auto"`: the metric without patches (the attribute
            `baseline` of the result), or zero for attribution scores and for numbers on both sides of zero. `None`:
            colors go from the minimum to the maximum.
        title: The title.
        relative_to: A number to subtract, or the name of an attribute: `"corrupted"`, `"baseline"`. Do not use
            `plot_heatmap(result - result.corrupted)`: a difference may keep the attributes, and with them the wrong
            center.

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
    return _draw_heatmap(grid_of(result, tokens=tokens, center=center, relative_to=relative_to), ax, title)


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
        **options: As for `plot_heatmap`: `center`, `title`, `relative_to`.

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
    title = options.pop("title", None)
    if facet == "head" or (facet is not None and ax is not None):
        raise ExperimentError("facet= is a dimension other than 'head', and draws into several axes, without ax=")
    order = (..., "head") if facet is None else (facet, ..., "head")
    grid = grid_of(result, 2 if facet is None else 3, order=order, tokens=tokens, **options)
    if facet is None:
        return _draw_heatmap(grid, ax, title)
    across = min(len(grid.values), _ACROSS)
    table = _new_axes(grid.rows, grid.columns, (math.ceil(len(grid.values) / across), across))
    axes = table.flat[: len(grid.values)]
    side, labels = grid.sides[0], shown_labels(grid.sides[0], _glyphs_of_font())
    for number, (one, part) in enumerate(zip(axes, grid.values, strict=True)):
        cells = _draw_cells(one, replace(grid, values=part))
        value = f"{side.values[number]}: " if side.is_tokens and labels[number] != str(side.values[number]) else ""
        one.set_title(f"{side.name} {value}{labels[number]}", fontsize="medium", **_PLAIN)
        one.label_outer()
    for empty in table.flat[len(grid.values) :]:
        empty.remove()
    _draw_color_bar(axes, cells, grid.scale)
    _draw_legend(axes[0].figure, grid.scale, loc="outside lower right")
    if title is not None:
        axes[0].figure.suptitle(title)
    return axes


def show_heatmap(
    result: DataArray,
    *,
    tokens: Sequence[str] | None = None,
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
        tokens: As for `plot_heatmap`.
        title: The title.
        pg: The graph that the result is of: cells then are a part of the selection of its views. A click selects the
            path, layer, head and position of the cell in all of them, and what is selected there is marked. Cells of
            paths and components can be patched, with the actions of the other views.
        **options: As for `plot_heatmap`: `center`, `relative_to`.

    Raises:
        ExperimentError: The result does not have two dimensions, or tokens or options do not fit it.

    Example:
        >>> import xarray
        >>> result = xarray.DataArray([[1.0, 2.0]], {"path": ["h_0"]}, ["path", "position"], name="effect")
        >>> heatmap = show_heatmap(result, tokens=["The", " cat"])
        >>> heatmap.observe(lambda change: print("selected", change["new"]), "selected")
        >>> heatmap.cell = [0, 1]  # what a click does
        selected ('h_0', 1)
    """
    from graphpatch_notebook.notebook.views.results import ResultHeatmap

    grid = grid_of(result, tokens=tokens, **options)
    if pg is None:
        return ResultHeatmap(grid, title, is_upward=grid.is_upward)
    from graphpatch_notebook.notebook.views.results import LinkedHeatmap

    workspace, _ = _for_view((), {})
    return LinkedHeatmap(result, grid, title, is_upward=grid.is_upward, graph=pg, workspace=workspace)


def show_attention(
    pg: PatchableGraph,
    *inputs: Any,
    tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
    layers: Sequence[int] | None = None,
    image: Any = None,
    max_new_tokens: int = 0,
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
        tokens: The texts of the tokens, or those of each row of the batch; `None` for those that `pg.tokenizer` gives.
        layers: The numbers of the layers to show; `None` for all.
        image: How the image among the inputs looks: an array or PIL image of shape (rows, columns, 3). `None`: as its
            tensor of shape (batch, channels, rows, columns), with colors from its minimum to its maximum. The tokens
            that are its patches are shown over it: those that change with it, found by running the model twice.
        max_new_tokens: How many tokens are generated after the prompt, greedily and without patches: their rows appear
            as they are generated, once the view is shown. With patches, the same tokens are run.
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

    return attention_of(
        pg, *_for_view(inputs, input_kwargs), tokens=tokens, layers=layers, image=image, max_new_tokens=max_new_tokens
    )


def show_circuit(circuit: Circuit | AttributionGraph, pages: Mapping[str, FeaturePage] | None = None) -> CircuitView:
    """Returns an interactive picture of a circuit for the notebook.

    Layers go upwards. A slider leaves out the weak edges; pointing at a node or an edge shows its name, its score and
    its neighbors, and a click pins it: `selected` is its name. To patch components from the picture, show it in the
    browser of the model: `pg.browse(circuit=circuit)`. Without a kernel, notebooks show the picture of `to_svg`.

    Args:
        circuit: The circuit, or attribution graph.
        pages: Pages of features, as `feature_pages` returns them, which are shown below a picture in which their node
            is pinned.

    Example:
        >>> from graphpatch_notebook.experiments import Circuit, Edge
        >>> edges = (Edge("@embed", "@logits", 2.0),)
        >>> view = show_circuit(Circuit(edges, {"@logits": ()}, candidates=1, clean=2.0, corrupted=0.0))
        >>> view.observe(lambda change: print("pinned", change["new"]), "selected")
        >>> view.pinned = ["node", 0]  # what a click does
        pinned @embed
    """
    from graphpatch_notebook.notebook.views.results import CircuitView

    return CircuitView(circuit, pages)


def show_lens(
    pg: PatchableGraph,
    *inputs: Any,
    target: int | str | Sequence[int | str] | None = None,
    stream: str | Sequence[str] = "residual",
    tokens: Sequence[str] | None = None,
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
        target: The token whose probability is shown: its number, or its text with `pg.tokenizer`; one for all positions
            or one for each; `None` for the most probable next token of each position in the model's output.
        stream: `"residual"`, for the state after each layer, or `"attention"` or `"mlp"`, for what these write; or a
            list of them. The view computes others when they are chosen.
        tokens: The text of each position; `None` for those that `pg.tokenizer` gives.
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


def show_tokens(
    pg: PatchableGraph,
    path: str,
    *inputs: Any,
    score: Any = None,
    names: Sequence[str] | None = None,
    tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
    **input_kwargs: Any,
) -> TokensView:
    """Returns a view of the tokens of the inputs for the notebook, colored by an activation.

    The color of a token is one number of the value at its position: of a neuron, along a direction, of a latent, or
    what a probe says. Pointing at a token reads its number out; a click selects its position in all views of the graph.
    With patches, the tokens without and with them are shown; it follows the patches that are chosen in any view.

    Args:
        pg: The graph.
        path: A component or node whose value has the dimensions batch, position, and perhaps channels.
        *inputs: Inputs of the model, positional; without inputs, those of the browser, or the example inputs.
        score: What is taken of each position: the number of a channel, or several; a direction, of shape (channels), or
            several, of shape (directions, channels); or a function of the value, of shape (batch, position, ...), that
            returns one number for each token, of shape (batch, position), or several, of shape (batch, position, n).
            `None` if the value has one number for each token.
        names: The names of several scores.
        tokens: The texts of the tokens, or those of each row of the batch; `None` for those that `pg.tokenizer` gives.
        **input_kwargs: Inputs of the model, by keyword.

    Raises:
        ExperimentError: The value has no positions, or `score` or `names` do not fit it.
        SessionError: There are no inputs, or a patch context is active.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from graphpatch_notebook import PatchableGraph
        >>> from graphpatch_notebook.experiments import show_tokens
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20)).eval()
        >>> pg = PatchableGraph(model, torch.arange(6)[None])
        >>> show_tokens(pg, "layers[1].resid_post", score=torch.randn(8))  # a direction
        <TokensView of pg: layers[1].resid_post, 1 x 6>
        >>> show_tokens(pg, "layers[1].mlp.post", score=[3, 5])
        <TokensView of pg: 2 scores of layers[1].mlp.post, 1 x 6>

    Source:
        CircuitsVis, for colored tokens.
    """
    from graphpatch_notebook.notebook.views.tokens import tokens_of

    workspace, given = _for_view(inputs, input_kwargs)
    return tokens_of(pg, workspace, path, given, score=score, names=names, tokens=tokens)


def show_generation(
    pg: PatchableGraph,
    *inputs: Any,
    max_new_tokens: int = 20,
    **input_kwargs: Any,
) -> GenerationView:
    """Returns a view of the tokens that the model generates, colored by their log-probability or the entropy.

    Tokens are chosen greedily. Pointing at a token shows the probable ones of its step; a click on one of these
    branches there: the generation continues with that token, and both lines are shown. With patches, the lines without
    and with them are shown. Selected tokens can be patched: the patch acts in their steps only.

    Args:
        pg: The graph, of a model with a method `generate`.
        *inputs: Arguments of `generate`, positional: one prompt. Without inputs, those of the browser, or the example
            inputs.
        max_new_tokens: How many tokens are generated at most.
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
    return generation_of(pg, workspace, given, max_new_tokens=max_new_tokens)


def _for_view(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Workspace, Inputs | None]:
    """Returns the variables of the user, who called the caller, and the inputs; `None` for those of *Run*."""
    from graphpatch_notebook.notebook.views.linked import workspace_of_user

    return workspace_of_user(sys._getframe(2).f_globals), Inputs(args, kwargs) if args or kwargs else None


_DIVERGING, _SEQUENTIAL = "RdBu_r", "Purples"
"""Colormaps that are safe for color-blind readers."""
_MISSING: Any = {"facecolor": "0.88", "edgecolor": "0.6", "hatch": "////", "linewidth": 0.0}
_LABEL_PAD = 8.0
"""Between the label of a vertical axis and its ticks, in points: long labels are beside ticks on their whole length."""
_PLAIN: Any = {"parse_math": False, "usetex": False}
"""For texts of users, in which `$` and backslashes have no meaning."""


def _new_axes(rows: Side, columns: Side, shape: tuple[int, int] = (1, 1)) -> Any:
    """Returns an array of axes in a new figure, with room for the rows and columns and their labels."""
    pyplot = extra("matplotlib.pyplot", "a plot")
    wide = max(min(0.32 * len(columns.values), 11.0 / shape[1]), 2.5)
    tall = max(min(0.25 * len(rows.values), 8.5 / shape[0]), 2.0)
    beside, below = (_length(shown_labels(side)) for side in (rows, columns))
    size = shape[1] * (wide + 0.2) + beside + 1.5, shape[0] * (tall + 0.3) + below + 1.0
    return pyplot.subplots(*shape, figsize=size, layout="constrained", squeeze=False)[1]


def _draw_heatmap(grid: Grid, ax: Axes | None, title: str | None) -> Axes:
    axes: Axes = _new_axes(grid.rows, grid.columns)[0, 0] if ax is None else ax
    _draw_color_bar(axes, _draw_cells(axes, grid), grid.scale)
    _draw_legend(axes, grid.scale, loc="lower right", bbox_to_anchor=(1.0, 1.0))
    if title is not None:
        axes.set_title(title, loc="left", pad=None if grid.scale.missing is None else 20.0)
    return axes


def _draw_cells(ax: Axes, grid: Grid) -> Any:
    """Draws cells and labels, and returns the colored mesh. Cells without a number show the hatched background."""
    rows, columns = grid.values.shape
    cells = ax.pcolormesh(
        np.arange(columns + 1) - 0.5,
        np.arange(rows + 1) - 0.5,
        np.ma.masked_invalid(grid.values),
        cmap=_SEQUENTIAL if grid.scale.center is None else _DIVERGING,
        clim=grid.scale.limits,
        rasterized=True,  # viewers of PDF and SVG show gaps between adjacent areas
    )
    if grid.scale.missing is not None:
        ax.patch.set(**_MISSING)
    ax.set_ylim(*((-0.5, rows - 0.5) if grid.is_upward else (rows - 0.5, -0.5)))
    _label(ax.yaxis, grid.rows, grid.rows.title)
    _label(ax.xaxis, grid.columns, grid.columns.title)
    return cells


def _label(axis: Any, side: Side, title: str) -> None:
    """Labels rows or columns; where there are too many, every second, fifth or tenth, and so on."""
    labels, count = shown_labels(side, _glyphs_of_font()), len(side.labels)
    box = axis.axes.get_window_extent()
    room = (box.width if axis.axis_name == "x" else box.height) / axis.axes.figure.dpi
    is_text = side.is_tokens or any(isinstance(value, str) for value in side.values)
    is_upright = axis.axis_name == "x" and is_text and _length(labels) > room / count
    each = _line() if axis.axis_name == "y" or is_upright else _length(labels)
    steps = (step * 10**power for power in range(9) for step in (1, 2, 5))
    kept = range(0, count, next(step for step in steps if count / step * each <= room or step >= count))
    texts = [labels[index] for index in kept]
    axis.set_ticks(kept, texts, rotation=90 if is_upright else 0, fontsize="small", **_PLAIN)
    axis.set_label_text(_wrapped(title), **_PLAIN)
    axis.labelpad = _LABEL_PAD if axis.axis_name == "y" else axis.labelpad


def _line() -> float:
    """Returns the height of a line of small text in inches."""
    from matplotlib import rcParams

    return 1.1 * float(rcParams["font.size"]) / 72


def _length(labels: Sequence[str]) -> float:
    """Returns the approximate length of the longest label in inches, with a gap."""
    return 0.5 * _line() * (max(map(len, labels)) + 1)


def _wrapped(name: str) -> str:
    return textwrap.fill(name, 48) or name


def _glyphs_of_font() -> Callable[[str], bool]:
    """Returns a function that checks whether matplotlib's current fonts have a character."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in FontProperties().get_family()]
    return lambda character: any(font.get_char_index(ord(character)) for font in fonts)


def _draw_color_bar(axes: Any, cells: Any, scale: Scale) -> None:
    """Adds the color bar of axes, with the names of the numbers and of the center."""
    bar = cells.axes.figure.colorbar(cells, ax=axes)
    named = scale.center if scale.center is not None and scale.center.name else None
    bar.set_label(_wrapped(scale.name) + (f"\n(no color: {named})" if named else ""), labelpad=_LABEL_PAD, **_PLAIN)


def _draw_legend(drawn: Any, scale: Scale, **place: Any) -> None:
    """Adds a legend for hatched cells to axes or a figure."""
    from matplotlib.patches import Patch

    if scale.missing is not None:
        handle = Patch(label=scale.missing, **_MISSING)
        drawn.legend(handles=[handle], frameon=False, fontsize="small", borderaxespad=0.1, **place)
