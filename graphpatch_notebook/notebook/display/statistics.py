"""Statistics of a value, computed in float64 for any dtype. NaN and infinite elements are counted separately.

Tensors are processed in pieces, so their size is not limited.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.notebook.messages import Statistics
from graphpatch_notebook.values import NUMBERS, dtype_name

_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class Readable:
    """The elements of a value as real numbers."""

    tensor: Tensor | None  # dense; `None` if the value has none
    remark: str | None = None  # how the numbers were derived, or why there are none


def readable(value: Any) -> Readable:
    """Returns the elements of a tensor or number as real numbers.

    Quantized tensors are dequantized, sparse tensors become dense, nested tensors are concatenated, and complex numbers
    become their magnitudes.

    Example:
        >>> readable(torch.tensor([3 + 4j]))
        Readable(tensor=tensor([5.]), remark='magnitudes of complex numbers')
    """
    try:
        if isinstance(value, NUMBERS):
            value = torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64)
        if not isinstance(value, Tensor):
            return Readable(None, f"an object of type {type(value).__name__} has no numbers to show")
        if value.device.type == "meta":
            return Readable(None, "a tensor on the device meta has a shape, but no numbers")
        with torch.no_grad():
            return _dense(value.detach())
    except Exception as error:  # a tensor subclass can refuse any operation
        return Readable(None, f"the numbers of this value cannot be read ({type(error).__name__}: {error})")


def _dense(tensor: Tensor) -> Readable:
    remark = None
    if tensor.is_quantized:
        tensor, remark = tensor.dequantize(), f"dequantized from {dtype_name(tensor.dtype)}"
    elif tensor.is_nested:
        parts = [part.reshape(-1) for part in tensor.unbind()]
        tensor, remark = torch.cat(parts), f"the values of {len(parts)} nested tensors in a row"
    elif tensor.layout is not torch.strided:
        tensor, remark = tensor.to_dense(), f"made dense from {dtype_name(tensor.layout)}"
    if type(tensor) is not Tensor:
        tensor = tensor.as_subclass(Tensor)
    if tensor.is_complex():
        tensor, remark = tensor.abs(), "magnitudes of complex numbers" + (f", {remark}" if remark else "")
    tensor.reshape(-1)[:1].tolist()  # a subclass can still have no readable elements
    return Readable(tensor.resolve_neg(), remark)


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the elements of a tensor in order, in float64 and on the CPU, in pieces."""
    flat = tensor.reshape(-1)
    for start in range(0, len(flat), _PIECE):
        yield flat[start : start + _PIECE].cpu().to(torch.float64)


def finite_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the finite elements of a tensor in pieces."""
    for piece in pieces(tensor):
        if len(finite := piece[piece.isfinite()]):
            yield finite


def norm(parts: Iterable[Tensor]) -> float:
    """Returns the norm of the elements of tensors; at most the largest float64, since JSON has no infinity."""
    return min(math.hypot(*(float(part.norm()) for part in parts)), sys.float_info.max)


def statistics_of(value: Any, numbers: Readable | None = None) -> Statistics:
    """Returns the statistics of a value, of which `numbers` are the elements.

    Example:
        >>> found = statistics_of(torch.tensor([1.0, 3.0, float("nan")]))
        >>> found.count, found.nan, found.mean, found.max
        (3, 1, 2.0, 3.0)
    """
    tensor = (readable(value) if numbers is None else numbers).tensor
    is_tensor = isinstance(value, Tensor)
    shape = list(value.shape) if is_tensor and not value.is_nested else []
    known: dict[str, Any] = {"count": value.numel() if is_tensor else 1}
    if tensor is not None:
        nan, infinite = (sum(int(test(piece).sum()) for piece in pieces(tensor)) for test in (torch.isnan, torch.isinf))
        known |= {"count": tensor.numel(), "nan": nan, "infinite": infinite}
        if count := tensor.numel() - nan - infinite:
            known["min"] = min(float(piece.min()) for piece in finite_pieces(tensor))
            known["max"] = max(float(piece.max()) for piece in finite_pieces(tensor))
            # Divided before they are summed: the sum of large numbers would overflow.
            known["mean"] = mean = math.fsum(float((piece / count).sum()) for piece in finite_pieces(tensor))
            if count > 1:
                known["std"] = norm((piece - mean) / math.sqrt(count - 1) for piece in finite_pieces(tensor))
    return Statistics(shape, dtype_or_class(value), str(value.device) if is_tensor else "cpu", **known)


def dtype_or_class(value: Any) -> str:
    """Returns the dtype name of a tensor, or the class name of a number.

    Example:
        >>> dtype_or_class(torch.ones(1)), dtype_or_class(True)
        ('float32', 'bool')
    """
    return dtype_name(value.dtype) if isinstance(value, Tensor) else type(value).__name__
