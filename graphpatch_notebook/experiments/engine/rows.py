"""The rows of cells in a batch: several cells share a forward, and each has its own rows of every value.

BatchRows, Layout   where the rows are in a value: found by comparing a run with a forward on a larger batch
RowsPatch           applies the patches of each cell to its rows
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patching import Entry, apply_to_rows, leaves_of
from graphpatch_notebook.values import IMMUTABLE, mapped, with_own_containers

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4, torch.complex128: 1e-9}
_COARSE = 3e-2


class CannotShareError(Exception):
    """Cells cannot share forwards, for the reason given (caught inside the package)."""


class RowsNotFoundError(Exception):
    """A value that cells patch has no rows in this forward (caught inside the package)."""


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

    def last(self, value: Tensor) -> Tensor:
        """Returns a view of the last rows, as many as one cell has."""
        return value if self.dim is None else value.narrow(self.dim, value.shape[self.dim] - self.size, self.size)

    def are_in(self, value: Tensor, count: int) -> bool:
        """Whether a value has the rows of so many cells."""
        return self.dim is not None and value.dim() > self.dim and value.shape[self.dim] == self.size * count


Layout: TypeAlias = "tuple[BatchRows | None, ...]"
"""The position of the rows in each leaf of a nested container; `None` for leaves that are not tensors."""


def rows_of(one: Tensor, many: Any, count: int, batch: int) -> BatchRows:
    """Returns the rows of a value, given this value in a run, and in a forward with that run as the last of several.

    Args:
        one: The value in the run.
        many: The value in the forward.
        count: How often the batch of the run is repeated there.
        batch: The size of the batch of the run.

    Raises:
        CannotShareError: The shapes do not tell, or the last rows are not those of the run.
    """
    if isinstance(many, Tensor) and one.dim() == many.dim():
        grown = [dim for dim, (a, b) in enumerate(zip(one.shape, many.shape, strict=True)) if a != b]
        if not grown:
            return BatchRows(None)
        dim = grown[0]
        if len(grown) == 1 and many.shape[dim] == count * one.shape[dim]:
            rows = BatchRows(dim, one.shape[dim])
            # A dimension that holds more than the batch, such as heads, may hold it in another order.
            if rows.size == batch or is_close(rows.last(many), one):
                return rows
    shown = tuple(many.shape) if isinstance(many, Tensor) else type(many).__name__
    raise CannotShareError(
        f"a value of shape {tuple(one.shape)} becomes {shown} where the batch is {count} times as large"
    )


def layout_of(one: Any, many: Any, count: int, batch: int) -> Layout:
    """Returns the same for each leaf of a nested container.

    Raises:
        CannotShareError: The containers differ, or hold something else than tensors and plain values.
    """
    ones, others = list(leaves_of(one)), list(leaves_of(many))
    if len(ones) != len(others):
        raise CannotShareError("the model returns another structure on a larger batch")
    pairs = list(zip(ones, others, strict=True))
    for a, b in pairs:
        if not isinstance(a, Tensor) and not (isinstance(a, IMMUTABLE) and a == b):
            raise CannotShareError(f"the output holds a {type(a).__name__}, which has no rows")
    return tuple(rows_of(a, b, count, batch) if isinstance(a, Tensor) else None for a, b in pairs)


def layout_of_output(one: Any, many: Any, count: int, batch: int) -> Layout:
    """Returns the same for the output of the model, whose last rows must be those of the run, whatever others hold.

    Raises:
        CannotShareError: They are not, or a tensor has no rows.
    """
    layout = layout_of(one, many, count, batch)
    for rows, a, b in zip(layout, leaves_of(one), leaves_of(many), strict=True):
        if rows is not None and rows.dim is None:
            raise CannotShareError("the output has a tensor that is one for all rows")
        if rows is not None and not is_close(rows.last(b), a):
            raise CannotShareError("in one forward, patches of one cell reach the rows of another")
    return layout


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

    In the first forward, it finds the rows. The last two blocks of rows are then for checks: wild numbers, which must
    change nothing in the others, and the run without patches.

    Args:
        entries: For each cell, its entries on this value.
        mark: The value in the run without patches.
        rows: Where the rows are; `None` in the first forward.
        batch: The size of the batch for one cell.

    Attributes:
        rows: Where the rows are; `None` if that is not known, or if they are shared.
    """

    def __init__(self, entries: Sequence[Sequence[Entry]], value: Any, rows: BatchRows | None, batch: int) -> None:
        super().__init__(any_shape=True)  # each entry checks the shape of its rows
        self.rows, self._is_first = rows, rows is None
        self._entries, self._value, self._batch = entries, value, batch

    def op(self, original_output: Any) -> Any:
        value, count = original_output, len(self._entries) + 2 * self._is_first
        if self._is_first and isinstance(value, Tensor) and isinstance(self._value, Tensor):
            with suppress(CannotShareError):
                found = rows_of(self._value, value, count, self._batch)
                self.rows = None if found.dim is None else found
        rows = self.rows
        if rows is None and not any(self._entries):
            return value
        if rows is None or rows.dim is None or not isinstance(value, Tensor) or not rows.are_in(value, count):
            raise RowsNotFoundError(f"a patched value of type {type(value).__name__} has no rows where others had them")
        if torch.is_grad_enabled():  # many in-place writes would make a deep autograd graph
            return torch.cat([self._patched(*each) for each in enumerate(rows.parted(value, count))], rows.dim)
        result = value.clone()
        for number, block in enumerate(rows.parted(result, count)):
            patched = self._patched(number, block)
            if patched is not block:
                block.copy_(patched)
        return result

    def _patched(self, number: int, block: Tensor) -> Tensor:
        """Returns the patched rows of a cell. Patches may write into the rows if these are part of a clone."""
        if number >= len(self._entries):
            return wild(block) if number == len(self._entries) else block
        for entry in self._entries[number]:
            block = apply_to_rows(entry, block, is_own=not torch.is_grad_enabled())
        return block


def wild(value: Tensor) -> Tensor:
    """Returns other numbers, larger than those of a value; integers and booleans in another order."""
    if not (value.is_floating_point() or value.is_complex()):
        return value.roll(1, -1)
    steps = torch.arange(1, value.numel() + 1, device=value.device, dtype=torch.float32).view(value.shape)
    return (steps.cos() * 100 * value.abs().max().clamp(min=1)).to(value.dtype)
