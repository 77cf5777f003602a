"""The search grammar of `%graphpatch find` and the widget: parses a query into terms.

| term | finds nodes |
| --- | --- |
| `attn` | whose path, torch function or component name (`layers[3].attn.q`) contains this text, ignoring case |
| `"mlp.act"` | whose path or component name contains these whole names, in this case |
| `h_*.attn` | that contain these texts in this order; in all terms, `*` is any text |
| `op:mul` | computed by this torch function; also `op:*norm` |
| `shape:64` | that are tensors with a dimension of this size |
| `shape:[1,128,64]` | that are tensors of this shape; `*` is any size, `...` any number of sizes |
| `dtype:f16` | that are tensors of this dtype, `f16` or `float16` |
| `is:parameter` | of this kind; `is:patched`, `is:opaque` (in a graph that is opaque), `is:size`, ... |
| `module:LlamaMLP` | in a module of this class |
| `-term` | that do not match the term |

A node must match all terms of a query. Values that only carry sizes are found with `is:size` only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from graphpatch_notebook.notebook.display.labels import visible
from graphpatch_notebook.paths import nearest

TermKind: TypeAlias = Literal["text", "exact", "op", "shape", "dtype", "is", "module"]

NODE_KINDS = ("input", "parameter", "buffer", "attribute", "op", "output")
STATES = ("patched", "opaque", "size", "tensor", "number", *NODE_KINDS)

_KEY = re.compile(r"([A-Za-z]+):")
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"\S+")
_BRACKETED = re.compile(r"shape:(\[[^\]]*\]|\([^)]*\))(?!\S)")
_QUOTED = re.compile(r"\"([^\"]*)\"(?!\S)|'([^']*)'(?!\S)")


Sizes: TypeAlias = "tuple[Any, ...]"
"""Sizes of a shape, from left to right: `None` is any size, and `...` any number of sizes."""


def matches_sizes(sizes: Sizes, shape: Sequence[int]) -> bool:
    """Whether a shape consists of these sizes.

    Example:
        >>> matches_sizes((..., 8), (2, 3, 8)), matches_sizes((2, None), (2, 3, 8))
        (True, False)
    """
    if len(sizes) == 3 and sizes[0] is sizes[2] is ...:  # by far the most common, and faster
        return len(shape) > 0 if sizes[1] is None else sizes[1] in shape
    if not sizes:
        return not shape
    first, *rest = sizes
    if first is Ellipsis:
        return any(matches_sizes(tuple(rest), shape[start:]) for start in range(len(shape) + 1))
    return len(shape) > 0 and first in (None, shape[0]) and matches_sizes(tuple(rest), shape[1:])


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a query."""

    kind: TermKind
    value: str | Sizes  # text in lower case, the long name of a dtype, or `Sizes`
    is_excluded: bool = False


def parse_query(text: str) -> list[Term]:
    """Returns the terms of a query.

    Raises:
        ValueError: The text is not a valid query. The message is one line and suggests a correction.

    Example:
        >>> parse_query("mlp -op:mul")
        [Term(kind='text', value='mlp', is_excluded=False), Term(kind='op', value='mul', is_excluded=True)]
    """
    try:
        return list(_terms(text))
    except ValueError as error:
        raise ValueError(visible(str(error))) from None


def _terms(text: str) -> Iterator[Term]:
    position = _after_space(text, 0)
    while position < len(text):
        start = position
        is_excluded = text[position] == "-"
        position += is_excluded
        if position == len(text) or text[position].isspace():
            raise ValueError("there is nothing after '-': write -term to leave out what the term finds")
        term, position = _term(text, position)
        yield Term(term.kind, term.value, is_excluded)
        assert position > start
        position = _after_space(text, position)


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _term(text: str, position: int) -> tuple[Term, int]:
    """Returns the term at `position`, and its end."""
    if text[position] in "\"'":
        if (quoted := _QUOTED.match(text, position)) is None:
            raise ValueError(f"the quote does not end: {text[position:]}; write {text[position]}name{text[position]}")
        return Term("exact", quoted[1] or quoted[2] or ""), quoted.end()
    if text[position] == "/":
        raise ValueError(
            "no path has a '/' in it, and regular expressions are not searched: write words and *, as in h_*.attn"
        )
    if bracketed := _BRACKETED.match(text, position):
        return Term("shape", _shape(bracketed[1])), bracketed.end()
    word = _WORD.match(text, position)
    assert word is not None  # not at a space
    return _word_term(word[0]), word.end()


def _word_term(word: str) -> Term:
    match = _KEY.match(word)
    if match is None:
        return Term("text", word.lower())
    key, value = match[1].lower(), word[match.end() :]
    if key not in KEYS:
        meant = nearest(key, KEYS, 1)[0]
        raise ValueError(f"unknown search key '{match[1]}:'; nearest: {meant}:; for the text itself write *{word}")
    if not value:
        raise ValueError(f"there is nothing after '{key}:'; write {_KEYED[key][1]}")
    return _KEYED[key][0](value)


def _state(value: str, title: str, states: Sequence[str]) -> Term:
    if value.lower() not in states:
        key = title.split("'")[1]
        close = nearest(value.lower(), states, 1)[0]
        raise ValueError(f"{title}{value}'; nearest: {key}{close}; there are {', '.join(states)}")
    return Term("is", value.lower())


def _dtype(value: str) -> Term:
    short = re.fullmatch(r"(bf|f|c|u|i)(\d\w*)", value.lower().removeprefix("torch."))
    if short is None:
        return Term("dtype", value.lower().removeprefix("torch."))
    names = {"bf": "bfloat", "f": "float", "c": "complex", "u": "uint", "i": "int"}
    return Term("dtype", names[short[1]] + short[2])


def _shape(value: str) -> Sizes:
    inside = value[1:-1] if value[0] + value[-1] in ("[]", "()") else value
    if inside == value and "," not in value and value != "...":  # a size anywhere
        return (..., _size(value, value), ...)
    texts = [part.strip() for part in inside.split(",")]
    if texts[-1] == "":  # `[]`, or a comma at the end as in `(3,)`
        texts.pop()
    has_gap = "..." in texts
    gap = texts.index("...") if has_gap else len(texts)
    sizes = [_size(part, value) for part in texts[:gap] + texts[gap + 1 :]]  # a second `...` is not a size
    return (*sizes[:gap], *([...] if has_gap else []), *sizes[gap:])


def _size(text: str, value: str) -> int | None:
    if text == "*":
        return None
    if text.isdecimal():
        return int(text)
    raise ValueError(f"not a shape: {value}; write shape:64 for a size, shape:[1,*,64] for a whole shape")


# How each key is parsed, and an example.
_KEYED: dict[str, tuple[Callable[[str], Term], str]] = {
    "op": (lambda value: Term("op", value.lower()), "op:mul"),
    "shape": (lambda value: Term("shape", _shape(value)), "shape:64"),
    "dtype": (_dtype, "dtype:f16"),
    "is": (lambda value: _state(value, "unknown search word 'is:", STATES), "is:parameter"),
    "module": (lambda value: Term("module", value.lower()), "module:Linear"),
    "kind": (lambda value: _state(value, "unknown 'kind:", NODE_KINDS), "kind:op"),
}
KEYS = tuple(_KEYED)
