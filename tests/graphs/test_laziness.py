"""Code is generated when somebody needs it, and never runs when it is stale."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpatch_notebook.graphs import (
    CompiledGraphModule,
    GraphModule,
    OpaqueGraphModule,
    UnusedModule,
    code_generations,
)
from graphpatch_notebook.graphs.build import records
from graphpatch_notebook.graphs.verification import verify
from graphpatch_notebook.options import ExtractionOptions
from tests.frames import TupleOutputModule
from tests.graphs.models import Layers, graph_module, settle
from tests.zoo.submodules import Submodules

X = torch.linspace(-1, 1, 6).reshape(3, 2)


def generated(action: Callable[[], Any]) -> int:
    before = code_generations()
    action()
    return code_generations() - before


def test_capture_generates_no_code() -> None:
    assert generated(lambda: repr(graph_module(Layers(), torch.ones(2, 4)))) == 0


def test_calls_run_the_module_and_comparing_generates_once() -> None:
    model = TupleOutputModule()
    root = graph_module(model, X)
    assert generated(lambda: settle(root, X)) == 0
    assert generated(lambda: verify(root, (X,), {})) == 3
    assert generated(lambda: verify(root, (X + 1,), {})) == 0
    model.register_forward_hook(lambda module, args, output: output[0])
    assert torch.equal(root(X), model(X))


def edited(root: Any) -> Any:
    """The graph of `root` now adds 10 where it added 1."""
    add = records(root.graph)["add"]
    add.args = (add.args[0], 10)
    return root


@pytest.mark.parametrize(
    "run",
    [
        lambda root: root(X),
        lambda root: root.forward(X),
        lambda root: torch.jit.trace(root, (X,))(X),
        lambda root: torch.compile(root, backend="eager")(X),
        lambda root: copy.deepcopy(root)(X),
    ],
    ids=["call", "forward", "jit.trace", "compile", "copy"],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_edited_graphs_run_the_edit(run: Callable[[Any], Any]) -> None:
    model = TupleOutputModule()
    root = graph_module(model, X)
    settle(root, X)
    edited(root)
    assert generated(root.recompile) == 0
    result = run(root)
    assert torch.equal(result[1], model.linear(X + 10))
    assert torch.equal(result[0], model.linear(X))
    assert "x + 10" in root.code
    assert root.has_own_graph


def test_edits_run_below_modules_that_run_live() -> None:
    class Branches(Submodules, twice=TupleOutputModule):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.twice(x)
            return first if first.sum() > 1e9 else second

    model = Branches()
    root = graph_module(model, X)
    assert root.doubts
    edited(root.twice).recompile()
    assert torch.equal(root(X), model.twice.linear(X + 10))
    assert torch.equal(torch.compile(root, backend="eager")(X), model.twice.linear(X + 10))
    options = ExtractionOptions(classes_to_skip_compiling={Branches})
    opaque = graph_module(model, X, options=options)
    assert isinstance(opaque, OpaqueGraphModule)
    edited(opaque.twice).recompile()
    assert torch.equal(opaque(X), model.twice.linear(X + 10))


def test_equal_graphs_share_one_code_object() -> None:
    root = graph_module(Layers(), torch.ones(2, 4))
    first, second = root.h[0], root.h[2]
    assert first.code == second.code
    assert first._code().function.__code__ is second._code().function.__code__
    assert first.code != root.code


def test_hierarchy_mirrors_the_model() -> None:
    model = Layers()
    root = graph_module(model, torch.ones(2, 4))
    assert type(root.h) is nn.ModuleList
    assert type(root.norms) is nn.ModuleDict
    assert root.h[1].linear.path == "h_1.linear"
    assert root.plain_0.path == "plain_0"
    assert isinstance(root.dropout, UnusedModule)
    assert root.h[1].linear.weight is model.h[1].linear.weight
    assert root.factor == 1.0
    assert isinstance(root, CompiledGraphModule)
    assert {name for name, _ in root.named_parameters()} == {name for name, _ in model.named_parameters()}
    assert all(isinstance(root.get_submodule(f"h.{i}"), GraphModule) for i in range(3))


def test_state_is_shared_live() -> None:
    model = Layers()
    root = graph_module(model, torch.ones(2, 4))
    settle(root, torch.ones(2, 4))
    model.h[0].linear.weight = nn.Parameter(torch.zeros(4, 4))
    assert root.h[0].linear.weight is model.h[0].linear.weight
    assert torch.equal(root(torch.ones(2, 4)), model(torch.ones(2, 4)))
    root.train()
    assert model.training
    assert model.dropout.training
    model.eval()
    assert not root.h[0].training
    root.double()
    model.plain[0].double()  # no module of it, for torch
    assert model.h[0].linear.weight.dtype == torch.float64
    x = torch.ones(2, 4, dtype=torch.float64)
    assert torch.equal(root(x), model(x))
    assert root.state_dict().keys() == model.state_dict().keys()
    root.load_state_dict(Layers().state_dict())
    root.factor = 3.0
    assert model.factor == 3.0
    assert torch.equal(root(x), model(x))


def test_copies_refer_to_copies() -> None:
    model = Layers()
    root = graph_module(model, torch.ones(2, 4))
    settle(root, torch.ones(2, 4))
    both = copy.deepcopy({"model": model, "root": root})
    copied = both["root"]
    assert copied.h[0].linear.weight is not model.h[0].linear.weight
    assert copied.h[0].frame is not root.h[0].frame
    assert copied.h[0].frame.parent is copied.frame
    assert copied.frame.names["h_0"].frame is copied.h[0].frame
    settle(copied, torch.ones(2, 4))
    assert torch.equal(copied(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert both["root"].h[0].linear.weight is both["model"].h[0].linear.weight
    assert both["root"].frame.module is both["model"]
    assert both["root"].h[0].linear.frame.nodes[3].site is root.h[0].linear.frame.nodes[3].site
    part = copy.deepcopy(root.h[0])
    assert torch.equal(part(torch.ones(2, 4)), model.h[0](torch.ones(2, 4)))
    assert part.path == "h_0"
