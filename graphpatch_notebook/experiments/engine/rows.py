"""The rows of cells in a batch: several cells share a forward, and each has its own rows of every value.

BatchRows, Layout   where the rows are in a value: found by comparing a run with one on twice the batch
RowsPatch           applies the patches of each cell to its rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.execution import Entry, apply_to_rows, leaves_of
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.values import IMMUTABLE, mapped, with_own_containers

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4, torch.complex128: 1e-9}
_COARSE = 3e-2


class CannotShareError(Exception):
    """Cells cannot share forwards, for the reason given (caught inside the package)."""


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The position of the rows in one value.

    Attributes:
        dim: The dimension that holds them; `None` for a value that all rows share.
        size: The size of that dimension for one cell.
    """

    dim: int | None
    size: int = 0

    def repeated(self, value: Tensor, count: int) -> Tensor:
        """Repeats the value for `count` cells."""
        if self.dim is None:
            return value
        repeats = [1] * value.dim()
        repeats[self.dim] = count
        return value.repeat(repeats)

    def parted(self, value: Tensor, count: int) -> Sequence[Tensor]:
        """Returns views of the rows of each cell."""
        if self.dim is None:
            return [value] * count
        if torch.is_grad_enabled() or not self.size:  # autograd refuses writes into views that one call made together
            return [value.narrow(self.dim, number * self.size, self.size) for number in range(count)]
        return value.split(self.size, self.dim)  # type: ignore[no-any-return]


Layout: TypeAlias = "tuple[BatchRows | None, ...]"
"""The position of the rows in each leaf of a nested container; `None` for leaves that are not tensors."""


def rows_of(one: Tensor, two: Any) -> BatchRows:
    """Returns the rows of a value, given this value in a run, and at twice the batch.

    Raises:
        CannotShareError: The first half of the latter is not the former.
    """
    if isinstance(two, Tensor) and one.dim() == two.dim():
        grown = [dim for dim, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
        if not grown:
            if is_close(two, one):
                return BatchRows(None)
            raise CannotShareError(f"a value of shape {tuple(one.shape)} is one for all rows")
        if len(grown) == 1 and two.shape[grown[0]] == 2 * (size := one.shape[grown[0]]):
            if is_close(two.narrow(grown[0], 0, size), one):
                return BatchRows(grown[0], size)
            raise CannotShareError("in one forward, patches of one cell reach the rows of another")
    shown = tuple(two.shape) if isinstance(two, Tensor) else type(two).__name__
    raise CannotShareError(f"a value of shape {tuple(one.shape)} becomes {shown} at twice the batch")


def layout_of(one: Any, two: Any) -> Layout:
    """Returns the same for each leaf of a nested container.

    Raises:
        CannotShareError: The containers differ, or hold something else than tensors and plain values.
    """
    ones, twos = list(leaves_of(one)), list(leaves_of(two))
    if len(ones) != len(twos):
        raise CannotShareError("the model returns another structure at twice the batch")
    pairs = list(zip(ones, twos, strict=True))
    for a, b in pairs:
        if not isinstance(a, Tensor) and not (isinstance(a, IMMUTABLE) and a == b):
            raise CannotShareError(f"the output holds a {type(a).__name__}, which has no rows")
    return tuple(rows_of(a, b) if isinstance(a, Tensor) else None for a, b in pairs)


def repeated(value: Any, layout: Layout, count: int) -> Any:
    """Repeats the tensors in a nested container for `count` cells."""
    places = iter(layout)

    def repeat(leaf: Any) -> Any:
        rows = next(places)
        return leaf if rows is None else rows.repeated(leaf, count)

    return mapped(value, repeat)


def parted(value: Any, layout: Layout, count: int) -> list[Any]:
    """Returns the part of each cell in a nested container, with separate containers for each; tensors are views.

    Example:
        >>> parted({"a": torch.arange(2)}, (BatchRows(0, 1),), 2)
        [{'a': tensor([0])}, {'a': tensor([1])}]
    """
    leaves = list(leaves_of(value))
    if len(leaves) != len(layout):
        raise CannotShareError("the model returned a value of another structure")
    parts = [
        [leaf] * count if rows is None else rows.parted(leaf, count) for leaf, rows in zip(leaves, layout, strict=True)
    ]

    def part(number: int) -> Any:
        own = iter([each[number] for each in parts])
        return with_own_containers(value, lambda _: next(own))

    return [part(number) for number in range(count)]


def is_close(value: Tensor, reference: Tensor) -> bool:
    """Whether two values are equal up to the rounding errors of kernels for other batch sizes."""
    if value.shape != reference.shape or value.dtype != reference.dtype:
        return False
    if not (value.is_floating_point() or value.is_complex()):
        return torch.equal(value, reference)
    value, reference = value.detach(), reference.detach()
    tolerance = _TOLERANCES.get(value.dtype, _COARSE)
    # A faster check for finite values: this function runs for many values.
    if not value.numel() or (value - reference).abs().max() <= tolerance * reference.abs().max():
        return True
    finite = reference[reference.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 0.0
    return torch.allclose(value, reference, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


class RowsPatch(Patch[Any]):
    """Applies the patches of each cell to its rows.

    Args:
        entries: For each cell, its entries on this value.
        rows: Where the rows are.
    """

    def __init__(self, entries: Sequence[Sequence[Entry]], rows: BatchRows) -> None:
        super().__init__(any_shape=True)  # each entry checks the shape of its rows
        self._entries, self._rows = entries, rows

    def op(self, original_output: Any) -> Any:
        dim, count = self._rows.dim, len(self._entries)
        value = original_output if isinstance(original_output, Tensor) else torch.empty(0)
        if dim is None or value.dim() <= dim or value.shape[dim] != self._rows.size * count:
            raise CannotShareError(f"a patched value of shape {tuple(value.shape)} has no rows where others had them")
        if torch.is_grad_enabled():  # many in-place writes would make a deep autograd graph
            return torch.cat([self._patched(*each) for each in enumerate(self._rows.parted(value, count))], dim)
        result = value.clone()
        for number, block in enumerate(self._rows.parted(result, count)):
            patched = self._patched(number, block)
            if patched is not block:
                block.copy_(patched)
        return result

    def _patched(self, number: int, block: Tensor) -> Tensor:
        """Returns the patched rows of a cell. Patches may write into the rows if these are part of a clone."""
        for entry in self._entries[number]:
            block = apply_to_rows(entry, block, is_own=not torch.is_grad_enabled())
        return block


class DoubledValue(Patch[Any]):
    """At twice the batch, finds the rows of a value, and replaces those of the second cell by wild ones.

    Args:
        value: The value in the run on the batch.

    Attributes:
        rows: Where the rows are; `None` if that is not known, or if they are shared.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(any_shape=True)
        self._value = value
        self.rows: BatchRows | None = None

    def op(self, original_output: Any) -> Any:
        try:
            rows = rows_of(self._value, original_output) if isinstance(self._value, Tensor) else BatchRows(None)
        except CannotShareError:
            return original_output
        if rows.dim is None:
            return original_output
        self.rows = rows
        own, other = original_output.split(rows.size, rows.dim)
        return torch.cat([own, wild(other)], rows.dim)


def wild(value: Tensor) -> Tensor:
    """Returns other numbers, larger than those of a value; integers and booleans in another order."""
    if not (value.is_floating_point() or value.is_complex()):
        return value.roll(1, -1)
    steps = torch.arange(1, value.numel() + 1, device=value.device, dtype=torch.float32).view(value.shape)
    return (steps.cos() * 100 * value.abs().max().clamp(min=1)).to(value.dtype)
