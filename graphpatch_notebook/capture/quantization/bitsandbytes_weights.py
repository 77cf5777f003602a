"""How the modules of bitsandbytes keep their weights: `Linear8bitLt`, `Linear4bit` and the embeddings of both kinds.

bitsandbytes is imported only when a weight is unpacked, so the model has imported it already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module, functional

from graphpatch_notebook.capture.quantization.packed_weights import Packing
from graphpatch_notebook.errors import PatchValueError
from graphpatch_notebook.values import TensorSpec


def packing(kind: Any) -> Packing | None:
    """Returns how modules of a class of bitsandbytes pack their weight; `None` if they do not pack it."""
    made: dict[str, Callable[[Callable[..., Any]], Packing]] = {
        "Linear8bitLt": _Linear8bit,
        "Linear4bit": _Linear4bit,
        "Embedding8bit": _Embedding8bit,
        "Embedding4bit": _Embedding4bit,
    }
    return made[kind.__name__](kind.forward) if kind.__name__ in made else None


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


class _Embedding8bit(_Packed8bit):
    def run(self, module: Module, weight: Tensor, input: Tensor) -> Tensor:  # noqa: A002
        return functional.embedding(input, _plain(weight)).to(cast(torch.dtype, module.dtype))


class _Embedding4bit(_Packed4bit):
    def run(self, module: Module, weight: Tensor, input: Tensor) -> Tensor:  # noqa: A002
        return functional.embedding(input, _plain(weight)).to(cast(torch.dtype, module.dtype))


def _plain(weight: Tensor) -> Tensor:
    # What is made of a parameter of bitsandbytes is of its class, too, and would give the output that class.
    return weight.as_subclass(Tensor)
