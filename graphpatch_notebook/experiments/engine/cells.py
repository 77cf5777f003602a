"""The cells of a sweep: one patch map for each combination of the values of the axes."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.capture.modules import plain_tensors
from graphpatch_notebook.errors import ExperimentError, add_note
from graphpatch_notebook.patches.kinds import CustomPatch, Patch, declares
from graphpatch_notebook.patching import Entry

PatchMap: TypeAlias = "Mapping[Any, Patch[Any] | Sequence[Patch[Any]]]"


@dataclass(frozen=True)
class Cell:
    """One combination of the values of the axes, with its patches.

    Attributes:
        number: Its position in the sweep, counted from zero, the last axis fastest.
        labels: The value of each axis.
        patches: Its patch map; empty until it is made.
        entries: What the patch map means on the graph, if it was looked up.
    """

    number: int
    labels: Mapping[str, Any]
    patches: PatchMap
    entries: list[Entry] | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.labels.items()) or "the only cell"


@dataclass(frozen=True)
class CellResult:
    """The result of one cell.

    Attributes:
        number: The number of the cell.
        measurement: The metric; `None` for a cell that failed.
        error: The message of its error, if it failed.
    """

    number: int
    measurement: Measurement | None
    error: str | None = None


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


class Cells(Sequence[Cell]):
    """The cells of a sweep. Each time that one is read, its patch map is made.

    Args:
        axes: The values of each axis.
        make_patches: Maps one value of each axis to a patch map.

    Attributes:
        unmade: The cells without their patch maps.
    """

    def __init__(self, axes: Mapping[str, Sequence[Any]], make_patches: Callable[..., PatchMap]) -> None:
        _check_order(axes, make_patches)
        self._make_patches = make_patches
        combinations = enumerate(itertools.product(*axes.values()))
        self.unmade = [Cell(number, dict(zip(axes, values, strict=True)), {}) for number, values in combinations]

    def __len__(self) -> int:
        return len(self.unmade)

    def __iter__(self) -> Iterator[Cell]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: Any) -> Any:
        """Returns the cell of that number.

        Raises:
            ExperimentError: `make_patches` did not return a dict.
            Exception: Raised by `make_patches`; a note that names the cell is added.
        """
        cell = self.unmade[number]
        try:
            patches = self._make_patches(*cell.labels.values())
        except Exception as error:
            add_note(error, f"raised by make_patches for {cell}")
            raise
        if not isinstance(patches, Mapping):
            raise ExperimentError(f"make_patches gave {type(patches).__name__} for {cell}; give a patch map, a dict")
        return replace(cell, patches=patches)


# -- patch maps that may share work ------------------------------------------------------------------------------------


def patches_in(patch_map: PatchMap) -> list[Any]:
    """Returns the patches of a patch map, whatever they are on."""
    given = patch_map.values()
    return [patch for one in given for patch in (one if isinstance(one, (list, tuple)) else [one])]


def is_pure(patch_map: PatchMap) -> bool:
    """Whether all patches declare that their effect depends on the value and their fields alone.

    Example:
        >>> from graphpatch_notebook import ZeroPatch
        >>> is_pure({"output": ZeroPatch(slice=0)}), is_pure({"output": CustomPatch(custom_op=abs)})
        (True, False)
    """
    return all(
        patch.by_row if type(patch) is CustomPatch else declares(patch, "is_pure") and "op" not in vars(patch)
        for patch in patches_in(patch_map)
    )


class PatchCopies:
    """Copies patch maps, since people reuse patches, tensors and masks. Equal large tensors are copied once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Tensor] = {}

    def of(self, cell: Cell) -> Cell:
        """Returns a cell with a copy of its patch map, in which patches that are not pure are the same objects.

        Example:
            >>> from graphpatch_notebook import AddPatch
            >>> value = torch.ones(2)
            >>> cell = PatchCopies().of(Cell(0, {}, {"output": AddPatch(value=value)}))
            >>> _ = value.zero_()
            >>> cell.patches["output"].value
            tensor([1., 1.])
        """
        known: dict[int, Any] = {}  # what is not to be copied, or is copied already, by id
        for patch in patches_in(cell.patches):
            inside = [] if is_pure({"": patch}) else [patch]  # such as a probe, which the user reads
            inside += filter(callable, vars(patch).values())
            known |= {id(each): each for each in inside}
            known |= {id(each): self._tensor(each) for each in plain_tensors(vars(patch))}
        return replace(
            cell, patches={str(path): copy.deepcopy(patches, known) for path, patches in cell.patches.items()}
        )

    def _tensor(self, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False):
            # The address is only a key: a copy is shared if the contents are equal now.
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            known = self._known.get(key)
            if known is None or not torch.equal(known, tensor.detach()):
                known = self._known[key] = tensor.detach().clone()
            return known


