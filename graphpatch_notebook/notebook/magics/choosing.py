"""The commands that change the chosen patches. Each prints what it changed."""

from __future__ import annotations

import builtins
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.components.names import is_component_name, parse_name
from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.inspection.resolution import Unresolvable, resolve
from graphpatch_notebook.notebook.magics.command_line import TypedPath, one_line, unquoted
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, ChosenPatches, names_used
from graphpatch_notebook.notebook.session.patch_kinds import FLAGS, PatchKind
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import Workspace, counted
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.paths import nearest, parse_path


def choose(workspace: Workspace, kind: PatchKind, args: Namespace) -> None:
    """Adds a patch to the chosen ones, unless the same patch is there: a cell can run again."""
    session = workspace.current().session
    root = captured(session.graph).root
    place = TypedPath.parse(args.path, root)
    options = ("steps", "positions", "position_dim", *FLAGS)
    fields: dict[str, Any] = {"slice": place.slice, **{name: getattr(args, name) for name in options if name in args}}
    # The path first: with a wrong path, the messages about the other arguments would be misleading.
    path = _path(session, place, kind)
    variable = None
    if kind.keeps is not None:
        variable = _variable(args.name)
        fields["name"] = variable or session.free_name(path, workspace.results.names_of_others())
    elif kind.value is not None:
        value = " ".join(args.value)
        # A path is taken as a text, except if it may be meant as a variable.
        is_path = kind.value.is_text and value not in workspace.namespace and _is_path(root, value)
        fields["value"] = repr(value) if is_path else value or None
    wanted = ChosenPatch(path, kind.name, **fields)
    for patch in [patch for patch in session.chosen.patches if patch.kind == kind.name]:
        name = wanted.name if variable is None else patch.name
        if patch.with_fields(number=0, is_enabled=True, name=name) == wanted:
            how = "" if patch.is_enabled else f", but disabled: %graphpatch enable #{patch.number}"
            print(f"#{patch.number} {described(patch)} is already chosen{how}")
            return
    check = session.check(wanted)
    added = session.add(wanted)
    print(f"#{added.number} {described(added)}{_shape_note(check.sliced, added)}{_name_note(workspace, added)}")
    if check.warning:
        print(f"warning: {one_line(check.warning)}")
    names = sorted(names_used([added]))
    unknown = [name for name in names if name not in workspace.namespace and not hasattr(builtins, name)]
    if unknown:
        print(f"note: {', '.join(map(repr, unknown))} {'is' if len(unknown) == 1 else 'are'} not defined yet")


def _path(session: Session, place: TypedPath, kind: PatchKind) -> str:
    """Returns the path as the package writes it."""
    if "*" in place.path.partition('"')[0]:
        pattern = place.path.replace("*", "{i}") if place.path.count("*") == 1 else "{path}"
        raise SessionError(
            f"{place.path!r} is a pattern for several nodes, but a patch has one node: choose them in a loop, "
            f"with %graphpatch {kind.name} {pattern} in its body"
        )
    # Any value can be set to zero; a call is replaced only where a module is called.
    asked = kind.name if kind.patch.replaces_call and kind.value is None else "zero"
    return session.check(ChosenPatch(place.path, asked, any_shape=True)).patch.path


def _is_path(root: Frame, text: str) -> bool:
    with suppress(Unresolvable):
        return bool(resolve(root, text))
    return False


def _variable(words: Sequence[str]) -> str | None:
    """Returns the variable in `[as] NAME`."""
    named = words[1:] if len(words) > 1 and words[0] == "as" else words
    if len(named) > 1 or [*named] == ["as"]:
        raise SessionError(f"{' '.join(words)!r} is not a valid variable name; write PATH[slice] NAME")
    return named[0] if named else None


def described(patch: ChosenPatch) -> str:
    """Returns a patch as a user would type it, without its number."""
    if patch.name is None:
        return str(patch)
    return " ".join([patch.kind, patch.place, "as", patch.name, *patch.options()])


def _shape_note(sliced: tuple[int, ...] | None, patch: ChosenPatch) -> str:
    if sliced is None:
        return ""
    return f" -> {'list of ' if patch.definition.keeps_list else ''}{sliced}"


