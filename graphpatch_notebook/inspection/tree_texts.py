"""The lines of a tree as text: plain, coloured for a terminal, for rich, or as HTML; and the colours of all of them."""

from __future__ import annotations

import html as html_module
import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from graphpatch_notebook.inspection.tree import Line, Style

if TYPE_CHECKING:
    from rich.text import Text


def is_colour_terminal() -> bool:
    """Whether what is printed now is read in a terminal that shows colours."""
    is_terminal = bool(getattr(sys.stdout, "isatty", bool)())
    return is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


_ANSI: dict[Style, str] = {
    "name": "",
    "graph": "\x1b[1;36m",
    "tensor": "\x1b[32m",
    "container": "\x1b[33m",
    "number": "\x1b[35m",
    "object": "\x1b[35m",
    "note": "\x1b[2m",
    "line": "\x1b[2m",
}
RICH_STYLES: dict[Style, str] = {
    "name": "",
    "graph": "bold cyan",
    "tensor": "green",
    "container": "yellow",
    "number": "magenta",
    "object": "magenta",
    "note": "dim",
    "line": "dim",
}


def css_colour(colour: str) -> str:
    """Returns the CSS declarations of a text colour that can be read on a light and on a dark page.

    No colour has enough contrast (4.5) to both white and black: it is mixed with the page's own colour of text, darker
    on a light page, lighter on a dark one. Browsers that cannot mix show the colour itself, of contrast 4 to both.
    """
    return f"color:{colour};color:color-mix(in srgb,{colour} 75%,currentColor)"


CSS_STYLES: dict[Style, str] = {
    "name": "",
    "graph": f"{css_colour('#2c7fb8')};font-weight:600",
    "tensor": css_colour("#3a8a4d"),
    "container": css_colour("#a06a1c"),
    "number": css_colour("#a05aa8"),
    "object": css_colour("#a05aa8"),
    "note": "opacity:.7",
    "line": "opacity:.5",
}


def plain(lines: Iterable[Line]) -> str:
    """Returns the tree as text."""
    return "\n".join("".join(text for text, _ in line.parts()) for line in lines)


def coloured(lines: Iterable[Line]) -> str:
    """Returns the tree as text for a terminal, coloured by ANSI codes."""
    return "\n".join("".join(_ansi(*part) for part in line.parts()) for line in lines)


def _ansi(text: str, style: Style) -> str:
    return f"{_ANSI[style]}{text}\x1b[0m" if _ANSI[style] else text


def rich_text(lines: Iterable[Line]) -> Text:
    """Returns the tree as a `rich.text.Text`; imports rich."""
    from rich.text import Text

    parts: list[tuple[str, str]] = []
    for line in lines:
        if parts:
            parts.append(("\n", ""))
        parts += [(text, RICH_STYLES[style]) for text, style in line.parts()]
    return Text.assemble(*parts, no_wrap=True, overflow="ignore")


def html(lines: Iterable[Line]) -> str:
    """Returns the tree as HTML that needs no style sheet; all text is escaped."""
    body = "\n".join("".join(_span(*part) for part in line.parts()) for line in lines)
    return f'<pre style="line-height:1.25;white-space:pre;overflow-x:auto">{body}</pre>'


def _span(text: str, style: Style) -> str:
    escaped = html_module.escape(text)
    return f'<span style="{CSS_STYLES[style]}">{escaped}</span>' if CSS_STYLES[style] else escaped
