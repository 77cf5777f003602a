"""`pg.generate`: without patches, with patches that change nothing, and with ones that hooks or edited code do too."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphpatch_notebook import CustomPatch, GraphPatchWarning, PatchableGraph, ZeroPatch
from tests.integrations.generations import SEQ2SEQ, WAYS, captured, generated, same
from tests.laws.captures import identity, outside_fused_calls
from tests.zoo.submodules import Submodules

DECODERS = ("gpt2-sdpa", "llama-eager")

each_model = pytest.mark.parametrize("name", [*DECODERS, *SEQ2SEQ])


@each_model
@pytest.mark.parametrize(("way", "padded"), [(way, number % 2 == 0) for number, way in enumerate(WAYS)])
def test_the_same_tokens_without_patches_and_with_ones_that_change_nothing(name: str, way: str, padded: bool) -> None:
    model, pg = captured(name)
    settings = {"new": 4, **WAYS[way]}
    expected = generated(model, padded, **settings)
    assert same(expected, generated(pg, padded, **settings))
    with warnings.catch_warnings():
        # Masks are made in other ways with other caches: some nodes of the example do not come up.
        warnings.filterwarnings("ignore", ".not fired", GraphPatchWarning)
        with pg.patch({path: identity(any_shape=True) for path in outside_fused_calls(pg)}):
            assert same(expected, generated(pg, padded, **settings))
    assert same(expected, generated(pg, padded, **settings))


@pytest.mark.parametrize("way", ["greedy", "sampling", "beams", "static-cache", "no-cache"])
def test_an_operation_as_in_edited_source(way: str) -> None:
    _, pg = captured("llama-sdpa")
    model = copy.deepcopy(captured("llama-sdpa")[0])

    def edited(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)).mul(0.5) * self.up_proj(x))

    mlp: Any = model.get_submodule("model.layers.1.mlp")
    mlp.forward = edited.__get__(mlp)
    with pg.patch({"model.layers_1.mlp.act_fn.output": CustomPatch(custom_op=lambda t: t.mul_(0.5))}):
        at_boundary = generated(pg, padded=True, **WAYS[way])
    with pg.patch({"model.layers_1.mlp.act_fn.silu": CustomPatch(custom_op=lambda t: t.mul_(0.5))}):
        inside = generated(pg, padded=True, **WAYS[way])
    expected = generated(model, padded=True, **WAYS[way])
    assert same(expected, at_boundary)
    assert same(expected, inside)
    assert not same(generated(captured("llama-sdpa")[0], padded=True, **WAYS[way]), inside)


@pytest.mark.parametrize("path", ["model.layers_0.mlp.output", "model.layers_0.mlp.mul"])
def test_what_a_generation_compiles_runs_patched(path: str) -> None:
    """With a static cache `generate` compiles the decoding steps where it thinks that this pays off."""
    from transformers import CompileConfig

    model, pg = captured("llama-sdpa")
    compile_config = CompileConfig(backend=_as_it_is, fullgraph=False)
    compile_config._compile_all_devices = True
    mlp = model.get_submodule("model.layers.0.mlp")
    if path.endswith("output"):
        handle = mlp.register_forward_hook(lambda m, a, output: output * 0.5)
    else:
        handle = mlp.down_proj.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    try:
        expected = generated(model, cache_implementation="static")
    finally:
        handle.remove()
    with pg.patch({path: CustomPatch(custom_op=lambda t: t * 0.5)}):
        found = generated(pg, cache_implementation="static", compile_config=compile_config)
    assert same(expected, found)


def _as_it_is(graph_module: torch.fx.GraphModule, _: Any, **options: Any) -> Any:
    """A backend like "eager", which takes no options in older versions of torch."""
    return graph_module.forward


class WithMethods(Submodules, up=(3, 4), down=(4, 3)):
    """Other methods than `forward` that run the model, or parts of it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))

    def twice(self, x: Tensor) -> Tensor:
        return self(self(x))

    def encode(self, x: Tensor, times: int = 1) -> Tensor:
        return torch.stack([self.up(x * number) for number in range(1, times + 1)])


def test_any_method_of_the_model_runs_patched() -> None:
    model, x = WithMethods(), torch.ones(2, 3)
    pg = PatchableGraph(model, x)
    with pg.patch({"up.output": ZeroPatch()}):
        assert torch.equal(pg.twice(x), model.down.bias.expand(2, 3))
        assert torch.equal(pg.encode(x), torch.zeros(1, 2, 4))
