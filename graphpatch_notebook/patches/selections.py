"""Selections of whole numbers, counted from zero: of steps of a generation, and of positions in a sequence.

"prefill", 3, range(2, 5), slice(2, None), [1, 4]   as users write them
[[3], [5], [2]]                                     positions of each row of the batch
  -> Selection                                      the numbers within a range
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

NumberSelection: TypeAlias = "int | range | slice | Collection[int]"
"""A number, or several: a `range`, a slice (`slice(3, None)`: from 3 on), or a list, tuple or set."""

PositionSelection: TypeAlias = "NumberSelection | Sequence[Collection[int]] | Tensor"
"""Positions for all rows of the batch, or, with two dimensions, those of each row: `[[3], [5], [2]]`."""

StepSelection: TypeAlias = "NumberSelection | str"
"""Steps of a generation: numbers, `"prefill"` (step 0), or `"decoding"` (all after it)."""

NAMED_STEPS = {"prefill": slice(0, 1), "decoding": slice(1, None)}


@dataclass(frozen=True, slots=True)
class Selection:
    """Some of the numbers from zero on.

    Attributes:
        chosen: The numbers, in the order given, or a slice. With `rows`, those of all rows together. Negative ones
            count from the end.
        text: How the user wrote them.
        rows: The numbers of each row of the batch; `None` if they are the same for all rows.
    """

    chosen: tuple[int, ...] | slice
    text: str
    rows: tuple[tuple[int, ...], ...] | None = None

    def __contains__(self, number: int) -> bool:
        return bool(self.within(number, number + 1))

    def within(self, start: int, stop: int) -> list[int]:
        """Returns the selected numbers from `start` on and below `stop`, in the order given.

        Example:
            >>> selection(slice(1, None, 3), "steps").within(3, 9), selection([8, 2, 5], "steps").within(3, 9)
            ([4, 7], [8, 5])
        """
        if not isinstance(self.chosen, slice):
            return _between(self.chosen, start, stop)
        first, end, step = self.chosen.indices(stop)
        skipped = max(0, -(-(start - first) // step))
        return list(range(first + skipped * step, end, step))

    def rows_within(self, start: int, stop: int) -> list[list[int]]:
        """Returns the numbers of each row from `start` on and below `stop`, in the order given.

        Example:
            >>> selection([[3], [5, 6], [2]], "positions").rows_within(3, 6)
            [[3], [5], []]
        """
        assert self.rows is not None
        return [_between(row, start, stop) for row in self.rows]

    @property
    def lists_several(self) -> bool:
        """Whether several numbers are given one by one: a `range` or a slice may go beyond what there is."""
        return isinstance(self.chosen, tuple) and len(self.chosen) > 1

    @property
    def counts_from_end(self) -> bool:
        """Whether it has negative numbers."""
        ends = (self.chosen.start, self.chosen.stop) if isinstance(self.chosen, slice) else self.chosen
        return any(end is not None and end < 0 for end in ends)

    def outside(self, start: int, stop: int) -> list[int]:
        """Returns the numbers given one by one that are not from `start` on and below `stop`.

        Example:
            >>> selection([1, 9], "positions").outside(0, 6)
            [9]
        """
        listed = self.chosen if isinstance(self.chosen, tuple) else ()
        return [number for number in listed if not _between([number], start, stop)]

    def __str__(self) -> str:
        return self.text


def _between(numbers: Sequence[int], start: int, stop: int) -> list[int]:
    counted = (number if number >= 0 else stop + number for number in numbers)
    return [number for number in counted if start <= number < stop]


def selection(given: Any, what: str, *, allow_empty: bool = False) -> Selection:
    """Returns the selection for the field `what` of a patch, from what the user wrote.

    Negative positions count from the end. There is no last step, before a generation has ended.

    Raises:
        ValueError: `given` is not a selection, or is empty without `allow_empty`.

    Example:
        >>> 0 in selection("prefill", "steps"), 7 in selection({5, 6}, "positions")
        (True, False)
    """
    if what == "steps" and isinstance(given, str) and given in NAMED_STEPS:
        return Selection(NAMED_STEPS[given], repr(given))
    try:
        rows = _rows(given) if what == "positions" else None
        chosen = _chosen(given) if rows is None else tuple(dict.fromkeys(itertools.chain(*rows)))
    except TypeError:
        names = "".join(f"{name!r}, " for name in NAMED_STEPS) if what == "steps" else ""
        of_rows = ", or whole numbers for each row of the batch ([[3], [5], [2]])" if what == "positions" else ""
        raise ValueError(
            f"{what} must be {names}a whole number, an ascending range or slice, or a collection of numbers{of_rows}, "
            f"not {given!r}"
        ) from None
    if not all(rows or [chosen]) and not allow_empty:
        raise ValueError(
            f"{what}={given!r} selects nothing{' in a row' if rows else ''}; if that is meant, a patch takes "
            "allow_empty=True"
        )
    if isinstance(chosen, slice) or isinstance(given, (range, slice)):
        text = repr(given)
    else:
        text = ", ".join(map(str, chosen if rows is None else map(list, rows)))
    found = Selection(chosen, text, rows)
    if what == "steps" and found.counts_from_end:
        raise ValueError(f"{what}={given!r} counts from the end, which is not known during a generation")
    return found


def _rows(given: Any) -> tuple[tuple[int, ...], ...] | None:
    """Returns the rows of a selection with two dimensions, else `None`."""
    listed = given.tolist() if getattr(given, "ndim", 0) == 2 else given
    if not isinstance(listed, (list, tuple)) or not any(map(_is_several, listed)):
        return None
    return tuple(tuple(map(_whole, row)) for row in listed)


def _is_several(given: Any) -> bool:
    return isinstance(given, Collection) and not isinstance(given, (str, bytes)) and getattr(given, "ndim", 1) != 0


def _chosen(given: Any) -> tuple[int, ...] | slice:
    if isinstance(given, range) and given and given.step > 0 and given.start >= 0:
        given = slice(given.start, given.stop, given.step)
    if isinstance(given, slice):
        start, stop, step = (part if part is None else _whole(part) for part in (given.start, given.stop, given.step))
        if step is not None and step < 1:
            raise TypeError("not ascending")
        is_empty = stop is not None and 0 <= stop <= max(start or 0, 0)
        return () if is_empty else slice(start, stop, step)
    if isinstance(given, (str, bytes, Mapping)):
        raise TypeError("not numbers")
    numbers = tuple(map(_whole, given if _is_several(given) else [given]))
    return tuple(sorted(numbers)) if isinstance(given, Set) else numbers


def _whole(number: Any) -> int:
    if isinstance(number, bool) or getattr(number, "dtype", None) == torch.bool:
        raise TypeError("a bool is not a number")
    return operator.index(number)
