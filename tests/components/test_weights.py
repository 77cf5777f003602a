"""The weights of components are those that the model multiplies with, on families that store them in different ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import GraphError, PatchableGraph, ProbePatch, ZeroPatch
from tests.components.families import MODELS, captured_model


def recorded(pg: PatchableGraph, given: Tensor, names: list[str]) -> dict[str, Tensor]:
    probes = {name: ProbePatch() for name in names if name in pg.components}
    patches: dict[str, list[ProbePatch]] = {}
    for name, probe in probes.items():
        patches.setdefault(pg.components[name].path, []).append(probe)
    with torch.no_grad(), pg.patch(patches):
        pg(given)
    return {name: probe.activation for name, probe in probes.items()}


def is_constant(residue: Tensor, channels: int) -> bool:
    """Whether what is left is a bias: the same in all rows and positions."""
    rows = residue.reshape(-1, channels)
    return torch.allclose(rows, rows[:1].expand_as(rows), atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_that_the_model_multiplies_with(name: str) -> None:
    pg, given = captured_model(name)
    layer = "layers[1]."
    values = recorded(pg, given, [f"{layer}{part}" for part in PARTS])
    weights = pg.weights
    before = values[f"{layer}{'resid_pre' if name == 'bert' else 'ln1'}"]
    for part, matrix in (("q", weights.W_Q), ("k", weights.W_K), ("v", weights.W_V)):
        value = values[f"{layer}attn.{part}"].transpose(1, 2)
        heads = torch.stack([before @ matrix[1, head] for head in range(matrix.heads(1))], 2)
        assert is_constant(value.reshape(heads.shape) - heads, heads.shape[2] * heads.shape[3]), part
        assert not is_constant(value.reshape(heads.shape) - heads.flip(2), heads.shape[2] * heads.shape[3]), part
    z = values[f"{layer}attn.z"].transpose(1, 2).reshape(*before.shape[:2], 4, 8)
    out = sum(z[:, :, head] @ weights.W_O[1, head] for head in range(4))
    if name != "gemma2":  # it has a norm before the stream
        assert is_constant(values[f"{layer}attn_out"] - out, 32)
    if name == "mixtral":
        with pytest.raises(GraphError, match=r"W_in\[0\] was not found: .*each expert has its own neurons"):
            weights.W_in[0]
        return
    given_to_mlp = values[f"{layer}{'resid_mid' if name == 'bert' else 'ln2'}"]
    is_gated = name in ("llama", "gemma2", "phi3")
    first = weights.W_gate if is_gated else weights.W_in
    assert is_constant(values[f"{layer}mlp.pre"] - given_to_mlp @ first[-1], first[-1].shape[1])
    if is_gated:
        activation = {"gemma2": lambda x: nn.functional.gelu(x, approximate="tanh")}.get(name, nn.functional.silu)
        product = activation(given_to_mlp @ weights.W_gate[1]) * (given_to_mlp @ weights.W_in[1])
        torch.testing.assert_close(values[f"{layer}mlp.post"], product, rtol=1e-4, atol=1e-4)
    if name != "gemma2":
        assert is_constant(values[f"{layer}mlp_out"] - values[f"{layer}mlp.post"] @ weights.W_out[1], 32)


@pytest.mark.parametrize("name", ["gptj", "bigcode"])
def test_weights_of_heads_that_are_copied_or_repeated(name: str) -> None:
    pg, given = captured_model(name)
    values = recorded(pg, given, [f"layers[1].{part}" for part in ("ln1", "attn.v", "attn.z", "attn_out")])
    assert pg.weights.W_V.heads(1) == (1 if name == "bigcode" else 4)
    v = torch.einsum("bpd,hdc->bhpc", values["layers[1].ln1"], pg.weights.W_V[1])
    assert values["layers[1].attn.v"].numel() == v.numel()
    order = [pg.components["layers[1].attn.v"].axes.index(axis) for axis in ("batch", "head", "key", "channel")]
    residue = values["layers[1].attn.v"].permute(order) - v
    assert is_constant(residue.transpose(1, 2), v.shape[1] * v.shape[3])
    out = torch.einsum("bhpc,hcd->bpd", values["layers[1].attn.z"], pg.weights.W_O[1])
    assert is_constant(values["layers[1].attn_out"] - out, 32)


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
    ("read", "error", "message"),
    [
        (lambda w: w.W_Q[2], IndexError, "W_Q has 2 layers; 2 is out of range"),
        (lambda w: w.W_K[0, 2], IndexError, r"W_K\[0\] has 2 heads; 2 is out of range"),
        (lambda w: w.W_out[0, 1], IndexError, "not divided into heads"),
        (lambda w: w.W_Q[0, 1, 2], IndexError, "by layer and head"),
        (lambda w: w.W_Q[3:], IndexError, "takes none of them"),
        (lambda w: w.W_q, AttributeError, "there are no weights 'W_q'"),
        (lambda w: w["decoder"].W_Q, GraphError, "unknown stack of layers 'decoder'; the stacks are ''"),
    ],
)
def test_what_does_not_exist_is_an_error(read: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    pg, _ = captured_model("llama")
    with pytest.raises(error, match=message):
        read(pg.weights)


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox"])
def test_results_of_heads_add_up_to_what_attention_writes(name: str) -> None:
    pg, given = captured_model(name)
    with torch.no_grad():
        found = pg.record(["layers[1].attn_out", "layers[1].attn.heads[*].result", "layers[1].attn.heads[2].z"], given)
        last = pg.record("layers[1].attn.heads[2].result", given, positions=6)
    names = [f"layers[1].attn.heads[{head}].result" for head in range(4)]
    assert list(found) == ["layers[1].attn_out", *names, "layers[1].attn.heads[2].z"]
    assert is_constant(found["layers[1].attn_out"] - sum(found[each] for each in names), 32)
    assert not is_constant(found["layers[1].attn_out"] - sum(found[each] for each in names[1:]), 32)
    torch.testing.assert_close(found[names[2]], found["layers[1].attn.heads[2].z"] @ pg.weights.W_O[1, 2])
    torch.testing.assert_close(last[names[2]].squeeze(1), found[names[2]][:, -1])
    # A recording finds them by their other names, too.
    assert found["layers[-1].attn.heads[-2].result"] is found[names[2]]
    with pytest.raises(KeyError, match="was not recorded"):
        found["layers[0].attn.heads[0].result"]


def test_a_result_is_refused_while_its_weight_is_patched() -> None:
    pg, given = captured_model("gpt2")
    weight, probe = "transformer.h_1.attn.c_proj.weight", ProbePatch()
    with pg.patch({weight: ZeroPatch()}):
        with pytest.raises(GraphError, match=r"heads\[2\]\.result is computed with .*c_proj.weight, which is patched"):
            pg.record("layers[1].attn.heads[2].result", given)
        pg.record("layers[0].attn.heads[2].result", given)
    with pg.patch({weight: probe}):
        pg.record("layers[1].attn.heads[2].result", given, stop_at_last=False)
    assert probe.activation is not None


class Decoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.read = (nn.Linear(16, 16) for _ in range(5))

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
