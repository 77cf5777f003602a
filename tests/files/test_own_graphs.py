"""Graphs that are their module (edited, custom, of a program) come back whole, or nothing is written."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from graphpatch_notebook import (
    AddPatch,
    ExtractionOptions,
    GraphError,
    PatchableGraph,
)
from tests.files.files import Mlp, Numpy, Outer, reloaded, x

Edit = Callable[[Any, nn.Module], None]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, input: Tensor, shift: float = 1.0) -> Tensor:
        return self.inner(input) * self.scale + shift


def extract(module: nn.Module) -> fx.Graph:
    graph = fx.Graph()
    given, shift = graph.placeholder("input"), graph.placeholder("shift")
    product = graph.call_function(operator.mul, (graph.call_module("inner", (given,)), graph.get_attr("scale")))
    product.name = "my_custom_name"
    graph.output((graph.call_function(operator.sub, (product, shift)),))
    return graph


def edited(model: nn.Module, edit: Edit, *inputs: Tensor) -> PatchableGraph:
    return PatchableGraph(model, ExtractionOptions(postprocessing_function=edit), *(inputs or (x(),)))


def append(graph_module: Any, function: Callable[..., Any], *args: Any) -> None:
    """Puts an operation on the output at the end of a graph."""
    graph = graph_module.graph
    (output,) = (node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(output):
        others = [graph.get_attr(arg) if isinstance(arg, str) else arg for arg in args]
        output.args = (graph.call_function(function, (output.args[0], *others)),)
    graph_module.recompile()


def times_two(graph_module: Any, module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        append(graph_module, operator.mul, 2)


def same(loaded: PatchableGraph, pg: PatchableGraph, *paths: str) -> None:
    """Compares two graphs, also with patches on these paths."""
    assert torch.equal(loaded(x()), pg(x()))
    for path in paths:
        with pg.patch({path: AddPatch(value=1.0)}), loaded.patch({path: AddPatch(value=1.0)}):
            assert torch.equal(loaded(x()), pg(x())), path


def test_custom_graphs(tmp_path: Path) -> None:
    options = ExtractionOptions(custom_extraction_functions={Scaled: extract})
    pg = PatchableGraph(nn.Sequential(Scaled(), nn.ReLU()), options, x())
    loaded = reloaded(pg, tmp_path)
    assert not loaded.unstored
    assert not torch.equal(pg(x()), pg._module(x()))
    same(loaded, pg, "sub_0.my_custom_name", "sub_0.inner.linear", "sub_0.scale", "sub_0.input")


def test_edited_graphs_run_in_place_of_a_model_that_is_given(tmp_path: Path) -> None:
    model = Mlp()
    pg = edited(model, times_two)
    pg.save(tmp_path / "graph")
    loaded = PatchableGraph.load(tmp_path / "graph", model=model)
    loaded.save(tmp_path / "again")
    again = PatchableGraph.load(tmp_path / "again", model=model)
    for graph in (loaded, again, copy.deepcopy(again)):
        same(graph, pg, "hidden")
        assert not torch.equal(graph(x()), model(x()))
        with pytest.raises(GraphError, match="'shift'"):
            graph(x(), 2.0)


@pytest.mark.parametrize("is_registered", [True, False])
def test_tensors_on_graph_modules(tmp_path: Path, is_registered: bool) -> None:
    vector = torch.linspace(-1, 1, 2)

    def steer(graph_module: Any, module: nn.Module) -> None:
        if module is model:
            if is_registered:
                graph_module.register_buffer("vec", vector)
            else:
                graph_module.vec = vector
            append(graph_module, torch.add, "vec")

    model = Mlp()
    pg = edited(model, steer)
    loaded = reloaded(pg, tmp_path)
    assert torch.equal(loaded(x()), model(x()) + vector)
    same(reloaded(loaded, tmp_path), pg, "hidden")


@pytest.mark.parametrize(
    ("model", "options", "path"),
    [
        (Outer(Numpy()), {"postprocessing_function": times_two}, "opaque.inner"),
        (Outer(Numpy()), {"custom_extraction_functions": {nn.Linear: extract}}, "opaque.inner"),
        (nn.Linear(4, 2), {"postprocessing_function": lambda gm, _: append(gm, lambda x: x * 3)}, "the root"),
    ],
)
def test_graphs_that_files_cannot_hold(tmp_path: Path, model: nn.Module, options: dict[str, Any], path: str) -> None:
    if "custom_extraction_functions" in options:
        options = {"custom_extraction_functions": {nn.Linear: _doubled}}
    pg = PatchableGraph(model, ExtractionOptions(**options), x())
    with pytest.raises(GraphError, match=path):
        pg.save(tmp_path / "graph")
    assert not list(tmp_path.iterdir())


def _doubled(module: nn.Module) -> fx.Graph:
    graph = fx.Graph()
    graph.output((graph.call_function(operator.mul, (graph.placeholder("input"), 2)),))
    return graph
