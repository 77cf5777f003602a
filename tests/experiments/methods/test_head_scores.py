"""Scores of heads, their composition, and circuits of heads, compared with loops and hooks in plain torch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from graphpatch_notebook import ExperimentError, PatchableGraph
from graphpatch_notebook.experiments import composition_scores, head_scores, keep_heads
from tests.components.families import captured_once
from tests.hooks import registered
from tests.libraries.classics import CONTEXT, arena

IDS = torch.randint(0, 9, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    torch.manual_seed(0)
    settings = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 50, "bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**settings, attn_implementation="eager")).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return PatchableGraph(model, IDS)


def looped(pattern: Tensor, ids: Tensor, kind: str) -> Tensor:
    """Returns the scores of the heads of a layer, by loops over positions."""
    sums = []
    for row, tokens in enumerate(ids.tolist()):
        for query, token in enumerate(tokens):
            keys = {
                "previous token": [query - 1] if query else [],
                "duplicate token": [key for key in range(query) if tokens[key] == token],
                "induction": [key for key in range(1, query) if tokens[key - 1] == token],
            }[kind]
            if keys:
                sums.append(pattern[row, :, query, keys].sum(-1))
    return torch.stack(sums).mean(0)


def test_scores_are_those_of_loops(pg: PatchableGraph) -> None:
    with torch.no_grad():
        patterns = pg._module(IDS, output_attentions=True).attentions
    scores = head_scores(pg, IDS)
    assert scores.dims == ("score", "layer", "head")
    for kind in scores.coords["score"].values:
        for layer, pattern in enumerate(patterns):
            np.testing.assert_allclose(scores.sel(score=kind)[layer], looped(pattern, IDS, kind), atol=1e-5)
    again = head_scores(pg, length=5, rows=3, seed=1)
    assert again.equals(head_scores(pg, length=5, rows=3, seed=1))
    assert not again.equals(head_scores(pg, length=5, rows=3, seed=2))


def test_tokens_are_those_that_the_stack_embeds(pg: PatchableGraph) -> None:
    torch.manual_seed(0)
    config = T5Config(d_model=32, d_kv=8, num_heads=4, d_ff=48, num_layers=1, vocab_size=9, decoder_start_token_id=0)
    model, mask = T5ForConditionalGeneration(config).eval(), torch.ones_like(IDS)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    given = {"attention_mask": mask, "input_ids": IDS, "decoder_input_ids": IDS.flip(0, 1)}
    both = PatchableGraph(model, **given)
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(**given, output_attentions=True)
    stacks = {"encoder": (IDS, output.encoder_attentions), "decoder": (IDS.flip(0, 1), output.decoder_attentions)}
    for stack, (ids, patterns) in stacks.items():
        scores = head_scores(both, stack=stack, **given)
        for kind in scores.coords["score"].values:
            for layer, pattern in enumerate(patterns):
                np.testing.assert_allclose(scores.sel(score=kind)[layer], looped(pattern, ids, kind), atol=1e-5)
    assert head_scores(pg, attention_mask=mask, input_ids=IDS).equals(head_scores(pg, IDS))


@pytest.mark.parametrize("method", ["mean", "zero"])
def test_circuits_are_those_of_hooks(pg: PatchableGraph, method: Any) -> None:
    kept, reference = [(0, 1), (0, -1), (1, 0)], torch.randint(0, 50, (3, 9))
    options = {"reference": reference} if method == "mean" else {}
    circuit = pg.edit(keep_heads(pg, kept, method=method, **options))
    model, means, handles = pg._module, {}, []
    for layer, block in enumerate(model.transformer.h):
        handles.append(
            block.attn.c_proj.register_forward_pre_hook(
                lambda _, a, layer=layer: means.update({layer: a[0].mean((0, 1))})
            )
        )
    with torch.no_grad():
        model(reference)
        for handle in handles:
            handle.remove()

        def ablated(layer: int, z: Tensor) -> Tensor:
            z = z.clone()
            for head in range(4):
                if (layer, head) not in ((0, 1), (0, 3), (1, 0)):
                    part = slice(8 * head, 8 * head + 8)
                    z[..., part] = means[layer][part] if method == "mean" else 0
            return z

        handles = [
            block.attn.c_proj.register_forward_pre_hook(lambda _, a, layer=layer: (ablated(layer, a[0]),))
            for layer, block in enumerate(model.transformer.h)
        ]
        with registered(handles):
            expected = model(IDS).logits
        torch.testing.assert_close(circuit(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    every = [(layer, head) for layer in range(2) for head in range(4)]
    assert keep_heads(pg, every, method="zero") == {}


@pytest.mark.parametrize(
    "options",
    [
        {"heads": [(0, 4)], "method": "zero"},
        {"heads": [3], "method": "zero"},
        {"heads": []},
        {"heads": [], "method": "zero", "reference": IDS},
        {"heads": [], "method": "median"},
    ],
)
def test_wrong_arguments(pg: PatchableGraph, options: dict[str, Any]) -> None:
    with pytest.raises(ExperimentError):
        keep_heads(pg, **options)


def test_models_of_few_positions_are_given_fewer_tokens() -> None:
    torch.manual_seed(0)
    model = arena().eval()
    pg = PatchableGraph(model, torch.arange(6)[None])
    assert head_scores(pg).equals(head_scores(pg, length=CONTEXT // 2))
    with pytest.raises(ExperimentError, match=str(2 * CONTEXT)):
        head_scores(pg, length=CONTEXT)


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox"])
def test_composition_of_any_two_components_is_that_of_their_matrices(name: str) -> None:
    pg, _ = captured_once(name)
    w = pg.weights
    embeddings = ["@embed", "@pos_embed"] if name == "gpt2" else ["@embed"]
    parts = [
        "layers[*].attn.heads[*].z",
        "layers[*].mlp_out",
        "layers[0].mlp.post[..., 5]",
        "layers[1].mlp.post[..., 2:4]",
    ]
    ends = [
        *(f"layers[*].attn.heads[*].{letter}" for letter in "qkv"),
        "layers[*].mlp.pre",
        "layers[1].mlp.pre[:, :, 7]",
    ]
    scores = composition_scores(pg, senders=[*embeddings, *parts], receivers=[*ends, "@logits"])
    assert scores.dims == ("sender", "receiver")
    inside = w.W_gate if name == "llama" else w.W_in
    with torch.no_grad():
        written = {
            "@embed": (-1, w.W_E),
            "layers[0].mlp_out": (0.5, w.W_out[0]),
            "layers[1].mlp_out": (1.5, w.W_out[1]),
        }
        written |= {"@pos_embed": (-1, w.W_pos)} if name == "gpt2" else {}
        written |= {"layers[0].mlp.post[..., 5]": (0.5, w.W_out[0][5:6])}
        written |= {"layers[1].mlp.post[..., 2:4]": (1.5, w.W_out[1][2:4])}
        first = 0.25 if name != "neox" else 0  # what the MLP reads: in NeoX, what attention reads, too
        read = {f"layers[{n}].mlp.pre": (n + first, inside[n]) for n in range(2)} | {"@logits": (2, w.W_U)}
        read |= {"layers[1].mlp.pre[:, :, 7]": (1 + first, inside[1][:, 7:8])}
        for layer, head in np.ndindex(2, 4):
            start = f"layers[{layer}].attn.heads[{head}]."
            ov, qk = w.W_OV[layer, head].product, w.W_QK[layer, head].product
            written[f"{start}z"] = layer + 0.1, ov
            read |= {f"{start}q": (layer, qk), f"{start}k": (layer, qk.T), f"{start}v": (layer, ov)}
        assert {*scores.sender.values} == {*written}
        assert {*scores.receiver.values} == {*read}
        for sender, (at, one) in written.items():
            for receiver, (to, other) in read.items():
                found = scores.sel(sender=sender, receiver=receiver).item()
                expected = ((one @ other).norm() / one.norm() / other.norm()).item()
                assert found == pytest.approx(expected if at < to else float("nan"), rel=1e-4, nan_ok=True), (
                    sender,
                    receiver,
                )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "O"},
        {"kind": "Q", "senders": "@embed", "receivers": "@logits"},
        {"senders": "@embed"},
        {"senders": "layers[0].ln1", "receivers": "@logits"},
        {"senders": "@embed", "receivers": "layers[0].mlp_out"},
        {"senders": "transformer.h_0.mlp.output", "receivers": "@logits"},
        {"senders": "layers[7].mlp_out", "receivers": "@logits"},
        {"senders": "layers[0].mlp.post[0, ..., 3]", "receivers": "@logits"},
    ],
)
def test_wrong_arguments_of_composition(pg: PatchableGraph, options: dict[str, Any]) -> None:
    with pytest.raises(ExperimentError):
        composition_scores(pg, **options)
