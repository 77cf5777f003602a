"""What a `%%graphpatch` cell does when it runs: patches applied, results in their variables, values shown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from IPython.core.error import UsageError

from graphpatch_notebook.errors import GraphPatchError, PatchMapError, SessionError
from graphpatch_notebook.execution.context import PatchContext
from graphpatch_notebook.notebook.choosing import numbers_of
from graphpatch_notebook.notebook.command_line import arguments
from graphpatch_notebook.notebook.commands import COMMANDS
from graphpatch_notebook.notebook.session import ChosenPatches, ResolvedPatches
from graphpatch_notebook.notebook.workspace import ActiveGraph, Results, Workspace

_current: ContextVar[CellRun | None] = ContextVar("graphpatch_cell_run", default=None)


def one_line(error: BaseException) -> str:
    """Returns the message of an error on one line."""
    return " ".join(str(error).split())


class CellRun:
    """One run of one cell, made when its first line is reached.

    Args:
        workspace: The user's variables.
        line: What follows `%%graphpatch`.
        is_silent: Whether whoever runs the cell wants to see no values.

    Raises:
        SessionError: The line, or a value of a patch, is wrong; nothing of the cell has run.
    """

    def __init__(self, workspace: Workspace, line: str, is_silent: bool) -> None:
        self.has_begun = False
        outer = _current.get()
        if outer is not None and outer.has_begun:
            raise SessionError("%%graphpatch cannot stand inside another: one cell runs under the patches of one graph")
        active, chosen = chosen_for(workspace, line)
        self._is_silent = is_silent
        resolved = active.session.resolve(workspace.namespace, chosen)
        self._kept = _KeptResults(self, workspace, resolved)
        context = active.graph.patch(dict(resolved.patch_map.items()))
        context.after_call = self._kept.put
        self._entry = _Entry(self, context)
        if not chosen.enabled:
            which = "none of these patches is switched on" if chosen.patches else "no patch is chosen"
            print(f"{which}: the cell runs with {active.name} as it is")
        _current.set(self)

    @staticmethod
    def current() -> CellRun:
        """Returns the run that has begun, or is about to.

        Raises:
            SessionError: There is none.
        """
        run = _current.get()
        if run is None:
            raise SessionError("no %%graphpatch cell is running")
        return run

    def begin(self) -> None:
        """Called when the patches are in place."""
        self.has_begun = True

    def end(self) -> None:
        """Called before they are taken away. Nothing keeps this object, and what its probes hold, alive then."""
        self.has_begun = False
        if _current.get() is self:
            _current.set(None)

    def patches(self) -> _Entry:
        """Returns the context manager in which the patches are active."""
        return self._entry

    def results(self) -> _KeptResults:
        """Returns the context manager, inside of that one, which fills the variables."""
        return self._kept

    def display(self, value: object) -> None:
        """Shows a value as IPython shows that of the last line."""
        if not self._is_silent:
            sys.displayhook(value)


def chosen_for(workspace: Workspace, line: str) -> tuple[ActiveGraph, ChosenPatches]:
    """Returns the graph and the patches that the first line of a cell means: `[NAME] [--only SPEC ...]`.

    Raises:
        SessionError: It means none.
    """
    words = arguments(line)
    names = words[: words.index("--only")] if "--only" in words else words
    specs = words[len(names) + 1 :]
    name = names[0] if names else ""
    if name.startswith("-"):
        raise SessionError(f"there is no option {name}; a cell takes --only PATH|#n ...")
    if name in COMMANDS and name not in workspace.graphs():
        raise SessionError(f"{name!r} is a command for a line of its own: %graphpatch {' '.join(words)}")
    if len(names) > 1:
        raise SessionError(f"{' '.join(names[1:])!r} is too much; write %%graphpatch [NAME] [--only PATH|#n ...]")
    active = workspace.named(name) if name else workspace.current()
    chosen = active.session.chosen
    if "--only" not in words:
        return active, chosen
    if not specs:
        raise SessionError("--only needs to know which patches: #1, a path, or a pattern such as 'h_*.output'")
    return active, chosen.only(numbers_of(chosen, [word.rstrip(",") for word in specs]))


class _Entry:
    """Enters a patch context; what the user did wrong is told in one line."""

    def __init__(self, run: CellRun, context: PatchContext) -> None:
        self._run = run
        self._context = context

    def __enter__(self) -> None:
        try:
            self._context.__enter__()
        except PatchMapError as error:
            self._run.end()
            raise UsageError(one_line(error)) from None

    @property
    def __exit__(self) -> Callable[..., None]:  # noqa: PLE0302  # a property, which gives what takes them
        # Its own: warnings that it gives point to whoever ends the block, which must be the user's cell.
        return self._context.__exit__


class _KeptResults:
    """Puts what probes and records hold in their variables, after each call of the graph."""

    def __init__(self, run: CellRun, workspace: Workspace, resolved: ResolvedPatches) -> None:
        self._run = run
        self._results: Results = workspace.results
        self._user_namespace = workspace.namespace
        self._resolved = resolved
        # The variables in slices mean what they meant when the cell began, as those of all other patches do.
        names = {name for chosen, _ in resolved.observing if chosen.index for name in chosen.index.names}
        self._names_in_slices = {name: workspace.namespace[name] for name in names}

    def put(self) -> None:
        """Fills the variables of the probes that have fired."""
        self._results.put(self._resolved.results(self._names_in_slices))

    def __enter__(self) -> None:
        # Now that the patches are in place nothing is lost: what an earlier run left must not be taken for this one's.
        self._results.remove(str(chosen.name) for chosen, _ in self._resolved.observing)
        self._run.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        self._run.end()
        if error is not None:
            self._put_what_is_missing()

    def _put_what_is_missing(self) -> None:
        """After a call that did not return: what had fired before helps to see why."""
        try:
            values = self._resolved.results(self._names_in_slices)
        except GraphPatchError:  # the model has overwritten what was kept: the user's own error comes first
            return
        self._results.put({name: value for name, value in values.items() if name not in self._user_namespace})
