"""What heatmaps draw: the numbers of a result, its labels, and what the colors mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.experiments.plotting.labels import are_paths, path_labels

if TYPE_CHECKING:
    from xarray import DataArray


FloatArray: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

_POSITIONS = ("position", "token", "pos")
_DIFFERENCES = ("gradient", "integrated", "relp", "secant", "attribution")
"""Methods of `attribute`, which return differences. `"attribution"` was the name of `"gradient"` in older results."""


@dataclass(frozen=True)
class Center:
    """The number without color, and its name; without a name for zero."""

    value: float
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.value:.4g}".strip()


@dataclass(frozen=True)
class Scale:
    """The color scale of numbers.

    Attributes:
        name: The name of the numbers.
        center: The number without color; `None` if colors go from the minimum to the maximum.
        limits: The numbers of the first and the last color.
        missing: Why some cells have no number; `None` if all have one.
    """

    name: str
    center: Center | None
    limits: tuple[float, float]
    missing: str | None


@dataclass(frozen=True)
class Side:
    """The rows or the columns of a grid.

    Attributes:
        name: The name of the dimension; `title` is what is shown.
        values: Its coordinates: node paths, numbers, texts.
        labels: The label of each row or column.
        is_tokens: Whether the labels are texts of tokens, which may contain any character.
    """

    name: str
    values: tuple[Any, ...]
    labels: tuple[str, ...]
    title: str
    is_tokens: bool = False


@dataclass(frozen=True)
class Grid:
    """A result with two dimensions.

    Attributes:
        values: Of shape (rows, columns), float64; NaN for numbers that are not finite.
    """

    values: FloatArray
    rows: Side
    columns: Side
    scale: Scale

    @property
    def is_missing(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which cells have no number, of shape (rows, columns)."""
        return np.isnan(self.values)

    def is_upward(self, origin: str | None) -> bool:
        """Whether the first row is the lowest: by default, for layers, and not for tokens."""
        if origin not in (None, "lower", "upper"):
            raise ExperimentError(f"origin={origin!r} must be 'lower' or 'upper'")
        return (not self.rows.is_tokens and self.rows.name not in _POSITIONS) if origin is None else origin == "lower"


@dataclass(frozen=True)
class DisplayOptions:
    """How the numbers of a result are shown.

    Attributes:
        center: The number without color; `"auto"` for the baseline of the result; `None` for none.
        limits: The numbers of the first and the last color.
        labels: Titles of dimensions, and of the numbers under the name of the result.
        relative_to: A number to subtract, or the name of an attribute of the result.
    """

    center: float | str | None = "auto"
    limits: tuple[float, float] | None = None
    labels: Mapping[str, str] | None = None
    relative_to: str | float | None = None

    def label(self, name: str, otherwise: str) -> str:
        """Returns the title of a dimension or of the numbers."""
        return (self.labels or {}).get(name, otherwise)


def grid_of(
    result: Any, options: DisplayOptions, *, tokens: Sequence[str] | None = None, rows: str | None = None
) -> Grid:
    """Returns a result with two dimensions as a grid.

    The texts of the tokens are one for each position of the result, or those of the whole sequence. `rows` is the
    vertical dimension; by default, the first.
    """
    array = checked(result, 2)
    if rows is not None:
        check_dimension(array, rows, "rows")
        array = array.transpose(rows, ...)
    values, scale = numbers_of(array, options)
    down, across = sides_of(array, tokens, options)
    return Grid(values, down, across, scale)


def checked(result: Any, dimensions: int) -> DataArray:
    """Returns the result, if it has this number of dimensions and real numbers."""
    extra("xarray", "a plot")
    from xarray import DataArray

    if not isinstance(result, DataArray):
        raise ExperimentError(f"expected an xarray.DataArray, not {type(result).__name__}")
    if result.ndim != dimensions or not result.size:
        raise ExperimentError(
            f"this plot needs {dimensions} dimensions, not empty; the result has {dict(result.sizes)}: use result.sel, "
            "result.mean, or for one dimension plot_scores(result), for three plot_heads(result, facet=...)"
        )
    if result.dtype.kind not in "biuf":
        raise ExperimentError(f"the result has dtype {result.dtype}, not real numbers; use result.astype(float)")
    return result


def check_dimension(array: DataArray, name: str, argument: str) -> None:
    """Raises an `ExperimentError` if the result does not have this dimension."""
    if name not in array.dims:
        raise ExperimentError(
            f"{argument}={name!r} is not a dimension of the result: {', '.join(map(str, array.dims))}"
        )


# -- numbers and colors ------------------------------------------------------------------------------------------------


def numbers_of(array: DataArray, options: DisplayOptions) -> tuple[FloatArray, Scale]:
    """Returns the numbers to show, and their color scale."""
    name = str(array.name) if array.name is not None else "value"
    if "metric" in array.coords and "metric" not in array.dims:  # one of several was selected
        picked = str(array.coords["metric"].item())
        name = picked if name == "<lambda>" else f"{name} {picked}"
    metric = array.attrs.get("metric")
    shown = options.label(name, f"{name} ({metric})" if isinstance(metric, str) and metric != name else name)
    values = np.where(np.isfinite(array.values), array.values, np.nan).astype(np.float64)
    center = _center(array, options.center)
    if options.relative_to is not None:
        base = _base(array, options.relative_to)
        values = values - base.value
        shown = f"{shown} \N{MINUS SIGN} {base}"
        center = Center(0.0) if options.center == "auto" else center
    return values, Scale(shown, center, _limits(values, center, options.limits), _reason_for_missing(array, values))


