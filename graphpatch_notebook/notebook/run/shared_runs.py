"""What the browsers of one session share: its runs, and on what they run."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from graphpatch_notebook.notebook.run.run_inputs import given_arguments
from graphpatch_notebook.notebook.run.runs import Runs
from graphpatch_notebook.notebook.session.origin import written_arguments
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.notebook.session.workspace import Workspace


class Follower(Protocol):
    """Who shows the runs."""

    def follow_runs(self) -> None:
        """Called when something has changed."""


class SharedRuns:
    """The runs of a session. They live as long as one of its browsers does.

    Args:
        session: The session.
        workspace: The user's variables.

    Attributes:
        runs: The runs.
        run: The run that goes on or went on last: its number and its state; `None`: none yet.
    """

    def __init__(self, session: Session, workspace: Workspace) -> None:
        self._session = session
        self._workspace = workspace
        self._typed: str | None = None
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self.runs = Runs(session, lambda: workspace.namespace, results=workspace.results)
        self.run: dict[str, Any] | None = None

    @staticmethod
    def of(session: Session, workspace: Workspace) -> SharedRuns:
        """Returns those of a session: the same for all of its browsers."""
        with _lock:
            reference = _shared.get(session)
            shared = reference() if reference is not None else None
            if shared is None:
                shared = SharedRuns(session, workspace)
                _shared[session] = weakref.ref(shared)  # a weak one: the value knows the key
            return shared

    def add(self, follower: Follower) -> None:
        """Tells an object of changes, as long as it lives."""
        self._followers.add(follower)

    def remove(self, follower: Follower) -> None:
        """Does not tell it any more."""
        self._followers.discard(follower)

    def use(self, *, inputs: Any = None, typed: str | None = None, tokenizer: Any = None) -> None:
        """Sets on what the model runs, and what tokens mean, as far as anything is given.

        Args:
            inputs: A tuple of arguments, a dict of keyword arguments, or one value.
            typed: Arguments of a call as Python, evaluated for each run.
            tokenizer: A tokenizer.
        """
        if inputs is not None or typed is not None:
            self.runs.inputs, self._typed = inputs, typed
        if tokenizer is not None:
            self.runs.tokenizer = tokenizer
        self._tell()

    def typed(self) -> str | None:
        """Returns the arguments of runs for which none are typed, as Python; `None` for those that `runs` has."""
        return self._typed

    def written(self) -> str | None:
        """Returns on what the model runs, as Python; `None` where nobody knows how it is written."""
        if self._typed is not None:
            return self._typed
        if self.runs.inputs is not None:
            return written_arguments(*given_arguments(self.runs.inputs), self._workspace.namespace)
        return self._session.origin.arguments

    @property
    def is_given(self) -> bool:
        """Whether runs are made on other inputs than the example's."""
        return self._typed is not None or self.runs.inputs is not None

    @property
    def no_inputs(self) -> str | None:
        """Why there is nothing to run on; `None`: there is something."""
        return None if self._typed is not None else self.runs.no_inputs()

    def note(self, status: dict[str, Any]) -> None:
        """Notes how far a run is, from its status."""
        run = {"id": status["id"], "state": status["state"]}
        # What an older run has become is no news.
        if run != self.run and (self.run is None or run["id"] >= self.run["id"]):
            self.run = run
            self._tell()

    def _tell(self) -> None:
        for follower in tuple(self._followers):
            follower.follow_runs()


_shared: weakref.WeakKeyDictionary[Session, weakref.ref[SharedRuns]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
