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
    count, started, states = FrameCount(), time.monotonic(), ["running"]
    expected = sum(not isinstance(module, _NEVER_CALLED) for module in model.modules())

    def line() -> str:
        about = f" of about {expected:,}" if states == ["running"] and count.frames <= expected else ""
        parts = [*states, f"{count.frames:,}{about} module calls", f"{time.monotonic() - started:.1f} s"]
        return f"Capturing {type(model).__name__}: {', '.join(parts)}"

    is_done = threading.Event()
    # The kernel uses context variables to assign output to cells.
    thread = threading.Thread(target=copy_context().run, args=(_watch, line, is_done, delay), daemon=True)
    thread.start()
    try:
        with holding(frame_count, count):
            yield
        states.clear()
    except BaseException:
        states[:] = ["stopped"]
        raise
    finally:
        is_done.set()
        thread.join()


def _watch(line: Callable[[], str], is_done: threading.Event, delay: float) -> None:
    # Two lines would overwrite each other, so only the first is shown.
    if is_done.wait(delay) or not _is_showing.acquire(blocking=False):
        return
    try:
        show = _line_in_cell() if _is_in_kernel() else _line_in_terminal()
        if show is None or is_done.is_set():
            return
        show(line(), False)
        while not is_done.wait(_INTERVAL):
            show(line(), False)
        show(line(), True)
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
