"""The rows of cells in a batch: several cells share a forward, and each has its own rows of every value.

BatchRows, Layout   where the rows are in a value
RowsPatch           applies the patches of each cell to its rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.checks.dimensions import batch_inputs
from graphpatch_notebook.execution import Entry, apply_to_rows, leaves_of
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.values import mapped, readable_children, rebuilt, with_own_containers

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4, torch.complex128: 1e-9}
_COARSE = 3e-2


class RowsError(Exception):
    """Cells cannot share a forward, for the reason given (caught inside the package)."""


@dataclass(frozen=True, slots=True)
class BatchRows:
    """The position of the rows in one value.

    Attributes:
        dim: The dimension that holds them; `None` for a value that all rows share.
        size: The size of that dimension for one cell.
    """

    dim: int | None
    size: int = 0

    def repeated(self, value: Tensor, count: int, *, may_share: bool = False) -> Tensor:
        """Repeats the value for `count` cells. With `may_share`, the result may be a view; do not write into it."""
        if self.dim is None:
            return value
        if may_share and self.size == 1:
            return value.expand([count if dim == self.dim else -1 for dim in range(value.dim())])
        repeats = [1] * value.dim()
        repeats[self.dim] = count
        return value.repeat(repeats)

    def taken(self, value: Tensor, number: int) -> Tensor:
        """Returns a view of the rows of one cell."""
        return value if self.dim is None else value.narrow(self.dim, number * self.size, self.size)

    def parted(self, value: Tensor, first: int, end: int) -> Sequence[Tensor]:
        """Returns the rows of each cell from `first` to `end`, by one call if possible: many take four times longer."""
        # Autograd refuses writes into views that one call made together.
        if self.dim is None or not self.size or torch.is_grad_enabled():
            return [self.taken(value, number) for number in range(first, end)]
        own = value.narrow(self.dim, first * self.size, (end - first) * self.size)
        return own.split(self.size, self.dim)  # type: ignore[no-any-return]


Layout = tuple[BatchRows | None, ...]
"""The position of the rows in each leaf of a nested container; `None` for leaves that are not tensors."""


def repeated(value: Any, layout: Layout, count: int, *, may_share: bool = False) -> Any:
    """Repeats the tensors in a nested container for `count` cells."""
    places = iter(layout)

    def repeat(leaf: Any) -> Any:
        rows = next(places)
        return leaf if rows is None else rows.repeated(leaf, count, may_share=may_share)

    return mapped(value, repeat)


def taken(value: Any, layout: Layout, number: int) -> Any:
    """Returns the part of a nested container that belongs to one cell; tensors are views."""
    places = iter(layout)

    def take(leaf: Any) -> Any:
        rows = next(places)
        return leaf if rows is None else rows.taken(leaf, number)

    return with_own_containers(value, take)


def parted(value: Any, layout: Layout, count: int) -> list[Any]:
    """Returns `taken` for each of the first `count` cells, with separate containers for each.

    Example:
        >>> parted({"a": torch.arange(3)}, (BatchRows(0, 1),), 2)
        [{'a': tensor([0])}, {'a': tensor([1])}]
    """
    places = iter(layout)

    def parts(value: Any) -> Sequence[Any]:
        inside = None if isinstance(value, Tensor) else readable_children(value)
        if inside is None:
            rows = next(places)
            return [value] * count if rows is None else rows.parted(value, 0, count)
        kind, keys = type(value), [key for key, _ in inside]
        if not keys:
            return [rebuilt(kind, keys, []) for _ in range(count)]
        return [rebuilt(kind, keys, items) for items in zip(*(parts(child) for _, child in inside), strict=True)]

    return [*parts(value)]


def row_inputs(inputs: Inputs) -> Layout:
    """Returns the position of the rows in the inputs: dimension 0 of all tensors with the size of the first one there.

    Raises:
        RowsError: No input is a tensor with a dimension, or one is an object (such as a cache) that cannot be repeated.
    """
    leaves = list(leaves_of((inputs.args, inputs.kwargs)))
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, bool, int, float, complex, str, torch.dtype, torch.device, type(None))):
            raise RowsError(f"an input is of type {type(leaf).__name__}, which cannot be repeated")
    with_batch = batch_inputs([leaf.shape if isinstance(leaf, Tensor) else () for leaf in leaves])
    if not with_batch:
        raise RowsError("no input has a batch dimension")
    return tuple(
        (BatchRows(0, leaf.shape[0]) if number in with_batch else BatchRows(None)) if isinstance(leaf, Tensor) else None
        for number, leaf in enumerate(leaves)
    )


def repeated_inputs(inputs: Inputs, layout: Layout, count: int) -> Inputs:
    """Returns inputs for `count` cells."""
    args, kwargs = repeated((inputs.args, inputs.kwargs), layout, count)
    return Inputs(args, kwargs)


def is_close(value: Tensor, reference: Tensor) -> bool:
    """Whether two values are equal up to the rounding errors of kernels for other batch sizes."""
    if value.shape != reference.shape:
        return False
    if not (value.is_floating_point() or value.is_complex()):
        return torch.equal(value, reference)
    value, reference = value.detach(), reference.detach()
    tolerance = _TOLERANCES.get(value.dtype, _COARSE)
    if not reference.numel():
        return True
    # A faster check for finite values: this function runs for many values.
    if (value - reference).abs().max().item() <= tolerance * reference.abs().max().item():
        return True
    finite = reference[reference.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 0.0
    return torch.allclose(value, reference, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


class RowsPatch(Patch[Any]):
    """Applies the patches of each cell, all of them pure (see `is_pure`), to its rows.

    Args:
        entries: For each cell, its entries on this value.
        rows: Where the rows are.
        perturbed: The number of further cells, which get perturbed values.
    """

    def __init__(self, entries: Sequence[Sequence[Entry]], rows: BatchRows, *, perturbed: int = 0) -> None:
        super().__init__(any_shape=True)  # each entry checks the shape of its rows
        self._entries, self._rows = entries, rows
        self._count = len(entries) + perturbed
        self._blocks = [*range(len(entries)), *([len(entries)] if perturbed else [])]
        self._touched = [number for number in self._blocks if number == len(entries) or entries[number]]

    def op(self, original_output: Any) -> Any:
        dim, size = self._rows.dim, self._rows.size
        if not isinstance(original_output, Tensor):
            raise RowsError(f"a patched value is not a tensor but of type {type(original_output).__name__}")
        assert dim is not None
        count = self._count
        if original_output.dim() <= dim or original_output.shape[dim] != size * count:
            raise RowsError(
                f"a patched value of shape {tuple(original_output.shape)} has no rows where others had them"
            )
        if torch.is_grad_enabled():  # many in-place writes would make a deep autograd graph
            blocks = [self._block(original_output, number) for number in self._blocks]
            pieces = [self._piece(number, block) for number, block in enumerate(blocks)]
            is_same = all(piece is block for piece, block in zip(pieces, blocks, strict=True))
            return original_output if is_same else torch.cat(pieces, dim)
        if not self._touched:
            return original_output
        result, first = original_output.clone(), self._touched[0]
        own = self._rows.parted(result, first, min(self._touched[-1] + 1, len(self._entries)))
        for number in self._touched:
            block = own[number - first] if number < len(self._entries) else self._block(result, number)
            piece = self._piece(number, block)
            if piece is not block:
                block.copy_(piece)
        return result

    def _block(self, value: Tensor, number: int) -> Tensor:
        """Returns the rows of a cell; those of all perturbed cells for the number after the last cell."""
        if number < len(self._entries):
            return self._rows.taken(value, number)
        assert self._rows.dim is not None
        first = number * self._rows.size
        return value.narrow(self._rows.dim, first, value.shape[self._rows.dim] - first)

    def _piece(self, number: int, block: Tensor) -> Tensor:
        """Returns the patched rows of a block. Patches may write into the rows if these are part of a clone."""
        if number == len(self._entries):
            assert self._rows.dim is not None
            return perturbed(block, self._rows.dim)
        for entry in self._entries[number]:
            block = apply_to_rows(entry, block, is_own=not torch.is_grad_enabled())
        return block


def perturbed_cells(size: int) -> int:
    """Returns the number of perturbed cells so that most rows in a batch have positive offsets: a median changes, too.

    The batch holds one other cell.

    Args:
        size: The number of rows of one cell.
    """
    return max(2, 5 - size)


def perturbed(value: Tensor, dim: int) -> Tensor:
    """Returns the value with large offsets that vary by element: negative in the first row, positive in the others.

    Integers and booleans are reordered instead.

    Args:
        value: The value.
        dim: The dimension of the rows.

    Example:
        >>> (perturbed(torch.ones(3), 0) / 900).int()
        tensor([-1,  1,  1], dtype=torch.int32)
    """
    if not (value.is_floating_point() or value.is_complex()):
        return value.roll(1, -1)
    steps = torch.arange(value.numel(), device=value.device, dtype=torch.float64).reshape(value.shape)
    amounts = 1000 * (1 + steps * 0.7548776662466927 % 1)
    amounts.narrow(dim, 0, 1).neg_()
    return value + (amounts * value.detach().abs().clamp(min=1)).to(value.dtype)
