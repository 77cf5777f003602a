"""Graphs that are their module come back: those of custom extraction functions, and edited ones. So do other kinds."""

from __future__ import annotations

import dataclasses
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from graphpatch_notebook import (
    AddPatch,
    ExtractionOptions,
    PatchableGraph,
    SerializationError,
    UnstoredFrameWarning,
)
from tests.serialization.files import Mlp, reloaded, x
from tests.zoo import installed


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, input: Tensor, shift: float = 1.0) -> Tensor:
        return self.inner(input) * self.scale + shift


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x) * 2


def extract(module: nn.Module) -> fx.Graph:
    graph = fx.Graph()
    given, shift = graph.placeholder("input"), graph.placeholder("shift")
    inner = graph.call_module("inner", (given,))
    product = graph.call_function(operator.mul, (inner, graph.get_attr("scale")))
    product.name = "my_custom_name"
    graph.output((graph.call_function(operator.sub, (product, shift)),))
    return graph


def test_custom_extraction_graphs(tmp_path: Path) -> None:
    options = ExtractionOptions(custom_extraction_functions={Scaled: extract})
    pg = PatchableGraph(Around(), options, x())
    with pytest.warns(UnstoredFrameWarning, match=r"only named: custom_extraction_functions \(.*Scaled: .*extract\)"):
        pg.save(tmp_path / "graph.safetensors")
    loaded = PatchableGraph.load(tmp_path / "graph.safetensors")
    assert not loaded.unstored
    assert torch.equal(loaded(x()), pg(x()))
    assert not torch.equal(pg(x()), pg._module(x()))
    for path in ("scaled.my_custom_name", "scaled.inner.linear", "scaled.scale", "scaled.input"):
        with pg.patch({path: AddPatch(value=1.0)}), loaded.patch({path: AddPatch(value=1.0)}):
            assert torch.equal(loaded(x()), pg(x()))


def test_edited_graphs(tmp_path: Path) -> None:
    def edit(graph_module: Any, module: nn.Module) -> None:
        if isinstance(module, Mlp):
            (relu,) = (node for node in graph_module.graph.nodes if node.target is torch.relu)
            relu.target = torch.tanh
            graph_module.recompile()

    pg = PatchableGraph(Mlp(), ExtractionOptions(postprocessing_function=edit), x())
    with pytest.warns(UnstoredFrameWarning, match="only named: postprocessing_function"):
        pg.save(tmp_path / "graph.safetensors")
    loaded = PatchableGraph.load(tmp_path / "graph.safetensors")
    assert torch.equal(loaded(x()), pg(x()))
    assert not torch.equal(pg(x()), pg._module(x()))
    with pg.patch({"hidden": AddPatch(value=1.0)}), loaded.patch({"hidden": AddPatch(value=1.0)}):
        assert torch.equal(loaded(x()), pg(x()))


@dataclasses.dataclass
class Output:
    first: Tensor
    second: Tensor | None = None


class Structured(nn.Module):
    def forward(self, x: Tensor) -> Output:
        return Output(x * 2)


def test_classes_of_the_caller(tmp_path: Path) -> None:
    pg = PatchableGraph(Structured(), x())
    pg.save(tmp_path / "graph.safetensors")
    with pytest.raises(SerializationError, match=r"load\(file, allow=\['.*test_custom_graph_files.Output'\]\)"):
        PatchableGraph.load(tmp_path / "graph.safetensors")
    loaded = PatchableGraph.load(tmp_path / "graph.safetensors", allow=[f"{__name__}.Output"])
    output = loaded(x())
    assert type(output) is Output
    assert torch.equal(output.first, x() * 2)


def test_random_numbers_in_train_mode(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).train()
    pg = PatchableGraph(model, x())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = reloaded(pg, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for graph in (loaded, pg):
        torch.manual_seed(3)
        graph.result = graph(x())
    assert torch.equal(loaded.result, pg.result)
    assert torch.equal(loaded.get_buffer("2.running_mean"), pg.get_buffer("2.running_mean"))
    assert loaded.get_buffer("2.num_batches_tracked") == before["2.num_batches_tracked"] + 1


def test_odd_names(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._parameters["lambda"] = nn.Parameter(torch.full((4,), 2.0))
            self._parameters["type"] = nn.Parameter(torch.full((4,), 3.0))
            self.add_module("class", nn.Linear(4, 4))
            self.layers = [nn.Linear(4, 4)]
            self.add_module("a/b", nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = self._modules["class"](x) * self._parameters["lambda"] + self._parameters["type"]
            return self._modules["a/b"](self.layers[0](x))

    pg = PatchableGraph(Odd(), x())
    loaded = reloaded(pg, tmp_path)
    assert repr(loaded.graph) == repr(pg.graph)
    assert list(loaded.state_dict()) == list(pg.state_dict())
    for path in (path for path in pg.nodes if pg.nodes[path].dtype is not None):
        with pg.patch({path: AddPatch(value=1.0)}), loaded.patch({path: AddPatch(value=1.0)}):
            assert torch.equal(loaded(x()), pg(x())), path
    loaded.to(torch.float32).load_state_dict({name: value * 2 for name, value in pg.state_dict().items()})
    pg.load_state_dict({name: value * 2 for name, value in pg.state_dict().items()})
    assert torch.equal(loaded(x()), pg(x()))
    again = reloaded(loaded, tmp_path)
    assert torch.equal(again(x()), pg(x()))


@pytest.mark.skipif(installed.TORCH < (2, 6), reason="refused there: see test_old_torch.py")
def test_exported_programs(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4))
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            self.count.add_(1)
            return {"y": self.a(self.b(self.a(x))) + self.count}

    program = torch.export.export(Counting(), (x(),), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    pg = PatchableGraph.from_exported(program)
    loaded = reloaded(pg, tmp_path)
    assert repr(loaded.graph) == repr(pg.graph)
    for shape in ((3, 4), (5, 4)):
        assert torch.equal(loaded(x(*shape))["y"], pg(x(*shape))["y"])
    assert torch.equal(loaded.count, pg.count)


@pytest.mark.skipif(installed.TORCH < (2, 6), reason="refused there: see test_old_torch.py")
def test_programs_with_branches_are_not_stored(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    pg = PatchableGraph.from_exported(torch.export.export(Branches(), (x(),)))
    with pytest.raises(SerializationError, match=r"'<root>' \((Branches|ExportedModule)\) .* reads 'true_graph_0'"):
        pg.save(tmp_path / "branches.safetensors")
    assert not any(tmp_path.iterdir())
