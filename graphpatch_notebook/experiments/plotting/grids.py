"""The grid of numbers, labels and colors that heatmaps draw."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.experiments.plotting.labels import WHOLE, are_paths, path_labels

if TYPE_CHECKING:
    from xarray import DataArray


FloatArray: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

IN_FULL = f" ({WHOLE} in full)"
"""Appended to a title if some paths are written in full."""
_POSITIONS = ("position", "token", "pos")


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
    result: Any,
    options: DisplayOptions,
    *,
    tokens: Sequence[str] | None = None,
    rows: str | None = None,
    instead: str = "",
) -> Grid:
    """Returns a result with two dimensions as a grid.

    The texts of the tokens are one for each position of the result, or those of the whole sequence. `rows` is the
    vertical dimension; by default, the first. `instead` is a function for other results, for the message.
    """
    array = checked(result, 2, instead)
    if rows is not None:
        array = array.transpose(dimension(array, rows, "rows"), ...)
    values, scale = numbers_of(array, options)
    down, across = sides_of(array, tokens, options)
    return Grid(values, down, across, scale)


def facets_of(
    array: DataArray, options: DisplayOptions, facet: str, tokens: Sequence[str] | None
) -> tuple[list[Grid], Side]:
    """Returns a grid of heads for each coordinate of a third dimension, with one color scale, and that dimension."""
    dimension(array, facet, "facet")
    if facet == "head":
        raise ExperimentError("facet='head' leaves no heads for the columns; give another dimension")
    array = array.transpose(facet, ..., "head")
    values, scale = numbers_of(array, options)
    side, rows, columns = sides_of(array, tokens, options)
    return [Grid(part, rows, columns, scale) for part in values], side


def is_upward(grid: Grid, origin: str | None) -> bool:
    """Whether the first row is the lowest: by default, for layers, and not for tokens."""
    if origin is None:
        return not grid.rows.is_tokens and grid.rows.name not in _POSITIONS
    if origin in ("lower", "upper"):
        return origin == "lower"
    raise ExperimentError(f"origin={origin!r} must be 'lower' or 'upper'")


def numbers_of(array: DataArray, options: DisplayOptions) -> tuple[FloatArray, Scale]:
    """Returns the numbers to show, and their color scale."""
    name = str(array.name) if array.name is not None else "value"
    if "metric" in array.coords and "metric" not in array.dims:  # one of several was selected
        picked = str(array.coords["metric"].item())
        name = picked if name == "<lambda>" else f"{name} {picked}"
    metric = array.attrs.get("metric")
    shown = options.label(name, f"{name} ({metric})" if isinstance(metric, str) and metric != name else name)
    values = np.where(np.isfinite(array.values), array.values, np.nan).astype(np.float64)
    center = center_of(array, options.center)
    if options.relative_to is not None:
        base = base_of(array, options.relative_to)
        values = values - base.value
        shown = f"{shown} \N{MINUS SIGN} {base}"
        if options.center == "auto":
            center = Center(0.0)
    return values, Scale(shown, center, _limits(values, center, options.limits), _missing_words(array, values))


def _limits(values: Any, center: Center | None, given: tuple[float, float] | None) -> tuple[float, float]:
    """Returns the numbers of the first and the last color, symmetric around the center if there is one."""
    finite = values[np.isfinite(values)]
    if given is not None:
        low, high = map(float, given)
        if not low < high or not math.isfinite(high - low):
            raise ExperimentError(f"limits={given!r} must be two finite numbers, the smaller one first")
    elif len(finite):
        low, high = float(finite.min()), float(finite.max())
    else:
        low = high = center.value if center is not None else 0.0
    if center is not None:
        reach = max(abs(low - center.value), abs(high - center.value))
        low, high = center.value - reach, center.value + reach
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        return low - margin, high + margin
    return low, high


def _missing_words(array: DataArray, values: Any) -> str | None:
    count = int(np.isnan(values).sum())
    if not count:
        return None
    errors = array.attrs.get("errors")
    if isinstance(errors, (list, tuple)) and len(errors) == count:
        return "failed"
    return "no finite value" if np.isinf(array.values).any() else "no value"


def sides_of(array: DataArray, tokens: Sequence[str] | None, options: DisplayOptions) -> list[Side]:
    """Returns the rows and columns; raises an `ExperimentError` if the tokens do not fit any dimension."""
    place, texts = _token_texts(array, tokens) if tokens is not None else (None, None)
    return [_side(array, str(name), texts if name == place else None, options) for name in array.dims]


def _side(array: DataArray, name: str, tokens: tuple[str, ...] | None, options: DisplayOptions) -> Side:
    title = options.label(name, name)
    values = tuple(value.item() if isinstance(value, np.generic) else value for value in _coordinates(array, name))
    if tokens is not None:
        return Side(name, values, tokens, title, is_tokens=True)
    if all(isinstance(value, str) for value in values):
        if are_paths(values):
            found = path_labels(values)
            common = "" if found.common is None else f": {found.common}"
            common += IN_FULL if found.has_whole else ""
            return Side(name, values, found.labels, title if title != name else f"{name}{common}")
        return Side(name, values, values, title, is_tokens=name in _POSITIONS)
    texts = (f"{value:.6g}" if isinstance(value, float) else str(value) for value in values)
    return Side(name, values, tuple(texts), title)


def _coordinates(array: DataArray, name: str) -> list[Any]:
    return array.coords[name].values.tolist() if name in array.coords else list(range(array.sizes[name]))


def _token_texts(array: DataArray, tokens: Any) -> tuple[str, tuple[str, ...]]:
    """Returns the dimension of tokens, and the text of each of its coordinates."""
    is_list = isinstance(tokens, Iterable) and not isinstance(tokens, str)
    if not is_list or not all(isinstance(token, str) for token in tokens):
        raise ExperimentError("tokens must be a list of texts, one for each position; decode token ids first")
    texts = tuple(tokens)
    known = [str(name) for name in array.dims if name in _POSITIONS]
    fitting = [str(name) for name in array.dims if len(texts) == array.sizes[name]]
    name = (known or fitting[::-1] or [str(array.dims[-1])])[0]
    positions = _coordinates(array, name)
    if all(type(place) is int and -len(texts) <= place < len(texts) for place in positions):
        return name, tuple(texts[place] for place in positions)  # texts of the whole sequence
    if len(texts) == len(positions):
        return name, texts
    places = f"{len(positions)} along {name!r}"
    raise ExperimentError(f"{len(texts)} tokens do not fit the result, which has {places}; give one for each")


_ZERO_CENTERED = ("gradient", "integrated", "relp", "secant", "attribution")
"""Methods of `attribute`, which return differences. `"attribution"` was the name of `"gradient"` in older results."""


@dataclass(frozen=True)
class Center:
    """The number without color, and its name; without a name for zero."""

    value: float
    name: str = ""

    def __str__(self) -> str:
        number = f"{self.value:.4g}"
        return f"{self.name} {number}" if self.name else number


def center_of(array: DataArray, center: float | str | None) -> Center | None:
    """Returns the number without color: `center`, or the one of the result for `"auto"`."""
    if center is None:
        return None
    if isinstance(center, str):
        if center != "auto":
            raise ExperimentError(f"center={center!r} must be a number, None (no center), or 'auto'")
        return _found_center(array)
    if not math.isfinite(center):
        raise ExperimentError(f"center={center!r} must be finite")
    return Center(float(center))


def _found_center(array: DataArray) -> Center | None:
    attrs = array.attrs
    if attrs.get("method") in _ZERO_CENTERED:
        return Center(0.0)
    value = _attribute(array, "baseline")
    if value is not None:
        return Center(value, "corrupted" if "corrupted" in attrs else "baseline")
    finite = array.values[np.isfinite(array.values)]
    return Center(0.0) if len(finite) and finite.min() < 0 < finite.max() else None


def base_of(array: DataArray, relative_to: str | float) -> Center:
    """Returns the number to subtract, which may be an attribute of the result."""
    if not isinstance(relative_to, str):
        return Center(float(relative_to))
    if array.attrs.get("method") in _ZERO_CENTERED:
        raise ExperimentError(f"relative_to={relative_to!r}: attribution scores are already differences")
    ends = [array.attrs.get(name) for name in ("corrupted", "baseline")]
    if relative_to in ("clean", "corrupted") and None not in ends and ends[0] != ends[1]:
        words = "0 is the corrupted run, 1 the clean one"
        raise ExperimentError(f"relative_to={relative_to!r}: the result is already normalized: {words}")
    value = _attribute(array, relative_to)
    if value is None:
        raise ExperimentError(f"relative_to={relative_to!r} {_repair(array, relative_to)}")
    return Center(value, relative_to)


def _attribute(array: DataArray, name: str) -> float | None:
    """Returns an attribute that is a number; if it has one for each metric, that of the selected metric."""
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
            picks = f"select a metric first, result.sel(metric={array.attrs['metrics'][0]!r})"
        else:
            picks = f"give one of them: relative_to={np.asarray(value).ravel()[0]:.4g}"
        return f"is {np.size(value)} numbers, one for each number of the metric; {picks}"
    known = [repr(other) for other in array.attrs if _attribute(array, str(other)) is not None]
    others = f"it has {', '.join(known)}" if known else "it has none; give a number"
    return f"is not a number among the attributes of the result: {others}"


def _number(value: Any) -> float | None:
    if isinstance(value, (bool, str)) or np.ndim(value) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def checked(result: Any, dimensions: int, instead: str) -> DataArray:
    """Returns the result, if it has this number of dimensions and real numbers."""
    extra("xarray", "a plot")
    from xarray import DataArray, Dataset

    if isinstance(result, Dataset):
        names = ", ".join(map(repr, result.data_vars))
        raise ExperimentError(f"a Dataset contains several results; give one of them, result[name]: it has {names}")
    if not isinstance(result, DataArray):
        example = f"xarray.DataArray(values, dims={['path', 'position', 'head'][:dimensions]})"
        raise ExperimentError(f"expected an xarray.DataArray, not {type(result).__name__}; make one: {example}")
    if result.ndim != dimensions:
        raise ExperimentError(_dimension_message(result, dimensions, instead))
    if not result.size:
        raise ExperimentError(f"the result is empty: {dimensions_text(result)}")
    if result.dtype.kind not in "biuf":
        raise ExperimentError(f"the result has dtype {result.dtype}, not real numbers; use result.astype(float)")
    return result


def _dimension_message(result: DataArray, dimensions: int, instead: str) -> str:
    count = "one dimension" if result.ndim == 1 else f"{result.ndim} dimensions"
    message = f"the result has {count}, {dimensions_text(result)}; a plot of it needs {dimensions}"
    if result.dims == ("path",):
        return f"{message}; plot_scores(result) draws one number for each path"
    if result.ndim < dimensions:
        new = next(name for name in ("path", "position", "head") if name not in result.dims)
        return f"{message}: result.expand_dims({new!r}){instead}"
    sizes = sorted(result.sizes.items(), key=lambda item: item[1])[: result.ndim - dimensions]
    names = [str(name) for name, _ in sizes]
    reduced = names[0] if len(names) == 1 else names
    pick = f"result.isel({names[0]}=0)"
    if names[0] in result.coords:
        pick = f"result.sel({names[0]}={_coordinates(result, names[0])[0]!r})"
    return f"{message}: select one with {pick}, or use result.mean({reduced!r}){instead}"


def dimensions_text(result: DataArray) -> str:
    """Returns the names and sizes of the dimensions as text."""
    return ", ".join(f"{name}: {size}" for name, size in result.sizes.items()) or "a single number"


def dimension(array: DataArray, name: str, argument: str) -> str:
    """Returns the name of a dimension; raises an `ExperimentError` if the result does not have it."""
    if name not in array.dims:
        raise ExperimentError(f"{argument}={name!r} is not a dimension of the result: {dimensions_text(array)}")
    return name
