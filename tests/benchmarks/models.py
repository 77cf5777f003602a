"""The models that the benchmarks measure, with random weights, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Asked:
    """What runs may take at most, as multiples of the model alone; `None` where it is not measured.

    Attributes:
        module: With a patch on the output of a module.
        op: With one on an operation inside a module.
        queries: With one on the queries inside attention.
        modules: With patches on the outputs of all modules.
        everything: With patches on all tensors.
        construct: To capture it.
        generate: `generate`, with a patch on an operation inside one layer.
        record: `pg.record` of the stream after each layer, as a multiple of hooks that do the same.
        attribute: The scores of all nodes, as a multiple of one forward and backward pass.
    """

    module: float
    op: float
    queries: float
    modules: float | None = None
    everything: float | None = None
    construct: float | None = None
    generate: float = 1.1
    record: float = 1.05
    attribute: float = 2.0


@dataclass(frozen=True)
class Benchmarked:
    """A model, with the paths that the benchmarks patch."""

    name: str
    build: Callable[[], nn.Module]
    module_path: str
    attribute_path: str
    op_path: str
    query_path: str
    rounds: int
    asked: Asked
    vocabulary: int

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
    "transformer.h_5.mlp.act.mul_3", "transformer.h_5.attn.query_states", 41, Asked(1.02, 1.03, 1.03), 50257,
)  # fmt: skip
GPT2_SMALL = Benchmarked(
    "GPT-2 4x128, vocabulary 4,096", lambda: gpt2(4, 128, 4, 4096), "transformer.h_2.mlp", "transformer.h.2.mlp",
    "transformer.h_2.mlp.act.mul_3", "transformer.h_2.attn.query_states", 400,
    Asked(1.05, 1.08, 1.1, 1.2, 1.5, 3.0, generate=1.04), 4096,
)  # fmt: skip
LLAMA_SMALL = Benchmarked(
    "Llama 8x256", lambda: llama(8, 256, 4, 4096), "model.layers_3.mlp", "model.layers.3.mlp",
    "model.layers_3.mlp.mul", "model.layers_3.self_attn.query_states", 150, Asked(1.05, 1.12, 1.12), 4096,
)  # fmt: skip
ALL = (GPT2_124M, GPT2_SMALL, LLAMA_SMALL)
