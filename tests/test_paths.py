from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphpatch_notebook.paths import (
    ParsedPath,
    format_path,
    format_segment,
    nearest,
    numbered,
    parse_path,
    unique_name,
)

HOSTILE = st.text(alphabet=st.one_of(st.sampled_from('.|"\\[] \t\n_0aé\x00\u2028\U0001f600'), st.characters()))
NAMES = st.lists(HOSTILE, min_size=1, max_size=4).map(tuple)
DIG = st.lists(HOSTILE, max_size=4).map(tuple)


@given(NAMES, DIG)
@example(("a.b",), ('"', "|"))
@example(("",), ("",))
@example(("\ud800",), ())
def test_what_is_formatted_parses_back(names, dig):
    text = format_path(names, dig)
    assert parse_path(text) == ParsedPath(names, dig)
    assert str(ParsedPath(names, dig)) == text


@given(st.lists(HOSTILE, min_size=2, max_size=2, unique=True), DIG)
def test_two_paths_never_share_a_text(names, dig):
    assert format_path(names[:1], dig) != format_path(names[1:], dig)


@given(HOSTILE)
def test_any_text_parses_or_is_refused_with_a_value_error(text):
    try:
        parsed = parse_path(text)
    except ValueError:
        with pytest.raises(ValueError, match=re.escape(f"not a node path: {text!r} (")):
            parse_path(text)
    else:
        assert parse_path(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("text", "names", "dig"),
    [
        ("x", ("x",), ()),
        ("transformer.h_0.attn.output|sub_0", ("transformer", "h_0", "attn", "output"), ("sub_0",)),
        ("output|sub_0.logits", ("output",), ("sub_0", "logits")),
        ('output|"a.b"', ("output",), ("a.b",)),
        ('"a|b".c', ("a|b", "c"), ()),
        ("lambda.__class__", ("lambda", "__class__"), ()),
        ("größe", ("größe",), ()),
    ],
)
def test_paths_as_people_write_them(text, names, dig):
    assert parse_path(text) == ParsedPath(names, dig)
    assert format_path(names, dig) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a name is missing at position 0"),
        ("a.", "a name is missing at position 2"),
        (".a", "a name is missing at position 0"),
        ("a..b", "a name is missing at position 2"),
        ("a|", "a name is missing at position 2"),
        ("a|b|c", r"unexpected '\|' at position 3"),
        ("a[0]", r"unexpected '\[' at position 1"),
        ("a b", "unexpected ' ' at position 1"),
        ('"a', "the quote at position 0 does not end"),
        ('"a"b', "unexpected 'b' at position 3"),
    ],
)
def test_an_unknown_path_says_where_it_ends(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_path(text)


def test_only_names_with_a_meaning_are_quoted():
    assert [format_segment(name) for name in ("h_0", "0", "a.b", "")] == ["h_0", "0", '"a.b"', '""']


def test_nearest_prefers_paths_that_share_parts():
    candidates = ["h_0.mlp.act.mul_3", "h_1.mlp.act.mul_3", "h_0.attn.mul_3", "h_0.mlp.act.add"]
    assert nearest("h_1.mlp.act.mul_33", candidates, 1) == ["h_1.mlp.act.mul_3"]
    assert nearest("h_0.mlp.act.mull_3", candidates, 1) == ["h_0.mlp.act.mul_3"]
    assert nearest("anything", [], 3) == []


def test_nearest_prefers_the_nearest_number():
    assert nearest("act.mul_9", [f"act.mul_{n}" for n in range(1, 9)]) == ["act.mul_8", "act.mul_7", "act.mul_6"]


def test_unique_names_count_up():
    assert unique_name("mul", {"add"}) == "mul"
    assert unique_name("mul", {"mul", "mul_1"}) == "mul_2"
    counting = numbered("x")
    assert [next(counting), next(counting)] == ["x_1", "x_2"]
