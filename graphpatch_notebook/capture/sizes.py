"""Integers that remember which node they came from, so that sizes stay symbolic in the graphs.

They live for one frame of one capture: anywhere else they are plain numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

from graphpatch_notebook.capture.records import Ref


class SizeOwner(Protocol):
    """The frame being recorded that a size belongs to."""

    @property
    def is_current(self) -> bool:
        """Whether the frame is the one that runs at this moment."""

    def record_size(self, func: Callable[..., Any], operands: tuple[Any, ...], result: int) -> Any:
        """Records arithmetic on sizes and returns its result, as a size of this frame."""


class Size(int):
    """A size, or what was computed from sizes."""

    owner: SizeOwner | None
    ref: Ref | None

    @staticmethod
    def of(value: int, owner: SizeOwner, ref: Ref) -> Size:
        size = int.__new__(Size, value)
        size.owner = owner
        size.ref = ref
        return size

    def release(self) -> None:
        """Makes it a plain number: its frame is over, and a size that the model keeps must not keep the frame alive."""
        self.owner = self.ref = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, (int(self),))

    def __copy__(self) -> int:
        return int(self)

    def __deepcopy__(self, memo: Any) -> int:
        return int(self)


def _arithmetic(func: Callable[..., Any], reflected: bool) -> Callable[[Size, Any], Any]:
    def method(self: Size, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            # A float or a tensor: Python, or torch, continues with the plain number.
            return NotImplemented if not isinstance(other, float) else _plain(func, self, other, reflected)
        operands = (other, self) if reflected else (self, other)
        result = func(*map(int, operands))
        if not isinstance(result, int) or self.owner is None or not self.owner.is_current:
            return result
        return self.owner.record_size(func, operands, result)

    return method


def _plain(func: Callable[..., Any], size: Size, other: float, reflected: bool) -> Any:
    return func(other, int(size)) if reflected else func(int(size), other)


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
    _function = getattr(operator, _name)
    setattr(Size, f"__{_name}__", _arithmetic(_function, reflected=False))
    setattr(Size, f"__r{_name}__", _arithmetic(_function, reflected=True))


def _negative(self: Size) -> Any:
    if self.owner is None or not self.owner.is_current:
        return -int(self)
    return self.owner.record_size(operator.neg, (self,), -int(self))


Size.__neg__ = _negative  # type: ignore[assignment]
