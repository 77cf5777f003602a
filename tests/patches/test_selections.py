"""Selections: what users write for `steps` and `positions`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphpatch_notebook.patches.slices import selection


@pytest.mark.parametrize(
    ("given", "below_twelve"),
    [
        (3, [3]),
        (range(2, 9, 3), [2, 5, 8]),
        (range(9, 2, -3), [9, 6, 3]),
        (slice(9, None), [9, 10, 11]),
        (slice(None, 3), [0, 1, 2]),
        (slice(1, 8, 3), [1, 4, 7]),
        ([4, 1], [4, 1]),
        ({4, 1}, [1, 4]),
        ({5}, [5]),
        (torch.tensor([1, 2]), [1, 2]),
        (torch.tensor(3), [3]),
    ],
    ids=str,
)
@pytest.mark.parametrize("what", ["steps", "positions"])
def test_numbers(given: Any, below_twelve: list[int], what: str) -> None:
    chosen = selection(given, what)
    assert chosen.within(0, 12) == below_twelve
    assert chosen.within(2, 8) == [number for number in below_twelve if 2 <= number < 8]
    assert [number for number in range(12) if number in chosen] == sorted(below_twelve)
    is_short = isinstance(given, (int, range, slice))
    assert str(chosen) == (repr(given) if is_short else ", ".join(map(str, below_twelve)))


@pytest.mark.parametrize(
    "given", ["foo", 1.5, [1.5], True, [True], torch.tensor([True]), {1: 2}, b"1", slice(1.5), slice(4, 0, -1)], ids=str
)
@pytest.mark.parametrize("what", ["steps", "positions"])
def test_texts_that_are_not_numbers_are_refused(given: Any, what: str) -> None:
    with pytest.raises(ValueError, match=f"^{what} must be .*a whole number, an ascending range or slice"):
        selection(given, what)


def test_positions_of_rows_have_two_dimensions() -> None:
    assert selection([[3], (5, 6)], "positions").rows == selection([{3}, range(5, 7)], "positions").rows
    assert selection([3, 5], "positions").rows is None
    for given in ([[[1]]], [[1], 2], [[1.5]]):
        with pytest.raises(ValueError, match="^positions must be .* whole numbers for each row"):
            selection(given, "positions")
    with pytest.raises(ValueError, match="^steps must be"):
        selection([[1]], "steps")


@pytest.mark.parametrize("given", [-1, [1, -2], range(-2, 3), slice(-2, None), slice(None, -1)], ids=str)
def test_positions_count_from_the_end_and_steps_do_not(given: Any) -> None:
    with pytest.raises(ValueError, match=r"steps=.* counts from the end"):
        selection(given, "steps")
    chosen = given if isinstance(given, (list, slice)) else list(given) if isinstance(given, range) else [given]
    of_all = list(range(7))[chosen] if isinstance(chosen, slice) else [number % 7 for number in chosen]
    assert sorted(selection(given, "positions").within(0, 7)) == sorted(set(of_all))
    assert selection(given, "positions").counts_from_end


@pytest.mark.parametrize("given", [[], range(0), slice(3, 3), slice(0, 0)], ids=str)
def test_nothing(given: Any) -> None:
    with pytest.raises(ValueError, match="selects nothing"):
        selection(given, "steps")