# -- the results of cells ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """The numbers that a metric returned.

    Attributes:
        values: The numbers as float64 (which holds float32 exactly); a 0-dimensional array for a single number, and
            of shape `(names,)` for a dict.
        names: The keys, if the metric returned a dict.
    """

    values: np.ndarray[Any, np.dtype[np.float64]]
    names: tuple[str, ...] | None = None

    @property
    def form(self) -> tuple[Any, ...]:
        """The shape and the names, which are the same for all measurements of a sweep."""
        return (self.values.shape, self.names)

    def is_close(self, other: Measurement | None, relative: float, absolute: float) -> bool:
        """Whether both are equal, but for errors relative to their numbers, or absolute."""
        if other is None or self.form != other.form:
            return False
        if (self.values == other.values).all():  # a faster check for nearly all
            return True
        return bool(np.allclose(self.values, other.values, rtol=relative, atol=absolute, equal_nan=True))

    def to_json(self) -> Any:
        """Returns JSON data from which `from_json` restores the measurement exactly."""
        # As text: JSON has neither NaN nor infinity, and NaN does not equal itself.
        return {"values": json.dumps(self.values.tolist()), "names": None if self.names is None else list(self.names)}

    @classmethod
    def from_json(cls, data: Any) -> Measurement:
        """Returns the measurement that `to_json` wrote."""
        names = None if data["names"] is None else tuple(map(str, data["names"]))
        values = np.array(json.loads(data["values"]), dtype=np.float64)
        if names is not None and values.shape != (len(names),):
            raise ValueError(f"{values.size} numbers have {len(names)} names")
        return cls(values, names)


def measurement(value: Any) -> Measurement:
    """Converts the result of a metric to a `Measurement`.

    Args:
        value: A number, a tensor or an array of any shape, or a dict from names to single numbers.

    Raises:
        ExperimentError: The value has another type.

    Example:
        >>> measurement({"a": 1, "b": 2.5})
        Measurement(values=array([1. , 2.5]), names=('a', 'b'))
    """
    if isinstance(value, Tensor) or not isinstance(value, Mapping):
        return Measurement(_array(value))
    numbers = {str(name): _array(item) for name, item in value.items() if not isinstance(item, Mapping)}
    wrong = [name for name in map(str, value) if name not in numbers or numbers[name].ndim]
    if wrong or not numbers:
        names = ", ".join(map(repr, wrong))
        given = f"a {type(value).__name__} in which {names} is not one number" if wrong else "an empty dict"
        raise ExperimentError(
            f"the metric gave {given}: it must give a number, a tensor, or a dict of numbers by name, made from the "
            "output of the model: lambda output: output.loss"
        )
    return Measurement(np.stack([*numbers.values()]), tuple(numbers))


def baseline_of(metric: Callable[[Any], Any], output: Any) -> Measurement:
    """Returns the metric of the output of a run without patches."""
    with noted_metric(output):
        return measurement(metric(output))


@contextmanager
def noted_metric(output: Any) -> Iterator[None]:
    """Adds a note about `output`, the output without patches, to an error that the metric raises."""
    try:
        yield
    except Exception as error:
        add_note(
            error,
            f"raised by the metric for what the model returned without patches, a {type(output).__name__}: metrics are "
            "given the whole output (the logits of a language model are output.logits)",
        )
        raise


def _array(value: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    if isinstance(value, Tensor):
        if value.is_complex():
            raise ExperimentError("a metric gave complex numbers; take .real, .abs() or .angle() of them")
        return np.array(value.detach().to("cpu").double().numpy())
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        found = np.array(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise ExperimentError(
            f"a metric must give a number, a tensor or a dict of numbers by name, not {type(value).__name__}"
        ) from None
    if any(each is None for each in np.array(value, dtype=object).flat):  # numpy converts it to NaN
        raise ExperimentError(f"the metric returned {value!r}, which has a None: is a return statement missing?")
    return found
