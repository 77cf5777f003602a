"""The zoo: small models, each awkward in its own way, over which the law tests run.

Importing it builds nothing and imports no transformers; `case.build()` does.
"""

from __future__ import annotations

from .awkward_modules import AWKWARD
from .case import Call, Case, seed_all
from .torch_models import TORCH
from .transformers_models import TRANSFORMERS

CASES: list[Case] = [*TORCH, *AWKWARD, *TRANSFORMERS]

# One model of transformers for each mechanism. Every other one combines what several of these have, has what one of
# the awkward models has alone (a checkpoint, a scripted function, a loop over chunks), or differs in sizes, names,
# dtype or the attention: the laws leave it to `hatch run exhaustive`.
OF_EACH_KIND = {
    "gpt2-eager",  # learned positions, one projection for queries, keys and values
    "llama-bfloat16-sdpa",  # rotary positions, grouped heads, rounding of another dtype
    "mixtral-expert-loop-eager",  # experts in a loop over values
    "bert-sdpa",  # an encoder
    "t5-eager",  # an encoder and a decoder, relative positions that are added as biases
    "mamba",  # a state instead of attention
    "clip-eager",  # images and texts
    "deepseek-v3-eager",  # compressed keys and values, experts in one operation
    "swin-eager",  # shifted windows
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
