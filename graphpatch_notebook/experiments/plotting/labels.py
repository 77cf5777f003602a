"""Labels of rows and columns: the parts in which paths differ, in characters that every font has."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphpatch_notebook.experiments.plotting.grids import Side


_SEGMENT = re.compile(r"[^.|]*[.|]?")
_LARGE_FRACTION = 0.8
"""The share of paths that must have a common prefix for it to be left out, although others do not have it."""
WHOLE = "/"
"""The prefix of a full path among shortened ones."""


@dataclass(frozen=True)
class PathLabels:
    """The labels of paths in one plot.

    Attributes:
        labels: One for each path; with the prefix `WHOLE` if it is a full path among shortened ones.
        common: What (nearly) all paths have in common, with `*` for the rest; `None` for nothing.
    """

    labels: tuple[str, ...]
    common: str | None

    @property
    def has_whole(self) -> bool:
        """Whether some of the labels are full paths among shortened ones."""
        return any(label.startswith(WHOLE) for label in self.labels)


def path_labels(paths: Sequence[str]) -> PathLabels:
    """Returns the part of each path that differs from the others.

    Example:
        >>> path_labels(["transformer.h_0.mlp.output", "transformer.h_1.mlp.output"])
        PathLabels(labels=('h_0', 'h_1'), common='transformer.*.mlp.output')
        >>> path_labels([*(f"transformer.h_{layer}.output" for layer in range(4)), "lm_head.output"])
        PathLabels(labels=('h_0', 'h_1', 'h_2', 'h_3', '/lm_head.output'), common='transformer.*.output')
    """
    alike = _alike(paths)
    found = _differing([path for path, is_alike in zip(paths, alike, strict=True) if is_alike])
    labels = iter(found.labels)
    every = tuple(next(labels) if is_alike else f"{WHOLE}{path}" for path, is_alike in zip(paths, alike, strict=True))
    return PathLabels(every, found.common)


def are_paths(texts: Sequence[str]) -> bool:
    """Whether texts are paths, nearly all of them with several segments.

    Example:
        >>> are_paths(["transformer.h_0"]), are_paths(["h_0", "h_1"]), are_paths(["e.g. this"])
        (True, False, False)
    """
    if not all(re.fullmatch(r"[^\s.|]+([.|][^\s.|]+)*", text) for text in texts):
        return False
    return sum(re.search("[.|]", text) is not None for text in texts) >= _LARGE_FRACTION * len(texts)


def _alike(paths: Sequence[str]) -> list[bool]:
    """Returns which paths have the longest prefix that most paths share, if this makes labels shorter."""
    split = list(map(_segments, paths))
    beginnings = Counter(tuple(parts[:end]) for parts in split for end in range(1, len(parts)))
    least = math.ceil(_LARGE_FRACTION * len(paths))
    common = max((start for start, times in beginnings.items() if times >= least), key=len, default=())
    alike = [tuple(parts[: len(common)]) == common and len(parts) > len(common) for parts in split]
    chosen = [path for path, is_alike in zip(paths, alike, strict=True) if is_alike]
    odd = [path for path, is_alike in zip(paths, alike, strict=True) if not is_alike]
    letters = sum(map(len, [*_differing(chosen).labels, *odd])) + len(odd)
    return alike if letters < sum(map(len, _differing(paths).labels)) else [True] * len(paths)


def _differing(paths: Sequence[str]) -> PathLabels:
    split = list(map(_segments, paths))
    if len(set(paths)) < 2:
        return PathLabels(tuple(paths), None)
    shortest = min(map(len, split))
    start = min(_common(split), shortest - 1)
    end = min(_common([parts[::-1] for parts in split]), shortest - 1 - start)
    labels = tuple("".join(parts[start : len(parts) - end]).rstrip(".|") for parts in split)
    before, after = "".join(split[0][:start]), "".join(split[0][len(split[0]) - end :])
    if not before and not after:
        return PathLabels(labels, None)
    separator = split[0][len(split[0]) - end - 1][-1:] if after else ""
    return PathLabels(labels, f"{before}*{separator}{after}")


def _segments(path: str) -> list[str]:
    return [found for found in _SEGMENT.findall(path) if found]


def _common(split: Sequence[Sequence[str]]) -> int:
    """Returns the number of leading segments that all paths share."""
    shared = (len(set(segments)) == 1 for segments in zip(*split, strict=False))
    return sum(itertools.takewhile(bool, shared))


_NAMED = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"}
_LONGEST, _BEFORE = 32, 7
"""The maximum length of a label, and how much of that is its beginning, since paths differ at their end."""
_LONGEST_TOKEN = 18


def shown_labels(side: Side, has_glyph: Callable[[str], bool] | None = None) -> list[str]:
    """Returns the labels of rows or columns, shortened; different labels stay different."""
    return tick_texts(side.labels, has_glyph, is_token=side.is_tokens)


def tick_texts(texts: Sequence[str], has_glyph: Callable[[str], bool] | None = None, *, is_token: bool) -> list[str]:
    """Returns texts as labels: long ones are shortened, and numbered if two would be equal.

    In tokens, spaces matter. `has_glyph` says whether the font has a character; browsers find one for each.
    """
    seen = [tick_text(text, has_glyph, is_token=is_token) for text in texts]
    short: dict[str, str] = {}
    taken: set[str] = set()
    for text in sorted(dict.fromkeys(seen), key=len):  # texts that are short enough stay as they are
        cut = _cut(text, is_token=is_token)
        names = (cut if number == 1 else f"{cut}({number})" for number in itertools.count(1))
        short[text] = next(name for name in names if name not in taken)
        taken.add(short[text])
    return [short[text] for text in seen]


def _cut(text: str, *, is_token: bool) -> str:
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


def glyphs_of_font() -> Callable[[str], bool]:
    """Returns a function that checks whether matplotlib's current fonts have a character."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    fonts = [get_font(findfont(FontProperties(family=[family]))) for family in FontProperties().get_family()]
    return lambda character: any(font.get_char_index(ord(character)) for font in fonts)
