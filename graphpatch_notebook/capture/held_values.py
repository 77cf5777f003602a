"""What modules hold: one walk over their attributes, and what the containers and plain objects among them hold."""

from __future__ import annotations

import enum
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.torch_compat import is_fully_sharded

MANY = 1000
"""Items of larger containers are not looked into: these are data."""

NOT_STATE = ("forward", "_old_forward", "_hf_hook")
"""Forwards are swapped by this very package; the hook of accelerate keeps account of what it loaded."""


class _Way(enum.Enum):
    """What there is to look at in values of one class."""

    NOTHING, MODULE, TENSOR, ARRAY, GENERATOR, CONTAINER, FIXED, OBJECT = range(8)


PLAIN_VALUES: frozenset[type] = frozenset({bool, int, float, str, type(None)})
DICTS = frozenset({dict, OrderedDict})
REGISTRIES = ("_parameters", "_buffers", "_modules")
_DEEPEST = 6
# Their insides are not for others to write into: the program shares them, or other libraries keep account in them.
_CLOSED = (type, types.ModuleType, enum.Enum, bytes, weakref.ProxyType)
_CLOSED_PACKAGES = ("torch.fx", "torch.distributed", "bitsandbytes", "logging", "threading", "asyncio", "concurrent")
_ways: dict[type, _Way] = dict.fromkeys([*PLAIN_VALUES, bytes, torch.dtype, torch.device, torch.Size], _Way.NOTHING)


def _way(kind: type) -> _Way:
    """Returns what there is to look at in values of a class."""
    if kind not in _ways:
        if issubclass(kind, Tensor):
            way = _Way.TENSOR
        elif issubclass(kind, Module):
            way = _Way.MODULE
        elif _is_generator(kind):
            way = _Way.GENERATOR
        elif issubclass(kind, (list, dict, set, deque)):
            way = _Way.CONTAINER
        elif issubclass(kind, (tuple, frozenset)):
            way = _Way.FIXED
        elif "numpy" in sys.modules and issubclass(kind, sys.modules["numpy"].ndarray):
            way = _Way.ARRAY
        elif issubclass(kind, _CLOSED) or kind.__module__.startswith(_CLOSED_PACKAGES) or _is_callable(kind):
            way = _Way.NOTHING
        else:
            way = _Way.OBJECT
        _ways[kind] = way
    return _ways[kind]


def _is_callable(kind: type) -> bool:
    return any("__call__" in base.__dict__ for base in kind.__mro__)


Place: TypeAlias = "tuple[Any, Any, Module | None, str]"
"""Something that holds values, a copy of it that holds the same, the module in which it is, and its name there."""


