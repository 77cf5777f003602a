"""The logit lens and direct logit attribution give what plain torch computes, on families with different norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import ExperimentError, GraphError, GraphPatchWarning, PatchableGraph, ReplacePatch
from graphpatch_notebook.experiments import direct_logit_attribution, logit_lens
from tests.components.families import captured_once
from tests.hooks import registered

TOKENS = torch.tensor([3, 8])


@pytest.fixture(scope="module", params=["gpt2", "llama", "gemma2", "bert", "vit", "neox"])
def captured(request: pytest.FixtureRequest) -> tuple[str, PatchableGraph, Tensor]:
    pg, given = captured_once(request.param)
    return request.param, pg, given


def layers_of(model: nn.Module, name: str) -> nn.ModuleList:
    paths = {"gpt2": "transformer.h", "bert": "bert.encoder.layer", "vit": "vit.layers", "neox": "gpt_neox.layers"}
    return model.get_submodule(paths.get(name, "model.layers"))


def swapped(model: nn.Module, name: str, given: Tensor, layer: int) -> Tensor:
    """Returns the logits with a layer's input as the last layer's output, by plain hooks."""
    layers, kept = layers_of(model, name), []
    read = layers[layer].register_forward_pre_hook(lambda _, args: kept.append(args[0]))

    def write(_: nn.Module, args: Any, output: Any) -> Any:
        return (kept[0], *output[1:]) if isinstance(output, tuple) else kept[0]

    written = layers[-1].register_forward_hook(write)
    try:
        with torch.no_grad():
            return model(given).logits
    finally:
        read.remove()
        written.remove()


def test_the_lens_is_the_model_with_a_state_as_the_last_one(captured: tuple[str, PatchableGraph, Tensor]) -> None:
    name, pg, given = captured
    model, axis = pg._module, ("batch",) if name == "vit" else ("batch", "position")
    whole = logit_lens(pg, given)
    assert whole.dims == ("layer", *axis, "token")
    for layer in range(2):
        assert np.array_equal(whole[layer], swapped(model, name, given, layer))
    with torch.no_grad():
        assert np.array_equal(whole[2], model(given).logits)
    ids = torch.tensor([1, 0])
    by_row = logit_lens(pg, given, target=ids)
    assert by_row.dims == ("layer", *axis)
    assert np.array_equal(by_row[:, 0], whole[:, 0, ..., 1])
    assert np.array_equal(by_row[:, 1], whole[:, 1, ..., 0])
    some = logit_lens(pg, given, target=[1, 0], streams=["layers[1].resid_pre"])
    assert (some.dims, some.coords["token"].values.tolist()) == (("stream", *axis, "token"), [1, 0])
    assert np.array_equal(some[0], whole[1, ..., [1, 0]])
    named = logit_lens(pg, given, target=[1, 0], streams="layers[*].resid_pre")
    assert named.coords["stream"].values.tolist() == ["layers[0].resid_pre", "layers[1].resid_pre"]
    assert np.array_equal(named, whole[:2, ..., [1, 0]])


class Tailed(nn.Module):
    """A model whose logits also depend on something else than the last state of the stream."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.norm, self.kind = nn.LayerNorm(8), kind

    def forward(self, tokens: Tensor) -> Tensor:
        first = stream = self.embed(tokens)
        for layer in self.layers:
            stream = stream + layer(stream.cumsum(1))
        state = self.norm(stream)
        if self.kind == "skip":
            state = state * first.cumsum(0).tanh()  # of the rows before, too
        elif self.kind == "rows":
            state = state - state.mean(0)
        elif self.kind == "in place":
            state.mul_(2)
        elif self.kind == "scaled":
            scale = stream.abs().max()  # of all rows, as in dynamic quantization; that of the last state is the largest
            state = (stream / scale * 127).round() / 127 * scale
        return self.head(state)


