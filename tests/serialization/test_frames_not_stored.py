"""What cannot be stored: said when it is saved, and by the loaded graph; the model runs it where it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    ExtractionOptions,
    PatchableGraph,
    ProbePatch,
    SerializationError,
    StoredFormError,
    UnstoredFrameError,
    UnstoredFrameWarning,
    ZeroPatch,
)
from graphpatch_notebook.patchable_graph import captured
from tests.serialization.files import Mlp, Numpy, rewritten, x


class Outer(nn.Module):
    """Has a submodule that can be stored, and one that cannot."""

    def __init__(self, opaque: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.opaque = nn.Linear(4, 4), nn.Linear(4, 2), opaque

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.opaque(torch.tanh(self.first(x)))
        return self.second(hidden * scale)


def saved(model: nn.Module, folder: Path, *options: Any, match: str = "") -> tuple[PatchableGraph, Path]:
    pg = PatchableGraph(model, *options, x())
    with pytest.warns(UnstoredFrameWarning, match=match):
        pg.save(folder / "graph.safetensors")
    return pg, folder / "graph.safetensors"


def test_frames_that_cannot_be_stored(tmp_path: Path) -> None:
    match = r"2 frames are not stored in graph.safetensors; to call these, load it with the model.*\n  'opaque': reads"
    pg, file = saved(Outer(Numpy()), tmp_path, match=match)
    loaded = PatchableGraph.load(file)
    assert list(loaded.unstored) == ["opaque", "opaque.inner"]
    assert "numpy" in loaded.unstored["opaque"]
    assert loaded.unstored["opaque.inner"] == "it is inside 'opaque', which is not stored"
    assert pg.unstored == {}
    for run in (lambda: loaded(x()), lambda: loaded.opaque(x())):
        with pytest.raises(
            UnstoredFrameError,
            match=r"this Numpy cannot run: the file has no graph of 'opaque': reads .*load\(file, model=model\)",
        ):
            run()


def test_the_model_runs_what_is_not_stored(tmp_path: Path) -> None:
    pg, file = saved(Outer(Numpy()), tmp_path)
    loaded = PatchableGraph.load(file, model=pg._module)
    assert torch.equal(loaded(x()), pg(x()))
    assert loaded.first.weight is pg.first.weight
    for path in (
        "tanh",
        "opaque.x",
        "opaque.output",
        "opaque.inner.output",
        "hidden" if "hidden" in pg.nodes else "mul",
    ):
        probes = []
        outputs = []
        for graph in (pg, loaded):
            probe = ProbePatch()
            with graph.patch({path: [probe, ZeroPatch(slice=(..., 0))]}, strict=True):
                outputs.append(graph(x()))
            probes.append(probe.activation)
        assert torch.equal(*outputs), path
        assert torch.equal(*probes), path
    assert "opaque.inner.weight" in loaded.nodes
    assert "opaque.inner.linear" not in loaded.nodes


def test_the_model_runs_calls_that_the_graph_does_not_hold_for(tmp_path: Path) -> None:
    pg = PatchableGraph(Mlp(), x())
    pg.save(tmp_path / "graph.safetensors")
    loaded = PatchableGraph.load(tmp_path / "graph.safetensors", model=pg._module)
    mask = torch.tensor([1.0, 0.0, 1.0])
    assert torch.equal(loaded(x(), 2.0, mask), pg(x(), 2.0, mask))
    assert torch.equal(loaded(x(100, 4)), pg(x(100, 4)))
    with pytest.raises(StoredFormError, match="'mask' is Tensor"), loaded.patch({"hidden": ZeroPatch()}):
        loaded(x(), 0.0, mask)


class Vmapped(nn.Module):
    """Makes its mask with `torch.vmap`, as transformers 4 does: what comes out of it no seen call made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[-1])
        is_before = torch.vmap(torch.vmap(lambda i, j: j <= i, (None, 0)), (0, None))(positions, positions)
        scores = self.linear(x)[..., None] * is_before
        return scores.sum(-1)


def test_what_comes_out_of_vmap_needs_the_model(tmp_path: Path) -> None:
    model = Vmapped()
    pg, file = saved(model, tmp_path, match="uses a tensor that no longer exists")
    with pytest.raises(UnstoredFrameError, match=r"load\(file, model=model\)"):
        PatchableGraph.load(file)(x())
    loaded = PatchableGraph.load(file, model=model)
    for graph in (pg, loaded):
        assert torch.equal(graph(x()), model(x()))
        with graph.patch({"linear.output": AddPatch(value=1.0)}):
            torch.testing.assert_close(graph(x()), model(x()) + torch.arange(1.0, 5.0))


