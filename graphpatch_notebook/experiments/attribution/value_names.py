"""The names of one value: what a module returns, what the next one is given, views of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import EllipsisType
from typing import Any

from graphpatch_notebook.capture.records import Node
from graphpatch_notebook.experiments.attribution.scored_nodes import ScoredNode
from graphpatch_notebook.experiments.methods.recordings import targets
from graphpatch_notebook.experiments.methods.value_sources import SourceValue, maker_of, sources_of
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.values import TensorSpec

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
