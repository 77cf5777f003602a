"""Whether two values are equal bit for bit, and if not, where they differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.values import IMMUTABLE, children, is_same_plain, key_text

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-10}


class IncomparableError(Exception):
    """Two values are of a kind that cannot be compared (caught inside the package)."""


def difference(a: Any, b: Any, where: str, *, within_rounding: bool = False) -> str | None:
    """Returns a description of the first difference between two values, or `None` if they are equal bit for bit.

    Two values are equal if classes of containers, keys and their order match, and for tensors class, dtype, shape,
    strides, device, `requires_grad` and every bit (of two NaNs the payloads may differ). Objects are equal if their
    attributes are.

    The message calls them `where`. `within_rounding`, floats may differ as `ExtractionOptions` says of attention.

    Raises:
        IncomparableError: Before any difference there are two objects without attributes.

    Example:
        >>> difference((torch.zeros(1), None), (-torch.zeros(1), None), "output")
        'output|sub_0: 1 of 1 values differ'
    """
    return _difference(a, b, where, within_rounding, ())


def _difference(a: Any, b: Any, where: str, within_rounding: bool, above: tuple[int, ...]) -> str | None:
    if a is b or id(a) in above:  # an object may hold itself
        return None
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        is_rounded = within_rounding and a.is_floating_point() and a.dtype == b.dtype and a.shape == b.shape
        return _rounded_difference(a, b, where) if is_rounded else _tensor_difference(a, b, where)
    if type(a) is not type(b):
        return f"{where}: {type(a).__name__} is not {type(b).__name__}"
    if type(a) in IMMUTABLE or isinstance(a, (float, complex)):
        return None if is_same_plain(a, b) else f"{where}: {a!r} is not {b!r}"
    inside_a, inside_b = _inside(a), _inside(b)
    if inside_a is None or inside_b is None:
        raise IncomparableError(f"{where}: objects of type {type(a).__name__} cannot be compared")
    if [key for key, _ in inside_a] != [key for key, _ in inside_b]:
        return f"{where}: the keys differ"
    inner = f"{where}." if "|" in where else f"{where}|"
    for (key, x), (_, y) in zip(inside_a, inside_b, strict=True):
        text = _difference(x, y, inner + key_text(key), within_rounding, (*above, id(a)))
        if text is not None:
            return text
    return None


def _inside(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns the contents of a container or a plain object, by key or attribute."""
    if isinstance(value, (Module, type)) or callable(value):
        return None
    if (inside := children(value)) is not None:
        return inside
    attributes = getattr(value, "__dict__", None)
    return None if attributes is None else list(attributes.items())


def _rounded_difference(a: Tensor, b: Tensor, where: str) -> str | None:
    tolerance = _ROUNDING.get(a.dtype, 3e-2)
    is_close = torch.allclose(a, b, tolerance, tolerance, equal_nan=True)
    return None if is_close else f"{where}: the values differ by more than rounding"


def _tensor_difference(a: Tensor, b: Tensor, where: str) -> str | None:
    if _plain_class(a) is not _plain_class(b):
        return f"{where}: {type(a).__name__} is not {type(b).__name__}"
    for name in ("dtype", "shape", "device", "layout", "requires_grad"):
        if getattr(a, name) != getattr(b, name):
            one, other = (tuple(t.shape) if name == "shape" else getattr(t, name) for t in (a, b))
            return f"{where}: {name} {one} is not {other}"
    if a.layout is torch.strided and a.stride() != b.stride():
        return f"{where}: strides {a.stride()} are not {b.stride()}"
    if a.device.type == "meta":
        return None
    with torch.no_grad():
        # Dynamo of torch 2.8, which may trace this, fails on a strict `zip`; equal layouts have as many parts.
        parts = list(zip(map(_plain, _parts(a)), map(_plain, _parts(b))))  # noqa: B905
        # One answer, not two, has to come back from the device where all is well.
        if all(x.shape == y.shape and torch.equal(_bits(x), _bits(y)) for x, y in parts):
            return None
        wrong = sum(_count_different(x, y) for x, y in parts)
        return f"{where}: {wrong} of {a.numel()} values differ" if wrong else None


def _plain_class(tensor: Tensor) -> type:
    return Tensor if type(tensor) is torch.nn.Parameter else type(tensor)


def _parts(tensor: Tensor) -> list[Tensor]:
    if tensor.layout is torch.sparse_coo:
        coalesced = tensor.coalesce()
        return [coalesced.indices(), coalesced.values()]
    return [tensor] if tensor.layout is torch.strided else [tensor.to_dense()]


def _plain(tensor: Tensor) -> Tensor:
    """Returns a plain, real tensor with the same bits."""
    tensor = tensor.detach().as_subclass(Tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])


def _count_different(a: Tensor, b: Tensor) -> int:
    if a.shape != b.shape:
        return max(a.numel(), b.numel())
    different = _bits(a) != _bits(b)
    if a.is_floating_point():
        different &= ~(a.isnan() & b.isnan())
    return int(different.sum())
