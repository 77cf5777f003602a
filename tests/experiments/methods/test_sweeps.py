"""`pg.sweep`: one number for each combination of the values of some axes."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from graphpatch_notebook import ExperimentError, PatchableGraph, ZeroPatch
from tests.hooks import registered


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


@pytest.mark.parametrize("batch", ["auto", 3, None])
def test_cells_act_in_their_steps_alone(batch: Any) -> None:
    """A sweep has one call, step 0: later steps are not reached, which is said of each cell and in a remark."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 3))
    x = torch.randn(2, 3)
    pg = PatchableGraph(model, x)
    steps = [0, 1, None, slice(1, None), [0, 2], slice(None, 1)]

    def without(number: int, layer: int) -> dict[str, ZeroPatch]:
        return {f"sub_{layer}.output": ZeroPatch(slice=(..., layer), steps=steps[number])}

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = pg.sweep(
            {"number": range(6), "layer": [0, 2]}, without, x, metric=torch.sum, batch=batch, progress=False
        )
    for number in range(6):
        for layer in (0, 2):
            expected = model(x)
            if number not in (1, 3):
                with registered(
                    [model[layer].register_forward_hook(lambda _, args, out, layer=layer: zeroed(out, layer))]
                ):
                    expected = model(x)
            assert found.sel(number=number, layer=layer).item() == pytest.approx(expected.sum().item(), abs=1e-5)
    assert sum("steps" in str(each.message) for each in warned) == 6  # [0, 2] has one, too
    assert [remark for remark in found.remarks if "steps" in remark] == found.remarks
    assert len(found.remarks) == (batch is not None)
    if found.remarks:
        assert found.remarks[0].startswith("6 of 12 cells")


def zeroed(value: torch.Tensor, unit: int) -> torch.Tensor:
    value = value.clone()
    value[..., unit] = 0
    return value
