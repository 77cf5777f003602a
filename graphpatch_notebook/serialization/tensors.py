"""Tensors in a file: each storage once, and each tensor as a view of it.

So one tensor under two names stays one tensor, and views of one storage stay views of it. A storage has the dtype and
shape of its tensor if that fills it, so that other tools can read the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.serialization.plain_values import UnstorableError, dtype_of
from graphpatch_notebook.serialization.schema import TensorPart
from graphpatch_notebook.values import dtype_name

# The dtypes of all versions of safetensors; other dtypes are written as bytes.
_NATIVE = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
}  # fmt: skip


def _check_storable(tensor: Tensor) -> None:
    """Raises an `UnstorableError` if a tensor is not a plain view of a storage with values."""
    if is_lazy(tensor) or tensor.device.type == "meta":
        raise UnstorableError("its weights are not loaded (they are lazy, or on the device 'meta', as if offloaded)")
    is_plain = type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    if not is_plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise UnstorableError(f"it holds a {type(tensor).__name__} of a kind that files cannot hold ({tensor.layout})")
    if tensor.requires_grad and not tensor.is_leaf:
        raise UnstorableError("it holds a tensor that was computed from others, with gradients")


class TensorTable:
    """The tensors to write, each with a number."""

    def __init__(self) -> None:
        self.parts: list[TensorPart] = []
        self._tensors: list[Tensor] = []  # also keeps their ids valid
        self._numbers: dict[int, int] = {}
        self._storages: dict[Any, tuple[str, Tensor]] = {}
        self._names: set[str] = set()

    def add(self, tensor: Tensor, name: str) -> int:
        """Returns the number of `tensor`; `name` becomes the name of its storage if the storage is new."""
        known = self._numbers.get(id(tensor))
        if known is not None:
            return known
        _check_storable(tensor)
        number = self._numbers[id(tensor)] = len(self._tensors)
        self._tensors.append(tensor)
        address = tensor.untyped_storage().data_ptr()
        key = (tensor.device, address) if address else number
        if key not in self._storages:
            name = f"{name}.{number}" if name in self._names else name
            self._names.add(name)
            self._storages[key] = name, tensor
        self.parts.append(
            TensorPart(
                storage=self._storages[key][0],
                dtype=dtype_name(tensor.dtype),
                shape=list(tensor.shape),
                stride=list(tensor.stride()),
                offset=int(tensor.storage_offset()),
                device=str(tensor.device),
                is_parameter=isinstance(tensor, Parameter),
                requires_grad=tensor.requires_grad,
            )
        )
        return number

    def contents(self) -> dict[str, Tensor]:
        """Returns each storage by name."""
        return {name: _content(tensor.detach()) for name, tensor in self._storages.values()}


def _content(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    is_whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == storage.nbytes()
    if is_whole and tensor.dtype in _NATIVE:
        return tensor.cpu()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).cpu()


def made_tensors(parts: Sequence[TensorPart], contents: dict[str, Tensor]) -> list[Tensor]:
    """Returns the tensors of a file with new storages, each on its original device."""
    if {part.storage for part in parts} != contents.keys():
        raise GraphError("the arrays in the file are not those of its table of tensors")
    storages: dict[tuple[str, str], Tensor] = {}
    result = []
    for part in parts:
        dtype, key = dtype_of(part.dtype), (part.storage, part.device)
        if key not in storages:
            # Copied, as the file is only mapped into memory: it may be overwritten while the tensors live.
            flat = contents[part.storage].reshape(-1).view(torch.uint8)
            storages[key] = flat.to(torch.device(part.device), copy=True)
        whole = storages[key][: len(storages[key]) // dtype.itemsize * dtype.itemsize]
        # `as_strided` refuses what reaches beyond the end.
        view = whole.view(dtype).as_strided(part.shape, part.stride, part.offset)
        tensor = torch.empty(0, dtype=dtype, device=view.device)  # to autograd, no view
        tensor.set_(view.untyped_storage(), part.offset, part.shape, part.stride)
        made = Parameter(tensor, part.requires_grad) if part.is_parameter else tensor.requires_grad_(part.requires_grad)
        result.append(made)
    return result
