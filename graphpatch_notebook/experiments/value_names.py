"""The names of one value: what a module returns, what the next one is given, views of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import EllipsisType
from typing import Any

from graphpatch_notebook.capture.records import Node
from graphpatch_notebook.experiments.recordings import targets
from graphpatch_notebook.experiments.value_sources import SourceValue, maker_of, sources_of
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.values import TensorSpec

_RESHAPED = (
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze"),
    *("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "mT", "T", "adjoint"),
    *("contiguous", "clone", "detach", "to", "type", "type_as", "float", "alias", "requires_grad_"),
)
_DROPPED = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def same_values(pg: PatchableGraph, paths: Iterable[str]) -> dict[str, str]:
    """Returns, for each path whose value has other names among `paths`, the one that stands for all of them.

    As the records tell: values are handed on from a module to the next, or get another shape, with all their entries
    and of the same dtype. The name that stands for all is what a module returns, if there is such a one (of the
    outermost, if there are several), else the first in order of execution.
    """
    groups: dict[Any, list[str]] = {}
    found = targets(pg, paths)
    for path, target in found.items():
        if isinstance(target.spec, TensorSpec):
            origin = _origin(SourceValue(target.node, target.frame, target.dig), target.spec)
            groups.setdefault(origin.key, []).append(path)
    names: dict[str, str] = {}
    for group in groups.values():
        outputs = [path for path in group if found[path].node.kind == "output"]
        standing = min(outputs, key=len, default=group[0])
        names |= dict.fromkeys(group if len(group) > 1 else (), standing)
    return names


def _origin(value: SourceValue, spec: TensorSpec) -> SourceValue:
    """Returns the first name that a value had."""
    while (before := _handed_on(value, spec)) is not None:
        value = before
    return value


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
