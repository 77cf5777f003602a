"""When Python looks at values: what a model does after that may be another thing for another cell."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture.functions import VALUE_READS, raw_name
from graphpatch_notebook.execution.frame_effects import leaves_of
from graphpatch_notebook.execution.frame_results import FrameTree

_SIZED_BY_VALUES = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "_unique2", "bincount", "__iter__"}
)
_BOOLS = (torch.bool, torch.uint8)


class ValueReads(TorchFunctionMode):
    """Notes when values of tensors are read into Python (`if x.max() > 0`, `x.item()`), or make up a shape.

    Args:
        tree: Tells the time.

    Attributes:
        last: When that happened last; 0 for never.
    """

    def __init__(self, tree: FrameTree) -> None:
        super().__init__()
        self._tree = tree
        self.last = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = raw_name(func)
        if name in VALUE_READS or name in _SIZED_BY_VALUES or _is_sized_by_values(name, args):
            self.last = self._tree.tick()
        return func(*args, **(kwargs or {}))


def _is_sized_by_values(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call gives a tensor whose shape depends on values."""
    if name == "__getitem__":
        return any(isinstance(leaf, Tensor) and leaf.dtype in _BOOLS for leaf in leaves_of(args[1]))
    if name == "where":
        return len(args) == 1
    return name == "repeat_interleave" and len(args) > 1 and isinstance(args[1], Tensor)
