"""Python source: functions that lay out statements, and a string that displays itself with colors."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from graphpatch_notebook.inspection.tree import css_color, is_color_terminal

WIDTH = 88
_INDENT = "    "
_COLORS = {
    "Token.Comment": "#808080",
    "Token.Keyword": "#2c7fb8",
    "Token.Operator.Word": "#2c7fb8",
    "Token.Name.Builtin": "#2c7fb8",
    "Token.Name.Namespace": "#a05aa8",
    "Token.Name.Function": "#a05aa8",
    "Token.Literal.String": "#3a8a4d",
    "Token.Literal.Number": "#a06a1c",
}


class SourceCode(str):
    r"""Python source: a `str` for `exec`, `print` and files; its repr is the code itself.

    Example:
        >>> SourceCode("x = 1\n")
        x = 1
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return self.rstrip("\n")

    def save(self, file: str | os.PathLike[str]) -> Path:
        """Writes the code to a file, in UTF-8; returns the file."""
        target = Path(file)
        target.write_text(self, encoding="utf8", newline="\n")
        return target

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Colored in IPython's terminal; plain if the output is not a terminal, or colors are switched off."""
        text = repr(self)
        printer.text(_colored(text) if is_color_terminal() else text)

    def _repr_html_(self) -> str:
        return as_html(repr(self))

    def __rich__(self) -> Any:
        from rich.syntax import Syntax

        return Syntax(repr(self), "python", theme="ansi_dark", background_color="default")


def _colored(text: str) -> str:
    from pygments import highlight
    from pygments.formatters import TerminalFormatter
    from pygments.lexers import PythonLexer

    return str(highlight(text, PythonLexer(stripnl=False, ensurenl=False), TerminalFormatter()))


def as_html(text: str) -> str:
    """Returns Python source as escaped HTML without a style sheet."""
    from pygments.lexers import PythonLexer

    tokens = PythonLexer(stripnl=False, ensurenl=False).get_tokens(text)
    body = "".join(_span(value, str(kind)) for kind, value in tokens)
    return f'<pre style="line-height:1.4;white-space:pre;overflow-x:auto">{body}</pre>'


def _span(text: str, kind: str) -> str:
    escaped = html.escape(text)
    color = next((color for start, color in _COLORS.items() if kind.startswith(start)), None)
    return f'<span style="{css_color(color)}">{escaped}</span>' if color and text.strip() else escaped


# --------------------------------------------------------------------------------------------------------------------
# Statements, as texts without a final line break


def bracketed(opening: str, items: Sequence[str], closing: str, width: int = WIDTH) -> str:
    """Returns items between brackets: on one line if they fit, or else one item a line.

    Example:
        >>> print(bracketed("f(", ["one", "two"], ")", width=8))
        f(
            one,
            two,
        )
    """
    flat = f"{opening}{', '.join(items)}{closing}"
    if not items or (len(flat) <= width and "\n" not in flat):
        return flat
    return "\n".join([opening, *(indented(f"{item},") for item in items), closing])


def block(head: str, body: Iterable[str]) -> str:
    """Returns a compound statement with its body."""
    return "\n".join([head, *map(indented, body)])


def indented(statement: str) -> str:
    """Returns a statement indented by one level."""
    # Not with `textwrap`, which breaks lines at characters that do not end a line in Python.
    return _INDENT + statement.replace("\n", f"\n{_INDENT}")


def text_literal(text: str) -> str:
    """Returns a string literal for `text`, in double quotes unless single quotes need fewer backslashes.

    Example:
        >>> print(text_literal("it's"), text_literal('output|"a.b"'))
        "it's" 'output|"a.b"'
    """
    body = "".join(letter if letter in "'\"" else repr(letter)[1:-1] for letter in text)
    quote = "'" if text.count('"') > text.count("'") else '"'
    return quote + body.replace(quote, "\\" + quote) + quote
