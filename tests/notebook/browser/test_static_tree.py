"""The tree that lives without a kernel: whole, escaped, small, and nothing that a sanitizer would take away."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

import torch
from torch import nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.inspection.node_path import Location
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.views.browser import MOST_BYTES, static_tree
from graphpatch_notebook.paths import format_segment
from tests.frames import layered_frame
from tests.notebook.hostile import KEYS, hostile_graph


class Reader(HTMLParser):
    """Checks that all is closed, and collects what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str | None]] = set()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes |= set(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    return reader


def tree_of(pg: PatchableGraph, *patches: ChosenPatch) -> str:
    return static_tree("pg: a model", Location.of_root(pg.nodes.root).entry(), patches)


def test_a_small_model_is_there_whole() -> None:
    pg = PatchableGraph(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(1, 2))
    reader = read(tree_of(pg))
    assert reader.tags == {"p", "strong", "ul", "li", "details", "summary", "code"}
    assert reader.attributes == {("open", None)}
    shown = "".join(reader.texts)
    for line in repr(pg.graph).splitlines():
        assert re.sub(r"^[│├└─ ]*", "", line) in shown
    assert "No patch is chosen." in shown
    assert "<root>: Sequential" in shown
    assert "sub_1: ReLU" in shown
    assert "GraphModule" not in shown


def test_hostile_names_are_text() -> None:
    pg = hostile_graph()
    patch = ChosenPatch('output|"<img src=x onerror=alert(1)>"', "custom", value="'</code><script>alert(1)</script>'")
    reader = read(tree_of(pg, patch))
    assert reader.tags == {"p", "strong", "ul", "li", "details", "summary", "code", "em"} & reader.tags
    assert reader.attributes == {("open", None)}
    for key in KEYS:
        assert format_segment(key) in reader.texts
    text = static_tree("<b>", Location.of_root(pg.nodes.root).entry())
    assert html.escape("<b>") in text
    assert not read(text).tags & {"b"}


def test_large_models_are_cut_and_equal_layers_folded() -> None:
    frame = layered_frame(1000, ops=22)
    patches = [ChosenPatch(f"transformer.h_{n}.mlp.mul_{n % 20 + 1}", "zero", number=n) for n in range(500)]
    text = static_tree("pg", Location.of_root(frame).entry(), patches)
    assert len(text.encode()) <= MOST_BYTES
    assert "h_1 … h_999: 999 × " in html.unescape(text)
    assert "#0 zero transformer.h_0.mlp.mul_1" in text
    assert "more</li>" in text
    read(text)
