"""What a `%%graphpatch` cell does when it runs: patches applied, results in their variables, values shown."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any

from IPython.core.error import UsageError

from graphpatch_notebook.errors import PatchMapError, SessionError
from graphpatch_notebook.execution import PatchContext
from graphpatch_notebook.interrupts import Block
from graphpatch_notebook.notebook.magics.cell_results import CellResults
from graphpatch_notebook.notebook.magics.choosing import numbers_of
from graphpatch_notebook.notebook.magics.command_line import arguments, one_line
from graphpatch_notebook.notebook.magics.commands import commands
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatches
from graphpatch_notebook.notebook.session.workspace import ActiveGraph, Workspace

_current: ContextVar[CellRun | None] = ContextVar("graphpatch_cell_run", default=None)


class CellRun:
    """One run of one cell, made when its first line is reached.

    Args:
        workspace: The user's variables.
        line: What follows `%%graphpatch`.
        frame: The frame of the cell.
        is_silent: Whether whoever runs the cell wants to see no values.

    Raises:
        SessionError: The line, or a value of a patch, is wrong; nothing of the cell has run.
    """

    def __init__(self, workspace: Workspace, line: str, frame: FrameType, is_silent: bool) -> None:
        leave_what_is_left()
        outer = _current.get()
        if outer is not None and outer.is_running():
            raise SessionError("%%graphpatch cannot stand inside another: one cell runs under the patches of one graph")
        workspace.notice_new_graphs()
        active, chosen = chosen_for(workspace, line)
        self._is_silent = is_silent
        self._block: Block | None = Block(frame)
        self._has_begun = False
        resolved = active.session.resolve(workspace.namespace, chosen)
        context = active.graph.patch(dict(resolved.patch_map.items()))
        self._context = weakref.ref(context)  # it holds what its probes hold
        self._results: _Results | None = _Results(self, CellResults(workspace, active, chosen, resolved))
        context.after_call = self._results.put
        self._entry: _Entry | None = _Entry(self, context)
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
        if run is None or run._block is None:
            raise SessionError("no %%graphpatch cell is running")
        return run

    def begin(self) -> None:
        """Called when the patches are in place."""
        self._has_begun = True

    def end(self) -> None:
        """Called before they are taken away. This object keeps nothing alive then."""
        self._has_begun = False
        self._block = self._entry = self._results = None

    def is_running(self) -> bool:
        """Whether the cell is being run; not after an interrupt so untimely that `end` was not reached."""
        return self._has_begun and self._block is not None and not self._block.is_over()

    def leave(self) -> None:
        """Takes the patches away, if they are still there although the cell has ended."""
        self.end()
        context = self._context()
        if context is not None:
            context.__exit__(KeyboardInterrupt, None, None)  # has no effect if it was left

    def patches(self) -> _Entry:
        """Returns the context manager in which the patches are active. It is given once."""
        assert self._entry is not None
        entry, self._entry = self._entry, None
        return entry

    def results(self) -> _Results:
        """Returns the context manager, inside of that one, which fills the variables. It is given once."""
        if self._results is None:
            raise SessionError("no %%graphpatch cell is about to begin")
        results, self._results = self._results, None
        return results

    def display(self, value: object) -> None:
        """Shows a value as IPython shows that of the last line."""
        if not self._is_silent:
            sys.displayhook(value)


def leave_what_is_left() -> None:
    """Takes away the patches of an earlier cell, which an interrupt kept from doing that itself."""
    run = _current.get()
    if run is not None and not run.is_running():
        run.leave()
        _current.set(None)


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
    if name in commands() and name not in workspace.graphs():
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
        except BaseException:
            self._run.end()
            raise

    @property
    def __exit__(self) -> Callable[..., None]:  # noqa: PLE0302  # a property, which gives what takes them
        # Its own: warnings that it gives point to whoever ends the block, which must be the user's cell.
        return self._context.__exit__


class _Results:
    """Puts what probes and records hold in their variables; begins and ends the run."""

    def __init__(self, run: CellRun, results: CellResults) -> None:
        self._run = run
        self._results = results
        self.put = results.put

    def __enter__(self) -> None:
        # Now that the patches are in place nothing is lost: what an earlier run left must not be taken for this one's.
        self._results.put_aside()
        self._run.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        __tracebackhide__ = True
        self._run.end()
        self._results.settle(error)
