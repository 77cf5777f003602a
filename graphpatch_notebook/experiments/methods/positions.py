"""Positions in the sequence, and the sequence dimension of values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.execution import PositionsError, row_dimension, sequence_dim
from graphpatch_notebook.experiments.methods.arguments import targets
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph

Positions: TypeAlias = "bool | int | Iterable[int] | slice | None"
"""A position, several, or a slice; negative numbers count from the end of the sequence. `True` for all positions."""

RowPositions: TypeAlias = "Sequence[Sequence[int]] | Tensor"
"""The positions of each row of the batch, `(batch, columns)`."""

PositionDim: TypeAlias = "int | Mapping[str, int] | None"
"""The sequence dimension: of all values, or by path."""


def position_dims(pg: PatchableGraph, paths: Sequence[str], position_dim: PositionDim) -> dict[str, int]:
    """Returns the sequence dimension of the value at each path.

    `position_dim` is that of all paths, or by path; it is required for models that do not take tokens.

    Raises:
        ExperimentError: A sequence dimension is unknown. The message has each reason once, with its paths.
    """
    places, root = targets(pg, paths), pg.nodes.root
    given = given_dims(pg, places, position_dim)

    def dim(path: str, target: Target) -> int:
        return target.kept_dims.index(sequence_dim(root, target, given.get(path))[0])

    found, problems = found_or_problems(places, dim)
    check_problems(problems)
    return found


def row_dims(pg: PatchableGraph, paths: Iterable[str], dims: Mapping[str, int], what: str) -> dict[str, int]:
    """Returns the batch dimension of the value at each path, whose sequence dimension `dims` has if it is known.

    Raises:
        ExperimentError: A batch dimension is unknown. The message begins with `what`, and has each reason once.
    """

    def dim(path: str, target: Target) -> int:
        sequence = dims.get(path)
        whole = None if sequence is None else target.kept_dims[sequence]
        return target.kept_dims.index(row_dimension(pg.nodes.root, target, whole))

    found, problems = found_or_problems(targets(pg, paths), dim)
    check_problems(problems, what)
    return found


_Found = TypeVar("_Found")


def found_or_problems(
    targets: Mapping[str, Target], find: Callable[[str, Target], _Found], *, has_repairs: bool = True
) -> tuple[dict[str, _Found], dict[str, str]]:
    """Returns by path what a function finds in a value, and the text of each `ValueError` that it raises.

    Without repairs, the text does not say how to patch the value instead.
    """
    problems: dict[str, str] = {}

    found: dict[str, _Found] = {}
    for path, target in targets.items():
        try:
            result = find(path, target)
        except ValueError as problem:
            problems[path] = str(problem)
            if isinstance(problem, PositionsError) and not has_repairs:
                problems[path] = problem.reason
            continue
        found[path] = result
    return found, problems


def given_dims(pg: PatchableGraph, paths: Iterable[str], position_dim: PositionDim) -> dict[str, int | None]:
    """Returns what the user said is the sequence dimension, by path."""
    if not isinstance(position_dim, Mapping):
        return dict.fromkeys(paths, position_dim)
    given = {path: dim for key, dim in position_dim.items() for path in targets(pg, [str(key)])}
    if others := given.keys() - set(paths):
        raise ExperimentError(f"position_dim has {min(others)!r}, whose positions are not asked for")
    return dict(given)


def check_is_used(position_dim: PositionDim, *, is_used: bool) -> None:
    """Raises an `ExperimentError` if a sequence dimension is given, but nothing has positions."""
    if position_dim is not None and not is_used:
        raise ExperimentError(f"position_dim={position_dim!r} has no effect without positions=...")


def check_problems(problems: Mapping[str, str], what: str = "the sequence dimension is unknown:") -> None:
    """Raises an `ExperimentError` with the problems of some paths, if there are any."""
    if problems:
        raise ExperimentError("\n  ".join([what, *by_problem(problems)]))


def by_problem(problems: Mapping[str, str]) -> list[str]:
    """Returns each problem once with its paths, the most common first."""
    paths: dict[str, list[str]] = {}
    for path, problem in problems.items():
        paths.setdefault(problem, []).append(path)
    lines = []
    for problem, found in sorted(paths.items(), key=lambda item: -len(item[1])):
        others = f" and {len(found) - 3} others" if len(found) > 3 else ""
        lines.append(f"{', '.join(map(repr, found[:3]))}{others}: {problem}")
    return lines


def counted_positions(given: Positions | RowPositions, length: int, whose: str) -> list[int]:
    """Returns the given positions in the given order, counted from the start of a sequence of some length.

    `True` and `None` are all positions. `whose` says what has that length, for the message.

    Example:
        >>> counted_positions([2, -1], 7, ""), counted_positions(slice(-2, None), 7, "")
        ([2, 6], [5, 6])
    """
    if given is None or given is True:
        return list(range(length))
    numbers = whole_numbers(given)
    if isinstance(numbers, slice):
        if chosen := range(length)[numbers]:
            return list(chosen)
        raise ExperimentError(f"positions={given!r} selects nothing: {whose}")
    if bad := [position for position in numbers if not -length <= position < length]:
        raise ExperimentError(f"position {bad[0]} is out of range: {whose}")
    counted = [position % length for position in numbers]
    if len(set(counted)) < len(counted):
        twice = next(position for position in counted if counted.count(position) > 1)
        asked = [number for number, position in zip(numbers, counted, strict=True) if position == twice]
        raise ExperimentError(
            f"positions has {twice} more than once ({', '.join(map(str, asked))}): {whose}, and -1 is the last of them"
        )
    return counted


def are_of_rows(given: Any) -> bool:
    """Whether positions are given for each row of the batch, with two dimensions.

    Example:
        >>> are_of_rows([[3], [5]]), are_of_rows([3, 5])
        (True, False)
    """
    if hasattr(given, "tolist"):
        return len(given.shape) == 2
    return isinstance(given, (list, tuple)) and any(
        isinstance(row, (list, tuple)) or len(getattr(row, "shape", ())) for row in given
    )


@dataclass(frozen=True)
class PositionCells:
    """The positions of an experiment, and where they are in its values.

    Attributes:
        labels: The positions, counted from the start; numbers of columns, if each row of the batch has its own.
        dims: The sequence dimension, by path.
        columns: For each column, the position in each row; empty if positions are the same for all rows.
        row_dims: The batch dimension, by path; empty likewise.
    """

    labels: list[int]
    dims: Mapping[str, int]
    columns: Sequence[Sequence[int]] = ()
    row_dims: Mapping[str, int] = field(default_factory=dict)

    def place(self, index: list[Any], path: str, label: int | list[int]) -> None:
        """Makes an index of the value at `path`, a list with an item for each dimension, one of positions."""
        if not self.columns:
            index[self.dims[path]] = label
            return
        index[self.dims[path]] = torch.tensor(self.columns)[label]
        index[self.row_dims[path]] = torch.arange(len(self.columns[0]))


def position_cells(
    pg: PatchableGraph, given: Positions | RowPositions, values: Mapping[str, Tensor], dims: Mapping[str, int]
) -> PositionCells:
    """Returns the given positions, of all rows of the batch or of each; `True` and `None` are all positions.

    The values, and their sequence dimensions, are given by path.
    """
    lengths = {path: values[path].shape[dim] for path, dim in dims.items()}
    first, length = next(iter(lengths.items()))
    for path, other in lengths.items():
        if other != length:
            raise ExperimentError(
                f"{path!r} has {other} positions, but {first!r} has {length}; give paths of one sequence at a time"
            )
    whose = f"{first!r} has {length} positions, shape {tuple(values[first].shape)}"
    if not are_of_rows(given):
        return PositionCells(counted_positions(given, length, whose), dims)
    rows = rows_of(given)
    batch_dims = row_dims(pg, dims, dims, "positions of each row cannot be used here:")
    for path, dim in batch_dims.items():
        shape = tuple(values[path].shape)
        if shape[dim] != len(rows):
            raise ExperimentError(f"positions has {len(rows)} rows, but {path!r} has {shape[dim]}, shape {shape}")
    columns = list(zip(*(counted_positions(row, length, whose) for row in rows), strict=True))
    return PositionCells(list(range(len(columns))), dims, columns, batch_dims)


def rows_of(given: Any) -> list[list[int]]:
    """Returns the positions of each row of the batch, as Python integers."""
    rows = [row for row in map(whole_numbers, given) if not isinstance(row, slice)]
    if len(rows) < len(given) or len({len(row) for row in rows}) > 1:
        raise ExperimentError(f"positions must have as many numbers for each row of the batch, not {given!r}")
    return rows


def counts_from_end(given: Positions | RowPositions) -> bool:
    """Whether positions count from the end of the sequence."""
    if given is None or given is True:
        return False
    numbers = whole_numbers(given)
    parts = (numbers.start, numbers.stop) if isinstance(numbers, slice) else numbers
    return any(part is not None and part < 0 for part in parts)


def whole_numbers(given: Any) -> list[int] | slice:
    """Returns positions as Python integers; a slice is returned unchanged."""
    if isinstance(given, slice):
        parts = (given.start, given.stop, given.step)
        if any(part is not None and type(part) is not int for part in parts) or given.step == 0:
            raise ExperimentError(f"positions must be integers, or True for all, not {given!r}")
        return given
    listed = given.tolist() if hasattr(given, "tolist") else given
    several = [listed] if isinstance(listed, int) else listed
    try:
        if not isinstance(listed, bool):
            if numbers := [operator.index(number) for number in several]:
                return numbers
            raise ExperimentError("positions is empty; give at least one, or True for all")
    except TypeError:
        pass
    raise ExperimentError(f"positions must be integers, or True for all, not {given!r}")
