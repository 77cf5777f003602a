"""Texts beside the rows and columns of a picture: such that one sees what is in them, and any font can draw them."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from graphpatch_notebook.experiments.short_texts import Pieces, shortened

if TYPE_CHECKING:
    from graphpatch_notebook.experiments.grids import Side

_NAMED = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"}
_LONGEST = 32
_LONGEST_TOKEN = 18


def any_glyph(_: str) -> bool:
    """Whether a font has a character, where the page finds one that has."""
    return True


def shown_labels(side: Side, has_glyph: Callable[[str], bool] = any_glyph) -> list[str]:
    """Returns what is written beside the rows or columns: not too long, and the same only where they are the same."""
    return tick_texts(side.labels, has_glyph, is_token=side.is_tokens)


def tick_texts(texts: Sequence[str], has_glyph: Callable[[str], bool], *, is_token: bool) -> list[str]:
    """Returns texts as they stand side by side in a picture; of long ones without a part that does not tell them apart.

    Args:
        texts: The texts.
        has_glyph: Whether the font has a character.
        is_token: Whether spaces matter.
    """
    seen = [_pieces(text, has_glyph, is_token=is_token) for text in texts]
    short = shortened(seen, _LONGEST_TOKEN if is_token else _LONGEST, keeps_start=is_token)
    return [short[pieces] for pieces in seen]


def tick_text(text: str, has_glyph: Callable[[str], bool] = any_glyph, *, is_token: bool) -> str:
    r"""Returns a whole text as it can be drawn: what cannot be seen, or what the font does not have, by its number.

    Example:
        >>> tick_text(" the", is_token=True), tick_text(chr(0), is_token=True)
        ('␣the', '\\x00')
    """
    return "".join(_pieces(text, has_glyph, is_token=is_token))


def _pieces(text: str, has_glyph: Callable[[str], bool], *, is_token: bool) -> Pieces:
    if is_token and not text:
        return ("(empty)",)
    if text and unicodedata.category(text[0]).startswith("M"):
        text = f"◌{text}"  # or an accent would land on nothing
    return tuple(_seen(character, has_glyph, is_token=is_token) for character in text)


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
