"""Ways in which a function can hand a number on to another: pairs of what writes it and what reads it."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import functools
import itertools
import operator
import os
import queue
import random
import sqlite3
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import nn

Channel: TypeAlias = "tuple[Callable[[float], Any], Callable[[], float]]"

_global = 0.0
_kept_alive: list[Any] = []


class Box:
    """An object, its class, and what its class holds."""

    shared = 0.0
    held: dict[str, float] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.value = 0.0

    def put(self, value: float) -> None:
        self.value = value

    def get(self) -> float:
        return self.value

    @staticmethod
    def put_static(value: float) -> None:
        Box.held["value"] = value

    @property
    def stored(self) -> float:
        return Box.held.get("value", 0.0)

    @stored.setter
    def stored(self, value: float) -> None:
        Box.held["value"] = value


class Slotted:
    __slots__ = ("value",)


class OneSlot:
    __slots__ = "value"  # noqa: PLC0205


class PrivateSlot:
    __slots__ = ("__kept",)

    @property
    def value(self) -> float:
        return self.__kept

    @value.setter
    def value(self, value: float) -> None:
        self.__kept = value


def items(holder: Any, key: Any) -> Channel:
    """A container, or all that is indexed like one."""
    return lambda value: holder.__setitem__(key, value), lambda: float(holder[key])


def attributes(holder: Any, name: str = "value") -> Channel:
    setattr(holder, name, 0.0)
    return lambda value: setattr(holder, name, value), lambda: getattr(holder, name)


def stored(holder: Any) -> Channel:
    """An attribute that is assigned to by a statement."""

    def write(value: float) -> None:
        holder.value = value

    write(0.0)
    return write, lambda: holder.value


def nonlocal_variable() -> Channel:
    kept = 0.0

    def write(value: float) -> None:
        nonlocal kept
        kept = value

    return write, lambda: kept


def global_variable() -> Channel:
    def write(value: float) -> None:
        global _global  # noqa: PLW0603
        _global = value

    write(0.0)
    return write, lambda: _global


def globals_by_name() -> Channel:
    def write(value: float) -> None:
        globals()["_global"] = value

    write(0.0)
    return write, lambda: globals()["_global"]


def class_through_instance() -> Channel:
    box = Box()
    Box.shared = 0.0

    def write(value: float) -> None:
        type(box).shared = value

    return write, lambda: box.shared


def property_of_class() -> Channel:
    box = Box()
    Box.held.clear()

    def write(value: float) -> None:
        box.stored = value

    return write, lambda: box.stored


def static_method() -> Channel:
    box = Box()
    Box.held.clear()
    return lambda value: box.put_static(value), lambda: box.stored


def views_of_dict() -> Channel:
    kept = {"value": 0.0}
    values = kept.values()
    return lambda value: kept.update(value=value), lambda: next(iter(values))


def proxy_of_dict() -> Channel:
    kept = {"value": 0.0}
    proxy = types.MappingProxyType(kept)
    return lambda value: kept.update(value=value), lambda: proxy["value"]


def methods_of_dict() -> Channel:
    kept = {"value": 0.0}
    put, get = kept.__setitem__, kept.get
    return lambda value: put("value", value), lambda: get("value", 0.0)


def functions_of_a_library() -> Channel:
    kept = [0.0]
    return functools.partial(operator.setitem, kept, 0), functools.partial(operator.getitem, kept, 0)


def generator_of_torch() -> Channel:
    generator = torch.Generator().manual_seed(0)
    return drawn(lambda: torch.rand(1, generator=generator).item())


def default() -> Channel:
    kept = [0.0]

    def write(value: float, kept: list[float] = kept) -> None:
        kept[0] = value

    def read(kept: list[float] = kept) -> float:
        return kept[0]

    return write, read


def rebound_default() -> Channel:
    def read(value: float = 0.0) -> float:
        return value

    def write(value: float) -> None:
        read.__defaults__ = (value,)

    return write, read


def attribute_of_function() -> Channel:
    def write(value: float) -> None:
        write.value = value  # type: ignore[attr-defined]

    write(0.0)
    return write, lambda: write.value  # type: ignore[attr-defined]


def deep() -> Channel:
    kept: Any = [0.0]
    for _ in range(9):
        kept = [kept]

    def innermost() -> list[float]:
        found = kept
        while isinstance(found[0], list):
            found = found[0]
        return found

    return lambda value: innermost().__setitem__(0, value), lambda: innermost()[0]


def many() -> Channel:
    kept = [[[0.0] for _ in range(900)] for _ in range(8)]
    return items(kept[-1][-1], 0)[0], lambda: kept[-1][-1][0]


def shared_memory(size: int) -> Channel:
    tensor = torch.zeros(size)
    return items(tensor.numpy(), 0)[0], lambda: tensor.view(2, -1)[0, 0].item()


def data_of_tensor(tensor: torch.Tensor) -> Channel:
    return lambda value: tensor.data.fill_(value), lambda: tensor.detach()[0].item()


def gradient() -> Channel:
    tensor = torch.zeros(1, requires_grad=True)
    tensor.grad = torch.zeros(1)
    return lambda value: tensor.grad.fill_(value), lambda: tensor.grad.item()


def cached() -> Channel:
    @functools.lru_cache
    def box() -> list[float]:
        return [0.0]

    return lambda value: box().__setitem__(0, value), lambda: box()[0]


def referred_weakly() -> Channel:
    box = Box()
    _kept_alive.append(box)
    reference = weakref.ref(box)
    return lambda value: reference().put(value), lambda: reference().get()


def context_variable() -> Channel:
    variable = contextvars.ContextVar("variable", default=0.0)
    return lambda value: variable.set(value), lambda: variable.get()


def file(path: Path) -> Channel:
    path.write_text("0.0")
    return lambda value: path.write_text(str(value)), lambda: float(path.read_text())


def opened_file(path: Path) -> Channel:
    path.write_text("0.0")

    def write(value: float) -> None:
        with open(path, "w") as opened:  # noqa: PTH123
            opened.write(str(value))

    def read() -> float:
        with open(path) as opened:  # noqa: PTH123
            return float(opened.read())

    return write, read


def imported_inside() -> Channel:
    module = sys.modules["tests_channel"] = types.ModuleType("tests_channel")
    module.value = 0.0  # type: ignore[attr-defined]

    def write(value: float) -> None:
        import tests_channel

        tests_channel.value = value

    def read() -> float:
        import tests_channel

        return tests_channel.value

    return write, read


def environment() -> Channel:
    os.environ["CHANNEL"] = "0.0"
    return lambda value: os.environ.__setitem__("CHANNEL", str(value)), lambda: float(os.environ["CHANNEL"])


def sent_to_generator() -> Channel:
    def kept() -> Iterator[Any]:
        value = 0.0
        while True:
            new = yield value
            value = value if new is None else new

    generator: Any = kept()
    next(generator)
    return lambda value: generator.send(value), lambda: next(generator)


def database() -> Channel:
    connection = sqlite3.connect(":memory:")
    connection.execute("create table numbers(value)")
    connection.execute("insert into numbers values (0.0)")
    return (
        lambda value: connection.execute("update numbers set value=?", (value,)),
        lambda: connection.execute("select value from numbers").fetchone()[0],
    )


def in_queue() -> Channel:
    numbers: queue.SimpleQueue[float] = queue.SimpleQueue()
    return lambda value: numbers.put(value), lambda: numbers.get() if numbers.qsize() else 0.0


def counted(add: Callable[[float], Any], holder: Any) -> Channel:
    return add, lambda: float(len(holder))


def drawn(draw: Callable[[], float]) -> Channel:
    return lambda _: draw(), draw


def make_zero() -> dict[str, float]:
    return {"value": 0.0}


def channels() -> dict[str, Channel]:
    """Returns new channels, by name."""
    box, data = Box(), pd.DataFrame({"value": [0.0, 1.0]})
    appended: list[float] = [0.0]
    kept: Any = type("Kept", (dict,), {})()
    array_kept, tensor = np.zeros(1).view(type("Kept", (np.ndarray,), {})), torch.zeros(1)
    own, folder = random.Random(0), Path(tempfile.mkdtemp())
    functions: list[Any] = [*items([0.0], 0)]
    cached, cached_by = functools.cache(make_zero), functools.lru_cache(lambda key: make_zero())
    return {
        "dict": items({"value": 0.0}, "value"),
        "large list": items([0.0] * 2000, -1),
        "large dict": items(dict.fromkeys(range(2000), 0.0), 7),
        "deque": items(collections.deque([0.0]), 0),
        "default dict": items(collections.defaultdict(float), 1),
        "dict of Python": items(collections.UserDict(value=0.0), "value"),
        "chain of dicts": items(collections.ChainMap({"value": 0.0}), "value"),
        "array": items(np.zeros(4), 0),
        "masked array": items(np.ma.zeros(4), 0),
        "series": items(pd.Series([0.0, 1.0]), 0),
        "large array": items(np.zeros(4000), 0),
        "array of Python": items(array.array("d", [0.0]), 0),
        "memory of an array": items(memoryview(np.zeros(2)), 0),
        "length of a list": counted(lambda value: appended.append(value), appended),
        "method of a list": counted(appended.append, appended),
        "functions in a list": (lambda value: functions[0](value), lambda: functions[1]()),
        "object": attributes(Box()),
        "object, by a statement": stored(Box()),
        "object with slots": stored(Slotted()),
        "object with one slot": stored(OneSlot()),
        "object with a private slot": stored(PrivateSlot()),
        "methods of an object": (box.put, box.get),
        "methods that are looked up": (lambda value: box.put(value), lambda: box.get()),
        "class": stored(Box),
        "class, by name": attributes(Box),
        "class of an object": class_through_instance(),
        "namespace": stored(types.SimpleNamespace()),
        "Python module": stored(types.ModuleType("kept")),
        "Python module, by name": attributes(types.ModuleType("kept")),
        "attribute of a dict": stored(kept),
        "attribute of an array": stored(array_kept),
        "attribute of a tensor": stored(tensor),
        "attribute of a partial": stored(functools.partial(int)),
        "attribute of a torch module": stored(nn.Linear(1, 1)),
        "data of a buffer": data_of_tensor(nn.BatchNorm1d(1).running_mean),
        "data of a parameter": data_of_tensor(nn.Parameter(torch.zeros(1))),
        "data of a large tensor": data_of_tensor(torch.zeros(4000)),
        "method of a tensor": (tensor.fill_, tensor.item),
        "value of C": stored(ctypes.c_double(0.0)),
        "local of a thread": stored(threading.local()),
        "data frame": (lambda value: data.at.__setitem__((0, "value"), value), lambda: float(data.at[0, "value"])),
        "cached result": (lambda value: cached().update(value=value), lambda: cached()["value"]),
        "result of many": (lambda value: cached_by("a").update(value=value), lambda: cached_by("a")["value"]),
        "attribute of a cached function": stored(functools.cache(make_zero)),
        "code": (eval("lambda value: kept.append(value)", {"kept": appended}), lambda: appended[-1]),
        "generator of Python": drawn(own.random),
        "generator of numpy": drawn(np.random.RandomState(0).rand),
        "shared generator": drawn(lambda: torch.rand(1).item()),
        "shared generator of Python": drawn(random.random),
        "shared generator of numpy": drawn(np.random.rand),
        "iterator": drawn(functools.partial(next, itertools.count())),
        "file": file(folder / "file"),
        "opened file": opened_file(folder / "opened"),
        **{make.__name__: make() for make in _MAKERS},
        "shared memory": shared_memory(4),
        "large shared memory": shared_memory(4000),
    }


_MAKERS: list[Callable[[], Channel]] = [nonlocal_variable, global_variable, globals_by_name, property_of_class]
_MAKERS += [views_of_dict, proxy_of_dict, methods_of_dict, functions_of_a_library, generator_of_torch]
_MAKERS += [static_method, default, rebound_default, attribute_of_function, deep, many, gradient, cached]
_MAKERS += [referred_weakly, context_variable, imported_inside, environment, sent_to_generator, database, in_queue]
