"""Scores by rank, each value once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import numpy as np

from graphpatch_notebook.capture.records import Node
from graphpatch_notebook.experiments.attribution.scored_nodes import ScoredNode
from graphpatch_notebook.experiments.methods.arguments import targets
from graphpatch_notebook.experiments.methods.value_sources import SourceValue, maker_of, sources_of
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.values import TensorSpec

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


_RESHAPED = (
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze"),
    *("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "mT", "T", "adjoint"),
    *("contiguous", "clone", "detach", "to", "type", "type_as", "float", "alias", "requires_grad_"),
)
_DROPPED = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def same_values(pg: PatchableGraph, nodes: Iterable[ScoredNode]) -> dict[str, str]:
    """Returns, for each path whose value has other names among `nodes`, the one that stands for all of them.

    As the records tell: values are handed on from a module to the next, or get another shape, with all their entries
    and of the same dtype. The name that stands for all is what a module returns, if there is such a one (of the
    outermost, if there are several), else the first in order of execution.
    """
    groups: dict[Any, list[ScoredNode]] = {}
    origins: dict[Any, Any] = {}
    for scored in nodes:
        dig = targets(pg, [scored.path])[scored.path].dig if scored.is_in_container else ()
        value = SourceValue(scored.node, scored.frame, dig)
        groups.setdefault(_origin(value, scored.spec, origins), []).append(scored)
    names: dict[str, str] = {}
    for group in groups.values():
        if len(group) > 1:
            outputs = [scored.path for scored in group if scored.node.kind == "output"]
            standing = min(outputs, key=len, default=group[0].path)
            names |= dict.fromkeys((scored.path for scored in group), standing)
    return names


def _origin(value: SourceValue, spec: TensorSpec, known: dict[Any, Any]) -> Any:
    """Returns what tells the first name that a value had; adds the names on the way to what is known."""
    way = [value.key]
    while way[-1] not in known and (before := _handed_on(value, spec)) is not None:
        value = before
        way.append(value.key)
    origin = known.get(way[-1], way[-1])
    known.update(dict.fromkeys(way, origin))
    return origin


def _handed_on(value: SourceValue, spec: TensorSpec) -> SourceValue | None:
    """Returns what a value was under another name just before, or `None`, if it was made there."""
    made = maker_of(value.node)
    if made.kind == "op":
        if made is not value.node or not _keeps_entries(made):
            return None
    elif made.kind not in ("input", "output", "call"):
        return None
    sources = list(sources_of(value))
    if len(sources) != 1:
        return None
    given = _spec_at(sources[0])
    is_same = isinstance(given, TensorSpec) and (given.shape.numel(), given.dtype) == (spec.shape.numel(), spec.dtype)
    return sources[0] if is_same else None


def _keeps_entries(made: Node) -> bool:
    if made.op in _DROPPED:
        flag = made.kwargs.get("training", made.args[2] if len(made.args) > 2 else None)
        return flag is False
    if made.op == "getitem":  # of all entries, as their number tells; lists and masks may have them in another order
        index = made.args[1] if len(made.args) > 1 else None
        return all(isinstance(part, (slice, EllipsisType)) for part in (index if type(index) is tuple else (index,)))
    return made.op in _RESHAPED


def _spec_at(value: SourceValue) -> Any:
    spec: Any = value.node.spec
    for key in value.dig:
        spec = next((child for _, known, child in getattr(spec, "children", ()) if known == key), None)
    return spec


def names_in(attrs: Mapping[Any, Any]) -> Mapping[str, str]:
    """Returns what `same_values` told when a result was made, if anybody asked it then."""
    found = attrs.get("same_values")
    return found if isinstance(found, Mapping) else {}
