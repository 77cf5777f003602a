"""Makes `autograd.Function.apply` visible as one call: the function mode does not see it.

While somebody records or patches, `torch.autograd.Function.apply` is replaced by a wrapper that hands each call to the
recorder of its own context, if there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction


class ApplyObserver(Protocol):
    """Sees calls of `Function.apply`."""

    def on_apply(
        self, cls: type[Function], apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs `apply` and returns what its caller gets."""


apply_observer: ContextVar[ApplyObserver | None] = ContextVar("graphpatch_apply_observer", default=None)

# These run whole modules inside: their insides are what people want to see.
_TRANSPARENT = (CheckpointFunction,)

_lock = threading.Lock()
_count = 0
_original: Any = None


@contextmanager
def visible_apply() -> Iterator[None]:
    """Hands calls of `Function.apply` to the `apply_observer` of their context for the length of the block."""
    global _count, _original
    with _lock:
        if _count == 0:
            _original = Function.__dict__["apply"]
            Function.apply = classmethod(_apply)  # type: ignore[assignment, method-assign]
        _count += 1
    try:
        yield
    finally:
        with _lock:
            _count -= 1
            if _count == 0:
                Function.apply = _original  # type: ignore[method-assign]


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    original = _original if _original is not None else Function.__dict__["apply"]
    apply = original.__get__(None, cls)
    watching = apply_observer.get()
    if watching is None or issubclass(cls, _TRANSPARENT):
        return apply(*args, **kwargs)
    return watching.on_apply(cls, apply, args, kwargs)
