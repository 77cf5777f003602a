"""The widget of `show_circuit`: what the front end gets and may set, what is pinned, what stays without a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import comm
import ipywidgets
import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.experiments import AttributionGraph, Circuit, Edge, feature_pages, show_circuit
from graphpatch_notebook.experiments.circuits.attribution_graph import GraphNode
from tests.notebook.browser.test_widget import Line

pytestmark = pytest.mark.hosts

HEAD = "layers[0].attn.heads[1]"
CIRCUIT = Circuit(
    (Edge("@embed", f"{HEAD}.v", 2.0), Edge(f"{HEAD}.z", "@logits", 1.5), Edge("@embed", "@logits", -0.5)),
    {f"{HEAD}.v": (f"{HEAD}.z",), "@logits": ()},
    candidates=9,
    clean=2.0,
    corrupted=-1.0,
    faithfulness=0.9,
)


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(comm, "create_comm", lambda *args, **options: Line(*args, **options))
    InteractiveShell.clear_instance()  # of other tests
    yield
    ipywidgets.Widget.close_all()


def test_the_front_end_gets_the_picture() -> None:
    view: Any = show_circuit(CIRCUIT)
    (state,) = view.comm.states()
    picture = state["circuit"]
    assert [node["name"] for node in picture["nodes"]] == ["@embed", f"{HEAD}.z", "@logits"]
    assert [(edge["from"], edge["to"], edge["score"]) for edge in picture["edges"]] == [
        (0, [1], 2.0), (1, [2], 1.5), (0, [2], -0.5),
    ]  # fmt: skip
    assert picture["nodes"][1]["ports"][0][0] == "v"
    assert {node["row"] for node in picture["nodes"]} == {-1}
    assert picture["summary"] == "3 of 9 edges, faithfulness 0.9"
    assert Circuit.from_json(picture["json"]) == CIRCUIT
    assert repr(view) == "<CircuitView of 3 of 9 edges, faithfulness 0.9>"


def test_what_is_pinned_is_checked_and_selected() -> None:
    view: Any = show_circuit(CIRCUIT)
    seen: list[Any] = []
    view.observe(lambda change: seen.append(change["new"]), "selected")
    for pinned in (["node", 1], ["node", 3], ["edge", True], 5, ["edge", 0], None):
        view.set_state({"pinned": pinned})
    assert seen == [f"{HEAD}.z", ("@embed", f"{HEAD}.v"), None]
    view.set_state({"circuit": {}})
    assert view.circuit["summary"]


def test_groups_that_the_front_end_makes_are_nodes() -> None:
    nodes = (
        *(GraphNode(f"layers[0].mlp.post[..., {n}]", n, "feature", 0, 1.0, f"0.{n}", 1.0) for n in range(3)),
        GraphNode("@logits[5]", 2, "logit", 1, 0.5, "five"),
    )
    weights = np.zeros((4, 4), dtype=np.float32)
    weights[3, :3] = [1.0, -2.0, 0.5]
    zeros = np.zeros(4, dtype=np.float32)
    graph = AttributionGraph(nodes, weights, zeros, zeros, 0.0).grouped(first=[0])
    view: Any = show_circuit(graph)
    assert view.groups == {"first": [0]}
    view.set_state({"pinned": ["node", 1]})
    for groups in ({"a": [0], "b": [0]}, {"a": [4]}, {"a": []}, {"a": [-1]}, [1]):
        view.set_state({"groups": groups})
        assert view.groups == {"first": [0]}
    view.set_state({"groups": {"first": [0, 2], "second": [1]}})
    drawn = {node["name"]: node["members"] for node in view.circuit["nodes"]}
    assert drawn == {"first": [0, 2], "second": [1], "@logits[5]": [3]}
    assert sorted(edge["score"] for edge in view.circuit["edges"]) == [-2.0, 1.5]
    assert view.pinned is None
    assert graph.grouped(**view.groups).groups == {"first": (0, 2), "second": (1,)}
    assert show_circuit(CIRCUIT).groups == {}


def test_nodes_have_the_pages_of_their_features() -> None:
    pg = PatchableGraph(torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.ones(1, 2))
    name = "upwards"
    pages = feature_pages(pg, {name: ("sub_0.output", torch.ones(3))}, torch.randn(6, 2), batch_size=2)
    nodes = (GraphNode(name, 0, "feature", 0, 1.0, "0.1"), GraphNode("@logits[5]", 0, "logit", 1, 0.9, "cat"))
    weights = np.array([[0, 0], [1, 0]], dtype=np.float32)
    graph = AttributionGraph(nodes, weights, np.zeros(2), np.zeros(2), 0.0)
    view: Any = show_circuit(graph, pages)
    shown = {node["name"]: node.get("page") for node in view.circuit["nodes"]}
    assert shown == {name: pages[name]._repr_html_(), "@logits[5]": None}
    view.groups = {"both": [0]}
    assert all("page" not in node for node in view.circuit["nodes"])
    browser: Any = pg.browse(circuit=graph, pages=pages)
    assert [node.get("page") for node in browser.circuit["nodes"]] == [pages[name]._repr_html_(), None]
    browser.set_state({"groups": {"both": [0]}})
    assert [node["members"] for node in browser.circuit["nodes"]] == [[0], [1]]
    assert browser.groups == {"both": [0]}
    browser.set_state({"groups": {"both": [0, 2]}})
    assert browser.groups == {"both": [0]}
    browser.set_circuit(None)
    assert (browser.circuit, browser.groups) == (None, {})
    browser.set_state({"groups": {"both": [0]}})
    assert browser.groups == {}


def test_a_browser_shows_a_circuit_whose_nodes_are_rows() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    pg = PatchableGraph(model, torch.randn(1, 5, 8))
    edges = (Edge("layers[0].mlp_out", "layers[1].mlp", 1.0), Edge("layers[1].mlp_out", "@logits", 1.0))
    feeds = {"layers[1].mlp": ("layers[1].mlp_out",), "@logits": ()}
    circuit = Circuit(edges, feeds, 9, clean=1.0, corrupted=0.0)
    browser: Any = pg.browse(circuit=circuit)
    rows = {node["name"]: node["row"] for node in browser.circuit["nodes"]}
    skeleton = browser._skeleton()
    assert skeleton.path(rows["layers[0].mlp_out"]) == pg.components["layers[0].mlp_out"].path
    assert rows["@logits"] == -1  # the model has none
    assert "data:image/svg" in browser._static_html()
    browser.set_circuit(None)
    assert browser.circuit is None
    assert browser.comm.states()[-1] == {"circuit": None}
