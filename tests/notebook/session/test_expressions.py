"""Values as typed: kept as text, evaluated on demand, and put into calls unchanged where that is possible."""

from __future__ import annotations

import warnings

import pytest

from graphpatch_notebook.notebook.session.expressions import evaluate, free_names, parse_expression
from graphpatch_notebook.notebook.session.slices import parse_slice


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a value is empty"),
        ("a b", "'a b' is not a Python expression"),
        ("x = 3", "is not a Python expression"),
        ("1; import os", "is not a Python expression"),
        ("1)", "is not a Python expression"),
        ("(", "is not a Python expression"),
        ("await x", "cannot await, yield or assign"),
        ("(x := 3)", "cannot await, yield or assign"),
        ("\0", "is not a Python expression"),
        ("*a", "is not a Python expression"),
    ],
)
def test_text_that_is_not_an_expression_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_expression(text)


def test_a_long_text_is_not_quoted_whole() -> None:
    with pytest.raises(ValueError, match="is not a Python expression") as raised:
        parse_expression("(1 + " * 5000)
    assert len(str(raised.value)) < 200
    with pytest.raises(ValueError, match="cannot await, yield or assign") as raised:
        parse_expression(f"[{'1, ' * 5000}(x := 1)]")
    assert len(str(raised.value)) < 200


def test_python_says_nothing_of_the_style_of_a_text() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse_expression("1if x else 2") == "1if x else 2"
        assert free_names("1if x else 2") == ["x"]
        assert evaluate("1if x else 2", {"x": 0}, "value") == 2
        with pytest.raises(ValueError, match="is not allowed"):
            parse_slice("1if x else 2")


def test_nothing_is_evaluated_before_it_is_asked_for() -> None:
    assert parse_expression("1 / 0") == "1 / 0"
    with pytest.raises(ZeroDivisionError):
        evaluate("1 / 0", {}, "value")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = f(a)\ny = x", ["a", "f"]),
        ("import os\nos.x(lambda q: q + b)", ["b"]),
        ("[i for i in data if i > limit]", ["data", "limit"]),
        ("def f(a):\n    return a + c\nf(1)", ["c"]),
        ("x: int = 1", []),
    ],
)
def test_free_names(source: str, names: list[str]) -> None:
    assert [name for name in free_names(source) if name != "int"] == names
