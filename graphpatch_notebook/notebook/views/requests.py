"""Answers requests of the front end (`Requests` in js/src/kernel/protocol.ts). Functions without widgets.

`HANDLERS` has the requests of all views: patches, runs, export. A view adds its own.

    {"id": 7, "request": "details", "payload": {"row": 3}}
      -> {"id": 7, "result": {...}}                          and binary parts
      -> {"id": 7, "error": {"message": ..., "field": ...}}  a message for the user

Requests never run the model in the current thread: a request may arrive while a cell of the user is running.
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from graphpatch_notebook.errors import ChosenPatchError, GraphPatchError, SessionError, StaleEditError, cut
from graphpatch_notebook.notebook.export.patch_code import export
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, names_used
from graphpatch_notebook.notebook.session.patch_kinds import PATCH_KINDS, RESTRICTIONS
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.session_file import trust
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.notebook.views.selection import Item, patches_of, problem_of
from graphpatch_notebook.paths import nearest

if TYPE_CHECKING:
    from graphpatch_notebook.notebook.run.runs import Runs


FIELDS = ("path", "kind", "slice", "value", "name", *RESTRICTIONS)


def session_state(
    session: Session,
    row_of: Callable[[str], int | None] = lambda _: None,
    known: dict[ChosenPatch, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Returns the chosen patches (`SessionState` of the front end), with rows and shapes. Updates the cache `known`.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.ReLU(), torch.ones(2, 3))
        >>> session = Session(pg)
        >>> _ = session.add(ChosenPatch("relu", "zero", slice=":, 0"))
        >>> state = session_state(session)
        >>> state["version"], [(one["number"], one["row"], one["sliced"]) for one in state["patches"]]
        (1, [(1, -1, [2])])
    """
    chosen = session.chosen
    before = {} if known is None else dict(known)
    now = {patch: before.get(patch) or patch_state(session, row_of(patch.path), patch) for patch in chosen.patches}
    if known is not None:
        known.clear()
        known.update(now)
    return {
        "version": chosen.version,
        "patches": [now[patch] for patch in chosen.patches],
        "can_undo": session.can_undo,
        "can_redo": session.can_redo,
    }


def patch_state(session: Session, row: int | None, patch: ChosenPatch) -> dict[str, Any]:
    """Returns a chosen patch (`PatchState` of the front end)."""
    shape = sliced = warning = None
    try:
        # Without the other patches: warnings about combinations appear when a patch is added.
        found = session.check(patch, ())
    except ChosenPatchError as problem:  # the graph was edited since
        warning = str(problem)
    else:
        shape, sliced, warning = found.shape, found.sliced, found.warning
    return {
        **{field: getattr(patch, field) for field in FIELDS},
        "number": patch.number,
        "is_enabled": patch.is_enabled,
        "untrusted": None if patch.untrusted is None else patch.untrusted.name,
        "row": -1 if row is None else row,
        "shape": None if shape is None else list(shape),
        "sliced": None if sliced is None else list(sliced),
        "warning": warning,
    }


T = TypeVar("T")
Answer: TypeAlias = "tuple[dict[str, Any], list[bytes]]"
Handlers: TypeAlias = "Mapping[str, Callable[[RequestContext, Payload], Answer]]"
"""By the name of a request: a function of the context and the payload."""
_LONGEST_NAME = 100
_MISTAKE = "this is a mistake in graphpatch-notebook, not yours: please report it, with the traceback above in the log"


@dataclass(frozen=True)
class RequestContext:
    """The objects that requests read and change."""

    session: Session
    workspace: Workspace
    runs: Runs


