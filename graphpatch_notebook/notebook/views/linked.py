"""The base class of the views of a graph, which share the selection, the chosen patches and the runs.

front end  -- selection, and what else it may set -->  traits, validated  -->  the selection of the graph
front end  -- requests ----------------------------->  `requests.answer`
session    -- each change ------------------------->  trait `session`
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import msgspec
import traitlets

from graphpatch_notebook._version import __version__
from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.notebook.display.displayed_widget import DisplayedWidget
from graphpatch_notebook.notebook.messages import Items, JobStatus
from graphpatch_notebook.notebook.run.model_calls import Job, RunInputs, ThreadSettings, alone, in_words, inputs_for_run
from graphpatch_notebook.notebook.run.runs import Runs
from graphpatch_notebook.notebook.session.expressions import written_arguments
from graphpatch_notebook.notebook.session.session import Session, session_of
from graphpatch_notebook.notebook.session.workspace import Workspace, workspace_of
from graphpatch_notebook.notebook.views.requests import (
    HANDLERS,
    Answer,
    Handlers,
    RequestContext,
    answer,
    session_state,
)
from graphpatch_notebook.notebook.views.selection import selection_of
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch, declares
from graphpatch_notebook.patching import innermost
from graphpatch_notebook.patching.model_state import preserved
from graphpatch_notebook.patching.sharding import sharding_of
from graphpatch_notebook.paths import numbered


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
        self._display.renew()

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

    @traitlets.validate("selection")
    def _checked_selection(self, proposal: Any) -> Any:
        return self._checked(proposal)

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
    tokenizer: Any = None,
) -> tuple[Session, Runs]:
    """Returns the session of a graph for a new view, and the runs, with the inputs and tokenizer that are given."""
    methods = (getattr(tokenizer, name, None) for name in ("decode", "convert_ids_to_tokens"))
    if tokenizer is not None and (isinstance(tokenizer, bytes) or not any(map(callable, methods))):
        raise TypeError(
            f"tokenizer must be an object with decode or convert_ids_to_tokens, not {tokenizer!r:.80}; "
            "load it first: AutoTokenizer.from_pretrained(...)"
        )
    session = session_of(graph)
    names = [name for name, other in workspace.graphs().items() if other is graph]
    if names:  # sets the variable names of the graph and the model in the session
        workspace.named(session.origin.graph if session.origin.graph in names else names[0])
    elif session.origin.graph in workspace.namespace:  # may be another graph, which exported code must not patch
        free = next(name for name in numbered(session.origin.graph) if name not in workspace.namespace)
        session.origin = replace(session.origin, graph=free)
    runs = Runs.of(session, workspace)
    runs.use(inputs=inputs, typed=typed, tokenizer=tokenizer)
    return session, runs


def inputs_of_view(
    session: Session, workspace: Workspace, runs: Runs, inputs: Inputs | None, typed: str | None = None
) -> RunInputs:
    """Returns the inputs of a new view: those that were given, else those that were typed, else those of *Run*."""
    if inputs is None:
        return inputs_for_run(session, workspace.namespace, typed or runs.typed, runs.inputs)
    written = written_arguments(inputs.args, inputs.kwargs, workspace.namespace)
    return RunInputs(inputs.args, inputs.kwargs, written or "...")


def workspace_of_user(namespace: dict[str, Any]) -> Workspace:
    """Returns the user's variables: those of IPython if it is running, else `namespace`."""
    if "IPython" in sys.modules:
        from IPython.core.getipython import get_ipython

        if (shell := get_ipython()) is not None:
            return workspace_of(shell)
    return Workspace(lambda: namespace, _refuse_cell)


def _refuse_cell(text: str) -> None:
    raise NotImplementedError("there are no cells here")


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
        self._numbers = itertools.count(1)
        self._job: Job[Any] | None = None
        self._number = 0
        patches = self._patches(session)
        with alone():  # in the thread of the caller, who gets its errors
            self._keep(self._run(graph, patches))
        super().__init__(graph, session, workspace)

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
            with alone(job), settings.applied():
                return job.interruptibly(lambda: self._run(graph, patches))

        self._number = next(self._numbers)
        self._job = Job(run, in_words)
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
