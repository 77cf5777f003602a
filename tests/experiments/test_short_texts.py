"""Labels in pictures: short, and never the same for two different things."""

from __future__ import annotations

import random

import pytest

from graphpatch_notebook.experiments.path_labels import are_paths, path_labels
from graphpatch_notebook.experiments.short_texts import shortened
from graphpatch_notebook.experiments.tick_texts import any_glyph, tick_texts


def short(texts: list[str], longest: int = 20, *, keeps_start: bool = False) -> list[str]:
    found = shortened([tuple(text) for text in texts], longest, keeps_start=keeps_start)
    return [found[tuple(text)] for text in texts]


def test_short_texts_stay_as_they_are() -> None:
    assert short(["h_0", "h_0", "x" * 20]) == ["h_0", "h_0", "x" * 20]


def test_texts_that_differ_at_their_end_keep_it() -> None:
    texts = [f"transformer.h_5.mlp.dropout.{end}" for end in ("dropout", "output")]
    assert short(texts) == ["tran…dropout.dropout", "tran….dropout.output"]


def test_texts_that_differ_at_their_beginning_keep_it() -> None:
    texts = [f"{start}_projection_in_layer_5.with.the.same.end" for start in ("query", "query_and_key")]
    assert short(texts) == ["query_pro…e.same.end", "query_and…e.same.end"]


def test_texts_that_differ_in_their_middle_show_it() -> None:
    texts = ["b" * 40 + middle + "e" * 40 for middle in ("one", "two")]
    assert short(texts) == ["bbbb…oneeeeeeee…eeee", "bbbb…twoeeeeeee…eeee"]


def test_what_differs_in_several_places_is_told_apart() -> None:
    texts = [f"{'b' * 30}{one}{'m' * 30}{two}{'e' * 30}" for one in "12" for two in "12"]
    found = short(texts)
    assert found == [f"bbbb…{two}eeeeeeeee…eeee{number}" for number in ("", "(2)") for two in "12"]


def test_a_character_written_as_several_letters_is_never_cut() -> None:
    assert tick_texts(["\0" * 9], any_glyph, is_token=True) == ["\\x00" * 4 + "…"]


def test_tokens_keep_their_beginning_unless_it_is_the_same() -> None:
    assert tick_texts(["internationalisation"], any_glyph, is_token=True) == ["internationalisat…"]
    tokens = ["internationalisation", "internationalisations"]
    assert len(set(tick_texts(tokens, any_glyph, is_token=True))) == 2


@pytest.mark.parametrize("seed", range(20))
def test_any_texts_are_short_and_told_apart(seed: int) -> None:
    dice = random.Random(seed)
    parts = ["h_0", "h_1", "attn", "a_long_name_of_a_module", "x", "…"]
    texts = [".".join(dice.choices(parts, k=dice.randint(1, 12))) for _ in range(60)]
    found = dict(zip(texts, short(texts, 16), strict=True))
    assert len(set(found.values())) == len(found)
    assert max(map(len, found.values())) <= 16 + len("(60)")
    assert all(found[text] == text for text in found if len(text) <= 16)


def test_an_odd_path_is_written_in_full() -> None:
    paths = [f"transformer.h_5.attn.x_{number}" for number in range(8)]
    assert path_labels([*paths, "getitem"]).labels == (*(f"x_{number}" for number in range(8)), "/getitem")
    found = path_labels([*paths, "transformer.getitem"])
    assert (found.common, found.labels[-1], found.has_whole) == ("transformer.h_5.attn.*", "/transformer.getitem", True)
    assert path_labels([*paths, "transformer.h_5.attn"]).labels[-1] == "/transformer.h_5.attn"
    assert not path_labels(paths).has_whole


def test_where_it_makes_nothing_shorter_no_path_is_odd() -> None:
    assert path_labels(["a.b", "a.c", "a.d", "a.e", "x"]).common == "a.*"
    assert path_labels(["a.b", "a.c", "d.e"]).labels == ("a.b", "a.c", "d.e")
    assert path_labels(["a.b"] * 2).labels == ("a.b", "a.b")


def test_texts_that_are_no_paths_are_left_alone() -> None:
    assert are_paths(["a.b", "a.c", "a.d", "a.e", "getitem"])
    assert not are_paths(["a.b", "getitem"])
    assert not are_paths(["a.b", "a.c", "a.d", "a.e", "see e.g. this"])
    assert not are_paths(["", "a.b", "a.c", "a.d", "a.e"])