class Payload:
    """The payload of a request. Everything is checked, since the front end is not trusted.

    Raises:
        SessionError: The content is not a dict. The methods raise it if a part is missing or has another type.
    """

    def __init__(self, content: Any) -> None:
        if not isinstance(content, dict):
            raise SessionError(f"a request needs a payload, not {cut(repr(content))}")
        self._content: dict[str, Any] = content

    def number(self, name: str) -> int:
        return self._typed(name, int, "an integer")

    def number_or_none(self, name: str) -> int | None:
        return None if self._get(name) is None else self.number(name)

    def text(self, name: str) -> str:
        return self._typed(name, str, "a string")

    def text_or_none(self, name: str) -> str | None:
        return None if self._get(name) is None else self.text(name)

    def flag(self, name: str) -> bool:
        return self._typed(name, bool, "true or false")

    def numbers(self, name: str) -> list[int]:
        value = self._get(name)
        if not isinstance(value, list) or any(type(one) is not int for one in value):
            raise SessionError(f"{name!r} must be a list of integers, not {cut(repr(value))}")
        return list(value)

    def items(self, name: str) -> list[Item]:
        value = self._get(name)
        if (problem := problem_of(value)) is not None:
            raise SessionError(problem)
        return list(value)

    def part(self, name: str) -> Payload:
        return Payload(self._get(name))

    def fields(self, *more: str) -> dict[str, Any]:
        """Returns the given fields of a patch. Their values are checked when the patch is created."""
        known = (*FIELDS, *more)
        unknown = next((name for name in self._content if name not in known), None)
        if unknown is not None:
            raise SessionError(f"a patch has no field {cut(repr(unknown))}; it has {', '.join(known)}")
        return dict(self._content)

    def _typed(self, name: str, kind: type[T], words: str) -> T:
        value = self._get(name)
        if type(value) is not kind:
            raise SessionError(f"{name!r} must be {words}, not {cut(repr(value))}")
        return value

    def _get(self, name: str) -> Any:
        if name not in self._content:
            raise SessionError(f"{name!r} is missing in the request")
        return self._content[name]


def answer(context: RequestContext, message: Any, handlers: Handlers) -> Answer:
    """Returns the reply to a message of the front end, and the binary parts of the reply. Never raises."""
    number = message.get("id") if isinstance(message, dict) else None
    number = number if type(number) is int else -1
    try:
        result, buffers = _handled(context, message, handlers)
    except StaleEditError as error:
        return _error(number, str(error), "version")
    except ChosenPatchError as error:
        return _error(number, str(error), error.field)
    except GraphPatchError as error:
        return _error(number, str(error))
    except Exception as error:
        traceback.print_exc()
        return _error(number, f"{type(error).__name__}: {error}; {_MISTAKE}")
    return {"id": number, "result": result}, buffers


def _error(number: int, message: str, field: str | None = None) -> Answer:
    return {"id": number, "error": {"message": message, "field": field}}, []


def _handled(context: RequestContext, message: Any, handlers: Handlers) -> Answer:
    request = Payload(message)
    request.number("id")
    name = request.text("request")
    handler = handlers.get(name)
    if handler is None:
        close = ", ".join(map(repr, nearest(name[:_LONGEST_NAME], list(handlers))))
        raise SessionError(f"unknown request {cut(repr(name))}; nearest: {close}; is the page older than the kernel?")
    return handler(context, request.part("payload"))


# --------------------------------------------------------------------------------------------------------------------
# Patches


def _edit(context: RequestContext, payload: Payload) -> Answer:
    session, version, edit = context.session, payload.number("based_on"), payload.part("edit")
    match edit.text("action"):
        case "add":
            session.add(_patch(context, edit.part("patch").fields()), version)
        case "change":
            _change(context, edit, version)
        case "move":
            session.move(edit.number("number"), max(0, edit.number("position")), version)
        case "remove":
            session.remove(edit.numbers("numbers"), version)
        case "clear":
            session.clear(version)
        case "trust":
            trust(session, edit.number("number"), version)
        case "act":
            session.extend(_acts(context, edit), version)
        case "undo":
            session.undo(version)
        case "redo":
            session.redo(version)
        case other:
            raise SessionError(f"unknown edit {cut(repr(other))}")
    return {"version": session.chosen.version}, []


def _acts(context: RequestContext, edit: Payload) -> list[ChosenPatch]:
    items, taken = edit.items("items"), context.workspace.results.names_of_others()
    act, value, steps = edit.text("act"), edit.text_or_none("value"), edit.text_or_none("steps")
    return patches_of(context.session, act, items, value, taken, steps)


