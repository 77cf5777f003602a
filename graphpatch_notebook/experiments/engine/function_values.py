"""What functions of the user's refer to besides their arguments: whether that has changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from inspect import getattr_static
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.held_values import MANY, is_own_generator, slots_of
from graphpatch_notebook.checks.model_state import Fingerprint, comparable_state
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.torch_compat import version_of
from graphpatch_notebook.values import ABSENT

_DEEPEST = 6
_MOST = 5000
_FEW_BYTES = 4096
_PLAIN = frozenset({bool, int, str, bytes, type(None)})
_LIBRARIES = ("torch.", "graphpatch_notebook.")
_CLOSED = (PatchableGraph, BuiltinFunctionType, ModuleType, type)


class ReferredValues:
    """What values, and functions among them, hold at one moment: two are equal if nothing that can be seen changed.

    Seen are closures, globals that functions name, what they name of classes and of modules of Python, defaults, what
    methods name of their object, random generators, writes into a module of torch's, and what containers and plain
    objects among these hold, up to a few levels and thousands of values. The next value of an iterator cannot be seen:
    values that hold one equal no others.

    Args:
        *values: The values.

    Example:
        >>> from functools import partial
        >>> now = {"position": 0}
        >>> metric = partial(lambda now, output: output[now["position"]], now)
        >>> before = ReferredValues(metric)
        >>> before == ReferredValues(metric)
        True
        >>> now["position"] = 1
        >>> before == ReferredValues(metric)
        False
    """

    def __init__(self, *values: Any) -> None:
        self._held: list[Any] = []  # so that no other object gets the id of one of these
        self._marks = list(islice(self._marks_of(values), _MOST))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReferredValues) and self._marks == other._marks

    __hash__ = None  # type: ignore[assignment]  # it is compared with a later one only

    def _marks_of(self, values: Iterable[Any]) -> Iterator[Any]:
        seen: set[int] = set()
        for _ in range(_DEEPEST):
            inner: list[Any] = []
            for value in values:
                kind = type(value)
                if kind in _PLAIN:
                    yield value
                elif kind in (float, complex):
                    yield repr(value)  # it may be NaN
                elif kind is MethodType:  # a new one is made by each access
                    inner += _parts(value)
                elif id(value) not in seen:
                    seen.add(id(value))
                    self._held.append(value)
                    yield id(value)
                    mark = _contents(value)
                    yield mark
                    inner += () if mark is not None else _parts(value)
            values = inner


def _contents(value: Any) -> Any:
    """Returns what equals another one if a value holds the same, in one go; `None` for what has parts."""
    if isinstance(value, Tensor):
        is_read = type(value) is Tensor and value.device.type == "cpu" and value.nbytes <= _FEW_BYTES
        # Writes through `numpy` and `data` are not counted.
        return version_of(value), repr(value.tolist()) if is_read else None
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= _FEW_BYTES else ABSENT
    if isinstance(value, Module):
        return Fingerprint(value)
    return comparable_state(value) if is_own_generator(value) else None


def _parts(value: Any) -> Iterable[Any]:
    """Returns what a function refers to, what a container holds, or the attributes of a plain object."""
    if isinstance(value, _CLOSED):
        return []
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        if (value.__module__ or "").startswith(_LIBRARIES):
            return []
        return [
            *(part for _, part in referred(value)),
            *_named_outside(value),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
            *value.__dict__.values(),
        ]
    if isinstance(value, MethodType):
        return [*_parts(value.__func__), *_named(value.__self__, value.__func__)]
    if callable(value) and isinstance(type(value).__call__, FunctionType):
        return _parts(value.__call__)
    if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        if len(value) > MANY:  # data
            return [len(value)]
        return [*value, *value.values()] if isinstance(value, Mapping) else value
    return [*slots_of(value).values(), *getattr(value, "__dict__", {}).values()]


def _named_outside(function: FunctionType) -> Iterator[Any]:
    """Yields the attributes, of classes and modules of Python that a function refers to, which it names."""
    for _, owner in referred(function):
        if isinstance(owner, (type, ModuleType)):
            yield from (vars(owner)[name] for name in _names(function.__code__) if name in vars(owner))


def referred(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of the variables outside of a function that it may read."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # of a variable without a value
            yield name, cell.cell_contents
    for name in _names(function.__code__):
        yield name, function.__globals__.get(name)


def _named(owner: Any, function: Any) -> Iterator[Any]:
    """Yields the attributes, its class's too, and the other methods, of an object that a method of it names."""
    for name in _names(function.__code__) if isinstance(function, FunctionType) else ():
        found = getattr_static(owner, name, None)
        found = found.fget if isinstance(found, property) else found
        yield MethodType(found, owner) if isinstance(found, FunctionType) else found


@lru_cache(maxsize=256)
def _names(code: CodeType) -> tuple[str, ...]:
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))
