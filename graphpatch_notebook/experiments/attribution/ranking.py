"""Scores by rank, and the names of one value: module outputs, module inputs and views of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphpatch_notebook.capture.records import CallNode
from graphpatch_notebook.components import operations
from graphpatch_notebook.experiments.attribution.scored_nodes import ScoredNode, flow_of
from graphpatch_notebook.inspection.node_map import NodeMap
from graphpatch_notebook.inspection.resolution import resolve

_CHOSEN = frozenset("gather index_select flip roll clamp clip where masked_fill nan_to_num".split())
_SAME = (operations.VIEWS | operations.SAME_VALUES) - _CHOSEN
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

    Names of one value with different scores (a residual stream, and the input of a norm) have ranks of their own.

    The label of a score is a path, then others such as a position. `names` has the name that represents all names of a
    value, for each of these.

    Example:
        >>> labels = [("a.output",), ("b.input",), ("b.output",)]
        >>> ranked(np.array([1.0, 1.0, -2.0]), labels, dict.fromkeys(["a.output", "b.input"], "a.output"))
        [Rank(number=2, others=[]), Rank(number=0, others=[1])]
    """
    names = names or {}
    sizes = np.where(np.isfinite(scores), np.abs(scores), -1.0)
    order: list[list[int]] = []  # nearly equal scores keep their order, whatever the last digits on a machine are
    for number in np.argsort(-sizes, kind="stable").tolist()[: int((sizes >= 0).sum())]:
        if order and _is_close(sizes[order[-1][0]], sizes[number]):
            order[-1].append(number)
        else:
            order.append([number])
    ranks: list[Rank] = []
    known: dict[tuple[Any, ...], list[Rank]] = {}
    for number in (each for close in order for each in sorted(close)):
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


def _is_close(score: float, other: float) -> bool:
    return abs(score - other) <= _CLOSE * max(abs(score), abs(other))


def same_values(nodes: NodeMap, scored_nodes: Iterable[ScoredNode]) -> dict[str, str]:
    """Returns, for each path whose value has other names among `scored_nodes`, the name that represents them all.

    A value keeps its identity when modules pass it on, and when it is reshaped with all its entries. The representative
    is a module output (of the outermost module, if there are several), otherwise the first name in order of execution.
    """
    flow = flow_of(nodes.root)
    groups: dict[Any, list[ScoredNode]] = {}
    for scored in scored_nodes:
        node = scored.node
        if node.kind == "output" and scored.frame.opaque_reason is not None and scored.frame.call is not None:
            node = scored.frame.call
        dig = resolve(nodes.root, scored.path).dig if scored.is_in_container else ()
        value = flow.resolve(node, dig)
        while value is not None and not isinstance(value.node, CallNode) and value.node.whole.op in _SAME:
            moving = flow.moving(value.node)
            if len(moving) != 1 or math.prod(moving[0].shape) != math.prod(value.shape):
                break
            value = moving[0]
        groups.setdefault(scored.path if value is None else value, []).append(scored)
    names: dict[str, str] = {}
    for group in groups.values():
        if len(group) > 1:
            outputs = [scored.path for scored in group if scored.node.kind == "output"]
            standing = min(outputs, key=len, default=group[0].path)
            names |= dict.fromkeys((scored.path for scored in group), standing)
    return names


def names_in(attrs: Mapping[Any, Any]) -> Mapping[str, str]:
    """Returns the attribute `same_values` of a result, or an empty dict."""
    found = attrs.get("same_values")
    return found if isinstance(found, Mapping) else {}
