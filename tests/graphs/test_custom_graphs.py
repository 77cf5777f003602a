"""Graphs of custom extraction functions: checks, records and runs."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from graphpatch_notebook import ExtractionOptions, PatchableGraph
from graphpatch_notebook.capture.custom_graphs import extracted_graph
from graphpatch_notebook.capture.inputs import parameters_of
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import CaptureError
from tests.zoo.submodules import Submodules

X = torch.linspace(-1, 1, 6).reshape(3, 2)


class Scaled(Submodules, inner=(2, 2), scale=lambda: torch.tensor(3.0)):
    def forward(self, input: Tensor, shift: float = 1.0) -> Tensor:
        return self.inner(input) * self.scale + shift


def extract(module: nn.Module) -> fx.Graph:
    graph = fx.Graph()
    given, shift = graph.placeholder("input"), graph.placeholder("shift")
    weight, scale = graph.get_attr("inner.weight"), graph.get_attr("scale")
    product = graph.call_function(operator.matmul, (given, graph.call_method("t", (weight,))))
    product.name = "my_custom_name"
    output = graph.call_function(operator.add, (graph.call_function(operator.mul, (product, scale)), shift))
    graph.output((output,))
    return graph


def frame_of(module: nn.Module, extract: Any) -> tuple[Frame, fx.Graph]:
    frame = Frame(module, "", None, parameters=parameters_of(module.forward))
    return frame, extracted_graph(extract, module, frame.parameters, "")


def without(change: Any) -> Any:
    """An extraction function whose graph has something wrong."""

    def extraction(module: nn.Module) -> Any:
        return change(extract(module))

    return extraction


def rename(graph: fx.Graph) -> fx.Graph:
    next(iter(graph.nodes)).target = "x"
    return graph


def unwrap(graph: fx.Graph) -> fx.Graph:
    output = list(graph.nodes)[-1]
    output.args = (output.args[0][0],)
    return graph


def without_output(graph: fx.Graph) -> fx.Graph:
    graph.erase_node(list(graph.nodes)[-1])
    return graph


def retarget(graph: fx.Graph) -> fx.Graph:
    next(node for node in graph.nodes if node.op == "get_attr").target = "weights"
    return graph


def literal(graph: fx.Graph, value: Any = X[0]) -> fx.Graph:
    product = next(node for node in graph.nodes if node.target is operator.mul)
    product.args = (product.args[0], value)
    return graph


def unknown_call(graph: fx.Graph) -> fx.Graph:
    output = list(graph.nodes)[-1]
    with graph.inserting_before(output):
        output.args = ((graph.call_module("foo", output.args[0]),),)
    return graph


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda module: None, "for Scaled .'<root>'.*torch.fx.Graph"),
        (lambda module: fx.GraphModule({}, fx.Graph()), "torch.fx.Graph"),
        (without(rename), "'input', 'shift'.*'x', 'shift'"),
        (without(unwrap), "one output, not .add."),
        (without(without_output), "one output"),
        (without(literal), "'mul' has an object .Tensor"),
        (without(unknown_call), "'foo' uses self.foo"),
        (without(retarget), "uses self.weights"),
    ],
)
def test_graphs_that_do_not_replace_the_module_are_refused(function: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        frame_of(Scaled(), function)


def test_placeholders_are_matched_by_name() -> None:
    class Less(nn.Module):
        def forward(self, x: Tensor, y: Tensor, *, scale: float = 2.0) -> Tensor:
            return x - y * scale

    def extract_less(module: nn.Module) -> fx.Graph:
        graph = fx.Graph()
        scale, y, x = map(graph.placeholder, ("scale", "y", "x"))
        graph.output((graph.call_function(operator.sub, (x, graph.call_function(operator.mul, (y, scale)))),))
        return graph

    options = ExtractionOptions(custom_extraction_functions={Less: extract_less})
    pg = PatchableGraph(Less(), options, X, X.exp())
    assert pg.graph._code.startswith("def forward(self, x, y, scale = 2.0)")
    for args, kwargs in (((X, X.exp()), {}), ((X,), {"y": X.cos(), "scale": 3.0})):
        assert torch.equal(pg(*args, **kwargs), Less()(*args, **kwargs))
