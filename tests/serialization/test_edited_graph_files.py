"""Code of the model never runs in place of a graph that was edited, or is custom: files hold these, or nothing."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from graphpatch_notebook import (
    AddPatch,
    ExtractionOptions,
    PatchableGraph,
    ProbePatch,
    SerializationError,
    StoredFormError,
    UnstoredFrameError,
    UnstoredFrameWarning,
    ZeroPatch,
)
from graphpatch_notebook.patchable_graph import captured
from tests.serialization.files import Mlp, Numpy, x

pytestmark = pytest.mark.filterwarnings("ignore:options that hold functions")
Edit = Callable[[Any, nn.Module], None]


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.opaque = Numpy()

    def forward(self, x: Tensor) -> Tensor:
        return self.opaque(x) + 1


def times_two(graph_module: Any, module: nn.Module) -> None:
    """Doubles what every linear layer gives."""
    if isinstance(module, nn.Linear):
        (output,) = (node for node in graph_module.graph.nodes if node.op == "output")
        with graph_module.graph.inserting_before(output):
            output.args = (graph_module.graph.call_function(operator.mul, (output.args[0], 2)),)
        graph_module.recompile()


def custom(module: nn.Module) -> fx.Graph:
    graph = fx.Graph()
    graph.output((graph.call_function(operator.mul, (graph.placeholder("input"), 2)),))
    return graph


def edited(model: nn.Module, edit: Edit, *inputs: Tensor) -> PatchableGraph:
    return PatchableGraph(model, ExtractionOptions(postprocessing_function=edit), *(inputs or (x(),)))


@pytest.mark.parametrize(
    "options",
    [
        ExtractionOptions(postprocessing_function=times_two),
        ExtractionOptions(custom_extraction_functions={nn.Linear: custom}),
    ],
)
def test_inside_frames_that_are_not_stored(tmp_path: Path, options: ExtractionOptions) -> None:
    pg = PatchableGraph(Around(), options, x())
    match = (
        r"the graph of 'opaque.inner' \(Linear\) is its module, as it was edited or is a custom one, and cannot be "
        r"stored: it is inside 'opaque', which is not stored \(reads a value .*numpy.*nothing was written; .*without "
    )
    with pytest.raises(SerializationError, match=match):
        pg.save(tmp_path / "graph.safetensors")
    assert not list(tmp_path.iterdir())


def test_edits_that_files_cannot_hold(tmp_path: Path) -> None:
    def edit(graph_module: Any, module: nn.Module) -> None:
        if isinstance(module, Mlp):
            (relu,) = (node for node in graph_module.graph.nodes if node.target is torch.relu)
            relu.target = lambda tensor: tensor * 3
            graph_module.recompile()

    pg = edited(Mlp(), edit)
    with pytest.raises(SerializationError, match=r"the graph of '<root>' \(Mlp\) .* cannot be stored: .*lambda"):
        pg.save(tmp_path / "graph.safetensors")
    assert not list(tmp_path.iterdir())


def test_calls_of_another_form_do_not_run_the_model(tmp_path: Path) -> None:
    model = Mlp()
    pg = edited(model, times_two)
    pg.save(tmp_path / "graph.safetensors")
    loaded = PatchableGraph.load(tmp_path / "graph.safetensors", model=model)
    loaded.save(tmp_path / "again.safetensors")
    again = PatchableGraph.load(tmp_path / "again.safetensors", model=model)
    for graph in (loaded, again, copy.deepcopy(again)):
        assert torch.equal(graph(x()), pg(x()))
        assert not torch.equal(graph(x()), model(x()))
        with pytest.raises(StoredFormError, match="the model cannot run such calls instead, as graphs were edited"):
            graph(x(), 2.0)


def test_edits_of_loaded_graphs(tmp_path: Path) -> None:
    model = Mlp()
    PatchableGraph(model, x()).save(tmp_path / "graph.safetensors")
    loaded = PatchableGraph.load(tmp_path / "graph.safetensors", model=model)
    assert torch.equal(loaded(x(), 2.0), model(x(), 2.0))
    (relu,) = (node for node in loaded._graph_module.graph.nodes if node.target is torch.relu)
    relu.target = torch.tanh
    loaded._graph_module.recompile()
    with pytest.raises(StoredFormError, match="the model cannot run such calls instead"):
        loaded(x(), 2.0)
    loaded.save(tmp_path / "edited.safetensors")
    again = PatchableGraph.load(tmp_path / "edited.safetensors", model=model)
    assert torch.equal(again(x()), loaded(x()))
    with pytest.raises(StoredFormError, match="the model cannot run such calls instead"):
        again(x(), 2.0)


@pytest.mark.parametrize("is_registered", [True, False])
def test_tensors_on_graph_modules(tmp_path: Path, is_registered: bool) -> None:
    vector = torch.linspace(-1, 1, 2)

    def steer(graph_module: Any, module: nn.Module) -> None:
        if module is not model:
            return
        if is_registered:
            graph_module.register_buffer("vec", vector)
        else:
            graph_module.vec = vector
        graph = graph_module.graph
        (output,) = (node for node in graph.nodes if node.op == "output")
        with graph.inserting_before(output):
            output.args = (graph.call_function(torch.add, (output.args[0], graph.get_attr("vec"))),)
        graph_module.recompile()

    model = Mlp()
    pg = edited(model, steer)
    pg.save(tmp_path / "graph.safetensors")
    for given in (None, model):
        loaded = PatchableGraph.load(tmp_path / "graph.safetensors", model=given)
        assert torch.equal(loaded(x()), model(x()) + vector)
        with pg.patch({"hidden": AddPatch(value=1.0)}), loaded.patch({"hidden": AddPatch(value=1.0)}):
            assert torch.equal(loaded(x()), pg(x()))
        loaded.save(tmp_path / "again.safetensors")
        assert torch.equal(PatchableGraph.load(tmp_path / "again.safetensors")(x()), pg(x()))
    assert not hasattr(model, "vec")


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x * 2, x * 3)


@pytest.mark.parametrize("asked", ["scaled_dot_product_attention", functional.scaled_dot_product_attention])
def test_opened_functions(tmp_path: Path, asked: Any) -> None:
    model = nn.Sequential(Attention())
    pg = PatchableGraph(model, ExtractionOptions(decompose=[asked]), x(1, 2, 3, 4))
    with pytest.warns(UnstoredFrameWarning, match="'sub_0': it holds the steps of scaled_dot_product_attention"):
        pg.save(tmp_path / "graph.safetensors")
    loaded = PatchableGraph.load(tmp_path / "graph.safetensors", model=model)
    assert captured(loaded).options.decompose == ("scaled_dot_product_attention",)
    assert torch.equal(loaded(x(1, 2, 3, 4)), model(x(1, 2, 3, 4)))


def test_edits_of_opened_functions(tmp_path: Path) -> None:
    def sharpen(graph_module: Any, module: nn.Module) -> None:
        if isinstance(module, Attention):
            graph = graph_module.graph
            (softmax,) = (n for n in graph.nodes if "softmax" in str(n.target))
            with graph.inserting_before(softmax):
                softmax.args = (graph.call_function(operator.mul, (softmax.args[0], 5.0)), *softmax.args[1:])
            graph_module.recompile()

    options = ExtractionOptions(decompose=["scaled_dot_product_attention"], postprocessing_function=sharpen)
    inputs = x(1, 2, 3, 4)
    pg = PatchableGraph(nn.Sequential(Attention()), options, inputs)
    pg.save(tmp_path / "graph.safetensors")
    loaded = PatchableGraph.load(tmp_path / "graph.safetensors")
    assert torch.equal(loaded(inputs), pg(inputs))
    expected = functional.scaled_dot_product_attention(inputs, inputs * 2, inputs * 3, scale=2.5)
    assert torch.allclose(loaded(inputs), expected, atol=1e-5)
    longer = x(1, 2, 5, 4)
    expected = functional.scaled_dot_product_attention(longer, longer * 2, longer * 3, scale=2.5)
    assert torch.allclose(pg(longer), expected, atol=1e-5)


def test_loaded_models_of_transformers(tmp_path: Path) -> None:
    config = LlamaConfig(
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, hidden_size=16, intermediate_size=16,
        vocab_size=50,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(6)[None]
    PatchableGraph(model, ids, use_cache=False).save(tmp_path / "graph.safetensors")
    for given in (None, model):
        loaded = PatchableGraph.load(tmp_path / "graph.safetensors", model=given, allow=["transformers"])
        assert loaded.model.embed_tokens.weight.shape == (50, 16)
        assert set(loaded.verify(ids, use_cache=False).counts()) == {"own graph"}
        expected = model(ids, use_cache=False).logits
        assert torch.equal(loaded.interpreter().run(ids, use_cache=False).logits, expected)
        assert torch.equal(loaded(ids, use_cache=False).logits, expected)


def test_interpreted_graphs_whose_modules_have_odd_names(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(4, 4)]
            self.add_module("a/b", nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self._modules["a/b"](self.layers[0](self._modules["a/b"](x)))

    model = Odd()
    PatchableGraph(model, x()).save(tmp_path / "graph.safetensors")
    loaded = PatchableGraph.load(tmp_path / "graph.safetensors")
    seen: list[str] = []
    result = loaded.interpreter(lambda path, value: seen.append(path)).run(x())
    assert torch.equal(result, model(x()))
    assert sum(path.endswith(".output") for path in seen) == 3
    assert loaded.verify(x()).counts() == {"own graph": 4}


def test_graphs_below_an_edited_root_are_not_compared() -> None:
    def edit(graph_module: Any, module: nn.Module) -> None:
        if isinstance(module, Mlp):
            graph_module.recompile()

    report = edited(Mlp(), edit).verify(x())
    assert report.counts() == {"own graph": 1, "not reached": 2}
    assert "a graph that replaces its module calls it" in str(report)


def test_messages_do_not_ask_for_a_model_that_was_given(tmp_path: Path) -> None:
    model = Mlp()
    PatchableGraph(model, x()).save(tmp_path / "graph.safetensors")
    loaded = PatchableGraph.load(tmp_path / "graph.safetensors", model=model)
    errors = []
    with loaded.patch({"hidden": ZeroPatch()}), pytest.raises(StoredFormError, match="without patches, the model") as e:
        loaded(x(), 2.0)
    errors.append(e.value)
    with pytest.raises(StoredFormError, match="without patches, the model that load was given") as e:
        loaded._graph_module(x(), 2.0)
    errors.append(e.value)
    with pytest.raises(UnstoredFrameError, match="its graph runs in a call of the PatchableGraph only") as e2:
        loaded.up(x())
    errors.append(e2.value)
    assert not any("model=" in str(error) for error in errors)
    with loaded.patch({"hidden": ProbePatch()}):
        assert torch.equal(loaded(x()), model(x()))
    with pytest.raises(StoredFormError, match=r"load\(file, model=model\)"):
        PatchableGraph.load(tmp_path / "graph.safetensors")(x(), 2.0)
