"""Answers requests of the front end (`REQUESTS` in notebook/messages.py). Functions without widgets.

`HANDLERS` has the requests of all views: patches, runs, export. A view adds its own.

Requests never run the model in the current thread: a request may arrive while a cell of the user is running.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from graphpatch_notebook.errors import ChosenPatchError, GraphPatchError, SessionError, StaleEditError
from graphpatch_notebook.notebook.export import export
from graphpatch_notebook.notebook.messages import (
    REQUESTS,
    ActEdit,
    AddEdit,
    ChangeEdit,
    Checked,
    CheckRequest,
    ClearEdit,
    Code,
    Edited,
    EditRequest,
    EnableEdit,
    JobRef,
    Message,
    MoveEdit,
    PatchFields,
    PatchState,
    RedoEdit,
    RemoveEdit,
    RunRequest,
    SessionState,
    TrustEdit,
    UndoEdit,
)
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, unknown_names
from graphpatch_notebook.notebook.session.patch_kinds import PATCH_KINDS
from graphpatch_notebook.notebook.session.session import Check, Session
from graphpatch_notebook.notebook.session.session_file import trust
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.notebook.views.selection import patches_of

if TYPE_CHECKING:
    from graphpatch_notebook.notebook.run.runs import Runs


_MISTAKE = "this is a mistake in graphpatch-notebook, not yours: please report it, with the traceback above in the log"
Answer: TypeAlias = "tuple[Message, list[bytes]]"
Handlers: TypeAlias = "Mapping[str, Callable[[RequestContext, Any], Answer]]"
"""By the name of a request: a function of the context and the payload."""


@dataclass(frozen=True)
class RequestContext:
    """The objects that requests read and change."""

    session: Session
    workspace: Workspace
    runs: Runs


class _Request(msgspec.Struct):
    id: int
    request: str
    payload: Any


def answer(context: RequestContext, message: Any, handlers: Handlers) -> tuple[dict[str, Any], list[bytes]]:
    """Returns the reply to a message of the front end, and the binary parts of the reply. Never raises."""
    number = message.get("id") if isinstance(message, dict) else -1
    field = None
    try:
        request = msgspec.convert(message, _Request)
        if request.request not in handlers:
            raise SessionError(f"unknown request {request.request!r:.100}; is the page older than the kernel?")
        payload = msgspec.convert(request.payload, REQUESTS[request.request][0])
        result, buffers = handlers[request.request](context, payload)
        return {"id": number, "result": msgspec.to_builtins(result)}, buffers
    except msgspec.ValidationError as error:
        text = f"{error}; is the page older than the kernel?"
    except GraphPatchError as error:
        text = str(error)
        field = "version" if isinstance(error, StaleEditError) else getattr(error, "field", None)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}; {_MISTAKE}"
    return {"id": number if type(number) is int else -1, "error": {"message": text, "field": field}}, []


# --------------------------------------------------------------------------------------------------------------------
# Patches


def session_state(session: Session, row_of: Callable[[str], int | None] = lambda _: None) -> SessionState:
    """Returns the chosen patches, with rows and shapes.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.ReLU(), torch.ones(2, 3))
        >>> session = Session(pg)
        >>> _ = session.add(ChosenPatch("relu", "zero", slice=":, 0"))
        >>> state = session_state(session)
        >>> state.version, [(one.number, one.row, one.sliced) for one in state.patches]
        (1, [(1, -1, [2])])
    """
    chosen = session.chosen
    patches = [_patch_state(session, row_of(patch.path), patch) for patch in chosen.patches]
    return SessionState(chosen.version, patches, session.can_undo, session.can_redo)


def _patch_state(session: Session, row: int | None, patch: ChosenPatch) -> PatchState:
    try:
        # Without the other patches: warnings about combinations appear when a patch is added.
        found = session.check(patch, ())
    except ChosenPatchError as problem:  # the graph was edited since
        found = Check(patch, warning=str(problem))
    return PatchState(
        **fields_of(patch),
        number=patch.number,
        is_enabled=patch.is_enabled,
        untrusted=None if patch.untrusted is None else patch.untrusted.name,
        row=-1 if row is None else row,
        shape=None if found.shape is None else list(found.shape),
        sliced=None if found.sliced is None else list(found.sliced),
        warning=found.warning,
    )


def fields_of(patch: PatchFields) -> dict[str, Any]:
    """Returns what a user types for a patch, by field."""
    return {name: getattr(patch, name) for name in PatchFields.__struct_fields__}


def _edit(context: RequestContext, payload: EditRequest) -> Answer:
    session, version = context.session, payload.based_on
    match payload.edit:
        case AddEdit(patch=fields):
            session.add(_patch(context, fields), version)
        case ChangeEdit(number=number, patch=fields):
            session.change(number, version, **fields_of(_patch(context, fields)))
        case EnableEdit(number=number, is_enabled=is_enabled):
            session.change(number, version, is_enabled=is_enabled)
        case MoveEdit(number=number, position=position):
            session.move(number, position, version)
        case RemoveEdit(numbers=numbers):
            session.remove(numbers, version)
        case TrustEdit(number=number):
            trust(session, number, version)
        case ActEdit(act=act, items=items, value=value, steps=steps):
            taken = context.workspace.results.names_of_others()
            session.extend(patches_of(session, act, items, value, taken, steps), version)
        case ClearEdit():
            session.clear(version)
        case UndoEdit():
            session.undo(version)
        case RedoEdit():
            session.redo(version)
    return Edited(session.chosen.version), []


def _patch(context: RequestContext, typed: PatchFields) -> ChosenPatch:
    """Returns a patch with the given fields, and with an unused name if it needs one."""
    fields = fields_of(typed)
    if typed.name is None and _has_field(typed.kind, "name"):
        # Check the path first, since the name is derived from it.
        path = context.session.check(ChosenPatch(typed.path, "zero", any_shape=True)).patch.path
        fields["name"] = context.session.free_name(path, context.workspace.results.names_of_others())
    return ChosenPatch(**fields)


def _has_field(kind: str, field: str) -> bool:
    return kind in PATCH_KINDS and field in PATCH_KINDS[kind].fields


def _check(context: RequestContext, payload: CheckRequest) -> Answer:
    session, typed = context.session, payload.patch
    others = [patch for patch in session.chosen.patches if patch.number != payload.number]
    before = next((patch for patch in session.chosen.patches if patch.number == payload.number), None)
    if typed.name is None and before is not None and _has_field(typed.kind, "name"):
        typed = msgspec.structs.replace(typed, name=before.name)
    if typed.value is None and _has_field(typed.kind, "value"):
        # Until a value is typed, check the slice as for a patch without a value.
        typed = msgspec.structs.replace(typed, kind="zero")
    patch = _patch(context, typed).with_fields(number=payload.number or 0)
    found = session.check(patch, others)
    namespace = context.workspace.namespace
    notes = [found.warning, unknown_names(patch, namespace)]
    is_kept = before is not None and before.name == patch.name
    if patch.name in namespace and not is_kept and not context.workspace.results.is_own(str(patch.name)):
        notes.append(f"the variable {patch.name} exists, and the next run overwrites it")
    shape, sliced = (None if one is None else list(one) for one in (found.shape, found.sliced))
    return Checked(shape, sliced, "; ".join(filter(None, notes)) or None, patch.name), []


def _export(context: RequestContext, payload: RunRequest) -> Answer:
    # With the inputs of *Run*, so that the numbers are equal.
    origin = replace(context.session.origin, arguments=payload.inputs or context.runs.written())
    return Code(str(export(context.session, origin=origin))), []


# --------------------------------------------------------------------------------------------------------------------
# Runs


def job_status(context: RequestContext, payload: JobRef) -> Answer:
    """Returns the status of a job."""
    return context.runs.status(payload.id)


def interrupt_job(context: RequestContext, payload: JobRef) -> Answer:
    """Interrupts a job, and returns its status."""
    context.runs.interrupt(payload.id)
    return context.runs.status(payload.id)


HANDLERS: Handlers = {
    "edit": _edit,
    "check": _check,
    "run": lambda context, payload: context.runs.status(context.runs.start(payload.inputs)),
    "run_status": job_status,
    "run_interrupt": interrupt_job,
    "export": _export,
}
"""The requests that every view has."""
