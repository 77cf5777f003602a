"""Graphs that replace their modules (loaded, exported, edited, custom) have the components of the model."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from torch import fx, nn

from graphpatch_notebook import ExtractionOptions, PatchableGraph, UnknownPathError, ZeroPatch
from tests.components.families import captured_model
from tests.components.sums import wrong_sums
from tests.zoo.submodules import Submodules, copies

NAMES = ["llama", "mixtral", "bert"]
CHOSEN = {("llama", "exported"), ("mixtral", "loaded"), ("bert", "loaded")}


@functools.cache
def without_cache(name):
    pg, given = captured_model(name)
    kwargs = {} if name == "bert" else {"use_cache": False}
    return PatchableGraph(pg._module, given, **kwargs), given, kwargs


@functools.cache
def other_graph(name, kind, folder):
    pg, given, kwargs = without_cache(name)
    if kind == "exported":
        return PatchableGraph.from_exported(torch.export.export(pg._module, (given,), kwargs))
    file = folder / name
    pg.save(file)
    return PatchableGraph.load(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("graphs")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if (name, kind) in CHOSEN else [pytest.mark.exhaustive])
        for name in NAMES
        for kind in ("loaded", "exported")
    ],
)
def test_a_graph_has_the_components_of_its_model(name, kind, folder):
    pg, given, kwargs = without_cache(name)
    other = other_graph(name, kind, folder)
    components = other.components
    lacks = {each for each in pg.components if each not in components}
    assert {each.split("].")[1] for each in lacks} == {"attn.scores", "attn.pattern"}
    assert all((components[each].shape, components[each].axes) == (pg.components[each].shape, pg.components[each].axes)
               for each in components)  # fmt: skip
    assert wrong_sums(other, given, **kwargs) == {}
    expected, found = (graph.record(components, given, **kwargs) for graph in (pg, other))
    for each in components:
        torch.testing.assert_close(found[each], expected[each])
    with pytest.raises(UnknownPathError, match=r"layers\[0\]\.attn\.pattern"):
        other.patch({"layers[0].attn.pattern": ZeroPatch()}).__enter__()


def test_weights_are_those_of_the_model(folder):
    pg, _, _ = without_cache("llama")
    other = other_graph("llama", "loaded", folder)
    for name in ("W_Q", "W_K", "W_O", "W_in", "W_gate"):
        torch.testing.assert_close(getattr(other.weights, name)[:], getattr(pg.weights, name)[:], rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.unstored frame:graphpatch_notebook.GraphPatchWarning")
def test_what_is_not_stored_is_the_reason(folder):
    pg, given = captured_model("gpt2")  # with a cache, which files cannot hold
    pg.save(folder / "cache")
    loaded = PatchableGraph.load(folder / "cache", model=pg._module)
    for name in ("layers[1].mlp_out", "@embed"):
        with pytest.raises(UnknownPathError, match=f"{re.escape(name)}.*DynamicCache"):
            loaded.patch({name: ZeroPatch()}).__enter__()


class Block(Submodules, mlp=[(6, 12), nn.ReLU, (12, 6)]):
    def forward(self, x):
        return x + self.mlp(x)


class Two(Submodules, blocks=copies(Block, 2)):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def test_components_of_an_edited_graph_are_those_that_it_computes():
    pg = PatchableGraph(blocks(), torch.ones(1, 3, 6))
    assert pg.components["layers[1].mlp.post"].path == "sub_1.mlp.sub_1.output"
    graph_module = pg._graph_module.get_submodule("1.mlp")
    call = next(node for node in graph_module.graph.nodes if node.op == "call_module" and node.name.endswith("1"))
    with graph_module.graph.inserting_after(call):
        doubled = graph_module.graph.call_function(torch.mul, (call, 2.0))
    call.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    graph_module.recompile()
    with pytest.raises(UnknownPathError):  # of the new value, nothing is known
        pg.components["layers[1].mlp.post"]
    assert pg.components["layers[0].mlp.post"].path == "sub_0.mlp.sub_1.output"
    assert wrong_sums(pg, torch.randn(1, 3, 6)) == {}
    for node in pg._graph_module.get_submodule("0").graph.nodes:
        if node.op == "call_function":
            node.target = torch.sub  # the layer no longer adds
    pg._graph_module.get_submodule("0").recompile()
    with pytest.raises(UnknownPathError, match=r"layers\[0\].mlp_out"):
        pg.patch({"layers[0].mlp_out": ZeroPatch()}).__enter__()


def test_components_of_a_custom_graph():
    graph = fx.Graph()
    given = graph.placeholder("x")
    graph.output((graph.call_function(torch.add, (given, graph.call_module("mlp", (given,)))),))
    options = ExtractionOptions(custom_extraction_functions={Block: lambda module: graph})
    pg = PatchableGraph(nn.Sequential(Block()), options, torch.ones(1, 3, 6))
    assert {"layers[0].mlp.post", "layers[0].resid_post"} <= set(pg.components)


def test_what_an_opaque_module_adds_is_not_guessed():
    options = ExtractionOptions(classes_to_skip_compiling={nn.Sequential})
    pg = PatchableGraph(Two(), options, torch.ones(1, 3, 6))
    assert set(pg.components) == {f"layers[{layer}].resid_{end}" for layer in range(2) for end in ("pre", "post")}
    with pytest.raises(UnknownPathError, match=r"layers\[0\]\.mlp_out.*Sequential"):
        pg.patch({"layers[0].mlp_out": ZeroPatch()}).__enter__()
