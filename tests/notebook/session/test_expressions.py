"""Python as typed: kept as text, evaluated on demand; slices mean what Python and torch mean by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.session.expressions import (
    Origin,
    free_names,
    parse_expression,
    parse_slice,
    sliced_shape,
    written_arguments,
)

SHAPE = torch.Size([2, 4, 8])
VARIABLES = {"tok": 1, "start": 0, "picked": [0, 1]}


@pytest.mark.parametrize(
    "text", ["", "a b", "x = 3", "1; import os", "1)", "(", "await x", "(x := 3)", "\0", "*a", "(1 + " * 5000]
)
def test_text_that_is_not_an_expression_is_refused(text: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        parse_expression(text)
    assert len(str(raised.value)) < 250


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = f(a)\ny = x", ["a", "f"]),
        ("import os\nos.x(lambda q: q + b)", ["b"]),
        ("[i for i in data if i > limit]", ["data", "limit"]),
        ("def f(a):\n    return a + c\nf(1)", ["c"]),
    ],
)
def test_free_names(source: str, names: list[str]) -> None:
    assert free_names(source) == names


# --------------------------------------------------------------------------------------------------------------------
# How a graph was made

A, B, C = (torch.tensor([float(number)]) for number in range(3))


@pytest.mark.parametrize(
    ("args", "kwargs", "namespace", "written"),
    [
        ((A,), {}, {"a": A, "again": A}, "a"),
        ((A, None, 2, "x"), {"flag": True}, {"a": A}, "a, None, 2, 'x', flag=True"),
        ((A,), {"mask": B}, {"a": A, "m": B}, "a, mask=m"),
        ((C,), {"ids": A, "mask": B, "n": 1}, {"c": C, "inputs": {"ids": A, "mask": B}}, "c, n=1, **inputs"),
        ((), {"ids": A}, {"a": A, "more": {"ids": A, "other": B}}, "ids=a"),
        ((A,), {}, {"b": B, "_": A, "_3": A}, None),
        ((A,), {"mask": B}, {"a": A}, None),
        ((), {}, {}, ""),
    ],
)
def test_inputs_are_written_by_the_variables_that_hold_them(
    args: tuple[Any, ...], kwargs: dict[str, Any], namespace: dict[str, Any], written: str | None
) -> None:
    assert written_arguments(args, kwargs, namespace) == written
    if written is not None:
        assert eval(f"(lambda *a, **k: (a, k))({written})", dict(namespace)) == (args, kwargs)


def test_an_origin_is_python_and_names_what_it_is_made_from() -> None:
    assert Origin("g").names == {"g"}
    assert Origin("pg", "models['a']", "ids, **tokens, mask=m").names == {"pg", "models", "ids", "tokens", "m"}
    for texts in [("a b",), ("pg", "(", None), ("pg", "model", "x) + f("), ("pg", "model", "x)(y"), ("pg", "a)(b")]:
        with pytest.raises(SessionError):
            Origin(*texts)


# --------------------------------------------------------------------------------------------------------------------
# Slices

numbers = st.integers(-2, 1).map(str)
names = st.sampled_from(sorted(set(VARIABLES) - {"picked"}))
bounds = st.one_of(st.just(""), st.integers(-9, 9).map(str), names)
steps = st.one_of(st.just(""), st.just(":"), st.integers(1, 3).map(lambda n: f":{n}"))
slices = st.builds(lambda a, b, c: f"{a}:{b}{c}", bounds, bounds, steps)
parts = st.one_of(numbers, names, slices, st.sampled_from(["None", "[0, 1]", "picked"]))
texts = st.builds(
    lambda before, after, dots: ", ".join([*before, *(["..."] if dots else []), *after]),
    st.lists(parts, min_size=1, max_size=2),
    st.lists(parts, max_size=1),
    st.booleans(),
)


def taken(text: str) -> torch.Tensor:
    """Returns what Python says that `value[text]` is."""
    return eval(f"value[{text}]", {**VARIABLES, "value": torch.arange(64).view(SHAPE)})


@given(texts)
def test_a_slice_takes_what_python_takes_and_its_source_and_text_say_the_same(text: str) -> None:
    typed, value = parse_slice(text), torch.arange(64).view(SHAPE)
    assert torch.equal(value[typed.index(VARIABLES)], taken(text))
    assert torch.equal(eval(f"value[{typed}]", {**VARIABLES, "value": value}), taken(text))
    assert torch.equal(value[eval(typed.source(), dict(VARIABLES))], taken(text))
    assert parse_slice(str(typed)) == typed


@given(texts)
def test_resulting_shape_is_that_of_torch(text: str) -> None:
    typed = parse_slice(text)
    sliced = sliced_shape(typed, SHAPE, lambda: SHAPE, allow_empty=True)
    assert sliced == (None if typed.names else taken(text).shape, None)
    if not typed.names and taken(text).numel() == 0:
        with pytest.raises(ValueError, match="selects nothing"):
            sliced_shape(typed, SHAPE, lambda: SHAPE)


INVALID = """
() __import__('os').remove('x') x.y x[0] 0][0 0]+_[0 1.5 True 'a' ::-1 ::0 ...,... [] x:=3 [[0]] [None] \0
""".split()


@pytest.mark.parametrize("text", ["", "0 if x else 1", "(" * 500, *INVALID])
def test_invalid_slices_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="slice"):
        parse_slice(text)


@pytest.mark.parametrize("text", ["9", ":, -5", "..., 8", "7:9", "[0, 2]", "None, 2, tok"])
def test_beyond_the_recorded_size_is_a_warning_where_other_inputs_may_have_more(text: str) -> None:
    assert "does not fit inputs of the example's sizes" in str(sliced_shape(parse_slice(text), SHAPE)[1])
    with pytest.raises(ValueError, match=r"dimension \d"):
        sliced_shape(parse_slice(text), SHAPE, lambda: SHAPE)


@pytest.mark.parametrize("text", ["5:3", ":, -1:-1", "..., 7:2:3", "start:, 3:3", ":, :, :, 0"])
def test_what_fits_no_size_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"allow_empty=True|has 4 dimensions"):
        sliced_shape(parse_slice(text), SHAPE)
