"""What the user's functions and a run of the model change besides what they return.

`ReferredValues` detects changes of the variables and objects that functions refer to, and `change_by` what a run has
changed in the model: whether it draws random numbers, even if other threads draw some at the same time. All threads
share the generators of Python, torch and numpy, so a changed state may be the work of another thread. For Python's
generator, calls are then profiled in the thread of the run. Calls of the generators of torch and numpy cannot be
profiled: if another thread draws from these, the run is reported to draw.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from itertools import islice
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.held_values import MANY, is_own_generator, memory_of, slots_of
from graphpatch_notebook.checks.model_state import (
    Change,
    ChangeKind,
    Fingerprint,
    ModuleState,
    SharedRandomState,
    comparable_state,
)
from graphpatch_notebook.checks.outer_values import names_in, outer_values_of
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.torch_compat import version_of
from graphpatch_notebook.values import ABSENT

_DEEPEST = 6
_MOST_MARKS = 5000
_FEW_BYTES = 4096
_PLAIN = frozenset({bool, int, str, bytes, type(None)})
_NUMBERS = (float, complex)  # which may be NaN
_LIBRARIES = ("torch.", "graphpatch_notebook.")
_CLOSED = (PatchableGraph, BuiltinFunctionType, ModuleType, type, PurePath)  # a path caches its text
_IMMUTABLE = (tuple, frozenset, range, slice, torch.dtype, torch.device, ModuleType, PurePath)
_CODE = (BuiltinFunctionType, type, ModuleType)
_BUILTIN = ("builtins", "numpy")  # functions, methods and classes


class ReferredValues:
    """A snapshot of values and of everything that functions among them refer to; equal if no change was detected.

    It covers closures, globals that functions name, attributes of classes and Python modules that they name, defaults,
    attributes that methods name, random generators, the state of torch modules, and the contents of containers and
    plain objects among these, up to a few levels and thousands of values. The next value of an iterator cannot be read:
    snapshots that include one are never equal.

    Args:
        *values: The values.
        has_contents: Whether contents of tensors, arrays and modules are compared; they are not for `may_change_with`.

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

    def __init__(self, *values: Any, has_contents: bool = True) -> None:
        self._has_contents = has_contents
        self._held: list[Any] = []  # keeps the objects alive, so that their ids stay unique
        self._marks = list(islice(self._marks_of(values), _MOST_MARKS))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReferredValues) and self._marks == other._marks

    __hash__ = None  # type: ignore[assignment]  # it is only compared

    def may_change_with(self, other: ReferredValues, model: ModuleState) -> bool:
        """Whether a run of the model, or a call of what `other` is of, may change what these values refer to.

        Args:
            other: A snapshot of other values.
            model: A snapshot of the model.
        """
        modules = (part for held in self._held if isinstance(held, Module) for part in held.modules())
        return any(
            isinstance(held, PatchableGraph) or model.holds(held) for held in (*self._held, *modules)
        ) or not self._places().isdisjoint(other._places())

    @property
    def code(self) -> frozenset[Hashable]:
        """The code of the functions, and the classes of the objects."""
        return frozenset(
            held.__code__ if isinstance(held, FunctionType) else held if isinstance(held, _CODE) else type(held)
            for held in self._held
        )

    def _places(self) -> set[Hashable]:
        """Returns what identifies the objects that may change, and the variables that may be assigned to."""
        found: set[Hashable] = set()
        for value in self._held:
            if isinstance(value, FunctionType):
                found |= {place for place, content in _variables(value) if type(content) in (*_PLAIN, *_NUMBERS)}
            elif not isinstance(value, _IMMUTABLE) and not (callable(value) and type(value).__module__ in _BUILTIN):
                found |= {id(value), *_memory(value)}
        return found

    def _marks_of(self, values: Iterable[Any]) -> Iterator[Any]:
        seen: set[int] = set()
        for _ in range(_DEEPEST):
            inner: list[Any] = []
            for value in values:
                kind = type(value)
                if kind in _PLAIN:
                    yield value
                elif kind in _NUMBERS:
                    yield repr(value)
                elif kind is MethodType:  # each access makes a new one
                    self._held += (value.__self__, value.__func__)
                    inner += _parts(value)
                elif id(value) not in seen:
                    seen.add(id(value))
                    self._held.append(value)
                    yield id(value)
                    if not (isinstance(value, (Tensor, np.ndarray, Module)) or is_own_generator(value)):
                        inner += _parts(value)
                    elif self._has_contents:
                        yield _contents(value)
            values = inner


