"""The report of a run: the outputs without and with the patches compared, and the values of probes, with plots."""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.errors import ChosenPatchError, PatchValueError
from graphpatch_notebook.notebook.display.tables import visible
from graphpatch_notebook.notebook.display.tokens import TokenLabels
from graphpatch_notebook.notebook.messages import (
    ActivationView,
    Facets,
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
from graphpatch_notebook.values import NUMBERS, children, dtype_name, key_text

_MOST_CHANGES = 8
_MOST_ENTRIES = 5
_MOST_LEAVES = 10_000
_DEEPEST = 50


# -- outputs -----------------------------------------------------------------------------------------------------------


def changes(before: Any, after: Any) -> tuple[list[OutputChange], list[str]]:
    """Returns the differences between the outputs without and with the patches, logits first, and remarks on the rest.

    Keys that differ only in their type have the same path; the last of them is compared.
    """
    mine, theirs = (dict(itertools.islice(_leaves(value), _MOST_LEAVES)) for value in (before, after))
    paths = sorted({**mine, **theirs}, key=lambda path: (path[-1:] != ("logits",), len(path)))  # stable
    texts = [visible(format_path(("output",), path)) for path in paths]
    pairs = zip(texts[:_MOST_CHANGES], paths, strict=False)
    listed = [compared(text, mine.get(path), theirs.get(path)) for text, path in pairs]
    if not paths:
        return [], [f"the output, of type {type(after).__name__}, does not contain a tensor or number"]
    rest = texts[_MOST_CHANGES:]
    return listed, [f"{len(rest)} more parts of the output are not compared, from {rest[0]} on"] if rest else []


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the tensors and numbers in an output, each with the texts of its keys."""
    if isinstance(value, (Tensor, *NUMBERS)):
        yield path, value
    elif len(path) < _DEEPEST:
        for key, child in children(value) or ():
            yield from _leaves(child, (*path, key_text(key)))


def compared(path: str, before: Any, after: Any, only: str = "only in the output") -> OutputChange:
    """Returns the norms of two values and of their difference, and the entries that changed most.

    A norm is `None` if it is not known; the note says why. A value is `None` if it does not exist;
    `only` begins what the note then says.
    """
    value = after if before is None else before
    numbers = [Readable(None) if one is None else readable(_as_real(one)) for one in (before, after)]
    found = [None if one.tensor is None else _flat(one.tensor) for one in numbers]
    norms = [None if one is None else norm(one) for one in found]
    notes = [one.remark for one in numbers if one.remark]
    shapes = [torch.Size() if one.tensor is None else one.tensor.shape for one in numbers]
    first, second = found
    difference, largest = None, []
    if before is None or after is None:
        notes.append(f"{only} {'with' if before is None else 'without'} the patches")
    elif first is not None and second is not None and shapes[0] != shapes[1]:
        notes.append(f"not compared: shape {[*shapes[0]]} without the patches, {[*shapes[1]]} with them")
    elif first is not None and second is not None:
        changed = torch.where(first.isfinite() & second.isfinite(), second - first, 0.0)
        difference, top = norm(changed), changed.abs().topk(min(_MOST_ENTRIES, len(changed)))
        sizes = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        entries = sorted((-size, at) for size, at in sizes if size > 0)
        largest = [
            LargeChange([*map(int, np.unravel_index(at, shapes[0]))], float(first[at]), float(second[at]))
            for _, at in entries
        ]
        odd = [
            f"{int(one.isnan().sum()):,} NaN and {int(one.isinf().sum()):,} infinite {which} the patches"
            for one, which in ((first, "without"), (second, "with"))
            if not one.isfinite().all()
        ]
        if odd:
            notes.append(f"differences count only entries that are finite in both: {', '.join(odd)}")
        if getattr(value, "is_complex", lambda: isinstance(value, complex))():
            notes.append("the last index is 0 for the real part, 1 for the imaginary part")
    note = "; ".join(dict.fromkeys(notes)) or None
    return OutputChange(path, _shape_of(value), dtype_or_class(value), norms[0], norms[1], difference, largest, note)


def _as_real(value: Any) -> Any:
    """Returns a value, with a last dimension of real and imaginary parts if it is complex."""
    complex_value = torch.tensor(value) if isinstance(value, complex) else value
    if isinstance(complex_value, Tensor) and complex_value.is_complex() and complex_value.device.type != "meta":
        return torch.view_as_real(complex_value.detach().to_dense().resolve_conj())
    return value


# -- probes ------------------------------------------------------------------------------------------------------------


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


def copy_of(value: Any) -> Any:
    """Returns a copy of the value of a probe, which is not a part of the model any more."""
    if isinstance(value, list):
        return [copy_of(one) for one in value]
    return value.detach().clone() if isinstance(value, Tensor) else copied(value)


def probe_report(
    kept: KeptValue, before: KeptValue | None, labels: Callable[[str], TokenLabels | None], buffers: list[bytes]
) -> ProbeReport:
    """Returns the report on a probe; `before` is its value without the other patches. Adds to the buffers.

    `labels` returns the texts of the tokens along the value at a path.
    """
    chosen, shown, note = kept.chosen, kept.shown, kept.problem
    change = None
    if before is not None and note is None and (before.shown is not None or shown is not None):
        change = compared(chosen.path, *_comparable(before, kept), "not compared: it fired only")
        if before.problem is not None:
            change.note = f"not compared: without the patches, {before.problem}"
    view, pictures = None, list[Plot | None]([None, None])
    if shown is None:
        note = note or "it did not fire in this run"
    else:
        if chosen.definition.keeps_list and len(kept.value) > 1:
            note = f"{len(kept.value)} values were recorded; this is the last one"
        # The dimensions of a slice are not those of the value.
        view = view_of(chosen.path, shown, Plane(), labels(chosen.path) if chosen.slice is None else None, buffers)
        if before is not None and change is not None and change.norm_difference:
            both = [readable(one).tensor for one in (before.shown, shown)]
            if both[0] is not None and both[1] is not None and both[0].shape == both[1].shape:
                values = both[0], _flat(both[1]).sub(_flat(both[0])).view(both[0].shape)
                pictures = [picture(readable(value), Plane(), buffers) for value in values]
    return ProbeReport(chosen.number, str(chosen.name), chosen.path, view, note, change, *pictures)


def _comparable(before: KeptValue, kept: KeptValue) -> tuple[Any, Any]:
    """Returns the values of a probe in two runs; of records of one shape, all in one tensor, else the last ones."""
    both = before.value, kept.value
    if all(isinstance(values, list) and len(values) > 1 for values in both):
        shapes = {value.shape if isinstance(value, Tensor) else None for values in both for value in values}
        if len(both[0]) == len(both[1]) and len(shapes) == 1 and None not in shapes:
            return torch.stack(both[0]), torch.stack(both[1])
    return before.shown, kept.shown


# --------------------------------------------------------------------------------------------------------------------
# Plots of a value for the front end: a heatmap of two dimensions or a histogram, of limited size


SIDE = 256
"""The largest number of rows, and of columns, of a heatmap."""
_SIDE_OF_FACET = 64
_MOST_FACETS = 64
_BINS = 40
_PEAKED = 8
_FILL = 1e30
"""Larger numbers, such as the limits of a dtype, are fill values of masks. A block averages its other numbers."""


@dataclass(frozen=True)
class Plane:
    """The slice of a value to plot.

    Attributes:
        typed: The slice, which leaves one or two dimensions; `None`: the last two, at index 0 of the others.
        names: The values of the variables in it.
        axes: The dimensions of the value that are rows and columns. The slice may then leave one or two more, for
            facets: a picture for each of their indices.
    """

    typed: SliceText | None = None
    names: Mapping[str, int] = field(default_factory=dict)
    axes: tuple[int, int] | None = None

    @classmethod
    def of(cls, text: str | None, namespace: Mapping[str, Any], axes: tuple[int, int] | None = None) -> Plane:
        """Returns the slice that was typed; an empty text gives the default."""
        if text is None or not text.strip():
            return cls()
        try:
            typed = parse_slice(text)
            return cls(typed, {name: operator.index(namespace[name]) for name in typed.names}, axes)
        except ValueError as error:
            raise ChosenPatchError("plane", str(error)) from None
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
        if self.axes is not None:
            facets, kept = self.facets(tensor.dim()), self._kept(tensor.dim())
            if len(facets) > 2 or math.prod(shape[dim] for dim in facets) > _MOST_FACETS:
                what = f"{len(facets)} dimensions, {[shape[dim] for dim in facets]}"
                message = f"facets of {what} are too many: at most two dimensions, and {_MOST_FACETS} pictures"
                raise ChosenPatchError("plane", message)
            return part.permute([kept.index(dim) for dim in (*facets, *self.axes)])
        if part.dim() > 2:
            message = f"[{self.typed}] of a value of shape {shape} leaves {part.dim()} dimensions, {list(part.shape)}"
            repair = f"a heatmap shows two: write numbers for the others, as in {Plane().text(len(shape))}"
            raise ChosenPatchError("plane", f"{message}; {repair}")
        return part

    def parts(self, dims: int) -> list[int | slice]:
        """Returns the index of each dimension of a value, if dimensions are rows and columns by choice.

        Raises:
            ChosenPatchError: The slice has other parts than numbers and ranges, or leaves out a row or column.
        """
        index = self.index(dims)
        found = [*index] if isinstance(index, tuple) else [index]
        at = next((at for at, part in enumerate(found) if part is ...), len(found))
        found[at : at + 1] = [slice(None)] * (dims - len(found) + (at < len(found)))
        if len(found) != dims or not all(isinstance(part, (int, slice)) for part in found):
            raise ChosenPatchError(
                "plane", f"to choose rows and columns, write a number or a range for each of {dims} dimensions"
            )
        if self.axes is not None and not {*self.axes} <= {dim for dim in range(dims) if isinstance(found[dim], slice)}:
            raise ChosenPatchError("plane", f"the slice takes one index of dimension {self.axes[0]} or {self.axes[1]}")
        return found

    def _kept(self, dims: int) -> list[int]:
        return [dim for dim, part in enumerate(self.parts(dims)) if isinstance(part, slice)]

    def facets(self, dims: int) -> list[int]:
        """Returns the dimensions with a picture for each index."""
        return [] if self.axes is None else [dim for dim in self._kept(dims) if dim not in self.axes]

    def at(self, shape: Sequence[int], indices: Sequence[int]) -> Plane:
        """Returns the slice of one facet of a value, in the order of its dimensions."""
        parts: list[Any] = self.parts(len(shape))
        for dim, index in zip(self.facets(len(shape)), indices, strict=True):
            parts[dim] = range(*parts[dim].indices(shape[dim]))[index]
        words = [str(part) if isinstance(part, int) else _range_text(part) for part in parts]
        return Plane(parse_slice(", ".join(words)))

    def text(self, dims: int) -> str | None:
        """Returns the slice of a value with this number of dimensions as text; `None` for all of it."""
        if self.typed is not None:
            return str(self.typed)
        return ", ".join(["0"] * (dims - 2) + [":"] * min(dims, 2)) if dims > 1 else None


def view_of(path: str, value: Any, plane: Plane, labels: TokenLabels | None, buffers: list[bytes]) -> ActivationView:
    """Returns a value with its statistics and the plot of a slice. Adds the values of a heatmap to the buffers."""
    numbers = readable(value)
    view = ActivationView(path, statistics_of(value, numbers), picture(numbers, plane, buffers), None, None)
    plot = view.plot
    # A cell of a block has several labels.
    shown = plot.plots[0] if isinstance(plot, Facets) else plot
    if labels is not None and isinstance(shown, Heatmap) and shown.full == (shown.rows, shown.columns):
        tensor = numbers.tensor
        assert tensor is not None  # otherwise there is no heatmap
        dims = tensor.dim()
        one = plane if plane.axes is None else plane.at(tensor.shape, [0] * len(plane.facets(dims)))
        found = labels.of_axes(tensor, one.index(dims))
        is_turned = plane.axes is not None and plane.axes[0] > plane.axes[1]
        view.row_labels, view.column_labels = found[::-1] if is_turned else found
    return view


def _range_text(part: slice) -> str:
    ends = ["" if end is None else str(end) for end in (part.start, part.stop)]
    return ":".join([*ends, *([] if part.step is None else [str(part.step)])])


def picture(numbers: Readable, plane: Plane, buffers: list[bytes]) -> Plot:
    """Returns a heatmap of a slice of a value, or a histogram if the slice has one dimension or row."""
    tensor = numbers.tensor
    if tensor is None:
        return NoPlot(numbers.remark or "there are no numbers to show")
    if tensor.dim() == 0 and plane.typed is None:
        return NoPlot(f"one number: {float(tensor):.6g}")
    part, text = plane.part(tensor), plane.text(tensor.dim())
    found = statistics_of(part)
    if found.min is None:
        why = f"{found.nan} NaN, {found.infinite} infinite" if found.count else f"its shape is {found.shape}"
        return NoPlot(f"it has no finite elements: {why}")
    if part.dim() > 2:
        return _facets(part, plane, tensor.shape, str(text), buffers)
    if part.dim() < 2 or 1 in part.shape:
        return _histogram(part, text, found)
    return _heatmap(part, text, found, numbers.remark, buffers)


def _histogram(part: Tensor, text: str | None, found: Statistics) -> Histogram:
    low, high = float(found.min or 0), float(found.max or 0)
    margin = max(0.5, abs(low) * 1e-6) if low == high else 0.0
    edges = torch.linspace(low - margin, high + margin, (1 if margin else _BINS) + 1, dtype=torch.float64)
    flat = _flat(part).double()
    counts = torch.histogram(flat[flat.isfinite()], edges).hist
    return Histogram(counts.long().tolist(), edges.tolist(), text)


def _facets(part: Tensor, plane: Plane, shape: Sequence[int], text: str, buffers: list[bytes]) -> Facets:
    """Returns a picture for each index of the leading dimensions of a slice."""
    titles, plots = [], []
    for indices in np.ndindex(*part.shape[:-2]):
        own, one = part[indices], plane.at(shape, indices)
        index = one.index(len(shape))
        titles.append(", ".join(f"dim {dim}: {index[dim]}" for dim in plane.facets(len(shape))))
        plots.append(_heatmap(own, str(one.typed), statistics_of(own), None, buffers, _SIDE_OF_FACET))
    return Facets(titles, plots, part.shape[1] if part.dim() > 3 else None, text)


def _heatmap(
    part: Tensor, text: str | None, found: Statistics, remark: str | None, buffers: list[bytes], most: int | None = None
) -> Heatmap:
    rows, columns = part.shape
    side = most or SIDE
    block = (math.ceil(rows / side), math.ceil(columns / side))
    low, mean, high = float(found.min or 0), float(found.mean or 0), float(found.max or 0)
    # For few large values among many near zero, as in attention patterns, means would hide the large ones.
    takes_maxima = low >= 0 and high > _PEAKED * mean
    strips = [_reduced(part[at : at + block[0]], block, takes_maxima) for at in range(0, rows, block[0])]
    values = torch.cat(strips).numpy().astype("<f4")
    words = [remark] if remark else []
    if block != (1, 1):
        what = "greatest value" if takes_maxima else "mean"
        words.append(f"each cell is the {what} of {block[0]} x {block[1]} of {rows} x {columns} values")
    constant = low if low == high and not found.nan and not found.infinite else None
    buffers.append(values.tobytes())
    sent, reduced = values.shape, "; ".join(words) or None
    return Heatmap(len(buffers) - 1, sent[0], sent[1], (rows, columns), reduced, str(text), constant)


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
# Statistics of a value of any dtype. NaN and infinite elements are counted separately


_MOST_EXACT = 2**24
"""Larger values are not copied to float64, which would take eight times the memory of half precision."""


class Readable(NamedTuple):
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


def _flat(tensor: Tensor) -> Tensor:
    """Returns the elements of a tensor in order, on the CPU, in float64 unless there are too many."""
    is_exact = tensor.numel() <= _MOST_EXACT or tensor.dtype in (torch.float64, torch.int64)
    return tensor.reshape(-1).cpu().to(torch.float64 if is_exact else torch.float32)


def norm(elements: Tensor) -> float:
    """Returns the norm of the finite elements; at most the largest float64, since JSON has no infinity."""
    return min(float(elements[elements.isfinite()].norm()), sys.float_info.max)


def norm_of(value: Any) -> float:
    """Returns the norm of the finite elements of a value; 0 if it has none."""
    tensor = readable(value).tensor
    return 0.0 if tensor is None else norm(_flat(tensor))


def statistics_of(value: Any, numbers: Readable | None = None) -> Statistics:
    """Returns the statistics of a value, of which `numbers` are the elements.

    Example:
        >>> found = statistics_of(torch.tensor([1.0, 3.0, float("nan")]))
        >>> found.count, found.nan, found.mean, found.max
        (3, 1, 2.0, 3.0)
    """
    tensor = (readable(value) if numbers is None else numbers).tensor
    is_tensor = isinstance(value, Tensor)
    device, count = (str(value.device), value.numel()) if is_tensor else ("cpu", 1)
    found = Statistics(_shape_of(value), dtype_or_class(value), device, count)
    if tensor is not None:
        elements = _flat(tensor)
        finite = elements[elements.isfinite()]
        found.count, found.nan = len(elements), int(elements.isnan().sum())
        found.infinite = len(elements) - len(finite) - found.nan
        if len(finite):
            found.min, found.max = float(finite.min()), float(finite.max())
            # Divided before they are summed: the sum of large numbers would overflow.
            found.mean = mean = min(max(float((finite / len(finite)).sum()), found.min), found.max)
            if len(finite) > 1:
                found.std = norm((finite - mean) / math.sqrt(len(finite) - 1))
    return found


def _shape_of(value: Any) -> list[int]:
    return list(value.shape) if isinstance(value, Tensor) and not value.is_nested else []


def dtype_or_class(value: Any) -> str:
    """Returns the dtype name of a tensor, or the class name of a number.

    Example:
        >>> dtype_or_class(torch.ones(1)), dtype_or_class(True)
        ('float32', 'bool')
    """
    return dtype_name(value.dtype) if isinstance(value, Tensor) else type(value).__name__
