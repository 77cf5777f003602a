"""Models whose weights accelerate keeps elsewhere: they load, are patched, and their weights stay where they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, CustomPatch, PatchableGraph, ZeroPatch

INPUT_IDS = torch.arange(14).view(2, 7)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def dispatched(model: nn.Module, folder: Path) -> nn.Module:
    device_map = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb"), "cpu")
    device_map |= {"model.layers.1": "disk", "lm_head": "cpu"}
    return dispatch_model(model, device_map, main_device="cpu", offload_dir=str(folder), force_hooks=True)


OFFLOADED: dict[str, Callable[[nn.Module, Path], nn.Module]] = {
    "cpu_offload": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "disk_offload": lambda model, folder: disk_offload(model, str(folder), execution_device="cpu"),
    "dispatch_model": dispatched,
}


@pytest.fixture(params=OFFLOADED)
def offloaded(request: pytest.FixtureRequest, tmp_path: Path) -> nn.Module:
    return OFFLOADED[request.param](llama(), tmp_path)


def devices(model: nn.Module) -> list[str]:
    return [str(parameter.device) for parameter in model.parameters()]


@torch.no_grad()
def test_runs_as_it_does_and_weights_stay_where_they_were(offloaded: nn.Module) -> None:
    before = devices(offloaded)
    assert "meta" in before
    pg = PatchableGraph(offloaded, INPUT_IDS)
    assert [frame.opaque_reason for frame in pg._root_frame.walk() if frame.opaque_reason] == []
    assert torch.equal(pg(INPUT_IDS).logits, llama()(INPUT_IDS).logits)
    assert devices(offloaded) == before


@torch.no_grad()
def test_graphs_hold_nothing_of_the_machinery_that_moves_weights(offloaded: nn.Module) -> None:
    assert list(PatchableGraph(offloaded, INPUT_IDS).nodes) == list(PatchableGraph(llama(), INPUT_IDS).nodes)


@torch.no_grad()
def test_identity_on_every_node_changes_no_bit(offloaded: nn.Module) -> None:
    pg = PatchableGraph(offloaded, INPUT_IDS)
    with pg.patch({path: CustomPatch(custom_op=lambda value: value, requires_clone=False) for path in pg.nodes}):
        assert torch.equal(pg(INPUT_IDS).logits, llama()(INPUT_IDS).logits)


@torch.no_grad()
def test_a_patched_weight_equals_an_edited_one(offloaded: nn.Module) -> None:
    pg = PatchableGraph(offloaded, INPUT_IDS)
    edited = llama()
    edited.get_parameter("model.layers.1.mlp.down_proj.weight").data[0] += 2
    with pg.patch({"model.layers_1.mlp.down_proj.weight": AddPatch(2, slice=0)}):
        assert torch.equal(pg(INPUT_IDS).logits, edited(INPUT_IDS).logits)


@torch.no_grad()
def test_a_patched_output_equals_a_hook(offloaded: nn.Module) -> None:
    pg = PatchableGraph(offloaded, INPUT_IDS)
    hooked = llama()

    def zeroed(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return torch.zeros_like(output)

    hooked.get_submodule("model.layers.1.mlp").register_forward_hook(zeroed)
    with pg.patch({"model.layers_1.mlp.output": ZeroPatch()}):
        assert torch.equal(pg(INPUT_IDS).logits, hooked(INPUT_IDS).logits)
