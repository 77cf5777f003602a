"""Values as users type them: Python expressions, kept as text and evaluated when a context is entered."""

from __future__ import annotations

import ast
import symtable
import textwrap
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from graphpatch_notebook.paths import nearest

_LONGEST_QUOTE = 80
# These nodes run no code except that of the objects that the names refer to.
_PLAIN = (
    *(ast.Constant, ast.Name, ast.expr_context, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop),
    *(ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Subscript, ast.Slice),
)
_OF_IPYTHON = frozenset({"In", "Out", "exit", "quit", "open", "get_ipython"})


def parse_expression(text: str) -> str:
    """Returns the text of an expression, stripped. Nothing is evaluated.

    Raises:
        ValueError: The text is not a Python expression.

    Example:
        >>> parse_expression(" 0.5 * steering[2] ")
        '0.5 * steering[2]'
    """
    stripped = text.strip()
    if not stripped:
        raise ValueError("a value is empty; write a number, the name of a variable, or a Python expression")
    try:
        tree = _parsed(stripped)
    except ValueError as error:
        raise ValueError(f"{quoted(text)} is not a Python expression ({error})") from None
    check_runs_anywhere(tree, text)
    return stripped


def check_runs_anywhere(tree: ast.AST, text: str) -> None:
    """Checks that an expression does not await, yield or assign.

    Raises:
        ValueError: It does.
    """
    if any(isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)) for node in ast.walk(tree)):
        raise ValueError(f"{quoted(text)} cannot await, yield or assign; do that in a cell, and name the variable")


def parse_arguments(text: str) -> ast.Call:
    """Returns a call with these arguments, parsed.

    Raises:
        ValueError: The text is not the arguments of a call.

    Example:
        >>> len(parse_arguments("ids, mask=m").keywords)
        1
    """
    reason = ""
    try:
        # On lines of its own, so that a comment or an extra parenthesis cannot end the call.
        with without_syntax_warnings():
            call = parsed(f"_(\n{text}\n)")
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):  # not `f(a) + f(b)` or `f(a)(b)`
            return call
    except ValueError as error:
        reason = f" ({error})"
    raise ValueError(f"{quoted(text)} are not the arguments of a call{reason}")


def is_plain(text: str) -> bool:
    """Whether an expression holds only literals, names, arithmetic, containers of these, and subscripts.

    Such an expression calls no function and reads no attribute, so it runs only the code of the user's own objects. It
    may still take a long time (`9**9**9`).

    Example:
        >>> is_plain("0.5 * steering[2, :3]"), is_plain("().__class__"), is_plain("torch.ones(3)")
        (True, False, False)
    """
    return all(isinstance(node, _PLAIN) for node in ast.walk(_parsed(text).body))


def quoted(text: str) -> str:
    """Returns a text in quotes, for a message; a long text is cut.

    Example:
        >>> quoted("a b"), len(quoted("1 + " * 1000))
        ("'a b'", 80)
    """
    shown = repr(text[:_LONGEST_QUOTE])
    if len(text) <= _LONGEST_QUOTE and len(shown) <= _LONGEST_QUOTE:
        return shown
    return f"{shown[: _LONGEST_QUOTE - 4]}...{shown[0]}"


@contextmanager
def without_syntax_warnings() -> Iterator[None]:
    """Suppresses Python's warnings about the style of an expression (`1if x else 2`).

    Only in the main thread, because warning filters are shared with a cell that runs at the same time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def evaluate(text: str, namespace: dict[str, Any], title: str) -> Any:
    """Returns the value of an expression in the user's namespace, not in a copy: functions in it see later changes."""
    return eval(compile(_parsed(text), f"<{title}>", "eval"), namespace)


def undefined(name: str | None, namespace: Iterable[str]) -> str:
    """Returns the message for an undefined name, with the nearest variables.

    Example:
        >>> undefined("stear", ["steer", "_", "In"])
        "unknown variable 'stear'; nearest: steer"
    """
    mine = [other for other in namespace if not other.startswith("_") and other not in _OF_IPYTHON]
    close = nearest(name or "", mine)
    return f"unknown variable {name!r}" + (f"; nearest: {', '.join(close)}" if close else "")


def free_names(source: str) -> list[str]:
    """Returns the global names that source code uses but does not bind, sorted, including builtins.

    Example:
        >>> free_names("x = f(lambda a: a + b)")
        ['b', 'f']
    """
    with without_syntax_warnings():
        top = symtable.symtable(textwrap.dedent(source), "<source>", "exec")
    used, bound = set(), set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if table is top and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(symbol.get_name())
            elif symbol.is_referenced() and (table is top or symbol.is_global()):
                used.add(symbol.get_name())
    return sorted(used - bound)


def _parsed(text: str) -> ast.Expression:
    # Parsed alone, so that a comment or a parenthesis that ends the expression early is an error.
    with without_syntax_warnings():
        return ast.Expression(parsed(text))


_TRIES = 10


def parsed(expression: str) -> ast.expr:
    """Returns the syntax tree of an expression.

    CPython shares the recursion counter of `ast` between threads (python/cpython#106905). If two threads parse at the
    same time, one may get a `SystemError` for a valid expression, so this tries again.

    Raises:
        ValueError: It is not an expression, or is nested too deeply.

    Example:
        >>> ast.unparse(parsed("a+1"))
        'a + 1'
    """
    tries = _TRIES
    while True:
        tries -= 1
        try:
            return ast.parse(expression, mode="eval").body
        except SystemError:
            if not tries:
                raise
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(error.msg if isinstance(error, SyntaxError) else str(error)) from None
