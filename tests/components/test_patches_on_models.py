"""Patches by component equal plain hooks on the modules that are known to compute it, on several architectures."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from graphpatch_notebook import AddPatch, PatchableGraph, ProbePatch, UnknownPathError, ZeroPatch

TOKENS = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
x = torch.arange(1, 13).reshape(2, 6)
HEADS, SIZE = 4, 4


@functools.cache
def captured(name):
    torch.manual_seed(0)
    if name == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=HEADS, n_embd=16, n_positions=16, **TOKENS))
        return PatchableGraph(model.eval(), x)
    if name == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": HEADS, "num_key_value_heads": 2}
        return PatchableGraph(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes, **TOKENS)).eval(), x)
    sizes = {"d_model": 16, "d_ff": 24, "num_heads": HEADS, "d_kv": SIZE, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(num_layers=2, **sizes, **TOKENS)).eval()
    return PatchableGraph(model, input_ids=x, decoder_input_ids=x[:, :4])


def run(pg, model=None):
    model = pg if model is None else model
    if isinstance(pg._module, T5ForConditionalGeneration):
        return model(input_ids=x, decoder_input_ids=x[:, :4]).logits
    return model(x).logits


def hooked(module, edit, *, is_input):
    """While this is active, `edit` changes a clone of what a module is given, or of what it returns."""

    def on_input(module, args):
        value = args[0].clone()
        edit(value)
        return (value, *args[1:])

    def on_output(module, args, output):
        value = output.clone()
        edit(value)
        return value

    return module.register_forward_pre_hook(on_input) if is_input else module.register_forward_hook(on_output)


def head(number, positions=slice(None)):
    def edit(value):
        value[:, positions, SIZE * number : SIZE * (number + 1)] = 0

    return edit


def neuron(value):
    value[:, :, 17] += 2.0


def stream(value):
    value[:, -1] += 1.0


LAST = {"slice": (slice(None), -1)}
CASES = [
    ("gpt2", "layers[1].attn.heads[2].z", ZeroPatch(), "transformer.h.1.attn.c_proj", head(2), True),
    ("gpt2", "layers[1].attn.heads[2].z", ZeroPatch(positions=3), "transformer.h.1.attn.c_proj", head(2, 3), True),
    ("gpt2", "layers[1].attn.heads[2].pattern", ZeroPatch(), "transformer.h.1.attn.c_proj", head(2), True),
    ("gpt2", "layers[0].attn.heads[1].q", ZeroPatch(), "transformer.h.0.attn.c_attn", head(1), False),
    ("gpt2", "layers[0].attn.heads[1].k", ZeroPatch(), "transformer.h.0.attn.c_attn", head(HEADS + 1), False),
    ("gpt2", "layers[0].attn.heads[1].v", ZeroPatch(), "transformer.h.0.attn.c_attn", head(2 * HEADS + 1), False),
    ("gpt2", "layers[0].mlp.post[:, :, 17]", AddPatch(value=2.0), "transformer.h.0.mlp.c_proj", neuron, True),
    ("gpt2", "layers[1].resid_pre", AddPatch(value=1.0, **LAST), "transformer.h.1", stream, True),
    ("llama", "layers[-1].attn.heads[2].z", ZeroPatch(), "model.layers.1.self_attn.o_proj", head(2), True),
    ("llama", "layers[1].attn.heads[2].pattern", ZeroPatch(), "model.layers.1.self_attn.o_proj", head(2), True),
    ("llama", "layers[0].attn.heads[3].q", ZeroPatch(), "model.layers.0.self_attn.q_proj", head(3), False),
    ("llama", "layers[0].attn.heads[1].k", ZeroPatch(), "model.layers.0.self_attn.k_proj", head(1), False),
    ("llama", "layers[0].attn.heads[1].v", ZeroPatch(), "model.layers.0.self_attn.v_proj", head(1), False),
    ("llama", "layers[0].mlp.post[:, :, 17]", AddPatch(value=2.0), "model.layers.0.mlp.down_proj", neuron, True),
    ("t5", "encoder.layers[1].attn.heads[2].z", ZeroPatch(), "encoder.block.1.layer.0.SelfAttention.o", head(2), True),
    (
        "t5", "decoder.layers[0].cross_attn.heads[1].z", ZeroPatch(positions=2),
        "decoder.block.0.layer.1.EncDecAttention.o", head(1, 2), True,
    ),
    (
        "t5", "decoder.layers[1].mlp.post[:, :, 17]", AddPatch(value=2.0),
        "decoder.block.1.layer.2.DenseReluDense.wo", neuron, True,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "component", "patch", "module", "edit", "is_input"), CASES)
def test_patches_by_component_equal_hooks(name, component, patch, module, edit, is_input):
    pg = captured(name)
    with hooked(pg._module.get_submodule(module), edit, is_input=is_input):
        expected = run(pg, pg._module)
    with pg.patch({component: patch}):
        patched = run(pg)
    assert not torch.equal(expected, run(pg))
    torch.testing.assert_close(patched, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_probes_of_the_heads_are_the_parts_of_the_whole(name):
    pg = captured(name)
    count = pg.components["layers[0].attn.k"].shape[2]
    whole, parts = ProbePatch(), [ProbePatch() for _ in range(count)]
    heads = {f"layers[0].attn.heads[{number}].k": part for number, part in enumerate(parts)}
    with pg.patch({"layers[0].attn.k": whole, **heads}):
        run(pg)
    assert torch.equal(torch.stack([part.activation for part in parts], 2), whole.activation)
    with pytest.raises(UnknownPathError, match=f"there are {count} heads|heads share {count}"):
        pg.patch({f"layers[0].attn.heads[{count}].k": ZeroPatch()}).__enter__()


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_heads_are_found_in_a_batch_of_one_where_models_repeat_or_merge_them(family):
    torch.manual_seed(0)
    if family == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": HEADS, "num_key_value_heads": 2}
        config = LlamaConfig(num_hidden_layers=2, attn_implementation="eager", **sizes, **TOKENS)
        model = LlamaForCausalLM(config).eval()
        attention = model.model.layers[1].self_attn
        keys, part = attention.k_proj, slice(SIZE, 2 * SIZE)
    else:
        model = BloomForCausalLM(BloomConfig(n_layer=2, n_head=HEADS, hidden_size=16, **TOKENS)).eval()
        attention = model.transformer.h[1].self_attention
        keys, part = attention.query_key_value, slice(4 * SIZE, 5 * SIZE)  # queries, keys and values of each head
    pg = PatchableGraph(model, x[:1])
    output = attention.o_proj if family == "llama" else attention.dense
    with torch.no_grad():
        clean = model(x).logits
        for name, module, zeroed, is_input in (
            ("layers[1].attn.heads[1].k", keys, part, False),
            ("layers[1].attn.heads[2].z", output, slice(2 * SIZE, 3 * SIZE), True),
        ):
            with hooked(module, lambda value, zeroed=zeroed: value[..., zeroed].zero_(), is_input=is_input):
                expected = model(x).logits
            with pg.patch({name: ZeroPatch()}):
                torch.testing.assert_close(pg(x).logits, expected)
            assert not torch.allclose(expected, clean, atol=1e-6)
