"""The line after `%graphpatch`, taken apart: options, `PATH[slice]`, and the rest as it was written.

Paths hold quotes, slices hold spaces and commas, values hold anything: nothing here splits a line by one rule for all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.paths import nearest

STRING = re.compile("|".join(rf"{quote}(?:[^\\]|\\.)*?{quote}" for quote in ('"""', "'''", '"', "'")), re.DOTALL)
_PATH = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^\s\["]|"(?=[^"]*$))*')
_OPTION = re.compile(r"(--[A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Place:
    """`PATH[slice]` at the front of a text, and what follows it."""

    path: str
    slice: str | None
    rest: str

    @classmethod
    def cut(cls, text: str) -> Place:
        """Cuts it off.

        Raises:
            SessionError: A bracket is not closed, or something stands directly behind it.

        Example:
            >>> Place.cut('h_0.output|"a b"[:, 3:5] 0.5 * x["y"]')
            Place(path='h_0.output|"a b"', slice=':, 3:5', rest='0.5 * x["y"]')
        """
        text = text.lstrip()
        match = _PATH.match(text)
        path = match.group() if match else ""
        after = text[len(path) :]
        if not after.startswith("["):
            return cls(path, None, after.strip())
        end = _closing(after)
        if end is None:
            raise SessionError(f"the bracket behind {path!r} is not closed: {after.strip()!r}")
        rest = after[end:]
        if rest and not rest[0].isspace():
            raise SessionError(
                f"{rest.split()[0]!r} stands directly behind the slice of {path!r}: a space is missing; "
                "a position in a sequence is written output|sub_0"
            )
        return cls(path, after[1 : end - 1].strip(), rest.strip())


def words(text: str) -> Iterator[tuple[int, str]]:
    """Yields position and text of what is parted by spaces outside of quotes and brackets.

    Example:
        >>> [word for _, word in words('f(a, b) "c d"  --any-shape')]
        ['f(a, b)', '"c d"', '--any-shape']
    """
    position = 0
    while True:
        while position < len(text) and text[position].isspace():
            position += 1
        if position == len(text):
            return
        start, depth = position, 0
        while position < len(text) and (depth > 0 or not text[position].isspace()):
            string = STRING.match(text, position)
            depth += 0 if string else (text[position] in "([{") - (text[position] in ")]}")
            position = string.end() if string else position + 1
        yield start, text[start:position]


def arguments(text: str) -> list[str]:
    """Returns the words of a text, up to a comment.

    Example:
        >>> arguments("#2 h_0.output[:, 0]  # both")
        ['#2', 'h_0.output[:, 0]']
    """
    found = []
    for _, word in words(text):
        if word.startswith("#") and not word[1:2].isdigit():
            break
        found.append(word)
    return found


def without_comment(text: str) -> str:
    """Returns a piece of Python without the comment at its end.

    Example:
        >>> without_comment('f("#1")  # one')
        'f("#1")'
    """
    position = 0
    while position < len(text):
        if text[position] == "#":
            return text[:position].rstrip()
        string = STRING.match(text, position)
        position = string.end() if string else position + 1
    return text.rstrip()


def split_options(text: str, known: Mapping[str, bool]) -> tuple[dict[str, str], str]:
    """Returns the options at the front and at the end of a text, and what is between them, as it was written.

    Args:
        text: The text. What is in quotes or brackets is not looked at.
        known: The options, each with whether it takes an argument. Those that take none are found as `""`.

    Raises:
        SessionError: An option is unknown, given twice, lacks its argument, or stands among other text.

    Example:
        >>> split_options("--any-shape 0.5 * x --steps 2, 4", {"--any-shape": False, "--steps": True})
        ({'--any-shape': '', '--steps': '2, 4'}, '0.5 * x')
    """
    found: dict[str, str] = {}
    rest = _take_options(text.strip(), known, found)
    start = next((start for start, word in words(rest) if _is_option(word, known)), len(rest))
    behind = _take_options(rest[start:], known, found)
    if behind:
        option = next(word for _, word in words(rest[start:]))
        raise SessionError(f"{option!r} stands among other text: options come last; {behind!r} is too much")
    return found, rest[:start].rstrip()


def _take_options(text: str, known: Mapping[str, bool], found: dict[str, str]) -> str:
    """Moves the options at the front of `text` to `found`; returns what is left."""
    while (first := next(words(text), None)) and _is_option(first[1], known):
        word = first[1]
        match = _OPTION.fullmatch(word)
        name, given = match.groups() if match else (word, None)
        if name not in known:
            close = ", ".join(nearest(name, list(known))) if known else ""
            hint = f"nearest: {close}" if close else "this command takes none"
            raise SessionError(f"there is no option {name}; {hint}")
        if name in found:
            raise SessionError(f"the option {name} is given twice")
        text = text[first[0] + len(word) :].lstrip()
        if not known[name]:
            if given is not None:
                raise SessionError(f"the option {name} takes no argument")
            found[name] = ""
            continue
        if given is None:
            given, text = _argument(text)
        if not given or _is_option(given, known):
            raise SessionError(f"the option {name} lacks its argument")
        found[name] = _unquoted(given)
    return text


def _is_option(word: str, known: Mapping[str, bool]) -> bool:
    return word in known or _OPTION.fullmatch(word) is not None


def _argument(text: str) -> tuple[str, str]:
    """Returns the first word, with those that follow a comma, and what is behind."""
    end = 0
    for start, word in words(text):
        end = start + len(word)
        if not word.endswith(","):
            break
    return text[:end], text[end:].lstrip()


def _unquoted(text: str) -> str:
    return str(ast.literal_eval(text)) if STRING.fullmatch(text) else text


def _closing(text: str) -> int | None:
    """Returns the position behind the bracket that closes the first one."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth == 0:
            return position + 1
    return None


def one_line(error: BaseException | str) -> str:
    """Returns the message of an error on one line, with options as a magic takes them."""
    text = " ".join(str(error).split())
    return text.replace("allow_empty=True", "--allow-empty").replace("any_shape=True", "--any-shape")
