"""Slices as typed between brackets mean what Python and torch mean by them, and nothing in them is evaluated."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpatch_notebook.notebook.session.slices import parse_slice, sliced_shape

SHAPE = torch.Size([2, 4, 8])
VARIABLES = {"tok": 1, "start": 0, "picked": [0, 1]}

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
def test_a_slice_takes_what_python_takes(text: str) -> None:
    index = parse_slice(text).index(VARIABLES)
    assert torch.equal(torch.arange(64).view(SHAPE)[index], taken(text))


@given(texts)
def test_source_and_text_say_the_same(text: str) -> None:
    typed = parse_slice(text)
    assert torch.equal(eval(f"value[{typed}]", {**VARIABLES, "value": torch.arange(64).view(SHAPE)}), taken(text))
    index = eval(typed.source(), dict(VARIABLES))
    assert torch.equal(torch.arange(64).view(SHAPE)[index], taken(text))
    assert parse_slice(str(typed)) == typed


@given(texts)
def test_resulting_shape_is_that_of_torch(text: str) -> None:
    typed = parse_slice(text)
    sliced = sliced_shape(typed, SHAPE, SHAPE, allow_empty=True)
    assert sliced.shape == (None if typed.names else taken(text).shape)
    if not typed.names and taken(text).numel() == 0:
        with pytest.raises(ValueError, match="selects nothing"):
            sliced_shape(typed, SHAPE, SHAPE)
    elif not typed.names:
        assert sliced_shape(typed, SHAPE, SHAPE) == sliced


@pytest.mark.parametrize(
    ("text", "source"),
    [
        (":, -1", "(slice(None), -1)"),
        ("0", "0"),
        ("3:5", "slice(3, 5)"),
        (":5", "slice(None, 5)"),
        ("5:", "slice(5, None)"),
        ("::2", "slice(None, None, 2)"),
        ("..., tok", "(..., tok)"),
        (":, None, start:tok", "(slice(None), None, slice(start, tok))"),
        ("[0, tok]", "[0, tok]"),
    ],
)
def test_source_as_a_person_writes_it(text: str, source: str) -> None:
    assert parse_slice(text).source() == source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a slice is empty; for the whole value, leave the brackets out"),
        ("()", "a slice is empty"),
        ("__import__('os').remove('x')", "is not allowed in the slice .*: write integers"),
        ("x.y", "'x.y' is not allowed in the slice"),
        ("x[0]", r"'x\[0\]' is not allowed in the slice"),
        ("0][0", "is not a slice"),
        ("0] + _[0", "is not a slice"),
        ("1.5", "'1.5' is not allowed in the slice"),
        ("True", "'True' is not allowed in the slice"),
        ("'a'", "in the slice"),
        ("::-1", "torch does not support slices with a step of -1"),
        ("::0", "torch does not support slices with a step of 0"),
        ("..., ...", "more than one `...`"),
        ("[]", "in the slice"),
        ("0 if x else 1", "in the slice"),
        ("x := 3", "in the slice"),
        ("[[0]]", "in the slice"),
        ("\0", "is not a slice"),
        ("(" * 500, "is not a slice"),
    ],
)
def test_invalid_slices_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_slice(text)


def test_too_many_dimensions_are_an_error_with_both_shapes() -> None:
    with pytest.raises(
        ValueError, match=r"slice \[:, :, :, 0\] has 4 dimensions, but the value recorded here has 3: shape \(2, 4, 8\)"
    ):
        sliced_shape(parse_slice(":, :, :, 0"), SHAPE)


@pytest.mark.parametrize("text", ["9", ":, -5", "..., 8", "7:9", "[0, 2]", "None, 2, tok"])
def test_beyond_the_recorded_size_is_a_warning_where_other_inputs_may_have_more(text: str) -> None:
    warning = sliced_shape(parse_slice(text), SHAPE).warning or ""
    assert "the slice does not fit inputs of the example's sizes" in warning
    with pytest.raises(ValueError, match=r"is out of range: dim|selects nothing: dimension . of the value recorded"):
        sliced_shape(parse_slice(text), SHAPE, SHAPE)


@pytest.mark.parametrize("text", ["5:3", ":, -1:-1", "1:1", "..., 7:2:3", "9:2", "start:, 3:3"])
def test_what_takes_nothing_of_any_size_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="selects nothing; if that is meant, give the patch allow_empty=True"):
        sliced_shape(parse_slice(text), SHAPE)
    assert sliced_shape(parse_slice(text), SHAPE, SHAPE, allow_empty=True).warning is None


@pytest.mark.parametrize("text", ["None", "tok"])
def test_none_alone_is_not_an_index_of_everything(text: str) -> None:
    typed = parse_slice(text)
    assert typed.index({"tok": None}) == eval(typed.source(), {"tok": None}) == (None,)


@pytest.mark.parametrize("text", [":", "-2", "1:9", "tok", "tok:9", "..., -8"])
def test_a_slice_within_the_recorded_size_does_not_warn(text: str) -> None:
    assert sliced_shape(parse_slice(text), SHAPE).warning is None


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(NameError, match="name 'tok' is not defined"):
        parse_slice(":, tok").index({})


def test_many_threads_parse_at_the_same_time() -> None:
    """CPython 3.11 may lose count of how deep it is in a syntax tree where several do."""
    texts = [", ".join([f"{number}:{depth}"] * 40) for number in range(4) for depth in range(50)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda text: str(parse_slice(text)), texts * 5))
    assert found == texts * 5
