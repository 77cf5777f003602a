"""Names of modules that no Python code can quote as they are: the code of a graph goes around them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.notebook.views.browser import details
from graphpatch_notebook.notebook.views.skeleton import skeleton_of


class Named(nn.Module):
    """Calls a module and uses a parameter, both under a name that may be anything."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._modules[name] = nn.Linear(3, 3)
        self._parameters[f"{name}weight"] = nn.Parameter(torch.full((3,), 2.0))
        self.called = name

    def forward(self, x: Tensor) -> Tensor:
        return self._modules[self.called](x) * self._parameters[f"{self.called}weight"]


@pytest.mark.parametrize("name", ["\x00", "\udc80x", "a\nb", "\r", "\u202e", "a'\"b", "a\\", "\\x41", '") or ("'])
def test_a_graph_runs_and_is_shown_with_any_names_of_modules(name: str) -> None:
    model, x = Named(name).eval(), torch.ones(2, 3)
    pg = PatchableGraph(model, x)
    code = pg._graph_module.code
    assert all(line.isprintable() for line in code.splitlines())
    assert torch.equal(pg._graph_module(x), model(x))
    assert torch.equal(copy.deepcopy(pg._graph_module)(x), model(x))
    skeleton = skeleton_of(pg)
    assert details(pg, skeleton, 0).code == code.strip("\n")
    for row in range(len(skeleton)):
        details(pg, skeleton, row)


class Shadowing(nn.Module):
    """Has parameters that are called as what their graph's code needs to print other values."""

    def forward(self, x: Tensor, device: int, inf: float, nan: float) -> Tensor:
        filled = torch.ones(3, device=x.device).masked_fill(x > 0, -math.inf).clamp(min=-2.0, max=math.inf)
        return torch.nan_to_num(x / 0, nan=math.nan) + filled * device + inf + nan


def test_parameters_are_not_printed_in_place_of_other_names() -> None:
    model, x = Shadowing(), torch.tensor([0.0, 1.0, -1.0])
    pg = PatchableGraph(model, x, 2, 3.0, nan=4.0)
    expected = model(x, 2, 3.0, 4.0)
    assert pg.verify(x, 2, 3.0, nan=4.0).of("equal")
    torch.testing.assert_close(pg._graph_module(x, 2, 3.0, nan=4.0), expected, rtol=0, atol=0, equal_nan=True)
