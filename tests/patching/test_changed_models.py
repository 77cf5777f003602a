"""Law 18: a path means what the model holds now: after its modules were exchanged, entering a context is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from graphpatch_notebook import PatchableGraph, ProbePatch, ZeroPatch
from graphpatch_notebook.errors import ExperimentError, GraphError, GraphPatchError
from tests.zoo.case import floats, tokens


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3))
        self.listed = [nn.Linear(3, 3)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return nn.Tanh()(self.listed[0](x))  # a module that only this run has


def swap(model: Layers) -> None:
    model.h[0], model.h[1] = model.h[1], model.h[0]


def delete(model: Layers) -> None:
    del model.h[0]


def delete_last(model: Layers) -> None:
    del model.h[2]


def insert(model: Layers) -> None:
    model.h.insert(1, nn.Tanh())


def wrap(model: Layers) -> None:
    model.h[1][0] = nn.Sequential(model.h[1][0])


PATHS = ["h_0.sub_0.linear", "h_1.output", "h_1.sub_0.output", "h_2.output"]
CHANGED: dict[Callable[[Layers], None], set[str]] = {
    swap: {"h_0.sub_0.linear", "h_1.output", "h_1.sub_0.output"},
    delete: set(PATHS),
    delete_last: {"h_2.output"},
    insert: {"h_1.output", "h_1.sub_0.output", "h_2.output"},
    wrap: {"h_1.sub_0.output"},
}


@pytest.mark.parametrize("change", CHANGED, ids=lambda change: change.__name__)
def test_patches_on_exchanged_modules_are_refused(change: Callable[[Layers], None]) -> None:
    model, x = Layers(), floats(2, 3)
    pg = PatchableGraph(model, x)
    contexts = {path: pg.patch({path: ZeroPatch()}) for path in PATHS}
    for context in contexts.values():
        with context:
            pg(x)
    change(model)
    for path, context in contexts.items():
        if path in CHANGED[change]:
            with pytest.raises(GraphError, match=path), context:
                pass
        else:
            with context:
                assert not torch.equal(pg(x), model(x))
    torch.testing.assert_close(pg(x), model(x))


def test_weights_that_are_computed_since_are_refused() -> None:
    """A parametrization makes a property of what was a parameter: what is put into the module has no effect."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), floats(2, 3)
    pg = PatchableGraph(model, x)
    weight_norm(model[0])
    with pg.patch({"sub_0.weight": ZeroPatch()}), pytest.raises(GraphPatchError, match="'weight'"):
        pg(x)
    torch.testing.assert_close(pg(x), model(x), rtol=0, atol=0)


def test_modules_that_the_model_does_not_register_are_patched() -> None:
    model, x = Layers(), floats(2, 3)
    pg, probe = PatchableGraph(model, x), ProbePatch()
    with pg.patch({"output": ZeroPatch(), "h_2.sub_1.output": probe}):
        assert not pg(x).any()
    listed = next(path for path in pg.nodes if "listed" in path and path.endswith("output"))
    with pg.patch({listed: ZeroPatch()}):
        assert not pg(x).any()


def test_another_implementation_of_attention_is_refused() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=32, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    pg, ids = PatchableGraph(model, tokens(1, 4) % 32), tokens(1, 4) % 32
    patches = {"layers[0].attn.pattern": ZeroPatch()}
    model.set_attn_implementation("sdpa")
    with pytest.raises(GraphError, match="'sdpa', and was 'eager'"), pg.patch(patches):
        pass
    with pytest.raises(ExperimentError, match=r"layers\[0\]"):
        pg.sweep({"cell": range(3)}, lambda _: patches, ids, metric=lambda out: out.logits.sum(), progress=False)
    model.set_attn_implementation("eager")
    with pg.patch(patches):
        assert not torch.equal(pg(ids).logits, model(ids).logits)


def test_weights_of_exchanged_modules_are_refused() -> None:
    """`W_in[0]` is of the module that is layer 0 now, or an error: never of the one that was."""
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=32)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    pg, layers = PatchableGraph(model, tokens(1, 4) % 32), model.transformer.h
    names = ("W_in", "W_O", "b_Q", "W_OV")
    before = [getattr(pg.weights, name)[1] for name in names[:2]]
    layers[1].mlp = torch.compile(layers[1].mlp, backend="eager")  # which holds the same module
    assert torch.equal(pg.weights.W_in[1], before[0])
    layers[1].mlp = nn.Sequential(layers[1].mlp)
    with pytest.raises(GraphError, match=r"'transformer\.h\.1\.mlp'.*another Sequential"):
        pg.weights.W_in[1]
    assert torch.equal(pg.weights.W_O[1], before[1])
    layers[1].mlp = layers[1].mlp[0]
    layers[0], layers[1] = layers[1], layers[0]
    for name in names:
        with pytest.raises(GraphError, match=r"'transformer\.h\.[01]'.*another GPT2Block"):
            getattr(pg.weights, name)[0, 0] if name == "W_OV" else getattr(pg.weights, name)[0]
    assert torch.equal(pg.weights.W_E, model.transformer.wte.weight)
