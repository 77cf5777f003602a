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
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import ChosenPatchError, SessionError, SessionFileError, UntrustedValueError
from graphpatch_notebook.notebook.export import export
from graphpatch_notebook.notebook.session import session_file
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import Origin
from graphpatch_notebook.notebook.session.session import Session

pytestmark = pytest.mark.hosts


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

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


def names_in(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


TEXT = """\
{
  "schema": "graphpatch-session",
  "version": 1,
  "patches": [
    {
      "path": "up.linear",
      "kind": "zero",
      "slice": ":, -1",
      "op": "linear"
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


def test_a_file_can_be_read_by_people(session: Session, tmp_path: Path) -> None:
    file = session_file.save(session, tmp_path / "session.json")

    assert file.read_text(encoding="utf8") == TEXT == session_file.dumps(session)
    assert names_in(tmp_path) == ["session.json"]


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


def test_a_file_is_overwritten_if_it_is_a_session(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "session.json"
    session_file.save(anew(), file)
    file.chmod(0o640)
    session_file.save(session, str(file))

    assert file.read_text(encoding="utf8") == TEXT
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "text", ["print(1)\n", "{}", '{"schema": "other"}', "", TEXT.replace('version": 1', 'version": 2')]
)
def test_no_other_file_is_overwritten(session: Session, tmp_path: Path, text: str) -> None:
    file = tmp_path / "work.py"
    file.write_text(text, encoding="utf8")

    with pytest.raises(SessionFileError, match="work.py"):
        session_file.save(session, file)
    assert file.read_text(encoding="utf8") == text

    session_file.save(session, file, force=True)
    assert file.read_text(encoding="utf8") == TEXT


def test_a_file_that_is_read_only_stays(session: Session, tmp_path: Path) -> None:
    file = session_file.save(anew(), tmp_path / "file")
    before = file.read_text(encoding="utf8")
    file.chmod(0o444)

    for force in (False, True):
        with pytest.raises(SessionFileError, match="file"):
            session_file.save(session, file, force=force)
    assert file.read_text(encoding="utf8") == before
    assert names_in(tmp_path) == ["file"]


def test_places_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SessionFileError, match=r"nothing.json' cannot be read: No such file or directory"):
        session_file.load(anew(), tmp_path / "nothing.json")
    with pytest.raises(SessionFileError, match=r"cannot be read: Is a directory"):
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
    "a newer version": (document(version=2), "version"),
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
    "not UTF-8": (TEXT.encode("utf-16"), ""),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_bad_files_change_nothing(session: Session, tmp_path: Path, text: str | bytes, message: str) -> None:
    before = session.chosen
    file = tmp_path / "bad.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())

    with pytest.raises(SessionFileError, match=message) as raised:
        session_file.load(session, file)

    assert session.chosen is before
    assert str(file) in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_places_that_cannot_be_written(session: Session, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere" / "session.json", Path("/dev/null"), tmp_path / "a\0b"):
        with pytest.raises(SessionFileError):
            session_file.save(session, place, force=True)
    assert names_in(tmp_path) == []


def test_loading_evaluates_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    value = f"__import__('pathlib').Path({str(canary)!r}).touch()"
    text = document(origin={"model": value, "arguments": value}, patches=[{"path": "x", "kind": "add", "value": value}])

    (loaded,) = session_file.loads(anew(), text)

    assert loaded.value == value
    assert not canary.exists()


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
def test_code_in_files_of_others_is_not_run_until_it_is_trusted(tmp_path: Path, value: str) -> None:
    file = tmp_path / "theirs.json"
    file.write_text(document(patches=[{"path": "x", "kind": "custom", "value": value}]), encoding="utf8")
    ran: list[Any] = []
    namespace = {"f": lambda *_: ran.append(1) or 0, "x": 1, "y": 2, "steer": torch.ones(2, 3)}
    session = anew()
    (patch,) = session_file.load(session, file)
    assert (patch.value, patch.is_enabled) == (value, True)
    message = rf"#1 .* is code from '{file}', .* with %graphpatch load {file} --trust, or disable #1"
    with pytest.raises(SessionError, match=message) as caught:
        session.resolve(namespace)
    assert isinstance(caught.value.__cause__, UntrustedValueError)
    session.change(1, slice="0", steps="prefill")  # which leaves the value as it is
    with pytest.raises(SessionError, match="which you have not trusted"):
        session.resolve(namespace)
    # Nor does it become the user's own by being saved, or loaded in another notebook.
    session_file.save(session, tmp_path / "copy.json")
    (copied,) = session_file.load(anew(), tmp_path / "copy.json")
    assert copied.untrusted is not None
    assert ran == []
    assert ast.dump(ast.parse(value, mode="eval").body) in ast.dump(ast.parse(str(export(session))))

    (trusted,) = session_file.load(anew(), file, is_trusted=True)
    (again,) = session_file.load(anew(), file)
    assert trusted.untrusted is again.untrusted is None
    file.write_text(file.read_text(encoding="utf8") + "\n", encoding="utf8")
    (edited,) = session_file.load(anew(), file)
    assert edited.untrusted is not None


@pytest.mark.parametrize(
    "value", ["1", "-0.5 * steer[2]", "steer @ steer", "[steer[:, -1], (1e-3, {'a': ~x})]", "{1, None} - {2}"]
)
def test_names_and_numbers_need_no_trust(tmp_path: Path, value: str) -> None:
    file = tmp_path / "theirs.json"
    file.write_text(document(patches=[{"path": "x", "kind": "custom", "value": value}]), encoding="utf8")
    (patch,) = session_file.load(anew(), file)
    assert patch.untrusted is None


def test_a_value_that_the_user_writes_is_trusted(tmp_path: Path) -> None:
    file = tmp_path / "theirs.json"
    entries = [{"path": "x", "kind": "add", "value": f"float({number})"} for number in (1, 2)]
    file.write_text(document(patches=entries), encoding="utf8")
    session = anew()
    session_file.load(session, file)
    session.change(1, value="float(3)")
    assert [patch.untrusted is None for patch in session.chosen.patches] == [True, False]
    session_file.trust(session, 2)
    assert [patch.untrusted for patch in session_file.load(session, file)] == [None, None]
    session.undo()
    session.undo()
    assert [patch.untrusted is None for patch in session.chosen.patches] == [True, False]


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
        positions=st.none() | st.sampled_from(["3", "1:4"]),
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
