"""A name must still mean the same kind of value: other sizes are fine where they follow the inputs, and only there."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from graphpatch_notebook import (
    AddPatch,
    PatchableGraph,
    ZeroPatch,
)
from tests.experiments.hooked import attended
from tests.zoo import case_by_name, installed
from tests.zoo.values import bit_equal


@pytest.mark.parametrize(("name", "layer"), [("qwen2-sdpa", "layers_0"), ("mistral-sdpa", "layers_1")])
def test_packed_heads_of_a_decoding_step(name: str, layer: str) -> None:
    case = case_by_name(name)
    model, call = case.build(), case.example()
    pg = PatchableGraph(model, *call.args, **call.kwargs)
    steps, again = case.variants(model), case.variants(model)
    name = "cache_static" if "cache_static" in steps else "cache_step"  # transformers 4 raises on it, with torch 2.4
    number, calls = int(layer[-1]), itertools.count()
    patch = {f"model.{layer}.self_attn.attn_output": AddPatch(1.0, slice=(slice(None), 1))}
    shape = (-1, model.config.num_attention_heads, 1, model.config.hidden_size // model.config.num_attention_heads)

    def edit(value: Tensor) -> Tensor:
        head_1 = (torch.arange(shape[1]) == 1).view(-1, 1, 1)
        return (value.reshape(shape) + head_1).reshape(value.shape) if next(calls) == number else value

    expected, given = attended(lambda: steps[name].run(model), edit)
    if given[number].shape[1] == model.config.num_attention_heads:
        assert installed.TRANSFORMERS < (5, 21)  # which packs none
    with torch.no_grad(), pg.patch(patch):
        assert bit_equal(again[name].run(pg), expected) is None


@pytest.mark.parametrize(
    ("hidden", "heads", "shared", "has_mask"),
    [
        *[(64, 8, 4, True), (16, 4, 2, False)],
        *(pytest.param(*sizes, marks=pytest.mark.exhaustive) for sizes in [(64, 4, 2, False), (96, 6, 3, True)]),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
def test_packed_heads_of_a_padded_decoding_step(hidden: int, heads: int, shared: int, has_mask: bool) -> None:
    """transformers packs the heads that share keys into the sequence, also where sizes collide with those of heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=hidden, intermediate_size=16, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=shared,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids, mask = torch.randint(1, 31, (3, 7)), torch.ones(3, 7, dtype=torch.long)
    mask[0, :3] = 0
    pg = PatchableGraph(model, ids, **({"attention_mask": mask} if has_mask else {}))
    head = {"model.layers_0.self_attn.attn_output": ZeroPatch(slice=(slice(None), 1))}
    settings = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    told = {**settings, "output_logits": True, "return_dict_in_generate": True}
    without_head = torch.ones(heads, 1, 1).index_fill(0, torch.tensor(1), 0.0)
    expected, given = attended(
        lambda: model.generate(ids, **told).logits,
        lambda value: (value.reshape(3, heads, -1, hidden // heads) * without_head).reshape(value.shape),
    )
    assert installed.TRANSFORMERS < (5, 21) or any(value.shape[1] != heads for value in given)  # older ones pack none
    with pg.patch(head):
        assert bit_equal(pg.generate(ids, **told).logits, expected) is None
    with pg.patch({"model.layers_0.self_attn.attn_output_1": ZeroPatch(slice=(..., slice(0, 4)))}):
        pg.generate(ids, **settings)
