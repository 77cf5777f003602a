"""How the functions of experiments are called, and what they say of wrong calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphpatch_notebook import PatchableGraph, ZeroPatch
from graphpatch_notebook.experiments import (
    LogitDifference,
    ablate,
    attribute,
    causal_trace,
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
