"""Sweeps leave no gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, ExperimentError, PatchableGraph, ZeroPatch
from graphpatch_notebook.experiments import ablate
from tests.experiments.engine.loops import swept
from tests.zoo import Call

pytestmark = [
    pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning"),
]


def test_sweeps_leave_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    x = torch.ones(2, 3, requires_grad=True)
    pg = PatchableGraph(model, x)
    value = torch.zeros(3, requires_grad=True)
    seen: list[bool] = []

    def metric(output: Tensor) -> Tensor:
        seen.append(output.requires_grad)
        return output.sum()

    swept(pg, [{"sub_0.output": AddPatch(value=value)}] * 3, Call.of(x), metric)
    assert not any(seen)
    assert value.grad is None
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())


def test_options_that_are_gone_are_errors_where_models_take_any_keyword() -> None:
    class TakesAny(nn.Module):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            return x.relu()

    pg = PatchableGraph(TakesAny(), torch.ones(2))
    with pytest.raises(ExperimentError, match="backward"):
        pg.sweep({"cell": [0]}, lambda _: {"output": ZeroPatch()}, torch.ones(2), metric=torch.sum, backward=True)
    with pytest.raises(ExperimentError, match="heads"):
        ablate(pg, ["output"], torch.ones(2), metric=torch.sum, heads=4)
