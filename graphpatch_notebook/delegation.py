"""Modules that delegate to another module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch.nn import Module


def delegate(cls: type[Module], to: str, names: Iterable[str]) -> None:
    """Makes methods of `cls`, and its `training`, those of the module that its attribute `to` holds.

    A method that returns that module returns the object of `cls`. Not every version of torch has all names.
    """
    for name in names:
        if hasattr(Module, name):
            setattr(cls, name, _delegated(name, to))

    def set_training(self: Module, value: bool) -> None:
        if to in self.__dict__:
            self.__dict__[to].training = value

    cls.training = property(lambda self: bool(getattr(self, to).training), set_training)  # type: ignore[assignment]


def _delegated(name: str, to: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Module, name))
    def method(self: Module, *args: Any, **kwargs: Any) -> Any:
        module = getattr(self, to)
        result = getattr(module, name)(*args, **kwargs)
        return self if result is module else result

    return method
