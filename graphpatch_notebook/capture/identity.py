"""Telling values apart: tensor objects over the same memory, the memory itself, references that keep nothing alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor


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
