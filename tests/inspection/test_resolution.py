from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from graphpatch_notebook import PatchableGraph, UnknownPathError, ZeroPatch
from graphpatch_notebook.inspection.resolution import Unresolvable, resolve
from graphpatch_notebook.values import ObjectSpec, ScalarSpec
from tests.frames import FrameBuilder, layered_frame, tensor, tuple_frame
from tests.zoo.submodules import Submodules


def bert_frame():
    """A model with a module called `output`, as BERT has them."""
    root = FrameBuilder()
    root.input("x", tensor(2))
    layer = root.call("layer_0", "encoder.layer.0")
    layer.input("x", tensor(2))
    output = layer.call("output", "output", nn.Linear(2, 2))
    output.input("x", tensor(2))
    output.output(tensor(2))
    layer.output(tensor(2), name="output_1")
    root.output(tensor(2))
    return root.frame


def inputs_frame():
    root = FrameBuilder()
    root.input("mask", None)
    root.input("cache", object())
    root.input("mode", "fast")
    root.input("n", 3)
    root.input("kwargs", {})
    root.input("options", {f"option_{n}": 1 for n in range(12)})
    root.add("constant", "table", tensor(4))
    root.op("size", 2, is_size=True, is_live=False)
    root.output({"logits": torch.ones(1), "cache": object(), "empty": [None]})
    return root.frame


def problem(root, path) -> Unresolvable:
    with pytest.raises(Unresolvable) as caught:
        resolve(root, path)
    return caught.value


def test_inputs_that_the_example_did_not_have_can_be_patched():
    assert resolve(inputs_frame(), "mask").spec == ScalarSpec(None)
    assert resolve(inputs_frame(), "cache").spec == ObjectSpec("object")
    assert resolve(inputs_frame(), "output|cache").spec == ObjectSpec("object")


TUPLE_PROBLEMS = [
    ("ad", "no node 'ad' in the root graph; nearest: 'add'"),
    ("linear_0.wieght", "no node 'wieght' in linear_0; nearest: 'linear_0.weight'"),
    ("foo.bar", "'foo.bar': no node 'foo' in the root graph; nearest: "),
    ("linear.output", "nearest: 'linear_0.output', 'linear_1.output'"),
    ("linear_0", "'linear_0' is a graph (CompiledGraphModule); patch a node in it, such as 'linear_0.output'"),
    ("linear_0|weight", "'linear_0' is a graph (CompiledGraphModule); patch a node in it, such as 'linear_0.output'"),
    ("output", "'output' is a tuple(2); say which value: 'output|sub_0', 'output|sub_1'"),
    (
        "output|sub_7.x",
        "'output|sub_7.x': no 'sub_7' in 'output', which is tuple(2) in the example; keys: 'sub_0'",
    ),
    ("output.sub_0", "'output' is a node, not a graph: no 'output.sub_0'; nearest: 'output|sub_0', "),
    ("add.foo", "'add' is a node, not a graph: no 'add.foo'; nearest: 'add'"),
    ("x|sub_0", "no 'sub_0' in 'x', which is Tensor(3, 2) in the example; it has none; to patch a part of it"),
    ("output[0]", "not a node path: 'output[0]' (unexpected '[' at position 6); a position in a sequence is"),
    ("<root>", "'<root>' is a graph (CompiledGraphModule); patch a node in it, such as 'output|sub_0'"),
]


@pytest.mark.parametrize(("path", "message"), TUPLE_PROBLEMS)
def test_errors_suggest_similar_paths(path, message):
    assert message in problem(tuple_frame(), path).message


INPUT_PROBLEMS = [
    (
        "mask|sub_0",
        "which is NoneType in the example; it has none; if other example inputs have it, make the PatchableG",
    ),
    ("kwargs", "'kwargs' is a dict(0); there is no tensor or number in it"),
    ("options|option_44", "keys: 'option_4', "),
    ("options", "'options|option_2', 'options|option_3', ... (8 more)"),
    ("table", "'table' is a constant in the code of the model"),
    ("size", "'size' is arithmetic on sizes"),
]


@pytest.mark.parametrize(("path", "message"), INPUT_PROBLEMS)
def test_what_cannot_be_patched_says_why(path, message):
    assert message in problem(inputs_frame(), path).message


