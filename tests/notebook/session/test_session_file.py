"""Sessions as JSON files."""

from __future__ import annotations

import ast
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import (
    ChosenPatchError,
    GraphPatchWarning,
    SessionError,
)
from graphpatch_notebook.notebook.session import session_file
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import Origin
from graphpatch_notebook.notebook.session.session import Session
from tests.inspection.test_meanings import captured
from tests.zoo.submodules import Submodules

pytestmark = pytest.mark.hosts


class Model(Submodules, up=(4, 8), down=(8, 4)):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"last": self.down(self.up(x).relu()), "wörd.s": x}


torch.manual_seed(0)
GRAPH = PatchableGraph(Model(), torch.ones(2, 3, 4))
PATHS = list(GRAPH.nodes)


@pytest.fixture
def session() -> Session:
    session = Session(GRAPH, Origin("pg", "model", "x"))
    session.add(ChosenPatch("up.linear", "zero", slice=":, -1"))
    session.add(ChosenPatch("output|last", "probe", name="hidden", is_enabled=False))
    session.add(ChosenPatch("down.weight", "add", value='"".join(["é"]) or 1'))
    return session


def anew() -> Session:
    return Session(GRAPH)


TEXT = """\
{
  "schema": "graphpatch-session",
  "version": 2,
  "patches": [
    {
      "path": "up.linear",
      "kind": "zero",
      "slice": ":, -1"
    },
    {
      "path": "output|last",
      "kind": "probe",
      "name": "hidden",
      "enabled": false
    },
    {
      "path": "down.weight",
      "kind": "add",
      "value": "\\"\\".join([\\"é\\"]) or 1"
    }
  ],
  "origin": {
    "graph": "pg",
    "model": "model",
    "arguments": "x"
  }
}
"""


def test_loading_is_one_edit(session: Session, tmp_path: Path) -> None:
    file = session_file.save(session, tmp_path / "session.json")
    other = anew()
    other.add(ChosenPatch("x", "zero"))
    version = other.chosen.version

    loaded = session_file.load(other, file)

    assert loaded == other.chosen.patches
    assert [patch.number for patch in loaded] == list(range(2, 2 + len(loaded)))  # #1 was another patch
    assert [patch.with_fields(number=patch.number - 1) for patch in loaded] == list(session.chosen.patches)
    assert other.chosen.version == version + 1
    assert other.origin == Origin()
    assert other.undo()
    assert [patch.path for patch in other.chosen.patches] == ["x"]


@pytest.mark.parametrize(
    "text", ["print(1)\n", "{}", '{"schema": "other"}', "", TEXT.replace('version": 2', 'version": 1')]
)
def test_no_other_file_is_overwritten(session: Session, tmp_path: Path, text: str) -> None:
    file = tmp_path / "work.py"
    file.write_text(text, encoding="utf8")

    with pytest.raises(SessionError, match="work.py"):
        session_file.save(session, file)
    assert file.read_text(encoding="utf8") == text

    session_file.save(session, file, force=True)
    assert file.read_text(encoding="utf8").startswith(TEXT.removesuffix("\n}\n"))  # and what the names mean


def test_places_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="nothing.json"):
        session_file.load(anew(), tmp_path / "nothing.json")
    with pytest.raises(SessionError, match=str(tmp_path)):
        session_file.load(anew(), tmp_path)


def document(**changed: Any) -> str:
    return json.dumps({**json.loads(TEXT), **changed})


def with_patch(**entry: Any) -> str:
    return document(patches=[{"path": "x", "kind": "zero", **entry}])


