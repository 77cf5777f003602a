"""Tensors in a file: each storage once, and each tensor as a view of a storage.

    "tensors": [{"storage": "wte.weight", "dtype": "float32", "shape": [99, 8], "stride": [8, 1], "offset": 0, ...}]

So one tensor under two names stays one tensor, and views of one storage stay views of it. A storage has the dtype and
shape of its tensor if only one fills it, so that other tools can read the file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from graphpatch_notebook.errors import SerializationError
from graphpatch_notebook.serialization.codecs.reading import JsonValue
from graphpatch_notebook.serialization.codecs.values import UnstorableError, decoded_device, dtype_of
from graphpatch_notebook.values import dtype_name

# The dtypes of all versions of safetensors; other dtypes are written as bytes.
_NATIVE = {
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
}  # fmt: skip
_LARGEST = 2**48
"""The most elements that a tensor may have: an expanded one has more than its storage."""


# -- writing -----------------------------------------------------------------------------------------------------------


def check_storable(tensor: Tensor) -> None:
    """Checks that a tensor is a plain view of a storage."""
    if is_lazy(tensor):
        raise UnstorableError("it holds a parameter that has no shape yet; run the model once")
    if type(tensor) not in (Tensor, Parameter):
        raise UnstorableError(f"it holds a {type(tensor).__name__}, a subclass of Tensor")
    if tensor.device.type == "meta":
        raise UnstorableError("its weights are not loaded (they are on the device 'meta', as accelerate offloads them)")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise UnstorableError(f"it holds a tensor of the layout {tensor.layout}")
    if tensor.is_conj() or tensor.is_neg():
        raise UnstorableError("it holds a lazily conjugated or negated tensor")
    if tensor.requires_grad and not tensor.is_leaf:
        raise UnstorableError("it holds a tensor that was computed from others, with gradients")


@dataclass
class _Storage:
    """The written part of one storage: from the first byte that any of its tensors uses to the one after the last."""

    name: str
    members: list[Tensor] = field(default_factory=list)
    start: int = 2**63
    stop: int = 0

    @property
    def is_one_tensor(self) -> bool:
        """Whether it is written as the one tensor in it."""
        first = self.members[0]
        return len(self.members) == 1 and first.dtype in _NATIVE and first.is_contiguous()

    def offset_of(self, tensor: Tensor) -> int:
        """Returns the offset of `tensor` in the written part, in elements."""
        if self.is_one_tensor or not tensor.numel():
            return 0
        return int(tensor.storage_offset()) - self.start // tensor.element_size()

    def content(self) -> Tensor:
        """Returns the written part, on the CPU."""
        first = self.members[0].detach()
        if self.is_one_tensor:
            return first.cpu()
        with torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
            part = whole[min(self.start, self.stop) : self.stop].cpu()
        has_one_dtype = all(tensor.dtype == first.dtype for tensor in self.members)
        return part.view(first.dtype) if has_one_dtype and first.dtype in _NATIVE else part


class TensorTable:
    """The tensors to write, each with a number."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}
        self._storages: dict[Any, _Storage] = {}
        self._storage_of: list[_Storage] = []
        self._names: set[str] = set()

    def add(self, tensor: Tensor, name: str) -> int:
        """Returns the number of `tensor`; `name` becomes the name of its storage if the storage is new."""
        known = self._numbers.get(id(tensor))
        if known is not None:
            return known
        check_storable(tensor)
        number = self._numbers[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        address = tensor.untyped_storage().data_ptr()
        key = (str(tensor.device), address) if address else number
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = _Storage(self._unique(name))
        self._storage_of.append(storage)
        start, stop = _extent(tensor)
        storage.members.append(tensor)
        storage.start, storage.stop = min(storage.start, start), max(storage.stop, stop)
        return number

    def _unique(self, name: str) -> str:
        found = next(
            n for n in (name, *(f"{name}.{i}" for i in range(1, len(self.tensors) + 2))) if n not in self._names
        )
        self._names.add(found)
        return found

    def encoded(self) -> list[dict[str, Any]]:
        """Returns the JSON of the table."""
        return [
            {
                "storage": storage.name,
                "dtype": dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "offset": storage.offset_of(tensor),
                "device": str(tensor.device),
                "parameter": isinstance(tensor, Parameter),
                "requires_grad": tensor.requires_grad,
            }
            for tensor, storage in zip(self.tensors, self._storage_of, strict=True)
        ]

    def contents(self) -> dict[str, Tensor]:
        """Returns the written part of each storage, by name; on the CPU, contiguous."""
        return {storage.name: storage.content() for storage in self._storages.values()}


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the range of bytes of its storage that a tensor uses: start and end."""
    if tensor.numel() == 0:
        return 2**63, 0
    last = sum((size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    # Views of other dtypes must find whole elements, too.
    return start - start % 16, start + (last + 1) * tensor.element_size()


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """An entry of the table of a file, checked."""

    item: JsonValue
    storage: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device
    is_parameter: bool
    requires_grad: bool

    @classmethod
    def read(cls, item: JsonValue) -> StoredTensor:
        """Returns the entry in `item`."""
        fields = item.fields(
            "storage", "dtype", "shape", "stride", "offset", "device", "parameter", "requires_grad"
        )  # fmt: skip
        shape = tuple(part.whole() for part in fields["shape"].items())
        stride = tuple(part.whole() for part in fields["stride"].items(len(shape)))
        dtype = dtype_of(fields["dtype"])
        if len(shape) > 64 or math.prod(size for size in shape if size) > _LARGEST:
            raise item.error(f"a tensor cannot be of the shape {shape[:8]}")
        needs_grad, is_parameter = fields["requires_grad"].flag(), fields["parameter"].flag()
        if needs_grad and not (dtype.is_floating_point or dtype.is_complex):
            raise item.error(f"a tensor of {dtype} cannot require gradients")
        return cls(
            item, fields["storage"].text(), dtype, shape, stride, fields["offset"].whole(),
            decoded_device(fields["device"]), is_parameter, needs_grad,
        )  # fmt: skip

    @property
    def bytes_needed(self) -> int:
        """How many bytes of the storage it reaches."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (self.offset + last + 1) * self.dtype.itemsize

    def of(self, storage: Tensor) -> Tensor:
        """Returns the tensor as a view of `storage`, which has the bytes."""
        if self.bytes_needed > storage.numel():
            raise self.item.error(f"it reaches beyond the end of the storage {self.storage[:60]!r}")
        result = torch.empty(0, dtype=self.dtype, device=storage.device)
        with torch.no_grad():
            result.set_(storage.untyped_storage(), self.offset, self.shape, self.stride)
        if self.is_parameter:
            return Parameter(result, requires_grad=self.requires_grad)
        return result.requires_grad_(self.requires_grad)


def made_tensors(table: JsonValue, contents: dict[str, Tensor]) -> list[Tensor]:
    """Returns the tensors of a file with new storages, each on its original device."""
    entries = [StoredTensor.read(item) for item in table.items()]
    used = {entry.storage for entry in entries}
    if used != contents.keys():
        name = min(used ^ contents.keys())
        what = "is not in it" if name in used else "belongs to no tensor"
        raise SerializationError(f"the file does not fit its table of tensors: {name[:60]!r} {what}")
    storages: dict[tuple[str, torch.device], Tensor] = {}
    result = []
    for entry in entries:
        key = (entry.storage, entry.device)
        if key not in storages:
            storages[key] = _bytes(contents[entry.storage], entry)
        result.append(entry.of(storages[key]))
    return result


def _bytes(content: Tensor, entry: StoredTensor) -> Tensor:
    flat = content.detach().reshape(-1)
    try:
        # Copied, as the file is only mapped into memory: it may be overwritten while the tensors live.
        return flat.view(torch.uint8).to(entry.device, copy=True)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise entry.item.error(
            f"it was on the device {str(entry.device)!r} when it was saved, which is not there: {error}; save the "
            "graph after pg.cpu()"
        ) from None
