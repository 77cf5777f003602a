"""The models that the benchmarks measure, with random weights, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Benchmarked:
    """A model, with the paths that the benchmarks patch."""

    name: str
    build: Callable[[], nn.Module]
    module_path: str
    attribute_path: str
    op_path: str
    query_path: str
    block_op_path: str
    root_op_path: str
    rounds: int
    vocabulary: int
    heads: int

    def inputs(self, length: int = 32) -> Tensor:
        return torch.randint(0, self.vocabulary, (1, length), generator=torch.Generator().manual_seed(0))


def gpt2(layers: int, width: int, heads: int, vocabulary: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, vocab_size=vocabulary, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).eval()


def llama(layers: int, width: int, heads: int, vocabulary: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=2 * width, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=vocabulary,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


GPT2_124M = Benchmarked(
    "GPT-2 124M", lambda: gpt2(12, 768, 12, 50257), "transformer.h_5.mlp", "transformer.h.5.mlp",
    "transformer.h_5.mlp.act.mul_3", "transformer.h_5.attn.query_states", "transformer.h_5.hidden_states_1", "getitem",
    9, 50257, 12,
)  # fmt: skip
GPT2_SMALL = Benchmarked(
    "GPT-2 4x128", lambda: gpt2(4, 128, 4, 4096), "transformer.h_2.mlp", "transformer.h.2.mlp",
    "transformer.h_2.mlp.act.mul_3", "transformer.h_2.attn.query_states", "transformer.h_2.hidden_states_1", "getitem",
    300, 4096, 4,
)  # fmt: skip
LLAMA_SMALL = Benchmarked(
    "Llama 8x256", lambda: llama(8, 256, 4, 4096), "model.layers_3.mlp", "model.layers.3.mlp",
    "model.layers_3.mlp.mul", "model.layers_3.self_attn.query_states", "model.layers_3.hidden_states_1", "getitem",
    100, 4096, 4,
)  # fmt: skip
ALL = (GPT2_124M, GPT2_SMALL, LLAMA_SMALL)
