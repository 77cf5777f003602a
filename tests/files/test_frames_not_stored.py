"""What cannot be stored: said when it is saved, and by the loaded graph; the model runs it where it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

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
    pg, file = saved(Outer(Numpy()), tmp_path, match="(?s)'opaque'.*numpy")
    loaded = PatchableGraph.load(file)
    assert list(loaded.unstored) == ["opaque", "opaque.inner"]
    assert "numpy" in loaded.unstored["opaque"]
    assert pg.unstored == {}
    for run in (lambda: loaded(x()), lambda: loaded.opaque(x())):
        with pytest.raises(GraphError, match="'opaque'"):
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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda model: model.eval(), "'first'"),
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
    pg, file = saved(model, tmp_path)
    assert torch.equal(PatchableGraph.load(file, model=model)(x()), pg(x()))
