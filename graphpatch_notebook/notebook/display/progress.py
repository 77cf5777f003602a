"""Progress displays for operations that take longer than a second, such as the capture of a large model.

During the first second, a thread sleeps, and nothing is displayed or imported. In a terminal, the display disappears
when the operation ends. In a notebook, it becomes one line with the duration. If the output goes to a pipe or a file,
nothing is displayed.

Rich renders the progress bar, but its own notebook display is not used: that is a widget that captures everything that
the cell prints meanwhile, and that remains in saved notebooks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from graphpatch_notebook.capture import FrameCount, frame_count
from graphpatch_notebook.interrupts import holding

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY = 1.0
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
    """The state of an operation, which a display shows."""

    doing: str
    count: FrameCount | None = None
    expected: int = 0
    started: float = field(default_factory=time.monotonic)
    has_succeeded: bool = False

    @property
    def total(self) -> int | None:
        """The number of calls at the end of the bar. Can exceed `expected` if modules are called many times."""
        if self.count is None:
            return None
        done = self.count.frames
        return self.expected if done <= self.expected else done + done // 10 + 1

    @property
    def summary(self) -> str:
        """The line to display at the end."""
        parts = [] if self.has_succeeded else ["stopped"]
        if self.count is not None:
            parts.append(f"{self.count.frames:,} module calls")
        return f"{self.doing}: {', '.join([*parts, f'{time.monotonic() - self.started:.1f} s'])}"


@contextmanager
def _watched(operation: _Operation, delay: float) -> Iterator[None]:
    is_done = threading.Event()
    # The kernel uses context variables to assign output to cells.
    thread = threading.Thread(target=copy_context().run, args=(_watch, operation, is_done, delay), daemon=True)
    thread.start()
    try:
        yield
        operation.has_succeeded = True
    finally:
        is_done.set()
        thread.join()


def _watch(operation: _Operation, is_done: threading.Event, delay: float) -> None:
    # Two displays would overwrite each other, so only the first is shown.
    if is_done.wait(delay) or not _is_showing.acquire(blocking=False):
        return
    try:
        display = _display_here(operation)
        if display is None or is_done.is_set():
            return
        try:
            display.draw()
            while not is_done.wait(display.interval):
                display.draw()
        finally:
            display.close()
    finally:
        _is_showing.release()


def _display_here(operation: _Operation) -> _Display | None:
    """Returns a display for the output of this process, or `None` if that can only be a pipe or a file."""
    if _is_in_kernel():
        return _Display(operation)
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from rich.console import Console

    console = Console(stderr=True)
    return None if console.is_dumb_terminal else _Display(operation, console)


def _is_in_kernel() -> bool:
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


class _Display:
    """One line in a terminal, which is removed at the end; or the output of a cell, which becomes one line of text."""

    def __init__(self, operation: _Operation, console: Any = None) -> None:
        self._operation = operation
        self._is_in_cell = console is None
        self.interval = 0.5 if self._is_in_cell else 0.1
        self._progress = _progress(operation, console)
        self._handle: Any = None

    def draw(self) -> None:
        operation, progress = self._operation, self._progress
        done = operation.count.frames if operation.count is not None else 0
        progress.update(progress.task_ids[0], completed=done, total=operation.total)
        if not self._is_in_cell:
            progress.start()  # only the first call has an effect
            progress.refresh()
        elif self._handle is None:
            from IPython.display import display

            self._handle = display(progress, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(progress)

    def close(self) -> None:
        if not self._is_in_cell:
            self._progress.stop()
        elif self._handle is not None:
            self._handle.update({"text/plain": self._operation.summary}, raw=True)


def _progress(operation: _Operation, console: Any = None) -> Progress:
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

    spinner = "dots" if console is None or console.encoding.startswith("utf") else "line"
    columns: list[ProgressColumn] = [SpinnerColumn(spinner), TextColumn("{task.description}", markup=False)]
    if operation.count is not None:
        columns += [BarColumn(), TextColumn("{task.completed:,} of about {task.total:,} calls")]
    # Rich's own thread would also draw. It also replaces sys.stdout, and could restore it inside a block of the user's
    # code that has replaced it, too.
    settings = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False, "transient": True}
    progress = Progress(*columns, TimeElapsedColumn(), console=console, get_time=time.monotonic, **settings)
    progress.add_task(operation.doing, total=operation.total)
    progress.tasks[0].start_time = operation.started
    return progress
