"""What the generated code looks like, and that it runs the recorded calls."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.graphs import CompiledGraphModule
from graphpatch_notebook.graphs.build import records
from graphpatch_notebook.options import ExtractionOptions
from tests.frames import TupleOutputModule
from tests.graphs.models import graph_module
from tests.zoo.submodules import Runs


def code_of(function: Any, x: Tensor | None = None) -> list[str]:
    """The lines of the graph between the signature and the output."""
    module = graph_module(Runs(function), torch.ones(2, 2) if x is None else x)
    assert isinstance(module, CompiledGraphModule)
    return [line.strip().split(";  ")[0] for line in module.code.split("\n")[1:-1]]


def test_code_is_that_of_the_documentation() -> None:
    root = graph_module(TupleOutputModule(), torch.ones(3, 2))
    assert root.code == (
        "def forward(self, x : torch.Tensor):\n"
        '    linear_0 = getattr(self.linear, "0")(x)\n'
        "    add = x + 1;  x = None\n"
        '    linear_1 = getattr(self.linear, "1")(add);  add = None\n'
        "    return (linear_0, linear_1)"
    )
    assert root.linear[1].code == (
        "def forward(self, input : torch.Tensor):\n"
        "    input_1 = input\n"
        "    weight = self.weight\n"
        "    bias = self.bias\n"
        "    linear = torch._C._nn.linear(input_1, weight, bias);  input_1 = weight = bias = None\n"
        "    return linear"
    )


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (lambda x: x + 1, "add = x + 1"),
        (lambda x: 1 - x, "rsub = 1 - x"),
        (lambda x: 2 / x, "rdiv = 2 / x"),
        (lambda x: 2**x, "rpow = 2 ** x"),
        (lambda x: x**2, "pow_1 = x ** 2"),
        (lambda x: -x @ x.T, "neg = -x"),
        (lambda x: x[:, None, 0], "getitem = x[(slice(None, None, None), None, 0)]"),
        (lambda x: x.view(-1), "view = x.view(-1)"),
        (lambda x: x.T, "T = x.T"),
        (lambda x: torch.add(x, 1, alpha=2), "add = torch.add(x, 1, alpha = 2)"),
        (lambda x: x.add(1, alpha=2), "add = x.add(1, alpha = 2)"),
        (lambda x: F.gelu(x), "gelu = torch._C._nn.gelu(x)"),
        (lambda x: torch.ops.aten.relu(x), "relu = torch.ops.aten.relu(x)"),
        (lambda x: torch.ops.aten.relu.default(x), "relu = torch.ops.aten.relu.default(x)"),
        (lambda x: x.to(torch.float64), "to = x.to(torch.float64)"),
        (lambda x: x.clone().mul_(2), "mul = clone.mul_(2)"),
        (lambda x: x * float("inf"), "mul = x * inf"),
        (lambda x: x.new_zeros(x.shape[0], 3), "new_zeros = x.new_zeros(size_shape_sub_0, 3)"),
    ],
)
def test_ops_are_written_as_people_write_them(function: Any, line: str) -> None:
    assert line in code_of(function)


_SENTINEL = object()


class Signatures(nn.Module):
    def forward(
        self, x: Tensor, /, y: Tensor, *rest: Any, flag: bool = False, act: Any = _SENTINEL, **more: Any
    ) -> Any:
        return x + y * 2 + (rest[0] if flag else 0) + more.get("z", 0)


class KeywordsOnly(nn.Module):
    def forward(this, self: Tensor, *, y: Tensor) -> Tensor:
        return self - y


def test_signatures_are_kept() -> None:
    x, y = torch.rand(2), torch.rand(2)
    root = graph_module(Signatures(), x, y, x, flag=True, z=y)
    assert root.code.startswith(
        "def forward(self, x : torch.Tensor, /, y : torch.Tensor, *rest, flag = False, act = _default_act, **more):"
    )
    assert torch.equal(root.run_graph((x, y, x), {"flag": True, "z": y}), x + y * 2 + x + y)
    assert inspect.signature(root._code().function).parameters["act"].default is _SENTINEL
    keywords = graph_module(KeywordsOnly(), x, y=y)
    assert keywords.code.startswith("def forward(this, self : torch.Tensor, *, y : torch.Tensor):")
    assert torch.equal(keywords.run_graph((x,), {"y": y}), x - y)
    with pytest.raises(TypeError, match="positional argument"):
        keywords.run_graph((x, y), {})


class Shadows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("class", nn.Linear(2, 2))
        self.graph = nn.Linear(2, 2)
        self.code = nn.Parameter(torch.ones(2))
        self.reason = nn.Parameter(torch.ones(2))

    def forward(self, input: Tensor, output: Tensor) -> Tensor:
        return self.graph(getattr(self, "class")(input)) * self.code + output - self.reason


def test_names_of_ours_and_of_python_are_escaped() -> None:
    x = torch.rand(3, 2)
    module = Shadows()
    root = graph_module(module, x, x)
    assert torch.equal(root.run_graph((x, x), {}), module(x, x))
    assert set(records(root.graph)) == {node.name for node in root.frame.nodes}
    assert records(root.graph)["input"].name == "input_1"


def test_opaque_frames_have_no_graph() -> None:
    root = graph_module(nn.Linear(2, 2), torch.ones(2), options=ExtractionOptions(skip_compilation=True))
    assert root.reason == "the options say to skip it"
    from graphpatch_notebook.graphs.build import build

    with pytest.raises(GraphError, match=r"the root has no graph \(Linear\): the options say to skip it"):
        build(root.frame, root)


def test_tracebacks_show_generated_lines() -> None:
    root = graph_module(nn.Linear(2, 2), torch.ones(3, 2))
    with pytest.raises(RuntimeError) as raised:
        root.run_graph((torch.ones(3, 5),), {})
    assert "linear = torch._C._nn.linear(input_1, weight, bias)" in "".join(traceback.format_tb(raised.tb))


def test_graph_is_well_formed() -> None:
    for module in graph_module(TupleOutputModule(), torch.ones(3, 2)).modules():
        if isinstance(module, CompiledGraphModule):
            module.graph.lint()


def test_readable_code_has_shapes_lines_and_the_graphs_below(capsys: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    root: Any = PatchableGraph(model, torch.ones(4, 2))._graph_module
    text = root.print_readable()
    assert capsys.readouterr().out == f"{text}\n"
    assert text.startswith("class Sequential(torch.nn.Module):\n    def forward(self, input")
    inner = text.split("class sub_0(torch.nn.Module):\n")[1]
    for part in ('weight: "f32[3, 2]" = self.weight', 'linear: "f32[4, 3]" = ', "code: return F.linear("):
        assert part in inner
    assert root.get_submodule("1").print_readable(print_output=False).startswith("class sub_1(torch.nn.Module):")
