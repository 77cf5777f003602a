"""Texts beside the rows and columns of a picture: such that one sees what is in them, and any font can draw them."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphpatch_notebook.experiments.plotting.grids import Side

_NAMED = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"}
_LONGEST, _BEFORE = 32, 7
"""The most letters of a label, and how many of these are from its beginning: paths differ at their end."""
_LONGEST_TOKEN = 18


def any_glyph(_: str) -> bool:
    """Whether a font has a character, where the page finds one that has."""
    return True


def shown_labels(side: Side, has_glyph: Callable[[str], bool] = any_glyph) -> list[str]:
    """Returns what is written beside the rows or columns: not too long, and the same only where they are the same."""
    return tick_texts(side.labels, has_glyph, is_token=side.is_tokens)


def tick_texts(texts: Sequence[str], has_glyph: Callable[[str], bool], *, is_token: bool) -> list[str]:
    """Returns texts as they stand side by side in a picture: long ones cut, and numbered where two become alike.

    Args:
        texts: The texts.
        has_glyph: Whether the font has a character.
        is_token: Whether spaces matter.
    """
    seen = [tick_text(text, has_glyph, is_token=is_token) for text in texts]
    short: dict[str, str] = {}
    taken: set[str] = set()
    for text in sorted(dict.fromkeys(seen), key=len):  # what is short enough keeps its own text
        cut = _cut(text, is_token=is_token)
        names = (cut if number == 1 else f"{cut}({number})" for number in itertools.count(1))
        short[text] = next(name for name in names if name not in taken)
        taken.add(short[text])
    return [short[text] for text in seen]


def _cut(text: str, *, is_token: bool) -> str:
    if len(text) <= (_LONGEST_TOKEN if is_token else _LONGEST):
        return text
    return f"{text[: _LONGEST_TOKEN - 1]}…" if is_token else f"{text[:_BEFORE]}…{text[_BEFORE + 1 - _LONGEST :]}"


def tick_text(text: str, has_glyph: Callable[[str], bool] = any_glyph, *, is_token: bool) -> str:
    r"""Returns a whole text as it can be drawn: what cannot be seen, or what the font does not have, by its number.

    Example:
        >>> tick_text(" the", is_token=True), tick_text(chr(0), is_token=True)
        ('␣the', '\\x00')
    """
    if is_token and not text:
        return "(empty)"
    if text and unicodedata.category(text[0]).startswith("M"):
        text = f"◌{text}"  # or an accent would land on nothing
    return "".join(_seen(character, has_glyph, is_token=is_token) for character in text)


def _seen(character: str, has_glyph: Callable[[str], bool], *, is_token: bool) -> str:
    if character == " " and not is_token:
        return " "
    named = _NAMED.get(character, character)
    is_invisible = named == character and unicodedata.category(character)[0] in "CZ"
    if not is_invisible and has_glyph(named):
        return named
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def glyphs_of_font() -> Callable[[str], bool]:
    """Returns what says whether the fonts that matplotlib is set to have a character."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in FontProperties().get_family()]

    def has_glyph(character: str) -> bool:
        return any(font.get_char_index(ord(character)) for font in fonts)

    return has_glyph
