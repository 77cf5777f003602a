"""What the user's functions and a run of the model change besides what they return.

`ReferredValues` detects changes of the variables and objects that functions refer to, and `change_by` what a run has
changed in the model: whether it draws random numbers, even if other threads draw some at the same time. All threads
share the generators of Python, torch and numpy, so a changed state may be the work of another thread. For Python's
generator, calls are then profiled in the thread of the run. Calls of the generators of torch and numpy cannot be
profiled: if another thread draws from these, the run is reported to draw.
"""

from __future__ import annotations

import copyreg
import dis
import functools
import gc
import logging
import math
import pickle
import random
import sys
import threading
import weakref
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from graphpatch_notebook.capture.held_values import memory_of
from graphpatch_notebook.checks.model_state import (
    Change,
    ModuleState,
    SharedRandomState,
    comparable_state,
    is_generator,
)
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.torch_compat import version_of
from graphpatch_notebook.values import ABSENT

_MOST_MARKS = 200_000
_FEW_BYTES = 4096
_PLAIN = frozenset({bool, int, str, bytes, type(None)})
_NUMBERS = (float, complex, np.generic)  # which may be NaN
_CONTAINERS = (list, tuple, set, frozenset, dict, deque)
_BUILTIN = frozenset(_CONTAINERS)
_VIEWS = (*map(type, ({}.keys(), {}.values(), {}.items())), MappingProxyType)
_CACHED = type(functools.cache(math.sqrt))
_REFERRING = (*_VIEWS, property, staticmethod, classmethod, partial, CellType)  # which hold nothing else
_BOUND = (BuiltinFunctionType, MethodWrapperType)
_CODE = (FunctionType, BuiltinFunctionType, type, ModuleType)
_IMMUTABLE = (*_CODE, tuple, frozenset, slice)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo, np.dtype)
_CLOSED = (PatchableGraph, range, *_NAMED, PurePath, logging.Logger, *_LOCKS)
_ARROW = frozenset({("pyarrow.lib", "Table"), ("pyarrow.lib", "RecordBatch")})  # of a dataset: large, and immutable
_SPECIAL = frozenset({"__init__", "__new__", "__repr__", "__str__"})
_UNSEEN = frozenset({"eval", "exec", "globals", "__import__", "setattr", "delattr"})
_FILES = frozenset(
    {"open", "read_text", "read_bytes", "write_text", "write_bytes", "iterdir", "glob", "touch", "unlink"}
)
_LOOKUPS = frozenset({"getattr", "vars", "__dict__"})
_KEPT = frozenset({"activation", "activations"})


