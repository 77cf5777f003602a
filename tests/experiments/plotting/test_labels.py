"""Labels in pictures: short, and never the same for two different things."""

from __future__ import annotations

import random

import pytest

from graphpatch_notebook.experiments.grids import Side, are_paths, path_labels, shown_labels


def short(texts: list[str], *, is_tokens: bool = False) -> list[str]:
    return shown_labels(Side("path", tuple(texts), tuple(texts), "path", is_tokens))


def test_long_texts_keep_their_end_and_a_bit_of_their_beginning() -> None:
    texts = [f"transformer.h_5.mlp.dropout.{end}" for end in ("dropout", "output")]
    assert short([*texts, "h_0"]) == ["transfo….h_5.mlp.dropout.dropout", "transfo…r.h_5.mlp.dropout.output", "h_0"]
    assert short(["internationalisation"], is_tokens=True) == ["internationalisat…"]


@pytest.mark.parametrize("seed", range(5))
def test_any_texts_are_shortened_to_different_labels(seed: int) -> None:
    dice = random.Random(seed)
    parts = ["h_0", "h_1", "attn", "a_long_name_of_a_module", "x", "…"]
    texts = [".".join(dice.choices(parts, k=dice.randint(1, 12))) for _ in range(60)]
    found = dict(zip(texts, short(texts), strict=True))
    assert len(set(found.values())) == len(found)
    assert all(found[text] == text for text in found if len(text) <= 32)


def test_labels_of_paths_are_what_differs() -> None:
    assert path_labels(["a.b", "a.c", "d.e"]) == (("a.b", "a.c", "d.e"), None)
    assert path_labels(["a.b"] * 2) == (("a.b", "a.b"), None)
    assert path_labels(["a.b.x", "a.c|x"]) == (("b", "c"), "a.*.x")


def test_texts_that_are_not_paths_are_unchanged() -> None:
    assert are_paths(["a.b", "a.c", "a.d", "a.e", "getitem"])
    assert not are_paths(["a.b", "getitem"])
    assert not are_paths(["a.b", "a.c", "a.d", "a.e", "see e.g. this"])
    assert not are_paths(["", "a.b", "a.c", "a.d", "a.e"])
