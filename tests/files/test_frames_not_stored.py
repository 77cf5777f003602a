"""What cannot be stored: said when it is saved, and by the loaded graph; the model runs it where it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn

from graphpatch_notebook import (
    GraphError,
    GraphPatchWarning,
    PatchableGraph,
    ProbePatch,
    ZeroPatch,
)
from tests.files.files import Mlp, Numpy, Outer, x


def saved(model: nn.Module, folder: Path, *options: Any, match: str = "") -> tuple[PatchableGraph, Path]:
    pg = PatchableGraph(model, *options, x())
    with pytest.warns(GraphPatchWarning, match=match):
        pg.save(folder / "graph.safetensors")
    return pg, folder / "graph.safetensors"


def test_frames_that_cannot_be_stored(tmp_path: Path) -> None:
    pg, file = saved(Outer(Numpy()), tmp_path, match="(?s)2 of 5 frames.*'opaque'.*numpy")
    loaded = PatchableGraph.load(file)
    assert list(loaded.unstored) == ["opaque", "opaque.inner"]
    assert "numpy" in loaded.unstored["opaque"]
    assert pg.unstored == {}
    for run in (lambda: loaded(x()), lambda: loaded.opaque(x())):
        with pytest.raises(GraphError, match="'opaque'.*model="):
            run()


def test_the_model_runs_what_is_not_stored(tmp_path: Path) -> None:
    pg, file = saved(Outer(Numpy()), tmp_path)
    loaded = PatchableGraph.load(file, model=pg._module)
    assert torch.equal(loaded(x()), pg(x()))
    assert loaded.first.weight is pg.first.weight
    for path in ("tanh", "opaque.x", "opaque.output", "opaque.inner.output"):
        probes, outputs = [], []
        for graph in (pg, loaded):
            probe = ProbePatch()
            with graph.patch({path: [probe, ZeroPatch(slice=(..., 0))]}, strict=True):
                outputs.append(graph(x()))
            probes.append(probe.activation)
        assert torch.equal(*outputs), path
        assert torch.equal(*probes), path
    assert "opaque.inner.weight" in loaded.nodes
    assert "opaque.inner.linear" not in loaded.nodes
    with pytest.warns(GraphPatchWarning, match="unstored frame]"):
        pg.save(tmp_path / "again", check=[((x(),), {})])


def test_calls_that_the_graph_does_not_hold_for_are_refused_with_a_model_too(tmp_path: Path) -> None:
    pg = PatchableGraph(Mlp(), x())
    pg.save(tmp_path / "graph")
    loaded = PatchableGraph.load(tmp_path / "graph", model=pg._module)
    with pytest.raises(GraphError, match="'mask'"):
        loaded(x(), 0.0, torch.tensor([1.0, 0.0, 1.0]))


def test_a_module_is_stored_with_all_of_its_calls_or_with_none(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(4, 4)
            self.opaque = Numpy()
            self.opaque.inner = self.shared

        def forward(self, x: Tensor) -> Tensor:
            return self.opaque(self.shared(x))

    pg, file = saved(Twice(), tmp_path)
    loaded = PatchableGraph.load(file, model=pg._module)
    assert "opaque.inner" in loaded.unstored["shared"]
    assert torch.equal(loaded(x()), pg(x()))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda model: model.eval(), "'first'.*model.train"),
        (lambda model: setattr(model, "first", nn.ReLU()), "'first'.*Linear"),
        (lambda model: delattr(model, "opaque"), "'opaque"),
    ],
)
def test_another_model(tmp_path: Path, changed: Any, message: str) -> None:
    pg, file = saved(Outer(Numpy()), tmp_path)
    changed(pg._module)
    with pytest.raises(GraphError, match=message):
        PatchableGraph.load(file, model=pg._module)
    with pytest.raises(TypeError, match="type"):
        PatchableGraph.load(file, model=Outer)


def test_offloaded_weights(tmp_path: Path) -> None:
    model = Mlp()
    cpu_offload(model)
    pg, file = saved(model, tmp_path, match="not loaded")
    assert torch.equal(PatchableGraph.load(file, model=model)(x()), pg(x()))
