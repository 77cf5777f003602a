"""What the code of a module reads from outside: globals and the variables that its functions close over."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

ABSENT = object()


def outer_values(module: Module, forward: Callable[..., Any]) -> Iterator[tuple[Callable[[], Any], Any]]:
    """Yields the plain values and tensors that the module's own functions read from outside: globals, closures."""
    for function in _functions(module, forward):
        where = function.__globals__
        for name in function.__code__.co_names:
            if type(value := where.get(name, ABSENT)) in _OUTER:
                yield partial(where.get, name), value
        for cell in function.__closure__ or ():
            if type(value := _content(cell)) in _OUTER:
                yield partial(_content, cell), value


_OUTER = (bool, int, float, str, type(None), Tensor, torch.nn.Parameter)


def _functions(module: Module, forward: Callable[..., Any]) -> list[types.FunctionType]:
    """Returns `forward`, what it decorates, functions that are attributes of the module, and those in closures."""
    found: list[types.FunctionType] = []
    waiting: list[Any] = [forward, *module.__dict__.values()]
    while waiting:
        function = waiting.pop()
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType) and function not in found:
            found.append(function)
            waiting.append(getattr(function, "__wrapped__", None))
            waiting += [_content(cell) for cell in function.__closure__ or ()]
    return found


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return ABSENT


def outer_containers(module: Module, forward: Callable[..., Any]) -> dict[str, Any]:
    """Returns the lists, dicts and sets that the module's own functions reach outside, by name."""
    found: dict[str, Any] = {}
    for function in _functions(module, forward):
        for name in function.__code__.co_names:
            found[name] = function.__globals__.get(name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            found[name] = _content(cell)
    return {name: value for name, value in found.items() if type(value) in _CONTAINERS and len(value) <= _MANY}


def outer_objects(module: Module, forward: Callable[..., Any], depth: int) -> Iterator[Any]:
    """Yields what the module's own code names: globals, closures, methods, what it takes from other modules.

    The code of helper functions and methods that it names counts, too, up to a depth; that of torch does not.
    """
    seen: set[types.CodeType] = set()
    waiting = [(function, 0) for function in _functions(module, forward)]
    while waiting:
        function, deep = waiting.pop()
        if function.__code__ in seen or (function.__module__ or "").split(".")[0] == "torch":
            continue
        seen.add(function.__code__)
        for value in _named_by(function, type(module)):
            yield value
            inner = getattr(value, "__func__", value)
            if isinstance(inner, types.FunctionType) and deep < depth:
                waiting.append((inner, deep + 1))


def _named_by(function: types.FunctionType, kind: type) -> Iterator[Any]:
    names = set(_names(function.__code__))
    for name in names:
        value = function.__globals__.get(name, ABSENT)
        yield value
        yield next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), ABSENT)
        if isinstance(value, types.ModuleType):
            yield from (vars(value)[inner] for inner in names if inner in vars(value))
    yield from (_content(cell) for cell in function.__closure__ or ())


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


_CONTAINERS = (list, dict, set, deque)
_MANY = 1000
