"""The cells of a sweep: one patch map for each combination of the values of the axes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from graphpatch_notebook.checks.model_state import version_of
from graphpatch_notebook.errors import ExperimentError, add_note
from graphpatch_notebook.experiments.measurements import Measurement
from graphpatch_notebook.patches import Patch

PatchMap: TypeAlias = "Mapping[Any, Patch[Any] | Sequence[Patch[Any]]]"


@dataclass(frozen=True)
class Cell:
    """One intervention of a sweep.

    Attributes:
        number: Where it stands in the sweep, counted from zero, the last axis fastest.
        labels: The value of each axis.
        patches: Its patch map.
    """

    number: int
    labels: Mapping[str, Any]
    patches: PatchMap

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.labels.items()) or "the only cell"


@dataclass(frozen=True)
class CellResult:
    """What came of one cell.

    Attributes:
        number: The number of the cell.
        measurement: What the metric gave; `None` for a cell that failed.
        error: Why it failed, in words.
    """

    number: int
    measurement: Measurement | None
    error: str | None = None


def axes_of(axes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the values of each axis, in order.

    Raises:
        ExperimentError: An axis has no values, or a name that none can have.
    """
    if not isinstance(axes, Mapping):
        raise ExperimentError(f'axes are a dict from names to values, {{"layer": paths}}, not {type(axes).__name__}')
    found: dict[str, list[Any]] = {}
    for name, values in axes.items():
        if isinstance(values, (str, bytes)):
            raise ExperimentError(f"the values of axis {name!r} must be several, in a list: [{values!r}]")
        try:
            found[str(name)] = list(values.tolist() if hasattr(values, "tolist") else values)
        except TypeError:
            raise ExperimentError(f"the values of axis {name!r} must be several, not {values!r}") from None
        if not found[str(name)]:
            raise ExperimentError(f"axis {name!r} has no values")
    return found


def cells_of(axes: Mapping[str, Sequence[Any]], make_patches: Callable[..., PatchMap]) -> list[Cell]:
    """Returns the cells, with their patch maps made.

    Raises:
        ExperimentError: `make_patches` gave no patch map.
        Exception: Whatever `make_patches` raises, with a note that names the cell.
    """
    cells: list[Cell] = []
    marks: list[tuple[Cell, Any, Tensor, int]] = []
    for number, values in enumerate(itertools.product(*axes.values())):
        labels = dict(zip(axes, values, strict=True))
        try:
            patches = make_patches(*values)
        except Exception as error:
            add_note(error, f"raised by make_patches for {Cell(number, labels, {})}")
            raise
        cell = Cell(number, labels, patches)
        if not isinstance(patches, Mapping):
            raise ExperimentError(f"make_patches gave {type(patches).__name__} for {cell}; give a patch map, a dict")
        # A copy: the user may fill one dict anew for each cell.
        cells.append(Cell(number, labels, {path: _copied(given) for path, given in patches.items()}))
        marks += [(cells[-1], path, *mark) for path, given in cells[-1].patches.items() for mark in _marks(given)]
    for cell, path, tensor, version in marks:
        if version_of(tensor) != version:
            raise ExperimentError(
                f"the value of the patch on {str(path)!r} for {cell} was written into while make_patches made those of "
                "later cells: all are made before anything runs; give each a tensor of its own: value.clone()"
            )
    return cells


def _copied(given: Any) -> Any:
    return list(given) if isinstance(given, list) else given


def _marks(given: Any) -> list[tuple[Tensor, int]]:
    patches = given if isinstance(given, (list, tuple)) else [given]
    values = [getattr(patch, "value", None) for patch in patches]
    return [(value, version_of(value)) for value in values if isinstance(value, Tensor)]
