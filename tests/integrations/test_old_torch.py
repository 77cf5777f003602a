"""What needs a newer torch than the oldest that is supported says so, before anything runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from graphpatch_notebook import CaptureError, GraphError, PatchableGraph, ZeroPatch
from tests.zoo import installed
from tests.zoo.submodules import Submodules


class Twice(Submodules, linear=(3, 3)):
    """`torch.export.unflatten` of torch 2.4 stops at a bare assertion here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x) + 1)


@pytest.mark.parametrize("is_file", [False, True], ids=["program", "file"])
def test_exported_programs(is_file: bool, tmp_path: Path) -> None:
    model, x = Twice(), torch.ones(2, 3)
    program = torch.export.export(model, (x,))
    file = tmp_path / "program.pt2"
    torch.export.save(program, file)
    if installed.TORCH < (2, 6):
        words = f"exported programs need torch 2.6 or later, and this is {torch.__version__}"
        with pytest.raises(GraphError, match=re.escape(words)):
            PatchableGraph.from_exported(file if is_file else program)
        return
    pg = PatchableGraph.from_exported(file if is_file else program)
    with torch.no_grad(), pg.patch({"linear_1.weight": ZeroPatch()}, strict=True):
        assert torch.equal(pg(x), model.linear.bias.expand(2, 3))


def test_models_that_are_compiled() -> None:
    model, x = Twice(), torch.ones(2, 3)
    model.linear = torch.compile(model.linear, backend="eager")  # type: ignore[assignment]
    if installed.TORCH < (2, 6):
        with pytest.raises(CaptureError, match="cannot be asked to run as it was written what torch.compile compiled"):
            PatchableGraph(model, x)
        return
    pg = PatchableGraph(model, x)
    with torch.no_grad(), pg.patch({"linear_1._orig_mod.weight": ZeroPatch()}, strict=True):
        assert torch.equal(pg(x), model.linear.bias.expand(2, 3))


def test_models_that_were_compiled_since() -> None:
    model, x = Twice(), torch.ones(2, 3)
    pg = PatchableGraph(model, x)
    model.linear.compile(backend="eager")
    with torch.no_grad(), pg.patch({"linear_0.linear": ZeroPatch()}, strict=True):
        if installed.TORCH < (2, 6):
            with pytest.raises(GraphError, match="make the PatchableGraph of the model as it is without torch.compile"):
                pg(x)
            return
        assert torch.equal(pg(x), model.linear(torch.ones_like(x)))
