"""`%%graphpatch`: a cell that runs as any other, but inside of a patch context.

%%graphpatch pg                              what the user runs
hidden.norm()

magic('%%graphpatch pg')                     after `mark_cell`, on the lines: the marker
hidden.norm()

with magic('%%patches pg'), magic('%%results'):
    magic('%%display')(hidden.norm())        after `CellTransformer`, on the tree

where `magic(...)` is `get_ipython().run_line_magic('graphpatch', ...)`.

The lines of the body stay where they are, so that line numbers, tracebacks, history, `await`, `;` and magics are
IPython's own. A marker that is run itself raises: a cell never runs without its patches unnoticed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from IPython.core import inputtransformer2

MARKER = "%%graphpatch"
PATCHES, RESULTS, DISPLAY, EMPTY = "%%patches", "%%results", "%%display", "%%empty"
_ipython: Any = inputtransformer2  # functions without types
_FIRST_LINE = re.compile(r"%%graphpatch(?:[ \t](.*))?$")


def mark_cell(lines: list[str]) -> list[str]:
    """Returns the lines of a cell, with a marker in place of a first line `%%graphpatch ...`."""
    first = _FIRST_LINE.match(lines[0].rstrip()) if lines else None
    if first is None or not any(line.strip() for line in lines[1:]):
        return lines  # IPython says that the body is empty
    call = _call_text(f"{MARKER} {first.group(1) or ''}".rstrip())
    begun = _ipython.leading_empty_lines(lines[1:])
    empty = lines[1 : len(lines) - len(begun)]
    return [f"{call}\n", *empty, *_ipython.cell_magic(_ipython.leading_indent(begun))]


# Terminals ask whether a cell is complete: those that begin with `%%` are, after an empty line.
mark_cell.has_side_effects = True  # type: ignore[attr-defined]


def _call_text(line: str) -> str:
    return f"get_ipython().run_line_magic('graphpatch', {line!r})"


class CellTransformer(ast.NodeTransformer):
    """Puts a marked cell into `with` statements that apply its patches and put the results in their variables.

    Args:
        interactivity: Returns which values IPython shows, as `InteractiveShell.ast_node_interactivity`.
    """

    def __init__(self, interactivity: Callable[[], str]) -> None:
        self._interactivity = interactivity

    def visit(self, node: ast.AST) -> ast.AST:
        """Returns the tree of a cell; one that is not marked as it is. Never raises: IPython would drop it."""
        if not isinstance(node, ast.Module) or not node.body:
            return node
        try:
            line = _marked(node.body[0])
            return node if line is None else _patched(node, line.removeprefix(MARKER), self._interactivity())
        except Exception:  # a cell too deep to be looked through, say: its marker raises when it is run
            return node


def _marked(statement: ast.stmt) -> str | None:
    """Returns what the marker says, if a statement is one."""
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
    # Python wants them in front, and IPython lets them stand anywhere.
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
    if interactivity == "last":  # IPython shows all that stands by itself in the last statement
        tree.body.append(_at(marker, ast.Pass()))
    return tree


def _displayed(body: list[ast.stmt], interactivity: str) -> list[ast.stmt]:
    """Returns the statements, with those whose values are shown turned into calls that show them."""
    last = body[-1]
    if interactivity == "last_expr_or_assign" and (name := _assigned(last)) is not None:
        shown = ast.Expr(_display(ast.copy_location(ast.Name(name, ast.Load()), last)))
        return [*body, ast.copy_location(shown, last)]
    if interactivity in ("last_expr", "last_expr_or_assign", "last") and isinstance(last, ast.Expr):
        return [*body[:-1], ast.copy_location(ast.Expr(_display(last.value)), last)]
    if interactivity == "last":
        return [*body[:-1], _DisplayInside().visit(last)]
    return body  # "all": IPython shows whatever stands by itself, also inside of a `with` statement; or "none"


class _DisplayInside(ast.NodeTransformer):
    """Shows what stands by itself inside of a loop or an `if`, but not in functions and classes."""

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
    """Returns a statement that stands where another one stands, without the places of what is new in it."""
    ast.copy_location(statement, place)
    return ast.fix_missing_locations(statement)
