"""The example inputs of a graph, kept to be run on again; and what tells whether somebody changed them since."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.torch_compat import version_of, without_torch_functions
from graphpatch_notebook.values import key_text, readable_children

_MOST = 10_000
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_Marks: TypeAlias = "dict[str, tuple[Any, ...]]"


class ExampleInputs:
    """References to the example inputs of a graph. Nothing is copied.

    Make it before the inputs are used: what the capture itself changes (a cache that grows) is a change, too.

    Attributes:
        args: The positional ones.
        kwargs: Those by keyword.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args = args
        self.kwargs = kwargs
        self._marks = self._look()

    def change(self) -> str | None:
        """Returns what is different from what it was when this object was made, in words; `None`: nothing.

        Seen are writes into tensors that torch counts (not those through `.data`, numpy, or into inference tensors),
        and what containers, and objects such as caches, hold.

        Example:
            >>> import torch
            >>> x = torch.ones(2)
            >>> inputs = ExampleInputs((x,), {})
            >>> inputs.change()
            >>> _ = x.add_(1)
            >>> inputs.change()
            'argument 0 was written into'
        """
        now = self._look()
        for where, mark in self._marks.items():
            if where not in now:
                return f"{where} is gone"
            if now[where] != mark:
                return f"{where} {_difference(mark, now[where])}"
        more = next((where for where in now if where not in self._marks), None)
        return None if more is None else f"{more} is new"

    def is_like(self, other: ExampleInputs) -> bool:
        """Whether another object was made of the same inputs, and nothing had changed in them since."""
        return self._marks == other._marks

    def _look(self) -> _Marks:
        named = [*((f"argument {i}", value) for i, value in enumerate(self.args)), *self.kwargs.items()]
        marks: _Marks = {}
        seen: set[int] = set()
        for where, value in named:
            for inner, mark in _marks_of(where, value, seen):
                if len(marks) == _MOST:
                    return marks
                marks[inner] = mark
        return marks


def _marks_of(where: str, value: Any, seen: set[int]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    if isinstance(value, Tensor):
        with without_torch_functions():  # some subclasses have no shape otherwise: see `describe`
            mark = ("tensor", id(value), version_of(value), str(tuple(value.shape)), value.requires_grad)
        yield where, mark
        return
    if isinstance(value, _PLAIN):
        # The text: NaN is not equal to itself, and `1` is equal to `True`.
        yield where, ("plain", type(value), repr(value))
        return
    yield where, ("object", id(value))
    if id(value) in seen or isinstance(value, (Module, type)) or callable(value):
        return
    seen.add(id(value))
    inside = readable_children(value)
    if inside is None:
        inside = list(getattr(value, "__dict__", {}).items())
    for key, child in inside:
        yield from _marks_of(f"{where}.{key_text(key)}", child, seen)


def _difference(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    if before[:2] != after[:2] or before[0] != "tensor":
        return f"was {before[2]}, and is {after[2]}" if before[0] == after[0] == "plain" else "is another object"
    if before[3] != after[3]:
        return f"had the shape {before[3]}, and has {after[3]}"
    return "was written into" if before[2] != after[2] else "requires gradients otherwise than before"