def test_a_module_called_output_is_found():
    root = bert_frame()
    assert resolve(root, "layer_0.output_1").node is root.names["layer_0"].frame.output_node
    message = problem(root, "layer_0.output").message
    assert "such as 'layer_0.output.output'" in message
    assert "such as 'layer_0.output_1'" in problem(root, "layer_0").message


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("transformer.h.1.mlp.output", ["transformer.h_1.mlp.output"]),
        ("transformer.h.1", ["transformer.h_1.output"]),
        ("transformer.h.1.attn", ["transformer.h_1.attn.output|sub_0"]),
    ],
)
def test_names_of_modules_as_the_model_has_them(path, meant):
    message = problem(layered_frame(2, 2), path).message
    assert message.endswith(f"no node 'h' in transformer; nearest: {', '.join(map(repr, meant))}")


class Spelled(nn.Module):
    """Modules whose code is called elsewhere, or whose weights are used by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        self.functional, self.idle = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(self.blocks(x), self.functional.weight)
        return self.normed(self.attention(x, x, x)[0])


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("blocks_0.output", "nearest: 'blocks.sub_0.output'"),
        ("blocks.0.output", "nearest: 'blocks.sub_0.output'"),
        ("blocks_1_0.linear", "nearest: 'blocks.sub_1.sub_0.linear'"),
        ("functional.weight", "nearest: 'functional_weight'"),
        ("attention.out_proj.weight", "nearest: 'attention.out_proj_weight'"),
        ("normed.weight", "nearest: 'normed.parametrizations_weight.output'"),
        ("idle_0.output", "'idle.0' did not run"),
        ("functional.output", "'functional' did not run"),
    ],
)
def test_paths_of_modules_whose_code_or_weights_are_used_elsewhere(path: str, meant: str) -> None:
    pg = PatchableGraph(Spelled(), torch.ones(1, 3, 2))
    with pytest.raises(UnknownPathError, match=re.escape(meant)), pg.patch({path: ZeroPatch()}):
        pass


class CallsInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return module(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def in_a_thread(x: Tensor, module: nn.Module) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(module, x).result()


def in_a_function(x: Tensor, module: nn.Module) -> Any:
    return CallsInside.apply(x, module)


@pytest.mark.parametrize("call", [in_a_function, in_a_thread])
def test_a_module_whose_call_is_not_seen_is_not_said_to_have_not_run(call: Any) -> None:
    class Outer(Submodules, unseen=(2, 2), seen=(2, 2), idle=(2, 2)):
        def forward(self, x: Tensor) -> Tensor:
            return self.seen(call(x, self.unseen))

    pg = PatchableGraph(Outer(), torch.ones(1, 2))
    for path, message in (
        ("unseen.output", "'unseen' ran in"),
        ("unseen.weight", "'unseen' ran in"),
        ("idle", "did not run"),
    ):
        with pytest.raises(UnknownPathError, match=message), pg.patch({path: ZeroPatch()}):
            pass


class Nested(Submodules, lists=lambda: nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])):
    def forward(self, x: Tensor) -> Tensor:
        return self.lists[0][0](x)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("lists[0][0].output", "lists_0_0.output"),
        ("lists[0][0]", "lists_0_0.output"),
        ("lists[0].0.weight", "lists_0_0.weight"),
        ("lists[0][1].output", None),
        ("x[0]", None),
    ],
)
def test_items_of_lists_are_found(path: str, meant: str | None) -> None:
    pg = PatchableGraph(Nested(), torch.ones(1, 2))
    with pytest.raises(UnknownPathError, match="not a" if meant is None else f"'{meant}'"):
        pg.nodes[path]


LONG = {
    "a name": "x" * 4000,
    "a path": ".".join(["abc"] * 1000),
    "a graph": "inner." + "x" * 4000,
    "beyond a value": "inner.output." + "x" * 4000,
    "a key": "output|" + "x" * 4000,
    "a text that does not end": 'output|"' + "x" * 4000,
    "a bracket": "inner[" + "x" * 4000,
    "a layer": f"layers[{'9' * 4000}].mlp_out",
    "a component": "layers[0]." + "x" * 4000,
    "a hook": "blocks.0.hook_" + "x" * 4000,
}


@pytest.mark.parametrize("path", LONG.values(), ids=list(LONG))
def test_long_paths_leave_messages_short(path: str) -> None:
    class Outer(Submodules, inner=(2, 2)):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    pg = PatchableGraph(Outer(), torch.ones(2, 2))
    entrances = (
        lambda: pg.patch({path: ZeroPatch()}).__enter__(),
        lambda: pg.nodes[path],
        lambda: pg.components[path],
        lambda: pg.record(path, torch.ones(2, 2)),
    )
    for entrance in entrances:
        with pytest.raises(UnknownPathError) as caught:
            entrance()
        assert re.search(r"xxx|abc|999|inner", str(caught.value))
        assert len(str(caught.value)) < 1500
