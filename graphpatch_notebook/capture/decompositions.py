"""Composite functions of torch, opened: Python functions that take the same steps one by one.

The function with the steps runs under the mode that records or patches, so that each step is seen. Its code counts as
the user's: call sites go through it, and names of nodes are its local variables.

Calls of attention have *inner nodes* by default: capture records the call as one op, with nodes for its scores and its
pattern, and the steps run only in calls in which one of these is patched.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from contextvars import ContextVar
from functools import cache
from itertools import zip_longest
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.call_sites import count_as_users
from graphpatch_notebook.errors import CaptureError, holding
from graphpatch_notebook.torch_compat import safe_softmax
from graphpatch_notebook.values import PLAIN_TENSORS, TensorSpec

INNER_NODES = {"scores": "matmul", "pattern": "softmax"}
"""The inner nodes of a call of attention, in order: the local variable that holds the value, and the function."""


class InnerSteps(NamedTuple):
    """How the inner nodes of the calls of an attention function are found.

    Attributes:
        reads: The arguments of the call that the scores are computed from; the pattern is computed from the scores.
        specs: Takes the arguments of a call by name; returns the specs of the inner nodes, which nothing computes, or
            nothing if they are not known.
        make_steps: Returns the function that assigns the values to `scores` and `pattern`.
        example: Returns the arguments of a small call, given the flags.
        flags: The parameters that decide which lines of the function assign the values.
    """

    reads: tuple[str, ...]
    specs: Callable[..., tuple[TensorSpec, ...]]
    make_steps: Callable[[], Callable[..., Any]]
    example: Callable[..., tuple[Any, ...]]
    flags: tuple[str, ...] = ()


class Decomposition(NamedTuple):
    """How one composite function is opened.

    Attributes:
        name: What the options call it: its name in `torch.nn.functional`.
        is_exact: Whether the steps are bit-identical to the function.
        make_steps: Returns the function that takes the steps, with the signature of `function`.
        exclusive: Arguments that a call which is opened may not have all at once: the kernels differ on these.
        inner: The steps that are inner nodes by default; `None` for a function that has none.
    """

    name: str
    function: Callable[..., Any]
    is_exact: bool
    make_steps: Callable[[], Callable[..., Any]]
    exclusive: tuple[str, ...] = ()
    inner: InnerSteps | None = None

    def steps(self, *, is_fused: bool) -> Callable[..., Any]:
        """Returns the function that takes the steps; for `is_fused`, those that also expose the inner nodes."""
        return (self.inner.make_steps if is_fused and self.inner is not None else self.make_steps)()

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a call by the names of the parameters."""
        bound = _signature(self.make_steps()).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Returns why this call cannot be opened; `None` if it can."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if any(type(t) not in PLAIN_TENSORS or t.is_nested or t.layout != torch.strided for t in tensors):
            return "it is called with nested or sparse tensors, or with classes of tensors"
        given = self.by_name(args, kwargs)
        if self.exclusive and not any(given[name] is None or given[name] is False for name in self.exclusive):
            return f"it is called with {' and '.join(self.exclusive)} at once, which torch's kernels take differently"
        return None


_signature = cache(inspect.signature)


def decomposition_of(function: Any) -> Decomposition | None:
    """Returns how `function`, as torch dispatches it, can be opened; `None` for all but a few functions."""
    return _BY_ID.get(id(function))


def opened_by_default(decompose: Collection[str] | None) -> dict[int, Decomposition]:
    """Returns the functions with inner nodes, by id: those of attention, unless `decompose` lists what to open."""
    return {} if decompose is not None else {key: found for key, found in _BY_ID.items() if found.inner is not None}


def chosen_decompositions(decompose: Collection[str] | None) -> dict[int, Decomposition]:
    """Returns the decompositions that `ExtractionOptions.decompose` asks for, by the id of their function."""
    by_name = {found.name: found for found in _BY_ID.values()}
    names: Any = () if decompose is None else decompose
    if isinstance(names, str) or not isinstance(names, Collection) or any(name not in [*by_name] for name in names):
        raise CaptureError(f"decompose takes a list of names, of {', '.join(by_name)}, not {decompose!r}")
    return {id(by_name[name].function): by_name[name] for name in names}


# -- inner nodes -------------------------------------------------------------------------------------------------------

CallSites: TypeAlias = "tuple[tuple[CodeType, int], ...]"
"""Code object and instruction offset of each Python frame, as in `Site.steps`."""


@cache
def inner_call_sites(inner: InnerSteps, *flags: Any) -> dict[str, CallSites]:
    """Returns the call sites of the inner steps by name, from the function that has the steps down to the step."""
    found: dict[str, CallSites] = {}

    def see(name: str, caller: FrameType, value: Any) -> Any:
        found.setdefault(name, call_sites.steps_of(call_sites.chain(caller) or ()))
        return value

    with torch.no_grad():
        take_inner_steps(inner, inner.example(*flags), {}, see)
    return found


def take_inner_steps(
    inner: InnerSteps,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    see: Callable[[str, FrameType, Any], Any],
) -> Any:
    """Returns the result of the steps of a call. `see` maps the value of each inner step to the value to use."""
    with _Seeing(see):
        return call_sites.invoke(inner.make_steps(), args, kwargs)


