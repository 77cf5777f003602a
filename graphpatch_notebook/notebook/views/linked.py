"""The base class of the views of a graph, which share the selection, the chosen patches and the runs.

front end  -- selection, and what else it may set -->  traits, validated  -->  the selection of the graph
front end  -- requests ----------------------------->  `answer`, by the `HANDLERS` of all views and those of the view
session    -- each change ------------------------->  trait `session`

Requests never run the model in the current thread: a request may arrive while a cell of the user is running.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import msgspec
import traitlets

from graphpatch_notebook._version import __version__
from graphpatch_notebook.errors import ChosenPatchError, GraphPatchError, SessionError
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.notebook.display.displayed_widget import DisplayedWidget
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
    Items,
    JobRef,
    JobStatus,
    Message,
    MoveEdit,
    PatchFields,
    PatchState,
    RedoEdit,
    RemoveEdit,
    RunRequest,
    SessionState,
    UndoEdit,
)
from graphpatch_notebook.notebook.runs import Job, RunInputs, Runs, ThreadSettings, alone, inputs_for_run
from graphpatch_notebook.notebook.session.chosen_patch import PATCH_KINDS, ChosenPatch, fields_of, unknown_names
from graphpatch_notebook.notebook.session.expressions import written_arguments
from graphpatch_notebook.notebook.session.session import Check, Session, session_of
from graphpatch_notebook.notebook.session.workspace import Workspace, workspace_of
from graphpatch_notebook.notebook.views.selection import patches_of, selection_of
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch, declares
from graphpatch_notebook.patching import innermost
from graphpatch_notebook.patching.model_state import preserved, sharding_of
from graphpatch_notebook.paths import numbered

# --------------------------------------------------------------------------------------------------------------------
# Requests of the front end (`REQUESTS` in notebook/messages.py). Functions without widgets


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
        field = getattr(error, "field", None)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}; {_MISTAKE}"
    return {"id": number if type(number) is int else -1, "error": {"message": text, "field": field}}, []


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
    chosen, patches = session.chosen, []
    for patch in chosen.patches:
        try:
            # Without the other patches: warnings about combinations appear when a patch is added.
            found = session.check(patch, ())
        except ChosenPatchError as problem:  # the graph was edited since
            found = Check(patch, warning=str(problem))
        row = row_of(patch.path)
        state = PatchState(
            **fields_of(patch),
            number=patch.number,
            is_enabled=patch.is_enabled,
            row=-1 if row is None else row,
            shape=None if found.shape is None else list(found.shape),
            sliced=None if found.sliced is None else list(found.sliced),
            warning=found.warning,
        )
        patches.append(state)
    return SessionState(chosen.version, patches, session.can_undo, session.can_redo, session.note)


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
    session.try_out(patch)
    namespace = context.workspace.namespace
    notes = [found.warning, unknown_names(patch, namespace)]
    if before is None or before.name != patch.name:
        notes.append(context.workspace.results.overwritten([patch]))
    shape, sliced = (None if one is None else list(one) for one in (found.shape, found.sliced))
    return Checked(shape, sliced, "; ".join(filter(None, notes)) or None, patch.name), []


def _export(context: RequestContext, payload: RunRequest) -> Answer:
    # With the inputs of *Run*, so that the numbers are equal.
    origin = replace(context.session.origin, arguments=payload.inputs or context.runs.written())
    return Code(str(export(context.session, origin=origin))), []


def job_status(context: RequestContext, payload: JobRef) -> Answer:
    """Returns the status of a job."""
    return context.runs.status(payload.id)


def interrupt_job(context: RequestContext, payload: JobRef) -> Answer:
    """Interrupts a job, and returns its status."""
    context.runs.interrupt(payload.id)
    return job_status(context, payload)


HANDLERS: Handlers = {
    "edit": _edit,
    "check": _check,
    "run": lambda context, payload: context.runs.status(context.runs.start(payload.inputs)),
    "run_status": job_status,
    "run_interrupt": interrupt_job,
    "export": _export,
}
"""The requests that every view has."""


# --------------------------------------------------------------------------------------------------------------------
# The base class of views


class LinkedView(DisplayedWidget):
    """A view of a graph: it shares the selection, the chosen patches and the runs with the other views of the graph.

    A subclass adds traits and `_static_html`. It extends `_makers` by the traits that the kernel sets, `FRONT_END` by
    those that the front end may set, `_check` by their checks, and `_handlers` by its requests. It keeps the graph
    alive only if the user does not have a variable with it, and only until it is closed.

    Attributes:
        group: Identifies the views that share a selection.
        selection: What is selected, in all views of the graph: a list of items as `item_of` makes them.
    """

    group = traitlets.Unicode(read_only=True).tag(sync=True, echo_update=False)
    selection: Any = traitlets.List().tag(sync=True)
    about = traitlets.Dict(read_only=True).tag(sync=True, echo_update=False)
    session = traitlets.Dict(read_only=True).tag(sync=True, echo_update=False)

    FRONT_END: ClassVar[Mapping[str, Any]] = {"selection": Items}
    VIEW: ClassVar[str]
    """Which view of the front end it is."""

    def __init__(self, graph: PatchableGraph, session: Session, workspace: Workspace, **traits: Any) -> None:
        self._session = session
        self._runs = Runs.of(session, workspace)
        self._selection = selection_of(graph)
        is_held = any(other is graph for other in workspace.graphs().values())
        self._kept = None if is_held else graph
        self._lock = threading.RLock()
        self._requests_lock = threading.Lock()
        self._request_context = RequestContext(session, workspace, self._runs)
        self.set_trait("group", self._selection.group)
        self.renew(*self._makers())
        super().__init__(**traits)
        follow = weakref.WeakMethod(self.follow_session)
        self._stop_listening = session.listen(lambda: (method := follow()) and method())
        self._runs.followers.add(self)
        self._selection.followers.add(self)
        self.on_msg(lambda view, message, _: view._answer(message))  # does not refer to this widget

    @property
    def graph(self) -> PatchableGraph:
        """The graph.

        Raises:
            SessionError: The graph was deleted.
        """
        return self._session.graph

    def close(self) -> None:
        """Closes the widget, which cannot be shown again. The chosen patches stay."""
        stop: Callable[[], None] | None = self.__dict__.pop("_stop_listening", None)
        if stop is not None:
            stop()
            self._runs.followers.discard(self)
            self._selection.followers.discard(self)
            self._kept = None
        super().close()

    def _handlers(self) -> Handlers:
        """Returns the requests that it answers."""
        return HANDLERS

    def _answer(self, message: Any) -> None:
        """Answers a request."""
        with self._requests_lock:
            self.send(*answer(self._request_context, message, self._handlers()))
        self.renew_html()

    # -- values of traits ----------------------------------------------------------------------------------------------

    def _makers(self) -> Mapping[str, Callable[[], Any]]:
        """Returns what makes the values of the traits that the kernel sets."""
        return {
            "about": self._about,
            "session": lambda: msgspec.to_builtins(session_state(self._session, self._row_of)),
            "selection": lambda: [*self._selection.items],
        }

    def _about(self) -> dict[str, Any]:
        name = self._session.origin.graph
        return {"view": self.VIEW, "name": name, "model_id": self._own_id, "version": __version__}

    def _row_of(self, path: str) -> int | None:
        """Returns the row of a path in the tree, if this is a tree."""
        return None

    def renew(self, *names: str) -> None:
        """Updates traits, and sends those that have changed. Does nothing if the graph was deleted."""
        with self._lock, suppress(SessionError), self.hold_sync():
            makers = self._makers()
            self._session.graph  # noqa: B018  # raises if it was deleted
            for name in names:
                self.set_trait(name, makers[name]())

    _checked_selection = traitlets.validate("selection")(DisplayedWidget.checked)

    @traitlets.observe("selection")
    def _share_selection(self, change: Any) -> None:
        self._selection.set(change["new"])

    def follow_selection(self) -> None:
        """Called after each change of the selection."""
        self.renew("selection")

    def follow_session(self) -> None:
        """Called after each change of the chosen patches."""
        self.renew("session", "about")

    def follow_runs(self) -> None:
        """Called when a run starts or ends, or the inputs of runs change."""
        self.renew("about")


# --------------------------------------------------------------------------------------------------------------------
# Opening a view: its session, with the names of the user's variables, and the inputs of its runs


def session_for_view(
    graph: PatchableGraph,
    workspace: Workspace,
    *,
    inputs: Any = None,
    typed: str | None = None,
) -> tuple[Session, Runs]:
    """Returns the session of a graph for a new view, and the runs, with the inputs that are given."""
    session = session_of(graph)
    session.variables = lambda: workspace.namespace
    names = [name for name, other in workspace.graphs().items() if other is graph]
    if names:  # sets the variable names of the graph and the model in the session
        workspace.named(session.origin.graph if session.origin.graph in names else names[0])
    elif session.origin.graph in workspace.namespace:  # may be another graph, which exported code must not patch
        free = next(name for name in numbered(session.origin.graph) if name not in workspace.namespace)
        session.origin = replace(session.origin, graph=free)
    runs = Runs.of(session, workspace)
    runs.use(inputs=inputs, typed=typed)
    return session, runs


def inputs_for_view(
    graph: PatchableGraph, workspace: Workspace, inputs: Inputs | None
) -> tuple[Session, Runs, RunInputs]:
    """Returns the session of a graph for a new view, the runs, and the inputs: those given, else those of *Run*."""
    session, runs = session_for_view(graph, workspace)
    if inputs is None:
        return session, runs, inputs_for_run(session, workspace.namespace, runs.typed, runs.inputs)
    written = written_arguments(inputs.args, inputs.kwargs, workspace.namespace)
    return session, runs, RunInputs(*captured(session.graph).tokenized(inputs.args, inputs.kwargs), written or "...")


def workspace_of_user(namespace: dict[str, Any]) -> Workspace:
    """Returns the user's variables: those of IPython if it is running, else `namespace`."""
    if "IPython" in sys.modules:
        from IPython.core.getipython import get_ipython

        if (shell := get_ipython()) is not None:
            return workspace_of(shell)
    return Workspace(lambda: namespace, print)  # there are no cells


