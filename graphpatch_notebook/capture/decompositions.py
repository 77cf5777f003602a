"""Composite functions of torch, opened: Python functions that take the same steps one by one.

`steps` of a decomposition runs under the mode that records or patches, so that each step is seen. Its code counts as
the user's: call sites go through it, and names of nodes are its local variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphpatch_notebook.capture.call_sites import count_as_users
from graphpatch_notebook.errors import OptionError
from graphpatch_notebook.torch_compat import safe_softmax


@dataclass(frozen=True, slots=True)
class Decomposition:
    """How one composite function is opened.

    Attributes:
        name: What the options call it: its name in `torch.nn.functional`.
        function: The function, as torch dispatches it.
        is_exact: Whether the steps give the very bits of the function.
        problem: Takes the arguments of a call; returns the reason why this call cannot be opened, or `None`.
        make_steps: Returns the function that takes the steps, with the signature of `function`.
    """

    name: str
    function: Callable[..., Any]
    is_exact: bool
    problem: Callable[..., str | None]
    make_steps: Callable[[], Callable[..., Any]]

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Returns why this call cannot be opened, or `None` where it can."""
        try:
            return self.problem(*args, **kwargs)
        except (TypeError, AttributeError, RuntimeError) as error:  # the function itself will say what is wrong
            return f"its arguments are none that it takes ({error})"


def decomposition_of(function: Any) -> Decomposition | None:
    """Returns how `function`, as torch dispatches it, can be opened; `None` for all but a few functions."""
    return _BY_ID.get(id(function))


def chosen(decompose: Collection[str | Callable[..., Any]]) -> dict[int, Decomposition]:
    """Returns the decompositions that `ExtractionOptions.decompose` asks for, by the id of their function.

    Raises:
        OptionError: It contains something else.
    """
    if isinstance(decompose, str) or not isinstance(decompose, Collection):
        given: Any = decompose
        repair = f"; give [{given!r}]" if isinstance(given, str) else ""
        raise OptionError(f"decompose takes a list of functions or of their names, not {decompose!r}{repair}")
    found = [_asked(item) for item in decompose]
    return {id(decomposition.function): decomposition for decomposition in found}


def _asked(item: str | Callable[..., Any]) -> Decomposition:
    found = _BY_NAME.get(item) if isinstance(item, str) else decomposition_of(item)
    if found is not None:
        return found
    name = item if isinstance(item, str) else str(getattr(item, "__name__", item))
    near = get_close_matches(name, _BY_NAME, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise OptionError(f"decompose: {name!r} cannot be opened; {hint}These can: {', '.join(_BY_NAME)}")


# -- scaled_dot_product_attention --------------------------------------------------------------------------------------


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by its formula, as the documentation of torch writes it down.

    Scores are computed in float32 at least, as the fused kernels do. Each name means the same value for every mask,
    dtype and number of heads.
    """
    dtype = query.dtype
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    if enable_gqa:
        repeated_key = key.repeat_interleave(query.size(-3) // key.size(-3), dim=-3)
        repeated_value = value.repeat_interleave(query.size(-3) // value.size(-3), dim=-3)
        key, value = repeated_key, repeated_value
    if is_causal:
        causal_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        attn_mask = causal_mask
    if dtype in _HALF:
        query, key = query.float(), key.float()
    dot_products = torch.matmul(query, key.transpose(-2, -1))
    attn_scores = dot_products * scale
    masked_scores = attn_scores
    if attn_mask is not None:
        attn_bias = attn_mask
        if attn_mask.dtype == torch.bool:
            attn_bias = torch.zeros_like(attn_mask, dtype=attn_scores.dtype).masked_fill(~attn_mask, -math.inf)
        masked_scores = attn_scores + attn_bias
    attn_pattern = safe_softmax(masked_scores, -1)
    if attn_pattern.dtype != dtype:
        attn_pattern = attn_pattern.to(dtype)
    if dropout_p > 0:
        attn_pattern = torch.dropout(attn_pattern, dropout_p, train=True)
    return torch.matmul(attn_pattern, value)


_HALF = (torch.float16, torch.bfloat16)


def _attention_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,  # noqa: ARG001  # the signature is that of the function
    enable_gqa: bool = False,
) -> str | None:
    if attn_mask is not None and type(attn_mask) not in _PLAIN_TENSORS:
        return f"its attn_mask is a {type(attn_mask).__name__}"
    given = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    if any(tensor.is_nested or tensor.layout != torch.strided for tensor in given):
        return "it is called with nested or sparse tensors"
    if attn_mask is not None and is_causal:
        return "it is called with attn_mask and is_causal at once, which torch's kernels take differently"
    is_cast = torch.is_autocast_enabled(query.device.type)
    has_dtypes = is_cast or len({tensor.dtype for tensor in given[:3]}) == 1
    heads = query.shape[-3] if enable_gqa else 1
    has_groups = not enable_gqa or (heads % key.shape[-3] == 0 and heads % value.shape[-3] == 0)
    has_shapes = query.shape[-1] == key.shape[-1] and key.shape[-2] == value.shape[-2] and query.dim() > 1
    mask_dtypes = (None, torch.bool, torch.float32, query.dtype)
    has_mask = getattr(attn_mask, "dtype", None) in mask_dtypes or (is_cast and given[-1].is_floating_point())
    is_valid = has_dtypes and has_groups and has_shapes and has_mask and 0 <= dropout_p <= 1
    return None if is_valid and len({tensor.device for tensor in given}) == 1 else "its arguments do not go together"


_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


# -- multi_head_attention_forward --------------------------------------------------------------------------------------


@cache
def _opened_multi_head_attention() -> Callable[..., Any]:
    """Returns torch's own function, with its own helpers, which does not hand itself over to function modes first."""
    original: Any = functional.multi_head_attention_forward
    namespace = {**original.__globals__}
    namespace |= {name: _never for name in namespace if name.startswith("has_torch_function")}
    waiting = [original]
    for function in waiting:  # grows on the way
        namespace[function.__name__] = _with_globals(function, namespace)
        called = (original.__globals__.get(name) for name in function.__code__.co_names)
        waiting += [other for other in called if _is_helper(other, original) and other not in waiting]
    return namespace[original.__name__]  # type: ignore[no-any-return]


def _is_helper(function: Any, of: FunctionType) -> bool:
    """Whether function modes look through `function` when `of` calls it."""
    if not isinstance(function, FunctionType) or function.__globals__ is not of.__globals__:
        return False
    return not any(name.startswith("has_torch_function") for name in function.__code__.co_names)


def _with_globals(function: FunctionType, namespace: dict[str, Any]) -> FunctionType:
    code = function.__code__.replace()  # a copy: the original belongs to torch
    count_as_users(code)
    copied = FunctionType(code, namespace, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _never(*_: Any) -> bool:
    return False


def _multi_head_problem(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> str | None:
    return "it is called with nested tensors" if any(tensor.is_nested for tensor in (query, key, value)) else None


count_as_users(_attention.__code__)
_ALL = (
    Decomposition(
        "scaled_dot_product_attention",
        functional.scaled_dot_product_attention,
        is_exact=False,
        problem=_attention_problem,
        make_steps=lambda: _attention,
    ),
    Decomposition(
        "multi_head_attention_forward",
        functional.multi_head_attention_forward,
        is_exact=True,
        problem=_multi_head_problem,
        make_steps=_opened_multi_head_attention,
    ),
)
_BY_NAME = {decomposition.name: decomposition for decomposition in _ALL}
_BY_ID = {id(decomposition.function): decomposition for decomposition in _ALL}
