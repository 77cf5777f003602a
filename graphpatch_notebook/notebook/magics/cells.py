"""`%%graphpatch`: a cell that runs like any other cell, but inside a patch context.

%%graphpatch pg                              what the user runs
hidden.norm()

magic('%%graphpatch pg')                     after `mark_cell`, on the lines: the marker
hidden.norm()

with magic('%%patches pg'), magic('%%results'):
    magic('%%display')(hidden.norm())        after `CellTransformer`, on the tree

Here `magic(...)` is `get_ipython().run_line_magic('graphpatch', ...)`. The lines of the body keep their positions, so
line numbers, tracebacks, history, `await`, `;` and magics work as IPython defines them. The marker raises an error when
it runs, so a cell never runs silently without its patches. `CellResults` fills the variables of probes and records.

What only such cells need is imported by the first one: the functions at the top see every cell of the user.
"""

from __future__ import annotations

import ast
import re
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from IPython.core import inputtransformer2
from torch import Tensor

from graphpatch_notebook.errors import PatchValueError, SessionError, add_note
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.patches.kinds import Patch, RecordPatch
from graphpatch_notebook.patching import PatchContext, innermost

if TYPE_CHECKING:
    from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, ChosenPatches
    from graphpatch_notebook.notebook.session.session import ResolvedPatches
    from graphpatch_notebook.notebook.session.workspace import ActiveGraph, Workspace

MARKER = "%%graphpatch"
PATCHES, RESULTS, DISPLAY, EMPTY = "%%patches", "%%results", "%%display", "%%empty"
_ipython: Any = inputtransformer2  # functions without types
_FIRST_LINE = re.compile(r"%%graphpatch(?:[ \t](.*))?$")


def mark_cell(lines: list[str]) -> list[str]:
    """Returns the lines of a cell, with a first line `%%graphpatch ...` replaced by a marker."""
    first = _FIRST_LINE.match(lines[0].rstrip()) if lines else None
    if first is None or not any(line.strip() for line in lines[1:]):
        return lines  # IPython reports the empty body
    call = _call_text(f"{MARKER} {first.group(1) or ''}".rstrip())
    begun = _ipython.leading_empty_lines(lines[1:])
    empty = lines[1 : len(lines) - len(begun)]
    return [f"{call}\n", *empty, *_ipython.cell_magic(_ipython.leading_indent(begun))]


# Terminals ask whether a cell is complete. With side effects, the transformer is skipped for this question.
mark_cell.has_side_effects = True  # type: ignore[attr-defined]


def _call_text(line: str) -> str:
    return f"get_ipython().run_line_magic('graphpatch', {line!r})"


class CellTransformer(ast.NodeTransformer):
    """Wraps a marked cell in `with` statements that apply its patches and assign the results to variables."""

    def __init__(self, interactivity: Callable[[], str]) -> None:
        self._interactivity = interactivity

    def visit(self, node: ast.AST) -> ast.AST:
        """Returns the tree of a cell, unchanged if it is not marked. Never raises, or IPython would remove it."""
        try:
            if isinstance(node, ast.Module) and (line := _marked(node)) is not None:
                return _patched(node, line.removeprefix(MARKER), self._interactivity())
        except Exception:  # for example, a cell nested too deeply; its marker raises when it runs
            return node
        return node


def _marked(tree: ast.Module) -> str | None:
    """Returns the line of the marker that a cell begins with; `None` without one."""
    match tree.body[:1]:
        case [ast.Expr(ast.Call(args=[ast.Constant("graphpatch"), ast.Constant(str(line))]) as call)]:
            is_marker = ast.dump(call) == ast.dump(_call(line, call)) and line.split(" ")[0] == MARKER
            return line if is_marker else None
    return None


