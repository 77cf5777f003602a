"""Finds the outer values that the code of a module reads: globals and closure variables."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch.nn import Module

from graphpatch_notebook.values import ABSENT

_COMPARED = frozenset({bool, int, float, str, list, dict, set, deque})


def outer_objects(module: Module, forward: Callable[..., Any]) -> dict[str, Any]:
    """Returns the globals and closure variables that the module's own functions use, by name."""
    found: dict[str, Any] = {}
    for function in _functions(module, forward):
        for name in function.__code__.co_names:
            found[name] = function.__globals__.get(name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            found[name] = _content(cell)
    return found


def plain_outer_values(modules: Iterable[Module], forward_of: Callable[[Module], Any]) -> dict[tuple[type, str], Any]:
    """Returns the class attributes, globals and closure variables of modules that are plain data or containers.

    Args:
        modules: The modules; one of each class is examined.
        forward_of: Returns the forward of a module.
    """
    found: dict[tuple[type, str], Any] = {}
    for kind, module in {type(module): module for module in modules}.items():
        own = [base for base in kind.__mro__ if issubclass(base, Module) and base is not Module]
        held = {f"{base.__name__}.{name}": value for base in own for name, value in vars(base).items()}
        for name, value in {**held, **outer_objects(module, forward_of(module))}.items():
            if type(value) in _COMPARED and "__" not in name:
                found[kind, name] = value
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
