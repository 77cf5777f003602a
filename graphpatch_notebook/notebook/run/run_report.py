"""The report of a run: the outputs without and with the patches compared, and the values of probes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.errors import PatchValueError
from graphpatch_notebook.notebook.display.labels import visible
from graphpatch_notebook.notebook.display.statistics import (
    Readable,
    dtype_or_class,
    finite_pieces,
    norm,
    pieces,
    readable,
    statistics_of,
)
from graphpatch_notebook.notebook.display.tokens import TokenLabels
from graphpatch_notebook.notebook.messages import Heatmap, LargeChange, NoPlot, OutputChange, ProbeReport
from graphpatch_notebook.notebook.run.value_plots import Plane, picture
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patching.model_state import copied
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import NUMBERS, key_text, readable_children

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
