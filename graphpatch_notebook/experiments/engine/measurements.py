"""Converts the result of a metric to float64 numbers that can be stored as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError, add_note


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

    def is_close(self, other: Measurement) -> bool:
        """Whether both are equal up to rounding errors."""
        if self.form != other.form:
            return False
        finite = np.abs(other.values[np.isfinite(other.values)])
        scale = float(finite.max()) if finite.size else 0.0
        return bool(np.allclose(self.values, other.values, rtol=1e-4, atol=1e-4 * scale, equal_nan=True))

    def to_json(self) -> Any:
        """Returns JSON data from which `from_json` restores the measurement exactly."""
        return {"values": _listed(self.values.tolist()), "names": None if self.names is None else list(self.names)}

    @classmethod
    def from_json(cls, data: Any) -> Measurement:
        """Returns the measurement that `to_json` wrote."""
        names = None if data["names"] is None else tuple(data["names"])
        return cls(np.array(_unlisted(data["values"]), dtype=np.float64), names)


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
        if value.dim() == 0:
            return np.array(value.item(), dtype=np.float64)
        return np.array(value.detach().to("cpu").double().numpy())
    if _has_none(value):  # numpy would convert it to NaN
        raise ExperimentError(
            "the metric returned None: is a return statement missing?"
            if value is None
            else f"the metric returned {value!r}, which contains None"
        )
    try:
        if not isinstance(value, (str, bytes)):
            return np.array(value, dtype=np.float64)
        raise TypeError
    except (TypeError, ValueError):
        raise ExperimentError(
            f"a metric must give a number, a tensor or a dict of numbers by name, not {type(value).__name__}"
        ) from None


def _has_none(value: Any) -> bool:
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    return value is None or (isinstance(value, (list, tuple)) and any(map(_has_none, value)))


def _listed(value: Any) -> Any:
    # JSON has neither NaN nor infinity.
    if isinstance(value, list):
        return [_listed(item) for item in value]
    return value if math.isfinite(value) else str(value)


def _unlisted(value: Any) -> Any:
    if isinstance(value, list):
        return [_unlisted(item) for item in value]
    return float(value)
