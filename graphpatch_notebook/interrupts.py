"""Restores state at the end of a block, also if a KeyboardInterrupt ends it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import FrameType
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
def on_error(*steps: Callable[[], object]) -> Iterator[None]:
    """Runs steps, in order, if the block raises."""
    with ExitStack() as stack:
        for step in reversed(steps):
            stack.callback(step)
        yield
        stack.pop_all()


@contextmanager
def holding(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """Gives a context variable another value for the length of the block."""
    before = variable.get()
    try:
        variable.set(value)
        yield
    finally:
        variable.set(before)


@contextmanager
def deferred() -> Iterator[None]:
    """Makes Ctrl+C (or the stop button of a notebook) take effect at the end of the block.

    Python interrupts the main thread only: in other threads this does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    received: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: received.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            before(signal.SIGINT, received[-1])
