"""The trees of real captures: those of the documentation as printed, those of transformers as far as they read well."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from graphpatch_notebook.capture import capture
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.inspection.resolution import NodeMap, resolve
from graphpatch_notebook.options import ExtractionOptions
from tests.frames import DOCUMENTED_TREE, TupleOutputModule


def captured(model: nn.Module, *args: Any) -> Frame:
    return capture(model.eval(), ExtractionOptions(), args, {})


def graph_of(root: Frame) -> NodePath:
    return NodePath(root, lambda frame: "")


IDS = torch.arange(7)[None]


@pytest.fixture(scope="module")
def gpt2() -> Frame:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
    return captured(GPT2LMHeadModel(config), IDS)


@pytest.fixture(scope="module")
def llama() -> Frame:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=64,
    )
    return captured(LlamaForCausalLM(config), IDS)


def test_the_documented_tree_as_captured():
    graph = graph_of(captured(TupleOutputModule(), torch.ones(3, 2)))
    assert repr(graph) == DOCUMENTED_TREE
    assert dir(graph) == sorted(["x", "linear_0", "add", "linear_1", "output", "_code", "_shape"])
    assert graph.linear_0.input._shape == torch.Size([3, 2])
    line = r'File ".*frames.py", line \d+, in forward\n    return \(self.linear\(x\), self.linear\(x \+ 1\)\)'
    assert re.fullmatch(line, graph.add._code)
    assert re.match(rf"Calling context:\n{line}\nCompiled code:\n", graph.linear_1._code)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_trees_of_transformers_read_well(name, request):
    root = request.getfixturevalue(name)
    lines = repr(graph_of(root)).splitlines()
    assert len(lines) <= 200
    assert "…" not in lines[-1]
    clutter = [line for line in lines if re.search(r": (NoneType|str|Size|dict\(0\)|dtype|device)\b", line)]
    assert clutter == []
    labels = [re.sub(r"^[│├└─ ]*", "", line) for line in lines]
    assert [label for label in labels if re.match(r"(size|len|shape|dim|int|getattr)[_\d]*: ", label)] == []
    assert [label for label in labels if "Opaque" in label] == []


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_every_path_of_a_capture_is_one_and_the_same_everywhere(name, request):
    root = request.getfixturevalue(name)
    graph = graph_of(root)
    for path, meta in NodeMap(root).items():
        target = resolve(root, path)
        assert target.path == path == str(graph[path]) == meta.path
        assert graph[path]._shape == meta.shape
        assert getattr(target.spec, "shape", None) == meta.shape
        assert graph[path]._code
