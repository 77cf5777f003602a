"""Quantized modules of bitsandbytes, and what their weights stand for, worked out without this package."""

from __future__ import annotations

from collections.abc import Callable

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

FEATURES = (64, 32)
"""Of a kind of linear module: input, output."""

KINDS: dict[str, Callable[[], nn.Module]] = {
    "nf4": lambda: bnb.nn.Linear4bit(*FEATURES, compress_statistics=False, quant_type="nf4"),
    "nf4 twice": lambda: bnb.nn.Linear4bit(*FEATURES, compress_statistics=True, quant_type="nf4"),
    "nf4 in float32": lambda: bnb.nn.Linear4bit(*FEATURES, quant_type="nf4", quant_storage=torch.float32),
    "fp4": lambda: bnb.nn.Linear4bit(*FEATURES, quant_type="fp4"),
    "nf4, bfloat16": lambda: bnb.nn.Linear4bit(*FEATURES, quant_type="nf4", compute_dtype=torch.bfloat16),
    "nf4, no bias": lambda: bnb.nn.Linear4bit(*FEATURES, bias=False, quant_type="nf4"),
    "int8": lambda: bnb.nn.Linear8bitLt(*FEATURES, has_fp16_weights=False),
    "int8, outliers": lambda: bnb.nn.Linear8bitLt(*FEATURES, has_fp16_weights=False, threshold=1.5),
    "int8, float weights": lambda: bnb.nn.Linear8bitLt(*FEATURES, has_fp16_weights=True),
}


class Quantized(nn.Module):
    """A quantized module with something around it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = KINDS[kind]()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 2


def quantized(kind: str, device: str = "cpu") -> Quantized:
    """Returns a model that was moved to a device, which quantizes it, and has not run yet."""
    # In eval mode, bitsandbytes has no kernel on the CPU that would give 8-bit modules gradients of their weights.
    return Quantized(kind).to(device).eval().requires_grad_(False)


def dequantized(module: nn.Module, like: nn.Module) -> Tensor:
    """Returns the weight that `module`, which has not run yet, stands for.

    Where bitsandbytes rounded the scales of `like`, the same module after it ran (as it does on some CPUs), they are
    rounded here, too.
    """
    weight = module.weight.data
    if isinstance(module, bnb.nn.Linear8bitLt):
        return weight if weight.dtype != torch.int8 else weight.float() * (module.weight.SCB / 127)[:, None]
    state = module.weight.quant_state
    if not getattr(like.weight.quant_state, "packing_format_for_cpu", False):
        return bnb.functional.dequantize_4bit(weight, state)
    scales = state.absmax
    if state.nested:
        scales = bnb.functional.dequantize_blockwise(scales, state.state2) + state.offset
    rounded = bnb.functional.QuantState(
        scales.bfloat16().float(), state.shape, state.code, state.blocksize, state.quant_type, state.dtype
    )
    return bnb.functional.dequantize_4bit(weight, rounded)


class FloatTensors(TorchDispatchMode):
    """Notes how many floating-point tensors of a shape are made."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point() and result.shape == self.shape:
            self.count += 1
        return result
