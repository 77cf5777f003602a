"""Progress of what takes longer than a second: the capture of a big model, and anything else.

Before that second has passed nothing is shown, drawn or imported: a thread sleeps. In a terminal the display goes away
when the work is done. In a notebook it turns into one line that says how long it took. Where there is neither (a pipe,
a file), nothing is shown at all.

Rich draws, but its own display in notebooks is not used: it is a widget that takes in whatever the cell prints
meanwhile, and that saved notebooks are left with.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from graphpatch_notebook.capture.recorder import FrameCount, frame_count
from graphpatch_notebook.interrupts import holding

if TYPE_CHECKING:
    from rich.progress import Progress

DELAY = 1.0
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_is_showing = threading.Lock()


@contextmanager
def capture_progress(model: nn.Module, delay: float = DELAY) -> Iterator[None]:
    """Shows how far the captures in the block are, as soon as they take longer than `delay` seconds.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> model = torch.nn.ReLU()
        >>> with capture_progress(model):
        ...     pg = PatchableGraph(model, torch.ones(2))
    """
    count = FrameCount()
    expected = sum(not isinstance(module, _NEVER_CALLED) for module in model.modules())
    work = _Work(f"Capturing {type(model).__name__}", count, expected)
    with holding(frame_count, count), _shown(work, delay):
        yield


@contextmanager
def busy(doing: str, delay: float = DELAY) -> Iterator[None]:
    """Shows that the block is at work, as soon as it takes longer than `delay` seconds.

    Args:
        doing: What it does, as in `"Building code"`.
        delay: In seconds.
    """
    with _shown(_Work(doing), delay):
        yield


@dataclass
class _Work:
    """What a display shows.

    Attributes:
        doing: What is done, in words.
        count: How many calls of modules are done, where these are counted.
        expected: How many there will be, as far as one can tell beforehand.
        started: When it began, by the monotonic clock.
        has_succeeded: Whether it came to its end.
    """

    doing: str
    count: FrameCount | None = None
    expected: int = 0
    started: float = field(default_factory=time.monotonic)
    has_succeeded: bool = False

    @property
    def total(self) -> int | None:
        """How many calls the bar stands for: more than expected where modules are called many times."""
        if self.count is None:
            return None
        done = self.count.frames
        return self.expected if done <= self.expected else done + done // 10 + 1

    @property
    def summary(self) -> str:
        """What is to be said in the end."""
        parts = [] if self.has_succeeded else ["stopped"]
        if self.count is not None:
            parts.append(f"{self.count.frames:,} module calls")
        return f"{self.doing}: {', '.join([*parts, f'{time.monotonic() - self.started:.1f} s'])}"


@contextmanager
def _shown(work: _Work, delay: float) -> Iterator[None]:
    is_done = threading.Event()
    # The kernel tells by context variables which cell an output belongs to.
    thread = threading.Thread(target=copy_context().run, args=(_watch, work, is_done, delay), daemon=True)
    thread.start()
    try:
        yield
        work.has_succeeded = True
    finally:
        is_done.set()
        thread.join()


def _watch(work: _Work, is_done: threading.Event, delay: float) -> None:
    # Two displays at once would draw over one another: the one that is there stays.
    if is_done.wait(delay) or not _is_showing.acquire(blocking=False):
        return
    try:
        display = _display_here(work)
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


class _Display(Protocol):
    """Where progress is drawn, by one thread.

    Attributes:
        interval: The time between two drawings, in seconds.
    """

    interval: float

    def draw(self) -> None:
        """Shows how things are now."""

    def close(self) -> None:
        """Ends the display."""


def _display_here(work: _Work) -> _Display | None:
    """Returns a display for where the output of this process goes to, if there is anything to draw on."""
    if _is_in_kernel():
        return _CellDisplay(work)
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from rich.console import Console

    console = Console(stderr=True)
    return None if console.is_dumb_terminal else _TerminalDisplay(work, console)


def _is_in_kernel() -> bool:
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


class _TerminalDisplay:
    """One line in a terminal, which is gone afterwards."""

    interval = 0.1

    def __init__(self, work: _Work, console: Any) -> None:
        self._work = work
        self._progress = _progress(work, console)

    def draw(self) -> None:
        _bring_up_to_date(self._progress, self._work)
        self._progress.start()  # has an effect once
        self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()


class _CellDisplay:
    """An output of a notebook cell, drawn anew in its place; in the end one line of text."""

    interval = 0.5

    def __init__(self, work: _Work) -> None:
        self._work = work
        self._progress = _progress(work)
        self._handle: Any = None

    def draw(self) -> None:
        from IPython.display import display

        _bring_up_to_date(self._progress, self._work)
        if self._handle is None:
            self._handle = display(self._progress, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(self._progress)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": self._work.summary}, raw=True)


def _progress(work: _Work, console: Any = None) -> Progress:
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

    spinner = "dots" if console is None or console.encoding.startswith("utf") else "line"
    columns: list[ProgressColumn] = [SpinnerColumn(spinner), TextColumn("{task.description}", markup=False)]
    if work.count is not None:
        columns += [BarColumn(), TextColumn("{task.completed:,} of about {task.total:,} calls")]
    # Rich's thread would draw besides ours. And what it puts in place of sys.stdout it may take away again in the
    # middle of a block of the user's that had put something there, too.
    settings = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False, "transient": True}
    progress = Progress(*columns, TimeElapsedColumn(), console=console, get_time=time.monotonic, **settings)
    progress.add_task(work.doing, total=work.total)
    progress.tasks[0].start_time = work.started
    return progress


def _bring_up_to_date(progress: Progress, work: _Work) -> None:
    done = work.count.frames if work.count is not None else 0
    progress.update(progress.task_ids[0], completed=done, total=work.total)
