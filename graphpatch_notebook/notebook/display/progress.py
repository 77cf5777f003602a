"""A line of progress during operations that take longer than a second, such as the capture of a large model.

During the first second, a thread sleeps, and nothing is displayed or imported. In a terminal, the line disappears when
the operation ends. In a notebook, it becomes one line with the duration. In a pipe or a file, nothing is displayed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from graphpatch_notebook.capture import FrameCount, frame_count
from graphpatch_notebook.interrupts import holding

DELAY = 1.0
_INTERVAL = 0.25
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_is_showing = threading.Lock()


@contextmanager
def capture_progress(model: nn.Module, delay: float = DELAY) -> Iterator[None]:
    """Displays the progress of captures in the block that take longer than `delay` seconds.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> model = torch.nn.ReLU()
        >>> with capture_progress(model):
        ...     pg = PatchableGraph(model, torch.ones(2))
    """
    count = FrameCount()
    expected = sum(not isinstance(module, _NEVER_CALLED) for module in model.modules())
    operation = _Operation(f"Capturing {type(model).__name__}", count, expected)
    with holding(frame_count, count), _watched(operation, delay):
        yield


@contextmanager
def busy(doing: str, delay: float = DELAY) -> Iterator[None]:
    """Displays that the block is running, if it takes longer than `delay` seconds."""
    with _watched(_Operation(doing), delay):
        yield


@dataclass
class _Operation:
    """The state of an operation, which a line shows."""

    doing: str
    count: FrameCount | None = None
    expected: int = 0
    started: float = field(default_factory=time.monotonic)
    state: str = ""

    def __str__(self) -> str:
        parts = [self.state] * bool(self.state)
        if self.count is not None:
            about = (
                f" of about {self.expected:,}" if self.state == "running" and self.count.frames <= self.expected else ""
            )
            parts.append(f"{self.count.frames:,}{about} module calls")
        return f"{self.doing}: {', '.join([*parts, f'{time.monotonic() - self.started:.1f} s'])}"


@contextmanager
def _watched(operation: _Operation, delay: float) -> Iterator[None]:
    is_done = threading.Event()
    # The kernel uses context variables to assign output to cells.
    thread = threading.Thread(target=copy_context().run, args=(_watch, operation, is_done, delay), daemon=True)
    operation.state = "running"
    thread.start()
    try:
        yield
        operation.state = ""
    except BaseException:
        operation.state = "stopped"
        raise
    finally:
        is_done.set()
        thread.join()


def _watch(operation: _Operation, is_done: threading.Event, delay: float) -> None:
    # Two lines would overwrite each other, so only the first is shown.
    if is_done.wait(delay) or not _is_showing.acquire(blocking=False):
        return
    try:
        show = _line_in_cell() if _is_in_kernel() else _line_in_terminal()
        if show is None or is_done.is_set():
            return
        show(str(operation), False)
        while not is_done.wait(_INTERVAL):
            show(str(operation), False)
        show(str(operation), True)
    finally:
        _is_showing.release()


def _is_in_kernel() -> bool:
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


def _line_in_terminal() -> Callable[[str, bool], object] | None:
    """Returns a function that shows a text, or removes it at the end; `None` if the output is not a terminal."""
    stream = sys.stderr
    if stream is None or not stream.isatty() or os.environ.get("TERM") == "dumb":
        return None
    return lambda text, is_end: print("\r\x1b[K" + ("" if is_end else text), end="", file=stream, flush=True)


def _line_in_cell() -> Callable[[str, bool], object]:
    from IPython.display import display

    handle: Any = None

    def show(text: str, _: bool) -> None:
        nonlocal handle
        if handle is None:
            handle = display({"text/plain": text}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            handle.update({"text/plain": text}, raw=True)

    return show
