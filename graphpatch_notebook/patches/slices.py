"""Slices and selections: indices of tensors, and whole numbers counted from zero (steps, positions).

"prefill", 3, range(2, 5), slice(2, None), [1, 4]   as users write them
[[3], [5], [2]]                                     positions of each row of the batch
  -> Selection                                      the numbers within a range
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

LARGEST_INDEX = 2**31 - 1
"""The largest number in an index. No dimension is longer, and torch multiplies steps by strides in 64 bits."""

TensorIndex: TypeAlias = Any
"""Anything that indexes a tensor: an int, a slice, `...`, `None`, a list or tensor of indices, a mask, or a tuple."""


def as_index(given: TensorIndex) -> TensorIndex:
    """Returns an index in the form that torch accepts: a list with more than integers becomes a tuple.

    Example:
        >>> as_index([(0, 2), slice(1, 3)]), as_index([0, 2]), as_index([[0, 1], [1, 2]])
        (((0, 2), slice(1, 3, None)), [0, 2], ([0, 1], [1, 2]))
    """
    kinds = (slice, list, tuple, Tensor)  # torch accepts a tuple of these, too, but with a deprecation warning
    is_tuple = isinstance(given, list) and any(p is None or p is Ellipsis or isinstance(p, kinds) for p in given)
    return tuple(given) if is_tuple else given


def index_problem(index: TensorIndex, shape: torch.Size | None) -> str | None:
    """Returns why `index` cannot index a tensor of a shape (`None`: not known), or `None` if it can."""
    try:
        dimensions = indexed_dimensions(index)
    except TypeError as error:
        return str(error)
    if shape is None or dimensions <= len(shape):
        return None
    return (
        f"slice {index!r} has {dimensions} dimensions, but the value recorded here has {len(shape)}: "
        f"shape {tuple(shape)}"
    )


def selection_problem(
    index: TensorIndex,
    sizes: Sequence[int | None] | None,
    shown: str,
    *,
    allow_empty: bool = False,
    only_slices: bool = False,
) -> str | None:
    """Returns which part of `index` is out of range or selects nothing, or `None` if each part selects something.

    Args:
        index: An index for which `index_problem` returns `None`.
        sizes: The sizes of the tensor's dimensions, with `None` for sizes that may differ; `None` if no size is known.
        shown: The name of the tensor in the message.
        allow_empty: Whether a part may select nothing.
        only_slices: Whether values of indices and masks are not read, as in each call.

    Example:
        >>> print(selection_problem((..., slice(64, 80)), (None, 64), "the value").partition(";")[0])
        slice [..., 64:80] selects nothing: dimension 1 of the value has 64 entries
        >>> selection_problem((..., slice(64, 80)), (None, None), "the value")
    """
    known = (None,) * indexed_dimensions(index) if sizes is None else sizes
    for part, dim in _placed(index, len(known)):
        if only_slices and not isinstance(part, slice):
            continue
        size = known[dim] if dim < len(known) else None
        problem = _problem_of(part, size)
        if problem is None or (allow_empty and problem is _NOTHING):
            continue
        there = "" if size is None else f": dimension {dim} of {shown} has {size} entries"
        repair = "; if that is meant, give the patch allow_empty=True" if problem is _NOTHING else ""
        return f"slice [{index_text(index)}] {problem}{there}{repair}"
    return None


def index_text(index: TensorIndex) -> str:
    """Returns an index as Python source between brackets.

    Example:
        >>> index_text((..., slice(2, None), [0, 1], np.int64(3)))
        '..., 2:, [0, 1], 3'
    """
    return ", ".join(map(_part_text, index if isinstance(index, tuple) else (index,))) or "()"


def composed(outer: tuple[Any, ...], inner: tuple[Any, ...], shape: Sequence[int]) -> tuple[Any, ...]:
    """Returns one index for `tensor[outer][inner]`; both are made of integers and slices.

    `inner` may have one `...`. Of the shape of the tensor, only sizes of dimensions that both indices cut are read.

    Example:
        >>> composed((slice(None), slice(64, 128)), (0, slice(-8, None)), (2, 768))
        (0, slice(120, 128, 1))
    """
    index: list[Any] = [*outer, *(slice(None),) * (len(shape) - len(outer))]
    kept = [dim for dim, part in enumerate(index) if isinstance(part, slice)]
    for part, position in _placed(inner, len(kept)):
        dim = kept[position]
        if index[dim] == slice(None):
            index[dim] = part
        elif part != slice(None):
            chosen = range(shape[dim])[index[dim]][part]
            end = None if isinstance(chosen, int) or chosen.stop < 0 else chosen.stop
            index[dim] = chosen if isinstance(chosen, int) else slice(chosen.start, end, chosen.step)
    while index and index[-1] == slice(None):
        index.pop()
    return tuple(index)


def part_sizes(sizes: Sequence[int | None], index: tuple[Any, ...]) -> list[int | None]:
    """Returns the sizes of the part that an index of integers and slices selects, with `None` for unknown sizes.

    Example:
        >>> part_sizes([None, 12, None, 64], (slice(None), 3, slice(1, None), slice(0, 32)))
        [None, None, 32]
    """
    parts = [*index, *(slice(None),) * (len(sizes) - len(index))]
    kept = [(size, part) for size, part in zip(sizes, parts, strict=False) if isinstance(part, slice)]
    return [None if size is None else len(range(size)[part]) for size, part in kept]


def _part_text(part: Any) -> str:
    if isinstance(part, slice):
        parts = ["" if bound is None else repr(bound) for bound in (part.start, part.stop, part.step)]
        return ":".join(parts if parts[2] else parts[:2])
    if isinstance(part, (Tensor, np.ndarray)) and len(part.reshape(-1)) > 16:
        return f"{'a tensor' if isinstance(part, Tensor) else 'an array'} of {part.dtype} of shape {tuple(part.shape)}"
    if isinstance(part, (np.generic, np.ndarray)):
        part = part.tolist()
    return "..." if part is Ellipsis else repr(part)


def indexed_dimensions(index: TensorIndex) -> int:
    """Returns how many dimensions of a tensor `index` uses.

    Raises:
        TypeError: `index` cannot index a tensor.

    Example:
        >>> indexed_dimensions((0, ..., None, slice(1, 3)))
        2
    """
    parts = index if isinstance(index, tuple) else (index,)
    return sum(map(_used_by, parts))


def part_dimensions(index: TensorIndex, rank: int) -> tuple[int, bool]:
    """Returns the number of dimensions of a part of a tensor, and whether the last is (a part of) that of the tensor.

    Example:
        >>> part_dimensions((0, ..., [1, 2]), 4), part_dimensions((..., 3), 4), part_dimensions(None, 4)
        ((3, True), (3, False), (4, True))
    """
    keeps_last, added, lists = True, 0, [0]
    for part, dim in () if index is None else _placed(index, rank):
        if part is None or isinstance(part, bool):
            added += 1
        elif not isinstance(part, slice):
            numbers = torch.as_tensor(part if isinstance(part, Sequence) or hasattr(part, "__array__") else 0)
            lists.append(1 if numbers.dtype in (torch.bool, torch.uint8) else numbers.dim())
            keeps_last = keeps_last and (lists[-1] > 0 or dim + _used_by(part) < rank)
            added -= _used_by(part)
    return rank + added + max(lists), keeps_last


def _placed(index: TensorIndex, rank: int) -> list[tuple[Any, int]]:
    """Returns the parts of an index, each with the first dimension that it uses."""
    found, dim = [], 0
    for part in index if isinstance(index, tuple) else (index,):
        if part is Ellipsis:
            dim += rank - indexed_dimensions(index)
        else:
            found.append((part, dim))
            dim += _used_by(part)
    return found


_NOTHING = "selects nothing"


def _problem_of(part: Any, size: int | None) -> str | None:
    """Returns what is wrong with a part of an index in a dimension of this size (`None`: any size)."""
    if isinstance(part, slice):
        return _NOTHING if _is_empty(part, size) else None
    if part is None or isinstance(part, bool):
        return _NOTHING if part is False else None
    if isinstance(part, int) or not (isinstance(part, Sequence) or hasattr(part, "__array__")):
        return None if size is None or -size <= operator.index(part) < size else "is out of range"
    chosen = part if isinstance(part, Tensor) else torch.as_tensor(part)
    is_mask = chosen.dtype in (torch.bool, torch.uint8)
    if not chosen.numel() or (is_mask and not chosen.is_meta and not chosen.any()):
        return _NOTHING
    if size is None or is_mask or chosen.is_meta or chosen.is_complex():
        return None
    return None if -size <= int(chosen.min()) and int(chosen.max()) < size else "is out of range"


def _is_empty(part: slice, size: int | None) -> bool:
    """Returns whether a slice selects nothing of a non-empty dimension of this size (`None`: of any size)."""
    try:
        bounds = [0 if bound is None else operator.index(bound) for bound in (part.start, part.stop)]
    except TypeError:  # not integers: torch raises
        return False
    size = 2 * max(map(abs, bounds)) + 2 if size is None else size
    return size > 0 and not range(size)[part.start : part.stop]


def _used_by(part: Any) -> int:
    if type(part) is slice and part == slice(None):  # most are
        return 1
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    numbers = (part.start, part.stop, part.step) if isinstance(part, slice) else (part,)
    if any(isinstance(number, (int, np.integer)) and abs(number) > LARGEST_INDEX for number in numbers):
        raise TypeError(f"a number in the slice is too large: a tensor has at most {LARGEST_INDEX} entries in a row")
    if isinstance(part, Tensor):
        return part.dim() if part.dtype in (torch.bool, torch.uint8) else 1
    if isinstance(part, (int, slice)) or hasattr(part, "__index__"):
        return 1
    if hasattr(part, "__array__") or (isinstance(part, Sequence) and not isinstance(part, (str, bytes))):
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            return _used_by(torch.as_tensor(part))
    raise TypeError(f"slice {part!r} cannot index a tensor; use ints, slices, ..., None, tensors, or a tuple of these")


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

    Negative positions count from the end. The last step is not known before a generation has ended.

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
