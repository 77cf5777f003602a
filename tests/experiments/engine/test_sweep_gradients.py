"""Sweeps leave no gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import ExperimentError, PatchableGraph, ZeroPatch
from graphpatch_notebook.experiments import ablate

pytestmark = [
    pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning"),
]


def test_options_that_are_gone_are_errors_where_models_take_any_keyword() -> None:
    class TakesAny(nn.Module):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            return x.relu()

    pg = PatchableGraph(TakesAny(), torch.ones(2))
    with pytest.raises(ExperimentError, match="backward"):
        pg.sweep({"cell": [0]}, lambda _: {"output": ZeroPatch()}, torch.ones(2), metric=torch.sum, backward=True)
    with pytest.raises(ExperimentError, match="heads"):
        ablate(pg, ["output"], torch.ones(2), metric=torch.sum, heads=4)
