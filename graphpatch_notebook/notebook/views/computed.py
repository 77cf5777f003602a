"""The base class of views whose numbers are computed by runs of the model, again after each change of the patches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.messages import JobStatus
from graphpatch_notebook.notebook.run.jobs import Job, ThreadSettings
from graphpatch_notebook.notebook.run.model_calls import alone, in_words
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import Workspace
from graphpatch_notebook.notebook.views.linked import LinkedView
from graphpatch_notebook.notebook.views.requests import Answer
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch, declares
from graphpatch_notebook.patching import innermost
from graphpatch_notebook.patching.model_state import preserved
from graphpatch_notebook.patching.sharding import sharding_of

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