class Walk:
    """Finds what modules, or other values, hold: looks into attributes, containers and plain objects.

    Args:
        start: Where to begin.

    Attributes:
        places: All containers that can be written into, attributes of modules and objects among them, but empty ones.
        empty: Those that are empty.
        slotted: Objects with slots, and what these hold.
        tensors: The tensors, each with its module and name.
        generators: The random generators, but for those that all code shares.
        seen: The ids of all that was found.
    """

    def __init__(self, start: Iterable[Any]) -> None:
        self.places: list[Place] = []
        self.empty: list[Any] = []
        self.slotted: list[Place] = []
        self.tensors: list[tuple[Tensor, Module | None, str]] = []
        self.generators: list[Any] = []
        self.spans: dict[int, tuple[slice, slice, slice]] = {}
        self.seen: set[int] = set()
        self._modules: list[Module | None] = []
        self._gathered: set[int] = set()
        self._most = MANY
        for value in start:
            self._look("", value, None, 0)
        while self._modules:
            module = self._modules.pop()
            if module is not None and id(module) not in self.seen:
                self.seen.add(id(module))
                self._look_at(module)

    def modules(self) -> Iterator[Module]:
        """Yields the modules that were found."""
        return (module for _, _, module, name in self.places if not name and module is not None)

    def _look_at(self, module: Module) -> None:
        begin = len(self.places), len(self.empty), len(self.tensors)
        held = state_attributes(module.__dict__)
        self.places.append((module.__dict__, held, module, ""))
        self._most = len(self.places) + MANY
        if is_fully_sharded(module):
            self._gathered.update(map(id, module.modules()))
        skipped: tuple[str, ...] = ("_parameters",) if id(module) in self._gathered else ()
        if is_offloaded(module):
            skipped = ("_parameters", "_buffers")
        for name, value in held.items():
            kind = type(value)
            if kind in PLAIN_VALUES:
                continue
            if kind in DICTS and not value:  # most are registries of hooks, without any
                self.empty.append(value)
            elif name == "_modules" and kind is dict:
                self.places.append((value, value.copy(), module, name))
                self._modules += value.values()
            elif name not in skipped:
                self._look(name, value, module, 0)
        end = len(self.places), len(self.empty), len(self.tensors)
        places, empty, tensors = map(slice, begin, end)
        self.spans[id(module)] = (places, empty, tensors)

    def _look(self, name: str, value: Any, module: Module | None, depth: int) -> None:
        way = _ways.get(type(value)) or _way(type(value))
        if way is _Way.NOTHING or id(value) in self.seen or depth > _DEEPEST:
            return
        if way is _Way.MODULE:
            self._modules.append(value)
            return
        self.seen.add(id(value))
        if way is _Way.GENERATOR:
            if is_own_generator(value):
                self.generators.append(value)
        elif way is _Way.ARRAY:
            if value.flags.writeable and value.dtype.kind in "biufc":
                self.tensors.append((torch.from_numpy(value), module, name))
        elif way is _Way.TENSOR:
            self.tensors.append((value, module, name))
            if attributes := _attributes_of(value):
                self._look_into(name, attributes, module, depth)
        else:
            if way is _Way.OBJECT and (slots := slots_of(value)):
                self.slotted.append((value, slots, module, name))
                for key, item in slots.items():
                    self._look(f"{name}.{key}", item, module, depth + 1)
            self._look_into(name, _attributes_of(value) if way is _Way.OBJECT else value, module, depth)

    def _look_into(self, name: str, container: Any, module: Module | None, depth: int) -> None:
        if not container:
            if container is not None and not isinstance(container, (tuple, frozenset)):
                self.empty.append(container)
            return
        items: Any = dict(container) if isinstance(container, dict) else list(container)
        if not isinstance(container, (tuple, frozenset)):
            self.places.append((container, items, module, name))
        if name not in REGISTRIES and (len(items) > MANY or len(self.places) > self._most):
            return
        for key, item in items.items() if isinstance(items, dict) else enumerate(items):
            if type(item) not in PLAIN_VALUES:
                self._look(f"{name}.{key}", item, module, depth + 1)


def state_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    held = attributes.copy()  # at once: another thread may be at work
    if "forward" in held or "_hf_hook" in held:
        for name in NOT_STATE:
            held.pop(name, None)
    return held


def _attributes_of(value: Any) -> Any:
    try:
        found = value.__dict__
    except Exception:  # it has none, or stands for something that is gone
        return None
    return found if type(found) is dict else None


def slots_of(value: Any) -> dict[str, Any]:
    """Returns what an object holds in slots of classes of Python."""
    names = [name for kind in type(value).__mro__ for name in kind.__dict__.get("__slots__", ())]
    return {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}


def is_offloaded(module: Module) -> bool:
    """Whether the weights of a module come and go: accelerate puts them in place while its forward runs."""
    return "_hf_hook" in module.__dict__


def is_own_generator(value: Any) -> bool:
    """Whether a value is a random generator, or an iterator, and none of those that all code shares."""
    return _way(type(value)) is _Way.GENERATOR and not any(value is shared for shared in _shared_generators())


def _shared_generators() -> list[Any]:
    numpys = [sys.modules["numpy"].random.mtrand._rand] if "numpy" in sys.modules else []
    return [random._inst, torch.default_generator, *torch.cuda.default_generators, *numpys]


def _is_generator(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return issubclass(kind, (Iterator, torch.Generator, random.Random, *kinds)) and not issubclass(
        kind, random.SystemRandom
    )
