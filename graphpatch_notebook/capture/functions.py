"""The functions that torch dispatches: their names, and which of their calls become nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.capture.records import Node, map_leaves, refs_in
from graphpatch_notebook.values import ContainerSpec, TensorSpec

SIZE_READS = frozenset({"shape", "size", "numel", "nelement", "nbytes", "__len__", "sym_size.int", "sym_numel.default"})
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
        "dim", "ndim", "ndimension", "stride", "storage_offset", "element_size", "itemsize", "data_ptr",
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


# -- results whose size depends on values ------------------------------------------------------------------------------

PART_FUNCTIONS = frozenset({"unbind", "split", "chunk", "tensor_split"})
"""Functions that give the parts of a tensor; a loop over a tensor is one over what `unbind` gives."""

SIZED_BY_VALUES = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "_unique2", "bincount"}
)
TRUTHS = (torch.bool, torch.uint8)
"""The dtypes of masks: as an index, such a tensor selects the entries where it is true."""


def part_count_by_values(node: Node) -> int | None:
    """Returns how many parts a tensor was split into at `node`, if that depends on values of tensors."""
    if node.op not in PART_FUNCTIONS or node.kind != "op" or not isinstance(node.spec, ContainerSpec):
        return None
    return len(node.spec.children) if comes_of_values(node) else None


def comes_of_values(node: Node) -> bool:
    """Whether the tensor that `node` is made from, as its first argument, has a shape that depends on values."""
    while (ref := next(refs_in(node.args), None)) is not None and ref.node is not node:
        node = ref.node
        if is_sized_by_values(node):
            return True
    return False


def is_sized_by_values(node: Node) -> bool:
    """Whether the size of the result of the function called at `node` depends on the values of its arguments."""
    if node.op in SIZED_BY_VALUES or (node.op == "where" and len(node.args) == 1):
        return True
    if node.op != "getitem":
        return False
    indices = (found.node.spec for found in list(refs_in(node.args))[1:])
    return any(isinstance(index, TensorSpec) and index.dtype in TRUTHS for index in indices)


def is_call_sized_by_values(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the values of `args` decide how many entries the result of a function has, going by its (raw) name."""
    if name == "__getitem__":
        found: list[Any] = []
        map_leaves(args[1], found.append)
        return any(isinstance(each, Tensor) and each.dtype in TRUTHS for each in found)
    if name == "where":
        return len(args) == 1
    return name in SIZED_BY_VALUES or (name == "repeat_interleave" and len(args) > 1 and isinstance(args[1], Tensor))
