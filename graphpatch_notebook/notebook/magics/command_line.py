"""The line after `%graphpatch`: its words, the parser of a command, `PATH[slice]`, and variables in paths.

Slices contain spaces and values are Python, so brackets and quotes keep a word together.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from IPython.utils.text import EvalFormatter

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.components.names import BRACKETS
from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.session.expressions import undefined
from graphpatch_notebook.paths import nearest

STRING = re.compile("|".join(rf"{quote}(?:[^\\]|\\.)*?{quote}" for quote in ('"""', "'''", '"', "'")), re.DOTALL)
OPEN_STRING = re.compile(r"""(["'])(?:[^\\]|\\.)*?(?:\1|\\?$)""", re.DOTALL)
_PATH = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^\["]|"(?=[^"]*$))*')
_LATENTS = r"\[(?:\*|-?\d*:?-?\d*|\[?[\d,\s-]+\]?)\]"  # which of them, rather than a slice of all
COMPONENT = re.compile(
    rf"(?:[^\s\[\]@]+\.)?(?:layers{BRACKETS}(?:\.[\w*]+(?:{BRACKETS}(?=\.))?)+(?:(?<=\.latents){_LATENTS})?"
    rf"|@[\w*]+(?=[\s\[]|$))"
    rf"|\*[\w.*]*\.(?:heads|experts){BRACKETS}(?:\.[\w*]+)+"
)
_OPTION = re.compile(r"--[A-Za-z][\w-]*(?:=.*)?", re.DOTALL)


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


def split_line(text: str) -> list[str]:
    """Returns the words of a line up to its comment. A word that ends in a comma includes the next one.

    Example:
        >>> split_line("#2 h_0.output[:, 0] --steps 2, 4 # both")
        ['#2', 'h_0.output[:, 0]', '--steps', '2, 4']
    """
    found: list[str] = []
    for _, word in words(text):
        if re.match(r"#(?![\d{$])", word):
            break
        if found and found[-1].endswith(","):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def unquoted(text: str) -> str:
    """Returns the content of a string literal, and any other text as it is."""
    text = text.strip()
    return str(ast.literal_eval(text)) if STRING.fullmatch(text) else text


def one_line(error: BaseException | str) -> str:
    """Returns the message of an error on one line, with options in the syntax of the magic."""
    text = " ".join(str(error).split())
    return text.replace("allow_empty=True", "--allow-empty").replace("any_shape=True", "--any-shape")


# --------------------------------------------------------------------------------------------------------------------
# The parser of a command


class CommandParser(argparse.ArgumentParser):
    """The parser of one command.

    Attributes:
        line: The syntax of the command.
        positional: What Tab completes as each positional argument.
        options: What Tab completes after each option; `None` for an option without an argument.
        is_repeated: Whether the last positional argument can be repeated.
    """

    def __init__(self, prog: str, usage: str = "", summary: str = "", notes: str = "") -> None:
        super().__init__(
            prog,
            f"%(prog)s {usage}".rstrip(),
            summary,
            notes.strip("\n") or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
        )
        self.line = f"{prog} {usage}".rstrip()
        self.positional: list[str] = []
        self.options: dict[str, str | None] = {}
        self.is_repeated = False

    def add(self, *names: str, completes: str | None = None, **settings: Any) -> None:
        """Adds an argument."""
        if "action" not in settings:
            settings.setdefault("type", str.strip)
        self.add_argument(*names, **settings)
        if names[0].startswith("-"):
            self.options[names[0]] = completes
        else:
            self.positional.append(completes or "text")
            self.is_repeated = settings.get("nargs") in ("*", "+") and completes != "name"

    def completes(self, words: Sequence[str]) -> str | None:
        """Returns what Tab completes after these words; `None` if only options can follow."""
        if words and self.options.get(words[-1]):
            return self.options[words[-1]]
        if "--only" in words:
            return self.options.get("--only")
        after_option = [False, *(self.options.get(word) is not None for word in words)]
        count = sum(not skip and word not in self.options for word, skip in zip(words, after_option, strict=False))
        if count < len(self.positional):
            return self.positional[count]
        return self.positional[-1] if self.is_repeated else None

    def parse_line(self, text: str) -> argparse.Namespace:
        """Returns the arguments in a line. An option can be anywhere, and any other word can begin with a minus.

        Raises:
            SessionError: They are not those of the command.
        """
        # For argparse, a word with a space in front is an argument: `-1`, `-steering`, `-op:mul`.
        return self.parse_intermixed_args(
            [word if word in self.options or _OPTION.fullmatch(word) else f" {word}" for word in split_line(text)]
        )

    def error(self, message: str) -> NoReturn:
        """Raises the message as a `SessionError`."""
        unknown = re.search(r"(--[A-Za-z][\w-]*)", message) if message.startswith("unrecognized") else None
        close = nearest(unknown[1], list(self.options), 1) if unknown and self.options else []
        hint = f"; nearest: {close[0]}" if close else ""
        raise SessionError(f"{message}{hint}; write {self.line}") from None


# --------------------------------------------------------------------------------------------------------------------
# Paths


@dataclass(frozen=True, slots=True)
class TypedPath:
    """`PATH[slice]`."""

    path: str
    slice: str | None

    @classmethod
    def parse(cls, word: str, root: Frame) -> TypedPath:
        """Returns the parts of a word, without quotes around the path. A name of the root may have its own quotes.

        Raises:
            SessionError: A bracket is not closed, or text follows it.
        """
        quoted = STRING.match(word)
        if quoted and word[quoted.end() :][:1] in ("", "["):
            inside = unquoted(quoted.group())
            if word[0] == "'" or inside not in root.names:
                word = inside + word[quoted.end() :]
        return cls.cut(word)

    @classmethod
    def cut(cls, word: str) -> TypedPath:
        """Returns the parts of a word.

        Example:
            >>> TypedPath.cut('h_0.output|"a b"[:, 3:5]')
            TypedPath(path='h_0.output|"a b"', slice=':, 3:5')
            >>> TypedPath.cut("layers[3].attn.heads[0].z[:, -1]")
            TypedPath(path='layers[3].attn.heads[0].z', slice=':, -1')
            >>> TypedPath.cut("layers[3].mlp_out.sae.latents[7]")
            TypedPath(path='layers[3].mlp_out.sae.latents[7]', slice=None)
        """
        component = COMPONENT.match(word)
        match = component or _PATH.match(word)
        path = match.group() if match else ""
        after = word[len(path) :]
        if not after:
            return cls(path, None)
        if not after.endswith("]"):
            listed = re.sub(r"\[(\d+)\]", r"_\1", word)
            raise SessionError(
                f"{word!r} is not a path, or its bracket is not closed; for a module in a list write {listed}, "
                "for an item of a tuple output|sub_0"
            )
        if component and path.endswith(".latents") and "," not in after and "..." not in after:
            raise SessionError(f"{word!r}: write which latent, such as {path}[7] or {path}[{{i}}]")
        return cls(path, after[1:-1].strip())


# --------------------------------------------------------------------------------------------------------------------
# Variables in paths: `h_{i}.output` and `$path`. IPython would expand them in the whole line of a magic; here values
# can contain braces, and must stay as they are.


Variables: TypeAlias = Callable[[], Mapping[str, Any]]

_FIELD = re.compile(r'"(?:[^"\\]|\\.)*"|\{[^{}]+\}|\$([^\W\d]\w*)')


def expanded(word: str, variables: Variables) -> str:
    """Returns a word with the values of variables. Text in double quotes stays as it is, unless it is in braces.

    Example:
        >>> expanded("h_{i:02d}.$name", lambda: {"i": 3, "name": "mlp"})
        'h_03.mlp'
    """

    def value(found: re.Match[str]) -> str:
        field = f"{{{found[1]}}}" if found[1] else found.group()
        if field.startswith('"'):
            return field
        known = dict(variables())
        try:
            return str(EvalFormatter().vformat(field, [], known))  # type: ignore[no-untyped-call,unused-ignore]
        except NameError as error:
            raise SessionError(f"{field}: {undefined(error.name, known)}") from None
        except Exception as error:
            raise SessionError(f"{field} cannot be evaluated: {type(error).__name__}: {error}") from None

    return _FIELD.sub(value, word)
