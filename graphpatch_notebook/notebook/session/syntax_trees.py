"""Python expressions that somebody typed, parsed in whichever thread asks."""

from __future__ import annotations

import ast

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
