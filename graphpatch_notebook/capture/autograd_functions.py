"""Makes `autograd.Function.apply` visible as one call: the function mode does not see it.

While somebody records or patches, `torch.autograd.Function.apply` is replaced by a wrapper that hands each call to the
recorder of its own context, if there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from graphpatch_notebook.interrupts import afterwards


class ApplyObserver(Protocol):
    """Sees calls of `Function.apply`."""

    def on_apply(
        self, cls: type[Function], apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs `apply` and returns what its caller gets."""


apply_observer: ContextVar[ApplyObserver | None] = ContextVar("graphpatch_apply_observer", default=None)

# These run whole modules inside: their insides are what people want to see.
TRANSPARENT = (CheckpointFunction,)


class _Replacement:
    """Puts the wrapper in place of `Function.apply` while anybody needs it.

    As with swaps of `forward`, `let_go` can be called again where an interrupt kept it from its end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[object] = set()
        self._wrapper: Any = None
        self.original: Any = Function.__dict__["apply"]

    def hold(self, holder: object) -> None:
        with self._lock:
            self._holders.add(holder)
            if self._wrapper is None:
                self._wrapper = classmethod(_apply)
            if Function.__dict__["apply"] is not self._wrapper:
                self.original = Function.__dict__["apply"]
                Function.apply = self._wrapper  # type: ignore[method-assign]

    def let_go(self, holder: object) -> None:
        with self._lock:
            self._holders.discard(holder)
            if not self._holders and Function.__dict__["apply"] is self._wrapper:
                Function.apply = self.original  # type: ignore[method-assign]


_replacement = _Replacement()


@contextmanager
def visible_apply() -> Iterator[None]:
    """Hands calls of `Function.apply` to the `apply_observer` of their context for the length of the block."""
    holder = object()
    with afterwards(partial(_replacement.let_go, holder)):
        _replacement.hold(holder)
        yield


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    apply = _replacement.original.__get__(None, cls)
    watching = apply_observer.get()
    if watching is None or issubclass(cls, TRANSPARENT):
        return apply(*args, **kwargs)
    return watching.on_apply(cls, apply, args, kwargs)
