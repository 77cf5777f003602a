"""What heatmaps draw: the numbers of a result, short labels for rows and columns, and what the colors mean."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from graphpatch_notebook.errors import ExperimentError, extra
from graphpatch_notebook.texts import is_joiner

if TYPE_CHECKING:
    from xarray import DataArray

FloatArray: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

_POSITIONS = ("position", "token", "pos")
_DIFFERENCES = ("gradient", "integrated", "secant", "attribution")
"""Methods of `attribute`, which return differences. `"attribution"` was the name of `"gradient"` in older results."""
_SEGMENT = re.compile(r"[^.|]+[.|]?")
_PATH = re.compile(r"[^\s.|]+([.|][^\s.|]+)*")
_NAMED = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽"}
_LONGEST, _BEFORE = 32, 7
"""The maximum length of a label, and how much of that is its beginning, since paths differ at their end."""
_LONGEST_TOKEN = 18


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
    """The labels of a dimension.

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
    """The numbers of a result, with a side for each dimension.

    Attributes:
        values: The numbers as float64; NaN for numbers that are not finite.
    """

    values: FloatArray
    sides: tuple[Side, ...]
    scale: Scale

    @property
    def rows(self) -> Side:
        """The last dimension but one."""
        return self.sides[-2]

    @property
    def columns(self) -> Side:
        """The last dimension."""
        return self.sides[-1]

    @property
    def is_missing(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which cells have no number."""
        return np.isnan(self.values)

    @property
    def is_upward(self) -> bool:
        """Whether the first row is the lowest: for layers, and not for tokens."""
        return not self.rows.is_tokens and self.rows.name not in _POSITIONS


def grid_of(
    result: Any,
    dimensions: int = 2,
    *,
    order: Sequence[Any] = (),
    tokens: Sequence[str] | None = None,
    center: float | str | None = "auto",
    relative_to: str | float | None = None,
) -> Grid:
    """Returns the numbers of a result, with labels and a color scale.

    Args:
        result: A `DataArray` of real numbers.
        dimensions: How many dimensions it must have.
        order: The names of its first dimensions; `...` as for `DataArray.transpose`.
        tokens: The texts of the tokens: one for each position of the result, or those of the whole sequence. `None` for
            those that the result itself has.
        center: The number without color; `"auto"` for the baseline of the result; `None` for none.
        relative_to: A number to subtract, or the name of an attribute of the result.
    """
    extra("xarray", "a plot")
    from xarray import DataArray

    if not isinstance(result, DataArray):
        raise ExperimentError(f"expected an xarray.DataArray, not {type(result).__name__}")
    if result.ndim != dimensions or not result.size:
        raise ExperimentError(
            f"this plot needs {dimensions} dimensions, not empty; the result has {dict(result.sizes)}: use result.sel, "
            "result.mean, or for three dimensions plot_heads(result, facet=...)"
        )
    if result.dtype.kind not in "biuf":
        raise ExperimentError(f"the result has dtype {result.dtype}, not real numbers; use result.astype(float)")
    names = [name for name in order if isinstance(name, str)]
    if unknown := [name for name in names if name not in result.dims]:
        raise ExperimentError(f"{unknown[0]!r} is not a dimension of the result: {', '.join(map(str, result.dims))}")
    array = result.transpose(*order) if names else result
    values, scale = _numbers(array, center, relative_to)
    if tokens is None and "position" in array.dims and (own := array.attrs.get("tokens")):
        fits = all(type(place) is int and 0 <= place < len(own) for place in _coordinates(array, "position"))
        tokens = own if fits else None
    place, texts = (None, None) if tokens is None else _token_texts(array, tokens)
    sides = (_side(array, str(name), texts if name == place else None) for name in array.dims)
    return Grid(values, tuple(sides), scale)


# -- numbers and colors ------------------------------------------------------------------------------------------------


def _numbers(array: DataArray, center: Any, relative_to: str | float | None) -> tuple[FloatArray, Scale]:
    """Returns the numbers to show, and their color scale."""
    name = str(array.name) if array.name is not None else "value"
    if "metric" in array.coords and "metric" not in array.dims:  # one of several was selected
        picked = str(array.coords["metric"].item())
        name = picked if name == "<lambda>" else f"{name} {picked}"
    metric = array.attrs.get("metric")
    shown = f"{name} ({metric})" if isinstance(metric, str) and metric != name else name
    values = np.where(np.isfinite(array.values), array.values, np.nan).astype(np.float64)
    middle = _center(array, center)
    if relative_to is not None:
        base = _base(array, relative_to)
        values = values - base.value
        shown = f"{shown} \N{MINUS SIGN} {base}"
        middle = Center(0.0) if center == "auto" else middle
    missing = "no finite value" if np.isinf(array.values).any() else "no value" if np.isnan(values).any() else None
    if missing and len(array.attrs.get("errors", ())) == np.isnan(values).sum():
        missing = "failed"
    return values, Scale(shown, middle, _limits(values, middle), missing)


def _limits(values: Any, center: Center | None) -> tuple[float, float]:
    """Returns the numbers of the first and the last color, symmetric around the center if there is one."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    if center is not None:
        reach = max(abs(low - center.value), abs(high - center.value))
        low, high = center.value - reach, center.value + reach
    margin = (abs(low) * 0.1 or 1.0) if low == high else 0.0
    return low - margin, high + margin


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


def _side(array: DataArray, name: str, tokens: tuple[str, ...] | None) -> Side:
    values = _coordinates(array, name)
    if tokens is not None:
        return Side(name, values, tokens, name, is_tokens=True)
    if not all(isinstance(value, str) for value in values):
        texts = (f"{value:.6g}" if isinstance(value, float) else str(value) for value in values)
        return Side(name, values, tuple(texts), name)
    if not are_paths(values):
        return Side(name, values, values, name, is_tokens=name in _POSITIONS)
    labels, common = path_labels(values)
    return Side(name, values, labels, f"{name}: {common}" if common else name)


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


# -- labels ------------------------------------------------------------------------------------------------------------


def are_paths(texts: Sequence[str]) -> bool:
    """Whether texts are paths, nearly all of them with several segments.

    Example:
        >>> are_paths(["transformer.h_0"]), are_paths(["h_0", "h_1"]), are_paths(["e.g. this"])
        (True, False, False)
    """
    is_each_path = all(_PATH.fullmatch(text) for text in texts)
    return is_each_path and sum("." in text or "|" in text for text in texts) >= 0.8 * len(texts)


def path_labels(paths: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
    """Returns the part of each path that differs from the others, and what they have in common.

    Example:
        >>> path_labels(["transformer.h_0.mlp.output", "transformer.h_1.mlp.output"])
        (('h_0', 'h_1'), 'transformer.*.mlp.output')
    """
    split = [_SEGMENT.findall(path) for path in paths]
    if len(set(paths)) < 2:
        return tuple(paths), None
    shortest = min(map(len, split))
    start = min(_common(split), shortest - 1)
    end = min(_common([parts[::-1] for parts in split]), shortest - 1 - start)
    labels = tuple("".join(parts[start : len(parts) - end]).rstrip(".|") for parts in split)
    before, after = "".join(split[0][:start]), "".join(split[0][len(split[0]) - end :])
    separator = split[0][len(split[0]) - end - 1][-1:] if after else ""
    return labels, f"{before}*{separator}{after}" if before or after else None


def _common(split: Sequence[Sequence[str]]) -> int:
    """Returns the number of leading segments that all paths share."""
    return sum(itertools.takewhile(bool, (len({*segments}) == 1 for segments in zip(*split, strict=False))))


def shown_labels(side: Side, has_glyph: Callable[[str], bool] | None = None) -> list[str]:
    """Returns the labels of rows or columns, shortened where that leaves different labels different.

    In tokens, spaces matter. `has_glyph` says whether the font has a character; browsers find one for each.
    """
    seen = [tick_text(text, has_glyph, is_token=side.is_tokens) for text in side.labels]
    short = [_shortened(text, is_token=side.is_tokens) for text in seen]
    return short if len(set(short)) == len(set(seen)) else seen


def _shortened(text: str, *, is_token: bool) -> str:
    if len(text) <= (_LONGEST_TOKEN if is_token else _LONGEST):
        return text
    return f"{text[: _LONGEST_TOKEN - 1]}…" if is_token else f"{text[:_BEFORE]}…{text[_BEFORE + 1 - _LONGEST :]}"


def tick_text(text: str, has_glyph: Callable[[str], bool] | None = None, *, is_token: bool) -> str:
    r"""Returns a text with invisible characters, and those that the font does not have, replaced by their code.

    Example:
        >>> tick_text(" the", is_token=True), tick_text(chr(0), is_token=True)
        ('␣the', '\\x00')
    """
    if is_token and not text:
        return "(empty)"
    if text and unicodedata.category(text[0]).startswith("M"):
        text = f"◌{text}"  # a combining character needs a base
    return "".join(
        c if has_glyph is None and is_joiner(text, at) else _seen(c, has_glyph, is_token=is_token)
        for at, c in enumerate(text)
    )


def _seen(character: str, has_glyph: Callable[[str], bool] | None, *, is_token: bool) -> str:
    if character == " " and not is_token:
        return " "
    named = _NAMED.get(character, character)
    is_invisible = named == character and unicodedata.category(character)[0] in "CZ"
    if not is_invisible and (has_glyph is None or has_glyph(named)):
        return named
    return character.encode("unicode_escape").decode()
