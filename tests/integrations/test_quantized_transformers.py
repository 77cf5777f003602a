"""Models that transformers loads quantized: run, generate and are patched as the quantized models that they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from graphpatch_notebook import AddPatch, CustomPatch, PatchableGraph, ProbePatch, ZeroPatch
from tests.integrations.quantized import dequantized

IDS = torch.arange(14).view(2, 7)


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "gpt2": (gpt2, "transformer.h.1.mlp.c_fc"),
    "llama": (llama, "model.layers.1.mlp.down_proj"),
}
CONFIGS: dict[str, Callable[[], BitsAndBytesConfig]] = {
    "nf4 twice": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "fp4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "int8, outliers": lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=1.5),
}


class Case(NamedTuple):
    """A model as it was saved, the function that loads it quantized, and one of its quantized modules."""

    original: PreTrainedModel
    load: Callable[[], PreTrainedModel]
    module: str

    @property
    def path(self) -> str:
        """The node path of the module."""
        return self.module.replace(".h.", ".h_").replace(".layers.", ".layers_")


# Each config once on `Conv1D` (gpt2), and one in four bits and one in eight on `Linear` (llama).
CASES = [*(("gpt2", config) for config in CONFIGS), ("llama", "nf4 twice"), ("llama", "int8, outliers")]
OTHERS = [pytest.param(("llama", config), marks=pytest.mark.exhaustive) for config in ("fp4", "int8")]


@pytest.fixture(params=[*CASES, *OTHERS], ids=" ".join)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    make, module = MODELS[request.param[0]]
    original = make()
    original.save_pretrained(tmp_path)
    config = CONFIGS[request.param[1]]
    return Case(
        original, lambda: AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config()).eval(), module
    )


def with_linear(case: Case, ran: PreTrainedModel, edit: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    """Returns the quantized model with a plain linear module, of an edited weight, in place of the quantized one."""
    edited = copy.deepcopy(ran)
    module = edited.get_submodule(case.module)
    weight = dequantized(case.load().get_submodule(case.module), like=module)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None)
    linear.weight = nn.Parameter(edit(weight))
    linear.bias = module.bias
    edited.set_submodule(case.module, linear)
    return edited


def generated(model: PreTrainedModel) -> Tensor:
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=5, do_sample=False)


@torch.no_grad()
def test_runs_and_generates_as_it_does(case: Case) -> None:
    model = case.load()
    pg = PatchableGraph(case.load(), IDS)
    assert torch.equal(pg(IDS).logits, model(IDS).logits)
    identity = CustomPatch(custom_op=lambda value: value, requires_clone=False)
    outside = [path for path, meta in pg.nodes.items() if meta.opens is None]  # values of fused attention round
    with pg.patch(dict.fromkeys(outside, identity), strict=True):
        for ids in (IDS, IDS[:1, :3]):
            assert torch.equal(pg(ids).logits, model(ids).logits)
    assert torch.equal(generated(pg), generated(model))
    with pg.patch({f"{case.path}.weight": ProbePatch()}, strict=True):
        assert torch.equal(generated(pg), generated(model))


@torch.no_grad()
def test_a_patched_weight_equals_a_linear_module_in_its_place(case: Case) -> None:
    pg = PatchableGraph(case.load(), IDS)
    columns = slice(16, 48)
    edited = with_linear(case, pg._module, lambda w: w.index_fill(1, torch.arange(16, 48), 0) + 0.01)
    expected = edited(IDS).logits
    patches = [ZeroPatch(slice=(slice(None), columns)), AddPatch(0.01)]
    with pg.patch({f"{case.path}.weight": patches}, strict=True):
        torch.testing.assert_close(pg(IDS).logits, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(generated(pg), generated(edited))
    assert not torch.allclose(pg(IDS).logits, expected, atol=1e-3)
