"""graphpatch's own guide: its examples run here as printed there (white space aside).

Where its two pages differ, the newer wording wins: repeated calls are `linear_0`, `linear_1`, and trees name the class
of the graph module.
"""

from __future__ import annotations

import re

import pytest
import torch
from graphpatch import ExtractionOptions, PatchableGraph, ZeroPatch
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn import Linear, Module


def folded(text: object) -> list[str]:
    """The lines of a text without white space, which the guide's web pages changed."""
    return [re.sub(r"\s+", " ", line).strip(" │") for line in str(text).splitlines() if line.strip()]


class TupleOutputModule(Module):
    _shape = (2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.linear = Linear(*TupleOutputModule._shape)

    def forward(self, x):  # as the guide has it
        return (self.linear(x), self.linear(x + 1))


@pytest.fixture
def tuple_pg() -> PatchableGraph:
    return PatchableGraph(TupleOutputModule(), torch.ones(3, 2))


def test_repr_of_the_graph_modules(tuple_pg: PatchableGraph) -> None:
    expected = """
    PatchableGraph(
        (_graph_module): CompiledGraphModule(
            (linear): MultiplyInvokedModule(
                (0-1): 2 x CompiledGraphModule()
            )
        )
    )
    """
    assert folded(repr(tuple_pg)) == folded(expected)


def test_code_of_the_root(tuple_pg: PatchableGraph) -> None:
    expected = """
def forward(self, x : torch.Tensor):
    linear_0 = getattr(self.linear, "0")(x)
    add = x + 1;  x = None
    linear_1 = getattr(self.linear, "1")(add);  add = None
    return (linear_0, linear_1)
"""
    assert folded(tuple_pg.graph._code) == folded(expected)


class Opaque(Module):
    def forward(self, foo: Tensor) -> Tensor:
        return foo * 2


class Holder(Module):
    def __init__(self) -> None:
        super().__init__()
        self.bar = Opaque()

    def forward(self, x: Tensor) -> Tensor:
        return self.bar(x) + 1


def test_opaque_modules_in_the_hierarchy() -> None:
    pg = PatchableGraph(Holder(), ExtractionOptions(classes_to_skip_compiling={Opaque}), torch.ones(2))
    expected = """
    PatchableGraph(
        (_graph_module): CompiledGraphModule(
            (bar): OpaqueGraphModule()
        )
    )
    """
    assert folded(repr(pg)) == folded(expected)


def uncompilable_operation(foo: Tensor, bar: Tensor) -> Tensor:
    return torch.from_numpy(foo.numpy() * 2) + bar


class MyUncompilableModule(Module):
    def forward(self, foo: Tensor, bar: Tensor) -> Tensor:
        return uncompilable_operation(foo, bar)


def extract_my_module(module: Module) -> Graph:
    graph = Graph()

    # Note that placeholders must exactly match the names of the arguments to forward.
    foo = graph.placeholder("foo")
    bar = graph.placeholder("bar")
    operation = graph.call_function(uncompilable_operation, (foo, bar))
    # graphpatch will respect the names of any nodes in the graph, which can make subsequent
    # patching operations easier to parse.
    operation.name = "my_custom_name"

    # Note that the output must be wrapped in a single-element tuple.
    graph.output((operation,))
    return graph


def test_custom_extraction_function() -> None:
    foo, bar = torch.ones(2), torch.zeros(2)
    pg = PatchableGraph(
        MyUncompilableModule(),
        ExtractionOptions(custom_extraction_functions={MyUncompilableModule: extract_my_module}),
        foo,
        bar,
    )
    assert torch.equal(pg(foo, bar), torch.full((2,), 2.0))
    with pg.patch({"my_custom_name": [ZeroPatch()]}):
        assert torch.equal(pg(foo, bar), torch.zeros(2))
    assert isinstance(pg, nn.Module)
