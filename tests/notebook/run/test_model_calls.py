"""What runs start from and leave as it was: random generators of all kinds, tensors in attributes, settings."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Beta, Dirichlet, Gamma

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.notebook.run.runs import Runs
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from tests.notebook.run.test_runs import done, session_of

X = torch.ones(2, 3)
GENERATOR = torch.Generator()


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(3, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def with_probe(function: Callable[[Tensor], Tensor]) -> tuple[PatchableGraph, Runs]:
    torch.manual_seed(0)
    pg = PatchableGraph(Applied(function).eval(), X)
    session = session_of(pg, ChosenPatch("linear.output", "probe", name="seen"))
    return pg, Runs(session, dict)


def by_helper(h: Tensor) -> Tensor:
    return h * random.random()


DRAWING: dict[str, Callable[[Tensor], Tensor]] = {
    "binomial": lambda h: h + torch.binomial(torch.full_like(h, 10.0), torch.full_like(h, 0.5)),
    "gamma": lambda h: h + Gamma(1.0, 1.0).sample(h.shape),
    "beta": lambda h: h * Beta(torch.ones(3), torch.ones(3)).sample(),
    "dirichlet": lambda h: h * Dirichlet(torch.ones(3)).sample(),
    "Python's": lambda h: h * random.random(),
    "Python's in a helper": lambda h: by_helper(h),
    "numpy's": lambda h: h * float(np.random.rand()),
}


def states() -> list[Any]:
    return [
        torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(),
        GENERATOR.get_state().tolist(),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", DRAWING)
def test_both_calls_draw_the_same_random_numbers_and_leave_the_generators(kind: str) -> None:
    pg, runs = with_probe(DRAWING[kind])
    before = states()
    report = done(runs)
    assert report["changes"][0]["norm_difference"] == 0
    assert report["warnings"] == []
    assert states() == before
    assert pg is not None
