"""A `PatchableGraph` is used like the model that it was made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from graphpatch_notebook import PatchableGraph, ProbePatch, ZeroPatch
from tests.zoo import case_by_name


@pytest.fixture
def pg() -> PatchableGraph:
    case = case_by_name("gpt2-eager")
    call = case.example()
    return PatchableGraph(case.build(), *call.args, **call.kwargs)


def test_state_is_that_of_the_model(pg: PatchableGraph) -> None:
    model = pg._module
    assert list(pg.state_dict()) == list(model.state_dict())
    assert [id(p) for p in pg.parameters()] == [id(p) for p in model.parameters()]
    assert dict(pg.named_modules()).keys() == dict(model.named_modules()).keys()
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    pg.load_state_dict(state)
    assert model.transformer.h[0].mlp.c_fc.weight.abs().sum() == 0


def test_a_replaced_parameter_is_seen_everywhere(pg: PatchableGraph) -> None:
    new = nn.Parameter(torch.zeros_like(pg.transformer.h[0].mlp.c_fc.bias))
    pg.transformer.h[0].mlp.c_fc.bias = new
    assert pg._graph_module.transformer.h[0].mlp.c_fc.bias is new
    probe = ProbePatch()
    with pg.patch({"transformer.h_0.mlp.c_fc.bias": probe}):
        pg(torch.ones(1, 3, dtype=torch.long))
    assert probe.activation is new


def test_modes_dtypes_and_chaining(pg: PatchableGraph) -> None:
    model = pg._module
    assert pg.train() is pg
    assert model.training
    assert pg.training
    assert pg.eval() is pg
    assert not model.training
    assert pg.to(torch.float64) is pg
    assert model.lm_head.weight.dtype == torch.float64
    assert pg.requires_grad_(False) is pg
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_attributes_and_methods_of_the_model(pg: PatchableGraph) -> None:
    assert pg.config is pg._module.config
    assert pg.transformer.h[0] is pg._module.transformer.h[0]
    assert isinstance(pg, nn.Module)
    assert {"generate", "config", "transformer", "patch", "graph"} <= set(dir(pg))
    pg.marker = 3
    assert pg._module.marker == 3
    del pg.marker
    assert not hasattr(pg._module, "marker")
    with pytest.raises(AttributeError, match="cannot be set"):
        pg.graph = 3
    with pytest.raises(AttributeError, match="no_such_thing"):
        pg.no_such_thing  # noqa: B018


def test_methods_of_other_tools_are_answered_with_what_they_are_here(pg: PatchableGraph) -> None:
    with pytest.raises(AttributeError, match=r"'run_with_cache' of another tool, write pg.record\(pg.comp"):
        pg.run_with_cache(1)
    with pytest.raises(AttributeError, match=r"write with pg.patch\(\{path: patch\}\): pg\(\*inputs\)$"):
        pg.trace(1)
    with pytest.raises(AttributeError, match=r"'W_U' of another tool, write pg.weights.W_U$"):
        _ = pg.W_U
    assert not hasattr(pg, "run_with_hooks")
    with pytest.raises(AttributeError, match="no attribute 'other'$"):
        _ = pg.other
    model = nn.Linear(2, 2)
    model.hooks = "its own"  # type: ignore[assignment]
    assert PatchableGraph(model, torch.ones(1, 2)).hooks == "its own"


def test_hooks_on_the_graph_itself(pg: PatchableGraph) -> None:
    seen = []
    pg.register_forward_hook(lambda module, args, output: seen.append(module))
    pg(torch.ones(1, 3, dtype=torch.long))
    assert seen == [pg]


def test_deepcopy_is_independent(pg: PatchableGraph) -> None:
    twin = copy.deepcopy(pg)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(twin(ids).logits, pg(ids).logits)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert twin(ids).logits.abs().sum() == 0
    assert pg(ids).logits.abs().sum() > 0
    with twin.patch({"transformer.wte.output": ZeroPatch()}):
        twin(ids)
    assert list(twin.nodes) == list(pg.nodes)


def test_copies_of_graphs_with_torchscript_modules_are_made_at_any_time() -> None:
    """Also once there are graph modules, which have the registries of the modules: those of TorchScript resist."""
    case = case_by_name("awkward-scripted-child")
    model, call = case.build(), case.example()
    pg = PatchableGraph(model, *call.args, **call.kwargs)
    pg.verify(*call.args, **call.kwargs)
    twin = copy.deepcopy(pg)
    assert torch.equal(call.run(twin), call.run(model))
    with torch.no_grad():
        next(twin.traced.parameters()).zero_()
    assert not torch.equal(call.run(twin), call.run(model))
    with twin.patch({"mul": ZeroPatch()}):
        assert not call.run(twin).any()
    assert call.run(pg).any()
