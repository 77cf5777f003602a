"""Plots of a value for the front end: a heatmap of two dimensions or a histogram, of limited size."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from graphpatch_notebook.errors import ChosenPatchError
from graphpatch_notebook.notebook.display.statistics import Readable, doubles, pieces, summary
from graphpatch_notebook.notebook.display.tokens import TokenLabels
from graphpatch_notebook.notebook.session.slices import SliceText, parse_slice

SIDE = 256
"""The largest number of rows, and of columns, of a heatmap."""
_BINS = 40
_PEAKED = 8
_INDICES = (int, bool, slice, range, type(None), type(Ellipsis), Tensor, Parameter)
_FILL = 1e30
"""Larger numbers, such as the limits of a dtype, are fill values of masks. A block averages its other numbers."""


@dataclass(frozen=True)
class Picture:
    """A `Plot` for the front end.

    Attributes:
        plot: The plot as JSON. For a heatmap, set `buffer` to the position of `values` among the buffers.
        values: The values of a heatmap: little-endian float32, row by row.
        row_labels: The tokens of its rows, if these are positions of tokens.
        column_labels: The same of its columns.
    """

    plot: dict[str, Any]
    values: bytes | None = None
    row_labels: list[str] | None = None
    column_labels: list[str] | None = None


def nothing(why: str) -> Picture:
    """Returns a message in place of a plot."""
    return Picture({"type": "none", "why": why})


@dataclass(frozen=True)
class Plane:
    """The slice of a value to plot.

    Attributes:
        typed: The slice, which leaves one or two dimensions; `None`: the last two, at index 0 of the others.
        names: The values of the variables in it.
    """

    typed: SliceText | None = None
    names: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str | None, namespace: Mapping[str, Any]) -> Plane:
        """Returns the slice that was typed; an empty text gives the default."""
        if text is None or not text.strip():
            return cls()
        try:
            typed = parse_slice(text)
        except ValueError as error:
            raise ChosenPatchError("plane", str(error)) from None
        names = {name: namespace[name] for name in typed.names if name in namespace}
        for name, value in names.items():
            if not _is_index(value):
                message = f"{name} is {type(value).__name__}: write numbers, or variables that hold integers"
                raise ChosenPatchError("plane", f"{message}, slices or tensors of integers")
        return cls(typed, names)

    def index(self, dims: int) -> Any:
        """Returns the index of the slice in a value with this number of dimensions."""
        return (0,) * (dims - 2) if self.typed is None else self.typed.index(self.names)

    def part(self, tensor: Tensor) -> Tensor:
        """Returns the slice of a value.

        Raises:
            ChosenPatchError: It is not valid for the value (`field` is `plane`).
        """
        if self.typed is None:
            return tensor[self.index(tensor.dim())] if tensor.numel() else tensor
        shape = list(tensor.shape)
        try:
            part = tensor[self.index(tensor.dim())]
        except Exception as error:
            message = f"[{self.typed}] is not valid for a value of shape {shape}: {error}"
            raise ChosenPatchError("plane", message) from None
        if part.dim() > 2:
            raise ChosenPatchError(
                "plane",
                f"[{self.typed}] of a value of shape {shape} leaves {part.dim()} dimensions, {list(part.shape)}; a "
                f"heatmap shows two: write numbers for the others, as in {Plane().text(len(shape))}",
            )
        return part

    def text(self, dims: int) -> str | None:
        """Returns the slice of a value with this number of dimensions as text; `None` for all of it."""
        if self.typed is not None:
            return str(self.typed)
        return ", ".join(["0"] * (dims - 2) + [":"] * min(dims, 2)) if dims > 1 else None


def _is_index(value: Any) -> bool:
    """Whether torch accepts a value as an index. With some objects torch crashes.

    Checks the type itself: `isinstance` trusts the `__class__` of an object.
    """
    if type(value) in (list, tuple):
        return all(map(_is_index, value))
    return type(value) in _INDICES or type(value).__module__ == "numpy"


def picture(numbers: Readable, plane: Plane, labels: TokenLabels | None) -> Picture:
    """Returns a heatmap of a slice of a value, or a histogram if the slice has one dimension or row."""
    if numbers.tensor is None:
        return nothing(numbers.remark or "there are no numbers to show")
    tensor = numbers.tensor
    if tensor.dim() == 0 and plane.typed is None:
        return nothing(f"one number: {float(doubles(tensor)):.6g}")
    part, text = plane.part(tensor), plane.text(tensor.dim())
    if part.numel() == 0:
        return nothing(f"it has no elements: its shape is {list(part.shape)}")
    found = summary(part)
    if not found.finite:
        return nothing(f"none of its numbers is finite: {found.nan} NaN, {found.infinite} infinite")
    if part.dim() < 2 or 1 in part.shape:
        return _histogram(part, text, found.minimum, found.maximum)
    drawn = _heatmap(part, text, found.minimum, found.mean, found.maximum, numbers.remark)
    if labels is None or drawn.plot.get("full") != [drawn.plot.get("rows"), drawn.plot.get("columns")]:
        return drawn  # a cell of blocks has several labels
    rows, columns = labels.of_axes(tensor, plane.index(tensor.dim()))
    return replace(drawn, row_labels=rows, column_labels=columns)


# -- histograms --------------------------------------------------------------------------------------------------------


def _histogram(part: Tensor, text: str | None, low: Any, high: Any) -> Picture:
    finite_pieces = (piece[piece.isfinite()] for piece in pieces(part))
    is_whole = max(-low, high) < 2**50 and all(bool((finite == finite.round()).all()) for finite in finite_pieces)
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
