"""The IPython extension: `%load_ext graphpatch` adds `%graphpatch` and the completer, `%unload_ext` removes them.

The commands and the completer are imported when they are first used.
"""

from __future__ import annotations

import functools
import sys
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, context_matcher
from IPython.core.error import UsageError
from IPython.core.magic import no_var_expand

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.magics import cells
from graphpatch_notebook.notebook.magics.cells import CellResults, CellTransformer, begin_cell, mark_cell

if TYPE_CHECKING:
    from graphpatch_notebook.notebook.completion import PathCompleter
    from graphpatch_notebook.notebook.session.workspace import ActiveGraph, Workspace

_NAME = "graphpatch"
_NAMES = frozenset({"graphpatch", "graphpatch_notebook"})  # the names that the extension can be loaded under


class Extension:
    """The extension in one shell, which is `Any` here and below: most of IPython has no types."""

    def __init__(self, shell: Any) -> None:
        self._shell = proxy = weakref.proxy(shell)  # `_extensions` must not keep shells alive
        self._transformer = CellTransformer(lambda: str(proxy.ast_node_interactivity))
        tables = shell.magics_manager.magics
        self._before = {kind: tables[kind][_NAME] for kind in tables if _NAME in tables[kind]}
        shell.register_magic_function(self.graphpatch, magic_kind="line_cell", magic_name=_NAME)
        shell.input_transformers_cleanup.append(mark_cell)
        shell.ast_transformers.append(self._transformer)
        # A graph that a cell made again gets its patches then, and not when they are looked at.
        shell.events.register("post_run_cell", self._after_cell)

        # Before all other matchers: where a path is expected, no other matcher has a completion, and need not search.
        @context_matcher(identifier=_NAME, priority=1000)  # type: ignore[untyped-decorator,unused-ignore]
        def matcher(context: CompletionContext) -> dict[str, Any]:
            return self._completer.matched(context)

        self._matcher = matcher
        shell.Completer.custom_matchers.append(matcher)

    def _after_cell(self, _: Any) -> None:
        if "workspace" in self.__dict__:  # no command has run before
            self.workspace.notice_new_graphs()

    @functools.cached_property
    def _completer(self) -> PathCompleter:
        from graphpatch_notebook.notebook.completion import PathCompleter

        return PathCompleter(self._shell, self._active, taken=self.workspace.results.names_of_others)

    def _active(self) -> ActiveGraph | None:
        """Returns the active graph, or `None` if there is none, or several and none is selected."""
        try:
            return self.workspace.current()
        except SessionError:
            return None

    def remove(self, shell: Any) -> None:
        """Restores the shell."""
        _remove(shell.Completer.custom_matchers, self._matcher)
        for table in shell.magics_manager.magics.values():
            table.pop(_NAME, None)
        for kind, magic in self._before.items():
            shell.magics_manager.magics[kind][_NAME] = magic
        _remove(shell.input_transformers_cleanup, mark_cell)
        _remove(shell.ast_transformers, self._transformer)
        shell.events.unregister("post_run_cell", self._after_cell)

    # -- `%graphpatch`: a line is a command, and a cell runs under the chosen patches ---------------------------------

    @functools.cached_property
    def workspace(self) -> Workspace:
        """The workspace of the shell."""
        from graphpatch_notebook.notebook.session.workspace import workspace_of

        return workspace_of(self._shell.magics_manager.shell)

    @no_var_expand
    def graphpatch(self, line: str, cell: str | None = None) -> Any:
        """Choose patches for a PyTorch model by their paths, and run cells under them.

        %graphpatch wrap pg = model(inputs)            capture a model on example inputs
        %graphpatch find mlp op:mul                    find nodes; also: show, lens, code, shape
        %graphpatch zero h_0.mlp.output[:, -1]         choose a patch
        %graphpatch add h_0.output 0.5 * steering      choose a patch with a value: any Python expression
        %graphpatch probe h_1.output hidden            put an activation in the variable `hidden`
        %graphpatch                                    show the chosen patches; also: list, rm, disable, undo, clear
        %graphpatch export                             show them as Python code; also: save FILE, load FILE

        %%graphpatch [NAME] [--only PATH|#n ...]       run the cell under the chosen patches
        pg(inputs)

        %graphpatch help                               show all commands; for one: help COMMAND
        """
        __tracebackhide__ = True
        try:
            if cell is not None:  # an empty body, or code that starts the cell magic
                raise UsageError("the cell below %%graphpatch is empty, or %%graphpatch is not its first line")
            if line.startswith("%%"):
                return self._run_part_of_cell(line)
            from graphpatch_notebook.notebook.magics.commands import run

            return run(self.workspace, line, self._variables)
        except SessionError as error:
            from graphpatch_notebook.notebook.magics.command_line import one_line

            raise UsageError(one_line(error)) from None

    def _variables(self) -> dict[str, Any]:
        """Returns the variables that the user's code can use on this line, including the locals of a function."""
        variables: dict[str, Any] = self._shell.user_ns
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals is not variables:
            frame = frame.f_back
        return variables if frame is None else {**variables, **frame.f_locals}

    # -- cells ---------------------------------------------------------------------------------------------------------

    def _run_part_of_cell(self, line: str) -> Any:
        """Runs a line that `CellTransformer` inserted into a cell."""
        part, _, rest = line.partition(" ")
        if part == cells.PATCHES:
            if sys._getframe(3).f_code.co_name != "<module>":
                raise UsageError("%%graphpatch must be the first line; put the other cell magic below it")
            return begin_cell(self.workspace, rest, self._is_silent())
        if part == cells.RESULTS:
            return CellResults.current()
        if part == cells.DISPLAY:
            return CellResults.current().display
        if part == cells.EMPTY:
            raise UsageError("the cell below %%graphpatch is empty")
        raise UsageError(
            f"{line.strip()} ran in a way that cannot apply its patches, so the rest of the cell did not run; "
            "make it the first line of the cell, above other cell magics"
        )

    def _is_silent(self) -> bool:
        result = getattr(self._shell.displayhook, "exec_result", None)
        return bool(result is not None and result.info is not None and result.info.silent)


def _remove(items: list[Any], item: Any) -> None:
    items[:] = [other for other in items if other is not item]


_extensions: weakref.WeakKeyDictionary[Any, Extension] = weakref.WeakKeyDictionary()


def load(shell: Any) -> None:
    """Adds the extension to a shell. Does nothing if it is loaded."""
    if shell not in _extensions:
        _extensions[shell] = Extension(shell)


def unload(shell: Any) -> None:
    """Removes the extension when the last of the names that it was loaded under is unloaded."""
    if len(_NAMES & shell.extension_manager.loaded) > 1:  # includes the name that is being unloaded
        return
    from graphpatch_notebook.notebook.session.workspace import forget_workspace

    extension = _extensions.pop(shell, None)
    forget_workspace(shell)
    if extension is not None:
        extension.remove(shell)
