"""`pg.sweep`: one number for each combination of the values of some axes."""

from __future__ import annotations

import pytest
import torch

from graphpatch_notebook import ExperimentError, PatchableGraph, ZeroPatch


def test_axes_and_arguments_in_another_order_are_refused() -> None:
    """Values are given in order: numbers of positions would be taken for numbers of layers."""
    x = torch.randn(2, 3)
    pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)), x)

    def without(layer: int, unit: int) -> dict[str, ZeroPatch]:
        return {f"sub_{layer}.output": ZeroPatch(slice=(slice(None), unit))}

    message = "'layer' would be a value of 'unit': the axes are unit, layer, and the arguments layer, unit"
    with pytest.raises(ExperimentError, match=message):
        pg.sweep({"unit": range(2), "layer": range(2)}, without, x, metric=torch.sum)
    found = pg.sweep({"number": range(2), "column": range(3)}, without, x, metric=torch.sum)
    with torch.no_grad(), pg.patch(without(1, 2)):
        assert found.sel(number=1, column=2).item() == pytest.approx(pg(x).sum().item())
