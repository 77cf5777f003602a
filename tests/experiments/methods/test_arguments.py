"""How the functions of experiments are called, and what they say of wrong calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphpatch_notebook import ExperimentError, PatchableGraph, ZeroPatch
from graphpatch_notebook.experiments import (
    LogitDifference,
    ablate,
    attribute,
    causal_trace,
    direct_logit_attribution,
    path_patch,
    sweep,
)
from tests.experiments.hooked import GPT2_OUTPUT, gpt2

CLEAN = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
CORRUPTED = torch.tensor([[3, 1, 8, 1, 5, 9, 2]])
METRIC = LogitDifference(4, 8)
PATH = f"transformer.h_0.{GPT2_OUTPUT}"


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return PatchableGraph(gpt2(), CLEAN)


def without(position: int) -> dict[str, ZeroPatch]:
    return {PATH: ZeroPatch(slice=(slice(None), position))}


CALLS: dict[str, Any] = {
    "sweep": lambda pg, metric: sweep(pg, {"position": [0]}, without, CLEAN, metric=metric),
    "causal_trace": lambda pg, metric: causal_trace(pg, CLEAN, CORRUPTED, [PATH], None, metric),
    "ablate": lambda pg, metric: ablate(pg, [PATH], CLEAN, metric=metric),
    "path_patch": lambda pg, metric: path_patch(pg, PATH, None, CLEAN, CORRUPTED, metric),
    "attribute": lambda pg, metric: attribute(pg, metric, CLEAN, CORRUPTED),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@each_call
def test_a_model_in_place_of_its_graph(pg: PatchableGraph, call: Any) -> None:
    with pytest.raises(TypeError, match="give a PatchableGraph, not a GPT2LMHeadModel"):
        call(gpt2(), METRIC)


ROWS = CLEAN.repeat(2, 1)
FIRST = LogitDifference(4, 8, position=0)
AT_THE_END: dict[str, Any] = {
    "ablate": lambda pg, clean, other: ablate(pg, [PATH], metric=FIRST, positions=-1, **clean),
    "causal_trace": lambda pg, clean, other: causal_trace(pg, clean, other, [PATH], [0, -2], FIRST),
    "attribute": lambda pg, clean, other: attribute(pg, FIRST, clean, other, paths=[PATH], positions=slice(-2, None)),
    "direct_logit_attribution": lambda pg, clean, other: direct_logit_attribution(pg, target=4, **clean),
    "a metric in a sweep": lambda pg, clean, other: ablate(pg, [PATH], metric=METRIC, **clean),
    "a metric with gradients": lambda pg, clean, other: attribute(pg, METRIC, clean, other),
}


@pytest.mark.parametrize("call", AT_THE_END.values(), ids=AT_THE_END.keys())
def test_positions_that_count_from_the_end_are_not_those_of_padding(pg: PatchableGraph, call: Any) -> None:
    mask = torch.ones_like(ROWS)
    mask[1, :2] = 0
    clean, other = ({"input_ids": ids.repeat(2, 1), "attention_mask": mask} for ids in (CLEAN, CORRUPTED))
    call(pg, clean, other)  # padding on the left
    mask[1] = mask[1].flip(0)
    with pytest.raises(ExperimentError, match="attention_mask have padding"):
        call(pg, clean, other)