def _limits(values: Any, center: Center | None, given: tuple[float, float] | None) -> tuple[float, float]:
    """Returns the numbers of the first and the last color, symmetric around the center if there is one."""
    finite = values[np.isfinite(values)]
    low, high = map(float, given or ((finite.min(), finite.max()) if len(finite) else (0.0, 0.0)))
    if given is not None and not 0 < high - low < math.inf:
        raise ExperimentError(f"limits={given!r} must be two finite numbers, the smaller one first")
    if center is not None:
        reach = max(abs(low - center.value), abs(high - center.value))
        low, high = center.value - reach, center.value + reach
    margin = (abs(low) * 0.1 or 1.0) if low == high else 0.0
    return low - margin, high + margin


def _reason_for_missing(array: DataArray, values: Any) -> str | None:
    count = int(np.isnan(values).sum())
    if count and len(array.attrs.get("errors", ())) == count:
        return "failed"
    return ("no finite value" if np.isinf(array.values).any() else "no value") if count else None


def _center(array: DataArray, center: float | str | None) -> Center | None:
    """Returns the number without color: `center`, or the one of the result for `"auto"`."""
    if center is None:
        return None
    if center != "auto":
        if isinstance(center, str) or not math.isfinite(center):
            raise ExperimentError(f"center={center!r} must be a finite number, None (no center), or 'auto'")
        return Center(float(center))
    value = None if array.attrs.get("method") in _DIFFERENCES else _attribute(array, "baseline")
    if value is not None:
        return Center(value, "corrupted" if "corrupted" in array.attrs else "baseline")
    finite = array.values[np.isfinite(array.values)]
    is_around_zero = len(finite) and finite.min() < 0 < finite.max()
    return Center(0.0) if is_around_zero or array.attrs.get("method") in _DIFFERENCES else None


def _base(array: DataArray, relative_to: str | float) -> Center:
    """Returns the number to subtract, which may be an attribute of the result."""
    if not isinstance(relative_to, str):
        return Center(float(relative_to))
    ends = [array.attrs.get(name) for name in ("corrupted", "baseline")]
    is_normalized = relative_to in ("clean", "corrupted") and None not in ends and ends[0] != ends[1]
    if is_normalized or array.attrs.get("method") in _DIFFERENCES:
        raise ExperimentError(f"relative_to={relative_to!r}: the result is normalized, or of differences, already")
    value = _attribute(array, relative_to)
    if value is None:
        known = [name for name in array.attrs if _attribute(array, str(name)) is not None]
        raise ExperimentError(
            f"relative_to={relative_to!r} is not an attribute of the result with one number (these are: {known}); of "
            "several metrics, select one first, result.sel(metric=...)"
        )
    return Center(value, relative_to)


def _attribute(array: DataArray, name: str) -> float | None:
    """Returns an attribute that is a number; if it has one for each metric, that of the selected metric."""
    value: Any = array.attrs.get(name)
    names = array.attrs.get("metrics")
    if names is not None and np.ndim(value) == 1 and "metric" in array.coords and "metric" not in array.dims:
        value = dict(zip(names, np.asarray(value).tolist(), strict=False)).get(str(array.coords["metric"].item()))
    is_number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


# -- rows and columns --------------------------------------------------------------------------------------------------


def sides_of(array: DataArray, tokens: Sequence[str] | None, options: DisplayOptions) -> list[Side]:
    """Returns the rows and columns; raises an `ExperimentError` if the tokens do not fit any dimension."""
    place, texts = _token_texts(array, tokens) if tokens is not None else (None, None)
    return [_side(array, str(name), texts if name == place else None, options) for name in array.dims]


def _side(array: DataArray, name: str, tokens: tuple[str, ...] | None, options: DisplayOptions) -> Side:
    title = options.label(name, name)
    values = _coordinates(array, name)
    if tokens is not None:
        return Side(name, values, tokens, title, is_tokens=True)
    if not all(isinstance(value, str) for value in values):
        texts = (f"{value:.6g}" if isinstance(value, float) else str(value) for value in values)
        return Side(name, values, tuple(texts), title)
    if not are_paths(values):
        return Side(name, values, values, title, is_tokens=name in _POSITIONS)
    labels, common = path_labels(values)
    return Side(name, values, labels, f"{name}: {common}" if common and title == name else title)


def _coordinates(array: DataArray, name: str) -> tuple[Any, ...]:
    return tuple(array.coords[name].values.tolist() if name in array.coords else range(array.sizes[name]))


def _token_texts(array: DataArray, tokens: Any) -> tuple[str, tuple[str, ...]]:
    """Returns the dimension of tokens, and the text of each of its coordinates."""
    if not isinstance(tokens, Sequence) or not all(isinstance(token, str) for token in tokens):
        raise ExperimentError("tokens must be a list of texts, one for each position; decode token ids first")
    texts = tuple(tokens)
    known = [str(name) for name in array.dims if name in _POSITIONS]
    fitting = [str(name) for name in array.dims if len(texts) == array.sizes[name]]
    name = (known or fitting[::-1] or [str(array.dims[-1])])[0]
    positions = _coordinates(array, name)
    if all(type(place) is int and -len(texts) <= place < len(texts) for place in positions):
        return name, tuple(texts[place] for place in positions)  # texts of the whole sequence
    if len(texts) != len(positions):
        raise ExperimentError(f"{len(texts)} tokens do not fit the result, which has {len(positions)} along {name!r}")
    return name, texts
