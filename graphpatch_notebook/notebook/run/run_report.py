"""What a run has changed, for the front end: outputs without and with the patches, and what probes kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from graphpatch_notebook.errors import PatchValueError
from graphpatch_notebook.notebook.display.labels import visible
from graphpatch_notebook.notebook.display.statistics import (
    Readable,
    dtype_name,
    norm,
    norm_of,
    pieces,
    readable,
    statistics_of,
    summary,
)
from graphpatch_notebook.notebook.display.tokens import TokenLabels
from graphpatch_notebook.notebook.run.views_2d import axis_labels, nothing, picture
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import key_text, readable_children

_MOST_CHANGES = 8
_MOST_ENTRIES = 5
_MOST_LEAVES = 10_000
_NUMBERS = (bool, int, float, complex)


# -- outputs -----------------------------------------------------------------------------------------------------------


@dataclass
class Changes:
    """What is different in the output.

    Attributes:
        listed: The `Change`s of the front end: logits first, then what lies least deep.
        remarks: What is to be said besides.
    """

    listed: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def changes(before: Any, after: Any) -> Changes:
    """Returns how the output with the patches differs from that without."""
    mine, theirs = _by_path(before), _by_path(after)
    paths = sorted({**mine, **theirs}, key=lambda path: (path[-1:] != ("logits",), len(path)))  # stable
    found = Changes()
    for path in paths[:_MOST_CHANGES]:
        found.listed.append(
            _change(_shown(path), *(parts[path][0] if path in parts else None for parts in (mine, theirs)))
        )
    rest = paths[_MOST_CHANGES:]
    if rest:
        which = _shown(rest[0]) if len(rest) == 1 else f"{_shown(rest[0])} to {_shown(rest[-1])}"
        found.remarks.append(f"{len(rest)} more parts of the output are not compared: {which}")
    alike = [path for path in paths if max(len(parts.get(path, ())) for parts in (mine, theirs)) > 1]
    if alike:
        which = ", ".join(map(_shown, alike[:_MOST_ENTRIES])) + (", ..." if len(alike) > _MOST_ENTRIES else "")
        found.remarks.append(f"several parts of the output have the same path, only the first is compared: {which}")
    if not paths:
        found.remarks.append(f"there is no tensor or number in the output, an object of type {type(after).__name__}")
    return found


def _shown(path: tuple[str, ...]) -> str:
    return visible(format_path(("output",), path))


def _by_path(value: Any) -> dict[tuple[str, ...], list[Any]]:
    """Returns the tensors and numbers in an output; several have one path where keys differ only in their type."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for path, leaf in _leaves(value):
        found.setdefault(path, []).append(leaf)
    return found


