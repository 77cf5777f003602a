"""The report of a run: the outputs without and with the patches compared, and the values of probes."""

from __future__ import annotations

import itertools
import math
import operator
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.errors import ChosenPatchError, PatchValueError
from graphpatch_notebook.notebook.display.tables import visible
from graphpatch_notebook.notebook.display.tokens import TokenLabels
from graphpatch_notebook.notebook.messages import (
    Heatmap,
    Histogram,
    LargeChange,
    NoPlot,
    OutputChange,
    Plot,
    ProbeReport,
    Statistics,
)
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import SliceText, parse_slice
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patching.model_state import copied
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import NUMBERS, dtype_name, key_text, readable_children

_MOST_CHANGES = 8
_MOST_ENTRIES = 5
_MOST_LEAVES = 10_000
_DEEPEST = 50
_ODD = (torch.isnan, torch.isinf)


# -- outputs -----------------------------------------------------------------------------------------------------------


def changes(before: Any, after: Any) -> tuple[list[OutputChange], list[str]]:
    """Returns the differences between the outputs without and with the patches, logits first, and remarks on the rest.

    Keys that differ only in their type have the same path; the last of them is compared.
    """
    mine, theirs = (dict(itertools.islice(_leaves(value), _MOST_LEAVES)) for value in (before, after))
    paths = sorted({**mine, **theirs}, key=lambda path: (path[-1:] != ("logits",), len(path)))  # stable
    texts = [visible(format_path(("output",), path)) for path in paths]
    listed = [
        compared(text, mine.get(path), theirs.get(path))
        for text, path in zip(texts[:_MOST_CHANGES], paths, strict=False)
    ]
    if not paths:
        return [], [f"the output, of type {type(after).__name__}, does not contain a tensor or number"]
    rest = texts[_MOST_CHANGES:]
    return listed, [f"{len(rest)} more parts of the output are not compared, from {rest[0]} on"] if rest else []


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the tensors and numbers in an output, each with the texts of its keys."""
    if isinstance(value, (Tensor, *NUMBERS)):
        yield path, value
    elif len(path) < _DEEPEST:
        for key, child in readable_children(value) or ():
            yield from _leaves(child, (*path, key_text(key)))


def compared(path: str, before: Any, after: Any, only: str = "only in the output") -> OutputChange:
    """Returns the norms of two values and of their difference, and the entries that changed most.

    A norm is `None` if it is not known; the note says why. A value is `None` if it does not exist;
    `only` begins what the note then says.
    """
    value = after if before is None else before
    numbers = [Readable(None) if one is None else readable(_as_real(one)) for one in (before, after)]
    norms = [None if one.tensor is None else norm(finite_pieces(one.tensor)) for one in numbers]
    first, second = (one.tensor for one in numbers)
    notes = [one.remark for one in numbers if one.remark]
    difference, largest = None, []
    if before is None or after is None:
        notes.append(f"{only} {'with' if before is None else 'without'} the patches")
    elif first is not None and second is not None and first.shape != second.shape:
        notes.append(f"not compared: shape {list(first.shape)} without the patches, {list(second.shape)} with them")
    elif first is not None and second is not None:
        difference, largest = norm(_differences(first, second)), _largest(first, second)
        odd = [
            f"{nan:,} NaN and {infinite:,} infinite {which} the patches"
            for tensor, which in ((first, "without"), (second, "with"))
            for nan, infinite in [[sum(int(is_odd(p).sum()) for p in pieces(tensor)) for is_odd in _ODD]]
            if nan or infinite
        ]
        if odd:
            notes.append(f"differences count only entries that are finite in both: {', '.join(odd)}")
        if getattr(value, "is_complex", lambda: isinstance(value, complex))():
            notes.append("the last index is 0 for the real part, 1 for the imaginary part")
    shape = list(value.shape) if isinstance(value, Tensor) and not value.is_nested else []
    note = "; ".join(dict.fromkeys(notes)) or None
    return OutputChange(path, shape, dtype_or_class(value), norms[0], norms[1], difference, largest, note)


def _as_real(value: Any) -> Any:
    """Returns a value, with a last dimension of real and imaginary parts if it is complex."""
    complex_value = torch.tensor(value) if isinstance(value, complex) else value
    if isinstance(complex_value, Tensor) and complex_value.is_complex() and complex_value.device.type != "meta":
        return torch.view_as_real(complex_value.detach().to_dense().resolve_conj())
    return value


def _differences(before: Tensor, after: Tensor) -> Iterator[Tensor]:
    """Yields the differences in pieces, with 0 for entries that are not finite in one of the two."""
    for first, second in zip(pieces(before), pieces(after), strict=True):
        yield torch.where(first.isfinite() & second.isfinite(), second - first, 0.0)


def _largest(before: Tensor, after: Tensor) -> list[LargeChange]:
    """Returns the entries with the largest changes."""
    found: list[tuple[float, int]] = []
    start = 0
    for piece in _differences(before, after):
        top = piece.abs().topk(min(_MOST_ENTRIES, len(piece)))
        found += zip(top.values.tolist(), (start + top.indices).tolist(), strict=True)
        start += len(piece)
    found = sorted((entry for entry in found if entry[0] > 0), key=lambda entry: (-entry[0], entry[1]))
    flat = before.reshape(-1), after.reshape(-1)
    return [
        LargeChange([int(i) for i in np.unravel_index(at, before.shape)], float(flat[0][at]), float(flat[1][at]))
        for _, at in found[:_MOST_ENTRIES]
    ]


# -- probes ------------------------------------------------------------------------------------------------------------

LabelsOf: TypeAlias = "Callable[[str], TokenLabels | None]"
"""Returns the texts of the tokens along the value at a path."""


@dataclass(frozen=True)
class KeptValue:
    """A copy of the value that a probe or record kept in a run."""

    chosen: ChosenPatch
    value: Any
    problem: str | None = None

    @classmethod
    def of(cls, chosen: ChosenPatch, patch: Patch[Any], names: Mapping[str, Any]) -> KeptValue:
        """Returns the value of a probe after a run."""
        try:
            return cls(chosen, copy_of(chosen.taken(patch, names)))
        except PatchValueError as error:
            return cls(chosen, None, str(error))

    @property
    def shown(self) -> Any:
        """The value, or the last one of a record; `None` without one."""
        if self.chosen.definition.keeps_list and self.value is not None:
            return self.value[-1] if self.value else None
        return self.value


def _comparable(before: KeptValue, kept: KeptValue) -> tuple[Any, Any]:
    """Returns the values of a probe in two runs; of records of one shape, all in one tensor, else the last ones."""
    both = before.value, kept.value
    if all(isinstance(values, list) and len(values) > 1 for values in both):
        shapes = {value.shape if isinstance(value, Tensor) else None for values in both for value in values}
        if len(both[0]) == len(both[1]) and len(shapes) == 1 and None not in shapes:
            return torch.stack(both[0]), torch.stack(both[1])
    return before.shown, kept.shown


def copy_of(value: Any) -> Any:
    """Returns a copy of the value of a probe, which is no part of the model any more."""
    if isinstance(value, list):
        return [copy_of(one) for one in value]
    return value.detach().clone() if isinstance(value, Tensor) else copied(value)


def probe_report(kept: KeptValue, before: KeptValue | None, labels: LabelsOf, buffers: list[bytes]) -> ProbeReport:
    """Returns the report on a probe; `before` is its value without the other patches. Adds to the buffers."""
    chosen, shown, note = kept.chosen, kept.shown, kept.problem
    head = chosen.number, str(chosen.name), chosen.path
    change = None
    if before is not None and note is None and (before.shown is not None or shown is not None):
        change = compared(chosen.path, *_comparable(before, kept), "not compared: it fired only")
        if before.problem is not None:
            change.note = f"not compared: without the patches, {before.problem}"
    if shown is None:
        why = note or "it did not fire in this run"
        return ProbeReport(*head, None, NoPlot("nothing was kept"), None, None, why, change)
    if chosen.definition.keeps_list and len(kept.value) > 1:
        note = f"{len(kept.value)} values were recorded; this is the last one"
    numbers = readable(shown)
    # The dimensions of a slice are not those of the value.
    drawn = picture(numbers, Plane(), labels(chosen.path) if chosen.slice is None else None)
    plot = drawn.plot
    if isinstance(plot, Heatmap) and drawn.values is not None:
        plot = msgspec.structs.replace(plot, buffer=len(buffers))
        buffers.append(drawn.values)
    statistics = statistics_of(shown, numbers)
    return ProbeReport(*head, statistics, plot, drawn.row_labels, drawn.column_labels, note, change)


# --------------------------------------------------------------------------------------------------------------------
# Plots of a value for the front end: a heatmap of two dimensions or a histogram, of limited size


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


# --------------------------------------------------------------------------------------------------------------------
# Statistics of a value, computed in float64 for any dtype. NaN and infinite elements are counted separately


_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class Readable:
    """The elements of a value as real numbers."""

    tensor: Tensor | None  # dense; `None` if the value has none
    remark: str | None = None  # how the numbers were derived, or why there are none


def readable(value: Any) -> Readable:
    """Returns the elements of a tensor or number as real numbers.

    Quantized tensors are dequantized, sparse tensors become dense, nested tensors are concatenated, and complex numbers
    become their magnitudes.

    Example:
        >>> readable(torch.tensor([3 + 4j]))
        Readable(tensor=tensor([5.]), remark='magnitudes of complex numbers')
    """
    try:
        if isinstance(value, NUMBERS):
            value = torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64)
        if not isinstance(value, Tensor):
            return Readable(None, f"an object of type {type(value).__name__} has no numbers to show")
        if value.device.type == "meta":
            return Readable(None, "a tensor on the device meta has a shape, but no numbers")
        with torch.no_grad():
            return _dense(value.detach())
    except Exception as error:  # a tensor subclass can refuse any operation
        return Readable(None, f"the numbers of this value cannot be read ({type(error).__name__}: {error})")


def _dense(tensor: Tensor) -> Readable:
    remark = None
    if tensor.is_quantized:
        tensor, remark = tensor.dequantize(), f"dequantized from {dtype_name(tensor.dtype)}"
    elif tensor.is_nested:
        parts = [part.reshape(-1) for part in tensor.unbind()]
        tensor, remark = torch.cat(parts), f"the values of {len(parts)} nested tensors in a row"
    elif tensor.layout is not torch.strided:
        tensor, remark = tensor.to_dense(), f"made dense from {dtype_name(tensor.layout)}"
    if type(tensor) is not Tensor:
        tensor = tensor.as_subclass(Tensor)
    if tensor.is_complex():
        tensor, remark = tensor.abs(), "magnitudes of complex numbers" + (f", {remark}" if remark else "")
    tensor.reshape(-1)[:1].tolist()  # a subclass can still have no readable elements
    return Readable(tensor.resolve_neg(), remark)


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the elements of a tensor in order, in float64 and on the CPU, in pieces."""
    flat = tensor.reshape(-1)
    for start in range(0, len(flat), _PIECE):
        yield flat[start : start + _PIECE].cpu().to(torch.float64)


