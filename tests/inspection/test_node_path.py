from __future__ import annotations

import copy
import importlib
import linecache
import pickle
import re
import sys
import textwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import GraphPatchError
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.inspection.resolution import resolve
from tests.frames import DOCUMENTED_TREE, FrameBuilder, here, layered_frame, tensor, tuple_frame


def code_of(frame):
    return f"\ndef forward(self):  # of {type(frame.module).__name__}\n    return 1\n"


def path_of(frame) -> NodePath:
    return NodePath(frame, code_of)


@pytest.fixture
def graph() -> NodePath:
    return path_of(tuple_frame())


# --- children ---------------------------------------------------------------------------------------------------------


def test_children_are_attributes_and_items(graph):
    assert str(graph.linear_0.weight) == "linear_0.weight"
    assert graph["linear_0.weight"] == graph.linear_0.weight == graph["linear_0"]["weight"] == graph.linear_0["weight"]
    assert str(graph.output.sub_1) == "output|sub_1"
    assert graph["output|sub_1"] == graph["output.sub_1"] == graph.output[1] == graph.output[-1] == graph.output.sub_1


def test_dir_is_exactly_the_children(graph):
    assert dir(graph) == sorted(["x", "linear_0", "add", "linear_1", "output", "_code", "_shape"])
    assert dir(graph.output) == ["_code", "_shape", "sub_0", "sub_1"]
    assert dir(graph.add) == dir(graph.output.sub_0) == ["_code", "_shape"]
    assert graph._ipython_key_completions_() == ["x", "linear_0", "add", "linear_1", "output"]
    assert [str(child) for child in graph.linear_0] == [
        f"linear_0.{name}" for name in ("input", "weight", "bias", "linear", "output")
    ]


@pytest.mark.parametrize(
    ("reach", "message"),
    [
        (lambda g: g.linear_0.wieght, "'linear_0' has no child 'wieght'; nearest: 'linear_0.weight'"),
        (lambda g: g["linear_0.wieght"], "'linear_0' has no child 'wieght'; nearest: 'linear_0.weight'"),
        (lambda g: g["linear_9.weight"], "no child 'linear_9'; nearest: .*'linear_1.weight'"),
        (lambda g: g.foo, "the root graph has no child 'foo'; nearest: "),
        (lambda g: g.output.sub_2, "'output' has no child 'sub_2'; it has 'sub_0', 'sub_1'"),
        (lambda g: g.output[2], "'output' has no child 'sub_2'; it has 'sub_0', 'sub_1'"),
        (lambda g: g.output[-3], "'output' has no child 'sub_-3'"),
        (lambda g: g.add.foo, r"'add' has no child 'foo': it is a value, Tensor\(3, 2\)"),
        (lambda g: g[0], "the root graph is not a container: it has no position 0"),
        (lambda g: g["linear_0|weight"], "'linear_0' is a graph, not a container: its children follow a dot"),
        (lambda g: g["a..b"], "not a node path: 'a..b'"),
        (lambda g: g._foo, "the root graph has no child '_foo'"),
    ],
)
def test_unknown_children_are_attribute_and_key_errors(graph, reach, message):
    for kind in (AttributeError, KeyError, GraphPatchError):
        with pytest.raises(kind, match=message):
            reach(graph)


HOSTILE = ["_code", "_shape", "_tree", "graph", "self", "lambda", "None", "__len__", "__class__", "output_1", "é"]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_our_own_and_keywords_stay_reachable(name):
    root = FrameBuilder()
    root.input("x", tensor(2))
    inner = root.call(name)
    inner.op(name, tensor(5))
    inner.output({name: torch.ones(7)})
    root.output(tensor(2))
    graph = path_of(root.frame)
    assert graph[name][name]._shape == graph[f"{name}.{name}"]._shape == torch.Size([5])
    assert graph[name].output[name]._shape == graph[f"{name}.output|{name}"]._shape == torch.Size([7])
    assert resolve(root.frame, str(graph[name].output[name])).spec == tensor(7)
    assert f"├─{name}: Identity" in repr(graph)
    if not name.startswith("_"):
        assert getattr(graph, name) == graph[name]


