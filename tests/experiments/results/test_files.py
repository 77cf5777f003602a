"""Results in files: what is loaded is what was saved."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xarray import DataArray

from graphpatch_notebook import ExperimentError, PatchableGraph, ZeroPatch
from graphpatch_notebook.experiments import load_result, save_result

SUFFIXES = ("parquet", "json")
each_suffix = pytest.mark.parametrize("suffix", SUFFIXES)


def is_same(a: Any, b: Any) -> bool:
    """Whether two objects are the same in every respect that Python can show: types, NaN and signs of zeros, too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and is_same(a.ravel().tolist(), b.ravel().tolist())
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and is_same(a.item(), b.item())
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or a.hex() == b.hex()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, dict):
        return is_same(list(a), list(b)) and is_same(list(a.values()), list(b.values()))
    return bool(a == b)


def assert_same(a: DataArray, b: DataArray) -> None:
    assert a.dims == b.dims
    assert is_same(a.name, b.name)
    assert is_same(np.asarray(a.values), np.asarray(b.values))
    assert list(a.coords) == list(b.coords)
    for name in a.coords:
        assert a.coords[name].dims == b.coords[name].dims
        assert is_same(np.asarray(a.coords[name].values), np.asarray(b.coords[name].values))
        assert is_same(a.coords[name].attrs, b.coords[name].attrs)
    assert is_same(a.attrs, b.attrs)


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
numpy_scalars = st.one_of(
    st.floats(width=32).map(np.float32), st.integers(-9, 9).map(np.int16), st.booleans().map(np.bool_)
)
attributes = st.recursive(
    st.one_of(scalars, numpy_scalars, st.lists(st.floats(), max_size=3).map(np.array)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.just("$tuple"), st.integers()), inner, max_size=3),
    ),
    max_leaves=6,
)
labels = [
    st.text(max_size=5),
    st.integers(-(2**60), 2**60),
    st.floats(),
    st.booleans(),
    st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.none()),
]


@st.composite
def results(draw: st.DrawFn) -> DataArray:
    dims = draw(st.lists(st.text(min_size=1, max_size=4), max_size=3, unique=True))
    shape = [draw(st.integers(1, 3)) for _ in dims]
    dtype = draw(st.sampled_from(["float64", "float32", "float16", "int64", "bool"]))
    numbers = draw(st.lists(st.floats(width=16), min_size=math.prod(shape), max_size=math.prod(shape)))
    if dtype in ("int64", "bool"):
        numbers = [hash(number) % 7 for number in numbers]
    elif dtype == "float64":
        numbers = draw(st.lists(st.floats(), min_size=len(numbers), max_size=len(numbers)))
    coords = {}
    for dim, size in zip(dims, shape, strict=True):
        kind = draw(st.sampled_from([None, *labels]))
        if kind is not None:
            values = draw(st.lists(kind, min_size=size, max_size=size))
            array = np.array(values, dtype=object) if kind is labels[-1] else np.array(values)
            coords[dim] = (dim, array, draw(st.dictionaries(st.text(max_size=3), scalars, max_size=1)))
    if dims and draw(st.booleans()):
        coords["beside"] = (dims[0], np.arange(shape[0]) / 3)
    if draw(st.booleans()):
        coords["alone"] = draw(st.sampled_from([3, "a", 2.5]))
    name = draw(st.one_of(st.none(), st.text(max_size=5), st.sampled_from(dims or ["x"])))
    attrs = draw(st.dictionaries(st.text(max_size=4), attributes, max_size=3))
    return DataArray(np.array(numbers, dtype=dtype).reshape(shape), coords, dims, name=name, attrs=attrs)


@given(results())
@settings(max_examples=60)
def test_what_is_loaded_is_what_was_saved(result: DataArray) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for suffix in SUFFIXES:
            file = Path(folder) / f"result.{suffix}"
            save_result(result, file)
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


@each_suffix
def test_results_of_sweeps(swept: DataArray, tmp_path: Path, suffix: str) -> None:
    for number, result in enumerate([swept, swept.sel(unit=1), swept.sel(path="output", metric="max"), swept.mean()]):
        file = tmp_path / f"{number}.{suffix}"
        save_result(result, file)
        assert_same(load_result(file), result)
        assert load_result(str(file)).identical(result)


