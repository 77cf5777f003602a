"""Models with parts that `torch.compile` compiled: they load, and are patched, by running those parts as written."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import transformers
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    ExtractionOptions,
    PatchableGraph,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
)
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.patches.kinds import Patch
from tests.experiments.hooked import GPT2_OUTPUT
from tests.zoo import installed
from tests.zoo.submodules import Submodules

X = torch.linspace(-1, 1, 6).view(2, 3)
MASKED_BY_VMAP = installed.TRANSFORMERS < (5, 0)
NOT_WRITTEN = r"'transformer' .* uses an object .* that existed only while the model was captured"


class Inner(Submodules, linear=(3, 3)):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * 2


class Outer(Submodules, seed=0, inner=Inner, last=(3, 3)):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


def wrapped() -> nn.Module:
    model = Outer()
    model.inner = torch.compile(model.inner, backend="eager")
    return model


def in_place() -> nn.Module:
    model = Outer()
    model.inner.compile(backend="eager")
    return model


def whole() -> nn.Module:
    return torch.compile(Outer(), backend="eager")


@pytest.mark.parametrize("build", [wrapped, in_place, whole])
def test_compiled_parts_are_captured_and_patched(build: Callable[[], nn.Module]) -> None:
    model, plain = build(), Outer()
    expected = plain(X)
    pg = PatchableGraph(model, X)
    assert torch.equal(pg(X), expected)
    with pg.patch({path: CustomPatch(lambda value: value, requires_clone=False) for path in pg.nodes}, strict=True):
        assert torch.equal(pg(X), expected)
    relu = next(path for path in pg.nodes if path.endswith("relu"))
    with pg.patch({relu: ZeroPatch()}, strict=True):
        assert torch.equal(pg(X), plain.last(torch.zeros(2, 3)))
    assert torch.equal(pg(X), expected)


@torch.compile(backend="eager")
def scaled(x: Tensor) -> Tensor:
    y = x.cos()
    return y * 3


class Functions(nn.Module):
    """Functions that are compiled: by a decorator, as a method, as an attribute, at the first call, in each call."""

    compiled_later: Any = None

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.linear = way, nn.Linear(3, 3)
        self.attribute = torch.compile(self.work, backend="eager")

    def work(self, x: Tensor) -> Tensor:
        y = self.linear(x).cos()
        return y * 3

    @torch.compile(backend="eager")
    def method(self, x: Tensor) -> Tensor:
        y = self.linear(x).cos()
        return y * 3

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "decorator":
            return scaled(self.linear(x)) + 1
        if self.way == "first call":
            self.compiled_later = self.compiled_later or torch.compile(self.work, backend="eager")
            return self.compiled_later(x) + 1
        if self.way == "each call":
            return torch.compile(self.work, backend="eager")(x) + 1
        return (self.method(x) if self.way == "method" else self.attribute(x)) + 1


@pytest.mark.parametrize("way", ["decorator", "method", "attribute", "first call", "each call"])
def test_compiled_functions_are_captured_and_patched(way: str) -> None:
    model = Functions(way)
    pg, expected = PatchableGraph(model, X), model.work(X) + 1
    assert torch.equal(pg(X), expected)
    with pg.patch({path: CustomPatch(lambda value: value, requires_clone=False) for path in pg.nodes}, strict=True):
        assert torch.equal(pg(X), expected)
    with pg.patch({"y": ZeroPatch()}, strict=True):
        assert torch.equal(pg(X), torch.ones(2, 3))
    with pg.patch({"linear.output": ZeroPatch()}, strict=True):
        assert torch.equal(pg(X), torch.full((2, 3), 4.0))
    torch.testing.assert_close(pg(X), expected)


COMPILES_ITSELF = """
import sys
import torch
from graphpatch_notebook import CaptureError, PatchableGraph, ZeroPatch

class Model(torch.nn.Module):
    def forward(self, x):
        def work(x):
            y = x.cos()
            return y * 3
        return torch.compile(work, backend="eager")(x) + 1

assert "torch._dynamo" not in sys.modules
try:
    PatchableGraph(Model(), torch.ones(2))
