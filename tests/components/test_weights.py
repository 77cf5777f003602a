"""The weights of components are those that the model multiplies with, on families that store them in different ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import GraphError, PatchableGraph
from graphpatch_notebook.experiments import direct_logit_attribution
from tests.components.families import MODELS, captured_model, captured_once
from tests.zoo.submodules import Submodules


def recorded(pg: PatchableGraph, given: Tensor, names: list[str]) -> dict[str, Tensor]:
    with torch.no_grad():
        return dict(pg.record([name for name in names if name in pg.components], given))


PARTS = "resid_pre resid_mid ln1 ln2 attn.q attn.k attn.v attn.z attn_out mlp.pre mlp.post mlp_out".split()


def test_weights_are_views_of_the_parameters_where_they_can_be() -> None:
    pg, _ = captured_model("llama")
    attention = pg._module.model.layers[1].self_attn
    with torch.no_grad():
        assert torch.equal(pg.weights.W_Q[1, 2], attention.q_proj.weight[16:24].T)
        assert torch.equal(pg.weights.W_Q[1], attention.q_proj.weight.view(4, 8, 32).transpose(1, 2))
        assert torch.equal(pg.weights.W_K[:, -1][1], attention.k_proj.weight[8:].T)
    assert pg.weights.W_Q[1, 2].data_ptr() == attention.q_proj.weight[16:].data_ptr()
    assert pg.weights.W_U.data_ptr() == pg._module.lm_head.weight.data_ptr()
    assert (pg.weights.W_Q.shape, pg.weights.W_K.shape) == ((2, 4, 32, 8), (2, 2, 32, 8))
    pg.weights.W_O[0, 0].sum().backward()  # of the parameter itself
    gradient = pg._module.model.layers[0].self_attn.o_proj.weight.grad
    assert gradient is not None
    assert gradient.sum() == 8 * 32


@pytest.mark.parametrize(
    ("read", "error", "name"),
    [
        (lambda w: w.W_Q[2], IndexError, "W_Q"),
        (lambda w: w.W_K[0, 2], IndexError, "W_K"),
        (lambda w: w.W_out[0, 1], IndexError, "W_out"),
        (lambda w: w.W_Q[0, 1, 2], IndexError, "W_Q"),
        (lambda w: w.W_q, AttributeError, "W_q"),
        (lambda w: w["decoder"].W_Q, GraphError, "decoder"),
    ],
)
def test_what_does_not_exist_is_an_error(read: Callable[[Any], Any], error: type[Exception], name: str) -> None:
    pg, _ = captured_once("llama")
    with pytest.raises(error, match=name):
        read(pg.weights)


class ByLetters(nn.Module):
    """A layer whose weights have a dimension for heads, as in ARENA's and TransformerLens' models."""

    def __init__(self, style: str, kv_heads: int) -> None:
        super().__init__()
        self.style, self.repeats = style, 4 // kv_heads
        shapes = {"W_Q": (4, 16, 3), "W_K": (kv_heads, 16, 3), "W_V": (kv_heads, 16, 3), "W_O": (4, 3, 16)}
        for name, shape in {**shapes, "W_in": (16, 20), "W_out": (20, 16)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.bias = nn.Parameter(torch.randn(3))
        self.norm = nn.LayerNorm(16)

    def heads(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.style == "linear":
            return nn.functional.linear(x, weight.transpose(1, 2).flatten(0, 1)).unflatten(-1, (-1, 3)) + self.bias
        return torch.einsum("...d,hdc->...hc" if self.style == "ellipsis" else "bpd,hdc->bphc", x, weight) + self.bias

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (self.heads(normed, weight) for weight in (self.W_Q, self.W_K, self.W_V))
        k, v = (each.repeat_interleave(self.repeats, 2) for each in (k, v))
        pattern = torch.einsum("bqhc,bkhc->bhqk", q, k).softmax(-1)
        z = torch.einsum("bkhc,bhqk->bqhc", v, pattern)
        if self.style == "linear":
            out = z.flatten(2) @ self.W_O.flatten(0, 1)
        else:
            out = torch.einsum("...hc,hcd->...d" if self.style == "ellipsis" else "bqhc,hcd->bqd", z, self.W_O)
        x = x + out
        pre = torch.einsum("bpd,dn->bpn", self.norm(x), self.W_in)
        return x + torch.einsum("bpn,nd->bpd", nn.functional.gelu(pre), self.W_out)


class TablesByLetters(nn.Module):
    def __init__(self, style: str, kv_heads: int = 4) -> None:
        super().__init__()
        self.W_E, self.W_pos = nn.Parameter(torch.randn(30, 16)), nn.Parameter(torch.randn(40, 16))
        self.blocks = nn.ModuleList(ByLetters(style, kv_heads) for _ in range(2))
        self.norm, self.W_U = nn.LayerNorm(16), nn.Parameter(torch.randn(16, 30))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.W_E[ids] + self.W_pos[: ids.shape[1]].expand(len(ids), -1, -1)
        for block in self.blocks:
            x = block(x)
        return torch.einsum("bpd,dt->bpt", self.norm(x), self.W_U)


@pytest.mark.parametrize(
    ("style", "kv_heads"),
    [("einsum", 4), ("einsum", 2), ("ellipsis", 4), ("linear", 4)],
)
def test_weights_with_a_dimension_for_heads(style: str, kv_heads: int) -> None:
    torch.manual_seed(0)
    model = TablesByLetters(style, kv_heads).eval()
    pg = PatchableGraph(model, torch.randint(0, 30, (3, 7)))
    for name in ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out"):
        own = [getattr(block, name) for block in model.blocks]
        assert torch.equal(getattr(pg.weights, name)[:], torch.stack(own))
    for name in ("W_E", "W_pos", "W_U"):
        assert torch.equal(getattr(pg.weights, name), getattr(model, name))
    for name, heads in (("b_Q", 4), ("b_K", kv_heads), ("b_V", kv_heads)):
        assert torch.equal(getattr(pg.weights, name)[1], model.blocks[1].bias.expand(heads, 3))
    assert [*pg.weights.b_O.missing] == [*pg.weights.b_out.missing] == [0, 1]
    ids = torch.randint(0, 30, (2, 6))
    for by in ("layer", "head", "neuron"):
        parts = direct_logit_attribution(pg, ids, target=torch.tensor([3, 8]), by=by)
        total = sum(part.sum([dim for dim in part.dims if dim != "batch"]) for part in parts.values())
        torch.testing.assert_close(torch.tensor(total.values).float(), model(ids)[[0, 1], -1, [3, 8]])
    found = pg.record(["layers[1].attn.heads[*].z", "layers[1].attn_out"], ids)
    written = [found[f"layers[1].attn.heads[{head}].z"] @ pg.weights.W_O[1, head] for head in range(4)]
    torch.testing.assert_close(sum(written), found["layers[1].attn_out"])


class Apart(ByLetters):
    """Each head reads its own channels of the stream, with the same weights or with its own."""

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (4, 4))
        weights = (self.W_Q, self.W_K, self.W_V)
        equation = "bphd,dc->bphc" if self.style == "shared" else "bphd,hdc->bphc"
        q, k, v = (torch.einsum(equation, parts, w[0, :4] if self.style == "shared" else w[:, :4]) for w in weights)
        z = torch.einsum("bhqk,bkhc->bqhc", torch.einsum("bqhc,bkhc->bhqk", q, k).softmax(-1), v)
        return x + torch.einsum("bqhc,hcd->bqhd", z, self.W_O[:, :, :4]).flatten(2)


@pytest.mark.parametrize("style", ["shared", "own"])
def test_heads_that_read_and_write_parts_of_the_stream_have_no_weights(style: str) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(Apart(style, 4) for _ in range(2)))
    weights = PatchableGraph(layers.eval(), torch.randn(2, 5, 16)).weights
    for name in ("W_Q", "W_V", "W_O"):
        with pytest.raises(GraphError, match=name):
            getattr(weights, name)[1]


class Decoding(Submodules, q=(16, 16), k=(16, 16), v=(16, 16), o=(16, 16), read=(16, 16)):
    def forward(self, stream: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (each(stream).unflatten(-1, (2, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        stream = stream + self.o(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return stream + torch.tanh(self.read(memory.mean(1, keepdim=True)))


class FromQueries(nn.Module):
    """A decoder whose stream begins with queries of its own, as in DETR."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 5, 16))
        self.layers = nn.ModuleList(Decoding() for _ in range(2))

    def forward(self, memory: Tensor) -> Tensor:
        stream = self.queries
        for layer in self.layers:
            stream = layer(stream, memory)
        return stream


