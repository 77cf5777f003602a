"""Labels of rows and columns: the parts in which paths differ, in characters that every font has."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphpatch_notebook.experiments.plotting.grids import Side

_SEGMENT = re.compile(r"[^.|]+[.|]?")
_PATH = re.compile(r"[^\s.|]+([.|][^\s.|]+)*")
_NAMED = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"}
_LONGEST, _BEFORE = 32, 7
"""The maximum length of a label, and how much of that is its beginning, since paths differ at their end."""
_LONGEST_TOKEN = 18


def are_paths(texts: Sequence[str]) -> bool:
    """Whether texts are paths, nearly all of them with several segments.

    Example:
        >>> are_paths(["transformer.h_0"]), are_paths(["h_0", "h_1"]), are_paths(["e.g. this"])
        (True, False, False)
    """
    is_each_path = all(_PATH.fullmatch(text) for text in texts)
    return is_each_path and sum("." in text or "|" in text for text in texts) >= 0.8 * len(texts)


def path_labels(paths: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """Returns the part of each path that differs from the others, and what they have in common.

    Example:
        >>> path_labels(["transformer.h_0.mlp.output", "transformer.h_1.mlp.output"])
        (('h_0', 'h_1'), 'transformer.*.mlp.output')
    """
    split = [_SEGMENT.findall(path) for path in paths]
    if len(set(paths)) < 2:
        return tuple(paths), None
    shortest = min(map(len, split))
    start = min(_common(split), shortest - 1)
    end = min(_common([parts[::-1] for parts in split]), shortest - 1 - start)
    labels = tuple("".join(parts[start : len(parts) - end]).rstrip(".|") for parts in split)
    before, after = "".join(split[0][:start]), "".join(split[0][len(split[0]) - end :])
    separator = split[0][len(split[0]) - end - 1][-1:] if after else ""
    return labels, f"{before}*{separator}{after}" if before or after else None


def _common(split: Sequence[Sequence[str]]) -> int:
    """Returns the number of leading segments that all paths share."""
    shared = (len(set(segments)) == 1 for segments in zip(*split, strict=False))
    return sum(itertools.takewhile(bool, shared))


def shown_labels(side: Side, has_glyph: Callable[[str], bool] | None = None) -> list[str]:
    """Returns the labels of rows or columns, shortened where that leaves different labels different.

    In tokens, spaces matter. `has_glyph` says whether the font has a character; browsers find one for each.
    """
    seen = [tick_text(text, has_glyph, is_token=side.is_tokens) for text in side.labels]
    short = [_shortened(text, is_token=side.is_tokens) for text in seen]
    return short if len(set(short)) == len(set(seen)) else seen


def _shortened(text: str, *, is_token: bool) -> str:
    if len(text) <= (_LONGEST_TOKEN if is_token else _LONGEST):
        return text
    return f"{text[: _LONGEST_TOKEN - 1]}…" if is_token else f"{text[:_BEFORE]}…{text[_BEFORE + 1 - _LONGEST :]}"


def tick_text(text: str, has_glyph: Callable[[str], bool] | None = None, *, is_token: bool) -> str:
    r"""Returns a text with invisible characters, and those that the font does not have, replaced by their code.

    Example:
        >>> tick_text(" the", is_token=True), tick_text(chr(0), is_token=True)
        ('␣the', '\\x00')
    """
    if is_token and not text:
        return "(empty)"
    if text and unicodedata.category(text[0]).startswith("M"):
        text = f"◌{text}"  # a combining character needs a base
    return "".join(_seen(character, has_glyph, is_token=is_token) for character in text)


def _seen(character: str, has_glyph: Callable[[str], bool] | None, *, is_token: bool) -> str:
    if character == " " and not is_token:
        return " "
    named = _NAMED.get(character, character)
    is_invisible = named == character and unicodedata.category(character)[0] in "CZ"
    if not is_invisible and (has_glyph is None or has_glyph(named)):
        return named
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
