"""Scores by rank, and the names of one value: module outputs, module inputs and views of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import numpy as np

from graphpatch_notebook.capture.records import Node
from graphpatch_notebook.experiments.attribution.scored_nodes import ScoredNode
from graphpatch_notebook.inspection.data_flow import SourceValue, sources_of
from graphpatch_notebook.inspection.node_map import NodeMap
from graphpatch_notebook.inspection.resolution import resolve
from graphpatch_notebook.values import TensorSpec, spec_at

_CLOSE = 1e-5  # float32 sums in different orders


@dataclass
class Rank:
    """The index of a score in the ranking, and the indices of scores of the same value under other names."""

    number: int
    others: list[int] = field(default_factory=list)


def ranked(
    scores: np.ndarray[Any, Any], labels: Sequence[tuple[Any, ...]], names: Mapping[str, str] | None = None
) -> list[Rank]:
    """Returns the finite scores, largest in magnitude first; all names of one value share a rank.

    Scores that differ by rounding only keep their order, so that ranks do not depend on the machine. Names of one value
    with different scores (a residual stream, and the input of a norm) have ranks of their own.

    The label of a score is a path, then others such as a position. `names` has the name that represents all names of a
    value, for each of these.

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
    """Returns the indices of sizes that are not negative, largest first; nearly equal sizes keep their order."""
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


def same_values(nodes: NodeMap, scored_nodes: Iterable[ScoredNode]) -> dict[str, str]:
    """Returns, for each path whose value has other names among `scored_nodes`, the name that represents them all.

    In the captured graphs, a value keeps its identity when modules pass it on, and when it is reshaped with all its
    entries and the same dtype. The representative is a module output (of the outermost module, if there are several),
    otherwise the first name in order of execution.
    """
    groups: dict[Any, list[ScoredNode]] = {}
    origins: dict[Any, Any] = {}
    for scored in scored_nodes:
        dig = resolve(nodes.root, scored.path).dig if scored.is_in_container else ()
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
    """Returns the key of the first name of a value; adds all names passed on the way to `known`."""
    way = [value.key]
    while way[-1] not in known and (before := _previous_name(value, spec)) is not None:
        value = before
        way.append(value.key)
    origin = known.get(way[-1], way[-1])
    known.update(dict.fromkeys(way, origin))
    return origin


def _previous_name(value: SourceValue, spec: TensorSpec) -> SourceValue | None:
    """Returns the previous name of a value, or `None` if it was computed here."""
    made = value.node.whole
    if made.kind == "op":
        if made is not value.node or not _keeps_entries(made):
            return None
    elif made.kind not in ("input", "output", "call"):
        return None
    sources = list(sources_of(value))
    if len(sources) != 1:
        return None
    given = spec_at(sources[0].node.spec, sources[0].dig)
    is_same = isinstance(given, TensorSpec) and (given.shape.numel(), given.dtype) == (spec.shape.numel(), spec.dtype)
    return sources[0] if is_same else None


def _keeps_entries(made: Node) -> bool:
    if made.op in _DROPPED:
        flag = made.kwargs.get("training", made.args[2] if len(made.args) > 2 else None)
        return flag is False
    if made.op == "getitem":  # slices of all entries; lists and masks may reorder entries
        index = made.args[1] if len(made.args) > 1 else None
        return all(isinstance(part, (slice, EllipsisType)) for part in (index if type(index) is tuple else (index,)))
    return made.op in _RESHAPED


def names_in(attrs: Mapping[Any, Any]) -> Mapping[str, str]:
    """Returns the attribute `same_values` of a result, or an empty dict."""
    found = attrs.get("same_values")
    return found if isinstance(found, Mapping) else {}
