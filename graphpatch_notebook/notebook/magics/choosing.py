"""The commands that change the chosen patches. Each prints what it changed."""

from __future__ import annotations

import builtins
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.components.names import is_component_name, parse_name
from graphpatch_notebook.errors import ChosenPatchError, SessionError
from graphpatch_notebook.inspection.resolution import Unresolvable, resolve
from graphpatch_notebook.notebook.magics.command_line import (
    OPTIONS,
    TypedPath,
    advice,
    arguments,
    cut_place,
    leading_options,
    one_line,
    split_options,
    unquoted,
    without_comment,
)
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, ChosenPatches, names_used
from graphpatch_notebook.notebook.session.patch_kinds import FLAGS, PatchKind
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import Workspace, counted
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.paths import nearest, parse_path


def choose(workspace: Workspace, kind: PatchKind, text: str) -> None:
    """Adds a patch to the chosen ones, unless the same patch is there: a cell can run again."""
    session = workspace.current().session
    root = captured(session.graph).root
    place, options, value = _parsed(text, root)
    if not place.path:
        raise SessionError(f"{kind.name} needs the path of a node: %graphpatch {kind.name} PATH[slice] ...")
    fields: dict[str, Any] = {"slice": place.slice, **_restrictions(options)}
    # The path first: with a wrong path, the messages about the other arguments would be misleading.
    path = _path(session, place, kind, root)
    variable = _variable(value) if kind.keeps is not None else None
    if kind.keeps is not None:
        fields["name"] = variable or session.free_name(path, workspace.results.names_of_others())
    elif kind.value is not None:
        # A path is taken as a text, except if it may be meant as a variable.
        is_path = kind.value.is_text and value not in workspace.namespace and _is_path(root, value)
        fields["value"] = repr(value) if is_path else value or None
    elif value:
        hint = "; write the slice directly after the path, without a space" if value.startswith("[") else ""
        raise SessionError(f"{kind.name} takes no value, but got {value!r}{hint}")
    wanted = ChosenPatch(path, kind.name, **fields)
    if (same := _same(session.chosen, wanted, any_name=variable is None)) is not None:
        how = "" if same.is_enabled else f", but disabled: %graphpatch enable #{same.number}"
        print(f"#{same.number} {described(same)} is already chosen{how}")
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


def _path(session: Session, place: TypedPath, kind: PatchKind, root: Frame) -> str:
    """Returns the path as the package writes it."""
    try:
        # Any value can be set to zero; a call is replaced only where a module is called.
        asked = kind.name if kind.patch.replaces_call and kind.value is None else "zero"
        return session.check(ChosenPatch(place.path, asked, any_shape=True)).patch.path
    except ChosenPatchError as problem:
        raise ChosenPatchError(problem.field, advice(str(problem), place, kind.name, root)) from None


def _is_path(root: Frame, text: str) -> bool:
    with suppress(Unresolvable):
        return bool(resolve(root, text))
    return False


def _same(chosen: ChosenPatches, wanted: ChosenPatch, *, any_name: bool) -> ChosenPatch | None:
    """Returns the chosen patch that equals `wanted`; with `any_name`, the name of its variable can differ."""
    for patch in chosen.patches:
        if patch.kind == wanted.kind:
            name = wanted.name if any_name else patch.name
            if replace(patch, number=0, is_enabled=True, name=name) == wanted:
                return patch
    return None


def _parsed(text: str, root: Frame) -> tuple[TypedPath, dict[str, str], str]:
    """Returns the path with its slice, the options, and the value as it was typed."""
    found, text = leading_options(text)
    place = cut_place(text, root)
    more, value = split_options(without_comment(place.rest), OPTIONS)
    if twice := found.keys() & more.keys():
        raise SessionError(f"the option {min(twice)} is given twice")
    return place, {**found, **more}, value


def _restrictions(options: dict[str, str]) -> dict[str, Any]:
    dim = options.get("--position-dim")
    try:
        position_dim = None if dim is None else int(dim)
    except ValueError:
        raise SessionError(f"--position-dim must be an integer, but got {dim!r}") from None
    return {
        "steps": options.get("--steps"),
        "positions": options.get("--positions"),
        "position_dim": position_dim,
        **{flag: f"--{flag.replace('_', '-')}" in options for flag in FLAGS},
    }


def _variable(text: str) -> str | None:
    named = text.split()
    if len(named) == 2 and named[0] == "as":
        named = named[1:]
    if len(named) > 1 or named == ["as"]:
        raise SessionError(f"{text!r} is not a valid variable name; write PATH[slice] NAME")
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


