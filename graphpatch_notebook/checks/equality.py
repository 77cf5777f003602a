"""Whether two values are equal bit for bit, and if not, where they differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.values import IMMUTABLE, children, is_same_plain, key_text

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class IncomparableError(Exception):
    """Two values are of a kind that cannot be compared (caught inside the package)."""


def difference(a: Any, b: Any, where: str, above: tuple[int, ...] = ()) -> str | None:
    """Returns a description of the first difference between two values, or `None` if they are equal bit for bit.

    Two values are equal if classes of containers, keys and their order match, and for tensors class, dtype, shape,
    strides, device, `requires_grad` and every bit (of two NaNs the payloads may differ). Objects are equal if their
    attributes are. The message calls them `where`; `above` are the ids of the objects that they are in.

    Raises:
        IncomparableError: Before any difference there are two objects without attributes.

    Example:
        >>> difference((torch.zeros(1), None), (-torch.zeros(1), None), "output")
        'output|sub_0: 1 of 1 values differ'
    """
    if a is b or id(a) in above:  # an object may hold itself
        return None
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _tensor_difference(a, b, where)
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
    pairs = zip(inside_a, inside_b, strict=True)
    texts = (difference(x, y, inner + key_text(key), (*above, id(a))) for (key, x), (_, y) in pairs)
    return next((text for text in texts if text is not None), None)


def _inside(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns the contents of a container or a plain object, by key or attribute."""
    if isinstance(value, (Module, type)) or callable(value):
        return None
    if (inside := children(value)) is not None:
        return inside
    attributes = getattr(value, "__dict__", None)
    return None if attributes is None else list(attributes.items())


def _tensor_difference(a: Tensor, b: Tensor, where: str) -> str | None:
    for name, one, other in zip(_FACTS, _facts(a), _facts(b), strict=True):
        if one != other:
            return f"{where}: {name}{one} is not {other}"
    if a.device.type == "meta":
        return None
    with torch.no_grad():
        x, y = _plain(a), _plain(b)
        # One answer, not two, has to come back from the device where all is well.
        if torch.equal(_bits(x), _bits(y)):
            return None
        different = _bits(x) != _bits(y)
        if x.is_floating_point():
            different &= ~(x.isnan() & y.isnan())
        wrong = int(different.sum())
        return f"{where}: {wrong} of {a.numel()} values differ" if wrong else None


_FACTS = ("", "dtype ", "shape ", "device ", "layout ", "requires_grad ", "strides ")


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    kind = Tensor if type(tensor) is torch.nn.Parameter else type(tensor)
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    facts = (tensor.dtype, tuple(tensor.shape), tensor.device, tensor.layout, tensor.requires_grad)
    return kind.__name__, *facts, strides


def _plain(tensor: Tensor) -> Tensor:
    """Returns a plain, real tensor with the same bits."""
    tensor = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    tensor = tensor.as_subclass(Tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])
