"""The steps of composite functions: the same values as the functions themselves, within rounding."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.profiler import profile

from graphpatch_notebook import CaptureError, ExtractionOptions, GraphPatchWarning, PatchableGraph
from graphpatch_notebook.capture.decompositions import decomposition_of, take_inner_steps
from tests.zoo import installed
from tests.zoo.case import floats
from tests.zoo.values import bit_equal

# What the docstring of `ExtractionOptions` says, and what half precision makes of values around one.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BATCH, HEADS, LENGTH, KEYS, WIDTH = 2, 4, 5, 7, 6
KV_HEADS = [HEADS, 2, 1]


def steps_of(function: Callable[..., Any]) -> Callable[..., Any]:
    decomposition = decomposition_of(function)
    assert decomposition is not None
    return decomposition.make_steps()


attention = steps_of(F.scaled_dot_product_attention)


def mask_of(kind: str, dtype: torch.dtype) -> Tensor:
    """A mask in which row 2 is masked out whole, for one form of it."""
    allowed = floats(LENGTH, KEYS, seed=3) > -0.5
    allowed[2] = False
    if kind.startswith("per_head"):
        allowed = allowed & (floats(BATCH, HEADS, LENGTH, KEYS, seed=4) > -1)
    if kind.startswith("per_batch"):
        allowed = allowed & (floats(BATCH, 1, 1, KEYS, seed=4) > -1)
    if kind.endswith("bool"):
        return allowed
    if kind.endswith("lowest"):  # as transformers masks: a row masked out whole attends to everything
        return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
    return floats(*allowed.shape, seed=5).to(dtype).masked_fill(~allowed, -torch.inf)


MASKS = ["none", "causal", "bool", "per_head_bool", "per_batch_bool", "float", "per_head_float", "lowest"]


def arguments(mask: str, dtype: torch.dtype, kv_heads: int = HEADS) -> tuple[list[Tensor], dict[str, Any]]:
    query = floats(BATCH, HEADS, LENGTH, WIDTH, seed=0).to(dtype)
    key = floats(BATCH, kv_heads, KEYS, WIDTH, seed=1).to(dtype)
    value = floats(BATCH, kv_heads, KEYS, WIDTH, seed=2).to(dtype)
    kwargs: dict[str, Any] = {"enable_gqa": True} if kv_heads != HEADS else {}
    if mask == "causal":
        kwargs["is_causal"] = True
    elif mask != "none":
        kwargs["attn_mask"] = mask_of(mask, dtype)
    return [query, key, value], kwargs


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_attention_equals_that_of_torch(dtype: torch.dtype, mask: str) -> None:
    for kv_heads, scale in itertools.product(KV_HEADS, [None, 0.3]):
        check_attention(dtype, mask, kv_heads, scale)


def check_attention(dtype: torch.dtype, mask: str, kv_heads: int, scale: float | None) -> None:
    tensors, kwargs = arguments(mask, dtype, kv_heads)
    expected = F.scaled_dot_product_attention(*tensors, **kwargs, scale=scale)
    found = attention(*tensors, **kwargs, scale=scale)
    assert_close(found, expected, dtype)
    assert (found.isnan() == expected.isnan()).all()
    has_row_of_no_keys = mask.endswith(("bool", "float"))
    if has_row_of_no_keys:
        torch.testing.assert_close(found[..., 2, :], torch.zeros_like(found[..., 2, :]), rtol=0, atol=0)
    rows = [row for row in range(LENGTH) if row != 2 or not has_row_of_no_keys]
    assert found[..., rows, :].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mask", MASKS[:-1])  # the fused kernel loses the sum of a row that is all lowest numbers
def test_gradients_of_attention_equal_those_of_torch(dtype: torch.dtype, mask: str) -> None:
    tensors, kwargs = arguments(mask, dtype, 2)
    weights = floats(BATCH, HEADS, LENGTH, WIDTH, seed=9).to(dtype)

    def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        return torch.autograd.grad((function(*leaves, **kwargs) * weights).sum(), leaves)

    for found, expected in zip(gradients(attention), gradients(F.scaled_dot_product_attention), strict=True):
        assert_close(found, expected, dtype)


@pytest.mark.parametrize("mask", ["causal", "bool", "float"])
def test_attention_under_autocast(mask: str) -> None:
    tensors, kwargs = arguments(mask, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(*tensors, **kwargs)
        assert_close(attention(*tensors, **kwargs), expected, torch.bfloat16)


def test_dropout_drops_weights_and_scales_the_others() -> None:
    (query, key, _), _ = arguments("none", torch.float32)
    ones = torch.eye(KEYS).expand(BATCH, HEADS, KEYS, KEYS)  # then the result is the pattern itself
    kept = attention(query, key, ones)
    dropped = attention(query, key, ones, dropout_p=0.25)
    is_dropped = dropped == 0
    assert 0.1 < is_dropped.float().mean() < 0.4
    torch.testing.assert_close(dropped, torch.where(is_dropped, 0, kept / 0.75))


class Attention(nn.Module):
    """Hands its arguments over."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        attended = F.scaled_dot_product_attention(query, key, value, **kwargs)
        return attended + 1


