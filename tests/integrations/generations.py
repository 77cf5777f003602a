"""What the tests of generation share: tiny models of the zoo, prompts, and ways to generate from them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from tests.zoo import CASES
from tests.zoo.case import tokens

LENGTH = 7
NEW = 6
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 3.0, "top_k": 20},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampling-beams": {"num_beams": 2, "do_sample": True},
    "static-cache": {"cache_implementation": "static"},
    "no-cache": {"use_cache": False},
    "no-cache-beams": {"use_cache": False, "num_beams": 2},
    "sampling-no-cache": {"use_cache": False, "do_sample": True},
}
SEQ2SEQ = ("t5-sdpa", "bart-eager")


@functools.cache
def captured(name: str) -> tuple[nn.Module, PatchableGraph]:
    """Returns a model of the zoo that nobody patches, and the `PatchableGraph` of an equal one."""
    case = next(case for case in CASES if case.name == name)
    example = case.example()
    return case.build(), PatchableGraph(case.build(), *example.args, **example.kwargs)


def prompt(padded: bool = False) -> dict[str, Tensor]:
    """Returns a batch of three prompts; left-padded, two of them are shorter."""
    ids = tokens(3, LENGTH, seed=3).clamp(min=3)
    if not padded:
        return {"input_ids": ids}
    mask = (torch.arange(LENGTH) >= torch.tensor([0, 2, 4])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def generated(model: Any, padded: bool = False, new: int = NEW, **settings: Any) -> Any:
    """Returns what a model, or a `PatchableGraph`, generates: tokens, scores and logits of each step."""
    torch.manual_seed(4)
    return model.generate(
        **prompt(padded),
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **settings,
    )


def same(expected: Any, found: Any) -> bool:
    """Whether two generations are the same tokens, with the same scores and logits bit for bit."""
    return (
        torch.equal(expected.sequences, found.sequences)
        and len(expected.scores) == len(found.scores)
        and all(torch.equal(a, b) for a, b in zip(expected.scores, found.scores, strict=True))
        and all(torch.equal(a, b) for a, b in zip(expected.logits, found.logits, strict=True))
    )
