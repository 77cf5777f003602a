"""What the code of a module reads from outside: globals and the variables that its functions close over."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from graphpatch_notebook.values import ABSENT


def outer_objects(module: Module, forward: Callable[..., Any]) -> dict[str, Any]:
    """Returns what the module's own functions name outside, globals and closures, by name."""
    found: dict[str, Any] = {}
    for function in _functions(module, forward):
        for name in function.__code__.co_names:
            found[name] = function.__globals__.get(name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            found[name] = _content(cell)
    return found


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
