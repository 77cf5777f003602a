"""Checks whether a run draws random numbers, even if other threads draw some at the same time.

All threads share the generators of Python, torch and numpy, so a changed state may be the work of another thread. For
Python's generator, calls are then profiled in the thread of the run. Calls of the generators of torch and numpy cannot
be profiled: if another thread draws from these, the run is reported to draw.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from graphpatch_notebook.checks.model_state import Change, ChangeKind, ModuleState
from graphpatch_notebook.interrupts import afterwards


def change_by(run: Callable[[], object], model: Module, state: ModuleState) -> Change | None:
    """Returns what `run` has changed in a model since `state`; calls `run` again if another thread may have done it."""
    change = state.change()
    if change is None or change.kind is not ChangeKind.RANDOM or "Python" not in change.name:
        return change
    return change if draws_from_python(run, model) else state.change(besides={"Python"})


def draws_from_python(run: Callable[[], object], model: Module) -> bool:
    """Whether `run` draws from Python's generator, given that some thread did. Restores the state of the model."""
    if threading.active_count() == 1 or sys.getprofile() is not None:
        return True
    generator: Any = random.random.__self__  # type: ignore[attr-defined]  # others call this, or getrandbits
    calls: list[Any] = []

    def notice(_frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__self__", None) is generator:
            calls.append(called)

    with afterwards(ModuleState(model).restore):
        sys.setprofile(notice)
        try:
            run()
        finally:
            sys.setprofile(None)
    return bool(calls)
