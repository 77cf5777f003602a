"""What indexes a tensor: how many of its dimensions that takes, and whether it has as many."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

TensorIndex: TypeAlias = Any
"""Anything that indexes a tensor: an int, a slice, `...`, `None`, a list or tensor of indices, a mask, or a tuple."""


def index_problem(index: TensorIndex, shape: torch.Size | None) -> str | None:
    """Returns why `index` cannot index a tensor of a shape (`None`: not known), in words; `None` where it can."""
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


def indexed_dimensions(index: TensorIndex) -> int:
    """Returns how many dimensions of a tensor `index` uses up.

    Raises:
        TypeError: `index` cannot index a tensor.

    Example:
        >>> indexed_dimensions((0, ..., None, slice(1, 3)))
        2
    """
    parts = index if isinstance(index, tuple) else (index,)
    return sum(map(_used_by, parts))


def _used_by(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor):
        return part.dim() if part.dtype in (torch.bool, torch.uint8) else 1
    if isinstance(part, (int, slice)) or hasattr(part, "__index__"):
        return 1
    if hasattr(part, "__array__") or (isinstance(part, Sequence) and not isinstance(part, (str, bytes))):
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            return _used_by(torch.as_tensor(part))
    raise TypeError(f"slice {part!r} cannot index a tensor; use ints, slices, ..., None, tensors, or a tuple of these")
