"""Lines, taken apart: paths, slices and values keep every character."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.magics.command_line import TypedPath, arguments, split_options, without_comment, words
from graphpatch_notebook.paths import format_path

KNOWN = {"--steps": True, "--any-shape": False, "-o": True}


@pytest.mark.parametrize(
    ("text", "path", "index", "rest"),
    [
        ("a.b[:, -1] 0.5 * x", "a.b", ":, -1", "0.5 * x"),
        ("a.b -1e-3", "a.b", None, "-1e-3"),
        ("a.b [1, 2]", "a.b", None, "[1, 2]"),
        ("a.b[[0, 2], :]", "a.b", "[0, 2], :", ""),
        ('output|"a b".c[0] x["y]"]', 'output|"a b".c', "0", 'x["y]"]'),
        ('output|"a\\"b[0]"', 'output|"a\\"b[0]"', None, ""),
        ("a[ : , None ]   x", "a", ": , None", "x"),
        ("  a\tx", "a", None, "x"),
        ("", "", None, ""),
        ('a|"open', 'a|"open', None, ""),
    ],
)
def test_places(text: str, path: str, index: str | None, rest: str) -> None:
    assert TypedPath.cut(text) == TypedPath(path, index, rest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a[0, 1", "the bracket after 'a' is not closed"),
        ("a[0].b", r"a space is missing between the slice of 'a' and '\.b'; for an item"),
    ],
)
def test_invalid_places_are_refused(text: str, message: str) -> None:
    with pytest.raises(SessionError, match=message):
        TypedPath.cut(text)


@given(
    st.lists(st.text(min_size=1), min_size=1), st.lists(st.text(min_size=1)), st.sampled_from([None, ":, -1", "[0, 1]"])
)
def test_every_path_is_cut_whole(names: list[str], dig: list[str], index: str | None) -> None:
    path = format_path(names, dig)
    brackets = "" if index is None else f"[{index}]"
    assert TypedPath.cut(f"{path}{brackets} value") == TypedPath(path, index, "value")


@pytest.mark.parametrize(
    ("text", "options", "rest"),
    [
        ("x", {}, "x"),
        ("--any-shape x", {"--any-shape": ""}, "x"),
        ("0.5 * x  --steps 2, 4 --any-shape", {"--steps": "2, 4", "--any-shape": ""}, "0.5 * x"),
        ('x --steps "2, 4"', {"--steps": "2, 4"}, "x"),
        ("x --steps='1:'", {"--steps": "1:"}, "x"),
        ('f("--steps 3")', {}, 'f("--steps 3")'),
        ("f(a, --b)", {}, "f(a, --b)"),
        ("- -x", {}, "- -x"),
        ("--5", {}, "--5"),
        ("-o 'a b.py'", {"-o": "a b.py"}, ""),
        ('"""a --steps 1"""', {}, '"""a --steps 1"""'),
    ],
)
def test_options(text: str, options: dict[str, str], rest: str) -> None:
    assert split_options(text, KNOWN) == (options, rest)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x --step 3", "unknown option --step; nearest: --steps"),
        ("a --b", "unknown option --b"),
        (
            "x --slice 3",
            "unknown option --slice; a slice is written directly after the path, as in h_0.output[:, 3]",
        ),
        ("x --steps", "the option --steps needs an argument"),
        ("x --steps --any-shape", "the option --steps needs an argument"),
        ("x --any-shape=1", "the option --any-shape takes no argument"),
        ("--steps 1 x --steps 2", "the option --steps is given twice"),
        ("a --any-shape b", "'--any-shape' is in the middle of other text: write options last, after 'b'"),
    ],
)
def test_invalid_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(SessionError, match=re.escape(message)):
        split_options(text, KNOWN)


def test_words_and_comments() -> None:
    assert [word for _, word in words("a  f(b, 'c d') [1, 2]")] == ["a", "f(b, 'c d')", "[1, 2]"]
    assert arguments("#1 a #2 # rest") == ["#1", "a", "#2"]
    assert arguments("a #rest") == ["a"]
    assert without_comment("x['#'] # y") == "x['#']"
    assert without_comment("# y") == ""
    assert without_comment("'it''s # \\' #' #") == "'it''s # \\' #'"


@given(st.text())
def test_no_text_breaks_it(text: str) -> None:
    for take_apart in (TypedPath.cut, lambda t: split_options(t, KNOWN), arguments, without_comment):
        with contextlib.suppress(SessionError):
            take_apart(text)
