"""What a run must leave as it was: the model's buffers, and the user's random numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter

from graphpatch_notebook.capture.tensor_sources import reachable_modules
from graphpatch_notebook.checks.equality import difference
from graphpatch_notebook.checks.model_state import LARGE, ModuleState, copied, version_of
from graphpatch_notebook.notebook.random_numbers import RandomNumbers
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.values import readable_children

_DEEPEST = 4
_NOT_BUFFERS = frozenset({"_parameters", "_modules"})
_PLAIN = (bool, int, float, str, type(None), Module)


class RunState:
    """Buffers, tensors in attributes and random generators at one moment, to start runs from, and to be put back.

    Args:
        graph: The graph of the model.

    Attributes:
        random_numbers: The generators.
    """

    def __init__(self, graph: PatchableGraph) -> None:
        self._state = ModuleState(graph._module)
        self._modules = reachable_modules(graph._module)
        self._tensors = AttributeTensors(self._modules)
        self.random_numbers = RandomNumbers(graph._root_frame, self._modules)

    def restore(self) -> None:
        """Puts everything back."""
        self.random_numbers.restore()
        self._state.restore_buffers()
        self._tensors.restore()

    def change_of_model(self) -> str | None:
        """Returns what a run has changed in the model that cannot be put back, in words; asked after `restore`."""
        change = self._state.unrepeatable_change()
        return self._tensors.change() if change is None or "random numbers" in change else change

    def separated(self, value: Any) -> Any:
        """Returns a value that stays what it is when buffers are put back, or are written into by another run.

        Usually that is the value itself; a copy where it holds a tensor, or a part of one, that the model keeps.
        """
        kept = {_memory(tensor) for module in self._modules for tensor in _kept_by(module)} - {None}
        return copied_output(value) if any(_memory(tensor) in kept for tensor in _tensors_in(value)) else value


def copied_output(value: Any) -> Any:
    """Returns a copy of what a model returned; parameters are the model's own, which no run writes into."""
    return copied(value, [tensor for tensor in _tensors_in(value) if isinstance(tensor, Parameter)])


class AttributeTensors:
    """Tensors that modules hold as plain attributes, also in containers and in objects, as they are at one moment."""

    def __init__(self, modules: list[Module]) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._versions: list[tuple[str, Tensor, int]] = []
        buffers = {id(tensor) for module in modules for tensor in module._buffers.values()}
        held = {
            id(tensor): (f"{type(module).__name__} writes into a tensor of its {name!r} while it runs", tensor)
            for module in modules
            for name, tensor in _held_by(module)
            if id(tensor) not in buffers
        }
        for words, tensor in held.values():
            if (copy := _copy_of_state(tensor)) is not None:
                self._copies.append((tensor, copy))
            else:
                self._versions.append((words, tensor, version_of(tensor)))

    def restore(self) -> None:
        """Writes those back that were written into."""
        for tensor, copy in self._copies:
            if difference(tensor.detach(), copy, "") is not None:
                tensor.data.copy_(copy)

    def change(self) -> str | None:
        """Returns which one was written into that cannot be put back, in words."""
        return next((words for words, tensor, version in self._versions if version_of(tensor) != version), None)


def _copy_of_state(tensor: Tensor) -> Tensor | None:
    """Returns a copy to put back later; `None` for what is a weight and no state, or cannot be written as a whole."""
    try:
        is_large = tensor.numel() * tensor.element_size() > LARGE
        has_own_elements = all(
            stride > 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
        )
        if is_large or isinstance(tensor, Parameter) or not has_own_elements:
            return None
        return tensor.detach().clone()
    except Exception:  # some layouts and subclasses have no strides, or no copies
        return None


def _kept_by(module: Module) -> Iterator[Tensor]:
    """Yields the buffers of a module, and other tensors that are attributes of it, but no parameters."""
    return (tensor for _, tensor in _held_by(module))


def _held_by(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors that `_kept_by` tells of, with the names of the attributes."""
    for name, value in module.__dict__.items():
        # Most attributes of most modules are numbers, or hooks that nobody has registered.
        is_empty = isinstance(value, (dict, list, tuple, set)) and not value
        if not is_empty and name not in _NOT_BUFFERS and not isinstance(value, _PLAIN):
            yield from ((name, tensor) for tensor in _tensors_in(value))


def _tensors_in(value: Any, depth: int = 0, opens_objects: bool = True) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth < _DEEPEST and not isinstance(value, (Module, type, ModuleType)) and not callable(value):
        inside = _inside(value)
        if inside is None and opens_objects:
            inside, opens_objects = list(getattr(value, "__dict__", {}).values()), False
        for child in inside or ():
            yield from _tensors_in(child, depth + 1, opens_objects)


def _inside(value: Any) -> list[Any] | None:
    if isinstance(value, (set, frozenset, deque)):
        return list(value)
    found = readable_children(value)
    return None if found is None else [child for _, child in found]


def _memory(tensor: Tensor) -> int | None:
    """Returns where the memory of a tensor begins; `None` for parameters, which no run puts back, and without any."""
    if isinstance(tensor, Parameter):
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except Exception:  # some layouts and subclasses have no memory of their own
        return None
