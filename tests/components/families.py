"""Small models of families that differ in how they store weights, norm and read out, with random weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph

LLAMA = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 60, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
PLAIN = {name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "head_dim")}
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 60, "bos_token_id": None, "eos_token_id": None}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", LLAMA),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {n: v for n, v in LLAMA.items() if n != "head_dim"}),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", PLAIN),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", LLAMA | {"num_local_experts": 4}),
    "bert": ("BertForMaskedLM", "BertConfig", PLAIN),
    "vit": ("ViTForImageClassification", "ViTConfig", PLAIN | {"image_size": 16, "patch_size": 4}),
}  # fmt: skip
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "opt": ("OPTForCausalLM", "OPTConfig", PLAIN | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", GPT2 | {"rotary_dim": 4}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", LLAMA | {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", GPT2 | {"attn_implementation": "eager"}),
}
"""Models that merge batch and positions, copy before they view, scale logits, repeat one head of keys and values."""


def captured_model(name: str) -> tuple[PatchableGraph, Tensor]:
    model_class, config_class, settings = (MODELS | OTHERS)[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    given = torch.randn(2, 3, 16, 16) if name == "vit" else torch.randint(0, 60, (2, 7))
    return PatchableGraph(model, given), given


captured_once = functools.cache(captured_model)
"""The same, once for all tests that leave the model as it is."""
