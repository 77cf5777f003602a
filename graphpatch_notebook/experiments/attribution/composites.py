"""Composite functions in plain torch, step by step, with the signatures of torch: each step has a rule of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphpatch_notebook.capture import decomposition_of
from graphpatch_notebook.experiments.attribution.secants import PairedCall


def attention(*args: Any, **kwargs: Any) -> Any:
    """`scaled_dot_product_attention`."""
    decomposition = decomposition_of(functional.scaled_dot_product_attention)
    assert decomposition is not None
    return decomposition.steps(is_fused=True)(*args, **kwargs)


def refused_attention(call: PairedCall) -> bool:
    """Whether attention has dropout, so that its steps would draw other random numbers, or cannot be decomposed."""
    decomposition = decomposition_of(functional.scaled_dot_product_attention)
    is_random = bool(call.argument(4, "dropout_p", 0.0))
    return is_random or decomposition is None or call.take(decomposition.problem, *call.inputs) is not None


# -- norms -------------------------------------------------------------------------------------------------------------


def _standardized(x: Tensor, dims: tuple[int, ...], eps: float, *, center: bool = True) -> Tensor:
    x = x - x.mean(dims, keepdim=True) if center else x
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    return _scaled(_standardized(x, tuple(range(-len(tuple(normalized_shape)), 0)), eps), weight, bias)


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _scaled(_standardized(x, tuple(range(-len(tuple(normalized_shape)), 0)), eps, center=False), weight, None)


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    standardized = _standardized(x.reshape(x.shape[0], groups, -1), (-1,), eps).reshape(x.shape)
    return _scaled(standardized, *_by_channel(x, weight, bias))


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,  # noqa: ARG001  # the signature is that of the function
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        standardized = _standardized(x, (0, *range(2, x.dim())), eps)
    else:
        mean, deviation = _by_channel(x, running_mean, torch.rsqrt(running_var + eps))
        standardized = (x - mean) * deviation
    return _scaled(standardized, *_by_channel(x, weight, bias))


def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    if use_input_stats:
        return group_norm(x, x.shape[1], weight, bias, eps)
    return batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)


def normalize(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, **_: Any) -> Tensor:
    return x / norm(x, p, dim, keepdim=True).clamp_min(eps)


def norm(x: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, **given: Any) -> Tensor:
    """`torch.norm`, `torch.linalg.vector_norm`, and `torch.linalg.norm` of vectors."""
    p = given.get("ord", p)
    dims = tuple(range(x.dim())) if dim is None else dim
    if p in (None, "fro", 2):
        return x.square().sum(dims, keepdim=keepdim).sqrt()
    return x.abs().pow(p).sum(dims, keepdim=keepdim).pow(1 / p)


def refused_norm(call: PairedCall) -> bool:
    """Whether a norm is not computed entry by entry (of a matrix, by `torch.linalg.norm`), or that of the largest."""
    order, dim = call.argument(1, "ord", call.argument(1, "p")), call.argument(2, "dim")
    count = call.inputs[0].dim() if dim is None else 1 if isinstance(dim, int) else len(dim)
    is_matrix = call.signature[0] == "linalg_norm" and count > 1 and order not in (None, "fro")
    return is_matrix or order in (math.inf, -math.inf, "nuc")


def std(*args: Any, **kwargs: Any) -> Tensor:
    return torch.var(*args, **kwargs).sqrt()


def cosine_similarity(one: Tensor, other: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    norms = norm(one, 2, dim).clamp_min(eps) * norm(other, 2, dim).clamp_min(eps)
    return (one * other).sum(dim) / norms


def _scaled(normed: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


def _by_channel(x: Tensor, *given: Tensor | None) -> list[Any]:
    shape = (1, -1, *(1,) * (x.dim() - 2))
    return [None if each is None else each.reshape(shape) for each in given]


# -- the largest of several --------------------------------------------------------------------------------------------


def _max_or_min(
    x: Tensor, dim: Any = None, keepdim: bool = False, *, choose: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """`torch.max` and `torch.min` in their three forms."""
    if isinstance(dim, Tensor):
        return choose(x, dim)
    found = _folded(x, () if dim is None else dim, keepdim, choose=choose)
    return found if dim is None else (found, None)


def _folded(x: Tensor, dim: Any = (), keepdim: bool = False, *, choose: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Returns the result of a choice among the entries along dimensions, made pair by pair."""
    dims = [dim] if isinstance(dim, int) else list(dim) or list(range(x.dim()))
    for each in dims:
        while (size := x.shape[each]) > 1:
            middle = size // 2
            chosen = choose(x.narrow(each, 0, middle), x.narrow(each, middle, middle))
            x = chosen if size % 2 == 0 else torch.cat([chosen, x.narrow(each, size - 1, 1)], each)
    return x if keepdim else x.squeeze(tuple(dims))


largest, smallest = partial(_max_or_min, choose=torch.maximum), partial(_max_or_min, choose=torch.minimum)
amax, amin = partial(_folded, choose=torch.maximum), partial(_folded, choose=torch.minimum)


def refused_max_pool(call: PairedCall) -> bool:
    """Whether a call of `max_pool1d` to `max_pool3d` has gaps."""
    is_dilated = call.argument(4, "dilation", 1) not in (1, (1,), (1, 1), (1, 1, 1))
    return is_dilated or bool(call.argument(5, "ceil_mode", False))


def max_pool(x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *_: Any, **__: Any) -> Tensor:
    given = (kernel_size, stride or kernel_size, padding)
    count = max([len(each) for each in given if not isinstance(each, int)], default=x.dim() - 2)
    sizes, steps, margins = ([each] * count if isinstance(each, int) else list(each) for each in given)
    x = functional.pad(
        x, [side for margin in reversed(margins) for side in (margin, margin)], value=torch.finfo(x.dtype).min
    )
    first = x.dim() - count
    for at, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        x = x.unfold(first + at, size, step)
    return amax(x, tuple(range(-count, 0)))


# -- others ------------------------------------------------------------------------------------------------------------


def glu(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * gate.sigmoid()


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    return x.clamp_min(0) + x.clamp_max(0) * (weight if weight.numel() == 1 else _by_channel(x, weight)[0])


def refused_cross_entropy(call: PairedCall) -> bool:
    """Whether its targets are not the numbers of classes alone."""
    return len(call.inputs) > 1 or bool(call.argument(7, "label_smoothing", 0.0))


def cross_entropy(x: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    kwargs.pop("label_smoothing", None)
    return functional.nll_loss(torch.log_softmax(x, 1 if x.dim() > 1 else 0), target, *args[:5], **kwargs)
