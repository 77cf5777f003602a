"""Graphs of custom extraction functions: checks, records and runs."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from graphpatch_notebook import AddPatch, ExtractionOptions, PatchableGraph, ZeroPatch
from graphpatch_notebook.capture.custom_graphs import CustomRun, extracted_graph
from graphpatch_notebook.capture.inputs import input_parameters, signature_of
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import CaptureError
from graphpatch_notebook.graphs import CompiledGraphModule, build_hierarchy

X = torch.linspace(-1, 1, 6).reshape(3, 2)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor(3.0))

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
    frame = Frame(module, "", None, parameters=input_parameters(signature_of(module.forward)))
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
        (lambda module: fx.GraphModule({}, fx.Graph()), "return its .graph"),
        (without(rename), "input, shift; it has x, shift"),
        (without(unwrap), "an output of add"),
        (without(without_output), "no outputs"),
        (without(literal), "'mul' with an object .Tensor.*put it on the module"),
        (without(unknown_call), "'foo' that calls self.foo.*it has scale, inner"),
        (without(retarget), "reads self.weights.*it has scale, inner"),
    ],
)
def test_graphs_that_do_not_replace_the_module_are_refused(function: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        frame_of(Scaled(), function)


def test_nodes_are_recorded_under_their_names() -> None:
    module = Scaled()
    frame, graph = frame_of(module, extract)
    value = CustomRun(graph, frame, {"input": X}).run()
    torch.testing.assert_close(value, module.inner.weight.matmul(X.T).T * 3 + 1)
    assert frame.custom_graph is graph
    assert [(node.name, node.kind, str(node.spec)) for node in frame.nodes] == [
        ("input", "input", "Tensor(3, 2)"),
        ("shift", "input", "float(1.0)"),
        ("inner_weight", "parameter", "Tensor(2, 2)"),
        ("scale", "buffer", "Tensor()"),
        ("t", "op", "Tensor(2, 2)"),
        ("my_custom_name", "op", "Tensor(3, 2)"),
        ("mul", "op", "Tensor(3, 2)"),
        ("add", "op", "Tensor(3, 2)"),
    ]
    assert [node.target for node in frame.nodes if node.kind == "op"] == ["t", "my_custom_name", "mul", "add"]


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy])
def test_graph_module_is_the_graph(copied: Any) -> None:
    module = Scaled()
    frame, graph = frame_of(module, extract)
    expected = CustomRun(graph, frame, {"input": X}).run()
    root = copied(build_hierarchy(frame))
    assert isinstance(root, CompiledGraphModule)
    assert root.has_own_graph
    assert "my_custom_name = input_1 @ t" in root.code
    assert torch.equal(root(X), expected)
    torch.testing.assert_close(root(input=X, shift=2.0), expected + 1)
    assert root.frame.custom_graph is root.graph


def test_patches_on_custom_graphs_serve_other_batch_sizes() -> None:
    module = Scaled()
    pg = PatchableGraph(module, ExtractionOptions(custom_extraction_functions={Scaled: extract}), X)
    with pg.patch({"my_custom_name": ZeroPatch()}):
        assert torch.equal(pg(torch.ones(5, 2)), torch.ones(5, 2))


class Keywords(nn.Module):
    """A child and a parameter whose names are keywords, and a child that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"in": nn.Linear(2, 2)})
        self.linear = nn.Linear(2, 2)
        self.register_parameter("lambda", nn.Parameter(torch.tensor([2.0, 3.0])))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(self.parts["in"](x))) * self.get_parameter("lambda")


def extract_keywords(module: nn.Module) -> fx.Graph:
    graph = fx.Graph()
    value = graph.placeholder("x")
    for target in ("parts.in", "linear", "linear"):
        value = graph.call_module(target, (value,))
    graph.output((graph.call_function(operator.mul, (value, graph.get_attr("lambda"))),))
    return graph


@pytest.mark.parametrize("run", [lambda pg: pg(X), lambda pg: pg._graph_module(X)], ids=["pg", "graph modules"])
def test_names_that_are_keywords_and_repeated_calls(run: Any) -> None:
    module = Keywords()
    calls: list[str] = []
    module.linear.register_forward_hook(lambda *_: calls.append("hook"))
    pg = PatchableGraph(module, ExtractionOptions(custom_extraction_functions={Keywords: extract_keywords}), X)
    expected = module(X)
    calls.clear()
    assert torch.equal(run(pg), expected)
    assert calls == ["hook", "hook"]
    with pg.patch({"linear_1.output": ZeroPatch(), "lambda_1": AddPatch(value=1.0)}):
        assert torch.equal(pg(X), torch.zeros(3, 2))
    with pg.patch({"lambda_1": ZeroPatch(slice=0)}):
        assert torch.equal(pg(X), expected * torch.tensor([0.0, 1.0]))
