"""Requests: what each does, and that none is ever left without a reply in words."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.notebook.runs import Runs
from graphpatch_notebook.notebook.session.expressions import Origin
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.notebook.views.browser import Browser
from graphpatch_notebook.notebook.views.linked import answer

EMPTY = {"slice": None, "value": None, "name": None, "steps": None, "positions": None, "position_dim": None}


def fields(path: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"path": path, "kind": kind, **EMPTY, "any_shape": False, "allow_empty": False, **more}


class Front:
    """A front end, as far as requests go."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.pg = PatchableGraph(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.ones(2, 4))
        self.namespace: dict[str, Any] = {"pg": self.pg, "steer": torch.ones(3)}
        self.session = Session(self.pg, Origin("pg"))
        self.workspace = Workspace(lambda: self.namespace, print)
        self.browser = Browser(self.pg, self.session, self.workspace)
        self.runs = Runs.of(self.session, self.workspace)

    def send(self, message: Any) -> dict[str, Any]:
        reply, _ = answer(self.browser._request_context, message, self.browser._handlers())
        json.dumps(reply)
        return reply

    def ask(self, request: str, **payload: Any) -> dict[str, Any]:
        reply = self.send({"id": 5, "request": request, "payload": payload})
        assert reply["id"] == 5
        assert "error" not in reply, reply
        return reply["result"]

    def refused(self, request: str, **payload: Any) -> dict[str, Any]:
        before = self.session.chosen
        reply = self.send({"id": 5, "request": request, "payload": payload})
        assert reply.keys() == {"id", "error"}, reply
        assert self.session.chosen is before
        return reply["error"]

    def edit(self, action: str, **more: Any) -> dict[str, Any]:
        return self.ask("edit", based_on=self.session.chosen.version, edit={"action": action, **more})

    def refused_edit(self, action: str, **more: Any) -> dict[str, Any]:
        return self.refused("edit", based_on=self.session.chosen.version, edit={"action": action, **more})


@pytest.fixture
def front() -> Front:
    return Front()


def test_edits_are_those_of_the_session(front: Front) -> None:
    assert front.edit("add", patch=fields("sub_0.linear", "zero", slice=":, -1")) == {"version": 1}
    front.edit("add", patch=fields("sub_1.relu", "add", value="0.5 * steer"))
    assert list(map(str, front.session.chosen.patches)) == ["zero sub_0.linear[:, -1]", "add sub_1.relu 0.5 * steer"]
    front.edit("enable", number=1, is_enabled=False)
    front.edit("change", number=2, patch=fields("sub_1.relu", "add", slice=":, 0", value="2"))
    assert [patch.is_enabled for patch in front.session.chosen.patches] == [False, True]
    assert str(front.session.chosen.patches[1]) == "add sub_1.relu[:, 0] 2"
    front.edit("move", number=2, position=0)
    assert [patch.number for patch in front.session.chosen.patches] == [2, 1]
    front.edit("remove", numbers=[2])
    front.edit("undo")
    assert [patch.number for patch in front.session.chosen.patches] == [2, 1]
    front.edit("redo")
    assert [patch.number for patch in front.session.chosen.patches] == [1]
    front.edit("clear")
    assert front.session.chosen.patches == ()


def test_check_says_what_a_patch_would_be_applied_to(front: Front) -> None:
    checked = front.ask("check", patch=fields("sub_0.linear", "zero", slice=":, 0"), number=None)
    assert checked == {"shape": [2, 3], "sliced": [2], "warning": None, "name": None}
    beyond = front.ask("check", patch=fields("sub_0.linear", "zero", slice="7"), number=None)
    assert "the slice does not fit inputs of the example's sizes" in beyond["warning"]
    nothing = fields("sub_0.linear", "zero", slice=":, 3:6", allow_empty=True)
    assert front.ask("check", patch=nothing, number=None)["sliced"] == [2, 0]
    unknown = front.ask("check", patch=fields("sub_0.linear", "add", value="stear"), number=None)
    assert unknown["warning"] == "'stear' is not defined yet"
    taken = front.ask("check", patch=fields("sub_0.linear", "probe", name="steer"), number=None)
    assert taken["warning"] == "the next run overwrites the variable steer"
    assert front.session.chosen.version == 0


