"""Edits after which a graph cannot run are an error when they are made, with what to write instead."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from graphpatch_notebook import ExtractionOptions, PatchableGraph, ZeroPatch
from graphpatch_notebook.errors import CaptureError, GraphError
from tests.zoo.submodules import Submodules

X = torch.linspace(-1, 1, 6).view(2, 3)
V = torch.arange(3.0)


class Model(Submodules, seed=0, linear=(3, 3)):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


Change = Callable[[fx.Graph, Any], Any]


def output_is(make: Change) -> Callable[[fx.Graph], None]:
    """An edit after which the graph returns what `make` makes of its output."""

    def edit(graph: fx.Graph) -> None:
        output = list(graph.nodes)[-1]
        with graph.inserting_before(output):
            output.args = (make(graph, output.args[0]),)

    return edit


def without_output(graph: fx.Graph) -> None:
    graph.erase_node(list(graph.nodes)[-1])


def postprocessing(edit: Callable[[fx.Graph], None]) -> ExtractionOptions:
    def postprocess(graph_module: Any, module: nn.Module) -> None:
        if isinstance(module, Model):
            edit(graph_module.graph)

    return ExtractionOptions(postprocessing_function=postprocess)


WRONG = [
    (output_is(lambda graph, value: graph.call_function(torch.add, (value, V))), "'add' has an object (Tensor)"),
    (output_is(lambda graph, value: graph.call_function(torch.cat, ([value, V[None]],))), "graph_module.NAME = tensor"),
    (output_is(lambda graph, value: {"value": value, "vector": V}), "graph_module.NAME = tensor"),
    (output_is(lambda graph, value: graph.call_function(torch.mul, (value, np.float64(2)))), "(float64)"),
    (without_output, "one output"),
    (output_is(lambda graph, value: graph.call_function(torch.add, (value, graph.get_attr("nope")))), "self.nope"),
    (output_is(lambda graph, value: graph.call_module("foo", (value,))), "self.foo"),
    (output_is(lambda graph, value: graph.call_module("linear.weight", (value,))), "self.linear.weight"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG)
def test_edits_that_cannot_run_are_an_error_at_once(edit: Callable[[fx.Graph], None], message: str) -> None:
    with pytest.raises(CaptureError, match=f"'<root>'.*{re.escape(message)}"):
        PatchableGraph(Model(), postprocessing(edit), X)
    graph_module: Any = PatchableGraph(Model(), X)._graph_module
    edit(graph_module.graph)
    with pytest.raises(GraphError, match=re.escape(message)):
        graph_module.recompile()


def test_what_code_can_hold_is_fine() -> None:
    def change(graph: fx.Graph, value: Any) -> Any:
        value = graph.call_function(torch.clamp, (value,), {"max": float("inf"), "min": -1e9})
        value = graph.call_method("to", (value, torch.device("cpu"), torch.float64))
        value = graph.call_function(operator.getitem, (value, (slice(None, 1), ..., None, range(2))))
        value = graph.call_function(torch.mul, (value, 2 + 0j))
        return {"value": [value, graph.get_attr("linear.bias")]}

    model = Model()
    found = PatchableGraph(model, postprocessing(output_is(change)), X)(X)["value"]
    assert torch.equal(found[0], model(X).double()[:1][..., None, range(2)] * (2 + 0j))
    assert found[1] is model.linear.bias


# -- edited custom graphs ----------------------------------------------------------------------------------------------


class Steps(Submodules, seed=0, linear=(3, 3), inner=[(3, 3), nn.ReLU]):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x) * 2.0) + 1


def test_patterns_are_replaced_on_graph_modules() -> None:
    model = Steps()
    pg = PatchableGraph(model, X)
    graph_module = pg._graph_module
    assert fx.replace_pattern(graph_module, lambda value: value * 2.0, lambda value: value + value)
    graph_module.recompile()
    assert torch.equal(pg(X), model(X))
    assert torch.equal(fx.Interpreter(graph_module).run(X), model(X))
    with pg.patch({"linear.output": ZeroPatch()}):
        assert torch.equal(pg(X), model.inner(torch.zeros(2, 3)) + 1)
