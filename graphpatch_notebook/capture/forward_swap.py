"""Swaps `forward` on module instances, so that whoever runs the model can see module calls.

A swapped `forward` costs one look at a context variable as long as nobody observes. Swaps are counted: several
observers, also in other threads, share one swap of a module, and the last one to leave puts back what was there.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

from torch.nn import Module

from graphpatch_notebook.capture.call_sites import invoke
from graphpatch_notebook.interrupts import holding


class Observer(Protocol):
    """Sees each call of a swapped `forward` made in its context."""

    def on_forward(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs `forward` (through `invoke`) and returns what the module's caller gets."""


observer: ContextVar[Observer | None] = ContextVar("graphpatch_observer", default=None)


OfUnobserved: TypeAlias = "Callable[[Module], Observer | None]"
"""Called when a swapped `forward` runs that nobody observes; returns what observes it then, if anything."""

_lock = threading.RLock()
_swaps: dict[int, _Swap] = {}
_ABSENT: Any = object()


class _SwappedForward:
    """Stands in for `forward` on a module instance; looks like it, and copies with the module as its real `forward`."""

    def __init__(self, module: Module, original: Callable[..., Any]) -> None:
        self.__wrapped__ = original  # whoever asks for the signature gets that of the original
        self.of_unobserved: OfUnobserved | None = None
        self._module = module
        self._original = original

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        watching = observer.get()
        if watching is None:
            watching = self.of_unobserved(self._module) if self.of_unobserved is not None else None
            if watching is None:
                return self._original(*args, **kwargs)
            with holding(observer, watching):
                return watching.on_forward(self._module, self._original, args, kwargs)
        return watching.on_forward(self._module, self._original, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the module must run its own weights, not those of the module that it was copied from.
        return copy.deepcopy(self._original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_same, (self._original,))


def _same(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class _Swap:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.holders: set[Swaps] = set()
        self.is_installed = False
        self.attribute = innermost_forward(module)
        self.before = module.__dict__.get(self.attribute, _ABSENT)
        self.original: Callable[..., Any] = getattr(module, self.attribute)
        self.forward = _SwappedForward(module, self.original)

    def install(self) -> None:
        if not self.is_installed:
            # Bypasses `nn.Module.__setattr__`, which some models override.
            self.module.__dict__[self.attribute] = self.forward
            self.is_installed = True

    def restore(self) -> None:
        if self.module.__dict__.get(self.attribute) is not self.forward:
            return  # the user's code put another `forward` there meanwhile: that one stays
        if self.before is _ABSENT:
            del self.module.__dict__[self.attribute]
        else:
            self.module.__dict__[self.attribute] = self.before


def innermost_forward(module: Module) -> str:
    """Returns the attribute that holds the module's own forward.

    accelerate puts its hooks around `forward` on the instance and keeps the module's own as `_old_forward`: weights
    are loaded between the two, so this is where parameters exist.
    """
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


class Swaps:
    """Swaps of `forward`, for as long as somebody holds them.

    An interrupt may come between any two instructions. So what is to be taken back is noted before it is done, and
    `let_go` can be called again where it did not come to its end.

    Args:
        of_unobserved: Called when one of the swapped `forward`s runs and nobody observes.
    """

    def __init__(self, of_unobserved: OfUnobserved | None = None) -> None:
        self._modules: list[Module] = []
        self._of_unobserved = of_unobserved

    def hold(self, modules: Iterable[Module]) -> None:
        """Swaps `forward` of each module, until `let_go`."""
        with _lock:
            for module in modules:
                self._modules.append(module)
                known = _swaps.get(id(module))
                if known is None:
                    known = _swaps[id(module)] = _Swap(module)
                known.holders.add(self)
                known.forward.of_unobserved = known.forward.of_unobserved or self._of_unobserved
                known.install()

    def let_go(self) -> None:
        """Takes all of it back; modules that nobody else holds swapped are as they were."""
        with _lock:
            for module in self._modules:
                known = _swaps.get(id(module))
                if known is None:
                    continue
                known.holders.discard(self)
                if not known.holders:
                    known.restore()
                    _swaps.pop(id(module), None)
            self._modules.clear()


def is_swapped(module: Module) -> bool:
    """Whether `forward` of `module` is swapped at present."""
    return id(module) in _swaps


def original_forward(module: Module) -> Callable[..., Any]:
    """Returns the module's own forward, whether it is swapped at present or not."""
    known = _swaps.get(id(module))
    return known.original if known is not None else getattr(module, innermost_forward(module))


__all__ = ["Observer", "Swaps", "innermost_forward", "invoke", "is_swapped", "observer", "original_forward"]