@pytest.mark.parametrize(
    "typed", [{"slice": "0:2:9223372036854775807"}, {"slice": "0x" + "f" * 5000}, {"name": "step"}]
)
def test_a_field_that_is_wrong_is_named_while_it_is_typed(front: Front, typed: dict[str, str]) -> None:
    front.namespace["step"], front.session.variables = range, lambda: front.namespace
    patch = fields("sub_0.linear", "probe", **{"name": "seen", **typed})
    assert {
        front.refused("check", patch=patch, number=None)["field"],
        front.refused_edit("add", patch=patch)["field"],
    } == {*typed}


NAMED = {"three": 3, "first": [0, 1], "mask": torch.tensor([True, False, True]), "wide": torch.ones(7), "calls": print}


@pytest.mark.parametrize(
    ("typed", "field", "shape"),
    [
        ({"value": "torch.ones(7)"}, "value", "(7,)"),
        ({"value": "0.5 * wide"}, "value", "(7,)"),
        ({"value": "torch.ones(2, 1, 3)"}, "value", "(2, 1, 3)"),
        ({"value": "steer[9]"}, "value", "IndexError"),
        ({"value": "1.0", "slice": ":, three"}, "slice", "(2, 3)"),
        ({"value": "1.0", "slice": ":, calls"}, "slice", "(2, 3)|cannot index"),
        ({"value": "torch.ones(3, dtype=torch.float16) + 2 * torch.randn(3)"}, None, None),
        ({"value": "steer", "slice": "first"}, None, None),
        ({"value": "torch.ones(2)", "slice": ":, mask"}, None, None),
        ({"value": "wide", "any_shape": True}, None, None),
        ({"value": "later"}, None, None),
        ({"value": "calls('never')"}, None, None),
        ({"value": "1.0", "slice": "three"}, None, None),  # in the dimension of the batch
    ],
)
def test_value_and_slice_are_tried_on_zeros(
    front: Front, typed: dict[str, Any], field: str | None, shape: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    front.namespace |= NAMED | {"torch": torch}
    front.session.variables = lambda: front.namespace
    state = torch.get_rng_state()
    payload = {"patch": fields("sub_0.linear", "add", **typed), "number": None}
    if field is None:
        front.ask("check", **payload)
    else:
        error = front.refused("check", **payload)
        assert error["field"] == field
        assert re.search(shape if "|" in str(shape) else re.escape(str(shape)), error["message"]), error
    assert torch.equal(torch.get_rng_state(), state)
    assert capsys.readouterr().out == ""


def test_a_module_is_its_output(front: Front) -> None:
    front.edit("add", patch=fields("sub_0", "zero"))
    front.edit("add", patch=fields("<root>", "add", value="1.0"))
    item = {"name": "sub_1", "layer": None, "head": None, "position": None, "key": None}
    front.edit("act", act="zero", items=[item], value=None, steps=None)
    paths = [patch.path for patch in front.session.chosen.patches]
    assert paths == ["sub_0.output", "output", "sub_1.output"]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    "path kind slice value name number numbers position row id form inputs plane patch edit".split()
)


_FRONT = Front()


@settings(max_examples=150)
@given(st.sampled_from([*_FRONT.browser._handlers(), "other"]), st.dictionaries(names, anything, max_size=5) | anything)
def test_every_message_gets_a_reply(request: str, payload: Any) -> None:
    reply = _FRONT.send({"id": 3, "request": request, "payload": payload})
    assert reply["id"] == 3
    assert ("result" in reply) != ("error" in reply)
    assert "mistake in graphpatch-notebook" not in str(reply.get("error"))
