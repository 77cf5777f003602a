"""Graphs run node by node: the same bits as their code and the model, each value shown, errors named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    CompiledGraphModule,
    GraphError,
    PatchableGraph,
    ProbePatch,
    ZeroPatch,
)
from tests.graphs.models import Layers
from tests.zoo.submodules import Submodules
from tests.zoo.values import bit_equal

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_every_value_is_shown_under_its_path() -> None:
    model = Layers().eval()
    pg = PatchableGraph(model, X)
    assert pg.verify(X).is_equal
    shown: dict[str, Any] = {}
    pg.interpreter(on_node=shown.__setitem__).run(X)
    probes = {path: ProbePatch() for path in pg.nodes if "|" not in path}
    with pg.patch(probes):
        pg(X)
    assert set(probes) <= set(shown)
    for path, probe in probes.items():
        assert bit_equal(shown[path], probe.activation) is None, path
    order = [path for path in shown if path in probes]
    assert order[0] == "x"
    assert order[-1] == "output"
    assert order.index("h_0.hidden") < order.index("h_1.linear.weight")


def test_neither_generated_code_nor_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pg = PatchableGraph(Layers().eval(), X)
    expected = pg(X)
    monkeypatch.setattr(Layers, "forward", None)
    monkeypatch.setattr(nn.Linear, "forward", None)
    assert torch.equal(pg.interpreter().run(X), expected)
    assert all(
        not module._generated for module in pg._graph_module.modules() if isinstance(module, CompiledGraphModule)
    )


class Failing(Submodules, layers=Layers):
    def forward(self, x: Tensor, table: dict[str, Tensor]) -> Tensor:
        return self.layers(x) + table["shift"]


def note_of(error: BaseException) -> list[str]:
    (note,) = error.__notes__
    return str(note).splitlines()


def test_an_error_names_the_node() -> None:
    table = {"shift": X}
    pg = PatchableGraph(Failing(), X, table)
    with torch.no_grad():
        pg._module.layers.h[1].linear.weight.set_(torch.ones(4, 7))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        pg.interpreter().run(X, table)
    lines = note_of(caught.value)
    assert lines[0] == "graphpatch: raised by 'layers.h_1.linear.linear' (linear)"
    assert lines[2] == "    return F.linear(input, self.weight, self.bias)"
    assert caught.value.args == ("mat1 and mat2 shapes cannot be multiplied (3x4 and 7x4)",)


def test_patches_are_refused() -> None:
    pg = PatchableGraph(nn.ReLU(), X)
    interpreter = pg.interpreter()
    with pg.patch({"relu": ZeroPatch()}), pytest.raises(GraphError):
        interpreter.run(X)
