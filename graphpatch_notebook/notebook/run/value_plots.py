"""Plots of a value for the front end: a heatmap of two dimensions or a histogram, of limited size."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.errors import ChosenPatchError
from graphpatch_notebook.notebook.display.statistics import Readable, doubles, pieces, summary
from graphpatch_notebook.notebook.display.tokens import TokenLabels
from graphpatch_notebook.notebook.session.slices import SliceText, parse_slice

SIDE = 256
"""The largest number of rows, and of columns, of a heatmap."""
_BINS = 40
_PEAKED = 8
_FILL = 1e30
"""Larger numbers, such as the limits of a dtype, are fill values of masks. A block averages its other numbers."""


@dataclass(frozen=True)
class Picture:
    """A `Plot` for the front end.

    Attributes:
        plot: The plot as JSON. For a heatmap, set `buffer` to the position of `values` among the buffers.
        values: The values of a heatmap: little-endian float32, row by row.
        index: The index that selects the rows and columns of the heatmap, if each cell is one element of the value.
    """

    plot: dict[str, Any]
    values: bytes | None = None
    index: Any = None


def nothing(why: str) -> Picture:
    """Returns a message in place of a plot."""
    return Picture({"type": "none", "why": why})


def parse_plane(text: str) -> SliceText:
    """Parses the slice of a value to plot.

    Raises:
        ChosenPatchError: The text is not a slice (`field` is `plane`).
    """
    try:
        return parse_slice(text)
    except ValueError as error:
        raise ChosenPatchError("plane", str(error)) from None


def check_plane(plane: SliceText, shape: Sequence[int], namespace: Mapping[str, Any]) -> None:
    """Checks that a slice is valid for values of a shape.

    Raises:
        ChosenPatchError: It is not (`field` is `plane`).
    """
    _part(torch.empty(tuple(shape), device="meta"), plane, namespace)


def picture(numbers: Readable, plane: SliceText | None, namespace: Mapping[str, Any]) -> Picture:
    """Returns a heatmap of a slice of a value, or a histogram if the slice has one dimension or row.

    Args:
        numbers: The numbers of the value.
        plane: The slice, which leaves one or two dimensions. `None`: the last two, at index 0 of the others.
        namespace: The values of the variables in it.

    Raises:
        ChosenPatchError: The slice is not valid for the value.
    """
    if numbers.tensor is None:
        return nothing(numbers.remark or "there are no numbers to show")
    tensor = numbers.tensor
    if tensor.dim() == 0 and plane is None:
        return nothing(f"one number: {float(doubles(tensor)):.6g}")
    if plane is not None:
        part = _part(tensor, plane, namespace)
    else:
        part = tensor[(0,) * (tensor.dim() - 2)] if tensor.numel() else tensor
    text = str(plane) if plane is not None else _default_text(tensor.dim())
    if part.numel() == 0:
        return nothing(f"it has no elements: its shape is {list(part.shape)}")
    found = summary(part)
    if not found.finite:
        return nothing(f"none of its numbers is finite: {found.nan} NaN, {found.infinite} infinite")
    if part.dim() < 2 or 1 in part.shape:
        return _histogram(part, text)
    drawn = _heatmap(part, text, found.minimum, found.mean, found.maximum, numbers.remark)
    if drawn.plot.get("full") != [drawn.plot.get("rows"), drawn.plot.get("columns")]:
        return drawn
    return replace(drawn, index=plane.index(namespace) if plane is not None else (0,) * (tensor.dim() - 2))


def _default_text(dims: int) -> str | None:
    return ", ".join(["0"] * (dims - 2) + [":"] * min(dims, 2)) if dims > 1 else None


def _part(tensor: Tensor, plane: SliceText, namespace: Mapping[str, Any]) -> Tensor:
    shape = list(tensor.shape)
    try:
        part = tensor[plane.index(namespace)]
    except Exception as error:
        raise ChosenPatchError("plane", f"[{plane}] is not valid for a value of shape {shape}: {error}") from None
    if part.dim() > 2:
        raise ChosenPatchError(
            "plane",
            f"[{plane}] of a value of shape {shape} leaves {part.dim()} dimensions, {list(part.shape)}; a heatmap "
            f"shows two: write numbers for the others, as in {_default_text(len(shape))}",
        )
    return part


def axis_labels(
    numbers: Tensor | None, drawn: Picture, labels: TokenLabels | None
) -> tuple[list[str] | None, list[str] | None]:
    """Returns the labels of the rows and columns of a heatmap, if these are tokens."""
    if numbers is None or drawn.index is None or labels is None:
        return None, None
    return labels.of_axes(numbers, drawn.index)


# -- histograms --------------------------------------------------------------------------------------------------------


def _histogram(part: Tensor, text: str | None) -> Picture:
    low, high, is_whole = _range(part)
    if is_whole and high - low < _BINS:
        edges = torch.arange(low - 0.5, high + 1, dtype=torch.float64)
    elif low == high:
        margin = max(0.5, abs(low) * 1e-6)
        ends = [max(low - margin, -sys.float_info.max), min(high + margin, sys.float_info.max)]
        edges = torch.tensor(ends, dtype=torch.float64)
    else:  # weighted ends, since `high - low` may overflow
        steps = torch.linspace(0, 1, _BINS + 1, dtype=torch.float64)
        edges = low * (1 - steps) + high * steps
        edges[0], edges[-1] = low, high
    counts = torch.zeros(len(edges) - 1, dtype=torch.int64)
    for piece in pieces(part):
        finite = piece[piece.isfinite()]
        places = torch.searchsorted(edges, finite, right=True) - 1
        counts += torch.bincount(places.clamp(0, len(counts) - 1), minlength=len(counts))
    return Picture({"type": "histogram", "counts": counts.tolist(), "edges": edges.tolist(), "slice": text})


def _range(part: Tensor) -> tuple[float, float, bool]:
    """Returns the least and the greatest finite number, and whether all finite ones are integers."""
    low, high, is_whole = math.inf, -math.inf, True
    for piece in pieces(part):
        finite = piece[piece.isfinite()]
        if len(finite):
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
            is_whole = is_whole and bool((finite == finite.round()).all())
    return low, high, is_whole and max(-low, high) < 2**50


# -- heatmaps ----------------------------------------------------------------------------------------------------------


def _heatmap(part: Tensor, text: str | None, low: Any, mean: Any, high: Any, remark: str | None) -> Picture:
    rows, columns = part.shape
    block = (math.ceil(rows / SIDE), math.ceil(columns / SIDE))
    is_whole = block == (1, 1)
    # For few large values among many near zero, as in attention patterns, means would hide the large ones.
    takes_maxima = low >= 0 and high > _PEAKED * mean
    strips = [_reduced(doubles(part[at : at + block[0]]), block, takes_maxima) for at in range(0, rows, block[0])]
    values = torch.cat(strips).to(torch.float32)
    if not values.isfinite().any():
        return nothing("none of its numbers fits into float32")
    words = [remark] if remark else []
    if not is_whole:
        what = "greatest value" if takes_maxima else "mean"
        words.append(f"each cell is the {what} of {block[0]} x {block[1]} of {rows} x {columns} values")
    plot = {
        "type": "heatmap",
        "buffer": 0,
        "rows": values.shape[0],
        "columns": values.shape[1],
        "full": [rows, columns],
        "reduced": "; ".join(words) or None,
        "slice": text,
        "constant": low if low == high and all(bool(piece.isfinite().all()) for piece in pieces(part)) else None,
    }
    return Picture(plot, struct.pack(f"<{values.numel()}f", *values.flatten().tolist()))


def _reduced(strip: Tensor, block: tuple[int, int], takes_maxima: bool) -> Tensor:
    """Returns one row of cells: the mean or maximum of the finite numbers of each block, or NaN without any."""
    if block == (1, 1):
        return strip
    width = math.ceil(strip.shape[1] / block[1])
    padding = (0, width * block[1] - strip.shape[1])
    padded = torch.nn.functional.pad(strip, padding, value=math.nan)
    blocks = padded.reshape(strip.shape[0], width, block[1]).transpose(0, 1).reshape(width, -1)
    is_finite = blocks.isfinite()
    is_amount = is_finite & (blocks.abs() < _FILL)
    is_finite = torch.where(is_amount.any(1, keepdim=True), is_amount, is_finite)
    count = is_finite.sum(1)
    if takes_maxima:
        found = blocks.masked_fill(~is_finite, -math.inf).amax(1)
    else:
        found = (blocks.masked_fill(~is_finite, 0) / count.clamp(min=1).unsqueeze(1)).sum(1)
    return found.masked_fill(count == 0, math.nan).unsqueeze(0)
