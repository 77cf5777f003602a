"""Quantized weights: unpacks a packed weight, and runs the module's forward with another weight.

    module.weight        what the module holds: packed integers, which mean nothing by themselves
    Packing.spec         the spec of the represented weight, without unpacking it
    Packing.unpacked     the represented weight: the value of the node `weight`, made when it is patched or probed
    Packing.bound        a forward that uses a patched one in place of the module's own kernel

Modules are recognized by the names of their classes, so that no library is imported that the model does not use.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.held_values import module_at
from graphpatch_notebook.errors import PatchValueError
from graphpatch_notebook.values import TensorSpec


class Packing(ABC):
    """How the modules of a class keep their weight.

    Args:
        forward: The library's own forward of the class, which `run` can replace.
    """

    attribute = "weight"

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    @abstractmethod
    def spec(self, module: Module) -> TensorSpec:
        """Returns the spec of the unpacked weight of `module`, without unpacking it."""

    @abstractmethod
    def unpacked(self, module: Module) -> Tensor:
        """Returns the unpacked weight of `module`: a new tensor, or the parameter itself if it is not packed."""

    @abstractmethod
    def run(self, module: Module, weight: Tensor, value: Tensor) -> Tensor:
        """Returns the output of `module` for `value` with this weight, in the dtype of its own forward."""

    def bound(self, module: Module, weight: Tensor, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function that runs instead of `forward`, the forward of `module`.

        Raises:
            PatchValueError: The forward is not the library's: what it does with the weight is not known.
        """
        if getattr(forward, "__func__", None) is self._forward:
            return functools.partial(self.run, module, weight)
        raise PatchValueError(
            f"the weight of this {type(module).__name__} can be probed but not patched: it is quantized, and its "
            f"forward, {forward!r}, is not that of its library, so how it would use another weight is not known; patch "
            "its inputs or its output"
        )


_packings: WeakKeyDictionary[type[Module], Packing | None] = WeakKeyDictionary()


def packing_of(module: Module) -> Packing | None:
    """Returns how `module` packs its weight; `None` if it does not."""
    kind = type(module)
    try:
        return _packings[kind]
    except KeyError:
        found = _packings[kind] = _packing_of(kind)
        return found


def _packing_of(kind: type[Module]) -> Packing | None:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "bitsandbytes":
            from graphpatch_notebook.capture.quantization.bitsandbytes_weights import packing

            if (found := packing(base)) is not None:
                return found
    return None


def held_by(module: Module, path: str) -> tuple[Packing, Module] | None:
    """Returns the module with a packed weight at this attribute path from `module`, and its packing; else `None`."""
    parents, _, name = path.rpartition(".")
    holder = module_at(module, parents)
    packing = packing_of(holder) if holder is not None else None
    return (packing, holder) if holder is not None and packing is not None and name == packing.attribute else None
