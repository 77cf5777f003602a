from __future__ import annotations

import pytest
import torch
from torch import nn

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.inspection.resolution import Unresolvable, resolve
from graphpatch_notebook.values import ObjectSpec, ScalarSpec
from tests.counted_lines import lines_run
from tests.frames import FrameBuilder, layered_frame, tensor, tuple_frame


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
    ("ad", True, "no node 'ad' in the root graph; nearest: 'add'"),
    ("linear_0.wieght", True, "no node 'wieght' in linear_0; nearest: 'linear_0.weight'"),
    ("foo.bar", True, "'foo.bar': no node 'foo' in the root graph; nearest: "),
    ("linear.output", True, "nearest: 'linear_0.output', 'linear_1.output'"),
    ("linear_0", False, "'linear_0' is a graph (CompiledGraphModule); patch a node in it, such as 'linear_0.output'"),
    ("linear_0|weight", False, "its nodes follow a dot; did you mean 'linear_0.weight'?"),
    ("output", False, "'output' is a tuple(2); say which value: 'output|sub_0', 'output|sub_1'"),
    (
        "output|sub_7.x",
        True,
        "'output|sub_7.x': no 'sub_7' in 'output', which is tuple(2) in the example; keys: 'sub_0'",
    ),
    ("output.sub_0", True, "'output' is a node, not a graph: no 'output.sub_0'; did you mean 'output|sub_0'?"),
    ("add.foo", True, "'add' is a node, not a graph: no 'add.foo'; nearest: 'add'"),
    ("x|sub_0", True, "no 'sub_0' in 'x', which is Tensor(3, 2) in the example; it has none; to patch a part of it"),
    ("output[0]", True, "not a node path: 'output[0]' (unexpected '[' at position 6); a position in a sequence is"),
    ("<root>", False, "'<root>' is a graph (CompiledGraphModule); patch a node in it, such as 'output|sub_0'"),
]


@pytest.mark.parametrize(("path", "is_unknown", "message"), TUPLE_PROBLEMS)
def test_errors_suggest_similar_paths(path, is_unknown, message):
    found = problem(tuple_frame(), path)
    assert message in found.message
    assert found.is_unknown is is_unknown


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
    assert "what layer_0 itself returns is 'layer_0.output_1'" in message
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


def test_the_work_for_suggestions_grows_with_the_model():
    def message(root: Frame) -> str:
        return problem(root, "transformer.h_67.mpl.mul_3").message

    small, large = layered_frame(100, ops=22), layered_frame(400, ops=22)
    assert "nearest: 'transformer.h_67.mlp.mul_3'" in message(large)
    assert lines_run(lambda: message(large)) < 4.4 * lines_run(lambda: message(small))
