"""Finds the outer values that the code of a module reads: globals and closure variables."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

from torch.nn import Module

from graphpatch_notebook.values import ABSENT

COMPARED = frozenset({bool, int, float, str, list, dict, set, deque})
"""The classes of plain data and containers."""

_CODE = frozenset(
    {types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.NoneType, type, property, staticmethod}
)
"""The classes of most outer values, which hold no data."""

_NO_FUNCTIONS = frozenset({*COMPARED, tuple, type(None), OrderedDict})  # most attributes of a module


class OuterValue(NamedTuple):
    """A variable that code reads from outside of it, or an attribute of a class."""

    name: str
    holder: Any  # a mapping, or the cell of a closure
    key: str = ""

    def value(self) -> Any:
        """Returns its current value; `None` for a global that does not exist."""
        return _content(self.holder) if type(self.holder) is types.CellType else self.holder.get(self.key)


def outer_objects(module: Module, forward: Callable[..., Any]) -> dict[str, Any]:
    """Returns the data in globals and closure variables that the module's own functions use, by name."""
    return {outer.name: value for outer, value in _outer_values(module, forward)}


def outer_values_of_modules(
    modules: Iterable[Module], forward_of: Callable[[Module], Any]
) -> Iterator[tuple[type, OuterValue, Any]]:
    """Yields the data in class attributes of modules, and in globals and closure variables that their functions use.

    Each comes with the first class that reads it, and with its value. One module of each class is examined.
    """
    seen: set[type] = {Module}
    for kind, module in {type(module): module for module in modules}.items():
        own = [base for base in kind.__mro__ if base not in seen and issubclass(base, Module)]
        seen.update(own)
        for base in own:
            for name, value in [*vars(base).items()]:
                if type(value) not in _CODE and "__" not in name:
                    yield kind, OuterValue(f"{base.__name__}.{name}", vars(base), name), value
        outer_values = _outer_values(module, forward_of(module))
        by_name = {(outer.name, id(value)): (outer, value) for outer, value in outer_values}
        for outer, value in by_name.values():
            if "__" not in outer.name:
                yield kind, outer, value


def _outer_values(module: Module, forward: Callable[..., Any]) -> list[tuple[OuterValue, Any]]:
    """Returns the variables that the module's own functions use, with their values, but for code."""
    return [pair for function in _functions(module, forward) for pair in outer_values_of(function, besides=_CODE)]


def outer_values_of(function: types.FunctionType, *, besides: Container[type] = ()) -> list[tuple[OuterValue, Any]]:
    """Returns the globals and the closure variables that a function, or one that is defined inside it, may read.

    Each comes with its value (`None` for a global that does not exist); those with values of some classes are left out.
    """
    code, variables = function.__code__, function.__globals__
    found = [
        (OuterValue(name, variables, name), value)
        for name in names_in(code)
        if type(value := variables.get(name)) not in besides  # first: most are code
    ]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if type(value := _content(cell)) not in besides:
            found.append((OuterValue(name, cell), value))
    return found


@functools.lru_cache(maxsize=256)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Returns the names of globals and attributes in a code object, and in the functions defined inside it."""
    inner = (name for part in code.co_consts if isinstance(part, types.CodeType) for name in names_in(part))
    return tuple(dict.fromkeys([*code.co_names, *inner]))


def _functions(module: Module, forward: Callable[..., Any]) -> list[types.FunctionType]:
    """Returns `forward`, the function that it wraps, methods, functions in closures, and helpers in the same file."""
    found: list[types.FunctionType] = []
    waiting: list[Any] = [forward, *[value for value in module.__dict__.values() if type(value) not in _NO_FUNCTIONS]]
    while waiting:
        function = waiting.pop()
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType) and function not in found:
            found.append(function)
            waiting.append(getattr(function, "__wrapped__", None))
            waiting += [_content(cell) for cell in function.__closure__ or ()]
            waiting += _helpers(function, type(module))
    return found


def _helpers(function: types.FunctionType, kind: type) -> Iterator[types.FunctionType]:
    """Yields the functions of the same file that a function names: globals, and methods of a class."""
    variables = function.__globals__
    for name in names_in(function.__code__):
        value = variables[name] if name in variables else getattr(kind, name, None)
        if type(value) is types.FunctionType and value.__module__ == function.__module__:
            yield value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return ABSENT
