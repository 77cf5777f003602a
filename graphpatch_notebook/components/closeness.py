"""Whether tensors are equal up to rounding, and to what proofs do not care for: a factor, a norm, a bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TOLERANCE = 1e-4


def is_close(one: Any, other: Any, tolerance: float = _TOLERANCE) -> bool:
    """Whether two tensors have the same elements in the same order, in any shape, up to rounding."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.numel() != other.numel():
        return False
    if tolerance:
        tolerance = max(rounding(one, tolerance), rounding(other, tolerance))
    one, other = one.detach().double().reshape(-1), other.detach().double().reshape(-1)
    finite = torch.isfinite(one)
    if not torch.equal(finite, torch.isfinite(other)):
        return False
    if not finite.any():
        return True
    one, other = one[finite], other[finite]
    return bool((one - other).abs().max() <= tolerance * torch.maximum(one.abs().max(), other.abs().max()))


def rounding(value: Tensor, least: float) -> float:
    """Returns how much of a value may be due to its dtype: at least `least`."""
    return max(least, 4 * torch.finfo(value.dtype).eps) if value.is_floating_point() else least


def is_closer(one: Tensor, control: Tensor, result: Tensor) -> bool:
    """Whether a value is much closer to a result than the control is."""
    own, other = ((value.double() - result).abs().max() for value in (one, control))
    return bool(other > 10 * own)


def is_multiple(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal up to a positive factor."""
    if one.shape != other.shape:
        return False
    scale = other.double().norm() / one.double().norm().clamp_min(1e-30)
    return is_close(one.double() * scale, other, rounding(one, 1e-3))


def is_shifted(one: Tensor, other: Tensor, heads: int) -> bool:
    """Whether a tensor is another one, up to a positive factor, plus a number for each head and channel."""
    if one.shape != other.shape or one.shape[-2] < 3:
        return False
    one, other = (value.unflatten(0, (-1, heads or 1)) for value in (one, other))
    return is_multiple(*(value - value.mean((0, 2), keepdim=True) for value in (one, other)))


def is_normed(one: Tensor, other: Tensor) -> bool:
    """Whether a tensor is another one, with vectors of one length each, times a number for each channel."""
    if one.shape != other.shape:
        return False
    normed = torch.nn.functional.normalize(one.double(), dim=-1)
    weights = (normed * other).flatten(0, -2).sum(0) / normed.square().flatten(0, -2).sum(0).clamp_min(1e-30)
    return is_close(normed * weights, other, rounding(one, 1e-3))
