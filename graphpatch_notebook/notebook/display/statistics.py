"""Statistics of a value, computed in float64 for any dtype. NaN and infinite elements are counted separately.

Tensors are processed in pieces, so their size is not limited.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    if isinstance(value, NUMBERS):
        try:
            value = torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64)
        except (OverflowError, RuntimeError):
            return Readable(None, "an integer of so many digits cannot be shown")
    if not isinstance(value, Tensor):
        return Readable(None, f"an object of type {type(value).__name__} has no numbers to show")
    if value.device.type == "meta":
        return Readable(None, "a tensor on the device meta has a shape, but no numbers")
    try:
        with torch.no_grad():
            return _dense(value.detach())
    except Exception as error:  # a tensor subclass can refuse any operation
        what = type(value).__name__ if type(value) is not Tensor else f"{value.dtype} tensor"
        return Readable(None, f"the numbers of this {what} cannot be read ({type(error).__name__}: {error})")


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
        remark = "magnitudes of complex numbers" + (f", {remark}" if remark else "")
        tensor = torch.view_as_real(tensor.resolve_conj())
        tensor = torch.hypot(tensor[..., 0], tensor[..., 1])
    tensor.reshape(-1)[:1].tolist()  # a subclass can still have no readable elements
    return Readable(tensor.resolve_neg(), remark)


def doubles(tensor: Tensor) -> Tensor:
    """Returns the elements of a tensor in float64 on the CPU."""
    return tensor.cpu().to(torch.float64)


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the elements of a tensor in order and in float64, in pieces."""
    flat = tensor.reshape(-1)
    for start in range(0, len(flat), _PIECE):
        yield doubles(flat[start : start + _PIECE])


def _finite(piece: Tensor) -> Tensor:
    return piece[piece.isfinite()]


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of the elements of a tensor.

    Attributes:
        count: The number of elements.
        nan: The number of NaN elements.
        infinite: The number of infinite elements.
        minimum, maximum, mean: Of the finite elements; `None` if there are none.
        std: Of the finite elements, with Bessel's correction as in `Tensor.std`; `None` for fewer than two.
    """

    count: int
    nan: int
    infinite: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    std: float | None

    @property
    def finite(self) -> int:
        """The number of finite elements."""
        return self.count - self.nan - self.infinite


def summary(tensor: Tensor) -> Summary:
    """Returns the statistics of a dense tensor of real numbers.

    Example:
        >>> found = summary(torch.tensor([1.0, 3.0, float("nan")]))
        >>> found.count, found.nan, found.mean, found.maximum
        (3, 1, 2.0, 3.0)
    """
    nan = infinite = 0
    lows, highs = [], []
    for piece in pieces(tensor):
        nan += int(piece.isnan().sum())
        infinite += int(piece.isinf().sum())
        finite = _finite(piece)
        if len(finite):
            lows.append(float(finite.min()))
            highs.append(float(finite.max()))
    count = tensor.numel() - nan - infinite
    if not count:
        return Summary(tensor.numel(), nan, infinite, None, None, None, None)
    low, high = min(lows), max(highs)
    # The sum of very large numbers would overflow, and very small numbers would underflow in the division.
    divisor = count if max(-low, high) > 1e280 else 1
    mean = math.fsum(float((_finite(piece) / divisor).sum()) for piece in pieces(tensor)) / (count // divisor)
    mean = min(max(mean, low), high)
    std = None
    if count > 1:
        std = norm(lambda: (_finite(piece) - mean for piece in pieces(tensor)), count - 1)
    return Summary(tensor.numel(), nan, infinite, low, high, mean, std)


def norm(make: Callable[[], Iterator[Tensor]], divisor: int = 1) -> float:
    """Returns the square root of the sum of squares over a divisor, even if the squares or their sum overflow."""
    norms = []
    for piece in make():
        largest = float(piece.abs().max()) if len(piece) else 0.0
        if largest > 0:
            largest = bounded(largest)
            norms.append(bounded(largest * math.sqrt(float((piece / largest).square().sum()) / divisor)))
    return bounded(math.hypot(*norms))


def norm_of(tensor: Tensor) -> float:
    """Returns the norm of the finite elements of a tensor."""
    return norm(lambda: (_finite(piece) for piece in pieces(tensor)))


def bounded(number: float) -> float:
    """Returns the smaller of the number and the largest float64: displayed numbers must be finite."""
    return min(number, sys.float_info.max)


def statistics_of(value: Any, numbers: Readable) -> dict[str, Any]:
    """Returns the `Statistics` of a value for the front end."""
    is_tensor = isinstance(value, Tensor)
    unknown = Summary(value.numel() if is_tensor else 1, 0, 0, None, None, None, None)
    found = unknown if numbers.tensor is None else summary(numbers.tensor)
    return {
        "shape": list(value.shape) if is_tensor and not value.is_nested else [],
        "dtype": dtype_or_class(value),
        "device": str(value.device) if is_tensor else "cpu",
        "count": found.count,
        "mean": found.mean,
        "std": found.std,
        "min": found.minimum,
        "max": found.maximum,
        "nan": found.nan,
        "infinite": found.infinite,
    }


def dtype_or_class(value: Any) -> str:
    """Returns the dtype name of a tensor, or the class name of a number.

    Example:
        >>> dtype_or_class(torch.ones(1)), dtype_or_class(True)
        ('float32', 'bool')
    """
    return dtype_name(value.dtype) if isinstance(value, Tensor) else type(value).__name__
