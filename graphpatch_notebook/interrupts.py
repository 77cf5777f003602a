"""Restores state at the end of a block, also if a KeyboardInterrupt ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")


@contextmanager
def afterwards(*steps: Callable[[], object]) -> Iterator[None]:
    """Runs steps, in order, when the block ends or raises."""
    with ExitStack() as stack:
        for step in reversed(steps):
            stack.callback(step)
        yield


@contextmanager
def holding(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Gives a context variable another value for the length of the block."""
    before = variable.get()
    try:
        variable.set(value)
        yield
    finally:
        variable.set(before)