def _contents(value: Any) -> Any:
    """Returns the contents of a tensor, an array, a module or a generator in a comparable form."""
    if isinstance(value, Tensor):
        is_read = type(value) is Tensor and value.device.type == "cpu" and value.nbytes <= _FEW_BYTES
        # The version counter misses writes through `numpy` and `data`.
        return version_of(value), repr(value.tolist()) if is_read else None
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= _FEW_BYTES else ABSENT
    if isinstance(value, Module):
        return Fingerprint(value)
    return comparable_state(value)


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
            *(part for _, part in _variables(value)),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
            *value.__dict__.values(),
        ]
    if isinstance(value, MethodType):
        return [*_parts(value.__func__), *_named(value.__self__, value.__func__)]
    if callable(value) and isinstance(type(value).__call__, FunctionType):
        return [value.__call__]
    if isinstance(value, (Mapping, list, tuple, set, frozenset, deque)):
        if len(value) > MANY:  # data
            return [len(value)]
        return [*value, *value.values()] if isinstance(value, Mapping) else value
    return [*slots_of(value).values(), *getattr(value, "__dict__", {}).values()]


def _memory(value: Any) -> Iterator[Hashable]:
    """Yields the address of the memory of a tensor or an array, which others may share."""
    if isinstance(value, Tensor):
        yield "memory", memory_of(value)
    elif isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        yield "memory", value.__array_interface__["data"][0]


def _variables(function: FunctionType) -> Iterator[tuple[Hashable, Any]]:
    """Yields the variables outside of a function that it may read: what identifies each, and its value.

    The attributes that it names of classes and Python modules are among them.
    """
    for outer in outer_values_of(function):
        owner = outer.value()
        yield (id(outer.holder), outer.key), owner
        if isinstance(owner, (type, ModuleType)):
            named = names_in(function.__code__)
            yield from (((id(owner), name), vars(owner)[name]) for name in named if name in vars(owner))


def _named(owner: Any, function: Any) -> Iterator[Any]:
    """Yields the attributes and methods of an object, and of its class, that one of its methods names."""
    for name in names_in(function.__code__) if isinstance(function, FunctionType) else ():
        found = getattr_static(owner, name, None)
        found = found.fget if isinstance(found, property) else found
        yield MethodType(found, owner) if isinstance(found, FunctionType) else found


# -- runs --------------------------------------------------------------------------------------------------------------


def change_by(run: Callable[[], object], model: Module, state: ModuleState) -> Change | None:
    """Returns what `run` has changed in a model since `state`; calls `run` again if another thread may have done it."""
    change = state.change()
    if change is None or change.kind is not ChangeKind.RANDOM or "Python" not in change.name:
        return change
    return change if draws_from_python(run, model) else state.change(besides={"Python"})


def draws_from_python(run: Callable[[], object], model: Module) -> bool:
    """Whether `run` draws from Python's generator, given that some thread did. Restores the state of the model."""
    if not _may_be_of_others():
        return True
    with afterwards(ModuleState(model).restore), noticed_draws() as drawn:
        run()
    return "Python" in drawn


@contextmanager
def noticed_draws() -> Iterator[list[str]]:
    """Yields a list to which the owners of the shared generators that the block draws from are added at its end."""
    generator: Any = random.random.__self__  # type: ignore[attr-defined]  # others call this, or getrandbits
    drawn: list[str] = []
    calls: list[Any] = []

    def notice(_frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__self__", None) is generator:
            calls.append(called)

    is_profiled, before = _may_be_of_others(), SharedRandomState()
    if is_profiled:
        sys.setprofile(notice)
    try:
        yield drawn
    finally:
        if is_profiled:
            sys.setprofile(None)
        changed = before.differing(SharedRandomState())
        drawn += [owner for owner in changed if owner != "Python" or calls or not is_profiled]


def _may_be_of_others() -> bool:
    """Whether other threads may draw from Python's generator, and calls in this one can be profiled."""
    return threading.active_count() > 1 and sys.getprofile() is None
