"""Listeners: who is told of each new version of something, in order, whatever some of them do."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from graphpatch_notebook.errors import ListenerWarning

T = TypeVar("T")


class Listeners(Generic[T]):
    """Those who are told. Whoever uses this sees to it that one thread at a time does.

    Example:
        >>> listeners, told = Listeners(), []
        >>> stop = listeners.add(told.append)
        >>> listeners.tell(1)
        >>> stop(); listeners.tell(2)
        >>> told
        [1]
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[T], object]] = []
        self._waiting: deque[T] = deque()
        self._is_telling = False

    def add(self, listener: Callable[[T], object]) -> Callable[[], None]:
        """Tells `listener` of all that is new from now on; returns what stops that."""
        # An object of its own: the same listener may be added twice.
        entry = partial(listener)
        self._listeners.append(entry)

        def stop() -> None:
            self._listeners[:] = [other for other in self._listeners if other is not entry]

        return stop

    def tell(self, version: T) -> None:
        """Tells all of a version. One that a listener makes meanwhile comes after this: all see the same order.

        What a listener raises is told by a warning, when all have been told.
        """
        self._waiting.append(version)
        if self._is_telling:
            return
        errors: list[Exception] = []
        self._is_telling = True
        try:
            while self._waiting:
                newest = self._waiting.popleft()
                for listener in tuple(self._listeners):
                    errors += _errors_of(listener, newest)
        finally:
            self._is_telling = False
        for problem in errors:
            message = (
                f"a listener raised {type(problem).__name__}: {problem}; the edit was made, and the others were told"
            )
            warnings.warn(message, ListenerWarning, stacklevel=2)


def _errors_of(listener: Callable[[T], object], version: T) -> list[Exception]:
    try:
        listener(version)
    except Exception as error:
        return [error]
    return []
