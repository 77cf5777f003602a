"""Texts of tokens as labels in a figure: such that one sees what is in them, and any font can draw them."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

_NAMED = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"}
_LONGEST = 18


def tick_text(text: str, has_glyph: Callable[[str], bool], *, is_token: bool) -> str:
    r"""Returns a text as it can be drawn: what cannot be seen, or what the font does not have, by its number.

    Args:
        text: The text.
        has_glyph: Whether the font has a character.
        is_token: Whether spaces matter, and length does not.

    Example:
        >>> tick_text(" the", lambda _: True, is_token=True), tick_text(chr(0), lambda _: True, is_token=True)
        ('␣the', '\\x00')
    """
    if is_token and not text:
        return "(empty)"
    if text and unicodedata.category(text[0]).startswith("M"):
        text = f"◌{text}"  # or an accent would land on nothing
    shown = [_seen(character, has_glyph, is_token=is_token) for character in text]
    if is_token and sum(map(len, shown)) > _LONGEST:
        while shown and sum(map(len, shown)) > _LONGEST - 1:
            shown.pop()
        shown.append("…")
    return "".join(shown)


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
