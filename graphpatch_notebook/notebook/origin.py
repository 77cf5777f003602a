"""Where a graph came from, in the user's words: what code export and *Run* need to name it."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.expressions import free_names


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
        for call in (self.model and f"({self.model})", self.arguments is not None and f"_({self.arguments})"):
            if call and not _is_expression(call):
                raise SessionError(f"{call!r} is no Python expression")

    @property
    def names(self) -> set[str]:
        """The variables that it names: a probe must not overwrite them."""
        call = f"({self.model or None})({self.arguments or ''})"
        return {self.graph, *free_names(call)}


def _is_expression(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
