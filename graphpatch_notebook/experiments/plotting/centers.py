"""The number that has no colour in a picture, and what numbers are seen relative to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpatch_notebook.errors import ExperimentError

if TYPE_CHECKING:
    from xarray import DataArray

_ZERO_CENTRED = ("attribution", "integrated")
"""Methods of `attribute`, whose scores are differences."""


@dataclass(frozen=True)
class Center:
    """The number that has no colour.

    Attributes:
        value: The number.
        name: What it is the number of; empty for zero.
    """

    value: float
    name: str = ""

    def __str__(self) -> str:
        number = f"{self.value:.4g}"
        return f"{self.name} {number}" if self.name else number


def center_of(array: DataArray, center: float | str | None) -> Center | None:
    """Returns the number that has no colour.

    Raises:
        ExperimentError: It is neither a finite number, `None`, nor `"auto"`.
    """
    if center is None:
        return None
    if isinstance(center, str):
        if center != "auto":
            raise ExperimentError(f"center={center!r} must be a number, None (no centre), or 'auto'")
        return _found_center(array)
    if not math.isfinite(center):
        raise ExperimentError(f"center={center!r} must be finite")
    return Center(float(center))


def _found_center(array: DataArray) -> Center | None:
    attrs = array.attrs
    if attrs.get("method") in _ZERO_CENTRED:
        return Center(0.0)
    value = _attribute(array, "baseline")
    if value is not None:
        return Center(value, "corrupted" if "corrupted" in attrs else "baseline")
    finite = array.values[np.isfinite(array.values)]
    return Center(0.0) if len(finite) and finite.min() < 0 < finite.max() else None


def base_of(array: DataArray, relative_to: str | float) -> Center:
    """Returns what is to be taken off all numbers.

    Raises:
        ExperimentError: It is the name of no attribute that is a number.
    """
    if not isinstance(relative_to, str):
        return Center(float(relative_to))
    if array.attrs.get("method") in _ZERO_CENTRED:
        raise ExperimentError(f"relative_to={relative_to!r}: attribution scores are differences already")
    ends = [array.attrs.get(name) for name in ("corrupted", "baseline")]
    if relative_to in ("clean", "corrupted") and None not in ends and ends[0] != ends[1]:
        words = "0 is the corrupted run, 1 the clean one"
        raise ExperimentError(f"relative_to={relative_to!r}: the result is normalized already: {words}")
    value = _attribute(array, relative_to)
    if value is None:
        raise ExperimentError(f"relative_to={relative_to!r} {_repair(array, relative_to)}")
    return Center(value, relative_to)


def _attribute(array: DataArray, name: str) -> float | None:
    """Returns the number that an attribute is; of one with several by metric, that of the metric that was picked."""
    value: Any = array.attrs.get(name)
    names = array.attrs.get("metrics")
    if names is None or np.ndim(value) != 1 or "metric" not in array.coords or "metric" in array.dims:
        return _number(value)
    numbers = dict(zip(names, np.asarray(value).tolist(), strict=False))
    return _number(numbers.get(str(array.coords["metric"].item())))


def _repair(array: DataArray, name: str) -> str:
    value: Any = array.attrs.get(name)
    if np.ndim(value) and np.asarray(value).dtype.kind in "if":
        if "metrics" in array.attrs:
            picks = f"pick a metric before, result.sel(metric={array.attrs['metrics'][0]!r})"
        else:
            picks = f"give one of them: relative_to={np.asarray(value).ravel()[0]:.4g}"
        return f"is {np.size(value)} numbers, one for each number of the metric: {picks}"
    known = [repr(other) for other in array.attrs if _attribute(array, str(other)) is not None]
    others = f"it has {', '.join(known)}" if known else "it has none; give a number"
    return f"is no number among the attributes of the result: {others}"


def _number(value: Any) -> float | None:
    if isinstance(value, (bool, str)) or np.ndim(value) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
