"""The zoo: small models, each awkward in its own way, over which the law tests run.

Importing it builds nothing and imports no transformers; `case.build()` does.
"""

from __future__ import annotations

from .awkward_modules import AWKWARD
from .case import Call, Case, seed_all
from .torch_models import TORCH
from .transformers_models import TRANSFORMERS

CASES: list[Case] = [*TORCH, *AWKWARD, *TRANSFORMERS]

# One model of transformers of each kind. The others differ from one of them in sizes and names, or in the attention
# alone: tests of details that are the same for all of a kind leave them to `hatch run exhaustive`.
OF_EACH_KIND = {
    "gpt2-eager",  # learned positions, one projection for queries, keys and values
    "gpt2-train-eager",  # random numbers
    "llama-sdpa",  # rotary positions, grouped heads
    "llama-bfloat16-sdpa",
    "llama-checkpointing-sdpa",
    "mixtral-eager",  # experts in one operation
    "mixtral-expert-loop-eager",  # experts in a loop over values
    "gemma2-eager",  # soft caps, sliding windows
    "gpt-neox-sdpa",  # attention beside the MLP
    "bloom-eager",  # biases instead of positions
    "bert-sdpa",  # an encoder
    "deberta-v2-eager",  # scripted functions
    "t5-eager",  # an encoder and a decoder, relative positions
    "bart-sdpa",  # an encoder and a decoder, absolute positions
    "mamba",  # a state instead of attention
    "vit-eager",  # images
    "clip-eager",  # images and texts
    "deepseek-v3-eager",  # compressed keys and values
    "longformer-eager",  # a loop over chunks
    "swin-eager",  # shifted windows
    "whisper-sdpa",  # sounds
}


def is_of_a_kind_of_its_own(case: Case) -> bool:
    """Whether no other model of the zoo says the same of what all models of its kind have in common."""
    return case not in TRANSFORMERS or case.name in OF_EACH_KIND


__all__ = [
    "AWKWARD",
    "CASES",
    "OF_EACH_KIND",
    "TORCH",
    "TRANSFORMERS",
    "Call",
    "Case",
    "case_by_name",
    "is_of_a_kind_of_its_own",
    "seed_all",
]


def case_by_name(name: str) -> Case:
    """The case of that name.

    Raises:
        KeyError: There is none.
    """
    return {case.name: case for case in CASES}[name]
