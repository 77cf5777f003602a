"""Statistics: exact, for every dtype and layout, beside what plain torch gives in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graphpatch_notebook.notebook.run_report import norm, readable, statistics_of

# Of all sizes, whole ones, NaN and infinite ones among them.


def tensor_of(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(st.lists(st.floats(), max_size=40))
def test_no_number_is_infinite(values: list[float]) -> None:
    found = statistics_of(tensor_of(values))
    finite = [value for value in values if math.isfinite(value)]
    assert found.count - found.nan - found.infinite == len(finite)
    assert (found.min, found.max) == ((min(finite), max(finite)) if finite else (None, None))
    assert all(number is None or math.isfinite(number) for number in (found.mean, found.std))
    assert math.isfinite(norm(tensor_of(values)))


@given(st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=2, max_size=50))
def test_summaries_are_those_of_torch(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float16)
    found, doubles = statistics_of(tensor), tensor.double()
    assert found.mean == pytest.approx(float(doubles.mean()), rel=1e-12, abs=1e-10)
    assert found.std == pytest.approx(float(doubles.std()), rel=1e-9, abs=1e-9)


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_has_statistics(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    found = statistics_of(tensor, readable(tensor))
    assert found.dtype == str(dtype).removeprefix("torch.")
    assert (found.shape, found.device, found.count) == ([2, 3], "cpu", 6)
    assert (found.min, found.max, found.nan, found.infinite) == (0, 1, 0, 0)
    assert found.mean == pytest.approx(4 / 6)
    assert found.std == pytest.approx(float(torch.tensor([0, 1, 1, 1, 0, 1.0]).std()))
    assert all(type(getattr(found, key)) is float for key in ("mean", "std", "min", "max"))


def test_what_has_no_numbers_says_why() -> None:
    for value, why in (
        (torch.empty(2, 3, device="meta"), "device meta"),
        ("text", "an object of type str"),
    ):
        found = readable(value)
        assert found.tensor is None
        assert why in str(found.remark)
        assert statistics_of(value, found).mean is None
    assert statistics_of(torch.empty(2, 3, device="meta"), readable(torch.empty(2, 3, device="meta"))).count == 6
