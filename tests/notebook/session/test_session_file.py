"""Sessions as JSON files."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import ChosenPatchError, SessionError, SessionFileError, UntrustedValueError
from graphpatch_notebook.notebook.export.patch_code import export
from graphpatch_notebook.notebook.session import session_file
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.origin import Origin
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
  "origin": {"graph": "pg", "model": "model", "arguments": "x"},
  "patches": [
    {"path": "up.linear", "kind": "zero", "slice": ":, -1", "op": "linear"},
    {"path": "output|last", "kind": "probe", "name": "hidden", "enabled": false},
    {"path": "down.weight", "kind": "add", "value": "\\"\\".join([\\"é\\"]) or 1"}
  ]
}
"""


def test_a_file_can_be_read_by_people(session: Session, tmp_path: Path) -> None:
    file = session_file.save(session, tmp_path / "session.json")

    assert file.read_text(encoding="utf8") == TEXT == session_file.dumps(session)
    assert names_in(tmp_path) == ["session.json"]
    assert session_file.dumps(anew()).endswith('"arguments": null},\n  "patches": []\n}\n')


def test_loading_is_one_edit(session: Session, tmp_path: Path) -> None:
    file = session_file.save(session, tmp_path / "session.json")
    other = anew()
    other.add(ChosenPatch("x", "zero"))
    version = other.chosen.version

    loaded = session_file.load(other, file)

    assert loaded == other.chosen.patches
    assert [patch.number for patch in loaded] == list(range(2, 2 + len(loaded)))  # #1 was another patch
    assert [patch.numbered(patch.number - 1) for patch in loaded] == list(session.chosen.patches)
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

    with pytest.raises(SessionFileError, match=r"work.py' would be overwritten, but it is .*; choose another name"):
        session_file.save(session, file)
    assert file.read_text(encoding="utf8") == text

    session_file.save(session, file, force=True)
    assert file.read_text(encoding="utf8") == TEXT


