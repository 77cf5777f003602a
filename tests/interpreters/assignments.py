"""Ways to assign what a call gives, and the names that are read off the bytecode for each call of them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import nullcontext
from typing import Any

from graphpatch_notebook.capture.call_sites import Assigned, assigned_variable

# Each call of `f`, and each operation on what it gives, in the order in which they run.
NAMES: dict[str, list[Assigned]] = {
    # One value, one variable.
    "a = f()": ["a"],
    "a: int = f()": ["a"],
    "a = f(\n    1,\n    2,\n)": ["a"],
    "a = (\n    f()\n)": ["a"],
    "a = f(*(1, 2), **{'k': 3})": ["a"],
    "a = f(k=1)": ["a"],
    "a = (lambda: f())()": [None],
    "a = v.method()": ["a"],
    "a = v.T": ["a"],
    "a = f().method().T": [None, None, "a"],
    "a = f()\nb = g()": ["a", "b"],
    "a = f()\na = f()": ["a", "a"],
    # Operators.
    "a = v + 1": ["a"],
    "a = 1 + v": ["a"],
    "a = -v": ["a"],
    "a = v @ v": ["a"],
    "a = v < v": ["a"],
    "a = v[0]": ["a"],
    "a = v[0:2]": ["a"],
    "a = f()[0]": [None, "a"],
    "a = v + v * v": [None, "a"],
    "a = f() + g()": [None, None, "a"],
    "a = v\na += v": ["a"],
    "a = v\na += f()": [None, "a"],
    # Several variables.
    "a = b = f()": ["a"],
    "a = b = c = f()": ["a"],
    "a, b = f()": [("a", "b")],
    "(a, b) = f()": [("a", "b")],
    "[a, b] = f()": [("a", "b")],
    "a, b, c = h()": [("a", "b", "c")],
    "a, b, c, d = h4()": [("a", "b", "c", "d")],
    "a, b, c = h()\nprint(a, b, c)": [("a", "b", "c")],
    "_, b = f()": [(None, "b")],
    "a, _ = f()": [("a", None)],
    "_, _, c = h()": [(None, None, "c")],
    "a, *b = f()": [None],
    "*a, b = f()": [None],
    "a, (b, c) = f(), f()": [None, None],
    "(a, b), c = f(), g()": [None, None],
    "a, b = f(), o": [None],
    "a, b = f(), g()": [None, "b"],
    "a, b, c = f(), g(), f()": [None, None, "c"],
    "a, b = f(), None": [None],
    "a, b, c, d = f(), g(), f(), g()": [None, None, None, None],
    "a = b, c = f()": ["a"],
    "a, b = c = f()": [("a", "b")],
    "a, _ = b, c = f()": [("a", None)],
    # Targets that are not variables.
    "o.attribute = f()": ["attribute"],
    "o.attribute = v + 1": ["attribute"],
    "o.attribute: int = f()": ["attribute"],
    "o.attribute = f()\no.attribute = g()": ["attribute", "attribute"],
    "o.attribute = a = f()": ["attribute"],
    "a = o.attribute = f()": ["a"],
    "o.attribute = f() if v else g()": ["attribute"],
    "o._ = f()": [None],
    "o.attribute += f()": [None, None],
    "o.inner.attribute = f()": [None],
    "o['key'] = f()": [None],
    "o[0:1] = f()": [None],
    "a, o.attribute = f()": [("a", "attribute")],
    "o.attribute, a = f()": [("attribute", "a")],
    "o.attribute, o.inner = f()": [("attribute", "inner")],
    "o.attribute, o['key'] = f()": [None],
    "a, o['key'] = f()": [None],
    "_ = f()": [None],
    # No target.
    "f()": [None],
    "f(), g()": [None, None],
    "print(f())": [None],
    "a = print(f(), g())": [None, None],
    "a = [f(), g()]": [None, None],
    "a = {'k': f()}": [None],
    "a = f'{f()}'": [None],
    "a = f'{f()!r:>10} {g()}'": [None, None],
    "a = str(f())": [None],
    "del f().attribute": [None],
    "assert f()": [None],
    "a = f()\ndel a": ["a"],
    # The walrus.
    "if a := f():\n    pass": ["a"],
    "if (a := f()) and (b := g()):\n    pass": ["a", "b"],
    "print(a := f())": ["a"],
    "b = (a := f())": ["a"],
    "b = [a := f(), (c := g())]": ["a", "c"],
    "b = v[(a := f())]": ["a", "b"],
    "while (a := f()) and False:\n    pass": ["a"],
    # Conditions.
    "a = f() if v else g()": ["a"],
    "a, b = f() if v else g()": [("a", "b")],
    "a = b = f() if v else g()": ["a"],
    "a = f() if v else g() if v else h()": ["a"],
    "a = h() if not v else f() if v else g()": ["a"],
    "print(a := f() if v else g())": ["a"],
    "a = h(f() if v else g())": [None, "a"],
    "a = g() if not v else f()": ["a"],
    "a = f() or g()": [None],
    "a = f() and g()": [None, "a"],
    "a = not f()": [None],
    "a = 0 < f() < g()": [None, None, None, "a"],
    "a = f() in v": [None, "a"],
    "a = f() is None": [None],
    "if v:\n    a = f()\nelse:\n    a = g()": ["a"],
    # Loops and comprehensions.
    "for i in range(2):\n    a = f()": ["a", "a"],
    "for i in range(2):\n    a, b = f()": [("a", "b"), ("a", "b")],
    "for i in f():\n    a = i": [None],
    "for a in v.twice():\n    pass": [None],
    "for a in iterated:\n    pass": ["a", "a", "a"],
    "for a, b in iterated:\n    pass": [("a", "b"), ("a", "b"), ("a", "b")],
    "a = [f() for i in range(2)]": [None, None],
    "a = [f() + i for i in range(1)]": [None, None],
    "a = {i: f() for i in range(1)}": [None],
    "a = {id(f()) for i in range(1)}": [None],
    "a = list(f() for i in range(2))": [None, None],
    "a = [i for i in f()]": [None],
    "a = f([i for i in range(2)])": ["a"],
    "a = f([[j for j in range(i)] for i in range(2)])": ["a"],
    "a = [f() for i in range(1) if g()]": [None, None],
    # Blocks.
    "with f() as a:\n    b = g()": [None, "a", "b"],
    "with f():\n    b = g()": [None, None, "b"],
    "with f() as (a, b):\n    pass": [None, ("a", "b")],
    "with f() as a, g() as b:\n    c = f()": [None, "a", None, "b", "c"],
    "try:\n    a = f()\nfinally:\n    b = g()": ["a", "b"],
    "try:\n    raise KeyError\nexcept KeyError:\n    a = f()": ["a"],
    "try:\n    raise KeyError\nexcept KeyError as error:\n    a = f(error)\nfinally:\n    b = g()": ["a", "b"],
    "match f():\n    case a:\n        pass": ["a"],
    "match f(), g():\n    case (a, b):\n        c = f()": [None, None, "c"],
    "match v.number():\n    case 1:\n        a = f()\n    case _:\n        a = g()": [None, "a"],
    # Definitions.
    "@f\ndef a():\n    pass": ["a"],
    "@v.method()\ndef a():\n    pass": [None, "a"],
    "def a(b=f()):\n    pass": [None],
    "class A(f().kind()):\n    b = g()": [None, None, "b"],
    "a = lambda b=f(): b": [None],
    "def a():\n    b = f()\n    return g()\na()": ["b", None],
    "def a():\n    return (b := f())\na()": ["b"],
    "def a():\n    yield f()\nlist(a())": [None],
    "def a():\n    b = yield f()\n    c = g()\nlist(a())": [None, "c"],
    "def a():\n    b = yield from f()\nlist(a())": [None],
    "def a():\n    global shared\n    shared = f()\na()": ["shared"],
    "def a():\n    b = None\n    def inner():\n        nonlocal b\n        b = f()\n    inner()\na()": ["b"],
    "def a():\n    b = f()\n    c, d = g()\n    return lambda: (b, c, d)\na()": ["b", ("c", "d")],
    "def a(b):\n    b = f()\n    return lambda: b\na(1)": ["b"],
    "async def a():\n    b = f()\n    c = await coroutine()\nrun(a())": ["b"],
    "async def a():\n    async with manager() as b:\n        c = g()\nrun(a())": ["c"],
    "async def a():\n    return [f() async for i in numbers()]\nrun(a())": [None, None],
}

# An object may be a global variable, as in that table, or one of the function that inner functions read, too.
OBJECTS = [f"o = Holder(Holder()){more}\n" for more in ("", "\nx = lambda: o", "\nx = [o for i in range(2)]")]
NAMES |= {made + source: names for made in OBJECTS for source, names in NAMES.items() if "o." in source}

# So many variables that the arguments of instructions need more than one byte.
MANY = ", ".join(f"variable_{number}=0" for number in range(300))

# Around each of them. In all of these the names are the same.
PLACES = {
    "module": "{}",
    "function": "def place():\n    {}\nplace()",
    "class": "class Place:\n    {}",
    "method": "class Place:\n    def place(self):\n        {}\nPlace().place()",
    "generator": "def place():\n    yield 1\n    {}\n    yield 2\nlist(place())",
    "coroutine": "async def place():\n    {}\nrun(place())",
    "try": "def place():\n    try:\n        {}\n    finally:\n        print(0)\nplace()",
    "with": "def place():\n    with quiet():\n        {}\nplace()",
    "loop": "def place():\n    for number in range(1):\n        {}\n        continue\nplace()",
    "many variables": f"def place({MANY}):\n    {{}}\nplace()",
}


class Value:
    """A value each of whose operations notes which variable its result is for."""

    def __init__(self, seen: list[Assigned], count: int) -> None:
        self.seen = seen
        self.count = count

    def note(self) -> Value:
        frame = sys._getframe(2)  # below this one there is that of the operation
        self.seen.append(assigned_variable(frame.f_code, frame.f_lasti))
        return Value(self.seen, self.count)

    def __call__(self, *args: object, **kwargs: object) -> Value:
        return self.note()

    def method(self) -> Value:
        return self.note()

    def number(self) -> int:
        self.note()
        return 1

    def kind(self) -> type:
        self.note()
        return object

    def twice(self) -> list[Value]:
        return [self.note(), self]

    @property
    def T(self) -> Value:
        return self.note()

    def __add__(self, other: object) -> Value:
        return self.note()

    def __radd__(self, other: object) -> Value:
        return self.note()

    def __mul__(self, other: object) -> Value:
        return self.note()

    def __matmul__(self, other: object) -> Value:
        return self.note()

    def __lt__(self, other: object) -> Value:
        return self.note()

    def __gt__(self, other: object) -> Value:
        return self.note()

    def __neg__(self) -> Value:
        return self.note()

    def __getitem__(self, index: object) -> Value:
        return self.note()

    def __contains__(self, item: object) -> bool:
        self.note()
        return True

    def __delattr__(self, name: str) -> None:
        pass

    def __enter__(self) -> Value:
        return self.note()

    def __exit__(self, *error: object) -> None:
        pass

    def __iter__(self) -> Iterator[Value]:
        return iter([Value(self.seen, self.count)] * self.count)


class Iterated:
    """Gives two values, by a method that notes the variable of the loop."""

    def __init__(self, value: Value) -> None:
        self.values = [value, value]
        self.value = value

    def __iter__(self) -> Iterated:
        return self

    def __next__(self) -> Value:
        frame = sys._getframe(1)
        self.value.seen.append(assigned_variable(frame.f_code, frame.f_lasti))
        if not self.values:
            raise StopIteration
        return self.values.pop()


class Holder:
    """Takes whatever is assigned to it."""

    def __init__(self, inner: Holder | None = None) -> None:
        self.inner = inner
        self.attribute = 1

    def __setitem__(self, key: object, value: object) -> None:
        pass


class Manager:
    async def __aenter__(self) -> Manager:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


async def coroutine() -> None:
    pass


async def numbers() -> AsyncIterator[int]:
    yield 0
    yield 1


def run(coroutine: Coroutine[Any, Any, object]) -> None:
    """Runs a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("it waits")


def names_read(source: str) -> list[Assigned]:
    """Returns what is read off the bytecode of `source`, for each call and operation in it."""
    seen: list[Assigned] = []
    f, h, h4 = (Value(seen, count) for count in (2, 3, 4))
    variables: dict[str, object] = {
        "__name__": "assignments",
        "f": f,
        "g": f,
        "v": f,
        "h": h,
        "h4": h4,
        "o": Holder(Holder()),
        "Holder": Holder,
        "iterated": Iterated(f),
        "run": run,
        "coroutine": coroutine,
        "numbers": numbers,
        "manager": Manager,
        "quiet": nullcontext,
        "print": lambda *args: None,
        "str": lambda *args: None,
    }
    exec(compile(source, "<assignments>", "exec", dont_inherit=True), variables)
    return seen


def problems() -> Iterator[str]:
    """Yields what is not as the table says."""
    for place, around in PLACES.items():
        indent = next(line for line in around.splitlines() if "{}" in line).partition("{}")[0]
        for source, expected in NAMES.items():
            inside = around.replace("{}", source.replace("\n", f"\n{indent}"))
            found = names_read(inside)
            if found != expected:
                yield f"{place}: {source!r}: {found}, not {expected}"
