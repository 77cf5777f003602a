"""The base class of views whose numbers are computed by runs of the model, again after each change of the patches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from graphpatch_notebook.checks.model_state import preserved
from graphpatch_notebook.checks.sharding import sharding_of
from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.execution import innermost
from graphpatch_notebook.notebook.run.jobs import Job, ThreadSettings
from graphpatch_notebook.notebook.run.model_calls import alone, in_words
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.notebook.views.linked import LinkedView
from graphpatch_notebook.notebook.views.requests import Answer
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch, declares

Work: TypeAlias = "Callable[[], Callable[[], None]]"
"""Runs the model, and returns a function that keeps the results."""
_WAIT = 0.05
"""For so many seconds an answer waits for runs that may end soon. Other messages wait as long."""


class ComputedView(LinkedView):
    """A view whose numbers are computed by runs of the model.

    A subclass defines `_work`, `COMPUTED`, and a request that calls `_follow`. Runs start at the first such request
    after the patches have changed, in a thread of their own; traits are set in the thread of requests.

    Raises:
        SessionError: A patch context is active, or the model is sharded over processes.
    """

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
        self._job: Job[Callable[[], None]] | None = None
        self._number = 0
        self._computed_for = session.chosen.version
        self._compute_now(session)
        super().__init__(graph, session, workspace)

    def _work(self, patches: dict[str, list[Patch[Any]]], chosen: Sequence[int]) -> Work:
        """Returns what computes the numbers with the patches that change something; `chosen` are their numbers."""
        raise NotImplementedError

    def update(self) -> None:
        """Computes the numbers for the patches as they are now, and waits for that.

        Raises:
            SessionError: A value of a patch cannot be evaluated, or a run failed.
        """
        self._start()
        self._finish(wait=True)
        if self._job is not None and self._job.state == "failed":
            raise SessionError(self._job.error or "the run failed")

    def _compute_now(self, session: Session) -> None:
        """Computes the first numbers, in the thread of the caller, who gets its errors."""
        with alone():
            self._made(session)()()

    def _made(self, session: Session) -> Work:
        """Returns what computes the numbers, with the patches and their values as they are now."""
        self._computed_for = session.chosen.version
        resolved = session.resolve(self._user.namespace)
        patches = {
            path: changing
            for path, given in resolved.patch_map.items()
            if (changing := [patch for patch in given if not declares(patch, "observes_only")])
        }
        observing = {one.number for one, _ in resolved.observing}
        chosen = [one.number for one in session.chosen.enabled if one.number not in observing]
        work = self._work(patches, chosen)
        model = captured(session.graph).module

        def restoring() -> Callable[[], None]:
            with preserved(model):
                return work()

        return restoring

    def _start(self) -> None:
        if self._job is not None:
            self._job.interrupt()
            self._job.wait()
        work, settings = self._made(self._session), self._settings

        def run(job: Job[Callable[[], None]]) -> Callable[[], None]:
            with alone(job), settings.applied():
                return job.interruptibly(work)

        self._number = next(self._numbers)
        self._job = Job(run, in_words)

    def _finish(self, *, wait: bool = False) -> None:
        """Shows the results of a job that has finished."""
        job = self._job
        if job is None:
            return
        if wait:
            job.wait()
        if job.state == "done" and job.result is not None:
            keep, job.result = job.result, None
            keep()
            self.renew(*self.COMPUTED)

    def _follow(self, *, is_changed: bool = False) -> Answer:
        """Returns the `JobStatus` of the runs for the patches as they are now; starts them if they have not run.

        With `is_changed`, something else is computed for the same patches.
        """
        if is_changed or self._computed_for != self._session.chosen.version:
            self._start()
        if self._job is not None:
            self._job.wait(_WAIT)
        job = self._job
        # Read before `_finish`: the answer "done" is the last one, and the results are shown by then.
        state = "done" if job is None else job.state
        self._finish()
        if job is None:
            return {"id": self._number, "state": "done", "seconds": 0.0, "fraction": None, "error": None}, []
        return {**job.status(state), "id": self._number, "fraction": None}, []
