"""`%%graphpatch`: a cell that runs like any other cell, but inside a patch context.

%%graphpatch pg                              what the user runs
hidden.norm()

magic('%%graphpatch pg')                     after `mark_cell`, on the lines: the marker
hidden.norm()

with magic('%%patches pg'), magic('%%results'):
    magic('%%display')(hidden.norm())        after `CellTransformer`, on the tree

Here `magic(...)` is `get_ipython().run_line_magic('graphpatch', ...)`. The lines of the body keep their positions, so
line numbers, tracebacks, history, `await`, `;` and magics work as IPython defines them. The marker raises an error when
it runs, so a cell never runs silently without its patches.

`CellRun` is one run of the cell. `CellResults` fills the variables of its probes and records:

begin        results of an earlier run are put aside
each call    new values go into the variables
end          a value that was modified in place since is not a result: its variable is deleted, with an error;
             one line for a graph that was not called, and for each variable that no call filled

What only such cells need is imported by the first one: the functions at the top see every cell of the user.
"""

from __future__ import annotations

import ast
import re
import sys
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any

from IPython.core import inputtransformer2
from IPython.core.error import UsageError

from graphpatch_notebook.errors import PatchMapError, PatchValueError, SessionError, add_note
from graphpatch_notebook.execution import PatchContext, innermost
from graphpatch_notebook.interrupts import on_error
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
    """Returns the statements. Expressions whose values IPython would display become calls that display them."""
    last = body[-1]
    if interactivity == "last_expr_or_assign" and (name := _assigned(last)) is not None:
        shown = ast.Expr(_display(ast.copy_location(ast.Name(name, ast.Load()), last)))
        return [*body, ast.copy_location(shown, last)]
    if interactivity in ("last_expr", "last_expr_or_assign", "last") and isinstance(last, ast.Expr):
        return [*body[:-1], ast.copy_location(ast.Expr(_display(last.value)), last)]
    if interactivity == "last":
        return [*body[:-1], _DisplayInside().visit(last)]
    return body  # with "all", IPython also displays expression statements inside a `with` statement; or "none"


class _DisplayInside(ast.NodeTransformer):
    """Displays expression statements inside loops and conditions, but not in functions and classes."""

    def visit_FunctionDef(self, node: ast.AST) -> ast.AST:
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = visit_FunctionDef  # noqa: N815

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        return ast.copy_location(ast.Expr(_display(node.value)), node)


