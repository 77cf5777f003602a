"""The report of a run: the outputs without and with the patches compared, and the values of probes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.checks.model_state import copied
from graphpatch_notebook.errors import PatchValueError
from graphpatch_notebook.execution import FUSED_MODULES, is_part_of_splice
from graphpatch_notebook.inspection.resolution import resolve
from graphpatch_notebook.notebook.display.labels import visible
from graphpatch_notebook.notebook.display.statistics import (
    Readable,
    bounded,
    dtype_or_class,
    norm,
    norm_of,
    pieces,
    readable,
    statistics_of,
    summary,
)
from graphpatch_notebook.notebook.display.tokens import TokenLabels
from graphpatch_notebook.notebook.run.model_calls import PatchMap
from graphpatch_notebook.notebook.run.value_plots import Plane, picture
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch, ChosenPatches
from graphpatch_notebook.notebook.session.session import ResolvedPatches
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import is_compiled
from graphpatch_notebook.values import NUMBERS, key_text, readable_children

_MOST_CHANGES = 8
_MOST_ENTRIES = 5
_MOST_LEAVES = 10_000


# -- outputs -----------------------------------------------------------------------------------------------------------


@dataclass
class Changes:
    """The differences between two outputs."""

    listed: list[dict[str, Any]] = field(default_factory=list)  # `Change`s of the front end, logits first
    remarks: list[str] = field(default_factory=list)  # about parts that are not compared


def changes(before: Any, after: Any) -> Changes:
    """Returns the differences between the outputs without and with the patches."""
    mine, theirs = _by_path(before), _by_path(after)
    paths = sorted({**mine, **theirs}, key=lambda path: (path[-1:] != ("logits",), len(path)))  # stable
    found = Changes()
    for path in paths[:_MOST_CHANGES]:
        found.listed.append(
            _change(_path_text(path), *(parts[path][0] if path in parts else None for parts in (mine, theirs)))
        )
    rest = paths[_MOST_CHANGES:]
    if rest:
        which = _path_text(rest[0]) if len(rest) == 1 else f"{_path_text(rest[0])} to {_path_text(rest[-1])}"
        found.remarks.append(f"{len(rest)} more parts of the output are not compared: {which}")
    alike = [path for path in paths if max(len(parts.get(path, ())) for parts in (mine, theirs)) > 1]
    if alike:
        which = ", ".join(map(_path_text, alike[:_MOST_ENTRIES])) + (", ..." if len(alike) > _MOST_ENTRIES else "")
        found.remarks.append(f"several parts of the output have the same path, only the first is compared: {which}")
    if not paths:
        found.remarks.append(f"the output, of type {type(after).__name__}, does not contain a tensor or number")
    return found


def _path_text(path: tuple[str, ...]) -> str:
    return visible(format_path(("output",), path))


def _by_path(value: Any) -> dict[tuple[str, ...], list[Any]]:
    """Returns the tensors and numbers in an output by path. Keys that differ only in their type have the same path."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for path, leaf in _leaves(value):
        found.setdefault(path, []).append(leaf)
    return found


