"""What capture hands to the model in place of its own tensors does not stay there."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from graphpatch_notebook import PatchableGraph
from tests.zoo.values import same_state, snapshot


class Keeping(nn.Module):
    """Puts its tables where they belong, and keeps what comes back; as CTRL does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.table = torch.ones(3)
        self.same = nn.Identity()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = self.same(self.table.to(x.device).contiguous())
        self.scale = self.scale.to(x.device)
        return self.linear((x + self.table) * self.scale)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_capture_leaves_the_tensors_that_the_model_keeps(is_interrupted: bool) -> None:
    model, x = Keeping(), torch.ones(2, 3)
    model(x)
    if is_interrupted:
        model.linear.register_forward_pre_hook(lambda module, args: 1 / 0)
    before = snapshot(model)
    with contextlib.suppress(ZeroDivisionError):
        PatchableGraph(model, x)
    assert same_state(model, before) is None