def finite_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the finite elements of a tensor in pieces."""
    for piece in pieces(tensor):
        if len(finite := piece[piece.isfinite()]):
            yield finite


def norm(parts: Iterable[Tensor]) -> float:
    """Returns the norm of the elements of tensors; at most the largest float64, since JSON has no infinity."""
    return min(math.hypot(*(float(part.norm()) for part in parts)), sys.float_info.max)


def statistics_of(value: Any, numbers: Readable | None = None) -> Statistics:
    """Returns the statistics of a value, of which `numbers` are the elements.

    Example:
        >>> found = statistics_of(torch.tensor([1.0, 3.0, float("nan")]))
        >>> found.count, found.nan, found.mean, found.max
        (3, 1, 2.0, 3.0)
    """
    tensor = (readable(value) if numbers is None else numbers).tensor
    is_tensor = isinstance(value, Tensor)
    shape = list(value.shape) if is_tensor and not value.is_nested else []
    known: dict[str, Any] = {"count": value.numel() if is_tensor else 1}
    if tensor is not None:
        nan, infinite = (sum(int(test(piece).sum()) for piece in pieces(tensor)) for test in (torch.isnan, torch.isinf))
        known |= {"count": tensor.numel(), "nan": nan, "infinite": infinite}
        if count := tensor.numel() - nan - infinite:
            known["min"] = min(float(piece.min()) for piece in finite_pieces(tensor))
            known["max"] = max(float(piece.max()) for piece in finite_pieces(tensor))
            # Divided before they are summed: the sum of large numbers would overflow.
            known["mean"] = mean = math.fsum(float((piece / count).sum()) for piece in finite_pieces(tensor))
            if count > 1:
                known["std"] = norm((piece - mean) / math.sqrt(count - 1) for piece in finite_pieces(tensor))
    return Statistics(shape, dtype_or_class(value), str(value.device) if is_tensor else "cpu", **known)


def dtype_or_class(value: Any) -> str:
    """Returns the dtype name of a tensor, or the class name of a number.

    Example:
        >>> dtype_or_class(torch.ones(1)), dtype_or_class(True)
        ('float32', 'bool')
    """
    return dtype_name(value.dtype) if isinstance(value, Tensor) else type(value).__name__
