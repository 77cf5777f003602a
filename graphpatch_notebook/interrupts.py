"""Restores state even if a KeyboardInterrupt arrives, also during restoration.

`afterwards`, `on_error` and `holding` run the steps that restore state, and run them again if they were interrupted, so
every step must be idempotent. `deferred` delays an interrupt. An interrupt right before the first line of an `__exit__`
ends a `with` block without it, which Python code cannot prevent: `Block` detects later that the block is over.
"""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from opcode import opmap
from types import FrameType
from typing import Any, TypeVar

_T = TypeVar("_T")

# -- restoring state ---------------------------------------------------------------------------------------------------


@contextmanager
def afterwards(*steps: Callable[[], object]) -> Iterator[None]:
    """Runs steps, in order, when the block ends or raises; again if an interrupt arrives while they run."""
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


@contextmanager
def on_error(*steps: Callable[[], object]) -> Iterator[None]:
    """Runs steps, in order, if the block raises; again if an interrupt arrives while they run."""
    try:
        yield
    except BaseException:
        try:
            for step in steps:
                step()
        except BaseException:
            for step in steps:
                step()
            raise
        raise


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
        variable.set(before)  # again, if an interrupt came in between


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


class HeldSwitch:
    """Something that is on while anybody holds it. `let_go` may be called twice."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holders: set[object] = set()

    def hold(self, holder: object) -> None:
        """Switches it on until `let_go`."""
        with self._lock:
            self._holders.add(holder)
            self._switch_on()

    def let_go(self, holder: object) -> None:
        """Switches it off if there are no other holders."""
        with self._lock:
            self._holders.discard(holder)
            if not self._holders:
                self._switch_off()

    def _switch_on(self) -> None:
        """Switches it on, also if it is on already, or if this was interrupted before."""

    def _switch_off(self) -> None:
        """Switches it off, likewise."""


# -- blocks that an interrupt ended ------------------------------------------------------------------------------------

# Python 3.10; 3.11 to 3.13; from 3.14 on an ordinary call follows the last of these.
_WITH = {opmap.get("SETUP_WITH"), opmap.get("BEFORE_WITH")} - {None}
_LOAD_SPECIAL = opmap.get("LOAD_SPECIAL")
_POP_TOP = opmap["POP_TOP"]
_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Block:
    """A block of code of the user: a `with` block, or a cell. Known limit: see `is_over`.

    Args:
        frame: The Python frame of the function or cell that contains it.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._thread = threading.get_ident()
        self._task = _current_task() if frame.f_code.co_flags & inspect.CO_COROUTINE else None

    @staticmethod
    def entered_by(frame: FrameType) -> Block | None:
        """Returns the `with` block that a frame is entering; `None` if there is none, or the frame can be suspended."""
        code, last = frame.f_code.co_code, frame.f_lasti
        is_with = code[last] in _WITH or (last >= 2 and code[last - 2] == _LOAD_SPECIAL)
        return Block(frame) if is_with and not frame.f_code.co_flags & _SUSPENDS else None

    def is_over(self) -> bool:
        """Whether its frame has ended; `False` in threads other than its own, which cannot determine it.

        If the frame itself continues (its own code handles the interrupt), the block counts as running.
        """
        if self._task is not None and self._task is not _current_task():
            return bool(self._task.done())  # it may be waiting
        if threading.get_ident() != self._thread:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is None


def _current_task() -> Any:
    if (asyncio := sys.modules.get("asyncio")) is None:  # it takes long to import
        return None
    with contextlib.suppress(RuntimeError):  # no loop is running
        return asyncio.current_task()
    return None


def discards_value(frame: FrameType) -> bool:
    """Whether a frame is discarding the value of an expression, as a line does that is only a call."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _POP_TOP