def _name_note(workspace: Workspace, patch: ChosenPatch) -> str:
    if patch.name is None or patch.name not in workspace.namespace or workspace.results.is_own(patch.name):
        return ""
    return f"; the next run overwrites the variable {patch.name}"


# --------------------------------------------------------------------------------------------------------------------
# Selecting chosen patches


def numbers_of(chosen: ChosenPatches, specs: Sequence[str]) -> list[int]:
    """Returns the numbers of the patches that match `#n`, a path, a path with a slice, or a glob pattern of paths."""
    found = {number for spec in specs for number in _numbers_of(chosen, unquoted(spec))}
    return [patch.number for patch in chosen.patches if patch.number in found]


def _numbers_of(chosen: ChosenPatches, spec: str) -> list[int]:
    numbers = [part.strip().removeprefix("#") for part in spec.split(",")]
    if all(number.isdecimal() for number in numbers):
        return [chosen.find(int(number)).number for number in numbers]
    here: list[ChosenPatch] = []
    with suppress(SessionError, ValueError):  # a pattern
        place = TypedPath.cut(spec)
        path = _usual(place.path)
        index = None if place.slice is None else ChosenPatch(path, "zero", slice=place.slice).slice
        here = [patch for patch in chosen.patches if patch.path == path and index in (None, patch.slice)]
    here = here or [patch for patch in chosen.patches if fnmatchcase(patch.path, spec)]
    if here:
        return [patch.number for patch in here]
    paths = list(dict.fromkeys(patch.path for patch in chosen.patches))
    hint = f"nearest: {', '.join(map(repr, nearest(spec.partition('[')[0], paths)))}" if paths else "no patch is chosen"
    raise SessionError(f"no chosen patch matches {spec!r}; {hint}")


def _usual(path: str) -> str:
    try:
        return str(parse_name(path) if is_component_name(path) else parse_path(path))
    except ValueError:
        return path


# --------------------------------------------------------------------------------------------------------------------
# Edits


def remove(workspace: Workspace, args: Namespace) -> None:
    """Removes patches from the chosen ones."""
    session = workspace.current().session
    for patch in session.remove(numbers_of(session.chosen, args.specs)):
        print(f"removed #{patch.number} {described(patch)}")


def enable(workspace: Workspace, args: Namespace) -> None:
    """Enables patches."""
    _switch(workspace, args, True)


def disable(workspace: Workspace, args: Namespace) -> None:
    """Disables patches, without removing them."""
    _switch(workspace, args, False)


def _switch(workspace: Workspace, args: Namespace, is_enabled: bool) -> None:
    session = workspace.current().session
    for number in numbers_of(session.chosen, args.specs):
        patch = session.change(number, is_enabled=is_enabled)
        print(f"{'enabled' if is_enabled else 'disabled'} #{number} {described(patch)}")


def clear(workspace: Workspace, _: Namespace) -> None:
    """Removes all chosen patches."""
    removed = workspace.current().session.clear()
    them = "it" if len(removed) == 1 else "them"
    print(f"removed {counted(len(removed))}; use undo to restore {them}" if removed else "no patch was chosen")


def undo(workspace: Workspace, _: Namespace) -> None:
    """Undoes the last edit."""
    session = workspace.current().session
    before = session.chosen
    print(_difference(before, session) if session.undo() else "there is nothing to undo")


def redo(workspace: Workspace, _: Namespace) -> None:
    """Redoes the last edit that was undone."""
    session = workspace.current().session
    before = session.chosen
    print(_difference(before, session) if session.redo() else "there is nothing to redo")


def _difference(before: ChosenPatches, session: Session) -> str:
    after = session.chosen
    gone = [
        f"- #{patch.number} {_state(patch)}{described(patch)}" for patch in before.patches if patch not in after.patches
    ]
    came = [patch for patch in after.patches if patch not in before.patches]
    new = [f"+ #{patch.number} {_state(patch)}{described(patch)}" for patch in came]
    changes = "; ".join([*gone, *new][:4]) + (" ..." if len(gone) + len(new) > 4 else "")
    return f"{changes or 'new order'} ({counted(len(after.patches))} chosen now)"


def _state(patch: ChosenPatch) -> str:
    return "" if patch.is_enabled else "(off) "
