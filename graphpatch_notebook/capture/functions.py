"""The functions that torch dispatches: their names, and which of their calls become nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SIZE_READS = frozenset({"shape", "size", "numel", "nelement", "__len__"})
"""Calls whose results are sizes."""

VALUE_READS = frozenset(
    {
        "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "item", "tolist", "is_nonzero",
        "equal", "allclose", "numpy", "__array__",
    }
)  # fmt: skip
"""Calls that hand a value to Python: what the model does next may depend on it."""


METADATA_READS = frozenset(
    {
        "dim", "ndim", "ndimension", "stride", "storage_offset", "element_size", "itemsize", "nbytes", "data_ptr",
        "get_device", "_version", "output_nr", "requires_grad", "retains_grad", "__hash__", "_is_view", "dense_dim",
        "sparse_dim", "has_names", "type", "__format__", "__repr__", "__str__", "names", "get_default_dtype",
    }
)  # fmt: skip
"""Calls that return properties of a tensor, never its values."""


def function_name(func: Callable[..., Any]) -> str:
    """Returns the short, usual name of a dispatched function: `add`, `softmax`, `shape`, `getitem`.

    Example:
        >>> import torch
        >>> function_name(torch.Tensor.__getitem__), function_name(torch.Tensor.shape.__get__)
        ('getitem', 'shape')
    """
    name = raw_name(func)
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
    name = name.split(".")[0]  # an overload of an operator: `relu.default`
    return name if name.isidentifier() else "op"


def raw_name(func: Callable[..., Any]) -> str:
    """Returns the name of a dispatched function with its underscores; for a descriptor, the name of the attribute."""
    name = getattr(func, "__name__", None)
    if name == "__get__":  # an attribute read: `x.shape` arrives as the getter of the descriptor
        return str(getattr(func.__self__, "__name__", "attribute"))  # type: ignore[attr-defined]
    if name is None:
        name = getattr(func, "_qualified_op_name", "op").rsplit("::", 1)[-1].split(".")[0]
    return str(name)


def writes_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call by this (raw) name writes into its first argument, going by torch's conventions."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name.endswith("__") and name not in _NOT_IN_PLACE)
    return name.endswith("_") or kwargs.get("inplace") is True


_NOT_IN_PLACE = {"__index__", "__int__", "__invert__"}