@pytest.mark.parametrize("kind", ["plain", "skip", "rows", "in place", "scaled", "hooked"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_state_is_read_as_alone_whatever_the_model_does_behind_the_layers(kind: str, rows: int) -> None:
    torch.manual_seed(0)
    model, tokens = Tailed(kind).eval(), torch.randint(0, 20, (rows, 5))
    model.embed.weight.data.mul_(0.1)
    pg = PatchableGraph(model, tokens)
    if kind == "hooked":
        model.norm.register_forward_hook(lambda _, __, output: 2 * output)
    found = logit_lens(pg, tokens)
    states = pg.record([f"layers[{n}].resid_pre" for n in range(3)] + ["layers[2].resid_post"], tokens)
    for number, state in enumerate(states.values()):
        with torch.no_grad(), pg.patch({"layers[2].resid_post": ReplacePatch(state)}):
            assert np.allclose(found[number], pg(tokens), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("gpt2", "layer"), ("gpt2", "head"), ("gpt2", "neuron"), ("llama", "neuron"), ("gemma2", "head"),
        ("neox", "layer"), ("opt", "head"), ("gptj", "layer"), ("granite", "head"),
    ],
)  # fmt: skip
def test_contributions_add_up_to_the_logit(name: str, by: str) -> None:
    pg, given = captured_once(name)
    with torch.no_grad():
        logits = pg(given).logits.double()
    if name == "gemma2":
        cap = pg.config.final_logit_softcapping
        logits = torch.atanh(logits / cap) * cap
        with pytest.warns(GraphPatchWarning, match="the logit before"):
            parts = direct_logit_attribution(pg, given, target=TOKENS, minus=1, by=by, position=[2, -1])
    else:
        parts = direct_logit_attribution(pg, given, target=TOKENS, minus=1, by=by, position=[2, -1])
    chosen = logits[[0, 1], [2, -1]]
    expected = chosen[[0, 1], TOKENS] - chosen[:, 1]
    total = sum(part.sum([dim for dim in part.dims if dim != "batch"]) for part in parts.values())
    np.testing.assert_allclose(total, expected, atol=1e-4)
    np.testing.assert_allclose(parts.attrs["logit"], expected, atol=1e-4)
    if by != "layer":
        part = parts["attn" if by == "head" else "mlp"]
        assert part.dims == ("layer", by, "batch")
        assert part.shape[:2] == (2, {"head": 4, "neuron": 48 if name != "gpt2" else 128}[by])


def test_contributions_of_neurons_are_those_of_plain_torch() -> None:
    """Those of heads and layers are compared in exercise 2."""
    pg, ids = captured_once("gpt2")
    model, kept = pg._module, {}
    norm, blocks = model.transformer.ln_f, model.transformer.h
    handles = [norm.register_forward_pre_hook(lambda _, args: kept.update(end=args[0][:, -1]))]
    for number, block in enumerate(blocks):
        hook = lambda _, args, number=number: kept.update({number: args[0][:, -1]})  # noqa: E731
        handles.append(block.mlp.c_proj.register_forward_pre_hook(hook))
    with registered(handles), torch.no_grad():
        model(ids)
        scale = norm.weight / (kept["end"].var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        direction = model.lm_head.weight[5] * scale
        direction = direction - direction.mean(-1, keepdim=True)
        neurons = direct_logit_attribution(pg, ids, target=5, by="neuron")
        for number, block in enumerate(blocks):
            each = kept[number] * (block.mlp.c_proj.weight @ direction.T).T
            np.testing.assert_allclose(neurons["mlp"][number], each.T, atol=1e-4)


def test_logits_that_are_not_such_sums_are_errors() -> None:
    pg, ids = captured_once("bert")
    with pytest.raises(ExperimentError, match="sum"):
        direct_logit_attribution(pg, ids, target=1)
    pg, pixels = captured_once("vit")
    parts = direct_logit_attribution(pg, pixels, target=1, position=0)
    total = sum(float(part.sum()) for part in parts.values())
    assert total == pytest.approx(float(pg(pixels).logits[:, 1].sum().detach()), abs=1e-3)
    with pytest.raises(ExperimentError, match="position=0"):
        direct_logit_attribution(pg, pixels, target=1)


@pytest.mark.parametrize(
    "options",
    [
        {"target": 60},
        {"target": 1.5},
        {"target": [1, 2]},
        {"target": torch.tensor([1, 2, 3])},
        {"target": 1, "by": "token"},
        {"target": 1, "position": 7},
        {"target": 1, "position": [0, 1, 2]},
        {"target": 1, "stack": "decoder"},
    ],
)
def test_wrong_arguments(options: dict[str, Any]) -> None:
    pg, ids = captured_once("gpt2")
    with pytest.raises(ExperimentError):
        direct_logit_attribution(pg, ids, **options)


def test_tokens_as_texts_need_a_tokenizer() -> None:
    pg, ids = captured_once("gpt2")
    for readout in (direct_logit_attribution, logit_lens):
        with pytest.raises(GraphError, match="tokenizer"):
            readout(pg, ids, target=" Mary")


@pytest.mark.parametrize("kept", [3, torch.tensor([0, 2])])
def test_logits_of_some_positions(kept: Any) -> None:
    """Which dimension is the vocabulary is not known where all positions but some are left out: an error, by name."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    torch.manual_seed(0)
    model, ids = LlamaForCausalLM(config).eval(), torch.tensor([[3, 7, 9, 4, 5]])
    options: dict[str, Any] = {"use_cache": False, "logits_to_keep": kept}
    pg = PatchableGraph(model, ids, **options)
    if pg.components["@logits"].axes[-1] != "vocab":
        with pytest.raises(ExperimentError, match="23"):
            logit_lens(pg, ids, target=3, **options)
    else:
        lens, wanted = logit_lens(pg, ids, target=3, **options), model(ids, **options).logits[0, :, 3]
        assert torch.allclose(torch.from_numpy(lens.values[-1, 0]).float(), wanted, atol=1e-5)
    with pytest.raises(ExperimentError):
        direct_logit_attribution(pg, ids, target=3, **options)


def test_in_training_the_lens_draws_what_one_forward_draws() -> None:
    pg, given = captured_once("gpt2")
    model: Any = pg._module
    model.train()
    try:
        torch.manual_seed(0)
        lens = logit_lens(pg, given)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        with torch.no_grad():
            expected = model(given).logits
        assert torch.equal(state, torch.get_rng_state())
        assert model.training
        assert np.array_equal(lens[-1], expected)
        model.eval()
        assert not np.array_equal(logit_lens(pg, given)[-1], expected)  # there is dropout
    finally:
        model.eval()