def test_a_stream_that_begins_with_weights_leaves_the_weights_of_later_layers() -> None:
    torch.manual_seed(0)
    model = FromQueries().eval()
    weight = PatchableGraph(model, torch.randn(1, 7, 16)).weights.W_O[1]
    torch.testing.assert_close(weight.flatten(0, 1), model.layers[1].o.weight.T)


def test_matrices_of_heads_are_products_that_are_not_computed() -> None:
    pg, _ = captured_once("llama")  # two heads of queries share each one of keys
    weights = pg.weights
    with torch.no_grad():
        for layer, head in ((0, 1), (1, 3), (-1, -1)):
            read, ov, qk = head % 4 // 2, weights.W_OV[layer, head], weights.W_QK[layer, head]
            assert torch.allclose(ov.product, weights.W_V[layer, read] @ weights.W_O[layer, head], atol=1e-6)
            assert torch.allclose(qk.product, weights.W_Q[layer, head] @ weights.W_K[layer, read].T, atol=1e-6)
    with pytest.raises(IndexError):
        weights.W_OV[0, 7]


WITHOUT_BIASES = ("llama", "gemma2", "phi3", "mixtral")
BIASES_OF_LOGITS: dict[str, Callable[[Any], Tensor]] = {
    "bert": lambda model: model.cls.predictions.bias,
    "gptj": lambda model: model.lm_head.bias,
    "vit": lambda model: model.classifier.bias,
}


