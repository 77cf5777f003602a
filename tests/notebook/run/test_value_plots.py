"""Planes: which part of a value is drawn, how it is reduced, and what the front end gets; oracles in plain numpy."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphpatch_notebook.errors import ChosenPatchError
from graphpatch_notebook.notebook import run_report as value_plots
from graphpatch_notebook.notebook.messages import Facets
from graphpatch_notebook.notebook.run_report import Plane, picture, readable

SIDE = 10


@pytest.fixture(autouse=True)
def small_heatmaps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert value_plots.SIDE == 256
    monkeypatch.setattr(value_plots, "SIDE", SIDE)


class Drawn(NamedTuple):
    plot: dict[str, Any]
    values: bytes | None


def drawn(value: Any, plane: str | None = None, **names: Any) -> Drawn:
    buffers: list[bytes] = []
    plot = picture(readable(value), Plane.of(plane, names), buffers)
    return Drawn(msgspec.json.decode(msgspec.json.encode(plot)), buffers[0] if buffers else None)


def values_of(found: Drawn) -> np.ndarray:
    assert found.plot["type"] == "heatmap", found.plot
    assert found.values is not None
    return np.frombuffer(found.values, dtype="<f4").reshape(found.plot["rows"], found.plot["columns"])


VALUE = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5) - 50


@pytest.mark.parametrize(
    ("plane", "expected", "text"),
    [
        (None, VALUE[0, 0], "0, 0, :, :"),
        ("1, 2", VALUE[1, 2], "1, 2"),
        ("1,:,-1 , :", VALUE[1, :, -1, :], "1, :, -1, :"),
        ("..., 0, 1:3", VALUE[0, :, 0, 1:3], None),
        (":, 1, 2, ::2", VALUE[:, 1, 2, ::2], ":, 1, 2, ::2"),
        ("[0, 1], 1, 2", VALUE[[0, 1], 1, 2], "[0, 1], 1, 2"),
        ("head, 0", VALUE[1, 0], "head, 0"),
    ],
)
def test_a_plane_is_what_the_slice_takes(plane: str | None, expected: Tensor, text: str | None) -> None:
    if plane == "..., 0, 1:3":
        plane, text = "0, ..., 0, 1:3", "0, ..., 0, 1:3"
    found = drawn(VALUE, plane, head=1)
    assert np.array_equal(values_of(found), expected.numpy())
    assert found.plot["slice"] == text
    assert found.plot["full"] == [found.plot["rows"], found.plot["columns"]] == list(expected.shape)
    assert found.plot["reduced"] is None
    assert torch.equal(VALUE[Plane.of(plane, {"head": 1}).index(4)], expected)


@pytest.mark.parametrize(
    ("plane", "match"),
    [
        ("0", r"leaves 3 dimensions, \[3, 4, 5\]; a heatmap shows two: .*, as in 0, 0, :, :"),
        ("0, 0, 0, 0, 0", r"\[0, 0, 0, 0, 0\] is not valid for a value of shape \[2, 3, 4, 5\]"),
        ("2, 0", "is not valid for a value"),
        ("missing, 0", "integers"),
        ("1 +", "is not a slice"),
        ("f(0)", "is not allowed"),
        ("::-1", "step is 1 or more"),
    ],
)
def test_planes_that_a_value_has_not_are_refused(plane: str, match: str) -> None:
    with pytest.raises(ChosenPatchError, match=match) as caught:
        drawn(VALUE, plane)
    assert caught.value.field == "plane"
    with pytest.raises(ChosenPatchError, match=match):
        Plane.of(plane, {}).part(torch.empty(VALUE.shape, device="meta"))


# --------------------------------------------------------------------------------------------------------------------
# Reduced


sizes = st.integers(2, 3 * SIDE + 5)


def blocks_of(array: np.ndarray, rows: int, columns: int) -> list[list[np.ndarray]]:
    block = math.ceil(array.shape[0] / SIDE), math.ceil(array.shape[1] / SIDE)
    return [
        [
            array[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]].astype(np.float64)
            for j in range(columns)
        ]
        for i in range(rows)
    ]


@given(sizes, sizes, st.integers(0, 5))
def test_large_planes_are_reduced_to_means(rows: int, columns: int, seed: int) -> None:
    value = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    value[0, 0] = math.nan
    found = drawn(value)
    shown = values_of(found)
    assert max(shown.shape) <= SIDE
    expected = [[np.nanmean(b) if np.isfinite(b).any() else np.nan for b in row] for row in blocks_of(
        value.numpy(), *shown.shape
    )]  # fmt: skip
    assert np.allclose(shown, np.array(expected), rtol=1e-6, atol=1e-7, equal_nan=True)
    assert found.plot["full"] == [rows, columns]
    if max(rows, columns) <= SIDE:
        assert found.plot["reduced"] is None
        return
    high, wide = math.ceil(rows / SIDE), math.ceil(columns / SIDE)
    assert found.plot["reduced"] == f"each cell is the mean of {high} x {wide} of {rows} x {columns} values"


@given(sizes.map(lambda n: n + SIDE), st.integers(0, 5))
def test_attention_patterns_keep_their_peaks(size: int, seed: int) -> None:
    scores = torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) * 6
    pattern = scores.masked_fill(torch.ones(size, size).triu(1).bool(), -math.inf).softmax(-1)
    found = drawn(pattern.reshape(1, 1, size, size))
    shown = values_of(found)
    expected = [[b.max() for b in row] for row in blocks_of(pattern.numpy(), *shown.shape)]
    assert np.array_equal(shown, np.array(expected, dtype=np.float32))
    assert "greatest value" in found.plot["reduced"]
    assert shown.max() == float(pattern.max())


# --------------------------------------------------------------------------------------------------------------------
# Histograms


@given(st.lists(st.one_of(st.floats(width=32), st.integers(-30, 30).map(float)), min_size=1, max_size=80))
def test_histograms_count_every_finite_number(values: list[float]) -> None:
    found = drawn(torch.tensor(values, dtype=torch.float64))
    finite = np.array([value for value in values if math.isfinite(value)])
    if not len(finite):
        assert found.plot["type"] == "none"
        return
    plot = found.plot
    edges = np.array(plot["edges"])
    assert plot["type"] == "histogram"
    assert len(edges) == len(plot["counts"]) + 1
    assert np.isfinite(edges).all()
    assert (np.diff(edges) >= 0).all()
    assert sum(plot["counts"]) == len(finite)
    assert edges[0] <= finite.min()
    assert finite.max() <= edges[-1]
    if (np.diff(edges) > 0).all():
        assert plot["counts"] == np.histogram(finite, bins=edges)[0].tolist()


@pytest.mark.parametrize(
    ("value", "plane", "text"),
    [
        (torch.arange(6.0), None, None),
        (torch.arange(6.0).reshape(1, 6), None, ":, :"),
        (torch.arange(6.0).reshape(2, 3, 1), None, "0, :, :"),
        (torch.arange(6.0).reshape(2, 3), "0", "0"),
        (torch.arange(6.0).reshape(2, 3), "0:1", "0:1"),
    ],
)
def test_what_has_one_row_or_dimension_is_a_histogram(value: Tensor, plane: str | None, text: str | None) -> None:
    found = drawn(value, plane)
    assert (found.plot["type"], found.plot["slice"], found.values) == ("histogram", text, None)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.tensor(0.5), "one number: 0.5"),
        (7, "one number: 7"),
        (torch.ones(0, 3), r"its shape is \[0, 3\]"),
        (torch.ones(2, 0, 3), r"its shape is \[2, 0, 3\]"),
        (torch.empty(2, 3, device="meta"), "on the device meta"),
        (None, "an object of type NoneType"),
    ],
)
def test_what_cannot_be_drawn_says_why(value: Any, why: str) -> None:
    found = drawn(value)
    assert found.plot["type"] == "none"
    assert re.search(why, found.plot["why"])


@given(st.permutations(range(4)), st.integers(0, 2), st.data())
def test_rows_columns_and_facets_are_the_dimensions_that_were_chosen(
    order: list[int], count: int, data: st.DataObject
) -> None:
    shape = (2, 3, 4, 5)
    value = torch.arange(120.0).reshape(shape)
    facets, axes, others = sorted(order[:count]), (order[2], order[3]), order[count:2]
    fixed = {dim: data.draw(st.integers(-shape[dim], shape[dim] - 1)) for dim in others}
    plane = Plane.of(", ".join(str(fixed.get(dim, ":")) for dim in range(4)), {}, axes)
    buffers: list[bytes] = []
    plot = picture(readable(value), plane, buffers)
    index = tuple(fixed.get(dim, slice(None)) for dim in range(4))
    left = [dim for dim in range(4) if dim not in fixed]
    wanted = (
        value[index].permute([left.index(dim) for dim in (*facets, *axes)]).reshape(-1, *(shape[dim] for dim in axes))
    )
    plots = plot.plots if isinstance(plot, Facets) else [plot]
    assert isinstance(plot, Facets) == bool(facets)
    found = [np.frombuffer(buffers[one.buffer], "<f4").reshape(one.rows, one.columns) for one in plots]
    assert np.array_equal(np.stack(found), wanted.numpy())
    for one, own in zip(plots, wanted, strict=True):  # the slice of each takes it out, in the order of the dimensions
        taken = value[Plane.of(one.slice, {}).index(4)]
        assert torch.equal(taken.T if axes[0] > axes[1] else taken, own)


@pytest.mark.parametrize(
    ("plane", "axes", "match"),
    [
        (":, :, :, :, :", (3, 4), "facets of 3 dimensions"),
        ("0, 0, :, 0, :", (3, 4), "one index of dimension 3"),
        ("0, 0, [1], :, :", (3, 4), "a number or a range"),
        ("0, 0, 0, :, :, :", (3, 4), "a number or a range|not valid"),
    ],
)
def test_axes_that_a_slice_does_not_leave_are_refused(plane: str, axes: tuple[int, int], match: str) -> None:
    with pytest.raises(ChosenPatchError, match=match) as caught:
        picture(readable(torch.ones(2, 2, 2, 2, 2)), Plane.of(plane, {}, axes), [])
    assert caught.value.field == "plane"
