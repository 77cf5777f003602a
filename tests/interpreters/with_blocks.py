"""`with` blocks and dropped values, as the bytecode tells of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from graphpatch_notebook.interrupts import Block, discards_value

# How `made()` may be entered, and whether a block of the code that enters it is found.
ENTERED: dict[str, list[bool]] = {
    "with made(): pass": [True],
    "with made() as a: pass": [True],
    "with made() as (a, b): pass": [True],
    "with made(), made() as a: pass": [True, True],
    "with (\n    made() as a,\n    made(),\n):\n    pass": [True, True],
    "with kept: pass": [True],
    "with made():\n    with made(): pass": [True, True],
    "for i in range(2):\n    with made(): continue": [True, True],
    "try:\n    with made(): raise KeyError\nexcept KeyError: pass": [True],
    "made().__enter__()": [False],
    "a = made().__enter__": [],
    "a = kept.__enter__()": [False],
    "with ExitStack() as stack: stack.enter_context(made())": [False],
    "def place():\n    with made(): yield\nlist(place())": [False],
    "async def place():\n    with made(): pass\nrun(place())": [False],
}

# Where a value may be dropped that says so when it is, and whether that is a line that does nothing with it.
DROPPED: dict[str, list[bool]] = {
    "dropped()": [True],
    "dropped(1, k=2)": [True],
    "dropped(*[1], **{'k': 2})": [True],
    "dropped().itself()": [True],
    "if True: dropped()": [True],
    "for i in range(2): dropped()": [True, True],
    "try: dropped()\nfinally: pass": [True],
    "with suppress(): dropped()": [True],
    "a = dropped()\ndel a": [False],
    "a = dropped()\na = 1": [False],
    "a = dropped()\na = dropped()\ndel a": [False, False],
    "a = [dropped()]\na.clear()": [False],
    "a = [dropped()]\na = None": [False],
    "str(dropped())": [False],
    "def place(): a = dropped()\nplace()": [False],
    "def place(): return dropped()\na = place()\ndel a": [False],
    "with dropped().block(): pass": [False],
    "for a in dropped().several(): pass\ndel a": [False],
    "for i in dropped().several(): pass": [False],
    "if dropped(): pass": [False],
}

PLACES = {
    "module": "{}",
    "function": "def outer():\n    {}\nouter()",
    "warm function": "def outer():\n    {}\nfor number in range(100): outer()",
    "loop": "def outer():\n    for number in range(2):\n        {}\nouter()",
    "try": "def outer():\n    try:\n        {}\n    finally:\n        done = 1\nouter()",
}


class Entered:
    """A context manager that notes whether a block is found around its caller."""

    def __init__(self, seen: list[bool]) -> None:
        self.seen = seen

    def __enter__(self) -> tuple[int, int]:
        frame = sys._getframe(1)
        block = Block.entered_by(frame)
        self.seen.append(block is not None)
        if block is not None and block.is_over():
            raise RuntimeError("a block is over before it began")
        return (1, 2)

    def __exit__(self, *error: object) -> None:
        pass


class Dropped:
    """A value that notes how it is dropped."""

    def __init__(self, seen: list[bool]) -> None:
        self.seen = seen

    def __del__(self) -> None:
        self.seen.append(discards_value(sys._getframe(1)))

    def itself(self) -> Dropped:
        return self

    def several(self) -> Iterator[int]:
        return iter([1, 2])

    def block(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


def run(coroutine: Any) -> None:
    with contextlib.suppress(StopIteration):
        coroutine.send(None)


def seen_in(source: str) -> list[bool]:
    seen: list[bool] = []
    variables: dict[str, Any] = {
        "made": lambda: Entered(seen),
        "kept": Entered(seen),
        "ExitStack": contextlib.ExitStack,
        "run": run,
        "dropped": lambda *args, **kwargs: Dropped(seen),
        "suppress": contextlib.suppress,
        "str": lambda value: 1,
    }
    exec(compile(source, "<with blocks>", "exec", dont_inherit=True), variables)
    return seen


def interrupted_at_exit(source: str) -> Block | None:
    """Returns the block of `source`, which an interrupt ended when it called `__exit__`."""
    blocks: list[Block | None] = []

    class Interrupted(Entered):
        def __enter__(self) -> tuple[int, int]:
            blocks.append(Block.entered_by(sys._getframe(1)))
            return (1, 2)

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if event == "call" and frame.f_code is Entered.__exit__.__code__:
            raise KeyboardInterrupt
        return None

    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        exec(compile(source, "<with blocks>", "exec", dont_inherit=True), {"made": lambda: Interrupted([])})
    except KeyboardInterrupt:
        pass
    else:
        raise RuntimeError("no interrupt came")
    finally:
        sys.settrace(tracer)
    return blocks[0]


def problems() -> Iterator[str]:
    """Yields what is not as the tables say."""
    for place, around in PLACES.items():
        indent = next(line for line in around.splitlines() if "{}" in line).partition("{}")[0]
        for source, expected in {**ENTERED, **DROPPED}.items():
            found = seen_in(around.replace("{}", source.replace("\n", f"\n{indent}")))
            if found != expected * (len(found) // max(1, len(expected))) or bool(found) != bool(expected):
                yield f"{place}: {source!r}: {found[:4]}, not {expected}"
        over = interrupted_at_exit(around.replace("{}", "with made() as a: pass"))
        if over is None or not over.is_over():
            yield f"{place}: a block that an interrupt ended is not over"
