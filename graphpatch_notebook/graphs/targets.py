"""How a recorded torch call is written in a graph: as an operator, a method, an attribute, or a function.

The function that torch dispatched is exact but not always printable: `1 - x` arrives as `Tensor.__rsub__(x, 1)`, an
attribute as the getter of its descriptor. It is written as people write it only where that runs the very same call.
"""

from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Callable, Sequence
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.torch_compat import is_overload
from graphpatch_notebook.values import Key, rebuilt


class Written(NamedTuple):
    """A call as a graph holds it.

    Attributes:
        op: The fx opcode, `call_function` or `call_method`.
        target: What is called: a function, or the name of a method.
        order: What is written as positional arguments: the positions of recorded arguments, and names of attributes;
            `None` for the recorded arguments as they were.
    """

    op: str
    target: Any
    order: tuple[int | str, ...] | None = None


Operand: TypeAlias = Literal["tensor", "number", "other"]


def written(func: Callable[..., Any], operands: Sequence[Operand], has_kwargs: bool) -> Written:
    """Returns how to write a call of `func`.

    Args:
        func: The function that torch dispatched.
        operands: What the positional arguments are: Python's operators are sure to reach `func` only for plain tensors
            and numbers.
        has_kwargs: Whether there are keyword arguments.
    """
    name = str(getattr(func, "__name__", ""))
    is_method = bool(operands) and operands[0] == "tensor"
    if is_method and len(operands) == 2 and not has_kwargs:
        if operands[1] != "other" and func in _BINARY:
            return Written("call_function", _BINARY[func])
        if operands[1] == "number" and func in _REFLECTED:
            return Written("call_function", _REFLECTED[func], order=(1, 0))
    if is_method and not has_kwargs and func in _ALWAYS:
        return Written("call_function", _ALWAYS[func])
    if (attribute := _attribute(func)) is not None:
        if name == "__get__":
            return Written("call_function", getattr, order=(0, attribute))
        return Written("call_function", setattr, order=(0, attribute, 1))
    if is_method and getattr(Tensor, name, None) is func:
        return Written("call_method", name)
    return Written("call_function", printable(func))


def _attribute(accessor: Any) -> str | None:
    if getattr(accessor, "__name__", None) not in ("__get__", "__set__"):
        return None
    descriptor = getattr(accessor, "__self__", None)
    name = getattr(descriptor, "__name__", None)
    return name if isinstance(name, str) and getattr(Tensor, name, None) is descriptor else None


def printable(func: Any) -> Any:
    """Returns `func`, or a `NamedFunction` around it where fx could not print a name that leads back to it."""
    if isinstance(func, (NamedFunction, Container)) or is_overload(func):
        return func
    name = getattr(func, "__name__", None)
    module = getattr(func, "__module__", None)
    if isinstance(name, str) and name.isidentifier():
        if getattr(builtins, name, None) is func or getattr(operator, name, None) is func:
            return func
        if module is None and any(getattr(m, name, None) is func for m in (torch, torch.nn.functional)):
            return func
        if isinstance(module, str) and _lookup(f"{module}.{name}") is func:
            return func
        if isinstance(func, (MethodDescriptorType, WrapperDescriptorType)) and getattr(Tensor, name, None) is func:
            return func  # printed as `torch.Tensor.name`
    return NamedFunction(func)


def _lookup(path: str) -> Any:
    first, *rest = path.split(".")
    found: Any = sys.modules.get(first)
    for name in rest:
        found = getattr(found, name, None)
    return found


class NamedFunction:
    """A function under a name that generated code can use: an `autograd.Function.apply`, a lambda, a bound method."""

    def __init__(self, function: Callable[..., Any]) -> None:
        owner = getattr(function, "__self__", None)
        name = str(getattr(function, "__name__", type(function).__name__))
        if isinstance(owner, type):
            name = f"{owner.__name__}.{name}"
        self.function = function
        self.__name__ = self.__qualname__ = name
        self.__module__ = _module_of(owner if isinstance(owner, type) else function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedFunction) and self.function == other.function

    def __hash__(self) -> int:
        return hash((NamedFunction, self.function))

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


class Container:
    """Makes a container of a class of its own (dataclass, `ModelOutput`, namedtuple, ...) out of its children.

    Keys that are names are passed as keyword arguments, all others by position.
    """

    def __init__(self, kind: type, keys: tuple[Key, ...]) -> None:
        self.type = kind
        self.keys = keys
        self.is_by_name = all(isinstance(key, str) and key.isidentifier() for key in keys)
        self.__name__ = self.__qualname__ = kind.__name__
        self.__module__ = _module_of(kind)

    def __call__(self, *items: Any, **by_name: Any) -> Any:
        return rebuilt(self.type, self.keys, [*items, *by_name.values()])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Container) and (self.type, self.keys) == (other.type, other.keys)

    def __hash__(self) -> int:
        return hash((self.type, self.keys))

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


def _module_of(value: Any) -> str:
    module = str(getattr(value, "__module__", "") or "")
    # fx writes the names of torch's own functions as they stand, without a global that could be another object.
    return "function" if module.split(".", maxsplit=1)[0] in ("torch", "builtins", "_operator", "") else module


def _table(names: dict[str, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Functions of `Tensor` by name, those that this version of torch has."""
    return {getattr(Tensor, name): function for name, function in names.items() if hasattr(Tensor, name)}


_BINARY = _table(
    {
        "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
        "__floordiv__": operator.floordiv, "remainder": operator.mod, "pow": operator.pow, "__pow__": operator.pow,
        "matmul": operator.matmul, "eq": operator.eq, "__eq__": operator.eq, "ne": operator.ne, "lt": operator.lt,
        "le": operator.le, "gt": operator.gt, "ge": operator.ge, "__and__": operator.and_, "__or__": operator.or_,
        "__xor__": operator.xor, "__lshift__": operator.lshift, "__rshift__": operator.rshift,
    }
)  # fmt: skip
_REFLECTED = _table(
    {
        "__rsub__": operator.sub, "__rdiv__": operator.truediv, "__rtruediv__": operator.truediv,
        "__rpow__": operator.pow, "__rfloordiv__": operator.floordiv, "__rmod__": operator.mod,
        "__rlshift__": operator.lshift, "__rrshift__": operator.rshift,
    }
)  # fmt: skip
_ALWAYS = _table(
    {
        "neg": operator.neg, "positive": operator.pos, "__invert__": operator.invert, "__getitem__": operator.getitem,
        "__setitem__": operator.setitem, "__len__": len,
    }
)  # fmt: skip
