"""The cells of a sweep: one patch map for each combination of the values of the axes."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from graphpatch_notebook.errors import ExperimentError, add_note
from graphpatch_notebook.experiments.engine.measurements import Measurement
from graphpatch_notebook.patches.kinds import Patch

PatchMap: TypeAlias = "Mapping[Any, Patch[Any] | Sequence[Patch[Any]]]"


@dataclass(frozen=True)
class Cell:
    """One combination of the values of the axes, with its patches.

    Attributes:
        number: Its position in the sweep, counted from zero, the last axis fastest.
        labels: The value of each axis.
        patches: Its patch map; empty until it is made.
    """

    number: int
    labels: Mapping[str, Any]
    patches: PatchMap

    @property
    def content(self) -> PatchMap:
        """The patch map for another process: with paths as text."""
        return {str(path): patch for path, patch in self.patches.items()}

    @property
    def name(self) -> str:
        """The name of its patch map in messages."""
        return f"the patch map of {self}"

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.labels.items()) or "the only cell"


def patches_in(patch_map: PatchMap) -> list[Any]:
    """Returns the patches of a patch map, whatever they are on."""
    given = patch_map.values()
    return [patch for one in given for patch in (one if isinstance(one, (list, tuple)) else [one])]


@dataclass(frozen=True)
class CellResult:
    """The result of one cell.

    Attributes:
        number: The number of the cell.
        measurement: The metric; `None` for a cell that failed.
        error: The message of its error, if it failed.
        has_changed_state: Whether its patches changed what they refer to, which cells that run elsewhere, or after a
            restart, do not have.
    """

    number: int
    measurement: Measurement | None
    error: str | None = None
    has_changed_state: bool = False


def axes_of(axes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the values of each axis, in order.

    Raises:
        ExperimentError: The axes are not a dict, or an axis does not have a list of values.
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


def _check_order(axes: Mapping[str, Any], make_patches: Callable[..., PatchMap]) -> None:
    """Checks that no axis has the name of another argument than the one that it is given as.

    Raises:
        ExperimentError: The axes are in another order than the arguments.
    """
    try:
        parameters = inspect.signature(make_patches).parameters.values()
    except (TypeError, ValueError):  # not a Python function
        return
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    for axis, name in zip(axes, names, strict=False):
        if axis != name and axis in names:
            raise ExperimentError(
                f"make_patches is given the values of the axes in order, so its argument {name!r} would be a value of "
                f"{axis!r}: the axes are {', '.join(axes)}, and the arguments {', '.join(names)}; put both in one order"
            )


class Cells:
    """The cells of a sweep. Their patch maps are made in order, each once.

    Args:
        axes: The values of each axis.
        make_patches: Maps one value of each axis to a patch map.

    Attributes:
        make_patches: What makes their patch maps.
        unmade: The cells without their patch maps.
    """

    def __init__(self, axes: Mapping[str, Sequence[Any]], make_patches: Callable[..., PatchMap]) -> None:
        _check_order(axes, make_patches)
        self.make_patches = make_patches
        combinations = enumerate(itertools.product(*axes.values()))
        self.unmade = [Cell(number, dict(zip(axes, values, strict=True)), {}) for number, values in combinations]

    def made(self, number: int) -> PatchMap:
        """Returns the patch map of a cell, as `make_patches` returns it.

        Raises:
            ExperimentError: `make_patches` did not return a dict.
            Exception: Raised by `make_patches`; a note that names the cell is added.
        """
        cell = self.unmade[number]
        try:
            patches = self.make_patches(*cell.labels.values())
        except Exception as error:
            add_note(error, f"raised by make_patches for {cell}")
            raise
        if not isinstance(patches, Mapping):
            raise ExperimentError(f"make_patches gave {type(patches).__name__} for {cell}; give a patch map, a dict")
        return patches