def _change(context: RequestContext, edit: Payload, version: int) -> None:
    number, changed = edit.number("number"), edit.part("patch").fields("is_enabled")
    before = context.session.chosen.find(number)
    if not changed.keys() <= {"is_enabled"}:
        fields = {field: getattr(before, field) for field in FIELDS} | changed
        after = _patch(context, fields, is_enabled=fields.pop("is_enabled", before.is_enabled))
        changed = {field: getattr(after, field) for field in FIELDS} | {"is_enabled": after.is_enabled}
    context.session.change(number, version, **changed)


def _patch(context: RequestContext, fields: dict[str, Any], is_enabled: Any = True) -> ChosenPatch:
    """Returns a patch with the given fields, and with an unused name if it needs one."""
    for field in ("path", "kind"):
        if not isinstance(fields.get(field), str):
            raise ChosenPatchError(field, f"a patch needs a {field}, not {cut(repr(fields.get(field)))}")
    if "name" in _fields_of(fields) and fields.get("name") is None:
        # Check the path first, since the name is derived from it.
        path = context.session.check(ChosenPatch(fields["path"], "zero", any_shape=True)).patch.path
        fields = {**fields, "name": context.session.free_name(path, context.workspace.results.names_of_others())}
    return ChosenPatch(**fields, is_enabled=is_enabled)


def _fields_of(fields: dict[str, Any]) -> tuple[str, ...]:
    """Returns the fields that the kind of a patch has; empty for an unknown kind."""
    kind = PATCH_KINDS.get(str(fields.get("kind")))
    return () if kind is None else kind.fields


def _check(context: RequestContext, payload: Payload) -> Answer:
    session, number = context.session, payload.number_or_none("number")
    fields = payload.part("patch").fields()
    others = [patch for patch in session.chosen.patches if patch.number != number]
    before = next((patch for patch in session.chosen.patches if patch.number == number), None)
    if before is not None and fields.get("name") is None and "name" in _fields_of(fields):
        fields["name"] = before.name
    if fields.get("value") is None and "value" in _fields_of(fields):
        # Until a value is typed, check the slice as for a patch without a value.
        fields["kind"] = "zero"
    patch = _patch(context, fields, before.is_enabled if before is not None else True).numbered(number or 0)
    found = session.check(patch, others)
    warnings = [warning for warning in (found.warning, *_notes(context, patch, before)) if warning]
    return {
        "shape": None if found.shape is None else list(found.shape),
        "sliced": None if found.sliced is None else list(found.sliced),
        "warning": "; ".join(warnings) or None,
        "name": patch.name,
    }, []


def _notes(context: RequestContext, patch: ChosenPatch, before: ChosenPatch | None) -> list[str]:
    """Returns the same notes as the magics when they add such a patch."""
    namespace = context.workspace.namespace
    unknown = [name for name in sorted(names_used([patch])) if name not in namespace and not hasattr(builtins, name)]
    notes = []
    if unknown:
        notes.append(f"{', '.join(map(repr, unknown))} {'is' if len(unknown) == 1 else 'are'} not defined yet")
    is_own = before is not None and before.name == patch.name
    if patch.name in namespace and not is_own and not context.workspace.results.is_own(str(patch.name)):
        notes.append(f"the variable {patch.name} exists, and the next run overwrites it")
    return notes


def _export(context: RequestContext, payload: Payload) -> Answer:
    form = payload.text("form")
    if form != "graphpatch":
        raise SessionError(f"unknown form {cut(repr(form))}: it is 'graphpatch'")
    # With the inputs of *Run*, so that the numbers are equal.
    origin = replace(context.session.origin, arguments=payload.text_or_none("inputs") or context.runs.written())
    return {"code": str(export(context.session, origin=origin))}, []


# --------------------------------------------------------------------------------------------------------------------
# Runs


def run_status(context: RequestContext, payload: Payload) -> Answer:
    """Returns how far a job is, or its result."""
    return context.runs.status(payload.number("id"))


def interrupt_run(context: RequestContext, payload: Payload) -> Answer:
    """Interrupts a job, and returns its status."""
    context.runs.interrupt(payload.number("id"))
    return context.runs.status(payload.number("id"))


HANDLERS: Handlers = {
    "edit": _edit,
    "check": _check,
    "run": lambda context, payload: context.runs.status(context.runs.start(payload.text_or_none("inputs"))),
    "run_status": run_status,
    "run_interrupt": interrupt_run,
    "export": _export,
}
"""The requests that every view has."""
