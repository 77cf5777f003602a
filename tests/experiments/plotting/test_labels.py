"""Labels in pictures: short, and never the same for two different things."""

from __future__ import annotations

import random

import pytest

from graphpatch_notebook.experiments.plotting.labels import are_paths, path_labels, tick_texts


def short(texts: list[str]) -> list[str]:
    return tick_texts(texts, is_token=False)


def test_short_texts_stay_as_they_are() -> None:
    assert short(["h_0", "h_0", "x" * 32]) == ["h_0", "h_0", "x" * 32]


def test_long_texts_keep_their_end_and_a_bit_of_their_beginning() -> None:
    texts = [f"transformer.h_5.mlp.dropout.{end}" for end in ("dropout", "output")]
    assert short(texts) == ["transfo….h_5.mlp.dropout.dropout", "transfo…r.h_5.mlp.dropout.output"]


def test_texts_that_differ_where_they_are_cut_are_numbered() -> None:
    texts = ["b" * 40 + middle + "e" * 40 for middle in ("one", "two", "one")]
    cut = f"{'b' * 7}…{'e' * 24}"
    assert short(texts) == [cut, f"{cut}(2)", cut]
    assert short([*texts, cut]) == [f"{cut}(2)", f"{cut}(3)", f"{cut}(2)", cut]


def test_tokens_keep_their_beginning_unless_it_is_the_same() -> None:
    assert tick_texts(["internationalisation"], is_token=True) == ["internationalisat…"]
    tokens = ["internationalisation", "internationalisations"]
    assert len(set(tick_texts(tokens, is_token=True))) == 2


@pytest.mark.parametrize("seed", range(20))
def test_any_texts_are_shortened_to_different_labels(seed: int) -> None:
    dice = random.Random(seed)
    parts = ["h_0", "h_1", "attn", "a_long_name_of_a_module", "x", "…"]
    texts = [".".join(dice.choices(parts, k=dice.randint(1, 12))) for _ in range(60)]
    found = dict(zip(texts, short(texts), strict=True))
    assert len(set(found.values())) == len(found)
    assert max(map(len, found.values())) <= 32 + len("(60)")
    assert all(found[text] == text for text in found if len(text) <= 32)


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


def test_texts_that_are_not_paths_are_unchanged() -> None:
    assert are_paths(["a.b", "a.c", "a.d", "a.e", "getitem"])
    assert not are_paths(["a.b", "getitem"])
    assert not are_paths(["a.b", "a.c", "a.d", "a.e", "see e.g. this"])
    assert not are_paths(["", "a.b", "a.c", "a.d", "a.e"])
