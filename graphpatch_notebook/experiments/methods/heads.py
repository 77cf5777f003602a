"""The heads of an attention in values: parts of the last dimension, or a dimension of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.methods.head_mixing import mixing_of
from graphpatch_notebook.experiments.methods.positions import PositionDim, position_dims
from graphpatch_notebook.experiments.methods.recordings import targets
from graphpatch_notebook.patchable_graph import PatchableGraph

Shape: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True)
class HeadPlaces:
    """Where heads lie in some values.

    Attributes:
        count: How many there are.
        dims: By path, the dimension that they lie in.
        sizes: By path, how many entries of that dimension belong to one head.
    """

    count: int
    dims: Mapping[str, int]
    sizes: Mapping[str, int]

    def part(self, path: str, head: int) -> slice:
        """Returns the entries of dimension `dims[path]` that belong to a head."""
        size = self.sizes[path]
        return slice(size * head, size * (head + 1))

    def index(self, path: str, head: int) -> tuple[Any, ...]:
        """Returns the index of a head in the value at a path."""
        return (*(slice(None),) * self.dims[path], self.part(path, head))


def shapes_of(values: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Returns the shapes of values."""
    return {path: tuple(value.shape) for path, value in values.items()}


def head_places(
    pg: PatchableGraph, shapes: Mapping[str, Shape], count: Any, rows: int | None, position_dim: PositionDim = None
) -> HeadPlaces:
    """Returns where `count` heads lie in values of some shapes.

    They lie side by side in the last dimension, or have a dimension of their own: one of their number, of a value with
    four dimensions or more, that is neither the first, nor the last, nor known to run along the sequence.

    Args:
        pg: The graph.
        shapes: The shapes, by path.
        count: How many heads a user says that there are.
        rows: How many rows the batch has, if that is known.
        position_dim: What he says runs along the sequence.

    Raises:
        ExperimentError: There cannot be so many heads in a value; or they are mixed there already, as the graph tells.
    """
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ExperimentError(f"heads is how many there are, a number from 1 on, not {count!r}")
    count = int(count)
    dims = {}
    for path, shape in shapes.items():
        dims[path] = _dim(path, shape, count, _sequence_dim(pg, path, position_dim))
        _check_rows(path, shape, count, rows)
    _check_apart(pg, shapes)
    return HeadPlaces(count, dims, {path: shapes[path][dim] // count for path, dim in dims.items()})


def _dim(path: str, shape: Shape, count: int, sequence: int | None) -> int:
    own = [dim for dim in range(1, len(shape) - 1) if shape[dim] == count and dim != sequence] if len(shape) > 3 else []
    if len(own) > 1:
        raise ExperimentError(
            f"{path!r} is of shape {shape}: it cannot be told which of the dimensions {', '.join(map(str, own))} has "
            f"the {count} heads; give inputs of another length"
        )
    if own:
        return own[0]
    if not shape or shape[-1] % count:
        raise ExperimentError(f"{path!r} is of shape {shape}: its last dimension cannot be split into {count} heads")
    if sequence == len(shape) - 1:
        raise ExperimentError(f"the last dimension of {path!r}, of shape {shape}, runs along the sequence: no heads")
    return len(shape) - 1


def _sequence_dim(pg: PatchableGraph, path: str, position_dim: PositionDim) -> int | None:
    """Returns which dimension of a value is known to run along the sequence."""
    try:
        return position_dims(pg, [path], position_dim)[path]
    except ExperimentError:
        return None


def _check_rows(path: str, shape: Shape, count: int, rows: int | None) -> None:
    """Refuses values whose first dimension holds the rows of the batch and the heads of each."""
    if count > 1 and rows is not None and len(shape) == 3 and shape[0] == rows * count and shape[1] != rows:
        raise ExperimentError(
            f"{path!r} is of shape {shape}: its first dimension has the {count} heads of {rows} rows, one after "
            "another; give a path in which they lie side by side, such as the input of the output projection"
        )


def _check_apart(pg: PatchableGraph, paths: Iterable[str]) -> None:
    """Refuses values in which heads are mixed."""
    problems = []
    for path, target in targets(pg, paths).items():
        mixing = mixing_of(target)
        if mixing is not None:
            repair = f"give {mixing.where!r}" if mixing.where else mixing.repair or "give the input of that projection"
            problems.append(f"{path!r}: {repair}")
    if problems:
        raise ExperimentError(
            "heads= needs values in which heads are apart; after the output projection of an attention each number is "
            "made of all of them:\n  " + "\n  ".join(problems)
        )
