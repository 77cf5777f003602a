"""Work of the model's in a thread of its own: it can be looked at from outside, and interrupted.

A new thread for each job: what belongs to a thread (patch contexts, gradient mode, autocast, function modes) starts out
as it is by default, ends with the job, and is nobody else's. What a user has switched on in a cell does not hold there,
but for what `ThreadSettings` carry over.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context
from types import FrameType
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
_ENOUGH_JUMPS = 100
_AUTOCAST = ("cpu", "cuda", "mps", "xpu")
JobState: TypeAlias = Literal["running", "done", "failed", "interrupted"]


def raise_in_thread(ident: int, kind: type[BaseException]) -> None:
    """Raises an exception in another thread, as soon as it runs Python again.

    It must not be taken back (by the same function with NULL): up to CPython 3.12 all threads would look for it at
    every jump from then on, and never get any further under a profiler.

    `PyThreadState_SetAsyncExc`: CPython 3.10 to 3.14. Told by: tests/notebook/run/test_worker.py.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))


class ThreadSettings:
    """What torch keeps for each thread and a run depends on, as the thread has it that makes this object."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._device = torch.get_default_device()
        self._threads = torch.get_num_threads()
        self._cuda = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._autocast = {kind: torch.get_autocast_dtype(kind) for kind in _AUTOCAST if _is_autocast(kind)}
        self._caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Has the same hold in this thread, for the length of the block."""
        # A new thread has the number of the environment until torch is asked: sums would be split otherwise.
        torch.set_num_threads(self._threads)
        if self._cuda is not None:
            torch.cuda.set_device(self._cuda)
        with ExitStack() as stack:
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self._caches))
            if self._device.type != "cpu":  # it is also where nobody has set any
                stack.enter_context(self._device)
            yield

    def remark(self) -> str | None:
        """Returns what is to be said if another thread than the user's asks for a run, which cannot know these."""
        if not self._autocast or self.thread == threading.get_ident():
            return None
        kinds = " and ".join(f"{kind} ({dtype})" for kind, dtype in self._autocast.items())
        return f"autocast was on for {kinds} when the browser was last used from a cell, and is on in this run"


def _is_autocast(kind: str) -> bool:
    try:
        return torch.is_autocast_enabled(kind)
    except RuntimeError:  # this torch does not know the device, or has no autocast for it
        return False


class Job(Generic[T]):
    """A piece of work that goes on in a thread of its own.

    Args:
        work: What to do; it is given the job, whose `interruptibly` it calls.
        in_words: What is said of an error. The error itself is not kept: its traceback holds tensors.

    Attributes:
        result: What the work returned, when `state` is `"done"`.
        error: Why it failed, when `state` is `"failed"`.
    """

    def __init__(self, work: Callable[[Job[T]], T], in_words: Callable[[BaseException], str]) -> None:
        self.result: T | None = None
        self.error: str | None = None
        self._in_words = in_words
        self._state: JobState = "running"
        self._lock = threading.Lock()
        self._is_open = False
        self._is_interrupted = False
        self._started = time.monotonic()
        self._ended: float | None = None
        # In Python 3.14 threads may start with the context variables of the one that starts them.
        self._thread = threading.Thread(
            target=Context().run, args=(self._run, work), name="graphpatch-run", daemon=True
        )
        self._thread.start()

    @property
    def state(self) -> JobState:
        """How it stands."""
        if self._state == "running" and not self._thread.is_alive():
            return "interrupted"  # by an interrupt so untimely that the end was not reached
        return self._state

    @property
    def is_interrupted(self) -> bool:
        """Whether somebody has interrupted it: then it is about to end."""
        return self._is_interrupted

    @property
    def seconds(self) -> float:
        """How long it has been going on, or went on."""
        return (time.monotonic() if self._ended is None else self._ended) - self._started

    def _run(self, work: Callable[[Job[T]], T]) -> None:
        state: JobState = "failed"
        try:
            self.result = work(self)
            state = "done"
        except KeyboardInterrupt:
            state = "interrupted"
        except BaseException as error:
            self.error = self._in_words(error)
        self._ended = time.monotonic()
        self._state = state

    def interruptibly(self, call: Callable[[], R]) -> R:
        """Returns what `call` returns. Only meanwhile does an interrupt arrive; what stands after it is always done.

        Raises:
            KeyboardInterrupt: Somebody interrupted, before or meanwhile.
            Exception: Whatever `call` raises.
        """
        try:
            try:
                with self._lock:
                    if self._is_interrupted:
                        raise KeyboardInterrupt
                    self._is_open = True
                return call()
            finally:
                self._close()
        except KeyboardInterrupt:
            self._close()  # it may have come in the middle of that
            raise

    def _close(self) -> None:
        with self._lock:
            self._is_open = False
        # One that was sent in time is raised here at the latest: Python looks for it at each jump back.
        for _ in range(_ENOUGH_JUMPS):
            pass

    def interrupt(self) -> None:
        """Has the work end at the next line of Python; has no effect when it is done."""
        with self._lock:
            self._is_interrupted = True
            if self._is_open and self._thread.ident is not None:
                raise_in_thread(self._thread.ident, KeyboardInterrupt)

    def python_frame(self) -> FrameType | None:
        """Returns the innermost Python frame of the work, as it is at this moment."""
        ident: Any = self._thread.ident
        return sys._current_frames().get(ident) if self._thread.is_alive() else None

    def wait(self, seconds: float | None = None) -> None:
        """Waits for the end."""
        self._thread.join(seconds)
