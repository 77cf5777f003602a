"""Whether a run draws random numbers, where other threads may draw them, too.

All threads share the generators of Python, torch and numpy: the state of one says nothing of a run while others draw.
Calls of Python's are looked at in the thread of the run then; those of torch's and numpy's cannot be seen: that another
thread draws from these looks as if the run did.
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
    """Returns what `run` has changed in a model since `state`; where that is in doubt, it runs once more."""
    change = state.change()
    if change is None or change.kind is not ChangeKind.RANDOM or "Python" not in change.name:
        return change
    return change if draws_from_python(run, model) else state.change(besides={"Python"})


def draws_from_python(run: Callable[[], object], model: Module) -> bool:
    """Whether `run` draws from Python's generator, where it is known that some thread did; the model stays as it is."""
    if threading.active_count() == 1 or sys.getprofile() is not None:
        return True
    generator: Any = random.random.__self__  # type: ignore[attr-defined]  # all else in it calls this, or getrandbits
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