def numbers_of(chosen: ChosenPatches, specs: list[str]) -> list[int]:
    """Returns the numbers of the patches that match `#n`, a path, a path with a slice, or a glob pattern of paths."""
    found = {number for spec in specs for number in _numbers_of(chosen, spec)}
    return [patch.number for patch in chosen.patches if patch.number in found]


def _numbers_of(chosen: ChosenPatches, spec: str) -> list[int]:
    numbers = [part.removeprefix("#") for part in spec.split(",")]
    if all(number.isdecimal() for number in numbers):
        return [chosen.find(int(number)).number for number in numbers]
    try:
        here = _at_place(chosen, spec)
    except SessionError:
        if "*" not in spec and "?" not in spec and "[" not in spec:
            raise
        here = []
    bare = spec[1:-1] if len(spec) > 1 and spec[0] == spec[-1] and spec[0] in "\"'" else spec
    here = here or [patch for patch in chosen.patches if fnmatchcase(patch.path, bare)]
    if here:
        return [patch.number for patch in here]
    if bare != spec:
        return _numbers_of(chosen, bare)
    paths = list(dict.fromkeys(patch.path for patch in chosen.patches))
    hint = f"nearest: {', '.join(map(repr, nearest(spec.partition('[')[0], paths)))}" if paths else "no patch is chosen"
    raise SessionError(f"no chosen patch matches {spec!r}; {hint}")


def _at_place(chosen: ChosenPatches, spec: str) -> list[ChosenPatch]:
    place = TypedPath.cut(spec)
    path = _usual(place.path)
    if not any(patch.path == path for patch in chosen.patches):
        path = _usual(unquoted(place.path, ()))
    here = [patch for patch in chosen.patches if patch.path == path]
    if place.slice is None:
        return here
    wanted = ChosenPatch(path, "zero", slice=place.slice).slice
    return [patch for patch in here if patch.slice == wanted]


def _usual(path: str) -> str:
    try:
        return str(parse_name(path) if is_component_name(path) else parse_path(path))
    except ValueError:
        return path


# --------------------------------------------------------------------------------------------------------------------
# Edits


def remove(workspace: Workspace, text: str) -> None:
    """Removes patches from the chosen ones."""
    session = workspace.current().session
    for patch in session.remove(numbers_of(session.chosen, _specs(text, "rm"))):
        print(f"removed #{patch.number} {described(patch)}")


def enable(workspace: Workspace, text: str) -> None:
    """Enables patches."""
    _switch(workspace, text, True)


def disable(workspace: Workspace, text: str) -> None:
    """Disables patches, without removing them."""
    _switch(workspace, text, False)


def _switch(workspace: Workspace, text: str, is_enabled: bool) -> None:
    word = "enable" if is_enabled else "disable"
    session = workspace.current().session
    for number in numbers_of(session.chosen, _specs(text, word)):
        patch = session.change(number, is_enabled=is_enabled)
        print(f"{word}d #{number} {described(patch)}")


def _specs(text: str, command: str) -> list[str]:
    specs = arguments(text)
    if not specs:
        raise SessionError(f"{command} needs a patch: %graphpatch {command} #1, or a path")
    return specs


def clear(workspace: Workspace, text: str) -> None:
    """Removes all chosen patches."""
    refuse_arguments(text, "clear", "to remove some, use rm")
    removed = workspace.current().session.clear()
    them = "it" if len(removed) == 1 else "them"
    print(f"removed {counted(len(removed))}; use undo to restore {them}" if removed else "no patch was chosen")


def undo(workspace: Workspace, text: str) -> None:
    """Undoes the last edit."""
    _step(workspace, text, "undo")


def redo(workspace: Workspace, text: str) -> None:
    """Redoes the last edit that was undone."""
    _step(workspace, text, "redo")


def _step(workspace: Workspace, text: str, command: str) -> None:
    refuse_arguments(text, command)
    session = workspace.current().session
    before = session.chosen
    is_done = session.undo() if command == "undo" else session.redo()
    print(_difference(before, session) if is_done else f"there is nothing to {command}")


def refuse_arguments(text: str, command: str, hint: str = "") -> None:
    """Checks that a command has no arguments."""
    if given := arguments(text):
        suffix = f"; {hint}" if hint else ""
        raise SessionError(f"{command} takes no arguments, but got {' '.join(given)!r}{suffix}")


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
