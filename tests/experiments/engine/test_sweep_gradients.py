"""`backward=True`: what accumulates in values of patches and in weights is what a loop would leave there."""

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


def test_gradients_add_to_those_that_are_there() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    x = torch.ones(2, 3)
    pg = PatchableGraph(model, x)
    value = torch.zeros(3, requires_grad=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    swept(pg, [{"sub_0.output": AddPatch(value=value)}] * 3, Call.of(x), torch.sum, backward=True)
    expected = model[1].weight.detach().sum(0) * 2 * 3
    assert torch.allclose(value.grad, expected, atol=1e-5)
    assert torch.equal(model[1].bias.grad, torch.full((2,), 1.0 + 2 * 3))


def test_sweeps_without_backward_leave_no_gradients() -> None:
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