class ReferredValues:
    """A snapshot of values and of everything that functions among them refer to; equal if nothing has changed.

    It covers closures, globals that functions name, defaults, classes and their methods, attributes of Python modules
    that are named, containers, objects, tensors, modules of torch, and random generators. Functions of installed
    packages are taken to keep nothing. Some things cannot be read (iterators, queues, files): snapshots that include
    one are never equal.

    Args:
        *values: The values.
        most_bytes: The contents of tensors and arrays of up to this size are compared, for 0 no contents at all.
        has_files: Whether functions that open files count as what cannot be read.

    Attributes:
        unreadable: What cannot be read, as text for messages; `None` for nothing.

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

    def __init__(self, *values: Any, most_bytes: float = math.inf, has_files: bool = True) -> None:
        self.unreadable: str | None = None
        self._has_files = has_files
        self._most_bytes = most_bytes
        self._held: dict[int, Any] = {}  # keeps the objects alive, so that their ids stay unique
        self._marks: list[Any] = []
        self._places: set[Hashable] = set()  # what identifies objects that may change
        self._variables: set[tuple[int, str]] = set()  # and attributes of classes and Python modules
        self._names: dict[str, None] = {}
        self._stored: set[str] = set()
        self._scopes: dict[int, Mapping[str, Any]] = {}  # of which only what is named counts
        waiting = deque(values)
        while waiting:
            while waiting:
                if len(self._marks) > _MOST_MARKS:
                    self._leave_out("too many values")
                    return
                value = waiting.popleft()
                try:
                    waiting += self._parts(value)
                except Exception:  # of a class whose objects answer no questions, or cannot be pickled
                    self._leave_out(f"a {type(value).__name__}")
            waiting += self._named()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReferredValues) and self.unreadable is None and self.has_same_marks(other)

    def has_same_marks(self, other: ReferredValues) -> bool:
        """Whether no change was detected, even if some values cannot be read."""
        return self._marks == other._marks

    __hash__ = None  # type: ignore[assignment]  # it is only compared

    def change_by_call(self, metric: Any) -> str | None:
        """Returns how a metric, of which this is a snapshot, has changed since by a call; `None` if it has not."""
        if self.unreadable is not None:
            return f"the metric refers to {self.unreadable}, whose state cannot be read"
        is_same = self == ReferredValues(metric)
        return None if is_same else "the metric, or the model, changes what the metric refers to when it is called"

    def may_meet(self, other: ReferredValues) -> bool:
        """Whether functions among these values may change what those of another snapshot refer to, or the reverse."""
        if self.unreadable is not None or not self._places.isdisjoint(other._places):
            return True
        stored = self._stored | other._stored
        return any(name in stored for _, name in self._variables & other._variables)

    def may_read(self, model: ModuleState) -> bool:
        """Whether functions among these values may read what a run of a model changes."""
        modules = (part for held in self._held.values() if isinstance(held, Module) for part in held.modules())
        own = set(map(id, model.root.modules()))
        return any(isinstance(held, PatchableGraph) or id(held) in own for held in (*self._held.values(), *modules))

    def may_draw(self, owner: str) -> bool:
        """Whether functions among these values may have drawn from a shared generator, whose state has changed.

        Of Python's, another thread may have drawn: then they have only if they refer to it.
        """
        generator: Any = random.random.__self__  # type: ignore[attr-defined]
        is_read = self.unreadable is not None or id(generator) in self._held
        return owner != "Python" or is_read or threading.active_count() == 1

    def may_read_probe(self, patch: Any) -> bool:
        """Whether functions among these values may read what this patch keeps."""
        return id(patch) in self._held and not _KEPT.isdisjoint(self._names)

    @property
    def code(self) -> frozenset[Hashable]:
        """The code of the functions, and the classes of the objects."""
        return frozenset(
            held.__code__ if isinstance(held, FunctionType) else held if isinstance(held, _CODE) else type(held)
            for held in self._held.values()
        )

    def _leave_out(self, what: str) -> None:
        self.unreadable = self.unreadable or what

    def _parts(self, value: Any) -> Iterable[Any]:
        """Marks a value, and returns the values that are parts of it."""
        kind = type(value)
        if kind in _PLAIN:
            self._marks.append(value)
        elif isinstance(value, _NUMBERS):
            self._marks.append(repr(value))
        elif kind is MethodType:  # each access makes a new one
            owner = value.__self__
            if isinstance(owner, (type, *_CONTAINERS, Mapping, Tensor, Module)) or _is_library(kind := type(owner)):
                return [owner, value.__func__]
            if id(owner) not in self._held:
                self._hold(owner, is_closed=False)
                self._scopes[id(owner)] = getattr(owner, "__dict__", {})
            return [value.__func__, *_own_classes(kind)]
        elif kind in _BOUND:
            return () if isinstance(value.__self__, _CODE) or value.__self__ is None else [value.__self__]
        elif id(value) not in self._held:
            is_closed = kind not in _BUILTIN and _is_closed(value)
            self._hold(value, is_closed)
            return () if is_closed else self._parts_inside(value, kind)
        return ()

    def _hold(self, value: Any, is_closed: bool) -> None:
        self._held[id(value)] = value
        self._marks.append(id(value))
        if not is_closed and not isinstance(value, _IMMUTABLE):
            self._places |= {id(value), *_memory(value)}

    def _parts_inside(self, value: Any, kind: type) -> Iterable[Any]:
        """Returns the parts of a value that is not plain, and may change."""
        if kind in _BUILTIN:
            return self._items(value)
        if kind is FunctionType:
            return self._parts_of_function(value)
        if isinstance(value, (ModuleType, type)):
            return self._parts_of_scope(value)
        if kind is weakref.ref or kind is ContextVar:
            return [value() if kind is weakref.ref else value.get(ABSENT)]
        if isinstance(value, _REFERRING):
            return gc.get_referents(value)
        if kind is _CACHED:
            return _parts_of_cached(value)
        if is_generator(value):
            return self._parts_of_generator(value)
        own = [*slots_of(value).values(), *getattr(value, "__dict__", {}).values(), *_own_classes(kind)]
        if isinstance(value, (Tensor, np.ndarray, Module)):
            return self._parts_of_tensors(value, own)
        if isinstance(value, _CONTAINERS):
            return [*self._items(value), *own]
        if isinstance(value, Enum):  # its number or text is an attribute as well
            return own
        return self._parts_of_hidden(value, kind) if _has_hidden_state(kind) or _has_caches(kind) else own

    def _parts_of_tensors(self, value: Any, own: list[Any]) -> list[Any]:
        if self._most_bytes:
            self._marks.append(_contents(value, self._most_bytes))
        if isinstance(value, Module):
            return _own_classes(type(value))
        return [*own, value.grad] if isinstance(value, Tensor) and value.is_leaf else own

    def _parts_of_scope(self, value: Any) -> list[Any]:
        scope = self._scopes[id(value)] = vars(value)
        if isinstance(value, ModuleType):
            return []
        read = {name: part for name, part in scope.items() if _is_read(name, part)}
        self._variables |= {(id(value), name) for name in read}
        return [*read.values()]

    def _items(self, container: Any) -> list[Any]:
        """Returns the items of a container; marks them at once if all are plain, or all are floats."""
        if isinstance(container, dict):
            held = raw_dict(container)
            return self._items([*held]) + self._items([*held.values()])
        items, kinds = [*container], {*map(type, container)}
        if not (kinds <= _PLAIN or kinds == {float}):
            return items
        self._marks.append(array("d", items).tobytes() if float in kinds else items)
        return []

    def _parts_of_function(self, function: FunctionType) -> Iterable[Any]:
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        if function.__dict__:
            self._places.add(id(function))
            yield from function.__dict__.values()
        if _is_installed(str(function.__globals__.get("__name__", ""))):  # of a decorator: it may call the user's one
            yield from function.__closure__ or ()
        else:
            yield from self._parts_of_code(function)

    def _parts_of_code(self, function: FunctionType) -> Iterable[Any]:
        named, stored = names_in(function.__code__), names_of(function.__code__).written
        self._names.update(dict.fromkeys(named))
        self._stored |= stored
        if any(name.startswith("__") for name in stored):
            self._leave_out("parts of Python itself")
        for outer in variables_of(function):
            self._variables.add((id(outer.holder), outer.name))
            if (value := outer.value()) is not ABSENT:
                yield value
        for name in named:
            if name in function.__globals__ or name in self._stored:
                continue
            if name in sys.modules:  # imported in the function
                yield sys.modules[name]
            elif name in _UNSEEN:
                self._leave_out(f"what {name}() does")
            elif name in _FILES and self._has_files:
                self._leave_out("files")

    def _parts_of_generator(self, value: Any) -> Iterable[Any]:
        if not isinstance(value, Iterator):
            self._marks.append(comparable_state(value))
            return ()
        try:  # those of containers tell where they are
            parts: Any = value.__reduce__()[1:]
        except TypeError:
            self._leave_out(f"a {type(value).__name__}")
            return gc.get_referents(value)
        return [*parts[0], *parts[1:]]

    def _parts_of_hidden(self, value: Any, kind: type) -> Iterable[Any]:
        """Marks an object that is written in C by its pickled state."""
        if not self._most_bytes:
            return gc.get_referents(value)
        if kind not in copyreg.dispatch_table and isinstance(value.__reduce_ex__(4), str):  # by its name
            self._leave_out(f"a {kind.__name__}")
        else:
            self._marks.append(pickle.dumps(value))
        return ()

    def _named(self) -> Iterable[Any]:
        """Returns what is named in a scope, and was not yet returned."""
        found = []
        is_any_named = not _LOOKUPS.isdisjoint(self._names)
        for owner, scope in self._scopes.items():
            is_whole = is_any_named and not isinstance(self._held[owner], ModuleType)
            for name in [*scope] if is_whole else self._names:
                if name in scope and (owner, name) not in self._variables:
                    self._variables.add((owner, name))
                    found.append(scope[name])
        return found


def _is_closed(value: Any) -> bool:
    """Whether it is known that nothing changes inside."""
    if isinstance(value, _CLOSED) or value is sys.stdout or value is sys.stderr:
        return True
    if isinstance(value, (FunctionType, type)):
        return _is_library(value)
    kind: Any = type(value)
    if not _has_hidden_state(kind) or is_generator(value):
        return False
    place = kind.__module__, kind.__name__
    if place[0] == "torch._C" or place in _ARROW or isinstance(value, (random.Random, np.random.RandomState)):
        return True  # those that all code shares are `SharedRandomState`
    is_function = callable(value) and hasattr(value, "__name__") and _is_library(kind)
    return is_function and _is_library(value)


def _is_library(value: Any) -> bool:
    """Whether a function or a class is of an installed package."""
    return _is_installed(str(getattr(value, "__module__", "builtins")))


@functools.cache
def _is_installed(name: str) -> bool:
    root = name.partition(".")[0]
    if root in sys.stdlib_module_names or root in ("torch", "graphpatch_notebook"):
        return True
    places = [getattr(sys.modules.get(root), "__file__", None) or "", *getattr(sys.modules.get(root), "__path__", ())]
    return any("site-packages" in place or "dist-packages" in place for place in places)


def _parts_of_cached(function: Any) -> list[Any]:
    """Returns what a function of `functools.cache` refers to.

    Of the results that it keeps, these are those that may change. That it keeps more of them changes nothing: the
    function that it calls is read, too.
    """
    parts = gc.get_referents(function)
    kept: Any = [part for part in parts if type(part) is dict and part is not function.__dict__][-1]  # after results
    if function.cache_parameters()["maxsize"] is None:
        parts += kept.values()
    return [part for part in parts if part is not kept and not _is_fixed(part)]


def _is_fixed(value: Any) -> bool:
    """Whether it is known that neither a value nor anything in it changes."""
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    return type(value) in _PLAIN or isinstance(value, _NUMBERS) or _is_closed(value)


def _own_classes(kind: type) -> list[type]:
    """Returns the classes of an object that are not of installed packages."""
    return [one for one in kind.__mro__ if not _is_library(one)]


def _is_read(name: str, part: Any) -> bool:
    """Whether an attribute of a class counts even if no function names it: data, and methods that operators call."""
    if isinstance(part, (FunctionType, property, staticmethod, classmethod)):
        return name == "forward" or (name.startswith("__") and name.endswith("__") and name not in _SPECIAL)
    return not (name.startswith("__") or name == "_abc_impl" or hasattr(type(part), "__get__"))


@functools.lru_cache(maxsize=1024)
def _has_hidden_state(kind: type) -> bool:
    """Whether objects of a class have fields that only C code can read: they are larger than their attributes need."""
    pointer = tuple.__itemsize__
    fields = [kind.__dictoffset__ > 0, kind.__weakrefoffset__ > 0]
    slots = sum(isinstance(part, MemberDescriptorType) for one in kind.__mro__ for part in vars(one).values())
    return kind.__basicsize__ > object.__basicsize__ + pointer * (sum(fields) + slots)


def _has_caches(kind: type) -> bool:
    """Whether objects of a class are read by their pickled state: the rest are caches, which reading fills."""
    return str(kind.__module__).partition(".")[0] in ("pandas", "PIL")


def _contents(value: Any, most_bytes: float) -> Any:
    """Returns the contents of a tensor, an array or a module in a comparable form."""
    if isinstance(value, Module):
        tensors = [*value.parameters(), *value.buffers()]
        return [(id(tensor), version_of(tensor)) for tensor in tensors]
    if isinstance(value, np.ndarray):
        is_read = value.nbytes <= most_bytes and value.dtype != object
        return zlib.crc32(np.ndarray.tobytes(value)) if is_read else ABSENT  # masked arrays change in their own one
    # The version counter misses writes through `numpy` and `data`.
    is_read = type(value) in (Tensor, Parameter) and value.layout is torch.strided and value.device.type == "cpu"
    if not is_read or value.nbytes > most_bytes:
        return version_of(value)
    data = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return version_of(value), zlib.crc32(data.numpy())


def _memory(value: Any) -> Iterator[Hashable]:
    """Yields the address of the memory of a tensor or an array, which others may share."""
    if isinstance(value, Tensor):
        yield "memory", memory_of(value)
    elif isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        yield "memory", value.__array_interface__["data"][0]


# -- runs --------------------------------------------------------------------------------------------------------------


def change_by(run: Callable[[], object], model: Module, state: ModuleState) -> Change | Drawing | None:
    """Returns what `run` has changed in a model since `state`; calls `run` again if another thread may have done it."""
    drawn = state.random.changed()
    if "Python" in drawn and not draws_from_python(run, model):
        drawn.remove("Python")
    return Drawing(" and ".join(drawn)) if drawn else next(state.changes(), None)


class Drawing(str):
    """The owners of the random generators that a run draws from."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"the model draws random numbers (of {self[:]})"


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
        drawn += [owner for owner in before.changed() if owner != "Python" or calls or not is_profiled]


