"""Pictures of results: what is drawn is what the numbers say, and nothing is cut off or misread."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import matplotlib

matplotlib.use("Agg")

import itertools

import numpy as np
import pytest
import xarray as xr
from matplotlib import pyplot
from matplotlib.axes import Axes

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments import plot_heads, plot_heatmap
from graphpatch_notebook.experiments.grids import are_paths, path_labels

PATHS = [f"transformer.h_{layer}.mlp.output" for layer in range(3)]
TOKENS = ["The", " cat", "\n", "$x$$y$"]


@pytest.fixture(autouse=True)
def figures() -> Iterator[None]:
    before = matplotlib.rcParams.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a font without a character, a layout that cannot be
        yield
    assert dict(matplotlib.rcParams) == dict(before)
    pyplot.close("all")


def a_result(**attrs: Any) -> xr.DataArray:
    values = np.arange(12.0).reshape(3, 4)
    return xr.DataArray(values, {"path": PATHS}, ["path", "position"], name="score", attrs=attrs)


def ticks(ax: Axes) -> tuple[list[str], list[str]]:
    """Returns the labels beside the rows, and below the columns."""
    ax.figure.canvas.draw()
    return ([tick.get_text() for tick in ax.get_yticklabels()], [tick.get_text() for tick in ax.get_xticklabels()])


def numbers_of(ax: Axes) -> np.ma.MaskedArray:
    """Returns the numbers of the cells that are drawn, of shape (rows, columns)."""
    columns, rows = (round(abs(high - low)) for low, high in (ax.get_xlim(), ax.get_ylim()))
    return ax.collections[0].get_array().reshape(rows, columns)


def bar_of(ax: Axes) -> Axes:
    return ax.collections[0].colorbar.ax


def legend_of(ax: Axes) -> list[str]:
    legend = ax.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def pixels_of(ax: Axes) -> np.ndarray:
    """Returns the color at the middle of each cell, as it is drawn, of shape (rows, columns, 3)."""
    ax.figure.canvas.draw()
    image = np.asarray(ax.figure.canvas.buffer_rgba())
    rows, columns = numbers_of(ax).shape
    places = np.array([[(column + 0.25, row + 0.25) for column in range(columns)] for row in range(rows)])
    x, y = ax.transData.transform(places.reshape(-1, 2)).T
    return image[image.shape[0] - 1 - y.astype(int), x.astype(int), :3].reshape(rows, columns, 3)


def assert_apart(ax: Axes) -> None:
    """The labels of ticks do not overlap, and lie apart from the label of their axis."""
    for axis in (ax.xaxis, ax.yaxis):
        boxes = [label.get_window_extent() for label in axis.get_ticklabels() if label.get_text()]
        assert not any(one.shrunk(0.9, 0.9).overlaps(two.shrunk(0.9, 0.9)) for one, two in itertools.pairwise(boxes))
        title = axis.label.get_window_extent().padded(4)
        assert not axis.label.get_text() or not any(title.overlaps(box) for box in boxes)


def cut_labels(ax: Axes) -> list[str]:
    """Returns the texts that reach beyond the figure."""
    figure = ax.figure
    figure.canvas.draw()
    beyond = {
        id(label)  # of ticks that are not drawn, as they are not in view
        for axis in figure.findobj(matplotlib.axis.Axis)
        for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text() and id(text) not in beyond]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    return [
        text
        for text, box in boxes
        if box.x0 < -1 or box.y0 < -1 or box.x1 > figure.bbox.x1 + 1 or box.y1 > figure.bbox.y1 + 1
    ]


# -- heatmaps ----------------------------------------------------------------------------------------------------------


def test_cells_ticks_and_names() -> None:
    ax = plot_heatmap(a_result(), tokens=TOKENS, title="Restored")
    assert np.array_equal(numbers_of(ax), a_result().values)
    assert ticks(ax) == (["h_0", "h_1", "h_2"], ["The", "␣cat", "⏎", "$x$$y$"])
    assert (ax.get_ylabel().split(), ax.get_xlabel()) == (["path:", "transformer.*.mlp.output"], "position")
    assert bar_of(ax).get_ylabel() == "score"
    assert ax.get_title("left") == "Restored"


@pytest.mark.parametrize(
    ("attrs", "options", "limits", "words"),
    [
        (
            {"corrupted": 2.0, "clean": 9.0, "baseline": 2.0},
            {},
            (-7.0, 11.0),
            "score\n(no color: corrupted 2)",
        ),
        ({"baseline": 10.0}, {}, (0.0, 20.0), "score\n(no color: baseline 10)"),
        ({"baseline": [1.0, 2.0]}, {}, (0.0, 11.0), "score"),
        (
            {"corrupted": 2.0, "clean": 9.0, "baseline": 0.0},
            {},
            (-11.0, 11.0),
            "score\n(no color: corrupted 0)",
        ),
        ({"baseline": 2.0, "method": "gradient"}, {}, (-11.0, 11.0), "score"),
        ({"metric": "Loss"}, {}, (0.0, 11.0), "score (Loss)"),
        ({"baseline": 2.0}, {"center": 5}, (-1.0, 11.0), "score"),
        ({"baseline": 2.0}, {"center": None}, (0.0, 11.0), "score"),
        ({"corrupted": 2.0}, {"relative_to": "corrupted"}, (-9.0, 9.0), "score − corrupted 2"),
        ({}, {"relative_to": 1}, (-10.0, 10.0), "score − 1"),
    ],
)
def test_what_colors_mean(attrs: dict, options: dict, limits: tuple[float, float], words: str) -> None:
    ax = plot_heatmap(a_result(**attrs), **options)
    assert ax.collections[0].get_clim() == limits
    assert bar_of(ax).get_ylabel() == words


def test_cells_without_a_number_are_hatched() -> None:
    result = a_result(errors=[{"cell": "path=...", "error": "ValueError"}])
    result.values[1, 2] = np.nan
    ax = plot_heatmap(result)
    ax.collections[0].set(cmap="viridis", clim=(0, 20))
    assert ax.collections[0].get_clim() == (0, 20)
    assert numbers_of(ax).mask.tolist() == np.isnan(result.values).tolist()
    assert legend_of(ax) == ["failed"]
    grey = np.ptp(pixels_of(ax).astype(int), axis=-1) == 0
    assert grey[1, 2]
    assert np.array_equal(grey.nonzero(), ([1], [2]))
    result.values[0, 0] = np.inf
    assert legend_of(plot_heatmap(result)) == ["no finite value"]


@pytest.mark.parametrize("shape", [(1, 1), (12, 16), (80, 100)])
def test_no_label_is_cut_off_or_overlaps_another(shape: tuple[int, int]) -> None:
    rows, columns = shape
    values = np.random.default_rng(0).standard_normal(shape)
    paths = [f"transformer.h_{layer}.a_module_with_a_long_name.output" for layer in range(rows)]
    result = xr.DataArray(values, {"path": paths}, ["path", "position"], name="a long name of a metric " * 4)
    result.values[0, 0] = np.nan
    ax = plot_heatmap(result, tokens=["<|endoftext|>", *[" token"] * (columns - 1)], title="A title")
    assert not cut_labels(ax)
    assert_apart(ax)
    assert_apart(bar_of(ax))


def test_tokens_of_the_whole_sequence_are_picked_by_position() -> None:
    result = a_result().isel(position=[1, 3]).assign_coords(position=[1, 3])
    assert ticks(plot_heatmap(result, tokens=TOKENS))[1] == ["␣cat", "$x$$y$"]
    assert ticks(plot_heatmap(result, tokens=["a", "b"]))[1] == ["a", "b"]
    assert ticks(plot_heatmap(result.assign_coords(position=[-2, -1]), tokens=TOKENS))[1] == ["⏎", "$x$$y$"]


@pytest.mark.parametrize(
    ("token", "label"),
    [
        ("Ġthe", "Ġthe"),
        ("▁the", "▁the"),
        ("\t", "⇥"),
        ("", "(empty)"),
        ("\x00", "\\x00"),
        ("\u200b", "\\u200b"),
        ("\u4f60\u597d", "\\u4f60\\u597d"),
        ("\U0001f9ff", "\\U0001f9ff"),
        ("\u0301e", "◌\u0301e"),
        ("\\alpha", "\\alpha"),
        ("_" * 40, "_" * 17 + "…"),
    ],
)
def test_any_character_of_a_token_can_be_drawn(token: str, label: str) -> None:
    ax = plot_heatmap(a_result(), tokens=[token, "b", "c", "d"])
    assert ticks(ax)[1][0] == label


@pytest.mark.parametrize(
    ("result", "options"),
    [
        (np.zeros((2, 2)), {}),
        (a_result().to_dataset(), {}),
        (a_result()[0], {}),
        (a_result().expand_dims(head=[5]), {}),
        (a_result()[:0], {}),
        (a_result() * 1j, {}),
        (a_result(), {"tokens": ["a", "b"]}),
        (a_result(), {"tokens": [1, 2, 3, 4]}),
        (a_result(), {"tokens": object()}),  # a tokenizer
        (a_result(), {"center": "mean"}),
        (a_result(), {"center": float("nan")}),
        (a_result(baseline=0.0, clean=5.0, corrupted=1.0), {"relative_to": "clean"}),  # it is normalized
        (a_result(method="gradient", corrupted=1.0), {"relative_to": "corrupted"}),  # it is a difference
        (a_result(baseline=1.0), {"relative_to": "clean"}),
        (a_result().expand_dims(head=[5]), {"plot": plot_heads}),
        (a_result().expand_dims(head=[5]), {"plot": plot_heads, "facet": "head"}),
        (a_result().expand_dims(head=[5]), {"plot": plot_heads, "facet": "token"}),
        (a_result(), {"plot": plot_heads}),
    ],
)
def test_what_cannot_be_drawn(result: Any, options: dict) -> None:
    with pytest.raises(ExperimentError):
        options.pop("plot", plot_heatmap)(result, **options)
    assert not pyplot.get_fignums()


# -- heads -------------------------------------------------------------------------------------------------------------


def heads() -> xr.DataArray:
    values = np.arange(24.0).reshape(2, 4, 3)
    return xr.DataArray(values, dims=["layer", "head", "position"], name="effect")


def test_heads_are_columns() -> None:
    ax = plot_heads(heads().isel(position=1).transpose("head", "layer"))
    assert np.array_equal(numbers_of(ax), heads().values[:, :, 1])
    assert ticks(ax) == (["0", "1"], ["0", "1", "2", "3"])
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("layer", "head")


def test_facets_have_the_same_colors() -> None:
    array = heads()
    array.values[0, 0, 2] = np.nan
    axes = plot_heads(array, facet="position", tokens=["a", " b", "c"], title="Heads")
    assert len(axes) == 3
    for position, ax in enumerate(axes):
        drawn = numbers_of(ax).filled(np.nan)
        assert np.array_equal(drawn, array.values[:, :, position], equal_nan=True)
        assert ax.collections[0].get_clim() == (0.0, 23.0)
    assert [ax.get_title() for ax in axes] == ["position 0: a", "position 1: ␣b", "position 2: c"]
    assert [text.get_text() for text in axes[0].figure.legends[0].get_texts()] == ["no value"]
    assert not cut_labels(axes[0])
    assert_apart(axes[0])


# -- labels ------------------------------------------------------------------------------------------------------------


def test_labels_of_paths_are_what_differs() -> None:
    assert path_labels(["a.b", "a.c", "d.e"]) == (("a.b", "a.c", "d.e"), None)
    assert path_labels(["a.b"] * 2) == (("a.b", "a.b"), None)
    assert path_labels(["a.b.x", "a.c|x"]) == (("b", "c"), "a.*.x")
    assert are_paths(["a.b", "a.c", "a.d", "a.e", "getitem"])
    for texts in (["a.b", "getitem"], ["a.b", "a.c", "a.d", "a.e", "see e.g. this"], ["", "a.b", "a.c", "a.d", "a.e"]):
        assert not are_paths(texts)
