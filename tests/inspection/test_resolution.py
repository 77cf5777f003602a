from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.inspection.resolution import Unresolvable, resolve
from graphpatch_notebook.paths import ParsedPath
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


@pytest.mark.parametrize("path", ["x", "add", "linear_1.weight", "linear_0.output"])
def test_a_path_to_a_value(path):
    root = tuple_frame()
    target = resolve(root, path)
    frame = root.names[path.split(".")[0]].frame if "." in path else root
    assert (target.path, target.dig, target.dig_text) == (path, (), ())
    assert target.frame is frame
    assert target.node is frame.names[path.split(".")[-1]]
    assert target.spec is target.node.spec


def test_a_path_into_a_container_has_real_keys():
    target = resolve(tuple_frame(), "output|sub_1")
    assert (target.dig, target.dig_text, target.spec) == ((1,), ("sub_1",), tensor(3, 3))
    assert resolve(tuple_frame(), ParsedPath(("output",), ("sub_1",))).path == "output|sub_1"
    assert resolve(tuple_frame(), '"output"|"sub_1"').path == "output|sub_1"


def test_inputs_that_the_example_did_not_have_can_be_patched():
    assert resolve(inputs_frame(), "mask").spec == ScalarSpec(None)
    assert resolve(inputs_frame(), "cache").spec == ObjectSpec("object")
    assert resolve(inputs_frame(), "output|cache").spec == ObjectSpec("object")


TUPLE_PROBLEMS = [
    ("ad", True, "no node 'ad' in the root graph; nearest: 'add'"),
    ("linear_0.wieght", True, "no node 'wieght' in linear_0; nearest: 'linear_0.weight'"),
    ("foo.bar", True, "'foo.bar': no node 'foo' in the root graph; nearest: "),
    ("linear_0", False, "'linear_0' is a graph (CompiledGraphModule); patch a node in it, such as 'linear_0.output'"),
    ("linear_0|sub_0", False, "'linear_0' is a graph (CompiledGraphModule); patch a node in it, such as "),
    ("linear_0|weight", False, "its nodes follow a dot; did you mean 'linear_0.weight'?"),
    ("output", False, "'output' is a tuple(2); say which value: 'output|sub_0', 'output|sub_1'"),
    ("output|sub_7", True, "no 'sub_7' in 'output', a tuple(2); keys: 'sub_0', 'sub_1'"),
    ("output|sub_7.x", True, "'output|sub_7.x': no 'sub_7' in 'output', a tuple(2); keys: 'sub_0', 'sub_1'"),
    ("output.sub_0", True, "'output' is a node, not a graph: no 'output.sub_0'; did you mean 'output|sub_0'?"),
    ("output.sub_7", True, "a dot does not lead into a container, write 'output|sub_7'"),
    ("add.foo", True, "'add' is a node, not a graph: no 'add.foo'; nearest: 'add'"),
    (
        "x|sub_0",
        True,
        "'x' is not a container but a value: Tensor(3, 2); there is no 'sub_0' in it; to patch a part of it",
    ),
    ("output[0]", True, "not a node path: 'output[0]' (unexpected '[' at position 6); a position in a sequence is"),
    ("a..b", True, "not a node path: 'a..b' (a name is missing at position 2)"),
    ("", False, "'<root>' is a graph (CompiledGraphModule); patch a node in it, such as 'output|sub_0'"),
    ("<root>", False, "'<root>' is a graph (CompiledGraphModule); patch a node in it, such as 'output|sub_0'"),
]


@pytest.mark.parametrize(("path", "is_unknown", "message"), TUPLE_PROBLEMS)
def test_errors_suggest_similar_paths(path, is_unknown, message):
    found = problem(tuple_frame(), path)
    assert message in found.message
    assert found.is_unknown is is_unknown


INPUT_PROBLEMS = [
    ("mask|sub_0", "'mask' was not given in the example, so what it holds is not known: make the PatchableGraph with"),
    ("cache|keys", "'cache' is not a container but a value: object; there is no 'keys' in it"),
    ("mode|x", "'mode' is not a container but a value: str; there is no 'x' in it"),
    ("kwargs", "'kwargs' is a dict(0) without a tensor or number in it: there is nothing to patch"),
    ("kwargs|labels", "no 'labels' in 'kwargs', which is an empty dict in the example: make the PatchableGraph with"),
    ("options|option_44", "nearest: 'options|option_4'; keys: 'option_0', "),
    ("options|option_44", "'option_7', ... (4 more)"),
    (
        "options",
        "say which value: 'options|option_0', 'options|option_1', 'options|option_2', 'options|option_3', ... (8",
    ),
    ("table", "'table' is a constant in the code of the model"),
    ("size", "'size' is arithmetic on sizes"),
    ("output|loss", "keys: 'logits', 'cache', 'empty'; if other example inputs have it, make the PatchableGraph with"),
    ("output|empty", "'output|empty' is a list(1) without a tensor or number in it"),
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


def test_a_module_that_is_called_twice():
    assert problem(tuple_frame(), "linear.output").message.endswith("nearest: 'linear_0.output', 'linear_1.output'")


def test_opaque_graphs_are_called_so():
    root = tuple_frame()
    root.names["linear_0"].frame.opaque_reason = "skipped"
    assert "'linear_0' is a graph (OpaqueGraphModule)" in problem(root, "linear_0").message


def test_suggestions_leave_sizes_out():
    suggested = re.findall(r"'([^']*)'", problem(layered_frame(2, 4), "transformer.h_0.mlp.sise").message)
    assert suggested
    assert not [path for path in suggested if path.endswith(".size")]


def test_the_work_for_suggestions_grows_with_the_model():
    def message(root: Frame) -> str:
        return problem(root, "transformer.h_67.mpl.mul_3").message

    small, large = layered_frame(100, ops=22), layered_frame(400, ops=22)
    assert "nearest: 'transformer.h_67.mlp.mul_3'" in message(large)
    assert lines_run(lambda: message(large)) < 4.4 * lines_run(lambda: message(small))
