"""Sweeps leave no gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, PatchableGraph
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