BAD = {
    "no JSON": ("{", ""),
    "a list": ("[]", ""),
    "another schema": (document(schema="x"), "schema"),
    "deep nesting": ("[" * 100_000 + "]" * 100_000, ""),
    "an older version": (document(version=1), "version"),
    "a newer version": (document(version=3), "version"),
    "no patches": (document(patches=None), "patches"),
    "many patches": (document(patches=[{"path": "x", "kind": "zero"}] * 10_001), "patches"),
    "an unknown field": (document(patchs=[]), "patchs"),
    "an unknown field of a patch": (with_patch(silce="0"), r"silce.*patches\[0\]"),
    "no object": (document(patches=["x"]), r"patches\[0\]"),
    "no kind": (document(patches=[{"path": "x"}]), r"kind.*patches\[0\]"),
    "an unknown kind": (with_patch(kind="zeros"), r"patches\[0\].*'zero'"),
    "a number for a slice": (with_patch(slice=1), r"patches\[0\].slice"),
    "a bad slice": (with_patch(slice="f()"), r"patches\[0\]"),
    "a bad value": (with_patch(kind="add", value="1 +"), r"patches\[0\]"),
    "a text for enabled": (with_patch(enabled="no"), r"patches\[0\].enabled"),
    "a float for a dimension": (with_patch(positions="1", position_dim=1.5), r"patches\[0\].position_dim"),
    "an unknown path": (with_patch(path="up.liner"), r"patches\[0\]: .*'up.linear'"),
    "a long path": (with_patch(path="a" * 100_000), r"patches\[0\]"),
    "too many dimensions": (with_patch(slice="0, 0, 0, 0"), r"patches\[0\]"),
    "a name twice": (document(patches=[{"path": "x", "kind": "probe", "name": "a"}] * 2), r"patches\[1\]"),
    "an origin that is no Python": (document(origin={"model": "1 +"}), "origin"),
    "not UTF-8": (TEXT.encode("utf-16"), "bad.json"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_bad_files_change_nothing(session: Session, tmp_path: Path, text: str | bytes, message: str) -> None:
    before = session.chosen
    file = tmp_path / "bad.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())

    with pytest.raises(SessionError, match=message or None) as raised:
        session_file.load(session, file)

    assert session.chosen is before
    assert str(file) in str(raised.value)
    assert len(str(raised.value)) < 1000


CODE = [
    "__import__('os').system('echo owned')",
    "().__class__.__base__.__subclasses__()",
    "[f for f in (print,)][0]",
    "[*steer]",
    "{f(x): 1}",
    "steer[f()]",
    "steer[:, x.y]",
    "1 + (2 * -f(3))",
    "f'{x}'",
    "f'{f()}'",
    "'%s' % f()",
    "lambda value: value",
    "x if f() else y",
    "x and f()",
    "x < f()",
    "not f()",
    "(\n1,\n\n*f())",
]


@pytest.mark.parametrize("value", CODE)
def test_files_of_others_with_code_are_loaded_when_they_are_trusted(tmp_path: Path, value: str) -> None:
    file = tmp_path / "theirs.json"
    file.write_text(document(patches=[{"path": "x", "kind": "custom", "value": value}]), encoding="utf8")
    session = anew()
    with pytest.raises(SessionError, match="--trust") as caught:
        session_file.load(session, file)
    assert str(file) in str(caught.value)
    assert session.chosen.patches == ()
    (trusted,) = session_file.load(session, file, is_trusted=True)
    assert ast.dump(ast.parse(trusted.value, mode="eval")) == ast.dump(ast.parse(value.strip(), mode="eval"))
    session_file.load(anew(), file)
    session_file.load(anew(), session_file.save(session, tmp_path / "copy.json"))  # saved here
    file.write_text(file.read_text(encoding="utf8") + "\n", encoding="utf8")
    with pytest.raises(SessionError, match="--trust"):
        session_file.load(anew(), file)


@pytest.mark.parametrize(
    "value", ["1", "-0.5 * steer[2]", "steer @ steer", "[steer[:, -1], (1e-3, {'a': ~x})]", "{1, None} - {2}"]
)
def test_names_and_numbers_need_no_trust(tmp_path: Path, value: str) -> None:
    file = tmp_path / "theirs.json"
    file.write_text(document(patches=[{"path": "x", "kind": "custom", "value": value}]), encoding="utf8")
    session_file.load(anew(), file)


def chosen_patches() -> st.SearchStrategy[ChosenPatch | None]:
    def make(**fields: Any) -> ChosenPatch | None:
        observes = fields["kind"] in ("probe", "record")
        fields["name"] = fields["name"] if observes else None
        fields["value"] = fields["value"] if fields["kind"] in ("add", "replace", "custom") else None
        try:
            return ChosenPatch(**fields)
        except ChosenPatchError:
            return None

    return st.builds(
        make,
        path=st.sampled_from(PATHS),
        kind=st.sampled_from(["zero", "add", "replace", "probe", "record", "custom"]),
        slice=st.none() | st.sampled_from(["0", "...", ":, -1", "[0, 1]", "ünï, 1:"]),
        value=st.sampled_from(["1", "x\u2028+ 1", "'\\ud800'", '"\u202e"', "f(\n1)"]) | st.text(),
        name=st.from_regex(r"[a-zäöü]{1,3}\d", fullmatch=True),
        is_enabled=st.booleans(),
        steps=st.none() | st.sampled_from(["prefill", "1:", "0, 2"]),
        positions=st.none() | st.sampled_from(["3", "1:4", "-1"]),
        position_dim=st.none() | st.integers(-2, 2),
        any_shape=st.booleans(),
        allow_empty=st.booleans(),
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(chosen_patches(), max_size=6))
def test_what_is_saved_comes_back(patches: list[ChosenPatch | None]) -> None:
    session = anew()
    for patch in patches:
        with contextlib.suppress(ChosenPatchError):
            if patch is not None:
                session.add(patch)
    text = session_file.dumps(session)
    other = anew()

    session_file.loads(other, text)

    assert other.chosen.patches == session.chosen.patches
    assert session_file.dumps(other) == text


def test_names_that_mean_other_values_are_left_out(tmp_path: Path) -> None:
    """As those of models that iterate over a set, in another process."""
    graphs = [captured("full", "local"), captured("local", "full"), captured("full", "local", mask=torch.ones(1, 2))]
    one, other, masked = map(Session, graphs)
    for path in ("mul_1", "x", "last.output"):
        one.add(ChosenPatch(path, "zero"))
    session_file.load(masked, session_file.save(one, tmp_path / "a"))
    with pytest.warns(GraphPatchWarning) as caught:
        loaded = session_file.load(other, tmp_path / "a")
    assert [patch.path for patch in loaded] == ["x", "last.output"]
    (text,) = [str(warning.message) for warning in caught]
    assert "'mul_1' (" in text
    assert "full" in text
    assert "'mul' (" not in text
    one.remove([2, 3])
    session_file.save(one, tmp_path / "b")
    with pytest.raises(SessionError, match=r"'mul_1' \("):
        session_file.load(other, tmp_path / "b")
    assert other.chosen.patches == loaded
