"""Results in files: what is loaded is what was saved."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from hypothesis import given, settings
from hypothesis import strategies as st
from xarray import DataArray

from graphpatch_notebook import ExperimentError, PatchableGraph, ZeroPatch
from graphpatch_notebook.experiments import load_result, save_result


def assert_same(a: DataArray, b: DataArray) -> None:
    """Compares names, coordinates and attributes, and the bits and types of values and labels (NaN and -0.0, too)."""
    assert a.identical(b)
    assert a.dtype == b.dtype
    assert a.values.tobytes() == b.values.tobytes()
    for name, coord in a.coords.items():
        assert repr(coord.values.tolist()) == repr(b[name].values.tolist())
        assert coord.attrs == b[name].attrs


text = st.text(st.characters(codec="utf8", exclude_characters="\0"), max_size=5)
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
attributes = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
labels = [
    text,
    st.integers(-(2**60), 2**60),
    st.floats(allow_nan=False),
    st.booleans(),
    st.one_of(st.booleans(), st.integers(-9, 9), text),
]


@st.composite
def results(draw: st.DrawFn) -> DataArray:
    dims = draw(st.lists(st.sampled_from(["layer", "head", "position", "path"]), max_size=3, unique=True))
    shape = [draw(st.integers(1, 3)) for _ in dims]
    numbers = draw(st.lists(st.floats(), min_size=math.prod(shape), max_size=math.prod(shape)))
    coords = {}
    for dim, size in zip(dims, shape, strict=True):
        kind = draw(st.sampled_from(labels))
        values = draw(st.lists(kind, min_size=size, max_size=size))
        array = np.array(values, dtype=object) if kind is labels[-1] else np.array(values)
        coords[dim] = (dim, array, draw(st.dictionaries(text, plain, max_size=1)))
    if draw(st.booleans()):
        coords["alone"] = draw(st.sampled_from([3, "a", 2.5]))
    attrs = draw(st.dictionaries(st.text(max_size=4), attributes, max_size=3))
    return DataArray(np.array(numbers).reshape(shape), coords, dims, draw(st.sampled_from([None, "loss"])), attrs)


@given(results())
@settings(max_examples=20)
def test_what_is_loaded_is_what_was_saved(result: DataArray) -> None:
    before = result.copy(deep=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.nc"
        save_result(result, file)
        assert_same(result, before)
        assert_same(load_result(file), result)


@pytest.fixture
def swept() -> DataArray:
    torch.manual_seed(0)
    pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)), torch.ones(2, 3))
    result = pg.sweep(
        {"path": ["sub_0.output", "output"], "unit": range(2)},
        lambda path, unit: {path: ZeroPatch(slice=(slice(None), unit))},
        torch.ones(2, 3),
        metric=lambda output: {"sum": output.sum(), "max": output.max()},
        progress=False,
    )
    result.values[1, 1] = np.nan  # as where it was interrupted
    return result


def test_results_of_sweeps(swept: DataArray, tmp_path: Path) -> None:
    for result in (swept, swept.sel(unit=1), swept.sel(path="output", metric="max"), swept.mean()):
        save_result(result, tmp_path / "result.nc")
        assert_same(load_result(str(tmp_path / "result.nc")), result)
    other_tool = xarray.load_dataarray(tmp_path / "result.nc")
    assert other_tool.equals(swept.mean())


def test_files_are_replaced_whole(swept: DataArray, tmp_path: Path) -> None:
    file = tmp_path / "result.nc"
    save_result(swept, file)
    before = file.read_bytes()
    with pytest.raises(ExperimentError):
        save_result(swept.assign_attrs(what=object()), file)
    assert file.read_bytes() == before
    assert [*tmp_path.iterdir()] == [file]


def test_other_values_and_files_are_refused(swept: DataArray, tmp_path: Path) -> None:
    for result, name in ((swept.values, "result.nc"), (swept, "result.csv")):
        with pytest.raises(ExperimentError):
            save_result(result, tmp_path / name)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(FileNotFoundError, match=r"missing\.nc"):
        load_result(tmp_path / "missing.nc")
    (tmp_path / "text.nc").write_text("no results")
    swept.drop_attrs().to_netcdf(tmp_path / "others.nc")
    for name in ("text.nc", "others.nc"):
        with pytest.raises(ExperimentError, match=name):
            load_result(tmp_path / name)
