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

from graphpatch_notebook.errors import PatchValueError, SessionError, add_note
from graphpatch_notebook.execution import PatchContext, innermost
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.patches.kinds import Patch, RecordPatch, is_overwritten
from graphpatch_notebook.torch_compat import version_of

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
        if not isinstance(node, ast.Module) or not node.body:
            return node
        try:
            line = _marked(node.body[0])
            return node if line is None else _patched(node, line.removeprefix(MARKER), self._interactivity())
        except Exception:  # for example, a cell nested too deeply; its marker raises when it runs
            return node


def _marked(statement: ast.stmt) -> str | None:
    """Returns the line of the marker if the statement is a marker, otherwise `None`."""
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return None
    arguments = statement.value.args
    if len(arguments) != 2 or not all(isinstance(argument, ast.Constant) for argument in arguments):
        return None
    line = arguments[1].value  # type: ignore[attr-defined]
    is_marker = isinstance(line, str) and ast.unparse(statement.value) == ast.unparse(ast.parse(_call_text(line)))
    return line if is_marker and line.split(" ")[0] == MARKER else None


def _patched(tree: ast.Module, line: str, interactivity: str) -> ast.Module:
    marker, *body = tree.body
    # Python requires them at the top; IPython allows them anywhere in a cell.
    futures = [node for node in body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    body = [node for node in body if node not in futures]
    if futures and not body:
        body = [ast.copy_location(ast.Pass(), futures[-1])]
    if not body:  # comments only
        tree.body = [_at(marker, ast.Expr(_call(EMPTY)))]
        return tree
    body = _displayed(body, interactivity)
    items = [ast.withitem(_call(PATCHES + line)), ast.withitem(_call(RESULTS))]
    block = ast.With(items, body)
    tree.body = [*futures, _at(marker, block)]
    if interactivity == "last":  # IPython displays every expression statement inside the last statement
        tree.body.append(_at(marker, ast.Pass()))
    return tree


def _displayed(body: list[ast.stmt], interactivity: str) -> list[ast.stmt]:
    """Returns the statements. The last one becomes a call that displays its value, if IPython would display that."""
    last = body[-1]
    if interactivity in ("last_expr", "last_expr_or_assign", "last") and isinstance(last, ast.Expr):
        return [*body[:-1], ast.copy_location(ast.Expr(_display(last.value)), last)]
    return body  # with "all", IPython also displays expression statements inside a `with` statement; or "none"


def _display(value: ast.expr) -> ast.expr:
    call = ast.Call(_call(DISPLAY), [value], [])
    for node in (call, *ast.walk(call.func)):
        ast.copy_location(node, value)
    return call


def _call(line: str) -> ast.expr:
    return ast.parse(_call_text(line), mode="eval").body


def _at(place: ast.stmt, statement: ast.stmt) -> ast.stmt:
    """Returns a statement with the position of another one. New nodes inside it get the same position."""
    ast.copy_location(statement, place)
    return ast.fix_missing_locations(statement)


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
    from graphpatch_notebook.notebook.magics.choosing import numbers_of
    from graphpatch_notebook.notebook.magics.commands import CELL, commands

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
        from graphpatch_notebook.notebook.session.chosen_patch import names_used

        self._is_silent = is_silent
        self._results = workspace.results
        self._namespace = workspace.namespace
        self._active = active
        self._patches = chosen.enabled
        # Variables in slices keep the value that they had when the cell began, as in all other patches.
        names = {name for one, _ in resolved.observing if one.index for name in one.index.names}
        in_slices = {name: self._namespace[name] for name in names}
        self._observed = [_Observed(one, patch, in_slices) for one, patch in resolved.observing]
        self._names_used = names_used(self._patches)
        fixed = [one for one in self._patches if not one.is_function or str(one.value).isidentifier()]
        used = names_used(fixed) - {one.name for one in self._observed}
        self._used = {name: self._namespace[name] for name in sorted(used) if name in self._namespace}
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
        # Only now that the patches are active, so that a failed start loses no results of an earlier run.
        self._results.remove([one.name for one in self._observed if one.name not in self._names_used])
        self.is_running = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        """Checks the results and reports what is missing.

        Raises:
            PatchValueError: A result was modified in place; its variable is deleted.
        """
        __tracebackhide__ = True
        self.is_running = False
        _current.set(None)
        if error is not None:  # values of patches that fired before it help to find its cause
            for one in self._observed:
                if not one.is_filled and one.name not in self._namespace:
                    self._put(one)
        problems = [problem for one in self._observed if (problem := self._checked(one))]
        if error is None:
            self._report()
            if problems:
                raise PatchValueError("; ".join(problems))
        elif problems and str(error) != "; ".join(problems):
            add_note(error, "; ".join(problems))

    def put(self) -> None:
        """Fills the variables after a call of the graph.

        Raises:
            PatchValueError: A slice does not fit a value. All other variables are filled.
        """
        __tracebackhide__ = True
        with self._lock:
            self._has_results = True
            problems = [problem for one in self._observed if (problem := self._put(one))]
        if problems:
            raise PatchValueError("; ".join(problems))

    def _put(self, one: _Observed) -> str | None:
        """Fills one variable, and returns the problem with its slice, if any."""
        try:
            one.take()
        except PatchValueError as problem:
            one.problem = str(problem)
            self._results.remove([one.name])
            return None if one.is_overwritten else one.problem
        if one.value is not None:
            self._results.put({one.name: one.value})
            one.is_filled = True
        return None

    def _checked(self, one: _Observed) -> str | None:
        """Returns why a variable does not hold a result, if so, and deletes the variable."""
        if one.problem is None and one.is_filled and self._results.is_own(one.name):
            one.problem = one.changed(self._namespace[one.name])
        if one.problem is not None:
            self._results.remove([one.name])
        return one.problem

    def _report(self) -> None:
        name = self._active.name
        context = innermost(captured(self._active.graph))
        is_called = self._has_results or (context is not None and context.has_runs)
        if self._patches and not is_called:
            why = "calls of the original model, of other graphs and in other threads are not patched"
            if self._namespace.get(name) is not self._active.graph:
                why = f"the variable {name} no longer holds that graph; {why}"
            print(f"no patch was applied, because this cell did not call {name} under the patches ({why})")
        changed = [used for used, value in self._used.items() if self._namespace.get(used, value) is not value]
        if changed and is_called:
            print(
                f"{', '.join(changed)} changed in this cell, but the patches use the value from the start of the cell; "
                f"to patch with several values, write `with {name}.patch(...)` in a loop (see %graphpatch export)"
            )
        for one in self._observed:
            if one.is_filled or one.problem is not None or one.name not in self._namespace:
                continue
            what = "the result of an earlier run" if self._results.is_own(one.name) else "not the result of a patch"
            print(f"no call in this cell filled {one.name} for {one.title}: the variable holds {what}")


class _Observed:
    """A probe or record of a cell, and the values that it collected so far.

    Attributes:
        is_filled: Whether the variable was assigned in this cell.
        is_overwritten: Whether the model wrote into a kept value. The cell may replace the value before it ends.
        problem: Why the variable does not hold a result, if so.
        value: The value for the variable; `None` without one.
    """

    def __init__(self, chosen: ChosenPatch, patch: Patch[Any], names: dict[str, Any]) -> None:
        self._chosen = chosen
        self._patch = patch
        self._names = names
        self._given: list[tuple[Any, Any, int | None]] = []  # parts, of which values, and the versions of these
        self.name = str(chosen.name)
        self.is_filled = False
        self.is_overwritten = False
        self.problem: str | None = None
        self.value: Any = [] if isinstance(patch, RecordPatch) else None

    @property
    def title(self) -> str:
        """The patch, with its number."""
        return f"#{self._chosen.number} ({self._chosen})"

    def take(self) -> None:
        """Collects the new values.

        Raises:
            PatchValueError: The slice does not fit a value, or the model wrote into one.
        """
        try:
            if isinstance(self._patch, RecordPatch):
                values = self._patch._since(len(self.value))
            else:
                kept = self._patch.activation  # type: ignore[attr-defined]  # a probe
                values = [] if kept is None else [kept]
        except PatchValueError as error:
            self.is_overwritten = True
            raise PatchValueError(f"{self.title}: {error}") from None
        given = [(self._chosen.part(value, self._names), value, version_of(value)) for value in values]
        if isinstance(self._patch, RecordPatch):
            self.value += [part for part, _, _ in given]
            self._given += given
        elif given:
            self.problem, self.value, self._given = None, given[0][0], given

    def changed(self, held: Any) -> str | None:
        """Returns the message for a result that was modified in place, if the variable still holds it."""
        ids = {id(part) for part in (held if isinstance(self._patch, RecordPatch) else [held])}
        changed = [
            part
            for part, whole, version in self._given
            if id(part) in ids and is_overwritten(whole, version) and (part is whole or part._is_view())
        ]
        if not changed:
            return None
        return (
            f"{self.title}: the tensor of shape {tuple(changed[0].shape)} in {self.name} was modified in place after "
            f"the call, so it is not the value at {self._chosen.path!r}, and the variable was deleted; modify a copy "
            "of the output instead (clone), or copy the value directly after the call"
        )