def _leaves(value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the tensors and numbers in an output, each with the texts of the keys that lead to it."""
    waiting: list[tuple[tuple[str, ...], Any, frozenset[int]]] = [((), value, frozenset())]
    for _ in range(_MOST_LEAVES):
        if not waiting:
            return
        path, one, above = waiting.pop(0)
        if isinstance(one, (Tensor, *_NUMBERS)):
            yield path, one
        elif id(one) not in above and (inside := readable_children(one)) is not None:  # it may hold itself
            waiting[:0] = [((*path, key_text(key)), child, above | {id(one)}) for key, child in inside]


def _change(path: str, before: Any, after: Any) -> dict[str, Any]:
    value = before if before is not None else after
    change: dict[str, Any] = {
        "path": path,
        "shape": list(value.shape) if isinstance(value, Tensor) and not value.is_nested else [],
        "dtype": dtype_name(value),
        "norm_before": 0.0,
        "norm_after": 0.0,
        "norm_difference": 0.0,
        "largest": [],
        "note": None,
    }
    numbers = [readable(one) if one is not None else Readable(None) for one in (before, after)]
    notes = []
    for what, found in zip(("norm_before", "norm_after"), numbers, strict=True):
        if found.tensor is not None:
            change[what] = norm_of(found.tensor)
        if found.remark is not None and found.remark not in notes:
            notes.append(found.remark)
    if before is None or after is None:
        notes.append(f"only there {'with' if before is None else 'without'} the patches")
    elif (unlike := _unlike(before, after)) is not None:
        notes.append(unlike)
    elif numbers[0].tensor is not None and numbers[1].tensor is not None:
        notes += _compare(change, *(_parts(*pair) for pair in zip((before, after), numbers, strict=True)))
        if change["largest"] and any(isinstance(one, complex) or _is_complex(one) for one in (before, after)):
            notes.append("the last number of an index is 0 for a real part, 1 for an imaginary one")
    change["note"] = "; ".join(notes) or None
    return change


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def _parts(value: Any, numbers: Readable) -> Tensor:
    """Returns the numbers to compare: of complex ones real and imaginary parts, in a last dimension of their own."""
    assert numbers.tensor is not None
    if isinstance(value, complex):
        return torch.tensor([value.real, value.imag], dtype=torch.float64)
    if not _is_complex(value):
        return numbers.tensor
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    return torch.view_as_real(dense.resolve_conj()).resolve_neg()


def _unlike(before: Any, after: Any) -> str | None:
    if isinstance(before, Tensor) != isinstance(after, Tensor):
        return f"not compared: {dtype_name(before)} without the patches, {dtype_name(after)} with them"
    if isinstance(before, Tensor) and before.shape != after.shape:
        return f"not compared: shape {list(before.shape)} without the patches, {list(after.shape)} with them"
    return None


def _compare(change: dict[str, Any], before: Tensor, after: Tensor) -> list[str]:
    """Fills in the differences; returns what is to be said of numbers that are not finite."""
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
    if not before.is_floating_point() and _is_beyond_doubles(before, after):
        notes.append("integers beyond 2**53 are rounded")
    elif notes:
        notes.append("differences are those of entries that are finite in both")
    return notes


def compared(before: Any, after: Any) -> dict[str, Any]:
    """Returns the norms of two values and of their difference; `None` where there is none, and a note says why."""
    numbers = [readable(one) for one in (before, after)]
    first, second = (None if found.tensor is None else norm_of(found.tensor) for found in numbers)
    difference: dict[str, Any] = {"norm_difference": None}
    notes = [found.remark for found in numbers if found.remark is not None]
    if (unlike := _unlike(before, after)) is not None:
        notes.append(unlike)
    elif first is not None and second is not None:
        notes += _compare(difference, *(_parts(*pair) for pair in zip((before, after), numbers, strict=True)))
    return {
        "norm_before": first,
        "norm_after": second,
        "norm_difference": difference["norm_difference"],
        "note": "; ".join(dict.fromkeys(notes)) or None,
    }


def _is_beyond_doubles(*tensors: Tensor) -> bool:
    found = [summary(tensor) for tensor in tensors if tensor.dtype in (torch.int64, torch.uint64)]
    return any(abs(end) > 2**53 for one in found for end in (one.minimum, one.maximum) if end is not None)


def _differences(before: Tensor, after: Tensor) -> Iterator[Tensor]:
    """Yields the differences in pieces; zero where one of the two is not finite."""
    for first, second in zip(pieces(before), pieces(after), strict=True):
        difference = second - first
        is_finite = first.isfinite() & second.isfinite()
        limit = sys.float_info.max  # of very large numbers the difference has no float64
        yield torch.where(is_finite, difference.clamp(-limit, limit), 0.0)


def _largest(before: Tensor, after: Tensor) -> list[dict[str, Any]]:
    """Returns the entries that changed most."""
    found: list[tuple[float, int]] = []
    start = 0
    for piece in _differences(before, after):
        top = piece.abs().topk(min(_MOST_ENTRIES, len(piece)))
        found += zip(top.values.tolist(), (start + top.indices).tolist(), strict=True)
        start += len(piece)
    found = sorted((entry for entry in found if entry[0] > 0), key=lambda entry: (-entry[0], entry[1]))
    flat = before.reshape(-1), after.reshape(-1)
    return [
        {"index": _unravelled(at, before.shape), "before": float(flat[0][at]), "after": float(flat[1][at])}
        for _, at in found[:_MOST_ENTRIES]
    ]


def _unravelled(at: int, shape: torch.Size) -> list[int]:
    index = []
    for size in reversed(shape):
        at, inside = divmod(at, size)
        index.append(inside)
    return index[::-1]


# -- probes ------------------------------------------------------------------------------------------------------------


@dataclass
class Buffers:
    """The binary parts of a reply."""

    parts: list[bytes] = field(default_factory=list)

    def plot(self, plot: dict[str, Any], values: bytes | None) -> dict[str, Any]:
        """Returns the plot, with the place of its values, which are added."""
        if values is None:
            return plot
        self.parts.append(values)
        return {**plot, "buffer": len(self.parts) - 1}


@dataclass(frozen=True)
class Taken:
    """What a probe or record kept in a run.

    Attributes:
        chosen: The probe.
        value: What its variable receives; `None` if there is nothing for it.
        problem: Why what was kept is no result.
    """

    chosen: ChosenPatch
    value: Any
    problem: str | None = None

    @classmethod
    def of(
        cls, chosen: ChosenPatch, patch: Patch[Any], names: Mapping[str, Any], separate: Callable[[Any], Any]
    ) -> Taken:
        """Returns it.

        Args:
            chosen: The probe.
            patch: The same, after the run.
            names: The variables in its slice.
            separate: Makes a value stay what it is when the state of the model is put back.
        """
        try:
            return cls(chosen, separate(chosen.taken(patch, names)))
        except PatchValueError as error:
            return cls(chosen, None, str(error))

    def report(self, labels: TokenLabels | None, buffers: Buffers) -> dict[str, Any]:
        """Returns the `ProbeReport` of the front end.

        Args:
            labels: The texts of the tokens that the model was run on.
            buffers: Takes the values of the heatmap.
        """
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
        # What a slice leaves has dimensions of its own, which may only look like those of tokens.
        return {**report, **shown_value(shown, labels if self.chosen.slice is None else None, buffers)}


def apart_from_weights(value: Any, model: Module) -> Any:
    """Returns what a probe or record kept, with copies in place of parameters of the model and of parts of them.

    Who has one in a variable may write into it, and does not mean the model.
    """
    if isinstance(value, list):
        return [apart_from_weights(one, model) for one in value]
    if not isinstance(value, Tensor):
        return value
    is_weight = isinstance(value, Parameter) or any(_share_memory(value, weight) for weight in model.parameters())
    return value.detach().clone() if is_weight else value


def _share_memory(one: Tensor, other: Tensor) -> bool:
    try:
        memory = one.untyped_storage().data_ptr()
        return memory != 0 and memory == other.untyped_storage().data_ptr()
    except Exception:  # some layouts and subclasses have no memory of their own
        return False


def shown_value(value: Any, labels: TokenLabels | None, buffers: Buffers) -> dict[str, Any]:
    """Returns statistics, plot and labels of a value."""
    numbers = readable(value)
    found = picture(numbers, None, {}) if numbers.tensor is not None else nothing(str(numbers.remark))
    rows, columns = axis_labels(numbers.tensor, found, labels)
    return {
        "statistics": statistics_of(value, numbers),
        "plot": buffers.plot(found.plot, found.values),
        "row_labels": rows,
        "column_labels": columns,
    }