def _may_be_of_others() -> bool:
    """Whether other threads may draw from Python's generator, and calls in this one can be profiled."""
    return threading.active_count() > 1 and sys.getprofile() is None


# -- what code reads from outside of it --------------------------------------------------------------------------------


def raw_dict(container: dict[Any, Any]) -> dict[Any, Any]:
    """Returns a copy of what a dict holds, whatever its class makes of it: some make modules of classes."""
    return dict((OrderedDict if isinstance(container, OrderedDict) else dict).items(container))


def slots_of(value: Any) -> dict[str, Any]:
    """Returns the values in the slots of an object whose class is written in Python."""
    kind: Any = type(value)
    return {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> list[str]:
    scopes = [base.__dict__ for base in kind.__mro__ if "__slots__" in base.__dict__]
    # As attributes, private ones have the name of the class, too.
    return [name for scope in scopes for name, part in scope.items() if type(part) is MemberDescriptorType]


class OuterValue(NamedTuple):
    """A variable that code reads from outside of it, an attribute of a class, or what a function holds.

    Attributes:
        holder: The globals, the cell of a closure, the class, or the function.
        is_written: Whether the code assigns to it.
        home: The name of the Python module of the code.
    """

    name: str
    holder: Any
    key: str = ""
    is_written: bool = False
    home: str = ""

    def value(self) -> Any:
        """Returns its current value; `ABSENT` if it has none."""
        holder, key = self.holder, self.key
        if type(holder) is dict:
            return holder.get(key, ABSENT)
        if type(holder) is CellType:
            return _content(holder)
        return getattr(holder, key) if type(holder) is FunctionType else vars(holder).get(key, ABSENT)


def variables_of(function: FunctionType) -> Iterator[OuterValue]:
    """Yields the globals and the closure variables that a function may read, or one that is defined inside it."""
    code, variables, home = function.__code__, function.__globals__, function.__module__
    names = names_of(code)
    for name in names.variables:
        if name in variables or name in names.written:
            yield OuterValue(name, variables, name, name in names.written, home)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield OuterValue(name, cell, "", name in names.written, home)


class CodeNames(NamedTuple):
    """The names in a code object: of globals, and of globals, closure variables and attributes that are assigned."""

    variables: tuple[str, ...]
    written: frozenset[str]


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> CodeNames:
    """Returns the names of outer variables in a code object, and in the functions defined inside it."""
    variables: dict[str, None] = {}
    written: set[str] = set()
    for instruction in dis.get_instructions(code):
        action, _, where = instruction.opname.partition("_")
        if where in ("GLOBAL", "NAME", "FROM_DICT_OR_GLOBALS"):
            variables[instruction.argval] = None
        if action in ("STORE", "DELETE") and where in ("GLOBAL", "DEREF", "ATTR"):
            written.add(instruction.argval)
    for part in code.co_consts:
        if isinstance(part, CodeType):
            variables |= dict.fromkeys(names_of(part).variables)
            written |= names_of(part).written
    return CodeNames(tuple(variables), frozenset(written))


@functools.lru_cache(maxsize=4096)
def names_in(code: CodeType) -> tuple[str, ...]:
    """Returns the names of globals and attributes in a code object, and in the functions defined inside it."""
    inner = (name for part in code.co_consts if isinstance(part, CodeType) for name in names_in(part))
    return tuple(dict.fromkeys([*code.co_names, *inner]))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return ABSENT