@given(st.dictionaries(st.text(max_size=5), st.integers(1, 5), min_size=1, max_size=4))
def test_any_key_of_a_dict_is_reached_and_written(sizes):
    root = FrameBuilder()
    root.output({key: torch.empty(size) for key, size in sizes.items()})
    graph = path_of(root.frame)
    for key, size in sizes.items():
        child = graph.output[key]
        assert child._shape == torch.Size([size])
        assert graph[str(child)] == child
        assert resolve(root.frame, str(child)).dig == (key,)
    assert len(repr(graph).splitlines()) >= 2 + len(sizes)


# --- identity ---------------------------------------------------------------------------------------------------------


def test_paths_are_values(graph):
    assert {graph.linear_0.output: 1}[graph["linear_0.output"]] == 1
    assert graph.add != graph.x
    assert graph.add != "add"
    assert graph.output != graph.output.sub_0
    assert path_of(tuple_frame()).add != graph.add
    assert copy.copy(graph.add) is not None
    assert copy.deepcopy(graph.add) == graph.add
    assert str(graph) == "<root>"


def test_paths_cannot_be_changed_or_pickled(graph):
    with pytest.raises(AttributeError, match=r"use pg.patch\(\{'linear_0': ...\}\)"):
        graph.linear_0.weight = 1
    with pytest.raises(TypeError, match="keep str"):
        pickle.dumps(graph)


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_shapes_of_values_containers_and_graphs(graph):
    assert graph.linear_0.weight._shape == torch.Size([3, 2])
    assert graph.output._shape == (torch.Size([3, 3]), torch.Size([3, 3]))
    assert graph.output.sub_1._shape == torch.Size([3, 3])
    assert graph.linear_0._shape["weight"] == graph._shape.linear_0.weight == torch.Size([3, 2])
    with pytest.raises(AttributeError, match="no 'foo'"):
        _ = graph._shape.foo


# --- code -------------------------------------------------------------------------------------------------------------


def test_code_of_a_submodule_has_its_calling_context(graph):
    lines = graph.linear_1._code.splitlines()
    assert lines[0] == "Calling context:"
    assert re.fullmatch(r'File ".*frames.py", line \d+, in tuple_frame', lines[1])
    assert (
        lines[2]
        == '    linear = root.call(name, "linear", module.linear, call_index=number, call_count=2, site=here())'
    )
    assert lines[3:] == ["Compiled code:", "def forward(self):  # of Linear", "    return 1"]


def test_opaque_graphs_say_why_there_is_no_code():
    root = FrameBuilder()
    inner = root.call("inner", site=here())
    inner.frame.opaque_reason = "its class is in classes_to_skip_compiling"
    inner.output(tensor(1))
    root.output(tensor(1))
    graph = path_of(root.frame)
    said = "No compiled code:\nOpaqueGraphModule, because its class is in classes_to_skip_compiling"
    assert graph.inner._code.startswith("Calling context:\nFile ")
    assert graph.inner._code.endswith(said)
    assert repr(graph.inner) == "inner: Identity (opaque)\n└─output: Tensor(1)"
    root.frame.opaque_reason = inner.frame.opaque_reason
    assert graph._code == said


# --- the tree ---------------------------------------------------------------------------------------------------------


def test_the_documented_tree(graph):
    assert repr(graph) == DOCUMENTED_TREE
    assert repr(graph.linear_0).splitlines()[:2] == ["linear_0: Linear", "├─input: Tensor(3, 2)"]
    assert repr(graph.output) == "output: tuple(2)\n├─sub_0: Tensor(3, 3)\n└─sub_1: Tensor(3, 3)"
    assert repr(graph.output.sub_0) == "sub_0: Tensor(3, 3)"


def test_the_tree_hides_clutter_unless_asked():
    root = FrameBuilder()
    root.input("mask", None)
    root.input("mode", "fast")
    root.input("kwargs", {})
    root.input("n", 3)
    root.input("cache", object())
    root.add("constant", "table", tensor(4))
    root.op("size", 2, is_size=True)
    root.output((torch.ones(2), None, {"a.b": 0.5}))
    graph = path_of(root.frame)
    assert repr(graph) == textwrap.dedent("""\
        <root>: Identity
        ├─n: int(3)
        └─output: tuple(3)
          ├─sub_0: Tensor(2)
          └─sub_2: dict(1)
            └─"a.b": float(0.5)""")
    everything = graph._tree(show_all=True).splitlines()
    assert everything[1:8] == [
        "├─mask: NoneType",
        "├─mode: str",
        "├─kwargs: dict(0)",
        "├─n: int(3)",
        "├─cache: object",
        "├─table: Tensor(4)",
        "├─size: int(2)",
    ]
    assert "  ├─sub_1: NoneType" in everything


