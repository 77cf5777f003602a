"""Interrupts at each instruction of what takes things back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

from graphpatch_notebook import interrupts

variable: ContextVar[str] = ContextVar("variable", default="before")


def held() -> None:
    with interrupts.holding(variable, "inside"):
        variable.get()


def held_twice() -> None:
    with interrupts.holding(variable, "inside"), interrupts.holding(variable, "further inside"):
        variable.get()


def followed() -> None:
    with interrupts.afterwards(lambda: variable.set("before"), str):
        variable.set("inside")


def interrupted_at(count: int, action: Callable[[], None]) -> bool:
    """Runs an action, with an interrupt at one of its instructions; returns whether there are so many."""
    left = count

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal left
        if frame.f_code.co_filename != interrupts.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    tracer = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at it when a trace function is set, and not later
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(tracer)
    return left <= 0


def problems() -> Iterator[str]:
    """Yields where something is not taken back."""
    for action in (held, held_twice, followed):
        count = 1
        while interrupted_at(count, action):
            if variable.get() != "before":
                yield f"{action.__name__}: an interrupt at instruction {count} leaves {variable.get()!r}"
                variable.set("before")
            count += 1
        if count < 20:
            yield f"{action.__name__}: only {count} instructions were seen"