def test_a_link_stays_a_link(session: Session, tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    with pytest.raises(SessionFileError, match=r"link' is a link to '.*file', which does not exist"):
        session_file.save(session, link)
    assert not file.exists()

    file.write_text("{}", encoding="utf8")
    assert session_file.save(session, link, force=True) == file
    assert link.is_symlink()
    assert link.read_text(encoding="utf8") == TEXT


def test_a_link_to_a_link_in_another_folder_stays(session: Session, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    file = session_file.save(anew(), tmp_path / "far" / "file")
    (tmp_path / "far" / "inner").symlink_to("file")
    (tmp_path / "link").symlink_to(Path("far") / "inner")

    assert session_file.save(session, tmp_path / "link") == file
    assert file.read_text(encoding="utf8") == TEXT
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far" / "inner").is_symlink()


def test_links_in_a_circle_are_refused(session: Session, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")

    for force in (False, True):
        with pytest.raises(SessionFileError, match="cannot be written: it is a link to itself"):
            session_file.save(session, tmp_path / "one", force=force)
    with pytest.raises(SessionFileError, match="cannot be read: "):
        session_file.load(anew(), tmp_path / "one")
    assert (tmp_path / "one").is_symlink()
    assert names_in(tmp_path) == ["one", "two"]


def test_all_names_of_a_file_keep_its_content(session: Session, tmp_path: Path) -> None:
    file = session_file.save(anew(), tmp_path / "file")
    (tmp_path / "other").hardlink_to(file)

    session_file.save(session, file)
    assert (tmp_path / "other").read_text(encoding="utf8") == TEXT
    assert file.samefile(tmp_path / "other")


def test_a_file_that_is_read_only_stays(session: Session, tmp_path: Path) -> None:
    file = session_file.save(anew(), tmp_path / "file")
    before = file.read_text(encoding="utf8")
    file.chmod(0o444)

    for force in (False, True):
        with pytest.raises(SessionFileError, match=r"file' is read-only: choose another name, or make it writable"):
            session_file.save(session, file, force=force)
    assert file.read_text(encoding="utf8") == before
    assert names_in(tmp_path) == ["file"]


def test_a_name_with_a_null_character_is_refused(session: Session) -> None:
    with pytest.raises(SessionFileError, match="is not a file name"):
        session_file.save(session, "a\0b")
    with pytest.raises(SessionFileError, match="is not a file name"):
        session_file.load(session, "a\0b")


def test_places_that_cannot_be_written(session: Session, tmp_path: Path) -> None:
    with pytest.raises(SessionFileError, match=r"is a directory: give the name of a file"):
        session_file.save(session, tmp_path, force=True)
    with pytest.raises(SessionFileError, match=r"cannot be written: No such file or directory"):
        session_file.save(session, tmp_path / "nowhere" / "session.json")
    with pytest.raises(SessionFileError, match=r"not a regular file"):
        session_file.save(session, "/dev/null", force=True)
    with pytest.raises(SessionFileError, match=r"cannot be written: File name too long"):
        session_file.save(session, tmp_path / ("a" * 300))
    assert names_in(tmp_path) == []


def test_a_failed_write_leaves_the_file(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = session_file.save(anew(), tmp_path / "session.json")
    before = file.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        with pytest.raises(SessionFileError, match=r"cannot be written: No space left on device"):
            session_file.save(session, file)
    assert file.read_bytes() == before
    assert names_in(tmp_path) == ["session.json"]


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
    "no JSON": ("{", r"it does not hold valid JSON \(.*: line 1 column 2"),
    "a list": ("[]", r'it does not have "schema": "graphpatch-session"'),
    "another schema": (document(schema="x"), r'it does not have "schema"'),
    "deep nesting": ("[" * 100_000 + "]" * 100_000, r"nested too deeply"),
    "deep nesting of a field": (
        with_patch(path=1).replace("1}", "[" * 300 + "]" * 300 + "}"),
        r"path must be str, not",
    ),
    "NaN": (document(version=float("nan")), r"NaN is not a number"),
    "a huge number": (
        document(version=0).replace('"version": 0', '"version": ' + "9" * 5000),
        r"valid JSON|: update",
    ),
    "a large number": (document(version=10**100), r"of version 1000.*and this graphpatch reads version 1: update"),
    "a newer version": (document(version=2), r"it is of version 2, and this graphpatch reads version 1: update"),
    "version zero": (document(version=0), r"its version 0 is not a positive integer"),
    "a text for a version": (document(version="1"), r'its version "1" is not a positive integer'),
    "a truth value for a version": (document(version=True), r"its version true is not a positive integer"),
    "a field twice": (TEXT.replace('"version"', '"schema"'), r"'schema' is given twice in one object"),
    "a field of a patch twice": (TEXT.replace('"slice"', '"path"'), r"'path' is given twice in one object"),
    "no patches": (document(patches=None), r"patches must be a list, not null"),
    "many patches": (document(patches=[0] * 1_000_000), r"it has 1,000,000 patches, more than 10,000"),
    "an unknown field": (document(patchs=[]), r"unknown field \"patchs\"; nearest: 'patches'"),
    "an unknown field of a patch": (with_patch(silce="0"), r"patches\[0\]: .*\"silce\"; nearest: 'slice'"),
    "a number of a patch": (with_patch(number=3), r"unknown field \"number\""),
    "no object": (document(patches=["x"]), r'patches\[0\] must be an object, not "x"'),
    "no kind": (document(patches=[{"path": "x"}]), r"patches\[0\]: kind is missing"),
    "an unknown kind": (with_patch(kind="zeros"), r"patches\[0\]: unknown kind 'zeros'; nearest: 'zero'"),
    "a kind of another type": (with_patch(kind=["zero"]), r"patches\[0\]: kind must be str, not \['zero'\]"),
    "a number for a slice": (with_patch(slice=1), r"slice must be str \| None, not 1"),
    "a bad slice": (with_patch(slice="f()"), r"patches\[0\]: 'f\(\)' is not allowed in the slice"),
    "a bad value": (with_patch(kind="add", value="1 +"), r"patches\[0\]: '1 \+' is not a Python expression"),
    "a text for enabled": (with_patch(enabled="no"), r'enabled must be true or false, not "no"'),
    "null for enabled": (with_patch(enabled=None), r"enabled must be true or false, not null"),
    "a float for a dimension": (with_patch(positions="1", position_dim=1.5), r"position_dim must be int \| None"),
    "infinity for a dimension": (with_patch(positions="1", position_dim=0).replace(" 0}", " 1e999}"), r"not inf"),
    "an unknown path": (with_patch(path="up.liner"), r"patches\[0\]: .*nearest: 'up.linear', '.*', '.*'"),
    "a long path": (with_patch(path="a" * 100_000), r"patches\[0\]: no node 'aaaa.*\.\.\.$"),
    "a lone surrogate": (with_patch(path="\ud800"), r"patches\[0\]: no node '\\ud800'"),
    "a container": (with_patch(path="output"), r"say which value: 'output\|last'"),
    "too many dimensions": (with_patch(slice="0, 0, 0, 0"), r"has 4 dimensions, but the value recorded here has 3"),
    "a name twice": (
        document(patches=[{"path": "x", "kind": "probe", "name": "a"}] * 2),
        r"patches\[1\]: .* 'x' in 'a': choose another variable",
    ),
    "an origin that is a list": (document(origin=[]), r"origin must be an object, not \[\]"),
    "an unknown field of the origin": (document(origin={"grap": "pg"}), r"origin: .*\"grap\"; nearest: 'graph'"),
    "an origin with a number": (document(origin={"model": 1}), r"origin: model must be a string, not 1"),
    "an origin without a name": (document(origin={"graph": None}), r"origin: graph must be a string, not null"),
    "an origin that is no Python": (document(origin={"model": "1 +"}), r"origin: .* is not a Python expression"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_bad_files_change_nothing(session: Session, tmp_path: Path, text: str, message: str) -> None:
    before = session.chosen
    file = tmp_path / "bad.json"
    file.write_text(text, encoding="utf8")

    with pytest.raises(SessionFileError, match=message) as raised:
        session_file.load(session, file)

    assert session.chosen is before
    assert str(raised.value).startswith(repr(str(file)))
    assert len(str(raised.value)) < 1000
    assert "\n" not in str(raised.value)


def test_values_are_checked_as_where_they_are_typed(session: Session) -> None:
    entry = {"path": "x", "kind": "add", "value": "[1, 2]"}
    with pytest.raises(
        SessionFileError, match=r"add takes a number or a tensor, not a list, .*torch.tensor\(\[1, 2\]\)"
    ):
        session_file.loads(session, document(patches=[entry]))


@pytest.mark.parametrize("data", [b"\xff\xfe{\x00}\x00", b"\x80", b"{}\xc3"])
def test_a_file_is_utf8(session: Session, tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(data)
    with pytest.raises(SessionFileError, match=r"not UTF-8 \(at byte \d\)"):
        session_file.load(session, file)


def test_a_byte_order_mark_is_taken(session: Session, tmp_path: Path) -> None:
    session_file.save(session, tmp_path / "trusted.json")
    file = tmp_path / "session.json"
    file.write_text(TEXT, encoding="utf-8-sig")
    assert session_file.load(anew(), file) == session.chosen.patches


def test_all_errors_are_reported(session: Session) -> None:
    entries = [{"path": "x", "kind": "zero"}, {"path": "y", "kind": "zero"}, {"kind": "zero"}, 3]
    with pytest.raises(SessionFileError) as raised:
        session_file.loads(session, document(patches=entries, more=1))

    message = str(raised.value)
    assert re.findall(r"patches\[(\d)\]", message) == ["1", "2", "3"]
    assert "more" in message

    with pytest.raises(SessionFileError, match=r"; and 80 more$"):
        session_file.loads(session, document(patches=[3] * 100))


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


def test_a_list_of_trusted_files_that_cannot_be_used_trusts_nothing(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "graphpatch_trusted_sessions").mkdir()
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    file = session_file.save(session, tmp_path / "session.json")
    assert session_file.load(anew(), file)[2].untrusted is not None
    assert session_file.load(anew(), file, is_trusted=True)[2].untrusted is None


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
    assert text.encode("utf8").decode("utf8").replace("\n", "").isprintable()
