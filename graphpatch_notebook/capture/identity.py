"""Telling values apart: tensor objects over the same memory, the memory itself, references that keep nothing alive."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


def alias(tensor: Tensor) -> Tensor:
    """Returns another tensor object over the same memory, or the same one where torch cannot make one."""
    if type(tensor) is not Tensor:  # a parameter must stay one: somebody may put it back into its module
        return tensor
    try:
        return tensor.view_as(tensor)
    except RuntimeError:
        return tensor


def memory_of(value: Any) -> int | None:
    """Returns what tells the memory of a tensor from that of others; `None` where it has none of its own."""
    if not isinstance(value, Tensor):
        return None
    try:
        return value.untyped_storage().data_ptr() or None
    except Exception:  # sparse, not initialised yet, some subclasses
        return None


def weak(value: Any) -> Callable[[], Any]:
    """Returns what gives `value`, weakly where Python can refer to it so."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def still_used(values: list[T], holders: int = 1) -> list[T]:
    """Returns the values of a list that something outside of it refers to.

    Args:
        values: The values.
        holders: How many references of the caller each of them has, the list included.
    """
    counts = [sys.getrefcount(value) for value in values]
    own = next(sys.getrefcount(value) for value in [object()]) + holders - 1
    return [value for value, count in zip(values, counts, strict=True) if count > own]
