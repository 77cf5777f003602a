"""Takes things back wherever an interrupt comes: between any two instructions, those that take back included.

What is taken back is taken back once more where the first time may not have come to its end, so it must allow that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")


@contextmanager
def holding(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Gives a context variable another value for the length of the block."""
    before = variable.get()
    try:
        try:
            variable.set(value)
            yield
        finally:
            variable.set(before)
    finally:
        variable.set(before)  # once more, if an interrupt came in between


@contextmanager
def afterwards(*steps: Callable[[], object]) -> Iterator[None]:
    """Takes steps, one after the other, when the block ends, however it does."""
    try:
        try:
            yield
        finally:
            for step in steps:
                step()
    except BaseException:
        for step in steps:
            step()
        raise