except CaptureError:
    pg = PatchableGraph(Model(), torch.ones(2))
    with pg.patch({"y": ZeroPatch()}):
        print(pg(torch.ones(2)).tolist())
"""


def test_a_capture_that_is_the_first_to_compile_is_refused() -> None:
    found = subprocess.run([sys.executable, "-c", COMPILES_ITSELF], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[1.0, 1.0]"


# -- the hierarchy as plain fx modules ---------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls.add_(1)
        hidden = self.norm(x).mul_(2)
        hidden[:, 0] = 1
        once = self.linear(hidden)
        return self.linear(once) + self.calls, {"once": once}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(3, 3)
        self.head.weight = self.blocks[0].linear.weight

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        for block in self.blocks:
            x, extra = block(x)
        return {"logits": self.head(x) * scale, "once": extra["once"]}


def gpt2() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16, use_cache=False)
    config.bos_token_id = config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config).eval(), torch.randint(0, 32, (2, 5))


@pytest.fixture(scope="module")
def graph_of_gpt2() -> PatchableGraph:
    model, ids = gpt2()
    return PatchableGraph(model, ids)


def gpt2_patches() -> dict[str, Patch[Any]]:
    return {
        "transformer.h_0.mlp.act.mul_3": ZeroPatch(slice=(..., slice(0, 8))),
        f"transformer.h_0.{GPT2_OUTPUT}": AddPatch(value=torch.linspace(-1, 1, 16)),
        "transformer.h_1.attn.c_attn.weight": CustomPatch(lambda weight: weight * 2),
        "transformer.h_1.mlp.act.tanh": CustomPatch(lambda value: value.square(), slice=(..., slice(0, 8))),
        "transformer.h_1.attn.output|sub_0": ReplacePatch(value=0.5, slice=(0, 0)),
        "output|logits": AddPatch(value=1.0, slice=(..., 0)),
    }


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_patched_gpt2_compiles_as_one_graph(graph_of_gpt2: PatchableGraph, backend: str) -> None:
    pg, ids = graph_of_gpt2, gpt2()[1]
    patches, probe = gpt2_patches(), ProbePatch()
    torch._dynamo.reset()
    if MASKED_BY_VMAP:
        with pg.patch(patches), pytest.raises(GraphError, match=NOT_WRITTEN):
            pg.to_fx((ids,), allow_doubts=True)
        return
    with torch.no_grad():
        with pg.patch({**patches, "transformer.h_1.mlp.c_fc.output": probe}):
            expected, kept = pg(ids).logits, probe.activation
            compiled = torch.compile(pg.to_fx((ids,), allow_doubts=True), fullgraph=True, backend=backend)
        assert not torch.equal(expected, pg(ids).logits)
        found = compiled(ids).logits
        if backend == "inductor":
            torch.testing.assert_close(found, expected)
        else:
            assert torch.equal(found, expected)
            assert torch.equal(probe.activation, kept)
        # What a patch holds is looked up in each run.
        patches[f"transformer.h_0.{GPT2_OUTPUT}"].value = torch.ones(16)  # type: ignore[attr-defined]
        with pg.patch(patches):
            torch.testing.assert_close(compiled(ids).logits, pg(ids).logits)


def put_back(model: nn.Module, before: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(before.get_buffer(name))


def test_plain_modules_are_the_model_with_patches() -> None:
    model = Stack()
    pg = PatchableGraph(model, X)
    probe, record = ProbePatch(), RecordPatch()
    patches: dict[str, Any] = {
        "x": AddPatch(value=0.5),
        "blocks_0.norm.output": [probe, AddPatch(value=1.0)],
        "blocks_0.hidden": AddPatch(value=2.0, slice=(0,)),  # written in place
        "blocks_0.setitem": record,
        "blocks_0.linear_0.linear": ZeroPatch(slice=(0,)),
        "blocks_1.linear_1.output": AddPatch(value=3.0),
        "blocks_1.output|sub_1.once": ZeroPatch(),
        "blocks_1.calls": ReplacePatch(value=7.0),
        "head.weight": CustomPatch(lambda weight: weight.T),
        "output|logits": AddPatch(value=1.0),
    }
    patches = {path: patch for path, patch in patches.items() if path in pg.nodes}
    assert len(patches) >= 9
    before = copy.deepcopy(model)
    with pg.patch(patches, strict=True):
        plain = pg.to_fx((X,))
        assert record.activations == []
        assert probe.activation is None
        assert all(torch.equal(value, before.get_buffer(name)) for name, value in model.named_buffers())
        expected, state = pg(X), copy.deepcopy(model.state_dict())
    assert isinstance(plain.get_submodule("blocks.0"), torch.fx.GraphModule)
    expected["logits"].sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    put_back(model, before)
    found = plain(X)
    assert [len(record.activations), torch.equal(*record.activations)] == [2, True]
    assert torch.equal(found["logits"], expected["logits"])
    assert torch.equal(found["once"], expected["once"])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    found["logits"].sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])


class Looking(Submodules, linear=(3, 3)):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > -100 else x


class Drifting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global _drift  # noqa: PLW0603
        _drift += 1
        return x * _drift


_drift = 0


def test_graphs_that_do_not_replace_the_model_are_refused() -> None:
    pg = PatchableGraph(Looking(), X)
    with pytest.raises(GraphError, match=r"'<root>' reads a value into Python .*say allow_doubts=True"):
        pg.to_fx((X,))
    assert torch.equal(pg.to_fx((X,), allow_doubts=True)(X), pg(X))
    with pytest.raises(GraphError, match="do not do what the model does on these inputs: output: .*'<root>' reads a"):
        pg.to_fx((X - 100,), allow_doubts=True)
    with pytest.raises(GraphError, match="do not do what the model does on these inputs: output"):
        PatchableGraph(Drifting(), X + 3).to_fx((X + 3,))
    options = ExtractionOptions(classes_to_skip_compiling={Inner})
    with pytest.raises(GraphError, match=r"cannot be written as one graph: 'inner': the options say to skip it"):
        PatchableGraph(Outer(), options, X).to_fx((X,))


def test_edited_and_custom_graphs_are_written_as_they_are() -> None:
    model = Outer()
    pg = PatchableGraph(model, X)
    edited = pg._graph_module.inner
    relu = next(node for node in edited.graph.nodes if node.target is torch.relu)
    relu.target = torch.sigmoid
    edited.recompile()
    expected = model.last(torch.sigmoid(model.inner.linear(X)) * 2)
    assert torch.equal(pg.to_fx((X,))(X), expected)

    def without_relu(module: nn.Module) -> torch.fx.Graph:
        graph = torch.fx.Graph()
        linear = graph.call_module("linear", (graph.placeholder("x"),))
        graph.output((graph.call_function(torch.mul, (linear, 3)),))
        return graph

    options = ExtractionOptions(custom_extraction_functions={Inner: without_relu})
    pg = PatchableGraph(model, options, X)
    with pg.patch({"inner.linear.linear": AddPatch(value=1.0), "inner.mul": AddPatch(value=1.0)}, strict=True):
        plain = pg.to_fx((X,))
    assert torch.equal(plain(X), model.last((model.inner.linear(X) + 1) * 3 + 1))


def test_patches_that_no_graph_can_hold_are_refused() -> None:
    pg = PatchableGraph(Outer(), X)
    with (
        pg.patch({"inner.relu": ZeroPatch(steps=0)}),
        pytest.raises(GraphError, match="'inner.relu': a graph does not count steps"),
    ):
        pg.to_fx((X,))


def test_other_inputs_than_the_examples_are_refused() -> None:
    pg = PatchableGraph(Stack(), X)
    plain = pg.to_fx((X,))
    for args, kwargs in [((X[:1],), {}), ((X.double(),), {}), ((X,), {"scale": 2.0}), (([X],), {})]:
        with pytest.raises(GraphError, match="in the example; make another graph|any_size=True"):
            plain(*args, **kwargs)
    model = Stack().eval()
    pg, longer = PatchableGraph(model, X), torch.cat([X, X])
    outer = PatchableGraph(Outer(), X)
    assert torch.equal(outer.to_fx((longer,), any_size=True)(longer), outer(longer))
    with pytest.raises(
        GraphError,
        match="on these inputs: its graph raises GraphError: dimension 0 of 'x'",
    ):
        pg.to_fx((longer,))


class Dropping(Submodules, inner=[(3, 3), partial(nn.Dropout, 0.5)]):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.inner(x), 0.5, training=self.training)


@pytest.mark.parametrize("mode", [False, True], ids=["eval", "train"])
def test_modes_other_than_the_captured_are_refused(mode: bool) -> None:
    model = Dropping().train(mode)
    plain = PatchableGraph(model, X).to_fx((X,))
    was = "train" if mode else "eval"
    for module in (plain, copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        module.train(not mode)
        with pytest.raises(GraphError, match=f"this graph was captured in {was} mode"):
            module(X)
    assert model.training is mode


# -- compiled since the capture, and by threads at once ----------------------------------------------------------------


def compile_by_attribute(model: Outer) -> None:
    model.inner.forward = torch.compile(model.inner.forward, backend="eager")


@pytest.mark.parametrize("part", ["", "1", "1.inner", "1.inner.linear", "1.last", "2"])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_patches_have_the_same_effect_with_any_compiled_part(part: str, is_wrapped: bool) -> None:
    model, plain = (nn.Sequential(*(Outer() for _ in range(4))) for _ in range(2))
    pg, of_plain = PatchableGraph(model, X), PatchableGraph(plain, X)
    compiled = model.get_submodule(part)
    if part and is_wrapped:
        parent, _, name = part.rpartition(".")
        setattr(model.get_submodule(parent), name, torch.compile(compiled, backend="eager"))
    else:
        compiled.compile(backend="eager")
    for path in ("sub_1.inner.relu", "sub_1.inner.linear.output", "sub_1.last.weight", "sub_2.x", "sub_3.inner.mul"):
        with pg.patch({path: ZeroPatch()}, strict=True):
            found = pg(X)
        with of_plain.patch({path: ZeroPatch()}, strict=True):
            assert torch.equal(found, of_plain(X)), path
    assert torch.equal(pg(X), plain(X))


@pytest.mark.parametrize("part", ["", "inner", "last"])
def test_parts_that_are_compiled_after_a_context_was_used(part: str) -> None:
    model = Outer()
    pg, patches = PatchableGraph(model, X), {"inner.relu": ZeroPatch()}
    kept = pg.patch(patches)
    with kept:
        expected = pg(X)
    model.get_submodule(part).compile(backend="eager")
    model(X)
    for context in (kept, pg.patch(patches, strict=True)):
        with context:
            assert torch.equal(pg(X), expected)
    assert torch.equal(expected, model.last(torch.zeros(2, 3)))


def test_a_compiled_forward_is_captured_as_it_was_written() -> None:
    model, plain = Outer(), Outer()
    compile_by_attribute(model)
    pg = PatchableGraph(model, X)
    assert list(pg.nodes) == list(PatchableGraph(plain, X).nodes)
    with pg.patch({"inner.relu": ZeroPatch()}, strict=True):
        assert torch.equal(pg(X), plain.last(torch.zeros(2, 3)))


def test_an_edited_graph_module_compiles_as_one_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).eval()
    x = torch.randn(2, 4)
    root: Any = PatchableGraph(model, x)._graph_module
    (relu,) = (node for node in root.graph.nodes if node.name == "sub_1")
    with root.graph.inserting_after(relu):
        times = root.graph.call_function(torch.mul, (relu, 1.0))
    relu.replace_all_uses_with(times, delete_user_cb=lambda user: user is not times)
    compiled = torch.compile(root, backend="eager", fullgraph=True)
    calling = torch.compile(lambda value: root(value) - 1, backend="eager", fullgraph=True)
    for number in (3.0, 5.0):  # code that another edit made stale does not run
        times.args = (relu, number)
        root.recompile()
        expected = model[2](model[1](model[0](x)) * number)
        assert torch.equal(compiled(x), expected)
        assert torch.equal(calling(x), expected - 1)
        assert torch.equal(torch.compile(copy.deepcopy(root), backend="eager", fullgraph=True)(x), expected)
