"""Node paths as labels: only the part in which they differ."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

_SEGMENT = re.compile(r"[^.|]*[.|]?")
_LONGEST = 48


@dataclass(frozen=True)
class PathLabels:
    """What paths are called where they stand side by side.

    Attributes:
        labels: One for each path.
        common: What all have in common, with `*` for the part in which they differ; `None` where there is nothing.
    """

    labels: tuple[str, ...]
    common: str | None


def path_labels(paths: Sequence[str]) -> PathLabels:
    """Returns the part of each path in which it differs from the others.

    Example:
        >>> path_labels(["transformer.h_0.mlp.output", "transformer.h_1.mlp.output"])
        PathLabels(labels=('h_0', 'h_1'), common='transformer.*.mlp.output')
    """
    split = [[found for found in _SEGMENT.findall(path) if found] for path in paths]
    if len(set(paths)) < 2:
        return PathLabels(tuple(map(_cut, paths)), None)
    shortest = min(map(len, split))
    start = min(_common(split), shortest - 1)
    end = min(_common([parts[::-1] for parts in split]), shortest - 1 - start)
    labels = tuple(_cut("".join(parts[start : len(parts) - end]).rstrip(".|")) for parts in split)
    before, after = "".join(split[0][:start]), "".join(split[0][len(split[0]) - end :])
    if not before and not after:
        return PathLabels(labels, None)
    separator = split[0][len(split[0]) - end - 1][-1:] if after else ""
    return PathLabels(labels, f"{before}*{separator}{after}")


def is_path(text: str) -> bool:
    """Whether a label may be shortened: it has several segments.

    Example:
        >>> is_path("transformer.h_0"), is_path("h_0"), is_path("e.g. this")
        (True, False, False)
    """
    return re.fullmatch(r"[^\s.|]+([.|][^\s.|]+)+", text) is not None


def _common(split: Sequence[Sequence[str]]) -> int:
    """Returns how many segments all have in common, at the beginning."""
    shared = (len(set(segments)) == 1 for segments in zip(*split, strict=False))
    return sum(itertools.takewhile(bool, shared))


def _cut(label: str) -> str:
    """Returns a label without its middle, if it is too long: nodes differ at their ends."""
    if len(label) <= _LONGEST:
        return label
    half = (_LONGEST - 1) // 2
    return f"{label[:half]}…{label[-half:]}"
