"""Quantized weights: unpacks a packed weight, and runs the module's forward with another weight.

A tensor of a class with a `dequantize` of its own (torchao, quanto) says by itself what it represents: `unpacked`. How
the modules of bitsandbytes pack their weights is below.

    module.weight        what the module holds: packed integers, which mean nothing by themselves
    Packing.spec         the spec of the represented weight, without unpacking it
    Packing.unpacked     the represented weight: the value of the node `weight`, made when it is patched or probed
    Packing.bound        a forward that uses a patched one in place of the module's own kernel

Modules are recognized by the names of their classes, so that no library is imported that the model does not use.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module, functional

from graphpatch_notebook.capture.modules import module_at
from graphpatch_notebook.capture.records import map_leaves
from graphpatch_notebook.errors import PatchValueError
from graphpatch_notebook.values import TensorSpec


class Packing(ABC):
    """How the modules of a class keep their weight, given the library's own forward, which `run` can replace."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    @abstractmethod
    def spec(self, module: Module) -> TensorSpec:
        """Returns the spec of the unpacked weight of `module`, without unpacking it."""

    @abstractmethod
    def unpacked(self, module: Module) -> Tensor:
        """Returns the unpacked weight of `module`: a new tensor, or the parameter itself if it is not packed."""

    @abstractmethod
    def run(self, module: Module, weight: Tensor, value: Tensor) -> Tensor:
        """Returns the output of `module` for `value` with this weight, in the dtype of its own forward."""

    def bound(self, module: Module, weight: Tensor, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function that runs instead of `forward`, that of `module`, if it is the library's own."""
        if getattr(forward, "__func__", None) is self._forward:
            return functools.partial(self.run, module, weight)
        raise PatchValueError(
            f"the weight of this {type(module).__name__} can be probed but not patched: it is quantized, and its "
            f"forward, {forward!r}, is not that of its library, so how it would use another weight is not known; patch "
            "its inputs or its output"
        )


# Torch makes a class for each parametrized module, which would keep the module alive.
_packings: WeakKeyDictionary[type[Module], Packing | None] = WeakKeyDictionary()


def packing_of(module: Module) -> Packing | None:
    """Returns how `module` packs its weight; `None` if it does not."""
    kind = type(module)
    if kind not in _packings:
        _packings[kind] = _packing_of(kind)
    return _packings[kind]


def _packing_of(kind: Any) -> Packing | None:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "bitsandbytes" and base.__name__ in _OF_BITSANDBYTES:
            return _OF_BITSANDBYTES[base.__name__](base.forward)
    return None


def held_by(module: Module, path: str) -> tuple[Packing, Module] | None:
    """Returns the module with a packed weight at this attribute path from `module`, and its packing; else `None`."""
    parents, _, name = path.rpartition(".")
    holder = module_at(module, parents)
    packing = packing_of(holder) if holder is not None else None
    return (packing, holder) if holder is not None and packing is not None and name == "weight" else None


# -- tensors that are quantized themselves -----------------------------------------------------------------------------


def unpacked(value: Any) -> Any:
    """Returns the tensor that a quantized one represents, by the `dequantize` of its class; others as they are."""
    return value.dequantize() if is_packed(value) else value


def is_packed(value: Any) -> bool:
    """Whether a value is a tensor of a class with a `dequantize` of its own."""
    return getattr(type(value), "dequantize", Tensor.dequantize) is not Tensor.dequantize


def passed_as(packed: Tensor, plain: Tensor) -> Tensor:
    """Returns `plain` for a module whose code may look whether its weight is of the class of `packed`, as quanto's."""
    result: Any = plain.as_subclass(_passed_as(type(packed)))
    result.graphpatch_plain = plain
    return cast(Tensor, result)


@functools.cache
def _passed_as(kind: Any) -> Any:
    class Passed(kind):  # type: ignore[misc]
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            args, kwargs = map_leaves((args, kwargs or {}), lambda leaf: getattr(leaf, "graphpatch_plain", leaf))
            return func(*args, **kwargs)

    return Passed


# -- bitsandbytes ------------------------------------------------------------------------------------------------------


class _Packed8bit(Packing):
    """Rows of int8, and the largest magnitude of each row: `CB` and `SCB`.

    Before the first forward they are attributes of the weight, afterwards of the module's `state`.
    """

    def spec(self, module: Module) -> TensorSpec:
        weight: Any = module.weight
        is_packed = weight.dtype == torch.int8
        return TensorSpec(weight.shape, torch.float32 if is_packed else weight.dtype, weight.device)

    def unpacked(self, module: Module) -> Tensor:
        weight: Any = module.weight
        if weight.dtype != torch.int8:  # `has_fp16_weights`, or not quantized yet
            return cast(Tensor, weight)
        scales = getattr(weight, "SCB", None)
        if scales is None:
            scales = getattr(getattr(module, "state", None), "SCB", None)
        if scales is None:
            raise PatchValueError(
                f"the weight of this {type(module).__name__} cannot be unpacked: it has no scales (SCB), neither in "
                "its weight nor in its state; load it again, with its statistics"
            )
        # As bitsandbytes does it in a backward pass: exact in float32.
        return weight.data.to(torch.float32).mul_(scales.to(weight.device).unsqueeze(1).mul(1.0 / 127.0))  # type: ignore[no-any-return]


class _Packed4bit(Packing):
    """Two values in each byte, looked up in a table and scaled by block; `quant_state` has the table and the scales."""

    def spec(self, module: Module) -> TensorSpec:
        weight: Any = module.weight
        state = _quant_state(module)
        if state is None:
            return TensorSpec(weight.shape, weight.dtype, weight.device)
        is_repacked = getattr(state, "packing_format_for_cpu", False)
        return TensorSpec(torch.Size(state.shape), state.original_dtype if is_repacked else state.dtype, weight.device)

    def unpacked(self, module: Module) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        weight: Any = module.weight
        state = _quant_state(module)
        if state is None:  # not moved to a device yet: only then it is quantized
            return cast(Tensor, weight)
        data = weight.data
        if getattr(state, "packing_format_for_cpu", False):
            data, state = _in_common_format(data, state)
        return dequantize_4bit(data, state)  # type: ignore[no-any-return]


def _quant_state(module: Module) -> Any:
    state = getattr(module.weight, "quant_state", None)
    return state if state is not None else getattr(module, "quant_state", None)


def _in_common_format(data: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Takes back what the first forward on a CPU with AVX512-BF16 does to a weight; the module keeps its own.

    `_convert_weight_packed_for_cpu_inverse` of bitsandbytes 0.49 to 0.50 does it for the weight, but leaves the scales
    in the format of the CPU, or rounds them again. Tested by: tests/integrations/test_bitsandbytes.py.
    """
    from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

    state = copy.copy(state)
    scales = state.absmax.T.reshape(-1).to(torch.float32)
    state.original_nested = False
    data, state = _convert_weight_packed_for_cpu_inverse(data, state)
    state.absmax = scales
    return data, state


class _Linear8bit(_Packed8bit):
    def run(self, module: Module, weight: Tensor, x: Tensor) -> Tensor:
        return _linear(module, weight, x, x.dtype)


class _Linear4bit(_Packed4bit):
    def run(self, module: Module, weight: Tensor, x: Tensor) -> Tensor:
        compute: Any = module.compute_dtype
        # The first input of another dtype than float16 settles the dtype to compute in.
        is_settled = module.compute_type_is_set or x.dtype == torch.float16
        return _linear(module, weight, x, compute if is_settled and compute is not None else x.dtype)


def _linear(module: Module, weight: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    bias = cast("Tensor | None", module.bias)
    bias = None if bias is None else bias.to(dtype)
    return functional.linear(x.to(dtype), _plain(weight).to(dtype), bias).to(x.dtype)


class _Embedding(Packing):
    def run(self, module: Module, weight: Tensor, input: Tensor) -> Tensor:  # noqa: A002
        return functional.embedding(input, _plain(weight)).to(cast(torch.dtype, module.dtype))


class _Embedding8bit(_Embedding, _Packed8bit): ...


class _Embedding4bit(_Embedding, _Packed4bit): ...


def _plain(weight: Tensor) -> Tensor:
    # What is made of a parameter of bitsandbytes is of its class, too, and would give the output that class.
    return weight.as_subclass(Tensor)


# By the name of the class. The library is imported only to unpack a weight, so the model has imported it already.
_OF_BITSANDBYTES: dict[str, type[Packing]] = {
    "Linear8bitLt": _Linear8bit,
    "Linear4bit": _Linear4bit,
    "Embedding8bit": _Embedding8bit,
    "Embedding4bit": _Embedding4bit,
}
