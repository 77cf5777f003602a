"""Paths as people type them: in quotes, with the brackets of a list of modules, with `*`; and what they mean."""

from __future__ import annotations

import json
import re
from collections.abc import Container
from dataclasses import replace

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.inspection.resolution import Unresolvable, resolve
from graphpatch_notebook.notebook.magics.command_line import Place

_LIST_ITEM = re.compile(r"\[(\d+)\](?=[.|\[])")
_HEAD = re.compile(r"\s*\S*")


def cut_place(text: str, root: Frame) -> Place:
    """Returns `PATH[slice]` at the front of a text, the path as the package writes it where that can be told.

    Args:
        text: The text.
        root: The root frame of the capture.

    Raises:
        SessionError: It is none; where a list of modules has brackets as in Python, the message has the path meant.
    """
    try:
        place = Place.cut(text)
    except SessionError:
        if (meant := _of_list_items(text, root)) is not None:
            typed = text.split(maxsplit=1)[0]
            raise SessionError(f"{typed!r} is no path: a path has no brackets; did you mean {meant!r}?") from None
        raise
    return replace(place, path=unquoted(place.path, root.names))


def unquoted(path: str, names: Container[str]) -> str:
    """Returns a path without the quotes around it, as code has it; unchanged, where it is one of these names."""
    if len(path) < 3 or path[0] != path[-1] or path[0] not in "\"'":
        return path
    if path[0] == "'":  # which a name in a path may have, but need not
        return path if path in names else path[1:-1]
    try:
        inside = str(json.loads(path))
    except ValueError:
        return path
    return path if inside in names else inside


def _of_list_items(text: str, root: Frame) -> str | None:
    """Returns the path, with its slice, that `model.layers[1].mlp.output` means; `None` where there is no such path."""
    head = _HEAD.match(text)
    assert head is not None  # it may be empty
    try:
        place = Place.cut(_LIST_ITEM.sub(r"_\1", head.group()) + text[head.end() :])
        resolve(root, place.path)
    except SessionError:
        return None
    except Unresolvable as problem:
        if problem.is_unknown:
            return None
    return _with_slice(place.path, place.slice)


def advice(message: str, place: Place, kind: str, root: Frame) -> str:
    """Returns what is said of a path that cannot be patched, in the syntax of the magic, with the slice as typed.

    Args:
        message: What the session says.
        place: What was typed.
        kind: The kind of patch.
        root: The root frame of the capture.
    """
    if "*" in re.sub(r'"[^"]*"', "", place.path):
        path = _with_slice(place.path.replace("*", "{i}"), place.slice)
        return (
            f"{place.path!r} would be several nodes, and a patch is for one: choose them in a loop, "
            f"for i in range(...): with %graphpatch {kind} {path} in its body"
        )
    if whole := re.search(r"use '(.+)' with slice=\.\.\.$", message):
        return f"{message[: whole.start()]}write {whole[1]}[{place.slice or '...'}]"
    if place.slice is None:
        return message
    what, parted, repairs = message.partition("; ")
    return what + parted + re.sub(r"'([^']+)'", lambda match: _repaired(match[1], place.slice, root), repairs)


def _repaired(quoted: str, slice_text: str | None, root: Frame) -> str:
    try:
        resolve(root, quoted)
    except Unresolvable:
        return f"'{quoted}'"
    return f"'{_with_slice(quoted, slice_text)}'"


def _with_slice(path: str, slice_text: str | None) -> str:
    return path if slice_text is None else f"{path}[{slice_text}]"
