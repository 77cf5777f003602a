"""What *Run* and *show activation* have started: the job, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from graphpatch_notebook.notebook.run.activation import Shown, Source
from graphpatch_notebook.notebook.run.model_calls import PassCount
from graphpatch_notebook.notebook.run.run_progress import RunProgress
from graphpatch_notebook.notebook.run.worker import Job
from graphpatch_notebook.notebook.session.session import Session

T = TypeVar("T")


@dataclass
class StartedWork(Generic[T]):
    """A run, or what shows an activation, that was started.

    Attributes:
        id: Its number.
        job: The work.
        count: How many calls of the model are done.
        progress: Tells where it is; there from the first time that somebody asks.
        source: Of what shows an activation: which value that is.
    """

    id: int
    job: Job[T]
    count: PassCount
    progress: RunProgress | None = None
    source: Source | None = None

    def forget_value(self) -> None:
        """Lets go of the value that is kept to show other planes of it, and of what it came from."""
        self.source = None
        if isinstance(self.job.result, Shown):
            self.job.result.forget_value()

    def status(self, session: Session) -> dict[str, Any]:
        """Returns what `RunStatus` and `ActivationStatus` have in common."""
        state = self.job.state
        at, fraction = None, None
        if state == "running":
            if self.progress is None:
                self.progress = RunProgress(session.graph, self.count.total)
            self.progress.done = self.count.done
            at, fraction = self.progress.look(self.job.python_frame())
        return {
            "id": self.id,
            "state": state,
            "seconds": self.job.seconds,
            "at": at,
            "fraction": 1.0 if state == "done" else fraction,
            "error": self.job.error if state == "failed" else None,
        }
