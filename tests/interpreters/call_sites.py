"""Call sites, as the interpreter specialises its code: every kind of call keeps its site, and each has its own."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.records import line_at

RUNS = 100  # more than any version needs to specialise a function, and all that it calls


class Calls:
    """What is seen of the calls of one run."""

    def __init__(self) -> None:
        self.keys: list[tuple[int, ...]] = []
        self.lines: list[tuple[int, ...]] = []
        self.problems: list[str] = []

    def note(self) -> None:
        leaf = sys._getframe(1)
        key = call_sites.chain(leaf)
        assert key is not None
        steps = call_sites.steps_of(key)[::-1]
        offset = call_sites.facts_of(leaf.f_code).offsets[leaf.f_lasti]
        if key[:2] != (id(leaf.f_code), offset) or key[2:] != call_sites.chain(leaf.f_back):
            self.problems.append(f"the chain of line {leaf.f_lineno} is not that of the leaf and what is above it")
        frames = list(frames_of(leaf))
        read = [line_at(*step) for step in steps]
        if read != [frame.f_lineno for frame in frames]:
            self.problems.append(f"lines {read} are read where {[frame.f_lineno for frame in frames]} run")
        self.keys.append(key)
        self.lines.append(tuple(read))


def frames_of(frame: FrameType) -> Iterator[FrameType]:
    above: FrameType | None = frame
    while above is not None and above.f_code is not call_sites.INVOKE:
        yield above
        above = above.f_back


class Base:
    def inherited(self, calls: Calls) -> None:
        calls.note()


class Value(Base):
    """Operations that the interpreter runs in the frame of its caller once it knows their types."""

    def __init__(self, calls: Calls) -> None:
        calls.note()
        self.calls = calls

    def __call__(self, *args: object, **kwargs: object) -> None:
        self.calls.note()

    def __add__(self, other: object) -> Value:
        self.calls.note()
        return self

    def __neg__(self) -> Value:
        self.calls.note()
        return self

    def __getitem__(self, index: object) -> Value:
        self.calls.note()
        return self

    def __setitem__(self, index: object, value: object) -> None:
        self.calls.note()

    def __contains__(self, item: object) -> bool:
        self.calls.note()
        return True

    def __lt__(self, other: object) -> bool:
        self.calls.note()
        return True

    def __bool__(self) -> bool:
        self.calls.note()
        return True

    def __len__(self) -> int:
        self.calls.note()
        return 1

    def __getattr__(self, name: str) -> int:
        self.calls.note()
        return 1

    def __enter__(self) -> Value:
        self.calls.note()
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.note()

    def __iter__(self) -> Iterator[int]:
        self.calls.note()
        yield 1
        self.calls.note()
        yield 2

    @property
    def stored(self) -> int:
        self.calls.note()
        return 1

    @stored.setter
    def stored(self, value: int) -> None:
        self.calls.note()

    @classmethod
    def of_class(cls, calls: Calls) -> None:
        calls.note()

    @staticmethod
    def of_none(calls: Calls) -> None:
        calls.note()

    def inherited(self, calls: Calls) -> None:
        super().inherited(calls)
        calls.note()


def called(calls: Calls, *args: object, **kwargs: object) -> Value | int:
    calls.note()
    return 1


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return around


@decorated
def below(calls: Calls) -> int:
    return called(calls) + called(calls)


def generator(calls: Calls) -> Iterator[int]:
    called(calls)
    yield 1
    yield from generator_below(calls)


def generator_below(calls: Calls) -> Iterator[int]:
    called(calls)
    yield 2
    called(calls)


async def coroutine(calls: Calls) -> int:
    called(calls)
    return await coroutine_below(calls)


async def coroutine_below(calls: Calls) -> int:
    called(calls)
    return 1


@contextlib.contextmanager
def block(calls: Calls) -> Iterator[None]:
    called(calls)
    yield
    called(calls)


def depth(calls: Calls, left: int) -> int:
    return called(calls) if left == 0 else depth(calls, left - 1) + called(calls)


def forward(calls: Calls) -> None:
    """Calls in every way that a model's code may."""
    called(calls)
    called(calls, 1, k=2)
    called(*[calls, 1], **{"k": 2})
    called(calls), called(calls)
    called(
        calls,
        called(calls),
        k=called(calls),
    )
    value = Value(calls)
    value(1)
    value(1, k=2)
    value(*[1], **{"k": 2})
    value = value + 1
    value += 1
    value = -value
    value[0]
    value[0:1]
    value[0] = 1
    1 in value
    value < value
    bool(value)
    len(value)
    value.missing
    value.stored
    value.stored = 1
    value.inherited(calls)
    Value.of_class(calls)
    value.of_none(calls)
    if value:
        called(calls)
    if value and not value:
        called(calls)
    with value as entered:
        called(calls, entered)
    with block(calls):
        called(calls)
    first, second = value
    for number in value:
        str(number)
    [called(calls, number) for number in (1,)]
    {called(calls, number): 1 for number in (1,)}
    list(called(calls, number) for number in (1,))
    list(map(lambda number: called(calls), (1,)))
    sorted([1], key=lambda number: called(calls))
    functools.partial(called, calls)()
    (lambda: called(calls))()
    below(calls)
    depth(calls, 2)
    list(generator(calls))
    with contextlib.suppress(StopIteration):
        coroutine(calls).send(None)
    try:
        called(calls)
        raise KeyError
    except KeyError:
        called(calls)
    finally:
        called(calls)

    class Inner:
        called(calls)

    f"{called(calls)} {called(calls)!r}"


def function_of_torch(name: str) -> Callable[[Callable[[], object]], Any]:
    """Returns a function, as if it stood in a file of torch's, that calls another one."""
    variables: dict[str, Any] = {}
    file = os.path.join(call_sites._TORCH, "overrides.py")
    exec(compile(f"def {name}(function):\n    return function()", file, "exec"), variables)
    return variables[name]


def through_torch() -> list[object]:
    """Reads the user's variables through frames of torch: those that dispatch, and those that do something else."""
    dispatching, other, itself = map(function_of_torch, ("handle_torch_function", "multi_head_attention", "relu"))

    def read() -> object:
        return call_sites.result_variable(sys._getframe(1), "relu")

    a = dispatching(read)
    b = other(read)
    c, d = [itself(read)] * 2
    for _ in range(RUNS):
        c = itself(read)
    return [a, b, c, d]


def problems() -> Iterator[str]:
    """Yields what is wrong with call sites."""
    runs = []
    for _ in range(RUNS):
        calls = Calls()
        call_sites.invoke(forward, (calls,), {})
        yield from calls.problems
        runs.append((calls.keys, calls.lines))
    for number, run in enumerate(runs):
        if run != runs[0]:
            yield f"run {number} has other call sites than the first: {_changed(runs[0], run)}"
    keys, lines = runs[0]
    seen: dict[tuple[int, ...], tuple[int, ...]] = {}
    for key, line in zip(keys, lines, strict=True):
        if key in seen:
            yield f"two calls have one site: {line}"
        seen[key] = line
    if (read := call_sites.invoke(through_torch, (), {})) != ["a", None, "c", None]:
        yield f"through torch: {read}"


def _changed(first: tuple[list[Any], list[Any]], other: tuple[list[Any], list[Any]]) -> list[Any]:
    return [line for key, line, now in zip(*first, other[0], strict=False) if key != now]
