"""How the user made a graph, as text: the model, the example inputs and the variables that hold them."""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.session.expressions import free_names, parse_arguments, parse_expression


@dataclass(frozen=True, slots=True)
class Origin:
    """The Python with which a user made a `PatchableGraph`, as text.

    Attributes:
        graph: The name of the variable that holds the `PatchableGraph`.
        model: The expression for the model; `None` if it is not known.
        arguments: The example inputs, as text between the parentheses of the call; `None` if they are not known.
    """

    graph: str = "pg"
    model: str | None = None
    arguments: str | None = None

    def __post_init__(self) -> None:
        if not self.graph.isidentifier():
            raise SessionError(f"{self.graph!r} cannot be the name of a variable")
        try:
            if self.model is not None:
                parse_expression(self.model)
            if self.arguments is not None:
                parse_arguments(self.arguments)
        except ValueError as problem:
            raise SessionError(str(problem)) from None

    @property
    def names(self) -> set[str]:
        """The variables that it uses. A probe must not overwrite them."""
        call = f"(\n{self.model or None}\n)(\n{self.arguments or ''}\n)"
        return {self.graph, *free_names(call)}


# --------------------------------------------------------------------------------------------------------------------
# The example inputs, by the variables that hold them


_PLAIN = (bool, int, float, str, type(None))


def written_arguments(args: Sequence[Any], kwargs: Mapping[str, Any], namespace: Mapping[str, Any]) -> str | None:
    """Returns inputs as the text of a call's arguments; `None` if a variable is missing for one of them.

    Example:
        >>> ids, inputs = object(), {"mask": object()}
        >>> written_arguments((ids, True), inputs, {"ids": ids, "inputs": inputs})
        'ids, True, **inputs'
    """
    names = {id(value): name for name, value in reversed(list(namespace.items())) if _is_name(name)}
    texts = [_written(value, names) for value in args]
    left = dict(kwargs)
    whole = _mapping_of(left, namespace)
    if whole is not None:
        left = {key: value for key, value in left.items() if key not in namespace[whole]}
    by_key = {key: _written(value, names) for key, value in left.items()}
    if None in texts or None in by_key.values():
        return None
    found = [*texts, *(f"{key}={text}" for key, text in by_key.items()), *([f"**{whole}"] if whole else [])]
    return ", ".join(str(text) for text in found)


def _written(value: Any, names: Mapping[int, str]) -> str | None:
    return repr(value) if type(value) in _PLAIN else names.get(id(value))


def _mapping_of(kwargs: Mapping[str, Any], namespace: Mapping[str, Any]) -> str | None:
    """Returns the variable that holds a mapping of some keyword arguments, such as the output of a tokenizer."""
    for name, value in list(namespace.items()):
        if not _is_name(name) or not isinstance(value, Mapping) or not value:
            continue
        if all(isinstance(key, str) and key in kwargs and kwargs[key] is value[key] for key in value):
            return name
    return None


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and not name.startswith("_") and not keyword.iskeyword(name)
