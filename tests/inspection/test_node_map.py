from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from graphpatch_notebook.errors import UnknownPathError
from graphpatch_notebook.inspection.resolution import NodeMap, resolve
from tests.frames import layered_frame, tuple_frame


@pytest.fixture
def nodes() -> NodeMap:
    return NodeMap(tuple_frame())


def test_every_value_has_its_path_in_order_of_execution(nodes):
    inner = ["input", "weight", "bias", "linear", "output"]
    assert list(nodes) == [
        "x",
        *(f"linear_0.{name}" for name in inner),
        "add",
        *(f"linear_1.{name}" for name in inner),
        "output|sub_0",
        "output|sub_1",
    ]
    assert len(nodes) == 14


def test_meta_says_what_is_known_of_a_value(nodes):
    meta = nodes["linear_1.weight"]
    assert (meta.path, meta.name, meta.kind, meta.op) == ("linear_1.weight", "weight", "parameter", "weight")
    assert (meta.shape, meta.dtype, meta.device) == (torch.Size([3, 2]), torch.float32, torch.device("cpu"))
    assert (meta.value, meta.frame_path, meta.module_class) == ("Tensor(3, 2)", "linear_1", "Linear")
    assert not meta.is_size
    assert not meta.is_mutated_later
    assert not meta.is_view_filled_later
    with pytest.raises(FrozenInstanceError):
        meta.path = "x"  # type: ignore[misc]


def test_source_lines_are_those_of_the_call_site(nodes):
    (line,) = nodes["add"].source_lines
    assert line.file.endswith("frames.py")
    assert line.function == "tuple_frame"
    assert line.text == 'root.op("add", tensor(3, 2), site=here())'
    assert nodes["x"].source_lines == ()


def test_unknown_paths_are_key_errors_that_name_the_nearest(nodes):
    with pytest.raises(UnknownPathError, match="nearest: 'linear_1.weight'"):
        nodes["linear_1.wieght"]
    with pytest.raises(KeyError, match="say which value: 'output|sub_0', 'output|sub_1'"):
        nodes["output"]
    assert nodes.get("foo") is None
    assert "foo" not in nodes
    assert "linear_0" not in nodes
    assert "add" in nodes


def test_every_entry_resolves_to_itself():
    root = layered_frame(2)
    nodes = NodeMap(root)
    assert [resolve(root, path).path for path in nodes] == list(nodes)
