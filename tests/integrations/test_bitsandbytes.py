"""Quantized modules run as they do; their weights are seen, probed and patched as what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    PatchableGraph,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
)
from graphpatch_notebook.patches.kinds import Patch
from tests.integrations.quantized import KINDS, FloatTensors, Quantized, dequantized, quantized
from tests.laws.captures import identity

X = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
OUT, IN = 32, 64

each_kind = pytest.mark.parametrize("kind", KINDS)


def plain(model: Quantized, weight: Tensor, x: Tensor = X) -> Tensor:
    """Returns what the model gives with this weight, computed by a plain linear function."""
    dtype = getattr(model.linear, "compute_dtype", None) or x.dtype
    bias = model.linear.bias
    output = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return output.to(x.dtype) * 2


# -- what is seen ------------------------------------------------------------------------------------------------------


@each_kind
@torch.no_grad()
def test_a_weight_is_recorded_with_its_unpacked_shape(kind: str) -> None:
    pg = PatchableGraph(quantized(kind), X)
    node = pg.nodes["linear.weight"]
    assert (node.shape, node.dtype, node.device) == ((OUT, IN), torch.float32, torch.device("cpu"))
    assert "weight: Tensor(32, 64)\n" in repr(pg.graph)
    assert tuple(pg.graph.linear.weight._shape) == (OUT, IN)
    names = ["x", "weight", "bias", "output"] if kind != "nf4, no bias" else ["x", "weight", "output"]
    assert [path for path in pg.nodes if path.startswith("linear.")] == [f"linear.{name}" for name in names]
    assert "quantized" in pg._graph_module.linear.reason


# -- untouched ---------------------------------------------------------------------------------------------------------


@each_kind
@torch.no_grad()
def test_untouched_weight_changes_no_bit(kind: str) -> None:
    model, other = quantized(kind), quantized(kind)
    pg = PatchableGraph(model, X)
    expected = other(X)
    assert torch.equal(pg(X), expected)
    looks = [ProbePatch(), RecordPatch(), identity()]
    for patches in (*looks, looks):
        with pg.patch({"linear.weight": patches}, strict=True):
            assert torch.equal(pg(X), expected)
    with pg.patch({path: identity() for path in pg.nodes}, strict=True):
        assert torch.equal(pg(X), expected)
        assert torch.equal(pg(X[:1, :2]), other(X[:1, :2]))


# -- probed and patched ------------------------------------------------------------------------------------------------


@each_kind
@torch.no_grad()
def test_a_probe_keeps_the_unpacked_weight(kind: str) -> None:
    model, probe = quantized(kind), ProbePatch()
    pg = PatchableGraph(model, X)
    expected = dequantized(quantized(kind).linear, like=model.linear)
    for _ in range(2):
        with pg.patch({"linear.weight": probe}):
            pg(X)
        torch.testing.assert_close(probe.activation, expected, rtol=1e-6, atol=1e-8)
    # It is the weight that the kernel works with, up to its rounding.
    error = (plain(model, probe.activation) - pg(X)).norm() / pg(X).norm()
    assert error < 0.02


@pytest.mark.parametrize("kind", ["int8", "int8, outliers"])
@torch.no_grad()
def test_8_bit_scales_are_found_in_the_weight_and_in_the_state(kind: str) -> None:
    model, other = quantized(kind), quantized(kind)
    pg, probe = PatchableGraph(model, X), ProbePatch()
    scales = model.linear.state.SCB
    for is_in_weight in (False, True, False):
        if is_in_weight:  # as accelerate does, which loads a weight anew for each forward
            other.linear.weight.data[0] = 0
            model.linear.weight = other.linear.weight
        assert (model.linear.weight.SCB is not None) == is_in_weight
        expected = model.linear.weight.float() * ((model.linear.weight.SCB if is_in_weight else scales) / 127)[:, None]
        with pg.patch({"linear.weight": probe}):
            pg(X)
        scales = model.linear.state.SCB
        torch.testing.assert_close(probe.activation, expected, rtol=1e-6, atol=1e-8)


def flipped(weight: Tensor) -> Tensor:
    return weight.flip(1)


EDITS: dict[str, tuple[Callable[[], Patch[Any]], Callable[[Tensor], Tensor]]] = {
    "zero": (ZeroPatch, torch.zeros_like),
    "zero a row": (lambda: ZeroPatch(slice=3), lambda w: w.index_fill(0, torch.tensor(3), 0)),
    "zero columns": (
        lambda: ZeroPatch(slice=(slice(None), slice(8, 10))),
        lambda w: w.index_fill(1, torch.tensor([8, 9]), 0),
    ),
    "add": (lambda: AddPatch(torch.arange(64) / 100), lambda w: w + torch.arange(64) / 100),
    "add to a slice": (
        lambda: AddPatch(0.5, slice=(slice(0, 2), -1)),
        lambda w: w + F.pad(torch.full((2, 1), 0.5), (63, 0, 0, 30)),
    ),
    "replace": (lambda: ReplacePatch(torch.ones(32, 64)), torch.ones_like),
    "replace a row": (
        lambda: ReplacePatch(torch.ones(64), slice=5),
        lambda w: torch.cat([w[:5], torch.ones(1, 64), w[6:]]),
    ),
    "a function": (lambda: CustomPatch(flipped), flipped),
}


@pytest.mark.parametrize("edit", EDITS)
@each_kind
@torch.no_grad()
def test_a_patched_weight_is_used_by_a_plain_linear_function(kind: str, edit: str) -> None:
    model, (patch, edited) = quantized(kind), EDITS[edit]
    pg = PatchableGraph(model, X)
    probe = ProbePatch()
    with pg.patch({"linear.weight": probe}):
        expected = pg(X)
    with pg.patch({"linear.weight": patch()}, strict=True):
        assert torch.equal(pg(X), plain(model, edited(probe.activation)))
        assert torch.equal(pg(x=X[0]), plain(model, edited(probe.activation), X[0]))
    assert torch.equal(pg(X), expected)


@each_kind
def test_gradients_flow_to_the_inputs_and_to_a_patch(kind: str) -> None:
    model = quantized(kind)
    x, value = X.clone().requires_grad_(), torch.ones(64, requires_grad=True)
    pg = PatchableGraph(model, X)
    probe = ProbePatch()
    with pg.patch({"linear.weight": [ReplacePatch(value, slice=5), probe]}):
        pg(x).pow(2).sum().backward()
    reference = [X.clone().requires_grad_(), torch.ones(64, requires_grad=True)]
    weight = torch.cat([probe.activation[:5].detach(), reference[1][None], probe.activation[6:].detach()])
    plain(model, weight, reference[0]).pow(2).sum().backward()
    torch.testing.assert_close([x.grad, value.grad], [tensor.grad for tensor in reference])
    assert all(parameter.grad is None for parameter in model.parameters())


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int8, float weights"])
@torch.no_grad()
def test_a_weight_is_unpacked_only_where_it_is_patched_or_probed(kind: str) -> None:
    model = quantized(kind)
    with FloatTensors((OUT, IN)) as made:
        pg = PatchableGraph(model, X)
        pg(X)
        repr(pg.graph)
        assert pg.nodes["linear.weight"].shape == (OUT, IN)
        with pg.patch({"linear.output": ZeroPatch(), "linear.x": ProbePatch(), "mul": ProbePatch()}):
            pg(X)
        assert made.count == 0
        context = pg.patch({"linear.weight": ProbePatch()})
        with context:
            assert made.count == 0
            pg(X)
        assert made.count > 0


# -- where it is not so simple -----------------------------------------------------------------------------------------


EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "nf4": lambda: bnb.nn.EmbeddingNF4(20, 64),
    "fp4, odd": lambda: bnb.nn.EmbeddingFP4(20, 48),
    "int8": lambda: bnb.nn.Embedding8bit(20, 64),
}


@pytest.mark.parametrize("kind", EMBEDDINGS)
@torch.no_grad()
def test_embeddings(kind: str) -> None:
    torch.manual_seed(0)
    embedding = EMBEDDINGS[kind]().to("cpu").eval()
    ids = torch.arange(6).view(2, 3)
    expected, probe = embedding(ids), ProbePatch()
    pg = PatchableGraph(nn.Sequential(embedding), ids)
    assert pg.nodes["sub_0.weight"].shape == (20, embedding.embedding_dim)
    with pg.patch({"sub_0.weight": probe}, strict=True):
        assert torch.equal(pg(ids), expected)
    torch.testing.assert_close(F.embedding(ids, probe.activation), expected)
    with pg.patch({"sub_0.weight": ZeroPatch(slice=1)}, strict=True):
        patched = pg(ids)
    assert not patched[0, 1].any()
    torch.testing.assert_close(patched[1], expected[1])