# --------------------------------------------------------------------------------------------------------------------
# The base class of views whose numbers are computed by runs of the model, again after each change of the patches


Patches: TypeAlias = "dict[str, list[Patch[Any]]]"
_WAIT = 0.05
"""For so many seconds an answer waits for runs that may end soon. Other messages wait as long."""


class ComputedView(LinkedView):
    """A view whose numbers are computed by runs of the model.

    A subclass defines `_compute`, `_keep`, `COMPUTED`, and a request that calls `_follow`. Runs start at the first such
    request after the patches have changed, in a thread of their own; traits are set in the thread of requests.

    Raises:
        SessionError: A patch context is active, or the model is sharded over processes.
    """

    COMPUTED: ClassVar[tuple[str, ...]]
    """The traits with the results of runs."""

    def __init__(self, graph: PatchableGraph, session: Session, workspace: Workspace) -> None:
        if innermost(captured(graph)) is not None:
            raise SessionError(
                "a patch context is active: show this view outside of it, and choose patches in the view"
            )
        if sharding_of(captured(graph).root) is not None:
            raise SessionError("the model is sharded over processes, all of which must run the same: no views of it")
        self._user = workspace
        self._settings = ThreadSettings()
        self._job: Job[Any] | None = None
        self._number = 0
        patches = self._patches(session)
        with alone():  # in the thread of the caller, who gets its errors
            self._keep(self._run(graph, patches))
        super().__init__(graph, session, workspace)

    def _handlers(self) -> Handlers:
        return {**super()._handlers(), "update": lambda *_: self._follow()}

    def _compute(self, graph: PatchableGraph, patches: Patches) -> Any:
        """Computes the numbers with the patches, in the thread of a job."""
        raise NotImplementedError

    def _keep(self, found: Any) -> None:
        """Keeps the computed numbers, of which the traits are made."""
        raise NotImplementedError

    def update(self) -> None:
        """Computes the numbers for the patches as they are now, and waits for that.

        Raises:
            SessionError: A value of a patch cannot be evaluated, or a run failed.
        """
        job = self._start()
        job.wait()
        self._finish()
        if job.state == "failed":
            raise SessionError(job.error or "the run failed")

    def _patches(self, session: Session) -> Patches:
        """Returns the patches that change something, as they are now, with their values."""
        chosen = session.chosen
        resolved = session.resolve(self._user.namespace, chosen)
        observing = {one.number for one, _ in resolved.observing}
        self._computed_for = chosen.version
        self._chosen: Sequence[int] = [one.number for one in chosen.enabled if one.number not in observing]
        changing = {
            path: [patch for patch in given if not declares(patch, "observes_only")]
            for path, given in resolved.patch_map.items()
        }
        return {path: patches for path, patches in changing.items() if patches}

    def _run(self, graph: PatchableGraph, patches: Patches) -> Any:
        with preserved(captured(graph).module):
            return self._compute(graph, patches)

    def _start(self) -> Job[Any]:
        if self._job is not None:
            self._job.interrupt()
            self._job.wait()
        graph, patches, settings = self.graph, self._patches(self._session), self._settings

        def run(job: Job[Any]) -> Any:
            with settings.applied(job):
                return job.interruptibly(lambda: self._run(graph, patches))

        self._number += 1
        self._job = Job(run)
        return self._job

    def _finish(self) -> None:
        """Shows the results of a job that is done, once."""
        job = self._job
        if job is not None and job.state == "done" and job.result is not None:
            found, job.result = job.result, None
            self._keep(found)
            self.renew(*self.COMPUTED)

    def _follow(self, *, is_changed: bool = False) -> Answer:
        """Returns the `JobStatus` of the runs for the patches as they are now; starts them if they have not run.

        With `is_changed`, something else is computed for the same patches.
        """
        if is_changed or self._computed_for != self._session.chosen.version:
            self._start()
        job = self._job
        if job is None:
            return JobStatus(id=0, state="done", seconds=0.0), []
        job.wait(_WAIT)
        state = job.state  # read before `_finish`: the answer "done" is the last one, and the results are shown by then
        self._finish()
        error = job.error if state == "failed" else None
        return JobStatus(id=self._number, state=state, seconds=job.seconds, error=error), []
