"""Scores by rank, each value once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_CLOSE = 1e-5  # sums of float32, in another order


@dataclass
class Rank:
    """A score and what it is of.

    Attributes:
        number: Which of all scores it is.
        others: Those of the same value under other names.
    """

    number: int
    others: list[int] = field(default_factory=list)


def ranked(
    scores: np.ndarray[Any, Any], labels: Sequence[tuple[Any, ...]], names: Mapping[str, str] | None = None
) -> list[Rank]:
    """Returns the finite scores that are farthest from zero first; those of one value take one place.

    Scores that differ by no more than rounding keep the order they came in, so that each machine gives the same ranks.
    Names of one value have scores of their own where it is used under others, too (a residual stream, and what a norm
    is given of it): these stay apart.

    Args:
        scores: The scores.
        labels: What each is of: a path, and more, such as a position.
        names: For paths that name a value with several names, the one that stands for all.

    Example:
        >>> labels = [("a.output",), ("b.input",), ("b.output",)]
        >>> ranked(np.array([1.0, 1.0, -2.0]), labels, dict.fromkeys(["a.output", "b.input"], "a.output"))
        [Rank(number=2, others=[]), Rank(number=0, others=[1])]
        >>> [rank.number for rank in ranked(np.array([1.0, 1.0000001, 3.0]), labels)]
        [2, 0, 1]
    """
    names = names or {}
    sizes = np.where(np.isfinite(scores), np.abs(scores), -1.0)
    ranks: list[Rank] = []
    known: dict[tuple[Any, ...], list[Rank]] = {}
    for number in _by_size(sizes):
        path, *more = labels[number]
        if path not in names:
            ranks.append(Rank(number))
            continue
        same = known.setdefault((names[path], *more), [])
        rank = next((rank for rank in same if _is_close(scores[rank.number], scores[number])), None)
        if rank is None:
            rank = Rank(number)
            ranks.append(rank)
            same.append(rank)
        elif path == names[path]:
            rank.others.append(rank.number)
            rank.number = number
        else:
            rank.others.append(number)
    return ranks


def _by_size(sizes: np.ndarray[Any, Any]) -> list[int]:
    """Returns the numbers of the sizes that are not negative, largest first; sizes as good as equal in their order."""
    runs: list[list[int]] = []
    for number in np.argsort(-sizes, kind="stable").tolist()[: int((sizes >= 0).sum())]:
        if runs and _is_close(sizes[runs[-1][0]], sizes[number]):
            runs[-1].append(number)
        else:
            runs.append([number])
    return [number for run in runs for number in sorted(run)]


def _is_close(score: float, other: float) -> bool:
    return abs(score - other) <= _CLOSE * max(abs(score), abs(other))