@pytest.mark.parametrize("name", [*MODELS, "gptj", "opt", "bigcode"])
def test_weights_and_biases_are_those_that_the_model_computes_with(name: str) -> None:
    pg, given = captured_once(name)
    layer, weights = "layers[1].", pg.weights
    kept = recorded(pg, given, [f"{layer}{part}" for part in PARTS])
    values = {name.removeprefix(layer): value for name, value in kept.items()}
    missing: set[str] = set()

    def bias(which: str) -> Any:
        """Returns a bias, or zero where there is none."""
        try:
            found = getattr(weights, which)[1]
        except GraphError:
            missing.add(which)
            return 0
        assert found.any()
        return found

    def same(part: str, expected: Tensor) -> None:
        torch.testing.assert_close(values[part].reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)

    before = values["resid_pre" if name == "bert" else "ln1"]
    for letter in "QKV":
        made = torch.einsum("bpd,hdc->bphc", before, getattr(weights, f"W_{letter}")[1]) + bias(f"b_{letter}")
        # OPT scales its queries, after their bias.
        same(f"attn.{letter.lower()}", made * (8**-0.5 if (name, letter) == ("opt", "Q") else 1))
    out = torch.einsum("bphc,hcd->bpd", values["attn.z"], weights.W_O[1]) + bias("b_O")
    if name not in ("gemma2", "gptj"):  # a norm before the stream, and a bias that is none of the attention's
        same("attn_out", out)
    assert missing == set() if name not in (*WITHOUT_BIASES, "gptj") else missing >= {"b_Q", "b_K", "b_V", "b_O"}
    if name == "mixtral":  # each expert has its own neurons
        with pytest.raises(GraphError, match=r"W_in\[0\]"):
            weights.W_in[0]
        return
    read = values["resid_mid"] if name == "bert" else values.get("ln2", before)
    if name in WITHOUT_BIASES:
        same("mlp.pre", read @ weights.W_gate[-1])
        activation = {"gemma2": lambda x: nn.functional.gelu(x, approximate="tanh")}.get(name, nn.functional.silu)
        same("mlp.post", activation(read @ weights.W_gate[1]) * (read @ weights.W_in[1]))
    else:
        same("mlp.pre", read @ weights.W_in[1] + bias("b_in"))
    if name != "gemma2":
        post = values["mlp.post"].reshape(*before.shape[:2], -1)
        same("mlp_out", post @ weights.W_out[1] + bias("b_out"))
    if name in BIASES_OF_LOGITS:
        assert torch.equal(weights.b_U, BIASES_OF_LOGITS[name](pg._module))
    else:
        with pytest.raises(GraphError, match="b_U"):
            weights.b_U  # noqa: B018


def test_biases_of_models_that_were_converted_and_of_those_without_weights() -> None:
    pg, _ = captured_model("gpt2")
    pg._module.double()
    assert torch.equal(pg.weights.b_O[1], pg._module.transformer.h[1].attn.c_proj.bias)
    assert pg.weights.b_Q[1, 2].dtype == torch.float64
    browsed = PatchableGraph.from_config(pg._module.config, input_ids=torch.arange(5)[None])
    assert (browsed.weights.b_Q.shape, browsed.weights.b_out.shape) == ((2, 4, 8), (2, 32))
    assert browsed.weights.b_in[0].is_meta
