"""Node paths as labels: only the part in which they differ."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_SEGMENT = re.compile(r"[^.|]*[.|]?")
_MOST = 0.8
"""The share of paths whose common beginning is left out, also where others begin otherwise."""
WHOLE = "/"
"""Stands before a path that is written in full among shortened ones."""


@dataclass(frozen=True)
class PathLabels:
    """What paths are called where they stand side by side.

    Attributes:
        labels: One for each path; after a `WHOLE`, where it is not one of those that have something in common.
        common: What all (or all but few) have in common, with `*` for the part in which they differ; `None` where
            there is nothing.
    """

    labels: tuple[str, ...]
    common: str | None

    @property
    def has_whole(self) -> bool:
        """Whether some of the labels are whole paths, unlike the others."""
        return any(label.startswith(WHOLE) for label in self.labels)


def path_labels(paths: Sequence[str]) -> PathLabels:
    """Returns the part of each path in which it differs from the others.

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
    """Whether labels may be shortened: they are paths, nearly all of them with several segments.

    Example:
        >>> are_paths(["transformer.h_0"]), are_paths(["h_0", "h_1"]), are_paths(["e.g. this"])
        (True, False, False)
    """
    if not all(re.fullmatch(r"[^\s.|]+([.|][^\s.|]+)*", text) for text in texts):
        return False
    return sum(re.search("[.|]", text) is not None for text in texts) >= _MOST * len(texts)


def _alike(paths: Sequence[str]) -> list[bool]:
    """Returns which paths have the longest beginning in common that most have, if that makes labels shorter."""
    split = list(map(_segments, paths))
    beginnings = Counter(tuple(parts[:end]) for parts in split for end in range(1, len(parts)))
    least = math.ceil(_MOST * len(paths))
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
    """Returns how many segments all have in common, at the beginning."""
    shared = (len(set(segments)) == 1 for segments in zip(*split, strict=False))
    return sum(itertools.takewhile(bool, shared))
