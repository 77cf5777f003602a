"""Canonical axes: the order in which components have their dimensions on every model.

("batch", "head", "query", "channel")    what the dimensions of a value at its path are
  -> ("batch", "position", "head", "channel"), Layout    what they are by the component's name, and how to see them so
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from graphpatch_notebook.components.flow import Axes

_BEFORE = ("batch", "window", "token")
_AFTER = ("channel", "neuron", "expert", "latent", "vocab")
_ORDER = (*_BEFORE, "position", "group", "head", *_AFTER)
_ORDER_OF_PATTERNS = (*_BEFORE, "group", "head", "query", "key")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a value at a path is seen in canonical axes: a view of it, with a dimension of two axes divided.

    Attributes:
        order: The dimensions in canonical order, as they are numbered after the division.
        merged: The dimension at the path that has two axes; `None` if there is none.
        factors: The sizes of these, of which the one that follows the inputs is -1.

    Example:
        >>> import torch
        >>> layout = Layout((0, 2, 1, 3), merged=0, factors=(-1, 4))
        >>> seen = layout.view(torch.ones(12, 5, 8))
        >>> seen.shape, layout.back(seen).shape, layout.sizes((None, None, 8)), layout.dims
        (torch.Size([3, 5, 4, 8]), torch.Size([12, 5, 8]), [None, None, 4, 8], [0, 1, 0, 2])
    """

    order: tuple[int, ...]
    merged: int | None = None
    factors: tuple[int, ...] = ()

    @property
    def dims(self) -> list[int]:
        """The dimension at the path of each axis."""
        return [dim - (self.merged is not None and dim > self.merged) for dim in self.order]

    def view(self, value: Tensor) -> Tensor:
        """Returns a view of a value at the path in canonical axes.

        Raises:
            RuntimeError: It has another number of dimensions, or its merged dimension cannot be divided.
        """
        return (value if self.merged is None else value.unflatten(self.merged, self.factors)).permute(self.order)

    def back(self, seen: Tensor) -> Tensor:
        """Returns a value as it is at the path, from what it is in canonical axes: a view where there can be one.

        Raises:
            RuntimeError: It has another number of dimensions.
        """
        value = seen.permute([self.order.index(dim) for dim in range(len(self.order))])
        return value if self.merged is None else value.flatten(self.merged, self.merged + 1)

    def sizes(self, sizes: Sequence[int | None]) -> list[int | None]:
        """Returns the sizes of the axes, from those at the path; `None` for unknown ones."""
        found = list(sizes)
        if self.merged is not None:
            whole, known = found[self.merged], max(self.factors)
            other = None if whole is None else whole // known
            found[self.merged : self.merged + 1] = [other if factor < 0 else factor for factor in self.factors]
        return [found[dim] for dim in self.order]


def canonical(axes: Axes, heads: Sequence[int | None]) -> tuple[Axes, Layout | None]:
    """Returns the canonical axes of a value, and how to see it so; `None` if it has them at its path.

    Where an axis is not known, or has no place in the order (`height`), the order is that at the path.

    Args:
        axes: What the dimensions at the path are.
        heads: For each dimension that has the batch and heads, how many heads there are; `None` if that is not known.

    Example:
        >>> canonical(("position", "batch", "channel"), [None] * 3)
        (('batch', 'position', 'channel'), Layout(order=(1, 0, 2), merged=None, factors=()))
        >>> canonical(("batch", None, "channel"), [None] * 3)
        (('batch', None, 'channel'), None)
    """
    is_pattern = {"query", "key"} <= {*axes}
    order = _ORDER_OF_PATTERNS if is_pattern else _ORDER
    merged = next((dim for dim, axis in enumerate(axes) if axis in MERGED and heads[dim] is not None), None)
    found, factors = list(axes), list[int]()
    if merged is not None:
        found[merged : merged + 1] = parts = MERGED[str(axes[merged])]
        factors = [heads[merged] or -1 if part == "head" else -1 for part in parts]
    named = [axis if is_pattern or axis not in ("query", "key") else "position" for axis in found]
    if not {*named} <= {*order} or len({*named}) < len(named):
        return axes, None
    dims = tuple(sorted(range(len(named)), key=lambda dim: order.index(named[dim])))
    is_same = merged is None and dims == tuple(range(len(dims)))
    return tuple(named[dim] for dim in dims), None if is_same else Layout(dims, merged, tuple(factors))


MERGED = {"batch_head": ["batch", "head"], "head_batch": ["head", "batch"]}
"""Dimensions that are divided."""