def test_modules_that_were_replaced_since(tmp_path: Path) -> None:
    pg, file = saved(Outer(Numpy()), tmp_path)
    loaded = PatchableGraph.load(file, model=pg._module)
    loaded._module.opaque = nn.Identity()
    expected = pg.second(torch.tanh(pg.first(x())))
    assert torch.equal(loaded(x()), expected)
    with pytest.warns(UnstoredFrameWarning, match="it calls 'opaque', which was replaced by another module since"):
        loaded.save(tmp_path / "changed.safetensors")
    assert "" in PatchableGraph.load(tmp_path / "changed.safetensors").unstored


def test_a_model_whose_module_was_replaced_since(tmp_path: Path) -> None:
    pg = PatchableGraph(Mlp(), x())
    pg._module.up = nn.Linear(4, 8)
    with pytest.warns(UnstoredFrameWarning, match="the root: output: 6 of 6 values differ"):
        pg.save(tmp_path / "graph.safetensors")


def test_skipped_modules_and_options(tmp_path: Path) -> None:
    options = ExtractionOptions(classes_to_skip_compiling={Numpy}, warn_on_compilation_failure=True)
    match = r"'opaque': the options say to skip it\noptions .*: classes_to_skip_compiling \(.*Numpy\)"
    _, file = saved(Outer(Numpy()), tmp_path, options, match=match)
    loaded = PatchableGraph.load(file)
    assert captured(loaded).options == ExtractionOptions(warn_on_compilation_failure=True)
    with pytest.warns(UnstoredFrameWarning):
        loaded.save(tmp_path / "again.safetensors")
    assert PatchableGraph.load(tmp_path / "again.safetensors").unstored == loaded.unstored


def test_a_root_that_cannot_be_stored(tmp_path: Path) -> None:
    pg, file = saved(Numpy(), tmp_path, match="the root: reads a value")
    with pytest.raises(UnstoredFrameError, match="the file has no graph of '<root>'"):
        PatchableGraph.load(file)(x())
    loaded = PatchableGraph.load(file, model=pg._module)
    with loaded.patch({"inner.output": ZeroPatch()}):
        assert not loaded(x()).any()
    assert torch.equal(loaded(x(7, 4)), pg(x(7, 4)))


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
    assert loaded.unstored["shared"] == "it is the module of 'opaque.inner', which is not stored"
    assert torch.equal(loaded(x()), pg(x()))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda model: model.first.weight.data.add_(1), r"'weight' of 'first' \(Linear\) is not what it was"),
        (lambda model: model.eval(), r"'first' \(Linear\) was in train mode when .*; call model.train\(\)"),
        (lambda model: setattr(model, "first", nn.ReLU()), "'first' is of class ReLU, and of "),
        (lambda model: delattr(model, "opaque"), "the model has no 'opaque', unlike the file"),
        (lambda model: setattr(model, "second", model.first), r"'weight' of 'first' \(Linear\)"),
    ],
)
def test_another_model(tmp_path: Path, changed: Any, message: str) -> None:
    pg, file = saved(Outer(Numpy()), tmp_path)
    changed(pg._module)
    with pytest.raises(SerializationError, match=message):
        PatchableGraph.load(file, model=pg._module)
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, not type"):
        PatchableGraph.load(file, model=Outer)


def test_hostile_files_are_refused_with_a_model_too(tmp_path: Path) -> None:
    pg, file = saved(Outer(Numpy()), tmp_path)

    def change(document: Any) -> None:
        document["modules"][0]["children"] = "all"

    with pytest.raises(SerializationError, match="there should be a list"):
        PatchableGraph.load(rewritten(file, change), model=pg._module)


def test_offloaded_weights(tmp_path: Path) -> None:
    model = Mlp()
    cpu_offload(model)
    pg = PatchableGraph(model, x())
    with pytest.warns(UnstoredFrameWarning, match="its weights are not loaded"):
        pg.save(tmp_path / "graph.safetensors")
    loaded = PatchableGraph.load(tmp_path / "graph.safetensors", model=model)
    assert torch.equal(loaded(x()), pg(x()))


def test_quantized_weights(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    quantized = bitsandbytes.nn.Linear8bitLt(4, 4, has_fp16_weights=False)
    pg, file = saved(Outer(quantized), tmp_path, match="'opaque': it holds a Int8Params|'opaque': ")
    loaded = PatchableGraph.load(file, model=pg._module)
    assert torch.equal(loaded(x()), pg(x()))
    with loaded.patch({"opaque.output": ZeroPatch()}):
        assert torch.equal(loaded(x()), pg.second.bias.expand(3, 2))