def test_tables_are_for_other_tools(swept: DataArray, tmp_path: Path) -> None:
    save_result(swept, tmp_path / "result.parquet")
    table = pandas.read_parquet(tmp_path / "result.parquet")
    assert list(table.columns) == ["path", "unit", "metric", swept.name]
    assert len(table) == swept.size
    row = table[(table.path == "sub_0.output") & (table.unit == 1) & (table.metric == "max")]
    assert row[swept.name].item() == swept.sel(path="sub_0.output", unit=1, metric="max").item()
    assert table[swept.name].isna().sum() == 2


def test_columns_with_the_same_name_get_different_names(tmp_path: Path) -> None:
    result = DataArray(np.eye(2), {"value": [1, 2]}, ["loss", "value"], name="loss")
    save_result(result, tmp_path / "result.parquet")
    assert list(pandas.read_parquet(tmp_path / "result.parquet").columns) == ["loss", "value", "value_"]
    assert_same(load_result(tmp_path / "result.parquet"), result)


def test_rows_in_another_order_are_noticed(swept: DataArray, tmp_path: Path) -> None:
    file = tmp_path / "result.parquet"
    save_result(swept, file)
    table = pyarrow.parquet.read_table(file)
    pyarrow.parquet.write_table(table.sort_by([("unit", "ascending")]), file)
    with pytest.raises(ExperimentError, match=r"rows were changed after .* column 'path' differs"):
        load_result(file)
    pyarrow.parquet.write_table(table.slice(1), file)
    with pytest.raises(ExperimentError, match="not written by save_result, or is damaged"):
        load_result(file)


@each_suffix
def test_files_are_replaced_whole(swept: DataArray, tmp_path: Path, suffix: str) -> None:
    file, link = tmp_path / f"result.{suffix}", tmp_path / f"link.{suffix}"
    save_result(swept, file)
    link.symlink_to(file)
    save_result(swept + 1, link)
    assert link.is_symlink()
    assert_same(load_result(file), swept + 1)
    before = file.read_bytes()
    with pytest.raises(ExperimentError, match="attrs\\['what'\\] holds an object of torch.Tensor"):
        save_result(swept.assign_attrs(what=torch.ones(1)), file)
    assert file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([file.name, link.name])


@each_suffix
def test_what_cannot_be_written_is_refused(swept: DataArray, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"result.{suffix}"
    dates = swept.assign_coords(unit=np.array(["2024-01-01", "2024-01-02"], dtype="datetime64[ns]"))
    refused = [
        (dates, r"coordinate 'unit' has dtype datetime64.* convert it with \.astype\(str\)"),
        (swept.astype(complex), "the result has dtype complex128"),
        (swept.stack(both=["path", "unit"]), r"coordinate 'both' has several levels; call reset_index\('both'\)"),
        (swept.values, "expected an xarray.DataArray, not ndarray"),
    ]
    for result, message in refused:
        with pytest.raises(ExperimentError, match=message):
            save_result(result, file)
    assert not file.exists()
    with pytest.raises(ExperimentError, match="cannot be written: No such file or directory"):
        save_result(swept, tmp_path / "nowhere" / file.name)


@each_suffix
def test_other_files_are_refused(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"other.{suffix}"
    with pytest.raises(ExperimentError, match="cannot be read: No such file or directory"):
        load_result(file)
    others = [b"", b"{}", b"[1]", b"PAR1", b'{"format": "something else"}', b"\xff\xfe"]
    if suffix == "parquet":
        pandas.DataFrame({"a": [1, 2]}).to_parquet(file)
        others.append(file.read_bytes())
    for data in others:
        file.write_bytes(data)
        with pytest.raises(ExperimentError, match="was not written by save_result, or is damaged"):
            load_result(file)


def test_names_of_files_say_the_format(swept: DataArray, tmp_path: Path) -> None:
    for name in ("result", "result.csv", "result.nc"):
        with pytest.raises(ExperimentError, match=r"must end in \.parquet or \.json"):
            save_result(swept, tmp_path / name)
        with pytest.raises(ExperimentError, match=r"must end in \.parquet or \.json"):
            load_result(tmp_path / name)


def test_files_of_later_versions_are_refused(swept: DataArray, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    save_result(swept, file)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 2}))
    with pytest.raises(ExperimentError, match="format version 2, but this package reads 1"):
        load_result(file)