def _assigned(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        target = statement.target
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


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
# The variables that a cell fills


class CellResults:
    """The variables that one run of a cell fills."""

    def __init__(
        self, workspace: Workspace, active: ActiveGraph, chosen: ChosenPatches, resolved: ResolvedPatches
    ) -> None:
        from graphpatch_notebook.notebook.session.chosen_patch import names_used

        self._results = workspace.results
        self._namespace = workspace.namespace
        self._active = active
        self._patches = chosen.enabled
        # Variables in slices keep the value that they had when the cell began, as in all other patches.
        names = {name for one, _ in resolved.observing if one.index for name in one.index.names}
        in_slices = {name: self._namespace[name] for name in names}
        self._observed = [_Observed(one, patch, in_slices) for one, patch in resolved.observing]
        fixed = [one for one in self._patches if not one.is_function or str(one.value).isidentifier()]
        self._names_used = names_used(self._patches)
        own = {one.name for one in self._observed}
        used = {name for name in names_used(fixed) if name in self._namespace and name not in own}
        self._used = {name: self._namespace[name] for name in sorted(used)}
        self._aside: dict[str, Any] = {}
        self._has_results = False
        self._raised: PatchValueError | None = None
        self._lock = threading.Lock()

    def put_aside(self) -> None:
        """Removes the results of an earlier run, except those that values and slices of the patches use."""
        own = [o.name for o in self._observed if o.name not in self._names_used and self._results.is_own(o.name)]
        self._aside = {name: self._namespace[name] for name in own}
        self._results.remove(own)

    def put(self) -> None:
        """Fills the variables after a call of the graph.

        Raises:
            PatchValueError: A slice does not fit a value. All other variables are filled.
        """
        __tracebackhide__ = True
        with self._lock:
            self._has_results = True
            self._aside.clear()
            problems = [problem for one in self._observed if (problem := self._put(one))]
        if problems:
            self._raised = PatchValueError("; ".join(problems))
            raise self._raised

    def _put(self, one: _Observed) -> str | None:
        """Fills one variable, and returns the problem with its slice, if any."""
        problem = one.take()
        if one.problem is not None:
            self._results.remove([one.name])
        elif one.value is not None:
            self._results.put({one.name: one.value})
            one.is_filled = True
        return problem

    def end(self, error: BaseException | None) -> None:
        """Checks the results and reports what is missing. Called at the end of the cell, inside its patch context.

        Raises:
            PatchValueError: A result was modified in place; its variable is deleted.
        """
        __tracebackhide__ = True
        is_called = self._is_called()
        if not is_called:
            self._results.put({name: old for name, old in self._aside.items() if name not in self._namespace})
        self._aside.clear()
        if error is not None:
            self._put_missing()
        for one in self._observed:
            if self._results.is_own(one.name) and one.is_filled:
                one.check(self._namespace[one.name])
            if one.problem is not None:
                self._results.remove([one.name])
        problems = "; ".join(one.problem for one in self._observed if one.problem is not None)
        if error is None:
            self._report(is_called)
            if problems:
                raise PatchValueError(problems)
        elif problems and error is not self._raised:
            add_note(error, problems)

    def _is_called(self) -> bool:
        context = innermost(captured(self._active.graph))
        return self._has_results or (context is not None and context.has_runs)

    def _put_missing(self) -> None:
        """Fills the variables of patches that fired before the error: their values help to find its cause."""
        for one in self._observed:
            is_old = self._results.is_own(one.name) and not one.is_filled
            if one.name not in self._namespace or is_old:
                self._put(one)

    def _report(self, is_called: bool) -> None:
        name = self._active.name
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
        problem: Why the collected value is not a valid result, if it is not.
        value: The value for the variable; `None` without one.
    """

    def __init__(self, chosen: ChosenPatch, patch: Patch[Any], names: dict[str, Any]) -> None:
        self._chosen = chosen
        self._patch = patch
        self._names = names
        self._given: list[tuple[Any, Any, int | None]] = []  # parts, of which values, and the versions of these
        self._count = 0
        self.name = str(chosen.name)
        self.is_filled = False
        self.problem: str | None = None
        self.value: Any = [] if isinstance(patch, RecordPatch) else None

    @property
    def title(self) -> str:
        """The patch, with its number."""
        return f"#{self._chosen.number} ({self._chosen})"

    def take(self) -> str | None:
        """Collects new values, and returns the problem with the slice, if any.

        Other problems are reported at the end of the cell, since the cell may replace the value before that.
        """
        try:
            values = self._new()
        except PatchValueError as error:
            self._spoil(f"{self.title}: {error}")
            return None
        try:
            parts = [self._chosen.part(value, self._names) for value in values]
        except PatchValueError as error:
            self._spoil(str(error))
            return str(error)
        given = [(part, whole, version_of(whole)) for part, whole in zip(parts, values, strict=True)]
        if isinstance(self._patch, RecordPatch):
            if self.problem is None:
                self.value += parts
                self._given += given
        elif given:
            self.problem, self.value, self._given = None, parts[0], given
        return None

    def _new(self) -> list[Any]:
        if isinstance(self._patch, RecordPatch):
            before, self._count = self._count, len(self._patch._kept)
            return self._patch._since(before)
        value = self._patch.activation  # type: ignore[attr-defined]  # a probe
        return [] if value is None else [value]

    def _spoil(self, problem: str) -> None:
        self.problem, self.value, self._given = problem, None, []

    def check(self, held: Any) -> None:
        """Checks whether a value that the variable still holds was modified in place."""
        ids = {id(part) for part in (held if isinstance(self._patch, RecordPatch) else [held])}
        changed = [
            part
            for part, whole, version in self._given
            if id(part) in ids and is_overwritten(whole, version) and (part is whole or part._is_view())
        ]
        if not changed:
            return
        repair = "modify a copy of the output instead (clone)"
        if not isinstance(self._patch, RecordPatch):
            repair += f", or copy the value directly after the call: {self.name} = {self.name}.clone()"
        self._spoil(
            f"{self.title}: the tensor of shape {tuple(changed[0].shape)} in {self.name} was modified in place after "
            f"the call, so it is not the value at {self._chosen.path!r}, and the variable was deleted; {repair}"
        )


# --------------------------------------------------------------------------------------------------------------------
# One run of a cell


_current: ContextVar[CellRun | None] = ContextVar("graphpatch_cell_run", default=None)


class CellRun:
    """One run of a cell, created when its first line runs.

    Raises:
        SessionError: The line or a value of a patch is not valid. The body of the cell does not run.
    """

    def __init__(self, workspace: Workspace, line: str, frame: FrameType, is_silent: bool) -> None:
        remove_leftover_patches()
        outer = _current.get()
        if outer is not None and outer.is_running():
            raise SessionError("%%graphpatch cells cannot be nested: a cell runs under the patches of one graph")
        workspace.notice_new_graphs()
        active, chosen = chosen_for(workspace, line)
        self._is_silent = is_silent
        self._is_open = True
        self._has_begun = False
        resolved = active.session.resolve(workspace.namespace, chosen)
        context = active.graph.patch(dict(resolved.patch_map.items()))
        self._context = weakref.ref(context)  # a strong reference would keep the values of its probes alive
        self._results: _ResultBlock | None = _ResultBlock(self, CellResults(workspace, active, chosen, resolved))
        context.after_call = self._results.put
        self._entry: _PatchedBlock | None = _PatchedBlock(self, context)
        if not chosen.enabled:
            which = "all of these patches are disabled" if chosen.patches else "no patch is chosen"
            print(f"{which}: the cell runs without patches on {active.name}")
        _current.set(self)

    @staticmethod
    def current() -> CellRun:
        """Returns the current run."""
        run = _current.get()
        if run is None or not run._is_open:
            raise SessionError("no %%graphpatch cell is running")
        return run

    def begin(self) -> None:
        """Marks the run as begun. Called when the patches are active."""
        self._has_begun = True

    def end(self) -> None:
        """Marks the run as ended, and releases all values. Called before the patches are removed."""
        self._has_begun = False
        self._is_open = False
        self._entry = self._results = None

    def is_running(self) -> bool:
        """Whether the cell is running."""
        return self._has_begun and self._is_open

    def leave(self) -> None:
        """Removes the patches if they are still active after the cell has ended."""
        self.end()
        context = self._context()
        if context is not None:
            context.__exit__(KeyboardInterrupt, None, None)  # has no effect if the context was exited

    def patches(self) -> _PatchedBlock:
        """Returns the context manager that applies the patches. Can be called once."""
        assert self._entry is not None
        entry, self._entry = self._entry, None
        return entry

    def results(self) -> _ResultBlock:
        """Returns the inner context manager, which fills the variables. Can be called once."""
        if self._results is None:
            raise SessionError("no %%graphpatch cell is starting")
        results, self._results = self._results, None
        return results

    def display(self, value: object) -> None:
        """Displays a value as IPython displays the value of the last line."""
        if not self._is_silent:
            sys.displayhook(value)


def remove_leftover_patches() -> None:
    """Removes the patches of an earlier cell that an interrupt left active."""
    run = _current.get()
    if run is not None and not run.is_running():
        run.leave()
        _current.set(None)


def chosen_for(workspace: Workspace, line: str) -> tuple[ActiveGraph, ChosenPatches]:
    """Returns the graph and the patches that the first line of a cell selects: `[NAME] [--only SPEC ...]`."""
    from graphpatch_notebook.notebook.magics.choosing import numbers_of
    from graphpatch_notebook.notebook.magics.command_line import arguments
    from graphpatch_notebook.notebook.magics.commands import commands

    words = arguments(line)
    names = words[: words.index("--only")] if "--only" in words else words
    specs = words[len(names) + 1 :]
    name = names[0] if names else ""
    if name.startswith("-"):
        raise SessionError(f"unknown option {name}; a cell takes --only PATH|#n ...")
    if name in commands() and name not in workspace.graphs():
        raise SessionError(f"{name!r} is a command; write it on a line of its own: %graphpatch {' '.join(words)}")
    if len(names) > 1:
        unexpected = " ".join(names[1:])
        raise SessionError(f"unexpected argument {unexpected!r}; write %%graphpatch [NAME] [--only PATH|#n ...]")
    active = workspace.named(name) if name else workspace.current()
    chosen = active.session.chosen
    if "--only" not in words:
        return active, chosen
    if not specs:
        raise SessionError("--only needs at least one patch: #1, a path, or a pattern such as 'h_*.output'")
    return active, chosen.only(numbers_of(chosen, [word.rstrip(",") for word in specs]))


class _PatchedBlock:
    """Enters a patch context. An error in the patches is raised as a one-line `UsageError`."""

    def __init__(self, run: CellRun, context: PatchContext) -> None:
        self._run = run
        self._context = context

    def __enter__(self) -> None:
        with on_error(self._run.end):
            try:
                self._context.__enter__()
            except PatchMapError as error:
                from graphpatch_notebook.notebook.magics.command_line import one_line

                raise UsageError(one_line(error)) from None

    @property
    def __exit__(self) -> Callable[..., None]:  # noqa: PLE0302  # a property that returns a function with the usual arguments
        # The method of the context itself: its warnings point to the caller, which must be the user's cell.
        return self._context.__exit__


class _ResultBlock:
    """Begins and ends the run, and fills the variables of its probes and records."""

    def __init__(self, run: CellRun, results: CellResults) -> None:
        self._run = run
        self._results = results
        self.put = results.put

    def __enter__(self) -> None:
        # Only now that the patches are active, so that a failed start loses no results of an earlier run.
        self._results.put_aside()
        self._run.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        __tracebackhide__ = True
        self._run.end()
        self._results.end(error)
