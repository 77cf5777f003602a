"""Parses the line after `%graphpatch`: options, `PATH[slice]`, variables in paths, and the rest as it was typed.

Paths can contain quotes, slices can contain spaces and commas, and values can contain anything: each part has its own
rules for where it ends.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from IPython.utils.text import EvalFormatter

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.components.names import BRACKETS
from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.inspection.resolution import Unresolvable, resolve
from graphpatch_notebook.notebook.session.expressions import undefined
from graphpatch_notebook.paths import nearest

# The options of commands that choose a patch, each with how the help calls its argument, if it takes one.
OPTIONS = {
    "--steps": "STEPS",
    "--positions": "POSITIONS",
    "--position-dim": "DIM",
    "--any-shape": "",
    "--allow-empty": "",
}
STRING = re.compile("|".join(rf"{quote}(?:[^\\]|\\.)*?{quote}" for quote in ('"""', "'''", '"', "'")), re.DOTALL)
OPEN_STRING = re.compile(r"""(["'])(?:[^\\]|\\.)*?(?:\1|\\?$)""", re.DOTALL)
_PATH = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^\s\["]|"(?=[^"]*$))*')
COMPONENT = re.compile(
    rf"(?:[^\s\[\]@]+\.)?(?:layers{BRACKETS}(?:\.[\w*]+(?:{BRACKETS}(?=\.))?)+|@[\w*]+(?=[\s\[]|$))"
    rf"|\*[\w.*]*\.(?:heads|experts){BRACKETS}(?:\.[\w*]+)+"
)
_OPTION = re.compile(r"(--[A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TypedPath:
    """`PATH[slice]` at the start of a text, and the rest of the text."""

    path: str
    slice: str | None
    rest: str

    @classmethod
    def cut(cls, text: str) -> TypedPath:
        """Parses the start of a text.

        Raises:
            SessionError: A bracket is not closed, or no space follows it.

        Example:
            >>> TypedPath.cut('h_0.output|"a b"[:, 3:5] 0.5 * x["y"]')
            TypedPath(path='h_0.output|"a b"', slice=':, 3:5', rest='0.5 * x["y"]')
            >>> TypedPath.cut("layers[3].attn.heads[0].z[:, -1] 0.5")
            TypedPath(path='layers[3].attn.heads[0].z', slice=':, -1', rest='0.5')
        """
        text = text.lstrip()
        match = COMPONENT.match(text) or _PATH.match(text)
        path = match.group() if match else ""
        after = text[len(path) :]
        if not after.startswith("["):
            return cls(path, None, after.strip())
        end = _closing(after)
        if end is None:
            raise SessionError(f"the bracket after {path!r} is not closed: {after.strip()!r}")
        rest = after[end:]
        if rest and not rest[0].isspace():
            raise SessionError(
                f"a space is missing between the slice of {path!r} and {rest.split()[0]!r}; "
                "for an item of a tuple or list, write output|sub_0"
            )
        return cls(path, after[1 : end - 1].strip(), rest.strip())


def words(text: str, string: re.Pattern[str] = STRING) -> Iterator[tuple[int, str]]:
    """Yields the words of a text with their positions. Spaces in quotes and brackets do not separate words.

    `string` matches text in quotes; `OPEN_STRING` also if the text ends before the quote.

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
            quoted = string.match(text, position)
            depth += 0 if quoted else (text[position] in "([{") - (text[position] in ")]}")
            position = quoted.end() if quoted else position + 1
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
    """Returns Python code without the comment at its end.

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


def split_options(text: str, known: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Returns the options at the start and at the end of a text, and the text between them.

    `known` has something true for each option that takes an argument; the value of one that takes none is `""`.

    Raises:
        SessionError: An option is unknown, given twice, without its argument, or in the middle of other text.

    Example:
        >>> split_options("--any-shape 0.5 * x --steps 2, 4", {"--any-shape": False, "--steps": True})
        ({'--any-shape': '', '--steps': '2, 4'}, '0.5 * x')
    """
    found: dict[str, str] = {}
    rest = _take_options(text.strip(), known, found)
    start = next((start for start, word in words(rest) if _is_option(word, known)), len(rest))
    after = _take_options(rest[start:], known, found)
    if after:
        option = next(word for _, word in words(rest[start:]))
        raise SessionError(f"{option!r} is in the middle of other text: write options last, after {after!r}")
    return found, rest[:start].rstrip()


def leading_options(text: str) -> tuple[dict[str, str], str]:
    """Returns the options before a path, and the text after them."""
    found: dict[str, str] = {}
    return found, _take_options(text.lstrip(), OPTIONS, found)


def _take_options(text: str, known: Mapping[str, Any], found: dict[str, str]) -> str:
    """Moves the options at the start of `text` to `found`, and returns the rest."""
    while (first := next(words(text), None)) and _is_option(first[1], known):
        word = first[1]
        match = _OPTION.fullmatch(word)
        name, given = match.groups() if match else (word, None)
        if name not in known:
            close = ", ".join(nearest(name, list(known))) if known else ""
            hint = f"nearest: {close}" if close else "this command takes none"
            if name == "--slice":
                hint = "a slice is written directly after the path, as in h_0.output[:, 3]"
            raise SessionError(f"unknown option {name}; {hint}")
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
            raise SessionError(f"the option {name} needs an argument")
        found[name] = _string_value(given)
    return text


def _is_option(word: str, known: Mapping[str, Any]) -> bool:
    return word in known or _OPTION.fullmatch(word) is not None


def _argument(text: str) -> tuple[str, str]:
    """Returns the first word together with words that follow a comma, and the rest."""
    end = 0
    for start, word in words(text):
        end = start + len(word)
        if not word.endswith(","):
            break
    return text[:end], text[end:].lstrip()


def _string_value(text: str) -> str:
    return str(ast.literal_eval(text)) if STRING.fullmatch(text) else text


def _closing(text: str, position: int = 0) -> int | None:
    """Returns the position after the bracket that closes the one at `position`. Brackets in quotes do not count."""
    opening, depth = text[position], 0
    closing = {"[": "]", "{": "}"}[opening]
    while position < len(text):
        string = STRING.match(text, position)
        depth += 0 if string else (text[position] == opening) - (text[position] == closing)
        position = string.end() if string else position + 1
        if depth == 0:
            return position
    return None


def one_line(error: BaseException | str) -> str:
    """Returns the message of an error on one line, with options in the syntax of the magic."""
    text = " ".join(str(error).split())
    return text.replace("allow_empty=True", "--allow-empty").replace("any_shape=True", "--any-shape")


# --------------------------------------------------------------------------------------------------------------------
# Paths as people type them


_LIST_ITEM = re.compile(r"\[(\d+)\](?=[.|\[])")
_HEAD = re.compile(r"\s*\S*")


def cut_place(text: str, root: Frame) -> TypedPath:
    """Returns `PATH[slice]` at the start of a text, without quotes around the path.

    Raises:
        SessionError: It is not a path. If it is a Python expression for a module in a list, the message has its path.
    """
    try:
        place = TypedPath.cut(text)
    except SessionError:
        if quoted := STRING.match(text.lstrip()):  # the path may have brackets
            return cut_place(ast.literal_eval(quoted.group()) + text.lstrip()[quoted.end() :], root)
        if (meant := _of_list_items(text, root)) is not None:
            typed = text.split(maxsplit=1)[0]
            raise SessionError(f"{typed!r} is not a path: a path has no brackets; did you mean {meant!r}?") from None
        raise
    return replace(place, path=unquoted(place.path, root.names))


def unquoted(path: str, names: Container[str]) -> str:
    """Returns a path without the quotes that code has around it. A path that is one of `names` is not changed."""
    if len(path) < 3 or path[0] != path[-1] or path[0] not in "\"'":
        return path
    if path[0] == "'":  # a name in a path can have them, but does not need them
        return path if path in names else path[1:-1]
    try:
        inside = str(json.loads(path))
    except ValueError:
        return path
    return path if inside in names else inside


def _of_list_items(text: str, root: Frame) -> str | None:
    """Returns the path and slice for Python such as `model.layers[1].mlp.output`, or `None` if it does not exist."""
    head = _HEAD.match(text)
    assert head is not None  # it may be empty
    try:
        place = TypedPath.cut(_LIST_ITEM.sub(r"_\1", head.group()) + text[head.end() :])
        resolve(root, place.path)
    except SessionError:
        return None
    except Unresolvable as problem:
        if problem.is_unknown:
            return None
    return _with_slice(place.path, place.slice)


def advice(message: str, place: TypedPath, kind: str, root: Frame) -> str:
    """Returns the message for a path that cannot be patched, in the syntax of the magic, with the slice as typed."""
    if "*" in re.sub(r'"[^"]*"', "", place.path):
        has_one_star = place.path.count("*") == 1
        path = _with_slice(place.path.replace("*", "{i}") if has_one_star else "{path}", place.slice)
        return (
            f"{place.path!r} is a pattern for several nodes, but a patch has one node: choose them in a loop, "
            f"for {'i in range(...)' if has_one_star else 'path in [...]'}: with %graphpatch {kind} {path} in its body"
        )
    if whole := re.search(r"use '(.+)' with slice=\.\.\.$", message):
        return f"{message[: whole.start()]}write {whole[1]}[{place.slice or '...'}]"
    if place.slice is None:
        return message
    what, parted, repairs = message.partition("; ")
    return what + parted + re.sub(r"'([^']+)'", lambda match: _repaired(match[1], place.slice, root), repairs)


def _repaired(quoted: str, slice_text: str | None, root: Frame) -> str:
    try:
        resolve(root, quoted)
    except Unresolvable:
        return f"'{quoted}'"
    return f"'{_with_slice(quoted, slice_text)}'"


def _with_slice(path: str, slice_text: str | None) -> str:
    return path if slice_text is None else f"{path}[{slice_text}]"


# --------------------------------------------------------------------------------------------------------------------
# Variables in paths: `h_{i}.output` and `$path`. IPython would expand them in the whole line of a magic; here values
# can contain braces, and must stay as they are.


Variables: TypeAlias = Callable[[], Mapping[str, Any]]

_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_DOLLAR = re.compile(r"\$([^\W\d]\w*)")


def expanded_patch(text: str, variables: Variables, *, has_name: bool) -> str:
    """Expands variables in the path, and in the text after it if that is the name of a variable."""
    component = COMPONENT.match(text)  # `layers[{i}].mlp_out`
    begin = 0 if component is None else component.end()
    text = _until(text[:begin], variables, lambda _: False) + _until(
        text[begin:], variables, lambda character: character.isspace() or character == "["
    )
    if not has_name:
        return text
    try:
        rest = TypedPath.cut(text).rest
    except SessionError:  # choosing the patch raises the same error
        return text
    return text[: len(text) - len(rest)] + expanded_words(rest, variables)


def expanded_words(text: str, variables: Variables) -> str:
    end = next((start for start, word in words(text) if word == "#"), len(text))  # where the comment begins
    return _until(text[:end], variables, lambda _: False) + text[end:]


def _until(text: str, variables: Variables, is_end: Callable[[str], bool]) -> str:
    """Returns the text with variables expanded, up to the first end character outside quotes and braces."""
    parts: list[str] = []
    position = 0
    while position < len(text) and not is_end(text[position]):
        end = _closing(text, position) if text[position] == "{" else None
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


def _value(field: str, variables: Mapping[str, Any]) -> str:
    try:
        return str(EvalFormatter().vformat(field, [], dict(variables)))  # type: ignore[no-untyped-call,unused-ignore]
    except NameError as error:
        raise SessionError(f"{field}: {undefined(error.name, variables)}") from None
    except Exception as error:
        raise SessionError(f"{field} cannot be evaluated: {type(error).__name__}: {error}") from None
