"""Rows: several interventions in one forward, each in rows of the batch of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphpatch_notebook.checks.dimensions import batch_inputs
from graphpatch_notebook.execution import Entry, apply_to_rows
from graphpatch_notebook.execution.replay import leaves_of
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.values import mapped, readable_children, rebuilt, with_own_containers

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4, torch.complex128: 1e-9}
_COARSE = 3e-2


class RowsError(Exception):
    """Interventions cannot share a forward, for the reason given (caught inside the package)."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of one value are.

    Attributes:
        dim: The dimension that holds them; `None` for a value that all rows share.
        size: How long it is for one intervention.
    """

    dim: int | None
    size: int = 0

    def repeated(self, value: Tensor, count: int, *, may_share: bool = False) -> Tensor:
        """Returns the value for `count` interventions, all the same; they may share memory that nobody writes into."""
        if self.dim is None:
            return value
        if may_share and self.size == 1:
            return value.expand([count if dim == self.dim else -1 for dim in range(value.dim())])
        repeats = [1] * value.dim()
        repeats[self.dim] = count
        return value.repeat(repeats)

    def taken(self, value: Tensor, number: int) -> Tensor:
        """Returns a view of what belongs to one intervention."""
        return value if self.dim is None else value.narrow(self.dim, number * self.size, self.size)


Layout = tuple[Rows | None, ...]
"""Where the rows are in each of the leaves of a value made of containers; `None` for what is no tensor."""


def repeated(value: Any, layout: Layout, count: int, *, may_share: bool = False) -> Any:
    """Returns a value made of containers for `count` interventions."""
    places = iter(layout)

    def repeat(leaf: Any) -> Any:
        rows = next(places)
        return leaf if rows is None else rows.repeated(leaf, count, may_share=may_share)

    return mapped(value, repeat)


def taken(value: Any, layout: Layout, number: int) -> Any:
    """Returns what belongs to one intervention of a value made of containers; tensors are views."""
    places = iter(layout)

    def take(leaf: Any) -> Any:
        rows = next(places)
        return leaf if rows is None else rows.taken(leaf, number)

    return with_own_containers(value, take)


def parted(value: Any, layout: Layout, count: int) -> list[Any]:
    """Returns what `taken` does for each of the first `count` interventions: each has containers of its own.

    Example:
        >>> parted({"a": torch.arange(3)}, (Rows(0, 1),), 2)
        [{'a': tensor([0])}, {'a': tensor([1])}]
    """
    places = iter(layout)

    def parts(value: Any) -> list[Any]:
        inside = None if isinstance(value, Tensor) else readable_children(value)
        if inside is None:
            rows = next(places)
            return [value if rows is None else rows.taken(value, number) for number in range(count)]
        kind, keys = type(value), [key for key, _ in inside]
        if not keys:
            return [rebuilt(kind, keys, []) for _ in range(count)]
        return [rebuilt(kind, keys, items) for items in zip(*(parts(child) for _, child in inside), strict=True)]

    return parts(value)


def row_inputs(inputs: Inputs) -> Layout:
    """Returns where the rows are in the inputs: dimension 0 of all tensors that are as long there as the first one.

    Raises:
        RowsError: There is no such tensor, or there is an object (such as a cache) that cannot be repeated.
    """
    leaves = list(leaves_of((inputs.args, inputs.kwargs)))
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, bool, int, float, complex, str, torch.dtype, torch.device, type(None))):
            raise RowsError(f"an input is of type {type(leaf).__name__}, which cannot be repeated")
    with_batch = batch_inputs([leaf.shape if isinstance(leaf, Tensor) else () for leaf in leaves])
    if not with_batch:
        raise RowsError("no input has a batch dimension")
    return tuple(
        (Rows(0, leaf.shape[0]) if number in with_batch else Rows(None)) if isinstance(leaf, Tensor) else None
        for number, leaf in enumerate(leaves)
    )


def repeated_inputs(inputs: Inputs, layout: Layout, count: int) -> Inputs:
    """Returns inputs for `count` interventions."""
    args, kwargs = repeated((inputs.args, inputs.kwargs), layout, count)
    return Inputs(args, kwargs)


def is_close(value: Tensor, reference: Tensor) -> bool:
    """Whether two values are equal but for the rounding of kernels that saw another batch."""
    if value.shape != reference.shape:
        return False
    if not (value.is_floating_point() or value.is_complex()):
        return torch.equal(value, reference)
    value, reference = value.detach(), reference.detach()
    tolerance = _TOLERANCES.get(value.dtype, _COARSE)
    if not reference.numel():
        return True
    # In one go where all is finite: this is done for many values.
    if (value - reference).abs().max().item() <= tolerance * reference.abs().max().item():
        return True
    finite = reference[reference.isfinite()]
    scale = finite.abs().max().item() if finite.numel() else 0.0
    return torch.allclose(value, reference, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


class RowsPatch(Patch[Any]):
    """Applies the patches of each intervention, all of them pure (see `purity`), to its rows.

    Args:
        entries: For each intervention, its entries on this value.
        rows: Where the rows are.
        wild: How many interventions follow that have wild values.
    """

    def __init__(self, entries: Sequence[Sequence[Entry]], rows: Rows, *, wild: int = 0) -> None:
        super().__init__(any_shape=True)  # each entry looks at the shape of its rows
        self._entries, self._rows = entries, rows
        patched = [number for number, own in enumerate(entries) if own]
        self._count = len(entries) + wild
        self._touched = [*patched, *range(len(entries), self._count)]

    def op(self, original_output: Any) -> Any:
        dim, size = self._rows.dim, self._rows.size
        if not isinstance(original_output, Tensor):
            raise RowsError(f"a patched value is no tensor but of type {type(original_output).__name__}")
        assert dim is not None
        count = self._count
        if original_output.dim() <= dim or original_output.shape[dim] != size * count:
            raise RowsError(
                f"a patched value of shape {tuple(original_output.shape)} has no rows where others had them"
            )
        if torch.is_grad_enabled():  # many writes into one tensor make a long way back
            blocks = [self._rows.taken(original_output, number) for number in range(count)]
            pieces = [self._piece(number, block) for number, block in enumerate(blocks)]
            is_same = all(piece is block for piece, block in zip(pieces, blocks, strict=True))
            return original_output if is_same else torch.cat(pieces, dim)
        result = original_output.clone() if self._touched else original_output
        for number in self._touched:
            block = self._rows.taken(result, number)
            piece = self._piece(number, block)
            if piece is not block:
                block.copy_(piece)
        return result

    def _piece(self, number: int, block: Tensor) -> Tensor:
        """Returns what an intervention makes of its rows; patches write into them where they are a clone's."""
        if number >= len(self._entries):
            return wild(block, number - len(self._entries))
        for entry in self._entries[number]:
            block = apply_to_rows(entry, block, is_own=not torch.is_grad_enabled())
        return block


def wild(value: Tensor, number: int) -> Tensor:
    """Returns a value that is far off: far below for number 0, far above for others, and nowhere by the same amount.

    Whole numbers and truth values come in another order.

    Example:
        >>> bool((wild(torch.ones(3), 0) < -900).all()), bool((wild(torch.ones(3), 1) > 900).all())
        (True, True)
    """
    if not (value.is_floating_point() or value.is_complex()):
        return value.roll(number + 1, -1) if value.dim() else value
    steps = torch.arange(value.numel(), device=value.device, dtype=torch.float64).reshape(value.shape)
    amounts = 1000 * (1 + ((steps + 31 * number) * 0.7548776662466927) % 1)
    return value + (amounts * value.detach().abs().clamp(min=1) * (1 if number else -1)).to(value.dtype)
