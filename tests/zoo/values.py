"""Comparing what models return and what they are: outputs to the last bit, module state by identity and by value."""

from __future__ import annotations

import copy
import dataclasses
import functools
import struct
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .case import Call

Children = list[tuple[str, Any]]

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_ATOMS = (torch.Tensor, nn.Module, type, str, bytes, *_FUNCTIONS)


def children_of(value: Any) -> Children | None:
    """The parts of a container with the path step to each, or None for a leaf.

    Objects that only know identity as equality (transformers caches and their layers, plain user classes) count as
    containers of their attributes.
    """
    if isinstance(value, _ATOMS):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", part) for name, part in zip(value._fields, value, strict=True)]
    if isinstance(value, (tuple, list, deque)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, Mapping):
        items = list(value.items())
        entries = [(f"[{key!r}]", part) for key, part in items]
        if dataclasses.is_dataclass(value):
            entries += _fields_unlike_items(value, dict(items))
        return entries
    if dataclasses.is_dataclass(value):
        return [(f".{field.name}", _field(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, types.SimpleNamespace):
        return [(f".{name}", part) for name, part in vars(value).items()]
    if slots := getattr(type(value), "__slots__", None):
        return [(f".{name}", getattr(value, name)) for name in slots]
    has_own_equality = type(value).__eq__ is not object.__eq__
    if has_own_equality or isinstance(value, Iterator) or not hasattr(value, "__dict__"):
        return None
    return [(f".{name}", part) for name, part in vars(value).items()]


def _field(value: Any, name: str) -> Any:
    """What a dataclass holds: some configs refuse to be asked for a field that differs between layers."""
    held = getattr(value, "__dict__", {})
    return held[name] if name in held else getattr(value, name)


def _fields_unlike_items(value: Any, items: Mapping[Any, Any]) -> Children:
    """Fields of a `ModelOutput` that hold something else than its item of that name; in a sound one there are none."""
    fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [(f".{name}", part) for name, part in fields if part is not items.get(name)]


def flatten(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """All leaves inside of nested containers, with their paths, in order."""
    leaves: list[tuple[str, Any]] = []
    _collect(value, path, leaves, set())
    return leaves


def _collect(value: Any, path: str, leaves: list[tuple[str, Any]], open_ids: set[int]) -> None:
    children = children_of(value)
    if children is None or id(value) in open_ids:
        leaves.append((path, value))
        return
    open_ids.add(id(value))
    for step, part in children:
        _collect(part, path + step, leaves, open_ids)
    open_ids.remove(id(value))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The distinct tensors inside of nested containers."""
    return list({id(leaf): leaf for _, leaf in flatten(value) if isinstance(leaf, torch.Tensor)}.values())


def scalar_loss(output: Any) -> torch.Tensor | None:
    """Sum of all floating-point and complex tensors that require a gradient, or None where there is none."""
    terms = [tensor.sum() for tensor in tensors_of(output) if tensor.requires_grad]
    terms = [term.abs() if term.is_complex() else term for term in terms]
    return torch.stack([term.double() for term in terms]).sum() if terms else None


def bit_equal(a: Any, b: Any) -> str | None:
    """None if two outputs agree to the last bit, else the first difference as text.

    Agreement covers container types, key order, tensor types, dtypes, shapes, devices, layouts, signs of zeros and the
    positions of NaNs (not their payloads).
    """
    return _difference(a, b, "", None, set())


def close(a: Any, b: Any, tolerance: float) -> str | None:
    """As `bit_equal`, but floating-point values may differ by `tolerance`, absolute or relative."""
    return _difference(a, b, "", tolerance or None, set())


def _difference(a: Any, b: Any, path: str, tolerance: float | None, open_pairs: set[tuple[int, int]]) -> str | None:
    where = path or "the value"
    if type(a) is not type(b):
        return f"{where}: type {_type_name(a)} is not {_type_name(b)}"
    if isinstance(a, torch.Tensor):
        return _tensor_difference(a, b, where, tolerance)
    parts_a, parts_b = children_of(a), children_of(b)
    if parts_a is None or parts_b is None:
        return _leaf_difference(a, b, where, tolerance)
    if (id(a), id(b)) in open_pairs:
        return None
    steps_a, steps_b = [step for step, _ in parts_a], [step for step, _ in parts_b]
    if steps_a != steps_b:
        return f"{where}: parts {steps_a} are not {steps_b}"
    open_pairs.add((id(a), id(b)))
    differences = (
        _difference(part_a, part_b, path + step, tolerance, open_pairs)
        for (step, part_a), (_, part_b) in zip(parts_a, parts_b, strict=True)
    )
    return next((difference for difference in differences if difference is not None), None)


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _leaf_difference(a: Any, b: Any, where: str, tolerance: float | None) -> str | None:
    if a is b:
        return None
    if isinstance(a, (float, complex)):
        return _tensor_difference(
            torch.tensor(a, dtype=_widest(a)), torch.tensor(b, dtype=_widest(b)), where, tolerance
        )
    if isinstance(a, (Iterator, nn.Module)):
        return None
    if hasattr(a, "tobytes") and hasattr(a, "shape"):
        is_same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    else:
        is_same = bool(a == b)
    return None if is_same else f"{where}: {a!r} is not {b!r}"


def _widest(number: complex) -> torch.dtype:
    return torch.complex128 if isinstance(number, complex) else torch.float64


def _tensor_difference(a: torch.Tensor, b: torch.Tensor, where: str, tolerance: float | None) -> str | None:
    for name in ("dtype", "shape", "device", "layout"):
        if getattr(a, name) != getattr(b, name):
            return f"{where}: {name} {getattr(a, name)} is not {getattr(b, name)}"
    if a.device.type == "meta":
        return None
    with torch.no_grad():
        plain_a, plain_b = _plain(a), _plain(b)
        if plain_a.shape != plain_b.shape:
            return f"{where}: {plain_a.shape[0]} stored values are not {plain_b.shape[0]}"
        if tolerance is not None and plain_a.is_floating_point():
            wrong = ~torch.isclose(plain_a, plain_b, rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            wrong = _bits(plain_a) != _bits(plain_b)
            if plain_a.is_floating_point():
                wrong &= ~(plain_a.isnan() & plain_b.isnan())
        if not wrong.any():
            return None
        index = tuple(wrong.nonzero()[0].tolist())
        count, total = int(wrong.sum()), wrong.numel()
        return (
            f"{where}: {count} of {total} values of a {a.dtype} tensor {tuple(a.shape)} differ, "
            f"first at {index}: {plain_a[index].item()!r} is not {plain_b[index].item()!r}"
        )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A dense, real, non-subclass tensor with the same bits."""
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        return torch.cat([tensor._indices().to(torch.float64).flatten(), _plain(tensor._values()).double().flatten()])
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.as_subclass(torch.Tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(integer)


def copy_call(call: Call) -> Call:
    """A call on copies of all tensors and containers.

    What was one tensor, or shared memory, does so in the copy too; modules are not copied. No copy has a gradient
    history: each that requires a gradient is a leaf.
    """
    memo: dict[int, Any] = {}
    for tensor in tensors_of((call.args, call.kwargs)):
        is_leaf_copied_as_is = isinstance(tensor, nn.Parameter)
        source = tensor if is_leaf_copied_as_is else tensor.detach()
        memo[id(tensor)] = copy.deepcopy(source, memo).requires_grad_(tensor.requires_grad)
    memo |= {id(leaf): leaf for _, leaf in flatten((call.args, call.kwargs)) if isinstance(leaf, nn.Module)}
    args, kwargs = copy.deepcopy((call.args, call.kwargs), memo)
    return Call(args, kwargs)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of a module, each submodule and their classes; see `snapshot`."""

    records: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Record:
    """One value: the object itself (keeping it alive keeps its id its own), its parts, and its content if a tensor."""

    value: Any
    parts: tuple[tuple[str, _Record], ...] = ()
    content: torch.Tensor | None = None
    storage: int = 0
    requires_grad: bool = False


def snapshot(module: nn.Module) -> Snapshot:
    """Records what `same_state` compares: for every submodule its class and `__dict__`, in order.

    Values are kept by identity; lists, dicts and tuples (hooks, parameters, buffers and children among them) and plain
    objects are opened; tensors are also kept as a copy of their values. For classes it is the entries of their
    `__dict__`, so that a patched `nn.Module.__call__` is seen too.
    """
    records: dict[str, _Record] = {}
    for path, submodule in module.named_modules():
        records[path or "<root>"] = _Record(
            submodule,
            tuple((repr(name), _record(value, frozenset())) for name, value in vars(submodule).items()),
        )
        for owner in type(submodule).__mro__:
            if owner is not object:
                records.setdefault(f"class {owner.__module__}.{owner.__qualname__}", _class_record(owner))
    return Snapshot(records)


def _class_record(owner: type) -> _Record:
    # `copyreg` notes the slots of each class of which an instance is copied, as it is to run on the meta device.
    kept = {name: value for name, value in vars(owner).items() if name != "__slotnames__"}
    return _Record(owner, tuple((repr(name), _Record(value)) for name, value in kept.items()))


def _record(value: Any, open_ids: frozenset[int]) -> _Record:
    if isinstance(value, torch.Tensor):
        return _tensor_record(value)
    children = None if id(value) in open_ids else children_of(value)
    if children is None or isinstance(value, nn.Module):
        return _Record(value)
    inner = open_ids | {id(value)}
    is_plain_object = not isinstance(value, (tuple, list, deque, Mapping))
    if is_plain_object:
        return _Record(value, tuple((step, _Record(part)) for step, part in children))
    return _Record(value, tuple((step, _record(part, inner)) for step, part in children))


def _tensor_record(tensor: torch.Tensor) -> _Record:
    if nn.parameter.is_lazy(tensor):
        return _Record(tensor)
    storage = tensor.data_ptr() if tensor.layout == torch.strided else 0
    with torch.no_grad():
        content = tensor.detach().clone()
    return _Record(tensor, content=content, storage=storage, requires_grad=tensor.requires_grad)


def same_state(module: nn.Module, before: Snapshot) -> str | None:
    """None if a module is what it was at its snapshot, else the first difference as text."""
    after = snapshot(module).records
    if missing := next((path for path in before.records if path not in after), None):
        return f"{missing}: is no longer part of the module"
    if added := next((path for path in after if path not in before.records), None):
        return f"{added}: was not part of the module"
    differences = (_record_difference(record, after[path], path) for path, record in before.records.items())
    return next((difference for difference in differences if difference is not None), None)


def _record_difference(before: _Record, after: _Record, path: str) -> str | None:
    if not _is_same_object(before.value, after.value):
        return f"{path}: now {_describe(after.value)}, was {_describe(before.value)}"
    steps_before, steps_after = [step for step, _ in before.parts], [step for step, _ in after.parts]
    if steps_before != steps_after:
        added = [step for step in steps_after if step not in steps_before]
        removed = [step for step in steps_before if step not in steps_after]
        change = f"added {added}, removed {removed}" if added or removed else f"order {steps_before} -> {steps_after}"
        return f"{path}: {change}"
    if before.content is not None and after.content is not None:
        if before.requires_grad != after.requires_grad:
            return f"{path}: requires_grad is now {after.requires_grad}"
        if difference := bit_equal(after.content, before.content):
            return f"{path}: {difference}"
        if before.storage != after.storage:
            return f"{path}: same tensor and values, but other memory"
    pairs = zip(before.parts, after.parts, strict=True)
    differences = (_record_difference(old, new, f"{path}{step}") for (step, old), (_, new) in pairs)
    return next((difference for difference in differences if difference is not None), None)


def _is_same_object(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, float):
        return struct.pack("d", before) == struct.pack("d", after)
    return isinstance(before, (int, str, bytes, complex, torch.Size)) and before == after


def _describe(value: Any) -> str:
    text = repr(value) if not isinstance(value, (torch.Tensor, nn.Module)) else ""
    return f"{_type_name(value)} at {id(value):#x} {text[:60]}".rstrip()
