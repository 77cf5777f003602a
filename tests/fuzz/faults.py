"""Faults at chosen points: an interrupt, or an error, at the n-th line of Python that runs in some files."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from graphpatch_notebook.errors import GraphPatchError
from tests.laws.test_law_05_interrupts import PACKAGE, is_beyond_reach

NEVER = -1


class Fault:
    """Raises in `action` at its n-th line in the given files; counts how many there are.

    Attributes:
        lines: How many lines ran.
        came: Whether it was raised.
    """

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt, files: tuple[str, ...] = ()) -> None:
        self.at = at
        self.error = error
        self.files = (PACKAGE, *files)
        self.lines = 0
        self.came = False
        self.where = ""

    def run(self, action: Callable[[], object]) -> None:
        """Runs `action` with the fault in it; raises what it raises of itself."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            action()
        except (self.error, GraphPatchError):  # ours say what was raised
            if not self.came:
                raise
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.files):
            return None
        if is_beyond_reach(frame, event) or event not in ("call", "line"):
            return self._trace
        self.lines += 1
        if self.lines - 1 == self.at:
            sys.settrace(None)
            self.came = True
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
            raise self.error
        return self._trace


def faults(
    make_action: Callable[[], Callable[[], object]],
    count: int,
    seed: int,
    files: tuple[str, ...] = (),
    error: type[BaseException] = KeyboardInterrupt,
) -> Iterator[tuple[Fault, Callable[[], None]]]:
    """Yields faults at random points of an action, each with what runs it; all points where there are no more.

    The action is made anew each time, so that what runs only once in it is run again.
    """
    whole = Fault(NEVER, files=files)
    whole.run(make_action())
    rng = random.Random(seed)
    points = range(whole.lines) if whole.lines <= count else sorted(rng.sample(range(whole.lines), count))
    for at in points:
        fault, action = Fault(at, error, files), make_action()
        yield fault, lambda fault=fault, action=action: fault.run(action)  # type: ignore[misc]


class _Lines(Fault):
    """Notes when each line ran."""

    def __init__(self, files: tuple[str, ...]) -> None:
        super().__init__(NEVER, files=files)
        self.times: dict[tuple[str, int], list[int]] = {}

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        before = self.lines
        tracing = super()._trace(frame, event, argument)
        if self.lines > before:
            self.times.setdefault((frame.f_code.co_filename, frame.f_lineno), []).append(before)
        return tracing


def faults_at_each_line(
    make_action: Callable[[], Callable[[], object]], names: tuple[str, ...] = (), files: tuple[str, ...] = ()
) -> Iterator[tuple[Fault, Callable[[], None]]]:
    """As `faults`, at the first and the last time that each line runs; only in files that end in `names`, if given."""
    lines = _Lines(files)
    lines.run(make_action())
    times = [times for (file, _), times in lines.times.items() if not names or file.endswith(names)]
    for at in sorted({at for both in times for at in (both[0], both[-1])}):
        fault, action = Fault(at, files=files), make_action()
        yield fault, lambda fault=fault, action=action: fault.run(action)  # type: ignore[misc]
