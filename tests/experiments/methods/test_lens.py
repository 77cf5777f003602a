"""The logit lens and direct logit attribution give what plain torch computes, on families with different norms."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import ExperimentError, GraphError, GraphPatchWarning, PatchableGraph, ReplacePatch
from graphpatch_notebook.experiments import direct_logit_attribution, logit_lens
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.methods.lens import Readouts
from tests.components.families import captured_model
from tests.hooks import registered
from tests.tiny_models import gpt2

TOKENS = torch.tensor([3, 8])


@pytest.fixture(scope="module", params=["gpt2", "llama", "gemma2", "bert", "vit", "neox"])
def captured(request: pytest.FixtureRequest) -> tuple[str, PatchableGraph, Tensor]:
    pg, given = captured_model(request.param)
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
    if name in ("gpt2", "llama", "gemma2", "neox"):
        read = Readouts(pg, Inputs((given,)), target=3, top=2, row=1).read("residual")
        for layer, readout in enumerate(read.readouts[:2]):
            probabilities = swapped(model, name, given, layer)[1].softmax(-1)
            assert np.allclose(readout.target, probabilities[:, 3], atol=1e-6)
            assert np.array_equal(readout.rank, (probabilities > probabilities[:, 3:4]).sum(-1))
            assert np.array_equal(readout.tokens, probabilities.topk(2).indices)
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


def test_in_training_mode_the_lens_reads_the_states_of_one_run() -> None:
    torch.manual_seed(0)
    model = gpt2(layers=3, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3).train()
    ids = torch.randint(0, 50, (2, 6))
    pg = PatchableGraph(model, ids)
    torch.manual_seed(1)
    read, after = logit_lens(pg, ids), torch.rand(1)
    torch.manual_seed(1)
    kept: list[Tensor] = []
    hooks = [block.register_forward_pre_hook(lambda _, args: kept.append(args[0])) for block in model.transformer.h]
    hooks.append(model.transformer.ln_f.register_forward_pre_hook(lambda _, args: kept.append(args[0])))
    with torch.no_grad(), registered(hooks):
        logits = model(ids).logits
    assert torch.equal(after, torch.rand(1))
    with torch.no_grad():
        for layer, state in enumerate(kept):
            expected = model.lm_head(model.transformer.ln_f(state))
            torch.testing.assert_close(torch.tensor(read.values[layer]).float(), expected, rtol=1e-4, atol=1e-5)
    assert np.array_equal(read[-1], logits)
    assert model.training
    assert not read.equals(logit_lens(pg, ids))


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
    ("name", "by"), [*itertools.product(["gpt2", "llama", "gemma2", "neox", "opt"], ["layer", "head", "neuron"])]
)
def test_contributions_add_up_to_the_logit(name: str, by: str) -> None:
    pg, given = captured_model(name)
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


def test_contributions_are_those_of_plain_torch() -> None:
    pg, ids = captured_model("gpt2")
    model, kept = pg._module, {}
    blocks, norm = model.transformer.h, model.transformer.ln_f
    handles = [norm.register_forward_pre_hook(lambda _, args: kept.update(end=args[0]))]
    for number, block in enumerate(blocks):
        for name, module in (("attn", block.attn.c_proj), ("mlp", block.mlp.c_proj)):
            key = f"{name}{number}"
            handles.append(module.register_forward_hook(lambda m, a, out, key=key: kept.update({key: (a[0], out)})))
    with registered(handles), torch.no_grad():
        model(ids)
    with torch.no_grad():
        end = kept["end"][:, -1]
        scale = norm.weight / (end.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
        direction = model.lm_head.weight[5] * scale
        direction = direction - direction.mean(-1, keepdim=True)
        heads = direct_logit_attribution(pg, ids, target=5, by="head")
        neurons = direct_logit_attribution(pg, ids, target=5, by="neuron")
        for number, block in enumerate(blocks):
            z, out = kept[f"attn{number}"]
            for head in range(4):
                rows = slice(8 * head, 8 * head + 8)
                written = z[:, -1, rows] @ block.attn.c_proj.weight[rows]
                np.testing.assert_allclose(heads["attn"][number, head], (written * direction).sum(-1), atol=1e-4)
            bias = (block.attn.c_proj.bias * direction).sum(-1)
            np.testing.assert_allclose(heads["attn_bias"][number], bias, atol=1e-4)
            np.testing.assert_allclose(neurons["attn"][number], (out[:, -1] * direction).sum(-1), atol=1e-4)
            post, out = kept[f"mlp{number}"]
            each = post[:, -1] * (block.mlp.c_proj.weight @ direction.T).T
            np.testing.assert_allclose(neurons["mlp"][number], each.T, atol=1e-4)
            np.testing.assert_allclose(heads["mlp"][number], (out[:, -1] * direction).sum(-1), atol=1e-4)
        bias = (norm.bias * model.lm_head.weight[5]).sum()
        np.testing.assert_allclose(heads["bias"], bias.expand(2), atol=1e-4)


def test_logits_that_are_not_such_sums_are_errors() -> None:
    pg, ids = captured_model("bert")
    with pytest.raises(ExperimentError, match="sum"):
        direct_logit_attribution(pg, ids, target=1)
    pg, pixels = captured_model("vit")
    parts = direct_logit_attribution(pg, pixels, target=1, position=0)
    total = sum(float(part.sum()) for part in parts.values())
    assert total == pytest.approx(float(pg(pixels).logits[:, 1].sum().detach()), abs=1e-3)
    with pytest.raises(ExperimentError, match="position=0"):
        direct_logit_attribution(pg, pixels, target=1)


def test_experts_are_not_divided_into_neurons() -> None:
    pg, ids = captured_model("mixtral")
    parts = direct_logit_attribution(pg, ids, target=5)
    total = sum(part.sum([dim for dim in part.dims if dim != "batch"]) for part in parts.values())
    with torch.no_grad():
        np.testing.assert_allclose(total, pg(ids).logits[:, -1, 5], atol=1e-4)
    with pytest.raises(ExperimentError, match=r"layers\[0\].mlp.post"):
        direct_logit_attribution(pg, ids, target=5, by="neuron")


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
    pg, ids = captured_model("gpt2")
    with pytest.raises(ExperimentError):
        direct_logit_attribution(pg, ids, **options)


def test_tokens_as_texts_need_a_tokenizer() -> None:
    pg, ids = captured_model("gpt2")
    for readout in (direct_logit_attribution, logit_lens):
        with pytest.raises(GraphError, match="tokenizer"):
            readout(pg, ids, target=" Mary")


@pytest.mark.parametrize("by", ["layer", "head", "neuron"])
def test_contributions_at_all_positions_are_those_at_each(by: str) -> None:
    pg, ids = captured_model("gpt2")
    whole = direct_logit_attribution(pg, ids, target=5, minus=2, by=by, position=None)  # type: ignore[arg-type]
    assert whole["attn"].dims[-2:] == whole["bias"].dims == ("batch", "position")
    for position in range(ids.shape[1]):
        one = direct_logit_attribution(pg, ids, target=5, minus=2, by=by, position=position)  # type: ignore[arg-type]
        for name, part in one.items():
            np.testing.assert_allclose(whole[name].isel(position=position), part, atol=1e-9)
    pg, pixels = captured_model("vit")
    with pytest.raises(ExperimentError, match="position"):
        direct_logit_attribution(pg, pixels, target=1, position=None)


class PositionsFirst(nn.Module):
    """A model whose stream has the positions first, and whose logits have the batch first, with a bias of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)
        self.unembed, self.bias, self.scale = nn.Linear(8, 11, bias=False), nn.Parameter(torch.randn(11)), 0.5

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.T)
        for layer in self.layers:
            x = layer(x)
        return self.unembed(self.norm(x)).transpose(0, 1) * self.scale + self.bias


