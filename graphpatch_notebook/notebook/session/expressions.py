"""Values as users type them: Python expressions, kept as text, evaluated only when a context is entered."""

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
# What runs no code but that of the objects which the names stand for.
_PLAIN = (
    *(ast.Constant, ast.Name, ast.expr_context, ast.BinOp, ast.operator, ast.UnaryOp, ast.unaryop),
    *(ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Subscript, ast.Slice),
)
_OF_IPYTHON = frozenset({"In", "Out", "exit", "quit", "open", "get_ipython"})


def parse_expression(text: str) -> str:
    """Returns the text of an expression, without the space around it. Nothing is evaluated.

    Raises:
        ValueError: It is no Python expression.

    Example:
        >>> parse_expression(" 0.5 * steering[2] ")
        '0.5 * steering[2]'
    """
    stripped = text.strip()
    if not stripped:
        raise ValueError("a value is empty; write a number, the name of a variable, or a Python expression")
    try:
        tree = _parsed(stripped)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{quoted(text)} is no Python expression ({reason})") from None
    if any(isinstance(node, (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)) for node in ast.walk(tree)):
        raise ValueError(
            f"{quoted(text)}: a value cannot await, yield or assign; do that in a cell, and name the variable"
        )
    return stripped


def is_plain(text: str) -> bool:
    """Whether an expression holds only literals, names, arithmetic, containers of these, and subscripts.

    What it can do is up to the user's own objects, whoever wrote it: it calls no function that it names, and gets at no
    attribute. It may still take long (`9**9**9`).

    Example:
        >>> is_plain("0.5 * steering[2, :3]"), is_plain("().__class__"), is_plain("torch.ones(3)")
        (True, False, False)
    """
    return all(isinstance(node, _PLAIN) for node in ast.walk(_parsed(text).body))


def quoted(text: str) -> str:
    """Returns a text as a message quotes it: in quotes, and not all of a long one.

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
    """Keeps what Python thinks of the style of somebody's text (`1if x else 2`) from being printed.

    In other threads than the main one it may be printed: what is switched off there, and on again, is switched on and
    off for a cell that runs meanwhile, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def evaluate(text: str, namespace: dict[str, Any], title: str) -> Any:
    """Returns the value of an expression in the user's namespace.

    Args:
        text: What `parse_expression` returned.
        namespace: The user's variables. Used as it is, so that functions in the expression find theirs.
        title: Stands for the file name in tracebacks.
    """
    return eval(compile(_parsed(text), f"<{title}>", "eval"), namespace)


def undefined(name: str | None, namespace: Iterable[str]) -> str:
    """Returns what is said of a name that stands for nothing: the variables that may be meant.

    Example:
        >>> undefined("stear", ["steer", "_", "In"])
        "there is no variable 'stear'; nearest: steer"
    """
    mine = [other for other in namespace if not other.startswith("_") and other not in _OF_IPYTHON]
    close = nearest(name or "", mine)
    return f"there is no variable {name!r}" + (f"; nearest: {', '.join(close)}" if close else "")


def as_argument(text: str, node: ast.expr | None = None) -> str:
    """Returns the expression as it can stand as one argument of a call, unchanged where that is possible.

    Args:
        text: The expression.
        node: What Python reads in it, where it stands in a longer text.

    Example:
        >>> as_argument("a + b"), as_argument("1, 2"), as_argument("1 # one")
        ('a + b', '(1, 2)', '1')
    """
    node = _parsed(text).body if node is None else node
    for candidate in (text, f"({text})"):
        if not {"\n", "\r"} & set(text) and is_argument(candidate, node):
            return candidate
    return ast.unparse(node)


def is_argument(source: str, node: ast.expr) -> bool:
    """Whether Python reads `node` where `source` stands as an argument of a call."""
    try:
        with without_syntax_warnings():
            call = parsed(f"_(_, _={source}, __=0)")
    except (SyntaxError, ValueError):
        return False
    is_one = isinstance(call, ast.Call) and len(call.args) == 1 and [k.arg for k in call.keywords] == ["_", "__"]
    return is_one and ast.dump(call.keywords[0].value) == ast.dump(node)  # type: ignore[attr-defined]


def free_names(source: str) -> list[str]:
    """Returns the global names that a piece of Python uses but does not bind, sorted; builtins included.

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
    # On a line of its own: what ends the expression early (a comment, a parenthesis) ends it for Python, too.
    with without_syntax_warnings():
        return ast.Expression(parsed(text))


_TRIES = 10


def parsed(expression: str) -> ast.expr:
    """Returns the syntax tree of an expression.

    CPython counts how deep it is in a syntax tree for all threads together (python/cpython#106905): where two parse at
    the same time, one may be told that it lost count, of an expression that is right.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: As `ast.parse`.

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
