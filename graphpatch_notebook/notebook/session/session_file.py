"""Session files: the chosen patches as JSON that users can read and edit.

    {
      "schema": "graphpatch-session",
      "version": 2,
      "origin": {"graph": "pg", "model": "model", "arguments": "ids"},
      "patches": [
        {"path": "h_0.mlp.output", "kind": "zero", "slice": ":, -1"},
        {"path": "h_1.attn.weights", "kind": "probe", "name": "seen", "enabled": false}
      ],
      "meanings": {"h_1.attn": {"weights": {"operation": "op softmax", "line": "forward: weights = ..."}, ...}, ...}
    }

`meanings` is what the names mean that the patches use. In another version of a model's code, or another process, a name
may be of another value; such a patch is left out. (Older files have `op`, the operation.) `origin` shows how the graph
was made, with `null` for what is not known. Reading a file evaluates nothing: values are texts until a patch context is
entered. A file with values that are code is refused, unless the user trusts it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from IPython.paths import get_ipython_dir

from graphpatch_notebook.errors import ChosenPatchError, SessionError, cut, warn_each_time, whole_file
from graphpatch_notebook.inspection.meanings import Meanings, differing_names, meanings, targets_of
from graphpatch_notebook.inspection.resolution import kept_for, with_nearest
from graphpatch_notebook.notebook.messages import Message, PatchFields
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, fields_of
from graphpatch_notebook.notebook.session.expressions import Origin, is_plain
from graphpatch_notebook.notebook.session.session import PatchVariables, Session
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.paths import format_path

_MOST_PROBLEMS = 20
_LONGEST_PROBLEM = 500
_WRITABLE = 0o222


class _Entry(PatchFields, frozen=True, omit_defaults=True):
    enabled: bool = True
    op: str | None = None


class _SessionFile(Message):
    schema: Literal["graphpatch-session"]
    version: Literal[2]
    patches: Annotated[list[_Entry], msgspec.Meta(max_length=10_000)]
    origin: Origin = Origin()
    meanings: Meanings = msgspec.field(default_factory=dict)


# --------------------------------------------------------------------------------------------------------------------
# Writing


def dumps(session: Session) -> str:
    """Returns the chosen patches of a session, and where its graph came from, as JSON."""
    entries = [_Entry(**fields_of(patch), enabled=patch.is_enabled) for patch in session.chosen.patches]
    nodes = session.graph.nodes
    used = targets_of(nodes, (entry.path for entry in entries))
    content = _SessionFile("graphpatch-session", 2, entries, session.origin, meanings(nodes, used))
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"


def save(session: Session, file: str | os.PathLike[str], force: bool = False) -> Path:
    """Writes the chosen patches to a file; returns the file. By default, only a session file is overwritten.

    The file is trusted from now on.

    Raises:
        SessionError: The file cannot be written, or is not a session file; it is not changed.
    """
    text = dumps(session)
    target = write_text(file, text, None if force else _content)
    if any(map(_is_code, session.chosen.patches)):
        _trust(digest(text.encode()))
    return target


def _is_code(patch: ChosenPatch) -> bool:
    return patch.value is not None and not is_plain(patch.value)


# --------------------------------------------------------------------------------------------------------------------
# Reading


def load(session: Session, file: str | os.PathLike[str], is_trusted: bool = False) -> tuple[ChosenPatch, ...]:
    """Replaces all chosen patches by those in a file, as one step of undo; returns them.

    Patches that do not fit this graph, for example because the model's code has changed, are left out: an
    `GraphPatchWarning` names each, with the nearest paths. The origin of the session does not change.

    Raises:
        SessionError: The file cannot be read or is not valid, or none of its patches fits this graph; the message
            names all problems, and nothing was changed. Or values are code, and the user has neither trusted the file
            as it is (`is_trusted`), nor saved it.
    """
    try:
        data = Path(file).expanduser().read_bytes()
        own = digest(data)
        loaded = loads(session, data, f"{str(file)!r}: ", is_trusted=is_trusted or _is_trusted(own))
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise SessionError(f"{str(file)!r} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if is_trusted:
        _trust(own)
    return loaded


def loads(session: Session, text: str | bytes, where: str = "", *, is_trusted: bool = True) -> tuple[ChosenPatch, ...]:
    """Replaces all chosen patches by those in a JSON text, as `load` does for a file; a message begins with `where`."""
    found: list[ChosenPatch] = []
    problems: list[str] = []
    misfits: list[str] = []  # the problems with this graph, not with the file
    variables = PatchVariables()
    content = _content(text)
    for position, entry in enumerate(content.patches):
        try:
            found.append(_checked(session, entry, variables, content.meanings))
            variables.add(found[-1])
        except ChosenPatchError as problem:
            kind = misfits if problem.field in ("path", "slice") else problems
            kind.append(cut(f"patches[{position}]: {problem}", _LONGEST_PROBLEM))
            continue
    if problems or (misfits and not found):
        raise SessionError(_listed([*problems, *misfits]))
    if not is_trusted and (code := [f"{one.path}: {one.value}" for one in found if _is_code(one)]):
        raise SessionError(
            f"{where}values are code, which would run with your cells: {_listed(code)}; nothing was loaded. If they do "
            "only what you want, trust the file as it is now: %graphpatch load FILE --trust"
        )
    loaded = session.edit(lambda _: found)
    if misfits:
        many = f"{len(misfits)} of {len(misfits) + len(found)} patches do not fit this graph, and were left out"
        warn_each_time(f"{where}{many}: {_listed(misfits)}", "unresolved patch")
    return loaded


def _checked(session: Session, entry: _Entry, others: PatchVariables, there: Meanings) -> ChosenPatch:
    """Returns the patch of an entry as the session would choose it."""
    root = captured(session.graph).root
    patch = ChosenPatch(**fields_of(entry), is_enabled=entry.enabled)
    try:
        checked = session.check(patch, others).patch
    except ChosenPatchError as problem:
        if problem.field != "path":
            raise
        raise ChosenPatchError("path", with_nearest(root, patch.path, str(problem))) from None
    nodes = session.graph.nodes
    used = targets_of(nodes, [checked.path])
    if entry.op is not None and not there:
        there = {
            format_path(t.frame.path): {t.node.name: {"operation": f"op {entry.op}"}}
            for t in used
            if not t.node.is_size
        }
    if differing := differing_names(kept_for(nodes, meanings), there, used):
        message = f"names mean other values here than where it was saved: {differing}"
        raise ChosenPatchError("path", with_nearest(root, checked.path, message))
    return checked


def _listed(problems: list[str]) -> str:
    more = len(problems) - _MOST_PROBLEMS
    return "; ".join(problems[:_MOST_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


def _content(text: str | bytes) -> _SessionFile:
    """Returns the content of a text; raises a `SessionError` if it is not a session that this version can read."""
    try:
        return msgspec.json.decode(text, type=_SessionFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SessionError(f"it is not a session: {error}") from None


# --------------------------------------------------------------------------------------------------------------------
# Text files, also of exported code


def write_text(file: str | os.PathLike[str], text: str, check_overwritten: Callable[[bytes], object] | None) -> Path:
    """Writes a text file atomically, and returns it, with links and `~` resolved.

    Args:
        file: The file.
        text: Its new content.
        check_overwritten: Raises a `SessionError` for a content that must not be overwritten; `None` overwrites
            everything but read-only files.

    Raises:
        SessionError: The file cannot be written, or must not be; its content is not changed.
    """
    try:
        target = Path(os.path.realpath(Path(file).expanduser()))
        if target.exists() and not (target.is_file() and target.stat().st_mode & _WRITABLE):
            raise OSError("it is read-only, or not a regular file")
        if target.exists() and check_overwritten is not None:
            check_overwritten(target.read_bytes())
        with whole_file(target) as written:
            written.write_bytes(text.encode())
    except SessionError as problem:
        raise SessionError(
            f"{str(file)!r} would be overwritten, but {problem}; choose another name, or add --force"
        ) from None
    except (OSError, RuntimeError, ValueError) as error:  # an unknown user in `~user`, a null character
        raise SessionError(f"{str(file)!r} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    return target


def digest(data: bytes) -> str:
    """Returns the SHA-256 of the content of a file."""
    return hashlib.sha256(data).hexdigest()


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
