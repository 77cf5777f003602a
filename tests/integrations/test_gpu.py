"""Quantized and spread models on a GPU: `pytest -m gpu`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import nn

from graphpatch_notebook import AddPatch, CustomPatch, PatchableGraph, PatchValueError, ProbePatch, ZeroPatch
from tests.integrations.offloaded import INPUT_IDS, attribute_path, counted, llama
from tests.integrations.quantized import KINDS, dequantized, quantized
from tests.integrations.test_bitsandbytes import X, plain

pytestmark = pytest.mark.gpu

PATH = "model.layers_1.mlp.down_proj.weight"


def _dispatched(model: nn.Module, folder: Path) -> nn.Module:
    device_map: dict[str, int | str] = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": "disk"}
    device_map |= {"model.layers.1": "cpu", "model.norm": 0, "lm_head": 0}
    return dispatch_model(model, device_map, offload_dir=str(folder))


SPREAD: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "cpu": lambda model, folder: cpu_offload(model, execution_device=0),
    "disk": lambda model, folder: disk_offload(model, str(folder), execution_device=0),
    "dispatched": _dispatched,
}


@pytest.mark.parametrize("way", SPREAD)
@torch.no_grad()
def test_spread_models_are_patched_on_the_gpu(way: str, tmp_path: Path) -> None:
    model = SPREAD[way](llama(), tmp_path)
    before = [parameter.device for parameter in model.parameters()]
    ids = INPUT_IDS.to(0)
    expected = model(ids).logits
    pg, ledger, probe = PatchableGraph(model, ids), counted(model), ProbePatch()
    plain_loads = ledger.of(lambda: model(ids))
    assert ledger.of(lambda: PatchableGraph(model, ids)) == plain_loads
    identity = CustomPatch(custom_op=lambda value: value, requires_clone=False)
    with pg.patch(dict.fromkeys(pg.nodes, identity), strict=True):
        assert torch.equal(pg(ids).logits, expected)
    edited = llama()
    edited.get_parameter(attribute_path(PATH))[0] += 2
    with pg.patch({PATH: [AddPatch(2, slice=0), probe]}, strict=True):
        torch.testing.assert_close(pg(ids).logits, edited.to(0)(ids).logits)
    assert probe.activation.device == torch.device("cuda", 0)
    assert [parameter.device for parameter in model.parameters()] == before


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_quantized_modules_are_patched_on_the_gpu(kind: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = X.to(0, dtype)
        model, probe = quantized(kind, "cuda"), ProbePatch()
        pg = PatchableGraph(model, x)
        expected = quantized(kind, "cuda")(x)
        assert pg.nodes["linear.weight"].shape == (32, 64)
        assert pg.nodes["linear.weight"].device.type == "cuda"
        with pg.patch({"linear.weight": probe}, strict=True):
            assert torch.equal(pg(x), expected)
        torch.testing.assert_close(probe.activation, dequantized(quantized(kind, "cuda").linear, like=model.linear))
        with pg.patch({"linear.weight": ZeroPatch(slice=3)}, strict=True):
            patched = pg(x)
        assert patched.dtype == expected.dtype
        weight = probe.activation.clone()
        weight[3] = 0
        assert torch.equal(patched, plain(model, weight, x))


@torch.no_grad()
def test_a_value_on_another_device_says_so() -> None:
    x = X.to(0, torch.float16)
    pg = PatchableGraph(quantized("nf4", "cuda"), x)
    with (
        pg.patch({"linear.weight": AddPatch(torch.ones(32, 64))}),
        pytest.raises(PatchValueError, match=r"value.to\('cuda:0'\)"),
    ):
        pg(x)


@torch.no_grad()
def test_patched_runs_do_not_wait_for_the_gpu() -> None:
    """The same on the CPU, by the operations: tests/patching/test_values.py."""
    model = llama().to(0)
    ids, value = INPUT_IDS.to(0), torch.ones((), device=0)
    pg, probe = PatchableGraph(model, ids), ProbePatch()
    head = {"layers[1].attn.heads[0].z": ZeroPatch(), "layers[0].resid_post": AddPatch(value=value, positions=[1])}
    waits = []
    for patches in ({}, head | {"layers[1].mlp.post": probe}):
        with pg.patch(patches), warnings.catch_warnings(record=True) as caught:
            pg(ids)
            torch.cuda.synchronize()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                pg(ids)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append([str(each.message) for each in caught if "synchroniz" in str(each.message)])
    assert len(waits[1]) == len(waits[0]), waits[1]