class _Seeing(TorchFunctionMode):
    """Sees the values of the inner nodes."""

    def __init__(self, see: Callable[[str, FrameType, Any], Any]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        caller = call_sites.caller(0)
        name = call_sites.result_variable(caller, getattr(func, "__name__", ""))
        return self._see(name, caller, result) if isinstance(name, str) and name in INNER_NODES else result


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

    Scores are computed in float32 at least, as the fused kernels do. The lines that assign `scores` and `pattern` run
    in each call: these names mean the same value for every mask, dtype and number of heads.
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
    bias = dot_products.new_zeros(())
    if attn_mask is not None:
        bias = attn_mask
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=dot_products.dtype).masked_fill(~attn_mask, -math.inf)
    scores = torch.add(bias, dot_products, alpha=scale)
    probabilities = safe_softmax(scores, -1)
    pattern = torch.dropout(probabilities.to(dtype), dropout_p, train=dropout_p > 0)
    return torch.matmul(pattern, value)


_HALF = (torch.float16, torch.bfloat16)


def _attention_specs(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, enable_gqa: bool, **_: Any
) -> tuple[TensorSpec, TensorSpec]:
    """Returns the specs of the scores and the pattern; their sizes grow with the square of the sequence length."""
    score_dtype = torch.float32 if query.dtype in _HALF else query.dtype
    if score_dtype == torch.float32 and _is_autocast(query):
        score_dtype = torch.matmul(query.new_empty(1, 1), query.new_empty(1, 1)).dtype
    if attn_mask is not None:
        score_dtype = torch.promote_types(score_dtype, attn_mask.dtype)
    shape = _scores_shape(query, key, attn_mask, enable_gqa)
    return TensorSpec(shape, score_dtype, query.device), TensorSpec(shape, query.dtype, query.device)


def _scores_shape(query: Tensor, key: Tensor, attn_mask: Tensor | None, enable_gqa: bool) -> torch.Size:
    heads = (*key.shape[:-3], 1) if enable_gqa else key.shape[:-2]
    shapes = [(*query.shape[:-1], 1), (*heads, 1, key.shape[-2]), () if attn_mask is None else attn_mask.shape]
    # Not by `torch.broadcast_shapes`: its first call takes seconds, since it imports half of torch.
    along = zip_longest(*map(reversed, shapes), fillvalue=1)
    return torch.Size(reversed([next((size for size in sizes if size != 1), 1) for sizes in along]))


def _is_autocast(tensor: Tensor) -> bool:
    device = tensor.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


# -- multi_head_attention_forward --------------------------------------------------------------------------------------


@cache
def _opened_multi_head_attention(**replaced: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch's own function, with helpers (its own, or `replaced`) that do not dispatch to function modes."""
    original: Any = functional.multi_head_attention_forward
    namespace = {**original.__globals__, **replaced}
    namespace |= {name: _never for name in namespace if name.startswith("has_torch_function")}
    waiting = [original]
    for function in waiting:  # grows on the way
        namespace[function.__name__] = _with_globals(function, namespace)
        called = (original.__globals__.get(name) for name in function.__code__.co_names if name not in replaced)
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


_heads: ContextVar[int] = ContextVar("graphpatch_heads", default=1)


def _multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    """Torch's own function, with `scores` and `pattern` separated by row and head."""
    number = kwargs["num_heads"] if "num_heads" in kwargs else args[4]
    with holding(_heads, number):
        return _opened_multi_head_attention(softmax=_softmax, scaled_dot_product_attention=_attention)(*args, **kwargs)


def _softmax(products: Tensor, dim: int) -> Tensor:
    scores = products.view(-1, _heads.get(), *products.shape[1:])
    pattern = torch.softmax(scores, dim)
    return pattern.flatten(0, 1)


def _multi_head_example(need_weights: bool) -> tuple[Any, ...]:
    one, weight = torch.ones(1, 1, 1, device="cpu"), torch.ones(1, 1, device="cpu")
    projections = torch.ones(3, 1, device="cpu")
    # In order: sizes, weights of the projections, extra keys, dropout, the output projection, flags and a mask.
    return (one, one, one, 1, 1, projections, None, None, None, False, 0.0, weight, None, False, None, need_weights)


def _multi_head_specs(query: Tensor, key: Tensor, **given: Any) -> tuple[TensorSpec, ...]:
    if _is_autocast(query):  # autocast would cast the steps differently from the call
        return ()
    keys = given["static_k"]
    rows = query.shape[1] if query.dim() == 3 else 1
    length = key.shape[0] if keys is None else keys.shape[1]
    length += (given["bias_k"] is not None) + bool(given["add_zero_attn"])
    shape = torch.Size((rows, given["num_heads"], query.shape[0], length))
    is_low = query.dtype in _HALF and not given["need_weights"]
    score_dtype = torch.float32 if is_low else query.dtype
    return TensorSpec(shape, score_dtype, query.device), TensorSpec(shape, query.dtype, query.device)


for _function in (_attention, _multi_head_attention, _softmax):
    count_as_users(_function.__code__)
_ALL = (
    Decomposition(
        "scaled_dot_product_attention",
        functional.scaled_dot_product_attention,
        is_exact=False,
        make_steps=lambda: _attention,
        exclusive=("attn_mask", "is_causal"),
        inner=InnerSteps(
            reads=("query", "key", "attn_mask"),
            specs=_attention_specs,
            make_steps=lambda: _attention,
            example=lambda: (torch.ones(1, 1, device="cpu"),) * 3,
        ),
    ),
    Decomposition(
        "multi_head_attention_forward",
        functional.multi_head_attention_forward,
        is_exact=True,
        make_steps=_opened_multi_head_attention,
        inner=InnerSteps(
            reads=("query", "key", "in_proj_weight", "attn_mask", "key_padding_mask"),
            specs=_multi_head_specs,
            make_steps=lambda: _multi_head_attention,
            example=_multi_head_example,
            flags=("need_weights",),
        ),
    ),
)
_BY_ID = {id(decomposition.function): decomposition for decomposition in _ALL}
