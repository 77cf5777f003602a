"""The result of a sweep is a `DataArray` to all that asks for one, and imports xarray only then."""

from __future__ import annotations

import copy
import operator
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xarray

from graphpatch_notebook.experiments.results import ResultArray


def plain() -> xarray.DataArray:
    return xarray.DataArray(np.arange(6.0).reshape(2, 3), {"layer": [0, 1]}, ["layer", "position"], name="x")


@pytest.fixture
def result() -> Any:
    return ResultArray(plain)


@pytest.mark.parametrize(
    "operation", [operator.add, operator.sub, operator.mul, operator.pow, operator.ge, operator.eq]
)
@pytest.mark.parametrize("other", [2.0, np.ones((2, 3)), plain()], ids=["number", "numpy", "DataArray"])
def test_operators_on_either_side(result: Any, operation: Callable[[Any, Any], Any], other: Any) -> None:
    assert operation(result, other).identical(operation(plain(), other))
    assert operation(other, result).identical(operation(other, plain()))


@pytest.mark.parametrize(
    "work",
    [
        lambda array: array.mean("position"),
        lambda array: array.sel(layer=1),
        lambda array: array[1],
        lambda array: xarray.where(array > 2, array, 0),
        lambda array: xarray.concat([array, array], "run"),
        lambda array: xarray.Dataset({"x": array})["x"],
        lambda array: xarray.DataArray(array),
        lambda array: np.exp(array),
        lambda array: abs(-array),
        lambda array: next(iter(array)),
        copy.copy,
        copy.deepcopy,
        lambda array: pickle.loads(pickle.dumps(array)),
    ],
)
def test_functions_return_the_same_array(result: Any, work: Callable[[Any], Any]) -> None:
    found = work(result)
    assert type(found) is xarray.DataArray
    assert found.identical(work(plain()))


def test_it_is_taken_for_one(result: Any) -> None:
    assert isinstance(result, xarray.DataArray)
    assert (repr(result), str(result), len(result), dir(result)) == (repr(plain()), str(plain()), 2, dir(plain()))
    assert "_repr_html_" in dir(result)
    assert np.array_equal(np.asarray(result), plain())
    assert weakref.ref(result)() is result
    with pytest.raises(TypeError, match="unhashable"):
        hash(result)
    with pytest.raises(AttributeError, match="no_such_thing"):
        result.no_such_thing  # noqa: B018


def test_changes_stay(result: Any) -> None:
    result.attrs["note"], result.name = "text", "other"
    result[0, 0] = 7
    result += 1
    assert (result.attrs, result.name, result.values[0, 0]) == ({"note": "text"}, "other", 8)
