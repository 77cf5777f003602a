"""Small language models with random weights, for tests that need no particular model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def gpt2(layers: int = 2, heads: int = 2, width: int = 16, vocabulary: int = 50, **settings: Any) -> GPT2LMHeadModel:
    """Returns a GPT-2 in eval mode, with the same weights each time, and without tokens that begin or end texts."""
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": width, "vocab_size": vocabulary}
    config = GPT2Config(**{"bos_token_id": None, "eos_token_id": None} | sizes | settings)
    return GPT2LMHeadModel(config).eval()
