"""Python source laid out in lines, as formatters do it: on one line where it fits, else one item a line.

    Group("AddPatch(", ("value=1.0", "slice=-1"), ")")
      -> AddPatch(value=1.0, slice=-1)         where that fits
      -> AddPatch(                             where it does not
             value=1.0,
             slice=-1,
         )

What is broken ends in a comma, which makes `ruff format` and `black` leave it as it is.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

WIDTH = 88
_INDENT = "    "


@dataclass(frozen=True, slots=True)
class Group:
    """Items between brackets.

    Attributes:
        opening: What stands before the items, with the bracket.
        items: The items.
        closing: The bracket after them, and what else belongs to it.
    """

    opening: str
    items: tuple[Source, ...]
    closing: str

    def __str__(self) -> str:
        return f"{self.opening}{', '.join(map(str, self.items))}{self.closing}"


Source: TypeAlias = "str | Group"


def lines(source: Source, indent: str = "", width: int = WIDTH, after: str = "") -> list[str]:
    """Returns a statement, or an item of one, as lines.

    Args:
        source: The statement.
        indent: What each line begins with.
        width: The most characters that a line may have, if that is possible.
        after: What follows on the last line, such as a comma.

    Example:
        >>> lines(Group("f(", ("one", "two"), ")"), width=8)
        ['f(', '    one,', '    two,', ')']
    """
    flat = f"{indent}{source}{after}"
    if isinstance(source, str) or not source.items or columns(flat) <= width:
        return [flat]
    inside = [line for item in source.items for line in lines(item, indent + _INDENT, width, ",")]
    return [f"{indent}{source.opening}", *inside, f"{indent}{source.closing}{after}"]


@dataclass(frozen=True, slots=True)
class Block:
    """A compound statement.

    Attributes:
        head: Its first line.
        body: The statements in it.
    """

    head: str
    body: tuple[Statement, ...]


Statement: TypeAlias = "Source | Block"


def laid_out(statements: Iterable[Statement], width: int = WIDTH) -> list[str]:
    """Returns statements as lines."""
    found: list[str] = []
    for statement in statements:
        if isinstance(statement, Block):
            found += [statement.head, *indented(laid_out(statement.body, width - len(_INDENT)))]
        else:
            found += lines(statement, width=width)
    return found


def with_prefix(prefix: str, source: Source) -> Source:
    """Returns the same with more text before it."""
    return prefix + source if isinstance(source, str) else Group(prefix + source.opening, source.items, source.closing)


def columns(line: str) -> int:
    """Returns how many columns of a terminal `line` takes up: wide characters take two."""
    if line.isascii():
        return len(line)
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in line
    )


def indented(block: Iterable[str]) -> list[str]:
    """Returns lines one step further to the right."""
    return [_INDENT + line if line else line for line in block]


def text_literal(text: str) -> str:
    """Returns a string literal for `text`: in double quotes, unless single ones save backslashes.

    Example:
        >>> print(text_literal("it's"), text_literal('output|"a.b"'))
        "it's" 'output|"a.b"'
    """
    body = "".join(letter if letter in "'\"" else repr(letter)[1:-1] for letter in text)
    quote = "'" if text.count('"') > text.count("'") else '"'
    return quote + body.replace(quote, "\\" + quote) + quote
