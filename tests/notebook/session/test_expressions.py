"""Values as typed: kept as text, evaluated on demand, and put into calls unchanged where that is possible."""

from __future__ import annotations

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpatch_notebook.notebook.session.expressions import as_argument, evaluate, free_names, parse_expression
from graphpatch_notebook.notebook.session.slices import parse_slice

NAMES = {"a": 3, "b": [1, 2, 5]}
atoms = st.sampled_from(["a", "b[1]", "1", "-2.5", "'x # \"y\"'", "(1, 2)"])
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds("{}, {}".format, inner, inner).map(lambda text: f"[{text}]"),
        st.builds("({})".format, inner),
        st.builds("{} if a else {}".format, atoms, inner),
        st.builds("(lambda: ({}))()".format, inner),
        st.builds("{}, {}".format, atoms, atoms),
        st.builds("{} # {}".format, atoms, atoms),
        st.builds("[{}\n]".format, inner),
    ),
    max_leaves=4,
)


@given(expressions)
def test_an_argument_is_worth_what_the_expression_is(text: str) -> None:
    try:
        parsed = parse_expression(text)
    except ValueError:
        return
    source = as_argument(parsed)
    assert "\n" not in source
    assert eval(f"(lambda *args: args)(0, {source}, 0)", dict(NAMES)) == (0, evaluate(parsed, NAMES, "value"), 0)


@pytest.mark.parametrize("text", ["0.5 * steering[2]", "{'a':1}['a']", "lambda t: t.flip(0)", "-1e-3", "torch.ones(3)"])
def test_an_argument_is_written_as_it_was_typed(text: str) -> None:
    assert as_argument(parse_expression(f"  {text} ")) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a value is empty"),
        ("a b", "'a b' is not a Python expression"),
        ("x = 3", "is not a Python expression"),
        ("1; import os", "is not a Python expression"),
        ("1)", "is not a Python expression"),
        ("(", "is not a Python expression"),
        ("await x", "a value cannot await, yield or assign"),
        ("(x := 3)", "a value cannot await, yield or assign"),
        ("\0", "is not a Python expression"),
        ("*a", "is not a Python expression"),
    ],
)
def test_what_is_no_expression_is_refused(text: str, message: str) -> None:
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
        assert as_argument("1if x else 2") == "1if x else 2"
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
