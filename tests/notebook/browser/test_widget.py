"""The browser: its traits, what the front end may set, who is told of what, and how it is shown in real hosts."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import comm
import ipywidgets
import numpy as np
import pytest
import torch
from comm.base_comm import BaseComm
from IPython.core.interactiveshell import InteractiveShell
from torch import nn
from xarray import DataArray

from graphpatch_notebook import PatchableGraph, UnknownPathError
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.session import session_of
from graphpatch_notebook.notebook.views.browser import Browser
from graphpatch_notebook.notebook.views.skeleton import skeleton_of
from tests.notebook.browser.test_requests import fields

pytestmark = pytest.mark.hosts


class Line(BaseComm):
    """A comm whose other end is this test."""

    lines: ClassVar[list[Line]] = []

    def __init__(self, **options: Any) -> None:
        self.sent: list[tuple[dict[str, Any], list[bytes]]] = []
        super().__init__(**options)
        Line.lines.append(self)

    def publish_msg(self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **_: Any) -> None:
        data = json.loads(json.dumps(data or {}))
        self.sent.append(({"type": msg_type, **data}, list(buffers or ())))

    def states(self) -> list[dict[str, Any]]:
        """The states that were sent, the first one included."""
        return [data["state"] for data, _ in self.sent if "state" in data and data.get("method") != "echo_update"]

    def replies(self) -> list[dict[str, Any]]:
        return [data["content"] for data, _ in self.sent if data.get("method") == "custom"]

    def receive(self, **data: Any) -> None:
        self.handle_msg({"content": {"data": data}, "buffers": []})

    def set(self, **state: Any) -> None:
        self.receive(method="update", state=state)

    def ask(self, request: str, **payload: Any) -> dict[str, Any]:
        number = len(self.sent)
        self.receive(method="custom", content={"id": number, "request": request, "payload": payload})
        (reply,) = [reply for reply in self.replies() if reply["id"] == number]
        return reply


@pytest.fixture(autouse=True)
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Line]]:
    monkeypatch.setattr(comm, "create_comm", lambda *args, **options: Line(*args, **options))
    monkeypatch.setattr(Line, "lines", [])
    InteractiveShell.clear_instance()  # of other tests
    yield Line.lines
    ipywidgets.Widget.close_all()


@pytest.fixture
def graph() -> PatchableGraph:
    torch.manual_seed(0)
    return PatchableGraph(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.ones(2, 4))


def line_of(browser: Browser) -> Line:
    return browser.comm  # type: ignore[no-any-return]


def test_edges_are_sent_when_the_graph_is_shown_and_saved_with_a_page(graph: PatchableGraph, tmp_path: Path) -> None:
    browser = graph.browse()
    assert browser.edges == b""
    line_of(browser).set(shows_graph=True)
    assert browser.shows_graph
    assert json.loads(zlib.decompress(browser.edges)).keys() == {"users", "values"}
    line_of(browser).set(shows_graph="yes")
    assert browser.shows_graph is True
    shown = graph.browse("sub_0", views="graph")
    assert (shown.shows_graph, shown.edges, shown.views) == (True, browser.edges, ())
    saved = graph.browse()
    saved.save_html(tmp_path / "page.html")
    assert saved.edges == browser.edges
    with pytest.raises(ValueError, match="'graphs'"):
        graph.browse(views=["graphs"])


def test_the_first_message_has_all_that_a_view_needs(graph: PatchableGraph) -> None:
    browser = graph.browse()
    (state,) = line_of(browser).states()
    assert state["session"] == {"version": 0, "patches": [], "can_undo": False, "can_redo": False, "note": ""}
    assert state["expanded"] is None
    assert (state["selected"], state["query"], state["shows_sizes"]) == (0, "", False)
    about = {"module": "Sequential", "nodes": len(graph.nodes), "model_id": browser.model_id, "has_tokenizer": False}
    assert about.items() <= state["about"].items()
    front_end = json.loads(zlib.decompress(browser.front_end.bundle))
    assert "gp-root" in front_end["js"]
    assert ".gp-root" in front_end["css"]


# -- what the front end says


def test_the_front_end_sets_what_is_its_own(graph: PatchableGraph) -> None:
    browser = graph.browse()
    line_of(browser).set(expanded=[0, 2], selected=3, query="op:linear", shows_sizes=True)
    assert (browser.expanded, browser.selected, browser.query, browser.shows_sizes) == ([0, 2], 3, "op:linear", True)
    line_of(browser).set(expanded=None)
    assert browser.expanded is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("selected", 10**6),
        ("selected", -1),
        ("selected", True),
        ("selected", "0"),
        ("selected", None),
        ("expanded", [0, 10**6]),
        ("expanded", [-1]),
        ("expanded", ["0"]),
        ("expanded", 3),
        ("query", 7),
        ("query", "x" * 100_000),
        ("shows_sizes", 1),
        ("session", {}),
        ("about", {}),
        ("score_names", ["x"]),
        ("run", {"id": 1, "state": "done"}),
    ],
)
def test_what_it_may_not_set_is_put_right(graph: PatchableGraph, name: str, value: Any) -> None:
    browser = graph.browse()
    before = getattr(browser, name)
    line_of(browser).set(**{name: value, "query": value if name == "query" else "kept"})
    assert getattr(browser, name) == before
    assert line_of(browser).states()[-1] == {name: json.loads(json.dumps(before))}
    assert browser.query == ("" if name == "query" else "kept")


def test_requests_are_answered(graph: PatchableGraph) -> None:
    line = line_of(graph.browse())
    assert line.ask("details", row=1)["result"]["path"] == "input"
    edit = {"action": "add", "patch": fields("sub_0.linear", "zero")}
    assert line.ask("edit", based_on=0, edit=edit)["result"] == {"version": 1}
    assert line.ask("edit", based_on=0, edit=edit)["error"]["field"] == "version"
    line.receive(method="custom", content="nonsense")
    assert line.replies()[-1]["id"] == -1
    assert "object" in line.replies()[-1]["error"]["message"]


# -- the session


def test_all_browsers_follow_the_session_whoever_changes_it(graph: PatchableGraph) -> None:
    one, two = graph.browse(), graph.browse()
    session_of(graph).add(ChosenPatch("sub_0.linear", "zero", slice=":, 0"))
    line_of(one).ask("edit", based_on=1, edit={"action": "add", "patch": fields("sub_1.relu", "probe")})
    assert one.session == two.session
    first, second = two.session["patches"]
    skeleton = skeleton_of(graph)
    assert (first["row"], first["shape"], first["sliced"]) == (skeleton.row("sub_0.linear"), [2, 3], [2])
    assert (second["kind"], second["name"], second["is_enabled"]) == ("probe", "sub_1_relu", True)
    assert two.session["can_undo"]
    session_of(graph).undo()
    assert one.session["version"] == 3
    assert one.session["can_redo"]
    assert line_of(two).states()[-1]["session"]["version"] == 3


def test_edited_graphs_are_shown_as_they_are(graph: PatchableGraph) -> None:
    browser = graph.browse("sub_1.relu")
    browser.set_scores({"sub_1.relu": 2.0})
    session_of(graph).add(ChosenPatch("sub_1.relu", "zero"))
    root = getattr(graph._graph_module, "1")
    last = next(node for node in reversed(root.graph.nodes) if node.op == "output")
    with root.graph.inserting_before(last):
        last.args = (root.graph.call_function(torch.neg, (last.args[0],)),)
    root.recompile()
    error = line_of(browser).ask("details", row=1)["error"]
    assert "the graph was edited" in error["message"]
    state = line_of(browser).states()[-1]
    assert {"skeleton", "session", "scores", "expanded", "selected"} <= state.keys() | {"skeleton", "scores", "session"}
    assert browser.expanded is None
    skeleton = skeleton_of(graph)
    assert browser.skeleton == skeleton.data
    assert len(browser.scores) == 4 * len(skeleton)
    assert line_of(browser).ask("details", row=skeleton.row("sub_1.neg"))["result"]["kind"] == "op"


# -- scores


def unpacked(browser: Browser) -> list[float]:
    return list(struct.unpack(f"<{len(browser.scores) // 4}f", browser.scores))


def test_scores(graph: PatchableGraph) -> None:
    browser = graph.browse()
    skeleton = skeleton_of(graph)
    numbers = {
        "": 5,
        "sub_0": np.float64(0.5),
        graph.graph.sub_0.linear: torch.tensor(2.0, requires_grad=True),
        "sub_1.relu": True,
        "sub_1": math.nan,
    }
    browser.set_scores(numbers, name="effect")
    expected = {0: 5.0, skeleton.row("sub_0"): 0.5, skeleton.row("sub_0.linear"): 2.0, skeleton.row("sub_1.relu"): 1.0}
    assert {row: number for row, number in enumerate(unpacked(browser)) if not math.isnan(number)} == expected
    assert len(unpacked(browser)) == len(skeleton)
    assert browser.score_names == ["effect"]
    assert line_of(browser).states()[-1]["score_names"] == ["effect"]
    browser.set_scores({"output": 1})
    assert browser.score_names == ["score"]
    browser.clear_scores()
    assert (browser.scores, browser.score_names) == (b"", [])


@pytest.mark.parametrize(
    ("scores", "error", "message"),
    [
        ({"output": 1, "sub_0.liner": 1}, UnknownPathError, "nearest: 'sub_0.linear'"),
        ({"output": "1"}, TypeError, "'1'"),
        ({"output": 1j}, TypeError, "not a number"),
        ({"output": torch.ones(2)}, TypeError, "not a number"),
        ({"output": None}, TypeError, "not a number"),
        ({"output": math.inf}, ValueError, "finite"),
        ({"output": 1e300}, ValueError, "finite"),
        (
            DataArray([[1.0]], {"path": ["output"], "position": [0]}, ["path", "position"]),
            ValueError,
            "position",
        ),
        (DataArray([1.0], {"layer": ["output"]}, ["layer"]), ValueError, "layer"),
        (DataArray([1.0], dims=["path"]), ValueError, "path"),
        (DataArray(1.0), ValueError, "path"),
        (DataArray([math.inf], {"path": ["output"]}, ["path"]), ValueError, "finite"),
    ],
)
def test_invalid_scores_are_refused(graph: PatchableGraph, scores: Any, error: type[Exception], message: str) -> None:
    browser = graph.browse()
    browser.set_scores({"input": 1.0})
    before = browser.scores
    with pytest.raises(error, match=message):
        browser.set_scores(scores)
    assert browser.scores == before
