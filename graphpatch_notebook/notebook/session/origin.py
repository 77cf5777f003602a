"""Where a graph came from, in the user's words: what code export and *Run* need to name it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.session.expressions import free_names
from graphpatch_notebook.notebook.session.syntax_trees import parsed


@dataclass(frozen=True, slots=True)
class Origin:
    """The Python with which a user made a `PatchableGraph`, as text.

    Attributes:
        graph: The name of the variable that holds the `PatchableGraph`.
        model: The expression for the model; `None` if it is not known.
        arguments: The example inputs, as they stand between the parentheses of the call; `None` if they are not known.
    """

    graph: str = "pg"
    model: str | None = None
    arguments: str | None = None

    def __post_init__(self) -> None:
        if not self.graph.isidentifier():
            raise SessionError(f"{self.graph!r} cannot be the name of a variable")
        if self.model is not None and _parsed(self.model) is None:
            raise SessionError(f"{self.model!r} is no Python expression")
        if self.arguments is not None and not _is_call_of_name(_parsed(f"_({self.arguments})")):
            raise SessionError(f"{self.arguments!r} are no arguments of a call")

    @property
    def names(self) -> set[str]:
        """The variables that it names: a probe must not overwrite them."""
        call = f"({self.model or None})({self.arguments or ''})"
        return {self.graph, *free_names(call)}


def _parsed(text: str) -> ast.expr | None:
    try:
        return parsed(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_call_of_name(node: ast.expr | None) -> bool:
    # Not `f(a) + f(b)` nor `f(a)(b)`, which texts with parentheses in them can make of it.
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
