"""How much a metric may differ between two runs before a sweep is done again as a loop."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, PatchableGraph


class Widened(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


@pytest.mark.parametrize(
    ("dtype", "noise", "is_noticed"),
    [
        (torch.float64, 1e-11, False),
        (torch.float64, 1e-7, True),
        (torch.float32, 1e-7, False),
        (torch.float32, 1e-3, True),
        (torch.bfloat16, 1e-3, False),
        (torch.bfloat16, 0.3, True),
        ("bfloat16 inside", 1e-3, False),
        ("bfloat16 inside", 0.3, True),
    ],
)
@pytest.mark.parametrize("size", [0.0, 100.0])
def test_metrics_may_differ_by_rounding(dtype: Any, noise: float, is_noticed: bool, size: float) -> None:
    """By as much as the dtype rounds: relative to the metric, and to the largest output where the metric is small."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Identity()), torch.randn(1, 4)
    if isinstance(dtype, str):
        model, x = nn.Sequential(model[0].to(torch.bfloat16), Widened()), x.to(torch.bfloat16)
    else:
        model, x = model.to(dtype), x.to(dtype)
    pg, calls = PatchableGraph(model, x), []
    with torch.no_grad():
        scale = max(float(model(x).abs().max()), size)

    def metric(output: Tensor) -> float:
        calls.append(1)
        return size + noise * scale * len(calls)

    def make(number: int) -> dict[str, Any]:
        return {"sub_0.output": AddPatch(value=0.0)}

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = pg.sweep({"cell": range(8)}, make, x, metric=metric, progress=False)
    assert any("runs again as a loop" in str(each.message) for each in warned) is is_noticed, found.remarks
