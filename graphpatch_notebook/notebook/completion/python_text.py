"""Python text that is being typed: what the cursor stands in, without running or even parsing it.

`pg.patch({"h_0.mlp` -> a key of what `pg.patch` is given, of which `h_0.mlp` is there
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

_LONGEST = 50_000
_TOKEN = re.compile(
    r"""
      (?P<magic>^[ \t]*(?:[^\s%!?"'(\[{\#][^%!?"'(\[{\#\n]*=[ \t]*)?(?P<head>[%!?]+\w*)[^\n]*)
    | (?P<comment>\#[^\n]*)
    | (?P<string>(?P<prefix>[A-Za-z]{0,2})(?P<quote>\"{3}|'{3}|"|'))
    | (?P<word>\w+)
    | (?P<open>[(\[{])
    | (?P<close>[)\]}])
    | (?P<comma>,)
    | (?P<space>\n|[^\S\n]+)
    | (?P<other>.)
    """,
    re.VERBOSE | re.MULTILINE,
)
_BODY = {
    quote: re.compile(rf"(?:[^\\{quote[0]}{'' if len(quote) == 3 else chr(10)}]|\\.|{inner})*", re.DOTALL)
    for quote, inner in (('"', "(?!)"), ("'", "(?!)"), ('"""', '"(?!"")'), ("'''", "'(?!'')"))
}
_NAME = r"[^\W\d]\w*"
_ITEM = r"""\[\s*(?:"[^"\\\n]*"|'[^'\\\n]*')\s*\]"""
_CHAIN = re.compile(rf"(?<![\w.])(?<!\.\s)({_NAME})((?:\s*\.\s*{_NAME}|{_ITEM})*)\s*$")
_LINK = re.compile(rf"""\.\s*({_NAME})|\[\s*("[^"\\\n]*"|'[^'\\\n]*')\s*\]""")
_ATTRIBUTE = re.compile(rf"\.\s*((?:{_NAME})?)$")
_PATCH_MAP = re.compile(r"\s*(?:patch_map\s*=\s*)?")

Link: TypeAlias = "tuple[Literal['attribute', 'item'], str]"


@dataclass(frozen=True, slots=True)
class Expression:
    """A variable, and the attributes and text items that lead on from it: `pg.graph["h_0"].mlp`."""

    variable: str
    links: tuple[Link, ...] = ()


@dataclass(frozen=True, slots=True)
class Cursor:
    """What the cursor stands in.

    Attributes:
        role: A key of the dict that the called expression is given, an item of it, or an attribute.
        of: The expression that is called, subscripted, or whose attribute it is.
        typed: What is there of the key, item or attribute.
        quote: The quote that the text began with; empty for attributes.
        offsets: Where in the text each character of `typed` begins, and where it ends.
    """

    role: Literal["key", "item", "attribute"]
    of: Expression
    typed: str
    quote: str
    offsets: tuple[int, ...]

    def escaped(self, text: str) -> str:
        """Returns `text` as it stands in such a string."""
        if not self.quote:
            return text
        return text.replace("\\", "\\\\").replace(self.quote[0], f"\\{self.quote[0]}")


@dataclass(slots=True)
class _Bracket:
    position: int
    text: str
    is_fresh: bool = True
    commas: int = 0


@dataclass(frozen=True, slots=True)
class _Scan:
    """The brackets that are open at the end of a text, and the string that is: prefix, quote, where it begins."""

    brackets: list[_Bracket]
    string: tuple[str, str, int] | None
    is_comment: bool


def cursor_at_end(text: str) -> Cursor | None:
    """Returns what the cursor at the end of `text` stands in, if it is something that paths have a part in.

    Example:
        >>> cursor_at_end('pg.patch({"a": ZeroPatch(), "h_0.m').typed
        'h_0.m'
        >>> cursor_at_end("pg.graph.h_0.m").of
        Expression(variable='pg', links=(('attribute', 'graph'), ('attribute', 'h_0')))
    """
    if len(text) > _LONGEST:
        return None
    scan = _scanned(text)
    if scan.is_comment:
        return None
    if scan.string is None:
        return _attribute(text)
    prefix, quote, start = scan.string
    if prefix.lower() not in ("", "r", "u") or not scan.brackets or not scan.brackets[-1].is_fresh:
        return None
    found = _owner(text, scan.brackets)
    content = _content(text, start, prefix)
    return None if found is None or content is None else Cursor(found[0], found[1], content[0], quote, content[1])


def _scanned(text: str) -> _Scan:
    brackets: list[_Bracket] = []
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        assert token is not None  # the last alternative is any character
        position = token.end()
        kind = token.lastgroup
        if kind == "magic" and (brackets or position == len(text)):
            # Inside brackets `%` is an operator; behind `%timeit`, where somebody types, stands Python.
            position = token.end("head")
            _touch(brackets)
        elif kind == "string":
            end = _string_end(text, position, token["quote"])
            if end is None:
                return _Scan(brackets, (token["prefix"], token["quote"], position), False)
            position = end
            _touch(brackets)
        elif kind == "comment" and position == len(text):
            return _Scan(brackets, None, True)
        elif kind == "open":
            _touch(brackets)
            brackets.append(_Bracket(token.start(), token[0]))
        elif kind == "close":
            if brackets:
                brackets.pop()
        elif kind == "comma" and brackets:
            brackets[-1].is_fresh = True
            brackets[-1].commas += 1
        elif kind in ("word", "other"):
            _touch(brackets)
    return _Scan(brackets, None, False)


def _touch(brackets: list[_Bracket]) -> None:
    if brackets:
        brackets[-1].is_fresh = False


def _string_end(text: str, position: int, quote: str) -> int | None:
    """Returns the position behind a string; `None` where it goes on at the end of the text."""
    body = _BODY[quote].match(text, position)
    end = body.end() if body else position
    if text.startswith(quote, end):
        return end + len(quote)
    return None if len(quote) == 3 or "\n" not in text[end:] else end  # a line break ends what nobody closed


def _owner(text: str, brackets: list[_Bracket]) -> tuple[Literal["key", "item"], Expression] | None:
    """Returns whose key or item stands in the innermost bracket."""
    inner = brackets[-1]
    if inner.text == "[" and inner.commas == 0:
        expression = expression_at_end(text[: inner.position])
        return None if expression is None else ("item", expression)
    if inner.text != "{" or len(brackets) < 2 or brackets[-2].text != "(":
        return None
    outer = brackets[-2]
    if not _PATCH_MAP.fullmatch(text, outer.position + 1, inner.position):
        return None
    expression = expression_at_end(text[: outer.position])
    return None if expression is None else ("key", expression)


def expression_at_end(text: str) -> Expression | None:
    """Returns the variable with attributes and text items at the end of `text`; `None` where there is something else.

    Example:
        >>> expression_at_end("x = pg.graph['h_0']").links
        (('attribute', 'graph'), ('item', 'h_0'))
    """
    match = _CHAIN.search(text[-400:])
    if match is None:
        return None
    return Expression(match[1], tuple(map(_link, _LINK.finditer(match[2]))))


def _link(match: re.Match[str]) -> Link:
    return ("item", match[2][1:-1]) if match[1] is None else ("attribute", match[1])


def _attribute(text: str) -> Cursor | None:
    match = _ATTRIBUTE.search(text[-200:])
    if match is None:
        return None
    length = len(match[1])
    expression = expression_at_end(text[: len(text) - len(match[0])])
    if expression is None:
        return None
    offsets = tuple(range(len(text) - length, len(text) + 1))
    return Cursor("attribute", expression, match[1], "", offsets)


def _content(text: str, start: int, prefix: str) -> tuple[str, tuple[int, ...]] | None:
    """Returns what an open string holds, and where each character begins; `None` where an escape is not simple."""
    if prefix.lower() == "r" and "\\" in text[start:]:
        return None
    characters: list[str] = []
    offsets: list[int] = []
    position = start
    while position < len(text):
        offsets.append(position)
        if text[position] == "\\":
            position += 1
            if text[position : position + 1] not in ("\\", '"', "'"):
                return None
        elif text[position] == "\n":
            return None
        characters.append(text[position])
        position += 1
    return "".join(characters), (*offsets, len(text))
