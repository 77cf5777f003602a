"""Variables of the user in paths: `h_{i}.output` and `$path`, so that patches can be chosen in a loop.

IPython expands such things in the whole line of a magic; here values hold braces of their own, and are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from IPython.utils.text import EvalFormatter

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.magics.choosing import leading_options
from graphpatch_notebook.notebook.magics.command_line import STRING, Place, words
from graphpatch_notebook.notebook.session.expressions import undefined
from graphpatch_notebook.notebook.session.patch_kinds import PATCH_KINDS

Variables: TypeAlias = Callable[[], Mapping[str, Any]]

_COMMAND = re.compile(r"\s*(\S+)\s*")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_DOLLAR = re.compile(r"\$([^\W\d]\w*)")
_WITH_PATHS = ("rm", "enable", "disable", "show", "ls", "code", "shape")


def expanded(line: str, variables: Variables) -> str:
    """Returns a line of the magic with the values of the variables that its paths and names of variables mention.

    Args:
        line: What follows `%graphpatch`.
        variables: Gives the user's variables; asked if the line mentions any.

    Raises:
        SessionError: What stands in braces cannot be evaluated.

    Example:
        >>> expanded("add h_{i}.output[:, 0] {'a': 1}['a']", lambda: {"i": 3})
        "add h_3.output[:, 0] {'a': 1}['a']"
    """
    match = _COMMAND.match(line)
    if match is None or not ("{" in line or "$" in line):
        return line
    command, rest = match[1], line[match.end() :].rstrip()
    if (kind := PATCH_KINDS.get(command)) is not None:
        after = leading_options(rest)[1]
        front = rest[: len(rest) - len(after)]
        return line[: match.end()] + front + _of_patch(after, variables, has_name=kind.keeps is not None)
    if command in _WITH_PATHS:
        return line[: match.end()] + _of_words(rest, variables)
    return line


def _of_patch(text: str, variables: Variables, *, has_name: bool) -> str:
    """Expands in the path, and in what follows it where that is the name of a variable."""
    text = _until(text, variables, lambda character: character.isspace() or character == "[")
    if not has_name:
        return text
    try:
        rest = Place.cut(text).rest
    except SessionError:  # which says itself what is wrong, when the patch is chosen
        return text
    return text[: len(text) - len(rest)] + _of_words(rest, variables)


def _of_words(text: str, variables: Variables) -> str:
    end = next((start for start, word in words(text) if word == "#"), len(text))  # where a comment begins
    return _until(text[:end], variables, lambda _: False) + text[end:]


def _until(text: str, variables: Variables, is_end: Callable[[str], bool]) -> str:
    """Returns the text, expanded up to the first character outside of quotes and braces that ends it."""
    parts: list[str] = []
    position = 0
    while position < len(text) and not is_end(text[position]):
        end = _closing_brace(text, position) if text[position] == "{" else None
        if end is not None:
            parts.append(_value(text[position:end], variables()))
        elif dollar := _DOLLAR.match(text, position):
            parts.append(_value(f"{{{dollar[1]}}}", variables()))
            end = dollar.end()
        else:
            quoted = _QUOTED.match(text, position)
            end = quoted.end() if quoted else position + 1
            parts.append(text[position:end])
        position = end
    return "".join(parts) + text[position:]


def _closing_brace(text: str, position: int) -> int | None:
    """Returns the position behind the brace that closes the one at `position`."""
    depth = 0
    while position < len(text):
        string = STRING.match(text, position)
        depth += 0 if string else (text[position] == "{") - (text[position] == "}")
        position = string.end() if string else position + 1
        if depth == 0:
            return position
    return None


def _value(field: str, variables: Mapping[str, Any]) -> str:
    try:
        return str(EvalFormatter().vformat(field, [], dict(variables)))  # type: ignore[no-untyped-call,unused-ignore]
    except NameError as error:
        raise SessionError(f"{field}: {undefined(error.name, variables)}") from None
    except Exception as error:
        raise SessionError(f"{field} cannot be evaluated: {type(error).__name__}: {error}") from None
