"""Long texts made short where they stand side by side: what differs stays to be seen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import count, groupby, takewhile
from typing import TypeAlias

Pieces: TypeAlias = tuple[str, ...]
"""A text in parts that are kept or left out as a whole: a character, or what is written in its place."""

_SHARES = (1, 2, 3, 0, 4)
"""Of four: how much of what is kept stands at the beginning; the first that tells all texts apart is taken."""
_LEFT_OUT = "…"


def shortened(texts: Collection[Pieces], longest: int, *, keeps_start: bool = False) -> dict[Pieces, str]:
    """Returns each text with at most so many letters, without a part where it would have more: others for other texts.

    Args:
        texts: The texts.
        longest: The most letters, at least 8. (More only where a number must tell texts apart.)
        keeps_start: Whether the beginning matters most. Else it is the end, where node paths differ.

    Example:
        >>> texts = [tuple(f"h_0.attn.resid_dropout.{name}") for name in ("dropout", "output")]
        >>> list(shortened(texts, 20).values())
        ['h_0.…dropout.dropout', 'h_0.…_dropout.output']
    """
    distinct = dict.fromkeys(texts)
    shares = (4, *_SHARES[:-1]) if keeps_start else _SHARES
    for share in shares:
        found = {text: _cut(text, longest, share) for text in distinct}
        if len(set(found.values())) == len(found):
            return found
    found = {text: _cut(text, longest, shares[0]) for text in distinct}
    for _, equal in _groups(found, distinct):
        found |= _windows(equal, longest)
    return _numbered(found)


def _cut(text: Pieces, longest: int, share: int) -> str:
    """Returns a text without its middle, if it is too long; `share` quarters of it before what is left out."""
    if _length(text) <= longest:
        return "".join(text)
    room = longest - len(_LEFT_OUT)
    start = _head(text, room * share // 4)
    end = _head(text[::-1], room - _length(start))[::-1] if share < 4 else ()
    return "".join((*start, _LEFT_OUT, *end))


def _windows(texts: list[Pieces], longest: int) -> dict[Pieces, str]:
    """Returns long texts with a part from where they differ, between their beginning and their end."""
    at = len(list(takewhile(lambda pieces: len(set(pieces)) == 1, zip(*texts, strict=False))))
    room = longest - 2 * len(_LEFT_OUT)
    found = {}
    for text in texts:
        start, end = _head(text[:at], room // 4), _head(text[at:][::-1], room // 4)[::-1]
        behind = text[at : len(text) - len(end)]
        middle = _head(behind, room - _length(start) - _length(end))
        found[text] = "".join((*start, _LEFT_OUT, *middle, _LEFT_OUT if len(middle) < len(behind) else "", *end))
    for _, equal in _groups(found, texts):
        if len(equal) < len(texts):
            found |= _windows(equal, longest)
    return found


def _groups(found: Mapping[Pieces, str], texts: Iterable[Pieces]) -> list[tuple[str, list[Pieces]]]:
    """Returns what is the same of several texts, and these."""
    ordered = sorted(texts, key=found.__getitem__)
    groups = [(short, list(equal)) for short, equal in groupby(ordered, found.__getitem__)]
    return [(short, equal) for short, equal in groups if len(equal) > 1]


def _numbered(found: Mapping[Pieces, str]) -> dict[Pieces, str]:
    taken: set[str] = set()
    numbered = {}
    for text, short in found.items():
        free = (short if number == 1 else f"{short}({number})" for number in count(1))
        numbered[text] = next(name for name in free if name not in taken)
        taken.add(numbered[text])
    return numbered


def _head(text: Pieces, room: int) -> Pieces:
    """Returns as many pieces as there is room for."""
    kept = 0
    for piece in text:
        room -= len(piece)
        if room < 0:
            break
        kept += 1
    return text[:kept]


def _length(text: Pieces) -> int:
    return sum(map(len, text))
