"""Plots of a value for the front end: a heatmap of two dimensions or a histogram, of limited size."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.errors import ChosenPatchError
from graphpatch_notebook.notebook.display.statistics import Readable, finite_pieces, statistics_of
from graphpatch_notebook.notebook.display.tokens import TokenLabels
from graphpatch_notebook.notebook.messages import Heatmap, Histogram, NoPlot, Plot, Statistics
from graphpatch_notebook.notebook.session.expressions import SliceText, parse_slice

SIDE = 256
"""The largest number of rows, and of columns, of a heatmap."""
_BINS = 40
_PEAKED = 8
_FILL = 1e30
"""Larger numbers, such as the limits of a dtype, are fill values of masks. A block averages its other numbers."""


@dataclass(frozen=True)
class Picture:
    """A plot, with the texts of the tokens along it.

    Attributes:
        plot: The plot. The values of a heatmap are buffer 0.
        values: The values of a heatmap: little-endian float32, row by row.
        row_labels: The tokens of its rows, if these are positions of tokens.
        column_labels: The same of its columns.
    """

    plot: Plot
    values: bytes | None = None
    row_labels: list[str] | None = None
    column_labels: list[str] | None = None


@dataclass(frozen=True)
class Plane:
    """The slice of a value to plot.

    Attributes:
        typed: The slice, which leaves one or two dimensions; `None`: the last two, at index 0 of the others.
        names: The values of the variables in it.
    """

    typed: SliceText | None = None
    names: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str | None, namespace: Mapping[str, Any]) -> Plane:
        """Returns the slice that was typed; an empty text gives the default."""
        if text is None or not text.strip():
            return cls()
        try:
            typed = parse_slice(text)
        except ValueError as error:
            raise ChosenPatchError("plane", str(error)) from None
        try:
            return cls(typed, {name: operator.index(namespace[name]) for name in typed.names})
        except (KeyError, TypeError) as error:
            raise ChosenPatchError("plane", f"write numbers, or variables that hold integers ({error})") from None

    def index(self, dims: int) -> Any:
        """Returns the index of the slice in a value with this number of dimensions."""
        return (0,) * (dims - 2) if self.typed is None else self.typed.index(self.names)

    def part(self, tensor: Tensor) -> Tensor:
        """Returns the slice of a value.

        Raises:
            ChosenPatchError: It is not valid for the value (`field` is `plane`).
        """
        if self.typed is None and not tensor.numel():
            return tensor
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


def picture(numbers: Readable, plane: Plane, labels: TokenLabels | None) -> Picture:
    """Returns a heatmap of a slice of a value, or a histogram if the slice has one dimension or row."""
    if numbers.tensor is None:
        return Picture(NoPlot(numbers.remark or "there are no numbers to show"))
    tensor = numbers.tensor
    if tensor.dim() == 0 and plane.typed is None:
        return Picture(NoPlot(f"one number: {float(tensor):.6g}"))
    part, text = plane.part(tensor), plane.text(tensor.dim())
    found = statistics_of(part)
    if found.min is None:
        why = f"{found.nan} NaN, {found.infinite} infinite" if found.count else f"its shape is {found.shape}"
        return Picture(NoPlot(f"it has no finite elements: {why}"))
    if part.dim() < 2 or 1 in part.shape:
        return Picture(_histogram(part, text, found))
    plot, values = _heatmap(part, text, found, numbers.remark)
    if labels is None or plot.full != (plot.rows, plot.columns):  # a cell of blocks has several labels
        return Picture(plot, values)
    return Picture(plot, values, *labels.of_axes(tensor, plane.index(tensor.dim())))


def _histogram(part: Tensor, text: str | None, found: Statistics) -> Histogram:
    low, high = float(found.min or 0), float(found.max or 0)
    margin = max(0.5, abs(low) * 1e-6) if low == high else 0.0
    edges = torch.linspace(low - margin, high + margin, (1 if margin else _BINS) + 1, dtype=torch.float64)
    counts = sum(torch.histogram(piece, edges).hist for piece in finite_pieces(part))
    assert isinstance(counts, Tensor)
    return Histogram(counts.long().tolist(), edges.tolist(), text)


def _heatmap(part: Tensor, text: str | None, found: Statistics, remark: str | None) -> tuple[Heatmap, bytes]:
    rows, columns = part.shape
    block = (math.ceil(rows / SIDE), math.ceil(columns / SIDE))
    low, mean, high = float(found.min or 0), float(found.mean or 0), float(found.max or 0)
    # For few large values among many near zero, as in attention patterns, means would hide the large ones.
    takes_maxima = low >= 0 and high > _PEAKED * mean
    strips = [_reduced(part[at : at + block[0]], block, takes_maxima) for at in range(0, rows, block[0])]
    values = torch.cat(strips).to(torch.float32)
    words = [remark] if remark else []
    if block != (1, 1):
        what = "greatest value" if takes_maxima else "mean"
        words.append(f"each cell is the {what} of {block[0]} x {block[1]} of {rows} x {columns} values")
    constant = low if low == high and not found.nan and not found.infinite else None
    plot = Heatmap(0, values.shape[0], values.shape[1], (rows, columns), "; ".join(words) or None, str(text), constant)
    return plot, struct.pack(f"<{values.numel()}f", *values.flatten().tolist())


def _reduced(strip: Tensor, block: tuple[int, int], takes_maxima: bool) -> Tensor:
    """Returns one row of cells: the mean or maximum of the finite numbers of each block, or NaN without any."""
    strip = strip.cpu().to(torch.float64)
    if block == (1, 1):
        return strip
    width = math.ceil(strip.shape[1] / block[1])
    padded = torch.nn.functional.pad(strip, (0, width * block[1] - strip.shape[1]), value=math.nan)
    blocks = padded.reshape(strip.shape[0], width, block[1]).transpose(0, 1).reshape(width, -1)
    is_amount = blocks.abs() < _FILL
    is_known = torch.where(is_amount.any(1, keepdim=True), is_amount, blocks.isfinite())
    known = blocks.masked_fill(~is_known, math.nan)
    if takes_maxima:
        highest = known.nan_to_num(-math.inf).amax(1, keepdim=True).T
        return highest.masked_fill(highest == -math.inf, math.nan)
    return known.nanmean(1, keepdim=True).T
