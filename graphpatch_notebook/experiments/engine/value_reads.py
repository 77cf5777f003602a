"""Records when Python reads values of tensors: after a read, a model may take other branches for other cells."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture.functions import VALUE_READS, raw_name, writes_in_place
from graphpatch_notebook.execution.replay import FrameTree, leaves_of, tensors_among
from graphpatch_notebook.torch_compat import without_torch_functions

_SIZED_BY_VALUES = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "_unique2", "bincount", "__iter__"}
)
_SIZED_BY_SOME = frozenset({"__getitem__", "where", "repeat_interleave"})
_BOOLS = (torch.bool, torch.uint8)


class ValueReads(TorchFunctionMode):
    """Records when values of tensors are read into Python (`if x.max() > 0`, `x.item()`), or determine a shape.

    Args:
        tree: The frames; its clock is used.
        clean: Tensors from before the run. Reads of these, and of tensors computed only from these, do not count. All
            other reads count, including those of outputs of autograd functions, which are computed where modes do not
            receive calls.

    Attributes:
        last: The time of the last read that counts; 0 for never.
        last_of_all: The time of the last read of any value; 0 for never.
    """

    def __init__(self, tree: FrameTree, clean: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._tree = tree
        self.last = 0
        self.last_of_all = 0
        self._clean: dict[int, weakref.ref[Tensor]] = {}
        self._is_mixed = False
        for tensor in clean:
            self._add(tensor)

    def notice(self, value: Any) -> None:
        """Called when a patched value occurs: reads of it count."""
        with without_torch_functions():
            for leaf in leaves_of(value):
                self._clean.pop(id(leaf), None)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._watched(func, args, kwargs, tensors_among((*args, *kwargs.values())))

    def _watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        """Makes the call and returns its result; `given` are the tensors in its arguments."""
        name = raw_name(func)
        is_read = _may_hand_out_values(func) and _hands_out_values(name, args)
        is_clean = not self._is_mixed and all(map(self._is_clean, given))
        if is_read:
            self.last_of_all = self._tree.tick()
            self.last = self.last if is_clean else self.last_of_all
        result = func(*args, **kwargs)
        if is_clean:
            for tensor in tensors_among((result,)):
                self._add(tensor)
        elif writes_in_place(name, kwargs) and given and self._is_clean(given[0]):
            self._is_mixed = True  # other tensors may share its memory
        return result

    def _add(self, tensor: Tensor) -> None:
        self._clean[id(tensor)] = weakref.ref(tensor)

    def _is_clean(self, tensor: Tensor) -> bool:
        known = self._clean.get(id(tensor))
        return known is not None and known() is tensor


@functools.lru_cache(maxsize=4096)
def _may_hand_out_values(func: Any) -> bool:
    """Whether the function reads values for some arguments. Cached, since it runs for each call of torch."""
    name = raw_name(func)
    return name in VALUE_READS or name in _SIZED_BY_VALUES or name in _SIZED_BY_SOME


def _hands_out_values(name: str, args: tuple[Any, ...]) -> bool:
    return name in VALUE_READS or name in _SIZED_BY_VALUES or _is_sized_by_values(name, args)


def _is_sized_by_values(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the shape of the result depends on values."""
    if name == "__getitem__":
        return any(isinstance(leaf, Tensor) and leaf.dtype in _BOOLS for leaf in leaves_of(args[1]))
    if name == "where":
        return len(args) == 1
    return name == "repeat_interleave" and len(args) > 1 and isinstance(args[1], Tensor)
