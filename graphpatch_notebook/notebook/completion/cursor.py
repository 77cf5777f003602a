"""What the cursor is in: text is parsed, and never evaluated.

`pg.patch({"h_0.mlp`            -> `Cursor`: a key of the dict that `pg.patch` takes; `h_0.mlp` is typed so far
`%graphpatch zero h_0.mlp`      -> `Argument`: the path of the command `zero`
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from graphpatch_notebook.components.names import is_component_name
from graphpatch_notebook.notebook.magics.command_line import COMPONENT, OPEN_STRING, words
from graphpatch_notebook.notebook.magics.commands import CELL, ArgumentKind, Arguments, commands

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

Accessor: TypeAlias = "tuple[Literal['attribute', 'item'], str]"


@dataclass(frozen=True, slots=True)
class Expression:
    """A variable with attributes and string items: `pg.graph["h_0"].mlp`."""

    variable: str
    links: tuple[Accessor, ...] = ()


@dataclass(frozen=True, slots=True)
class Cursor:
    """The key, item or attribute at the cursor."""

    role: Literal["key", "item", "attribute"]
    of: Expression  # what is called or subscripted, or has the attribute
    typed: str  # so far
    quote: str  # empty for attributes
    offsets: tuple[int, ...]  # in the text, of each character of `typed`, and of its end

    def escaped(self, text: str) -> str:
        """Returns `text` with the escapes that it needs in this string."""
        if not self.quote:
            return text
        return text.replace("\\", "\\\\").replace(self.quote[0], f"\\{self.quote[0]}")


def cursor_at_end(text: str) -> Cursor | None:
    """Returns the key, item or attribute at the end of `text`, or `None` if a path cannot be there.

    Example:
        >>> cursor_at_end('pg.patch({"a": ZeroPatch(), "h_0.m').typed
        'h_0.m'
        >>> cursor_at_end("pg.graph.h_0.m").of
        Expression(variable='pg', links=(('attribute', 'graph'), ('attribute', 'h_0')))
    """
    if len(text) > _LONGEST:
        return None
    brackets, last, string = _scanned(text)
    if last == "#":
        return None
    if string is None:
        return _attribute(text)
    prefix, quote, start = string
    if prefix.lower() not in ("", "r", "u") or not brackets:
        return None
    found = _owner(text, brackets, last)
    content = _content(text, start, prefix)
    return None if found is None or content is None else Cursor(found[0], found[1], content[0], quote, content[1])


def _scanned(text: str) -> tuple[list[int], str, tuple[str, str, int] | None]:
    """Returns what is open at the end of a text.

    The positions of the open brackets, the last token before the end or the open string (`#` in a comment), and the
    open string: its prefix, quote and start.
    """
    brackets: list[int] = []
    position, last = 0, ""
    while position < len(text):
        token = _TOKEN.match(text, position)
        assert token is not None  # the last alternative is any character
        position = token.end()
        kind = token.lastgroup
        if kind == "magic" and (brackets or position == len(text)):
            # Inside brackets, `%` is an operator. After `%timeit`, the text is Python.
            position, last = token.end("head"), "%"
        elif kind == "string":
            end = _string_end(text, position, token["quote"])
            if end is None:
                return brackets, last, (token["prefix"], token["quote"], position)
            position, last = end, token["quote"]
        elif kind == "comment" and position == len(text):
            return brackets, "#", None
        elif kind in ("open", "close", "comma", "word", "other"):
            last = token[0]
            if kind == "open":
                brackets.append(token.start())
            elif kind == "close" and brackets:
                brackets.pop()
    return brackets, last, None


def _string_end(text: str, position: int, quote: str) -> int | None:
    """Returns the position after a string, or `None` if the string is open at the end of the text."""
    body = _BODY[quote].match(text, position)
    end = body.end() if body else position
    if text.startswith(quote, end):
        return end + len(quote)
    return None if len(quote) == 3 or "\n" not in text[end:] else end  # a line break ends an unclosed string


def _owner(text: str, brackets: list[int], last: str) -> tuple[Literal["key", "item"], Expression] | None:
    """Returns the expression whose key or item begins after the token `last` in the innermost bracket."""
    inner = brackets[-1]
    if text[inner] == "[" == last:
        expression = expression_at_end(text[:inner])
        return None if expression is None else ("item", expression)
    if text[inner] != "{" or last not in ("{", ",") or len(brackets) < 2 or text[brackets[-2]] != "(":
        return None
    outer = brackets[-2]
    if not _PATCH_MAP.fullmatch(text, outer + 1, inner):
        return None
    expression = expression_at_end(text[:outer])
    return None if expression is None else ("key", expression)


def expression_at_end(text: str) -> Expression | None:
    """Returns the variable with attributes and string items at the end of `text`, or `None`.

    Example:
        >>> expression_at_end("x = pg.graph['h_0']").links
        (('attribute', 'graph'), ('item', 'h_0'))
    """
    match = _CHAIN.search(text[-400:])
    if match is None:
        return None
    links = _LINK.finditer(match[2])
    return Expression(match[1], tuple(("item", m[2][1:-1]) if m[1] is None else ("attribute", m[1]) for m in links))


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
    """Returns the content of an open string and the offset of each character, or `None` for complex escapes."""
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


# --------------------------------------------------------------------------------------------------------------------
# Arguments of %graphpatch


@dataclass(frozen=True, slots=True)
class Argument:
    """The argument at the cursor."""

    kind: ArgumentKind | Literal["option"]  # `option`: the name of one
    typed: str
    start: int  # the offset in the line
    options: tuple[str, ...] = ()  # those that are allowed here
    path: str = field(default="", repr=False)


_MAGIC = re.compile(r"\s*(?P<assigned>[^\s%!?\"'(\[{#][^%!?\"'(\[{#]*=\s*)?(?P<mark>%{0,2})graphpatch(?=\s)")
_IDENTIFIER = re.compile(r"(?<![\w.])(?:[^\W\d]\w*)?$")
_LAST_TERM = re.compile(r"\S*$")


def argument_at_end(line: str, *, is_first: bool, may_lack_mark: bool = False) -> Argument | None:
    """Returns the argument at the end of `line`, or `None` if the cursor is not in an argument.

    `is_first` says that it may be a cell magic, and `may_lack_mark` that `graphpatch` without `%` is the magic, too.

    Example:
        >>> argument_at_end("x = %graphpatch ls h_0.ml", is_first=True)
        Argument(kind='place', typed='h_0.ml', start=19, options=())
    """
    match = _MAGIC.match(line)
    if match is None or (match["mark"] == "%%" and not is_first):
        return None
    if not match["mark"] and (match["assigned"] or not may_lack_mark):
        return None
    found = _words(line, match.end())
    start, typed = found.pop()
    texts = [text for _, text in found]
    if match["mark"] == "%%":
        return _argument(CELL, texts, typed, start, line)
    if not texts:
        return Argument("command", typed, start)
    command = commands().get(texts[0])
    return None if command is None else _argument(command.arguments, texts[1:], typed, start, line)


def _argument(command: Arguments, before: list[str], typed: str, start: int, line: str) -> Argument | None:
    options = tuple(option for option in command.options if option not in before)
    kind = command.kind(before)
    follows_option = bool(before) and command.options.get(before[-1]) is not None
    if typed.startswith("-") and not follows_option and any(option.startswith(typed) for option in options):
        return Argument("option", typed, start, options)
    if kind is None or (kind == "new" and not typed and options and not follows_option):
        return Argument("option", typed, start, options) if not typed and options else None
    if kind == "node" and (bracket := _bracket(typed)) is not None:
        if typed.endswith("]") and typed.count("[") == typed.count("]"):
            return Argument("slice", typed, start)
        kind, start = "value", start + bracket + 1
    if kind == "model" and "=" not in line[: start + len(typed)].partition("wrap")[2]:
        return None
    if kind in ("value", "model"):
        identifier = _IDENTIFIER.search(line, start)
        return None if identifier is None else Argument(kind, identifier.group(), identifier.start(), options)
    if kind == "query":
        term = _LAST_TERM.search(line)
        assert term is not None  # it may be empty
        excluded = term.group().startswith("-")
        return Argument(kind, term.group()[excluded:], term.start() + excluded)
    return Argument(kind, typed, start, options, path=next(iter(command.given(before)), ""))


def _words(line: str, position: int) -> list[tuple[int, str]]:
    """Returns the words after `position` with their offsets. The last one ends at the cursor and can be empty."""
    found = [(position + start, word) for start, word in words(line[position:], OPEN_STRING)]
    is_at_end = found and found[-1][0] + len(found[-1][1]) == len(line)
    return found if is_at_end else [*found, (len(line), "")]


def _bracket(typed: str) -> int | None:
    """Returns the offset of the slice after a path, ignoring brackets in quotes and in names of components."""
    match = COMPONENT.match(typed) if is_component_name(typed) else re.match(r'(?:"(?:[^"\\]|\\.)*"|[^"\[])*', typed)
    if match is None:
        return None
    end = match.end()
    return end if typed.startswith("[", end) else None
