"""What the runs that prepare a sweep must leave as it was."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from graphpatch_notebook.checks.model_state import BufferState, SharedRandomState
from graphpatch_notebook.execution.frame_effects import all_modules
from graphpatch_notebook.interrupts import afterwards


class KeptState:
    """The buffers of a model and the state of the random generators, to be put back.

    Args:
        model: The model.
    """

    def __init__(self, model: Module) -> None:
        self._model = model
        self._buffers = BufferState(all_modules(model))
        self._random = SharedRandomState()

    def change(self, run: Callable[[], object]) -> str | None:
        """Returns what `run` has changed since, in words; where that is in doubt it is run again."""
        if drawn := drawn_between(self._random, SharedRandomState(), self._model, run):
            return f"the model draws random numbers (of {' and '.join(drawn)})"
        return self._buffers.change()

    def restore(self) -> None:
        """Puts all of it back."""
        self._random.restore()
        self._buffers.restore()


def drawn_between(
    before: SharedRandomState, after: SharedRandomState, model: Module, run: Callable[[], object]
) -> list[str]:
    """Returns whose generators `run` drew from between two moments.

    Other threads share these generators: where they draw, too, the state of one says nothing of `run`. So its calls of
    Python's generator are looked at, in this thread, in another run that leaves nothing behind. Calls of torch's and
    numpy's cannot be seen: that another thread draws from these looks as if `run` did.
    """
    drawn = before.differing(after)
    if "Python" in drawn and threading.active_count() > 1 and sys.getprofile() is None:
        with afterwards(KeptState(model).restore):
            if not _draws_here(run):
                drawn.remove("Python")
    return drawn


def _draws_here(run: Callable[[], object]) -> bool:
    """Whether `run` calls Python's shared generator in this thread."""
    generator: Any = random.random.__self__  # type: ignore[attr-defined]  # all else in it calls this, or getrandbits
    calls: list[Any] = []

    def notice(_frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and getattr(called, "__self__", None) is generator:
            calls.append(called)

    sys.setprofile(notice)
    try:
        run()
    finally:
        sys.setprofile(None)
    return bool(calls)
