"""Names that people bring along lead to the paths that they mean."""

from __future__ import annotations

import functools

import pytest
import torch

from graphpatch_notebook import ExtractionOptions, PatchableGraph, UnknownPathError, ZeroPatch
from tests.experiments.hooked import gpt2, llama

IDS = torch.tensor([[3, 1, 4, 1, 5]])
MODELS = {"gpt2": gpt2, "llama": llama}


@functools.cache
def captured(name: str, opened: bool = False) -> PatchableGraph:
    options = ExtractionOptions(decompose=None if opened else [])
    return PatchableGraph(MODELS[name](), IDS, extraction_options=options)


def message(pg: PatchableGraph, path: str) -> str:
    with pytest.raises(UnknownPathError) as caught, pg.patch({path: ZeroPatch()}):
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("hook_embed", "@embed"),
        ("blocks.1.hook_resid_pre", "layers[1].resid_pre"),
        ("blocks.1.hook_resid_mid", "layers[1].resid_mid"),
        ("blocks.1.hook_resid_post", "layers[1].resid_post"),
        ("blocks.0.hook_attn_out", "layers[0].attn_out"),
        ("blocks.0.hook_mlp_out", "layers[0].mlp_out"),
        ("blocks.2.attn.hook_z", "layers[2].attn.z"),
        ("blocks.2.attn.hook_v", "layers[2].attn.v"),
        ("blocks.0.mlp.hook_post", "layers[0].mlp.post"),
        ("blocks.0.ln1.hook_normalized", "layers[0].ln1"),
        ("ln_final.hook_normalized", "@final_norm"),
        ("layers_output[1]", "layers[1].resid_post"),
        ("layers_input[-1]", "layers[2].resid_pre"),
        ("attentions_output[0]", "layers[0].attn_out"),
        ("mlps_output[2]", "layers[2].mlp_out"),
        ("token_embeddings", "@embed"),
        ("blocks.*.hook_resid_post", "layers[*].resid_post"),
        ("mlps_output[*]", "layers[*].mlp_out"),
        ("layers.1.mlp_out", "layers[1].mlp_out"),
        ("model.layers.2.attn.z", "layers[2].attn.z"),
        ("layer[1].mlp_out", "layers[1].mlp_out"),
        ("transformer.h[-1].attn.q", "layers[2].attn.q"),
        ("blocks[*].attn.v", "layers[*].attn.v"),
        ("blocks.1.hook_q_input", "layers[1].attn.q"),
        ("blocks.1.hook_attn_in", "layers[1].resid_pre"),
        ("resid_mid", "layers[*].resid_mid"),
        ("z", "layers[*].attn.z"),
        ("attn.q", "layers[*].attn.q"),
        ("post", "layers[*].mlp.post"),
        ("embed", "@embed"),
        ("final_norm", "@final_norm"),
        ("logits", "@logits"),
    ],
)
def test_names_of_other_tools(name: str, component: str) -> None:
    for model in MODELS:
        pg = captured(model)
        assert f"; nearest: '{component}'" in message(pg, name)
        assert pg.components.lookup(component)


def test_results_of_heads_are_answered_with_how_to_compute_them() -> None:
    assert "'layers[1].attn.heads[0].z'" in message(captured("gpt2"), "blocks.1.attn.hook_result")


@pytest.mark.parametrize("name", ["blocks.3.hook_resid_post", "blocks.3.attn.hook_pattern", "layers_output[3]"])
def test_other_tools_have_as_many_layers(name: str) -> None:
    for opened in (True, False):
        assert "3 is out of range: there are 3 layers" in message(captured("gpt2", opened), name)
    with pytest.raises(KeyError, match="there are 3 layers" if "[" not in name else "layers_output"):
        captured("gpt2").graph[name]


def test_parts_of_values_at_several_paths() -> None:
    found = message(captured("gpt2"), "**.c_proj.output[0]")
    assert found == "'**.c_proj.output[0]': for a part of the values at '**.c_proj.output', give patches slice="


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("wte", "'transformer.wte.output'"),
        ("ln_f", "'transformer.ln_f.output'"),
        ("h_1", "'transformer.h_1.output'"),
        ("h.1.mlp", "'transformer.h_1.mlp.output'"),
        ("mlp", "'transformer.h_0.mlp.output', 'transformer.h_1.mlp.output', 'transformer.h_2.mlp.output'"),
        ("h_1.attn.c_proj", "'transformer.h_1.attn.c_proj.output'"),
        ("query_states", "'transformer.h_0.attn.query_states', 'transformer.h_1.attn.query_states', "),
        ("h_2.attn.query_states", "'transformer.h_2.attn.query_states'"),
    ],
)
def test_the_end_of_a_path(path: str, nearest: str) -> None:
    assert f"; nearest: {nearest}" in message(captured("gpt2"), path)


@pytest.mark.parametrize(
    "path", ["transformer.h_1.attn.attn_probs", "transformer.h.1.attn.attn_weights", "blocks.1.attn.hook_pattern"]
)
def test_patterns_of_fused_attention(path: str) -> None:
    assert "attention is one fused call" in message(captured("gpt2"), path)
    opened = captured("gpt2", opened=True)
    assert "transformer.h_1.attn.pattern" in opened.nodes
    assert "; nearest: 'layers[1].attn.pattern'" in message(opened, path)
