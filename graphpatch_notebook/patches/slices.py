"""Indices of tensors: how many dimensions they use, and whether they are in range and select something."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
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