DECOMPOSED = ExtractionOptions(decompose=["scaled_dot_product_attention"])


def refused_calls() -> dict[str, tuple[list[Any], dict[str, Any], str]]:
    (query, key, value), _ = arguments("none", torch.float32)
    mask = mask_of("bool", torch.float32)
    lower_right = causal_lower_right(LENGTH, KEYS)
    return {
        "mask and is_causal": ([query, key, value], {"attn_mask": mask, "is_causal": True}, "is_causal at once"),
        "subclass": ([query, key, value], {"attn_mask": lower_right}, "it is called with nested or sparse tensors"),
    }


@pytest.mark.parametrize("name", list(refused_calls()))
def test_a_call_that_cannot_be_opened_stays_one_node_with_a_warning(name: str) -> None:
    tensors, kwargs, reason = refused_calls()[name]
    try:
        expected = Attention()(*tensors, **kwargs)
    except RuntimeError as refusal:  # torch 2.15 takes a mask or `is_causal`
        with pytest.raises(RuntimeError, match=re.escape(str(refusal))):
            PatchableGraph(Attention(), DECOMPOSED, *tensors, **kwargs)
        assert installed.TORCH > (2, 13)
        return
    with pytest.warns(GraphPatchWarning, match=f"scaled_dot_product_attention.*{reason}"):
        pg = PatchableGraph(Attention(), DECOMPOSED, *tensors, **kwargs)
    assert "attended" in pg.nodes
    assert "pattern" not in pg.nodes
    assert bit_equal(pg(*tensors, **kwargs), expected) is None


def test_a_model_that_calls_none_of_the_functions_warns() -> None:
    options = ExtractionOptions(decompose=["scaled_dot_product_attention", "multi_head_attention_forward"])
    match = "does not call scaled_dot_product_attention nor multi_head_attention_forward on these inputs"
    with pytest.warns(GraphPatchWarning, match=match):
        PatchableGraph(nn.Linear(2, 2), options, torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PatchableGraph(nn.Linear(2, 2), torch.ones(2))
        PatchableGraph(Attention(), options, *arguments("none", torch.float32)[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("function", [F.scaled_dot_product_attention, F.multi_head_attention_forward])
def test_nested_tensors_are_refused(function: Callable[..., Any]) -> None:
    nested = torch.nested.nested_tensor([floats(HEADS, 3, WIDTH), floats(HEADS, 5, WIDTH)])
    decomposition = decomposition_of(function)
    assert decomposition is not None
    assert "nested" in str(decomposition.refusal((nested, nested, nested), {}))


# -- multi_head_attention_forward --------------------------------------------------------------------------------------


# -- the option --------------------------------------------------------------------------------------------------------


class NeverRuns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the model must not run")


@pytest.mark.parametrize(
    "given", [["scaled_dot_product_atention"], [F.softmax], "scaled_dot_product_attention", 3, [[]]]
)
def test_what_cannot_be_opened_is_an_error_before_anything_runs(given: Any) -> None:
    with pytest.raises(CaptureError, match="decompose"):
        PatchableGraph(NeverRuns(), ExtractionOptions(decompose=given), torch.ones(2))


# -- inner nodes -------------------------------------------------------------------------------------------------------


def inner_values(tensors: list[Tensor], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The inner steps of a call, as they are computed."""
    decomposition = decomposition_of(F.scaled_dot_product_attention)
    assert decomposition is not None
    found: dict[str, Tensor] = {}

    def see(name: str, _: Any, value: Tensor) -> Tensor:
        found[name] = value
        return value

    assert decomposition.inner is not None
    take_inner_steps(decomposition.inner, tuple(tensors), kwargs, see)
    return found


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("has_autocast", [False, True])
def test_what_inner_steps_are_is_known_without_them(dtype: torch.dtype, has_autocast: bool) -> None:
    for mask, kv_heads in zip(MASKS, itertools.cycle(KV_HEADS), strict=False):
        tensors, kwargs = arguments(mask, dtype, kv_heads)
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            computed = inner_values(tensors, kwargs)
            known = PatchableGraph(Attention(), *tensors, **kwargs).nodes
        assert list(computed) == ["scores", "pattern"]
        for name, value in computed.items():
            assert (known[name].shape, known[name].dtype) == (value.shape, value.dtype), name
            assert (known[name].device, known[name].opens) == (value.device, "scaled_dot_product_attention")


def test_capture_allocates_no_square_of_the_sequence() -> None:
    """8192 tokens: the pattern of the two heads would take half a GiB."""
    length = 8192
    q, k, v = (floats(1, 2, length, 4, seed=seed) for seed in range(3))
    with torch.no_grad(), profile(profile_memory=True) as profiled:
        pg = PatchableGraph(Attention(), q, k, v, is_causal=True)
    largest = max(event.self_cpu_memory_usage for event in profiled.events())
    assert largest < 2 * length * length
    assert pg.nodes["pattern"].shape == (1, 2, length, length)
