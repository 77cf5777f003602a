"""Integers that remember which node they came from, so that sizes stay symbolic in the graphs.

They live for one frame of one capture: anywhere else they are plain numbers. What Python makes of a size (a comparison,
a float, the key of a dict) is not in the graph, so the frame notes it as a *guard*: a graph that runs in place of the
module holds as long as Python would find the same again. C code (`range(size)`, `items[:size]`,
`math.log(size)`) reads a size unseen.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from graphpatch_notebook.capture.records import Ref


class SizeOwner(Protocol):
    """The frame being recorded that a size belongs to."""

    @property
    def is_current(self) -> bool:
        """Whether the frame is the one that runs at this moment."""

    def record_size(self, func: Callable[..., Any], operands: tuple[Any, ...], result: int) -> Any:
        """Records arithmetic on sizes and returns its result, as a size of this frame."""

    def guard_size(self, func: Callable[..., Any] | None, operands: tuple[Any, ...], result: Any) -> None:
        """Notes that Python went on with `result`, which is `func(*operands)`, or the operand itself."""


@dataclass(slots=True)
class Escapes:
    """Whether a size was used outside of its frame, where it is a plain number; shared by all sizes of a capture."""

    found: bool = False


class Size(int):
    """A size, or what was computed from sizes."""

    owner: SizeOwner | None
    ref: Ref | None
    escapes: Escapes

    @staticmethod
    def of(value: int, owner: SizeOwner, ref: Ref, escapes: Escapes) -> Size:
        size = int.__new__(Size, value)
        size.owner = owner
        size.ref = ref
        size.escapes = escapes
        return size

    def current_owner(self) -> SizeOwner | None:
        """Returns the frame that it belongs to if that runs now; else it is used as a plain number, which is noted."""
        if self.owner is not None and self.owner.is_current:
            return self.owner
        self.escapes.found = True
        return None

    def release(self) -> None:
        """Makes it a plain number: its frame is over, and a size that the model keeps must not keep the frame alive."""
        self.owner = self.ref = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, (plain(self),))

    def __copy__(self) -> int:
        return plain(self)

    def __deepcopy__(self, memo: Any) -> int:
        return plain(self)


plain = int.__index__
"""Returns the plain number of a size."""


def _guard(func: Callable[..., Any] | None, operands: tuple[Any, ...], result: Any) -> None:
    size = next(operand for operand in operands if type(operand) is Size)
    if (owner := size.current_owner()) is not None:
        owner.guard_size(func, operands, result)


def _fix(size: Size) -> None:
    _guard(None, (size,), plain(size))


def _arithmetic(func: Callable[..., Any], reflected: bool) -> Callable[[Size, Any], Any]:
    def method(self: Size, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            if not isinstance(other, float):
                if isinstance(other, (list, tuple, str)):
                    _fix(self)
                return NotImplemented  # a tensor: torch goes on with the plain number
            _fix(self)
            return func(other, plain(self)) if reflected else func(plain(self), other)
        operands = (other, self) if reflected else (self, other)
        result = func(*map(plain, operands))
        if not isinstance(result, int):
            _guard(func, operands, result)
        elif (owner := self.current_owner()) is not None:
            return owner.record_size(func, operands, result)
        return result

    return method


def _comparison(func: Callable[..., Any], name: str) -> Callable[[Size, Any], Any]:
    of_int = getattr(int, name)

    def method(self: Size, other: Any) -> Any:
        result = of_int(self, other)
        if result is not NotImplemented:
            _guard(func, (self, other), result)
        elif isinstance(other, float):
            _fix(self)
        return result

    return method


def _plain_method(name: str) -> Callable[..., Any]:
    of_int = getattr(int, name)

    def method(self: Size, *others: Any) -> Any:
        _fix(self)
        return of_int(plain(self), *others)

    return method


def _bool(self: Size) -> bool:
    result = plain(self) != 0
    _guard(operator.truth, (self,), result)
    return result


def _negative(self: Size) -> Any:
    owner = self.current_owner()
    return -plain(self) if owner is None else owner.record_size(operator.neg, (self,), -plain(self))


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
    setattr(Size, f"__{_name}__", _arithmetic(getattr(operator, _name), reflected=False))
    setattr(Size, f"__r{_name}__", _arithmetic(getattr(operator, _name), reflected=True))
for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Size, _name, _comparison(getattr(operator, _name), _name))
for _name in ("and", "or", "xor", "lshift", "rshift", "divmod"):
    setattr(Size, f"__{_name}__", _plain_method(f"__{_name}__"))
    setattr(Size, f"__r{_name}__", _plain_method(f"__r{_name}__"))
for _name in ("abs", "ceil", "float", "floor", "hash", "int", "invert", "pos", "round", "trunc", "format", "repr"):
    setattr(Size, f"__{_name}__", _plain_method(f"__{_name}__"))
for _name in ("bit_length", "bit_count", "to_bytes"):
    if hasattr(int, _name):
        setattr(Size, _name, _plain_method(_name))
Size.__bool__ = _bool  # type: ignore[assignment]
Size.__neg__ = _negative  # type: ignore[assignment]
