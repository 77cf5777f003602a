"""Python source that knows how to show itself: plain where it is printed or piped, coloured where that can be seen."""

from __future__ import annotations

import html
import os
from pathlib import Path
from typing import Any

from graphpatch_notebook.tree_texts import css_colour, is_colour_terminal

_COLOURS = {
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
    r"""Python source: a `str`, so that `exec`, `print` and files take it; its repr is the code itself.

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
        """Coloured in IPython's terminal, plain where its output is no terminal or no colours are wanted."""
        text = repr(self)
        printer.text(_coloured(text) if is_colour_terminal() else text)

    def _repr_html_(self) -> str:
        return as_html(repr(self))

    def __rich__(self) -> Any:
        from rich.syntax import Syntax

        return Syntax(repr(self), "python", theme="ansi_dark", background_color="default")


def _coloured(text: str) -> str:
    from pygments import highlight
    from pygments.formatters import TerminalFormatter
    from pygments.lexers import PythonLexer

    return str(highlight(text, PythonLexer(stripnl=False, ensurenl=False), TerminalFormatter()))


def as_html(text: str) -> str:
    """Returns Python source as HTML that needs no style sheet; all of it is escaped."""
    from pygments.lexers import PythonLexer

    tokens = PythonLexer(stripnl=False, ensurenl=False).get_tokens(text)
    body = "".join(_span(value, str(kind)) for kind, value in tokens)
    return f'<pre style="line-height:1.4;white-space:pre;overflow-x:auto">{body}</pre>'


def _span(text: str, kind: str) -> str:
    escaped = html.escape(text)
    colour = next((colour for start, colour in _COLOURS.items() if kind.startswith(start)), None)
    return f'<span style="{css_colour(colour)}">{escaped}</span>' if colour and text.strip() else escaped
