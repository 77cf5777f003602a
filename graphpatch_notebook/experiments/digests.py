"""Digests of patches, metrics and inputs: whether a sweep is the one that a file was written by."""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.node_path import NodePath
from graphpatch_notebook.patches import Patch

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_DATA = (*_SIMPLE, *_FUNCTIONS, Tensor, np.ndarray, np.generic, slice, range, list, tuple, set, frozenset, dict, Patch)
_GLOBAL_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")


class Digester:
    """Makes digests: equal for what is equal, in this process and in others of the same version of Python.

    What is seen: numbers, texts, slices, containers and dataclasses by their contents; tensors and arrays by dtype,
    shape and bytes; patches by class, fields (not by what a probe has kept) and, for classes of the user's, methods;
    functions by code, defaults, closure and the global data and functions of their module that they use; other objects
    by class, plain attributes and, where they can be called, methods.

    What is **not** seen: a module's weights (the baseline of a sweep tells these), the code of functions of other
    modules that a function calls, the state of objects within objects, tensors without plain memory (sparse, on
    `meta`), and what a function finds by other ways, say in a file.

    What was seen must not change while this object lives: it is looked at once.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}  # with the object, lest its id be another's
        self._open: list[int] = []

    def digest(self, value: Any) -> str:
        """Returns the digest of a value, as 16 hexadecimal digits."""
        return self._bytes(value).hex()[:16]

    def _bytes(self, value: Any) -> bytes:
        if isinstance(value, _SIMPLE):
            return _hashed(type(value).__name__.encode(), repr(value).encode())
        key = id(value)
        if key in self._open:  # it holds itself
            return _hashed(b"cycle", str(len(self._open) - self._open.index(key)).encode())
        if key not in self._known:
            self._open.append(key)
            try:
                self._known[key] = (value, self._parts(value))
            finally:
                self._open.pop()
        return self._known[key][1]

    def _parts(self, value: Any) -> bytes:
        name = _class_name(value)
        if isinstance(value, (Tensor, np.ndarray, np.generic)):
            return _hashed(name, *_array_parts(value))
        if isinstance(value, (set, frozenset)):
            return _hashed(name, *sorted(map(self._bytes, value)))
        return _hashed(name, *map(self._bytes, self._children(value)))

    def _children(self, value: Any) -> Iterator[Any]:
        if isinstance(value, (type, Module, types.ModuleType, types.BuiltinFunctionType)):
            yield getattr(value, "__qualname__", getattr(value, "__name__", ""))
            yield getattr(value, "__module__", "")
        elif isinstance(value, types.FunctionType):
            yield from _function_parts(value)
        elif isinstance(value, types.MethodType):
            yield from (value.__func__, value.__self__)
        elif isinstance(value, types.CodeType):
            yield from (value.co_code, value.co_consts, value.co_names, value.co_varnames, value.co_freevars)
        elif isinstance(value, functools.partial):
            yield from (value.func, value.args, value.keywords)
        elif isinstance(value, (slice, range)):
            yield from (value.start, value.stop, value.step)
        elif isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, Mapping):
            yield from (part for item in value.items() for part in item)
        elif isinstance(value, (NodePath, enum.Enum)):
            yield str(value)
        else:
            yield from _attributes(value)


def _hashed(*parts: Any) -> bytes:
    result = hashlib.sha256()
    for part in parts:
        view = memoryview(part)
        result.update(view.nbytes.to_bytes(8, "little"))
        if view.nbytes:
            result.update(view)
    return result.digest()


def _class_name(value: Any) -> bytes:
    return f"{type(value).__module__}.{type(value).__qualname__}".encode()


def _array_parts(value: Any) -> Iterator[Any]:
    yield f"{value.dtype} {tuple(value.shape)}".encode()
    try:
        if isinstance(value, Tensor):
            plain = value.detach().resolve_conj().resolve_neg().to("cpu").reshape(-1).contiguous()
            yield plain.view(torch.uint8).numpy()
        elif value.dtype.hasobject:
            yield repr(value.tolist()).encode()
        else:
            yield np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    except (RuntimeError, NotImplementedError, TypeError):
        yield b"no plain memory"


def _function_parts(function: types.FunctionType) -> Iterator[Any]:
    yield function.__code__
    yield function.__defaults__
    yield function.__kwdefaults__
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        yield name
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            yield "unset"
    for name in global_names(function.__code__):
        yield name
        yield _seen_global(function.__globals__.get(name), function.__module__)


def global_names(code: types.CodeType) -> list[str]:
    """Returns the names of the globals that a function, and the functions in it, may read, sorted."""
    return list(_global_names(code))


@functools.lru_cache(maxsize=1024)  # thousands of cells have functions of one code
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname in _GLOBAL_LOADS}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(_global_names(constant))
    return tuple(sorted(names))


def _seen_global(value: Any, module: str) -> Any:
    if isinstance(value, _FUNCTIONS) and getattr(value, "__module__", None) != module:
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    return _seen(value)


def _seen(value: Any) -> Any:
    """Returns what is seen of something that is only reachable: whole trees of objects are not walked."""
    is_seen = isinstance(value, _DATA) or dataclasses.is_dataclass(value)
    return value if is_seen else _class_name(value)


def _methods(kind: type[Any]) -> list[Any]:
    """Returns the methods of a class of the user's: the code of what a patch, or a metric, does."""
    found: list[Any] = []
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("builtins", "graphpatch_notebook", "torch", "typing"):
            found += [(name, part) for name, part in vars(base).items() if isinstance(part, types.FunctionType)]
    return found


def _attributes(value: Any) -> Iterator[Any]:
    if isinstance(value, Patch) or callable(value):
        yield from _methods(type(value))
    if isinstance(value, Patch):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        yield from ((name, getattr(value, name, None)) for name in names)
    elif dataclasses.is_dataclass(value):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    else:
        yield from ((name, _seen(item)) for name, item in getattr(value, "__dict__", {}).items())
