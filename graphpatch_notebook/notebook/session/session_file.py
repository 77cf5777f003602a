"""Session files: the chosen patches as JSON that users can read and edit.

    {
      "schema": "graphpatch-session",
      "version": 1,
      "origin": {"graph": "pg", "model": "model", "arguments": "ids"},
      "patches": [
        {"path": "h_0.mlp.output", "kind": "zero", "slice": ":, -1"},
        {"path": "h_1.attn.weights", "kind": "probe", "name": "seen", "enabled": false, "op": "softmax"}
      ]
    }

A patch has the fields of `ChosenPatch` (`enabled` for `is_enabled`) without the number, which follows from the order.
Fields with default values are left out. `op` is the operation that computes the value. In another version of a model's
code the name may belong to another operation; such a patch is left out. `origin` shows how the graph was made, with
`null` for what is not known. Reading a file evaluates nothing: values are texts until a patch context is entered, and
values that are code are not evaluated then unless the user trusts the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from IPython.paths import get_ipython_dir

from graphpatch_notebook.errors import (
    ChosenPatchError,
    SessionError,
    SessionFileError,
    UnresolvedPatchWarning,
    cut,
)
from graphpatch_notebook.inspection.resolution import operation_of, other_operation, with_nearest
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, UntrustedFile, names_used
from graphpatch_notebook.notebook.session.expressions import is_plain
from graphpatch_notebook.notebook.session.origin import Origin
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.paths import nearest
from graphpatch_notebook.warning_places import warn_each_time
from graphpatch_notebook.whole_files import whole_file

SCHEMA = "graphpatch-session"
VERSION = 1
MOST_PATCHES = 10_000
_MOST_BYTES = 32 * 2**20
_MOST_PROBLEMS = 20
_LONGEST_PROBLEM = 500
_WRITABLE = 0o222

_FIELDS = {("enabled" if field.name == "is_enabled" else field.name): field for field in fields(ChosenPatch)}
del _FIELDS["number"], _FIELDS["untrusted"]
_OF_GRAPH = ("path", "slice")
_REQUIRED = [name for name, field in _FIELDS.items() if field.default is MISSING]


# --------------------------------------------------------------------------------------------------------------------
# Writing


def dumps(session: Session) -> str:
    """Returns the chosen patches of a session, and where its graph came from, as JSON."""
    origin = {field.name: getattr(session.origin, field.name) for field in fields(Origin)}
    head = f'"schema": {_json(SCHEMA)},\n  "version": {VERSION},\n  "origin": {_json(origin)},\n  "patches": '
    entries = [f"    {_json(_entry(patch, session))}" for patch in session.chosen.patches]
    patches = "[\n" + ",\n".join(entries) + "\n  ]" if entries else "[]"
    return "{\n  " + head + patches + "\n}\n"


def _entry(patch: ChosenPatch, session: Session) -> dict[str, Any]:
    values = {name: getattr(patch, field.name) for name, field in _FIELDS.items()}
    entry = {name: value for name, value in values.items() if value != _FIELDS[name].default}
    op = operation_of(captured(session.graph).root, patch.path)
    return entry if op is None else {**entry, "op": op}


def _json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    # Escape surrogates, line breaks and characters that change the direction of text.
    return text if text.isprintable() else json.dumps(value)


def save(session: Session, file: str | os.PathLike[str], force: bool = False) -> Path:
    """Writes the chosen patches to a file atomically; returns the file. By default, only a session file is overwritten.

    The file is trusted from now on, unless it contains values that are not trusted.

    Raises:
        SessionFileError: The file cannot be written, or is not a session file; it is not changed.
    """
    try:
        target = real_file(file)
        if target.exists() and not force:
            _check_overwritten(target)
        text = dumps(session)
        replace_text(target, text)
    except OSError as error:
        raise SessionFileError(f"{str(file)!r} cannot be written: {_reason(error)}") from error
    patches = session.chosen.patches
    if any(map(_is_code, patches)) and not any(patch.untrusted for patch in patches):
        _trust(digest(text))
    return target


def _is_code(patch: ChosenPatch) -> bool:
    return patch.value is not None and not is_plain(patch.value)


def _check_overwritten(target: Path) -> None:
    try:
        _document(_text(target))
    except SessionFileError as problem:
        raise SessionFileError(
            f"{str(target)!r} would be overwritten, but {problem}; choose another name, or add --force"
        ) from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


# --------------------------------------------------------------------------------------------------------------------
# Reading


def load(session: Session, file: str | os.PathLike[str], is_trusted: bool = False) -> tuple[ChosenPatch, ...]:
    """Replaces all chosen patches by those in a file, as one step of undo; returns them.

    Values that are code are not evaluated, unless the user has trusted the file (`is_trusted`) and it has not changed.

    Patches that do not fit this graph, for example because the model's code has changed, are left out: an
    `UnresolvedPatchWarning` names each, with the nearest paths. The origin of the session does not change.

    Raises:
        SessionFileError: The file cannot be read or is not valid, or none of its patches fits this graph; the message
            names all problems, and nothing was changed.
    """
    check_no_nul(file)
    try:
        text = _text(Path(file).expanduser())
        source = UntrustedFile(str(file), digest(text))
        is_trusted = is_trusted or _is_trusted(source.digest)
        loaded = loads(session, text, f"{str(file)!r}: ", None if is_trusted else source)
    except (OSError, RuntimeError) as error:  # RuntimeError: unknown user in `~user`
        raise SessionFileError(f"{str(file)!r} cannot be read: {_reason(error)}") from error
    except SessionFileError as problem:
        raise SessionFileError(f"{str(file)!r}: {problem}") from None
    if is_trusted:
        _trust(source.digest)
    return loaded


def trust(session: Session, number: int, based_on: int | None = None) -> None:
    """Trusts the current text of the file that a chosen patch is from: its values are evaluated from now on."""
    file = session.chosen.find(number).untrusted
    if file is not None:
        session.trust(file, based_on)
        _trust(file.digest)


def loads(session: Session, text: str, where: str = "", source: UntrustedFile | None = None) -> tuple[ChosenPatch, ...]:
    """Replaces all chosen patches by those in a JSON text, as `load` does for a file; a warning begins with `where`.

    `source` is the file, if the user does not trust it.
    """
    document = _document(text)
    problems = [*_unknown(document, ["schema", "version", "origin", "patches"], ""), *_origin_problems(document)]
    found: list[ChosenPatch] = []
    misfits: list[str] = []  # the problems with this graph, not with the file
    lost: set[str] = set()
    for position, entry in enumerate(_entries(document)):
        here = f"patches[{position}]"
        if wrong := _mistakes(entry, here):
            problems += wrong
            continue
        try:
            patch = ChosenPatch(**{_FIELDS[name].name: value for name, value in entry.items() if name != "op"})
        except ChosenPatchError as problem:
            problems.append(cut(f"{here}: {problem}", _LONGEST_PROBLEM))
            continue
        try:
            found.append(_checked(session, patch, entry.get("op"), found, lost))
        except ChosenPatchError as problem:
            problems.append(cut(f"{here}: {problem}", _LONGEST_PROBLEM))
            misfits += problems[-1:] if problem.field in _OF_GRAPH else []
            lost |= {patch.name} - {None}  # type: ignore[arg-type]
    if len(problems) > len(misfits) or (misfits and not found):
        raise SessionFileError(_listed(problems))
    loaded = session.replace_all(replace(one, untrusted=source) if _is_code(one) else one for one in found)
    if misfits:
        many = f"{len(misfits)} of {len(misfits) + len(found)} patches do not fit this graph, and were left out"
        warn_each_time(f"{where}{many}: {_listed(misfits)}", UnresolvedPatchWarning)
    return loaded


def _checked(
    session: Session, patch: ChosenPatch, op: str | None, others: list[ChosenPatch], lost: set[str]
) -> ChosenPatch:
    """Returns the patch as the session would choose it."""
    root = captured(session.graph).root
    try:
        checked = session.check(patch, others).patch
    except ChosenPatchError as problem:
        if problem.field != "path":
            raise
        raise ChosenPatchError("path", with_nearest(root, patch.path, str(problem))) from None
    if other := other_operation(root, checked.path, op):
        raise ChosenPatchError("path", other)
    if used := sorted(names_used([checked]) & lost):
        raise ChosenPatchError("path", f"{checked.path!r}: it uses {used[0]!r}, which a patch that was left out fills")
    return checked


def _listed(problems: list[str]) -> str:
    more = len(problems) - _MOST_PROBLEMS
    return "; ".join(problems[:_MOST_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


def _text(source: Path) -> str:
    with source.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise SessionFileError(f"it is not a session: more than {_MOST_BYTES >> 20} MiB long")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SessionFileError(f"it is not a session: not UTF-8 (at byte {error.start})") from None


def _document(text: str) -> dict[str, Any]:
    """Returns the content of a text, if it is a session that this version can read."""
    try:
        document = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_number)
    except RecursionError:
        raise SessionFileError("it is not a session: it is nested too deeply") from None
    except ValueError as error:
        raise SessionFileError(f"it is not a session: it does not hold valid JSON ({error})") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise SessionFileError(f'it is not a session: it does not have "schema": "{SCHEMA}"')
    version = document.get("version")
    if type(version) is not int or version < 1:
        raise SessionFileError(f"its version {_json_text(version)} is not a positive integer")
    if version > VERSION:
        raise SessionFileError(
            f"it is of version {_json_text(version)}, and this graphpatch reads version {VERSION}: update graphpatch"
        )
    return document


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:40]!r} is given twice in one object")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _entries(document: dict[str, Any]) -> list[Any]:
    entries = document.get("patches")
    if not isinstance(entries, list):
        raise SessionFileError(f"patches must be a list, not {_json_text(entries)}")
    if len(entries) > MOST_PATCHES:
        raise SessionFileError(f"it has {len(entries):,} patches, more than {MOST_PATCHES:,}")
    return entries


def _origin_problems(document: dict[str, Any]) -> Iterator[str]:
    origin = document.get("origin", {})
    if not isinstance(origin, dict):
        yield f"origin must be an object, not {_json_text(origin)}"
        return
    names = [field.name for field in fields(Origin)]
    yield from _unknown(origin, names, "origin: ")
    known = {name: origin[name] for name in names if name in origin}
    wrong = [
        name for name, value in known.items() if not isinstance(value, str) and (value is not None or name == "graph")
    ]
    yield from (f"origin: {name} must be a string, not {_json_text(known[name])}" for name in wrong)
    if not wrong:
        try:
            Origin(**known)
        except SessionError as problem:
            yield f"origin: {problem}"


def _mistakes(entry: Any, where: str) -> list[str]:
    """Returns which fields of a patch are unknown, missing or of the wrong type."""
    if not isinstance(entry, dict):
        return [f"{where} must be an object, not {_json_text(entry)}"]
    missing = [f"{where}: {name} is missing" for name in _REQUIRED if name not in entry]
    enabled = entry.get("enabled", True)
    wrong = [] if isinstance(enabled, bool) else [f"{where}: enabled must be true or false, not {_json_text(enabled)}"]
    if not isinstance(entry.get("op", ""), str):
        wrong.append(f"{where}: op must be a string, not {_json_text(entry['op'])}")
    return [*_unknown(entry, [*_FIELDS, "op"], f"{where}: "), *missing, *wrong]


def _unknown(given: dict[str, Any], known: list[str], where: str) -> list[str]:
    return [
        f"{where}unknown field {_json_text(name)}; nearest: {nearest(name[:100], known, 1)[0]!r}"
        for name in given
        if name not in known
    ]


def _json_text(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (RecursionError, ValueError):  # ValueError: a number of very many digits
        text = f"a {type(value).__name__}"
    return cut(text, 60)


# --------------------------------------------------------------------------------------------------------------------
# Text files: written atomically, and never over the files of others


def check_no_nul(file: str | os.PathLike[str]) -> None:
    """Checks that a file name has no null character."""
    if "\0" in os.fspath(file):
        raise SessionFileError(f"{str(file)!r} is not a file name: it contains a null character")


def real_file(file: str | os.PathLike[str]) -> Path:
    """Returns the file to write, with links and `~` resolved.

    Raises:
        SessionFileError: It is not a file, a broken link, or read-only.
        OSError: The file cannot be inspected.
    """
    check_no_nul(file)
    try:
        given = Path(file).expanduser()
        target = Path(os.path.realpath(given))
    except RuntimeError as error:  # unknown user in `~user`
        raise SessionFileError(f"{str(file)!r} cannot be written: {error}") from error
    if os.path.islink(target):  # noqa: PTH114  # unlike `Path`, it accepts names that are too long
        raise SessionFileError(f"{str(file)!r} cannot be written: it is a link to itself")
    if not target.exists():
        if os.path.islink(given):  # noqa: PTH114
            raise SessionFileError(
                f"{str(file)!r} is a link to {str(target)!r}, which does not exist: give another name"
            )
        return target
    if not target.is_file():
        what = "a directory" if target.is_dir() else "not a regular file"
        raise SessionFileError(f"{str(target)!r} is {what}: give the name of a file")
    # It could be replaced, but whether it is read-only is up to the user.
    if not target.stat().st_mode & _WRITABLE or not os.access(target, os.W_OK):
        raise SessionFileError(f"{str(target)!r} is read-only: choose another name, or make it writable")
    return target


def digest(text: str) -> str:
    """Returns the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def replace_text(target: Path, text: str) -> None:
    """Replaces the content of `target`.

    Raises:
        OSError: It cannot be written; its content is not changed.
    """
    if target.exists() and target.stat().st_nlink > 1:
        # Write in place, so that its other hard links change too.
        target.write_text(text, encoding="utf8", newline="\n")
        return
    with whole_file(target) as written:
        written.write_bytes(text.encode())


# --------------------------------------------------------------------------------------------------------------------
# Trusted files: the digests of their texts, one a line, in a file in IPython's directory. A changed file has another
# digest. If the list cannot be read or written, trust lasts for this session only.


def _is_trusted(digest: str) -> bool:
    """Whether the user trusts the file with this digest."""
    try:
        return digest in _trusted_list().read_text(encoding="utf8").split()
    except (OSError, UnicodeDecodeError):
        return False


def _trust(digest: str) -> None:
    """Adds the file with this digest to the trusted ones."""
    if not _is_trusted(digest):
        with contextlib.suppress(OSError), _trusted_list().open("a", encoding="utf8", newline="\n") as file:
            file.write(f"{digest}\n")


def _trusted_list() -> Path:
    return Path(get_ipython_dir()) / "graphpatch_trusted_sessions"
