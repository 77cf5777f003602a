"""Where the edges of path patching begin and end: a value, or a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.methods.heads import head_places, shapes_of
from graphpatch_notebook.experiments.methods.recordings import targets
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patches.kinds import Patch, ReplacePatch
from graphpatch_notebook.values import TensorSpec

End: TypeAlias = "str | NodePath | tuple[str | NodePath, Any]"
"""Where an edge begins or ends: a path, or a path and an index into its value (one head, one position)."""

OUTPUT = "output"

_WITHOUT_ROWS = ("parameter", "buffer", "attribute")


@dataclass(frozen=True)
class EdgeEnd:
    """Where an edge begins or ends.

    Attributes:
        target: What its path means; `None` for the output of the model.
        index: What of the value is meant; `None` for all of it.
    """

    target: Target | None
    index: Any = None

    @property
    def path(self) -> str:
        return "" if self.target is None else self.target.path

    @property
    def label(self) -> str:
        if self.index is None:
            return self.path or OUTPUT
        return f"{self.path}[{index_text(self.index)}]"

    def part(self, value: Tensor) -> Tensor:
        """Returns a copy of what of `value` is meant."""
        shape = tuple(value.shape)
        try:
            part = value.clone() if self.index is None else value[self.index].clone()
            if not part.numel() and value.numel():
                raise IndexError("it is empty")
            return part
        except (IndexError, TypeError) as error:
            raise ExperimentError(f"{self.label!r}: no such part of the value, of shape {shape}: {error}") from error

    def replaced(self, value: Tensor) -> Patch[Any]:
        """Returns the patch that puts `value` there."""
        return ReplacePatch(value=value, slice=self.index)


def edge_ends(pg: PatchableGraph, given: Any, what: str) -> dict[str, EdgeEnd]:
    """Returns the ends of edges that a user gave, by label."""
    found: dict[str, EdgeEnd] = {}
    for item in given if isinstance(given, list) else [given]:
        end = _end(pg, item, what)
        if end.label in found:
            raise ExperimentError(f"{what} has {end.label!r} more than once")
        found[end.label] = end
    if not found:
        raise ExperimentError(f"{what} is empty: give a path, or a list of some")
    return found


def head_ends(
    pg: PatchableGraph, senders: Mapping[str, EdgeEnd], values: Mapping[str, Tensor], heads: int, inputs: Inputs
) -> dict[tuple[Any, ...], EdgeEnd]:
    """Returns the heads of senders, by label and number."""
    indexed = next((end for end in senders.values() if end.index is not None), None)
    if indexed is not None:
        raise ExperimentError(f"heads= takes senders apart, but {indexed.label!r} has an index; give one of the two")
    places = head_places(pg, shapes_of(values), heads, inputs.rows)
    return {
        (start, head): replace(end, index=(*places.index(end.path, head), ...))
        for start, end in senders.items()
        for head in range(heads)
    }


def _end(pg: PatchableGraph, item: Any, what: str) -> EdgeEnd:
    if item is None and what == "receiver":
        return EdgeEnd(None)
    path, index = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    if not isinstance(path, (str, NodePath)) or isinstance(index, (str, NodePath)):
        raise ExperimentError(
            f"a {what} is a path, or a path and an index such as (path, (..., slice(0, 64))), not {item!r}; give "
            "several in a list"
        )
    target = targets(pg, [str(path)])[str(path)]
    if not isinstance(target.spec, TensorSpec):
        raise ExperimentError(f"a {what} is a tensor, but {target.path!r} was {target.spec} when it was captured")
    end = EdgeEnd(target, index)
    _check_rows(end)
    return end


def _check_rows(end: EdgeEnd) -> None:
    """Refuses numbers in the first dimension of an index: where a head is meant, they take rows of the batch."""
    target, index = end.target, end.index
    if target is None or target.node.kind in _WITHOUT_ROWS:
        return
    first = index[0] if isinstance(index, tuple) and index else index
    shape = tuple(getattr(target.spec, "shape", ()))
    are_rows = isinstance(index, list) or (isinstance(index, Tensor) and index.dtype != torch.bool)
    if len(shape) < 2 or not (are_rows or (isinstance(first, int) and not isinstance(first, bool))):
        return
    path = target.path
    rows = f"({path!r}, ({index_text(index)},))"
    head = f"heads=..., or ({path!r}, (..., slice(0, size))) for the first head of that size"
    if isinstance(first, int):
        rest = ", ..." if isinstance(index, tuple) and len(index) > 1 else ","
        rows = f"({path!r}, (slice({first}, {first + 1 or None}){rest}))"
    if len(shape) > 3 and isinstance(first, int):
        head = f"({path!r}, (slice(None), {first})) if dimension 1 of its shape {shape} has them"
    raise ExperimentError(
        f"{end.label!r}: {index_text(first)} counts rows of the batch, the first dimension of the shape {shape}. To "
        f"name a head, give {head}; for rows of the batch give {rows}"
    )


def index_text(index: Any) -> str:
    """Returns an index as it stands between brackets.

    Example:
        >>> index_text((..., 3, slice(0, 64)))
        '..., 3, 0:64'
    """
    if isinstance(index, tuple):
        return ", ".join(map(index_text, index))
    if isinstance(index, slice):
        parts = ["" if part is None else str(part) for part in (index.start, index.stop, index.step)]
        return ":".join(parts if parts[2] else parts[:2])
    return "..." if index is Ellipsis else str(index)