def test_a_large_tree_folds_equal_layers():
    graph = path_of(layered_frame(12))
    lines = repr(graph).splitlines()
    assert len(lines) < 70
    assert "│ ├─h_1 … h_11: 11 × Identity (same as h_0)" in lines
    assert lines[-1] == "… 550 more nodes: pg.graph._tree(max_lines=None) shows them, pg.nodes lists all"
    assert lines[-2] == "  └─logits: Tensor(1, 8, 16)"
    whole = graph._tree(max_lines=None).splitlines()
    assert len(whole) == 550 + len(lines) - 2
    assert "…" not in graph._tree(max_lines=None)


def test_a_flat_graph_loses_its_middle():
    root = FrameBuilder()
    for number in range(1000):
        root.op(f"op_{number}", tensor(number))
    root.output(tensor(1))
    lines = repr(path_of(root.frame)).splitlines()
    assert len(lines) == 200
    assert lines[-2:] == [
        "└─output: Tensor(1)",
        "… 804 more nodes: pg.graph._tree(max_lines=None) shows them, pg.nodes lists all",
    ]
    assert "├─… 804 nodes" in lines


def test_an_unrolled_loop_is_folded():
    root = FrameBuilder()
    for number in range(200):
        for name in ("getitem", "mul", "state"):
            root.op(f"{name}_{number}" if number else name, tensor(1))
    root.op("stack", tensor(200))
    root.output(tensor(1))
    assert repr(path_of(root.frame)) == textwrap.dedent("""\
        <root>: Identity
        ├─getitem: Tensor(1)
        ├─mul: Tensor(1)
        ├─state: Tensor(1)
        ├─getitem_1 … state_199: 199 × (same as getitem … state)
        ├─stack: Tensor(200)
        └─output: Tensor(1)
        … 597 more nodes: pg.graph._tree(max_lines=None) shows them, pg.nodes lists all""")


# --- where it is shown ------------------------------------------------------------------------------------------------


def test_html_is_escaped():
    root = FrameBuilder()
    root.output({"<script>&": torch.ones(1)})
    markup = path_of(root.frame)._repr_html_()
    assert "&lt;script&gt;&amp;" in markup
    assert "<script>" not in markup
    assert markup.startswith("<pre style=")


class _Printer:
    def __init__(self, depth: int) -> None:
        self.stack, self.printed = [0] * depth, ""

    def text(self, text: str) -> None:
        self.printed += text


def test_ipython_shows_the_tree_in_color_only_in_a_terminal(graph, monkeypatch):
    def shown(depth: int = 1) -> str:
        printer = _Printer(depth)
        graph._repr_pretty_(printer, False)
        return printer.printed

    assert shown() == DOCUMENTED_TREE
    assert shown(depth=2) == "NodePath('<root>')"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m: Tensor(3, 2)\x1b[0m" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown() == DOCUMENTED_TREE


# --- source -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("was_read", [False, True])
def test_lines_are_those_that_were_captured(was_read, tmp_path, monkeypatch):
    source = """
        from torch import nn

        class Edited(nn.Module):
            def forward(self, x):
                y = x.cos()
                return y * 2
    """
    file, name = tmp_path / f"edited_{was_read}.py", f"edited_{was_read}"
    file.write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    pg = PatchableGraph(importlib.import_module(name).Edited(), torch.ones(2))
    if was_read:
        assert "y = x.cos()" in pg.graph.y._code
    file.write_text("# another line\n" + textwrap.dedent(source).replace("y", "z"))
    linecache.checkcache()
    assert pg.graph.y._code.splitlines()[1].strip() == "y = x.cos()"
    assert pg.graph.x._code.splitlines()[-1].strip() == "def forward(self, x):"
    assert pg.nodes["mul"].source_lines[-1].text == "return y * 2"
