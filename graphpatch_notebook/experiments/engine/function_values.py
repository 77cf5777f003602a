"""What functions of the user's refer to besides their arguments: whether that has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from itertools import chain, islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.held_values import MANY
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.torch_compat import version_of

_DEEPEST = 3
_MOST = 5000
_FEW_BYTES = 4096
_PLAIN = frozenset({bool, int, str, bytes, type(None)})
_BY_IDENTITY = (Module, PatchableGraph, BuiltinFunctionType, ModuleType, type)


class ReferredValues:
    """What values, and functions among them, hold at one moment: two are equal if nothing that can be seen changed.

    Seen are closures, globals that functions name, defaults, what methods name of their object, and what containers and
    plain objects among these hold, up to a few levels and thousands of values; not what is in models and modules of
    Python.

    Args:
        *values: The values.

    Example:
        >>> now = {"position": 0}
        >>> def metric(output):
        ...     return output[now["position"]]
        >>> before = ReferredValues(metric)
        >>> before == ReferredValues(metric)
        True
        >>> now["position"] = 1
        >>> before == ReferredValues(metric)
        False
    """

    def __init__(self, *values: Any) -> None:
        self._held: list[Any] = []  # lest another object gets the id of one that is gone
        marks = chain.from_iterable(self._marks_of(value, _DEEPEST) for value in values)
        self._marks = list(islice(marks, _MOST))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReferredValues) and self._marks == other._marks

    __hash__ = None  # type: ignore[assignment]  # it is compared with a later one only

    def _marks_of(self, value: Any, depth: int) -> Iterator[Any]:
        kind = type(value)
        if kind in _PLAIN:
            yield value
            return
        if kind in (float, complex):
            yield repr(value)  # it may be NaN
            return
        if kind is not MethodType:  # these are made anew each time that they are asked for
            self._held.append(value)
            yield id(value)
        if isinstance(value, Tensor):
            yield version_of(value)
            if kind is Tensor and value.device.type == "cpu" and value.nbytes <= _FEW_BYTES:
                yield repr(value.tolist())  # writes through `numpy` and `data` are not counted
        elif isinstance(value, np.ndarray):
            yield value.tobytes() if value.nbytes <= _FEW_BYTES else None
        elif isinstance(value, torch.Generator):
            yield repr(value.get_state().tolist())
        elif depth > 0 and not isinstance(value, _BY_IDENTITY):
            for part in _parts(value):
                yield from self._marks_of(part, depth - 1)


def _parts(value: Any) -> Iterable[Any]:
    """Returns what a function refers to, what a container holds, or the attributes of a plain object."""
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        return [
            *(part for _, part in referred(value)),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ]
    if isinstance(value, MethodType):
        return [*_parts(value.__func__), *_named(value.__self__, value.__func__)]
    if callable(value) and isinstance(type(value).__call__, FunctionType):
        return _parts(value.__call__)
    is_container = isinstance(value, (Mapping, list, tuple, set, frozenset))
    if is_container and len(value) > MANY:  # data
        return []
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    return value if is_container else getattr(value, "__dict__", {}).values()


def referred(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields the names and values of the variables outside of a function that it may read."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # of a variable without a value
            yield name, cell.cell_contents
    for name in _names(function.__code__):
        yield name, function.__globals__.get(name)


def _named(owner: Any, function: Any) -> Iterator[Any]:
    """Yields the attributes, and the other methods, of an object that a method of it names."""
    for name in _names(function.__code__) if isinstance(function, FunctionType) else ():
        if name in getattr(owner, "__dict__", ()):
            yield owner.__dict__[name]
        elif isinstance(method := getattr(type(owner), name, None), FunctionType):
            yield MethodType(method, owner)


@lru_cache(maxsize=256)
def _names(code: CodeType) -> tuple[str, ...]:
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))
