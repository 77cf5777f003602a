"""Quantized layers run as they do, and can be patched around."""

from __future__ import annotations

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import CustomPatch, PatchableGraph, ProbePatch, ZeroPatch


class Quantized(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = (
            bnb.nn.Linear4bit(64, 32) if kind == "4bit" else bnb.nn.Linear8bitLt(64, 32, has_fp16_weights=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * 2


@pytest.fixture(params=["8bit", "4bit"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    return Quantized(request.param).to("cpu")


@torch.no_grad()
def test_unpatched_and_identity_are_bit_equal(model: nn.Module) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    expected = model(x)
    pg = PatchableGraph(model, x)
    assert torch.equal(pg(x), expected)
    with pg.patch({path: CustomPatch(custom_op=lambda value: value, requires_clone=False) for path in pg.nodes}):
        assert torch.equal(pg(x), expected)


@torch.no_grad()
def test_input_and_output_are_patched(model: nn.Module) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    pg = PatchableGraph(model, x)
    probe = ProbePatch()
    with pg.patch({"linear.input" if "linear.input" in pg.nodes else "linear.x": ZeroPatch(), "linear.output": probe}):
        patched = pg(x)
    assert torch.equal(probe.activation, model.linear(torch.zeros_like(x)))
    assert torch.equal(patched, probe.activation * 2)
