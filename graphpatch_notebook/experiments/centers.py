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
    value = _number(attrs.get("baseline"))
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
    value = _number(array.attrs.get(relative_to))
    if value is None:
        known = [repr(name) for name, value in array.attrs.items() if _number(value) is not None]
        other = f"it has {', '.join(known)}" if known else "it has none; give a number"
        raise ExperimentError(f"relative_to={relative_to!r} is no number among the attributes of the result: {other}")
    return Center(value, relative_to)


def _number(value: Any) -> float | None:
    if isinstance(value, (bool, str)) or np.ndim(value) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
