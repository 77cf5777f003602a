"""Where a tensor that no op of the frame made comes from: parameters, buffers, attributes, or elsewhere."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.records import Kind
from graphpatch_notebook.torch_compat import without_torch_functions
from graphpatch_notebook.values import readable_children


class Source(NamedTuple):
    """A tensor that a module holds: its kind, and its attribute path from the frame's module."""

    kind: Kind
    attribute_path: str


def find_source(module: Module, tensor: Tensor) -> Source | None:
    """Returns where `module`, or a module inside it, holds this very tensor."""
    own = _held_by(module, tensor)
    if own is not None:
        return own
    for path, submodule in registered_modules(module):
        if submodule is not module and (found := _held_by(submodule, tensor)) is not None:
            return Source(found.kind, f"{path}.{found.attribute_path}")
    return None


def _held_by(module: Module, tensor: Tensor) -> Source | None:
    for name, parameter in module._parameters.items():
        if parameter is tensor:
            return Source("parameter", name)
    for name, buffer in module._buffers.items():
        if buffer is tensor:
            return Source("buffer", name)
    for name, value in module.__dict__.items():
        if value is tensor:
            return Source("attribute", name)
    return None


def held_tensors(module: Module) -> Iterator[tuple[Source, Tensor]]:
    """Yields all tensors that `module` itself holds, and can be run with others: parameters, buffers, attributes."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield Source("parameter", name), parameter
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield Source("buffer", name), buffer
    for name, value in module.__dict__.items():
        if isinstance(value, Tensor):
            yield Source("attribute", name), value


def reachable_modules(root: Module) -> list[Module]:
    """Returns all modules that can be reached from `root`: registered ones, and those in plain lists and dicts."""
    found: dict[int, Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) in found:
            continue
        found[id(module)] = module
        waiting.extend(child for child in module._modules.values() if child is not None)
        waiting.extend(child for _, child in unregistered_modules(module))
    return list(found.values())


def registered_modules(module: Module) -> Iterator[tuple[str, Module]]:
    """Yields `module` and all modules in it, each with its shortest attribute path: that is what code writes."""
    waiting = deque([("", module)])
    seen: set[int] = set()
    while waiting:
        path, current = waiting.popleft()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield path, current
        waiting.extend((f"{path}.{n}" if path else n, m) for n, m in current._modules.items() if m is not None)


def unregistered_modules(module: Module) -> Iterator[tuple[str, Module]]:
    """Yields the modules that `module` holds in plain attributes, and lists, tuples and dicts of these."""
    for name, value in module.__dict__.items():
        if type(value) in _WITHOUT_MODULES or name == "_modules" or (type(value) in _DICTS and not value):
            continue
        if isinstance(value, Module):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{i}", item) for i, item in enumerate(value) if isinstance(item, Module))
        elif isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items() if isinstance(item, Module))


_WITHOUT_MODULES = frozenset({bool, int, float, str, type(None)})
_DICTS = frozenset({dict, OrderedDict})  # most of what a module holds are registries of hooks, without any


class AttributePaths:
    """Attribute paths between modules, for naming calls."""

    def __init__(self, root: Module) -> None:
        self._root = root
        self._maps: dict[int, dict[int, str]] = {}

    def path(self, module: Module, child: Module) -> str:
        """Returns how `module`'s code would write `child`; from the root where `child` lies elsewhere."""
        inside = self._inside(module)
        if child is not module and (path := inside.get(id(child))):
            return path
        from_root = self._inside(self._root).get(id(child), "")
        if child is module:  # recursion: it is known by its own name
            from_root = from_root.rsplit(".", 1)[-1]
        return from_root or type(child).__name__.lower()

    def _inside(self, module: Module) -> dict[int, str]:
        known = self._maps.get(id(module))
        if known is None:
            known = self._maps[id(module)] = {id(child): path for path, child in registered_modules(module)}
            for prefix, holder in registered_modules(module):
                for name, child in unregistered_modules(holder):
                    known.setdefault(id(child), f"{prefix}.{name}" if prefix else name)
        return known


def tensor_flags(values: Iterable[Any]) -> tuple[tuple[bool, bool], ...]:
    """Returns for each tensor in some values whether it requires gradients, and whether it is contiguous."""
    tensors: list[Tensor] = []
    _collect_deep(values, tensors)
    with without_torch_functions():  # a tensor's own class may refuse to answer
        return tuple((t.requires_grad, t.layout is torch.strided and t.is_contiguous()) for t in tensors)


def _collect_deep(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) not in _WITHOUT_MODULES:
            _collect_deep((child for _, child in readable_children(value) or ()), found)


def plain_tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in a value and in the tuples, lists and dicts that it is made of."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (tuple, list, dict)):
            _collect(item, found)
