"""Jobs: calls of the model in a thread, which can be observed and interrupted from another thread.

Each job has a new thread. Settings that belong to a thread (patch contexts, gradient mode, autocast, function modes)
start with their defaults and end with the job. Settings of the user's cell do not apply, except for `ThreadSettings`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import Context
from typing import Generic, TypeVar

import torch

from graphpatch_notebook.notebook.messages import RunState

T = TypeVar("T")
R = TypeVar("R")
_ENOUGH_JUMPS = 100


def raise_in_thread(ident: int, kind: type[BaseException]) -> None:
    """Raises an exception in another thread, as soon as it runs Python code again.

    Never revoke it (the same function with NULL): up to CPython 3.12, all threads would then check for it at every
    jump, and would not make progress under a profiler.

    `PyThreadState_SetAsyncExc`: CPython 3.10 to 3.14. Tested by tests/notebook/run/test_jobs.py.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))


class ThreadSettings:
    """The settings of torch that belong to a thread and that a run depends on, read in the current thread."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._device = torch.get_default_device()
        self._threads = torch.get_num_threads()
        self._cuda = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Applies the settings in the current thread, within the block."""
        # A new thread starts with the number of the environment variable, which would change how sums are split.
        torch.set_num_threads(self._threads)
        if self._cuda is not None:
            torch.cuda.set_device(self._cuda)
        with nullcontext() if self._device.type == "cpu" else self._device:
            yield


class Job(Generic[T]):
    """A function that runs in its own thread.

    It receives the job, whose `interruptibly` it calls. `in_words` returns the message for an error, which is not kept
    itself: its traceback refers to tensors.
    """

    def __init__(self, work: Callable[[Job[T]], T], in_words: Callable[[BaseException], str]) -> None:
        self.result: T | None = None  # if `state` is "done"
        self.error: str | None = None  # in words, if `state` is "failed"
        self._in_words = in_words
        self._state: RunState = "running"
        self._lock = threading.Lock()
        self._is_open = False
        self.is_interrupted = False  # it may still be running for a moment
        self._started = time.monotonic()
        self._ended: float | None = None
        # In Python 3.14, a thread may inherit the context variables of the thread that starts it.
        self._thread = threading.Thread(
            target=Context().run, args=(self._run, work), name="graphpatch-run", daemon=True
        )
        self._thread.start()

    @property
    def state(self) -> RunState:
        """The state of the job."""
        if self._state == "running" and not self._thread.is_alive():
            return "interrupted"  # so late that `_run` could not set the state
        return self._state

    @property
    def seconds(self) -> float:
        """The duration of the job so far, in seconds."""
        return (time.monotonic() if self._ended is None else self._ended) - self._started

    def _run(self, work: Callable[[Job[T]], T]) -> None:
        state: RunState = "failed"
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
        """Returns the result of `call`, the only code that an interrupt can stop. Code after it always runs.

        Raises:
            KeyboardInterrupt: The job was interrupted, before or during `call`.
            Exception: Any error that `call` raises.
        """
        with self._lock:
            if self.is_interrupted:
                raise KeyboardInterrupt
            self._is_open = True
        try:
            return call()
        finally:
            with self._lock:
                self._is_open = False
            # A pending interrupt is raised here at the latest: Python checks for it at each backward jump.
            for _ in range(_ENOUGH_JUMPS):
                pass

    def interrupt(self) -> None:
        """Interrupts the job at its next line of Python. Does nothing if the job has finished."""
        with self._lock:
            self.is_interrupted = True
            if self._is_open and self._thread.ident is not None:
                raise_in_thread(self._thread.ident, KeyboardInterrupt)

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the job has finished."""
        self._thread.join(seconds)