def _patched(tree: ast.Module, line: str, interactivity: str) -> ast.Module:
    marker, *body = tree.body
    # Python requires them at the top; IPython allows them anywhere in a cell.
    futures = [node for node in body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    body = [node for node in body if node not in futures]
    last = body[-1] if body else None
    if not body:
        body = [ast.Pass() if futures else ast.Expr(_call(EMPTY, marker))]  # comments only
    elif isinstance(last, ast.Expr) and interactivity.startswith("last_expr"):
        # IPython would display its value. With "all", it also displays those of statements inside a `with` statement.
        body[-1] = ast.copy_location(ast.Expr(ast.Call(_call(DISPLAY, last.value), [last.value], [])), last)
    items = [ast.withitem(_call(PATCHES + line, marker)), ast.withitem(_call(RESULTS, marker))]
    block = ast.copy_location(ast.With(items, body), marker)
    tree.body = [*futures, ast.fix_missing_locations(block)]
    return tree


def _call(line: str, place: ast.AST) -> ast.expr:
    tree = ast.parse(_call_text(line), mode="eval").body
    for node in ast.walk(tree):
        ast.copy_location(node, place)
    return tree


# --------------------------------------------------------------------------------------------------------------------
# One run of a cell


_current: ContextVar[CellResults | None] = ContextVar("graphpatch_cell", default=None)


def begin_cell(workspace: Workspace, line: str, is_silent: bool) -> PatchContext:
    """Returns the patch context of a cell, when its first line runs; `CellResults.current` is of this cell from now on.

    Raises:
        SessionError: The line or a value of a patch is not valid. The body of the cell does not run.
    """
    outer = _current.get()
    if outer is not None and outer.is_running:
        raise SessionError("%%graphpatch cells cannot be nested: a cell runs under the patches of one graph")
    workspace.notice_new_graphs()
    active, chosen = chosen_for(workspace, line)
    resolved = active.session.resolve(workspace.namespace, chosen)
    context = active.graph.patch(dict(resolved.patch_map.items()))
    results = CellResults(workspace, active, chosen, resolved, is_silent)
    context.after_call = results.put
    if not chosen.enabled:
        which = "all of these patches are disabled" if chosen.patches else "no patch is chosen"
        print(f"{which}: the cell runs without patches on {active.name}")
    _current.set(results)
    return context


def chosen_for(workspace: Workspace, line: str) -> tuple[ActiveGraph, ChosenPatches]:
    """Returns the graph and the patches that the first line of a cell selects: `[NAME] [--only SPEC ...]`."""
    from graphpatch_notebook.notebook.magics.commands import CELL, commands, numbers_of

    name = line.split(maxsplit=1)[0] if line.split() else ""
    if name in commands() and name not in workspace.graphs():
        raise SessionError(f"{name!r} is a command; write it on a line of its own: %graphpatch {line.strip()}")
    args = CELL.parse_line(line)
    active = workspace.named(args.name) if args.name else workspace.current()
    chosen = active.session.chosen
    return active, chosen if args.only is None else chosen.only(numbers_of(chosen, args.only))


class CellResults:
    """The variables that one run of a cell fills: a context manager inside the patch context of the cell.

    begin       results of an earlier run are removed
    each call   new values go into the variables
    end         a value that was modified in place since is not a result: its variable is deleted, with an error;
                one line for a graph that was not called, and for each variable that no call filled
    """

    is_running = False

    def __init__(
        self,
        workspace: Workspace,
        active: ActiveGraph,
        chosen: ChosenPatches,
        resolved: ResolvedPatches,
        is_silent: bool,
    ) -> None:
        self._is_silent, self._active, self._patches = is_silent, active, chosen.enabled
        self._results, self._namespace = workspace.results, workspace.namespace
        # Variables in slices keep the value that they had when the cell began, as in all other patches.
        names = {name for one, _ in resolved.observing if one.index for name in one.index.names}
        in_slices = {name: self._namespace[name] for name in names}
        self._observed = [_Observed(one, patch, in_slices) for one, patch in resolved.observing]
        self._has_results = False
        self._lock = threading.Lock()

    @staticmethod
    def current() -> CellResults:
        """Returns those of the cell that runs."""
        found = _current.get()
        if found is None:
            raise SessionError("no %%graphpatch cell is running")
        return found

    def display(self, value: object) -> None:
        """Displays a value as IPython displays the value of the last line."""
        if not self._is_silent:
            sys.displayhook(value)

    def __enter__(self) -> None:
        from graphpatch_notebook.notebook.session.chosen_patch import names_used

        # Only now that the patches are active, so that a failed start loses no results of an earlier run.
        used = names_used(self._patches)
        self._results.remove([one.name for one in self._observed if one.name not in used])
        self.is_running = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        """Checks the results and reports what is missing.

        Raises:
            PatchValueError: A result was modified in place, or a slice does not fit; the variable is deleted.
        """
        __tracebackhide__ = True
        self.is_running = False
        _current.set(None)
        for one in self._observed:
            # After an error, values of patches that fired before it help to find its cause.
            if error is not None and not one.is_filled and one.name not in self._namespace:
                self._put(one)
            elif one.is_filled and self._results.is_own(one.name):
                one.check()
        problems = [one.problem for one in self._observed if one.problem]
        self._results.remove([one.name for one in self._observed if one.problem])
        if error is None:
            self._report()
            if problems:
                raise PatchValueError("; ".join(problems))
        elif problems:
            add_note(error, "; ".join(problems))

    def put(self) -> None:
        """Fills the variables after a call of the graph. What is wrong with a value is an error at the end."""
        with self._lock:
            self._has_results = True
            for one in self._observed:
                self._put(one)

    def _put(self, one: _Observed) -> None:
        one.take()
        if one.problem is not None:
            self._results.remove([one.name])
        elif one.value is not None:
            self._results.put({one.name: one.value})
            one.is_filled = True

    def _report(self) -> None:
        name = self._active.name
        context = innermost(captured(self._active.graph))
        if self._patches and not self._has_results and (context is None or not context.is_used):
            why = "calls of the original model, of other graphs and in other threads are not patched"
            if self._namespace.get(name) is not self._active.graph:
                why = f"the variable {name} no longer holds that graph; {why}"
            print(f"no patch was applied, because this cell did not call {name} under the patches ({why})")
        for one in self._observed:
            if not (one.is_filled or one.problem) and one.name in self._namespace:
                what = "the result of an earlier run" if self._results.is_own(one.name) else "not the result of a patch"
                print(f"no call in this cell filled {one.name} for {one.title}: the variable holds {what}")


class _Observed:
    """A probe or record of a cell, and what it kept so far.

    Attributes:
        name: The name of its variable.
        is_filled: Whether the variable was assigned in this cell.
        problem: Why the variable does not hold a result, if so.
        value: The value for the variable; `None` without one.
    """

    def __init__(self, chosen: ChosenPatch, patch: Patch[Any], names: dict[str, Any]) -> None:
        self._chosen, self._patch, self._names = chosen, patch, names
        self.name, self.title = str(chosen.name), f"#{chosen.number} ({chosen})"
        self.is_filled = False
        self.problem: str | None = None
        self.value: Any = [] if isinstance(patch, RecordPatch) else None

    def take(self) -> None:
        """Takes the new values, or sets the problem with them."""
        self.problem = None
        try:
            if isinstance(self._patch, RecordPatch):
                new = self._patch._since(len(self.value))
                self.value += [self._chosen.part(value, self._names) for value in new]
            else:
                self.value = self._chosen.taken(self._patch, self._names)
        except PatchValueError as error:
            self.problem = f"{self.title}: {error}"

    def check(self) -> None:
        """Sets the problem if a kept value was modified in place, unless the variable holds a copy."""
        first = self.value[0] if isinstance(self.value, list) else self.value
        if self._chosen.index is not None and isinstance(first, Tensor) and not first._is_view():
            return
        try:
            self._patch.values_kept()
        except PatchValueError as error:
            self.problem = f"{self.title}: {error}; the variable {self.name} was deleted"
