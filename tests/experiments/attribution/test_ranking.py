"""The largest scores: a value with several names takes one place, and only such a value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ProbePatch
from graphpatch_notebook.experiments import (
    LogitDifference,
    attribute,
    top_scores,
)
from tests.experiments.hooked import gpt2, llama

CLEAN = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
CORRUPTED = torch.tensor([[3, 1, 8, 1, 5, 9, 2]])
METRIC = LogitDifference(4, 8)


@pytest.fixture(scope="module", params=[gpt2, llama])
def host(request: pytest.FixtureRequest) -> tuple[PatchableGraph, Any]:
    model = request.param()
    for parameter in model.parameters():
        if parameter.ndim == 1:  # of norms, which would keep the numbers as they are otherwise
            nn.init.normal_(parameter, 1.0, 0.3)
    pg = PatchableGraph(model, CLEAN)
    return pg, attribute(pg, METRIC, CLEAN, CORRUPTED)


def test_names_that_share_a_place_hold_the_same_numbers(host: Any) -> None:
    pg, scores = host
    names: dict[str, str] = scores.attrs["same_values"]
    assert len(names) > len(scores) / 3
    probes = {path: ProbePatch() for path in scores.coords["path"].values.tolist()}
    with torch.no_grad(), pg.patch(probes):
        pg(CLEAN)
    for path, standing in names.items():
        value, other = probes[path].activation, probes[standing].activation
        assert torch.equal(value.flatten().sort().values, other.flatten().sort().values), (path, standing)
    # And what was left apart, of the values that scored, are not the same numbers in the same order.
    top = top_scores(scores, 30)
    flat = [probes[path].activation.flatten() for path in top.index]
    for number, value in enumerate(flat):
        for other_number in range(number):
            is_same = value.shape == flat[other_number].shape and torch.equal(value, flat[other_number])
            scores_differ = top.iloc[number] != pytest.approx(top.iloc[other_number], rel=1e-5)
            assert not is_same or scores_differ, (top.index[number], top.index[other_number])


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.flip(1),
        lambda x: x.roll(1, 1),
        lambda x: x.masked_fill(torch.tensor([True, False, True]), 0.0),
        torch.nan_to_num,
    ],
)
def test_other_numbers_are_another_value(change: Any) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            z = change(y)
            return z * 3

    scores = attribute(PatchableGraph(Model(), torch.randn(2, 3)), torch.sum, torch.randn(2, 3), torch.randn(2, 3))
    assert not {"y", "z"} & set(scores.attrs["same_values"])