def _leaves(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the tensors and numbers in an output, each with the texts of its keys."""
    waiting: list[tuple[tuple[str, ...], Any, frozenset[int]]] = [((), value, frozenset())]
    for _ in range(_MOST_LEAVES):
        if not waiting:
            return
        path, one, above = waiting.pop(0)
        if isinstance(one, (Tensor, *NUMBERS)):
            yield path, one
        elif id(one) not in above and (inside := readable_children(one)) is not None:  # it may contain itself
            waiting[:0] = [((*path, key_text(key)), child, above | {id(one)}) for key, child in inside]


def _change(path: str, before: Any, after: Any) -> dict[str, Any]:
    value = before if before is not None else after
    found = compared(before, after)
    notes = [found["note"]] if found["note"] else []
    if before is None or after is None:
        notes.append(f"only in the output {'with' if before is None else 'without'} the patches")
    elif found["largest"] and any(isinstance(one, complex) or _is_complex(one) for one in (before, after)):
        notes.append("the last number of an index is 0 for a real part, 1 for an imaginary part")
    return {
        "path": path,
        "shape": list(value.shape) if isinstance(value, Tensor) and not value.is_nested else [],
        "dtype": dtype_or_class(value),
        **found,
        **{what: found[what] or 0.0 for what in _NORMS},
        "note": "; ".join(notes) or None,
    }


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def _parts(value: Any, numbers: Readable) -> Tensor:
    """Returns the numbers to compare. Real and imaginary parts become a last dimension."""
    assert numbers.tensor is not None
    if isinstance(value, complex):
        return torch.tensor([value.real, value.imag], dtype=torch.float64)
    if not _is_complex(value):
        return numbers.tensor
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    return torch.view_as_real(dense.resolve_conj()).resolve_neg()


def _unlike(before: Any, after: Any) -> str | None:
    if isinstance(before, Tensor) != isinstance(after, Tensor):
        return f"not compared: {dtype_or_class(before)} without the patches, {dtype_or_class(after)} with them"
    if isinstance(before, Tensor) and before.shape != after.shape:
        return f"not compared: shape {list(before.shape)} without the patches, {list(after.shape)} with them"
    return None


def _compare(change: dict[str, Any], before: Tensor, after: Tensor) -> list[str]:
    """Sets the differences in `change`, and returns messages about numbers that are not finite or are rounded."""
    if before.shape != after.shape:  # of nested tensors
        return [f"not compared: {before.numel()} values without the patches, {after.numel()} with them"]
    change["norm_difference"] = norm(lambda: _differences(before, after))
    change["largest"] = _largest(before, after)
    notes = []
    for what, tensor in (("without", before), ("with", after)):
        found = summary(tensor) if tensor.is_floating_point() else None
        if found is not None and found.finite < found.count:
            kinds = [f"{found.nan} NaN"] * bool(found.nan) + [f"{found.infinite} infinite"] * bool(found.infinite)
            notes.append(f"{what} the patches {' and '.join(kinds)} of {found.count}")
    if not before.is_floating_point() and _exceeds_float64(before, after):
        notes.append("integers beyond 2**53 are rounded")
    elif notes:
        notes.append("differences count only entries that are finite in both")
    return notes


def compared(before: Any, after: Any) -> dict[str, Any]:
    """Returns the norms of two values and of their difference, and the entries that changed most.

    A norm is `None` if it is not known; the note says why. A value is `None` if it does not exist.
    """
    numbers = [Readable(None) if one is None else readable(one) for one in (before, after)]
    norms = [None if found.tensor is None else norm_of(found.tensor) for found in numbers]
    change: dict[str, Any] = {"norm_before": norms[0], "norm_after": norms[1], "norm_difference": None, "largest": []}
    notes = [found.remark for found in numbers if found.remark is not None]
    if before is not None and after is not None:
        if (unlike := _unlike(before, after)) is not None:
            notes.append(unlike)
        elif None not in norms:
            notes += _compare(change, *(_parts(*pair) for pair in zip((before, after), numbers, strict=True)))
    return {**change, "note": "; ".join(dict.fromkeys(notes)) or None}


def _exceeds_float64(*tensors: Tensor) -> bool:
    found = [summary(tensor) for tensor in tensors if tensor.dtype in (torch.int64, torch.uint64)]
    return any(abs(end) > 2**53 for one in found for end in (one.minimum, one.maximum) if end is not None)


def _differences(before: Tensor, after: Tensor) -> Iterator[Tensor]:
    """Yields the differences in pieces, with 0 for entries that are not finite in one of the two."""
    for first, second in zip(pieces(before), pieces(after), strict=True):
        difference = second - first
        is_finite = first.isfinite() & second.isfinite()
        limit = sys.float_info.max  # the difference of very large numbers overflows
        yield torch.where(is_finite, difference.clamp(-limit, limit), 0.0)


def _largest(before: Tensor, after: Tensor) -> list[dict[str, Any]]:
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
        {
            "index": [int(place) for place in np.unravel_index(at, before.shape)],
            "before": float(flat[0][at]),
            "after": float(flat[1][at]),
        }
        for _, at in found[:_MOST_ENTRIES]
    ]


# -- probes ------------------------------------------------------------------------------------------------------------


@dataclass
class Buffers:
    """The binary parts of a reply."""

    parts: list[bytes] = field(default_factory=list)

    def plot(self, plot: dict[str, Any], values: bytes | None) -> dict[str, Any]:
        """Adds the values of a plot, and returns the plot with their position."""
        if values is None:
            return plot
        self.parts.append(values)
        return {**plot, "buffer": len(self.parts) - 1}


LabelsOf: TypeAlias = "Callable[[str], TokenLabels | None]"
"""Returns the texts of the tokens along the value at a path."""


@dataclass(frozen=True)
class KeptValue:
    """The value that a probe or record kept in a run."""

    chosen: ChosenPatch
    value: Any
    problem: str | None = None

    @classmethod
    def of(
        cls, chosen: ChosenPatch, patch: Patch[Any], names: Mapping[str, Any], separate: Callable[[Any], Any]
    ) -> KeptValue:
        """Returns the value of a probe after a run."""
        try:
            return cls(chosen, separate(chosen.taken(patch, names)))
        except PatchValueError as error:
            return cls(chosen, None, str(error))

    def report(self, labels: LabelsOf, buffers: Buffers) -> dict[str, Any]:
        """Returns the `ProbeReport` of the front end."""
        report = {
            "number": self.chosen.number,
            "name": self.chosen.name,
            "path": self.chosen.path,
            "statistics": None,
            "plot": {"type": "none", "why": "nothing was kept"},
            "row_labels": None,
            "column_labels": None,
            "note": self.problem,
        }
        shown = self.value
        if self.chosen.definition.keeps_list and self.value is not None:
            shown = self.value[-1] if self.value else None
            if len(self.value) > 1:
                report["note"] = f"{len(self.value)} values were recorded; this is the last one"
        if shown is None:
            return {**report, "note": self.problem or "it did not fire in this run"}
        # The dimensions of a slice are not those of the value.
        own = labels(self.chosen.path) if self.chosen.slice is None else None
        return {**report, **shown_value(shown, own, buffers)}


def with_copied_weights(value: Any, model: Module) -> Any:
    """Returns a value with copies in place of parameters of the model and views of them.

    A user who writes into the variable of a probe does not mean to change the model.
    """
    if isinstance(value, list):
        return [with_copied_weights(one, model) for one in value]
    if not isinstance(value, Tensor):
        return value
    is_weight = isinstance(value, Parameter) or any(_share_memory(value, weight) for weight in model.parameters())
    return value.detach().clone() if is_weight else value


def _share_memory(one: Tensor, other: Tensor) -> bool:
    try:
        memory = one.untyped_storage().data_ptr()
        return memory != 0 and memory == other.untyped_storage().data_ptr()
    except Exception:  # some layouts and subclasses do not have a storage
        return False


def shown_value(value: Any, labels: TokenLabels | None, buffers: Buffers) -> dict[str, Any]:
    """Returns the statistics, plot and labels of a value."""
    numbers = readable(value)
    found = picture(numbers, Plane(), labels)
    return {
        "statistics": statistics_of(value, numbers),
        "plot": buffers.plot(found.plot, found.values),
        "row_labels": found.row_labels,
        "column_labels": found.column_labels,
    }


_NORMS = ("norm_before", "norm_after", "norm_difference")


class ProbedCalls:
    """The calls of a run: the first without the patches, the last with them.

    If patches change values and there are probes, the call before the last one has the probes as its only patches. This
    is the first call, unless probes can change rounding: then the first call has no patches at all.

    Attributes:
        maps: The patch map of each call.
        unpatched: The probes of the call before the last one; empty if there is nothing to compare.
    """

    def __init__(
        self, root: Frame, chosen: ChosenPatches, resolved: ResolvedPatches, namespace: dict[str, Any]
    ) -> None:
        self.maps: list[PatchMap] = [{}, resolved.patch_map] if resolved.patch_map else [{}]
        self.unpatched: list[tuple[ChosenPatch, Patch[Any]]] = []
        self._without: list[KeptValue] = []
        if not resolved.observing or all(one.definition.keeps is not None for one in chosen.enabled):
            return
        # Parts of splices do not exist without the splices.
        in_model = [one for one, _ in resolved.observing if not is_part_of_splice(root, one.path)]
        self.unpatched = [(one, one.patch(namespace)) for one in in_model]
        probes: dict[str, list[Patch[Any]]] = {}
        for one, patch in self.unpatched:
            probes.setdefault(one.path, []).append(patch)
        self.maps = [*([{}] if _change_rounding(root, probes) else []), probes, resolved.patch_map]

    def take(self, names: Mapping[str, Any]) -> None:
        """Stores copies of what the probes of the call before the last one kept."""
        self._without = [_apart(KeptValue.of(one, patch, names, lambda value: value)) for one, patch in self.unpatched]

    def reports(self, kept: list[KeptValue], labels: LabelsOf, buffers: Buffers) -> list[dict[str, Any]]:
        """Returns the `ProbeReport`s of the front end, given the values of the last call."""
        reports = [one.report(labels, buffers) for one in kept]
        before = {one.chosen.number: one for one in self._without}
        pairs = [(before.get(one.chosen.number), one) for one in kept]
        changes = [None if first is None else probe_change(first, second) for first, second in pairs]
        return [{**report, "change": change} for report, change in zip(reports, changes, strict=True)]


def _apart(kept: KeptValue) -> KeptValue:
    try:
        return replace(kept, value=copied(kept.value))
    except Exception as error:
        return replace(kept, value=None, problem=f"the value cannot be copied ({type(error).__name__}: {error})")


def _change_rounding(root: Frame, probed: Iterable[str]) -> bool:
    """Whether probes may change rounding: some calls run as one kernel without, and step by step with them."""
    return any(resolve(root, path).node.composite is not None for path in probed) or any(
        isinstance(frame.module, FUSED_MODULES) or is_compiled(frame.module) or frame.has_own_graph
        for frame in root.walk()
    )


def probe_change(before: KeptValue, after: KeptValue) -> dict[str, Any] | None:
    """Returns the `ProbeChange` of the front end; `None` without values or numbers.

    For a record, the norms are sums over its values.
    """
    if after.problem is not None:  # the report of the probe has the message
        return None
    if before.problem is not None:
        return _unknown(f"not compared: without the patches, {before.problem}")
    first, second = (_values(one) for one in (before, after))
    if len(first) != len(second):
        return _unknown(_of_other_length(before, after))
    pairs = [compared(*pair) for pair in zip(first, second, strict=True)]
    if all(pair["norm_before"] is None and pair["norm_after"] is None for pair in pairs):
        return None
    notes = [pair["note"] for pair in pairs if pair["note"] is not None]
    if len(pairs) > 1:
        notes.insert(0, f"sums of the norms of {len(pairs)} recorded values")
    return {
        **{what: _sum([pair[what] for pair in pairs]) for what in _NORMS},
        "note": "; ".join(dict.fromkeys(notes)) or None,
    }


def _values(kept: KeptValue) -> list[Any]:
    if kept.chosen.definition.keeps_list:
        return list(kept.value)
    return [] if kept.value is None else [kept.value]


def _of_other_length(before: KeptValue, after: KeptValue) -> str:
    if not _values(before) or not _values(after):
        return f"not compared: it fired only {'without' if _values(before) else 'with'} the patches"
    return f"not compared: {len(before.value)} values were recorded without the patches, {len(after.value)} with them"


def _sum(norms: list[float | None]) -> float | None:
    known = [norm for norm in norms if norm is not None]
    return bounded(math.fsum(known)) if len(known) == len(norms) else None


def _unknown(note: str) -> dict[str, Any]:
    return {**dict.fromkeys(_NORMS), "note": note}
