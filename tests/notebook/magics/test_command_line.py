"""Lines, taken apart: paths, slices and values keep every character."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.magics.command_line import TypedPath, expanded, split_line
from graphpatch_notebook.notebook.magics.commands import commands
from graphpatch_notebook.paths import format_path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.b[:, -1] 0.5 * x", ["a.b[:, -1]", "0.5", "*", "x"]),
        ("a[[0, 2], :]\t1, 2", ["a[[0, 2], :]", "1, 2"]),
        ("output|\"a b\".c[0] x['y z']", ['output|"a b".c[0]', "x['y z']"]),
        ("#1 a #2 # rest", ["#1", "a", "#2"]),
        ("#{i + 1} x['#'] #rest", ["#{i + 1}", "x['#']"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert split_line(text) == words


@pytest.mark.parametrize(
    ("text", "value", "steps", "any_shape"),
    [
        ("x 0.5 * y --steps 2, 4 --any-shape", "0.5 * y", "2, 4", True),
        ("--any-shape x - -y", "- -y", None, True),
        ("--steps='1:' x f(a, --b)", "f(a, --b)", "1:", False),
        ("x f('--steps 3') -1e-3", "f('--steps 3') -1e-3", None, False),
    ],
)
def test_options_can_be_anywhere(text: str, value: str, steps: str | None, any_shape: bool) -> None:
    found = commands()["add"][0].parse_line(text)
    assert (found.path, " ".join(found.value), found.steps, found.any_shape) == ("x", value, steps, any_shape)


@pytest.mark.parametrize(
    ("text", "option"),
    [("x --step 3", "nearest: --steps"), ("x --steps", "--steps"), ("x --any-shape=1", "--any-shape"), ("", "PATH")],
)
def test_invalid_options_are_refused(text: str, option: str) -> None:
    with pytest.raises(SessionError, match=option):
        commands()["add"][0].parse_line(text)


@pytest.mark.parametrize("text", ["a[0, 1", "a[0].b", "h[0].mlp[1"])
def test_invalid_paths_are_refused(text: str) -> None:
    with pytest.raises(SessionError):
        TypedPath.cut(text)


@given(
    st.lists(st.text(min_size=1), min_size=1), st.lists(st.text(min_size=1)), st.sampled_from([None, ":, -1", "[0, 1]"])
)
def test_every_path_is_cut_whole(names: list[str], dig: list[str], index: str | None) -> None:
    path = format_path(names, dig)
    assert TypedPath.cut(path if index is None else f"{path}[{index}]") == TypedPath(path, index)


@given(st.text())
def test_no_text_breaks_it(text: str) -> None:
    for take_apart in (TypedPath.cut, split_line, commands()["add"][0].parse_line):
        with contextlib.suppress(SessionError):
            take_apart(text)


@pytest.mark.parametrize(
    ("word", "becomes"),
    [
        ("h_{i:02d}.output", "h_03.output"),
        ('{d["a b"]}.x[:, i]', "key.x[:, i]"),
        ("{path}[:, 0]", 'h."a b".output[:, 0]'),
        ('"{i}".output|"$i"', '"{i}".output|"$i"'),
        ("n_$i", "n_3"),
        ("h_{i", "h_{i"),
    ],
)
def test_what_is_expanded(word: str, becomes: str) -> None:
    assert expanded(word, lambda: {"i": 3, "d": {"a b": "key"}, "path": 'h."a b".output'}) == becomes