@pytest.mark.parametrize("rows", [2, 5])
def test_logits_may_have_another_order_than_the_stream_and_a_bias_and_a_scale(rows: int) -> None:
    torch.manual_seed(0)
    model, tokens = PositionsFirst().eval(), torch.randint(0, 11, (rows, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphPatchWarning)
        parts = direct_logit_attribution(PatchableGraph(model, tokens), tokens, target=3, position=[1] * rows)
    kept: dict[str, Tensor] = {}
    layer = model.layers[0]
    hooks = [model.norm.register_forward_pre_hook(lambda _, args: kept.update(end=args[0][1]))]
    hooks.append(layer.self_attn.register_forward_hook(lambda _, args, output: kept.update(attn=output[0][1])))
    with torch.no_grad(), registered(hooks):
        logits = model(tokens)[:, 1, 3]
    total = sum(part.sum([dim for dim in part.dims if dim != "batch"]) for part in parts.values())
    np.testing.assert_allclose(total, logits, atol=1e-4)
    with torch.no_grad():
        scale = model.norm.weight / (kept["end"].var(-1, correction=0, keepdim=True) + model.norm.eps).sqrt()
        written = (kept["attn"] - kept["attn"].mean(-1, keepdim=True)) * scale
        np.testing.assert_allclose(parts["attn"][0], written @ model.unembed.weight[3] * model.scale, atol=1e-4)
        bias = model.norm.bias @ model.unembed.weight[3] * model.scale + model.bias[3]
        np.testing.assert_allclose(parts["bias"], bias.expand(rows), atol=1e-4)


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
