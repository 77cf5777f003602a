"""Patched runs of models whose fused calls are opened: attention by default, others by `decompose=`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphpatch_notebook import (
    ExtractionOptions,
    GraphPatchWarning,
    PatchableGraph,
    ProbePatch,
    RecordPatch,
    ZeroPatch,
)
from tests.zoo import installed
from tests.zoo.case import floats, seeded
from tests.zoo.submodules import Submodules

SDPA = ExtractionOptions()
CLOSED = ExtractionOptions(decompose=[])
BOTH = ExtractionOptions(decompose=["scaled_dot_product_attention", "multi_head_attention_forward"])
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
STEPS = ["scores", "pattern"]
X = floats(2, 5, 8)


def attend(x: Tensor, is_causal: bool = True) -> Tensor:
    heads = x.view(*x.shape[:2], 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=is_causal).transpose(1, 2).flatten(2)


def attend_by_hand(x: Tensor, edit: Callable[[Tensor], Tensor] = lambda pattern: pattern) -> Tensor:
    heads = x.view(*x.shape[:2], 2, 4).transpose(1, 2)
    scores = heads @ heads.transpose(-2, -1) / math.sqrt(4)
    allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    pattern = edit(scores.masked_fill(~allowed, -math.inf).softmax(-1))
    return (pattern @ heads).transpose(1, 2).flatten(2)


def without_head_1(pattern: Tensor) -> Tensor:
    return pattern * torch.tensor([1.0, 0.0])[:, None, None]


HEAD_1 = (slice(None), 1)


class Twice(Submodules, linear=(8, 8)):
    """Two calls through one helper, then a loop over one call site."""

    def forward(self, x: Tensor, rounds: int = 3) -> tuple[Tensor, ...]:
        hidden = self.linear(x)
        first, second = attend(hidden), attend(hidden * 2)
        results = [first, second]
        for scale in range(rounds):
            result = attend(hidden + scale)
            results.append(result)
        return tuple(results)

    def by_hand(self, x: Tensor, position: int, edit: Callable[[Tensor], Tensor]) -> Tensor:
        hidden = self.linear(x)
        inputs = [hidden, hidden * 2, *(hidden + scale for scale in range(3))]
        return attend_by_hand(inputs[position], edit)


@pytest.fixture
def twice() -> Twice:
    model = seeded(Twice)
    assert isinstance(model, Twice)
    return model


def steps(pg: PatchableGraph, name: str) -> list[str]:
    return [path for path in pg.nodes if path.rsplit(".", 1)[-1].startswith(name)]


@pytest.mark.parametrize("position", range(5))
def test_only_the_patched_call_is_opened(twice: Twice, position: int) -> None:
    """Each call is told from the others, through the helper and in the loop; the others stay fused, bit for bit."""
    pg = PatchableGraph(twice, SDPA, X)
    expected = twice(X)
    probe, record = ProbePatch(), RecordPatch()
    path = steps(pg, "pattern")[position]
    with pg.patch({path: [ZeroPatch(slice=HEAD_1), probe, record]}):
        found = pg(X)
    torch.testing.assert_close(found[position], twice.by_hand(X, position, without_head_1), **TOLERANCE)
    for other in set(range(5)) - {position}:
        assert torch.equal(found[other], expected[other])
    assert len(record.activations) == 1
    assert probe.activation is not None
    assert probe.activation[:, 1].abs().max() == 0


def inner(pg: PatchableGraph) -> set[str]:
    """The steps inside: what is not there without the option."""
    return set(pg.nodes) - set(PatchableGraph(pg._module, CLOSED, X).nodes)


# -- torch's own modules -----------------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, **settings)

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.attn(x, x, x, **kwargs)


PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    ("batch_first", "extra", "kwargs"),
    [
        (True, {}, {}),
        (False, {"add_bias_kv": True}, {"key_padding_mask": PADDING}),
        (True, {"add_zero_attn": True}, {"attn_mask": CAUSAL}),
        (False, {}, {"attn_mask": CAUSAL, "key_padding_mask": PADDING}),
        (True, {"add_bias_kv": True}, {"attn_mask": CAUSAL, "key_padding_mask": PADDING}),
    ],
)
def test_the_pattern_of_multihead_attention(batch_first: bool, extra: dict[str, Any], kwargs: dict[str, Any]) -> None:
    model = seeded(lambda: SelfAttention(batch_first=batch_first, **extra))
    x = X if batch_first else X.transpose(0, 1)
    expected, weights = model(x, **kwargs, average_attn_weights=False)
    for need_weights in (True, False):
        pg = PatchableGraph(model, BOTH, x, **kwargs, need_weights=need_weights)
        path = "attn.attn_output_weights_2" if need_weights else "attn.pattern"
        probe = ProbePatch()
        with pg.patch({path: probe}):
            found = pg(x, **kwargs, need_weights=need_weights)[0]
        assert probe.activation is not None
        torch.testing.assert_close(probe.activation.view(weights.shape), weights, **TOLERANCE)
        torch.testing.assert_close(found, expected, **TOLERANCE)
        with pg.patch({"attn.attn_output": ZeroPatch(), path: ZeroPatch()}):
            assert pg(x, **kwargs, need_weights=need_weights)[0].abs().max() == 0
        pg = PatchableGraph(model, x, **kwargs, need_weights=need_weights)
        assert pg.nodes["attn.pattern"].shape == weights.shape
        with pg.patch({"attn.pattern": probe}):
            found = pg(x, **kwargs, need_weights=need_weights)[0]
        torch.testing.assert_close(probe.activation, weights, **TOLERANCE)
        torch.testing.assert_close(found, expected, **TOLERANCE)
        with pg.patch({"attn.pattern": ZeroPatch()}):
            found = pg(x, **kwargs, need_weights=need_weights)[0]
        assert torch.equal(found, model.attn.out_proj.bias.expand_as(found))


class Chosen(nn.Module):
    function: Callable[..., Tensor] = staticmethod(F.scaled_dot_product_attention)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        attended = self.function(x, x, x, **options)
        return attended * 2


def test_calls_that_are_not_opened_are_reported_and_have_the_bits_of_the_model() -> None:
    model, x = Chosen(), floats(2, 3, 50, 8)
    pg = PatchableGraph(model, x)
    with pg.patch({"pattern": ZeroPatch(steps=[1])}).quiet():
        assert torch.equal(pg(x), model(x))
    masked = {"attn_mask": torch.zeros(50, 50), "is_causal": True}
    if installed.TORCH < (2, 14):  # else torch refuses it itself
        with pg.patch({"pattern": ZeroPatch()}), pytest.warns(GraphPatchWarning, match="cannot be decomposed in this"):
            assert torch.equal(pg(x, **masked), model(x, **masked))
    model.function = torch.addcmul
    with pg.patch({"pattern": ZeroPatch()}), pytest.warns(GraphPatchWarning, match="pattern"):
        assert torch.equal(pg(x), model(x))
