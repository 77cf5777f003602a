"""Slices as users type them between brackets: `:, -1, 3:5, ...` (text only; nothing is evaluated).

":, tok, 3:5"                   text
  -> SliceText                  parsed by `ast`, checked            (`parse_slice`)
  -> (slice(None), 7, ...)      with the variables' values          (`SliceText.index`)
  -> "(slice(None), tok, ...)"  as Python source                    (`SliceText.source`)
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphpatch_notebook.notebook.session.expressions import parsed, quoted, without_syntax_warnings
from graphpatch_notebook.patches.slices import index_text, indexed_dimensions, selection_problem

_WHAT_A_SLICE_IS = "integers, slices such as 3:5, `...`, None, names of variables and lists of integers"


class Name(str):
    """The name of a variable, in place of its value in an index."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, slots=True)
class SliceText:
    """A slice that was typed.

    Attributes:
        parts: The parts of the index, between the commas: integers, slices, lists, `...` and `None`. A variable is a
            `Name`, also within slices and lists.
    """

    parts: tuple[Any, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The variables in the slice, each once, in order."""
        return tuple(dict.fromkeys(str(atom) for part in self.parts for atom in _atoms(part) if isinstance(atom, Name)))

    def index(self, namespace: Mapping[str, Any]) -> Any:
        """Returns the index: one part, or a tuple of several.

        A new dimension is `(None,)` and never `None`, which for a patch means the whole value.
        """
        if missing := [name for name in self.names if name not in namespace]:
            raise NameError(f"name {missing[0]!r} is not defined")
        parts = tuple(_filled(part, namespace) for part in self.parts)
        return parts[0] if len(parts) == 1 and parts[0] is not None else parts

    def source(self, *, is_bracketed: bool = False) -> str:
        """Returns the index as Python source outside of brackets; with `is_bracketed`, for use between brackets later.

        Example:
            >>> parse_slice(":, -1, 3:, ...").source()
            '(slice(None), -1, slice(3, None), ...)'
            >>> parse_slice("None").source(), parse_slice("tok").source()
            ('(None,)', '(None,) if tok is None else tok')
        """
        parts = [_source(part) for part in self.parts]
        if len(parts) > 1:
            return f"({', '.join(parts)})"
        if self.parts[0] is None:
            return "(None,)"
        is_variable = isinstance(self.parts[0], Name) and not is_bracketed
        return f"(None,) if {parts[0]} is None else {parts[0]}" if is_variable else parts[0]

    def __str__(self) -> str:
        return index_text(self.parts)


def parse_slice(text: str) -> SliceText:
    """Parses the text between brackets.

    Raises:
        ValueError: The text is not a slice.

    Example:
        >>> str(parse_slice(":,-1 , start:"))
        ':, -1, start:'
    """
    if not text.strip():
        raise ValueError("a slice is empty; for the whole value, leave the brackets out")
    try:
        # On a line of its own, so that line breaks are allowed and the text cannot close the brackets.
        with without_syntax_warnings():
            index = parsed(f"_[\n{text}\n]")
    except ValueError:
        raise ValueError(f"{quoted(text)} is not a slice; write {_WHAT_A_SLICE_IS}, with commas between") from None
    if not (isinstance(index, ast.Subscript) and isinstance(index.value, ast.Name) and index.value.id == "_"):
        raise ValueError(f"{quoted(text)} is not a slice; write {_WHAT_A_SLICE_IS}, with commas between")
    inside = index.slice
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
    if not parts:
        raise ValueError("a slice is empty; for the whole value, leave the brackets out")
    found = SliceText(tuple(_part(part, text) for part in parts))
    if sum(part is Ellipsis for part in found.parts) > 1:
        raise ValueError(f"{quoted(text)} has more than one `...`; write `:` for single dimensions")
    return found


def _part(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Constant) and node.value is Ellipsis:
        return Ellipsis
    if isinstance(node, ast.Slice):
        part = slice(*(None if n is None else _atom(n, text) for n in (node.lower, node.upper, node.step)))
        if isinstance(part.step, int) and part.step < 1:
            raise ValueError(
                f"{quoted(text)}: torch does not support slices with a step of {part.step}; steps are 1 or more"
            )
        return part
    if isinstance(node, ast.List) and node.elts:
        atoms = [_atom(n, text) for n in node.elts]
        if None not in atoms:
            return atoms
    return _atom(node, text)


def _atom(node: ast.expr, text: str) -> int | Name | None:
    if isinstance(node, ast.Name):
        return Name(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _atom(node.operand, text)
        if isinstance(value, int):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Constant) and (node.value is None or type(node.value) is int):
        return node.value
    raise ValueError(
        f"{quoted(ast.unparse(node))} is not allowed in the slice {quoted(text)}: write {_WHAT_A_SLICE_IS}"
    )


def _atoms(part: Any) -> Sequence[Any]:
    if isinstance(part, slice):
        return part.start, part.stop, part.step
    return part if isinstance(part, list) else (part,)


def _filled(part: Any, namespace: Mapping[str, Any]) -> Any:
    """Returns a part with the values of its variables."""
    values = [namespace[atom] if isinstance(atom, Name) else atom for atom in _atoms(part)]
    return slice(*values) if isinstance(part, slice) else values if isinstance(part, list) else values[0]


def _source(part: Any) -> str:
    if part == slice(None):
        return "slice(None)"
    if isinstance(part, slice):
        return f"slice({', '.join(map(repr, _atoms(part)[: 2 if part.step is None else 3]))})"
    return index_text(part)


# --------------------------------------------------------------------------------------------------------------------
# Against what was recorded


@dataclass(frozen=True, slots=True)
class Sliced:
    """The part of a value that a slice selects."""

    shape: tuple[int, ...] | None  # `None` if it depends on variables
    warning: str | None = None  # what is wrong at the recorded sizes, if it may be right at others


def sliced_shape(
    typed: SliceText, shape: torch.Size, fixed: Sequence[int | None] | None = None, *, allow_empty: bool = False
) -> Sliced:
    """Returns the part of a value of the recorded `shape` that `typed` selects. Parts with variables are not checked.

    `fixed` are the sizes that are the same for all inputs, with `None` for the others; by default all may differ.

    Raises:
        ValueError: The slice has more dimensions than the value, or does not fit the value for any inputs.

    Example:
        >>> sliced_shape(parse_slice(":, -1, 3:5"), torch.Size([2, 4, 8]))
        Sliced(shape=(2, 2), warning=None)
    """
    index = tuple(map(_without_names, typed.parts))
    used = indexed_dimensions(index)
    if used > len(shape):
        raise ValueError(
            f"slice [{typed}] has {used} dimensions, but the value recorded here has {len(shape)}: shape {tuple(shape)}"
        )
    shown = f"the value recorded here, of shape {tuple(shape)},"
    if problem := selection_problem(index, fixed, shown, allow_empty=allow_empty):
        raise ValueError(problem)
    warning = selection_problem(index, shape, shown, allow_empty=allow_empty)
    if warning is not None:
        warning = f"{warning.partition('; ')[0]}; the slice does not fit inputs of the example's sizes"
    try:
        sliced = torch.empty(shape, device="meta")[tuple(map(_within, index))]
    except IndexError:  # a dimension of size 0
        return Sliced(None, warning)
    return Sliced(None if typed.names else tuple(sliced.shape), warning)


def _without_names(part: Any) -> Any:
    """Returns a part with a full slice in place of variables."""
    known = [atom for atom in _atoms(part) if not isinstance(atom, Name)]
    if isinstance(part, list):
        return known or slice(None)
    return part if len(known) == len(_atoms(part)) else slice(None)


def _within(part: Any) -> Any:
    """Returns a part that selects as many entries, and is in range."""
    return [0] * len(part) if isinstance(part, list) else 0 if isinstance(part, int) else part
