"""Makes module calls and calls of `autograd.Function.apply` visible to the observer of their context.

`forward` is swapped on module instances, and `Function.apply` on its class. Without an observer they
cost one read of a context variable. Swaps are counted: several observers, also in other threads, share one swap, and
the last observer restores the original.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

from torch import is_grad_enabled, set_grad_enabled
from torch.autograd import Function
from torch.nn import Module
from torch.utils.checkpoint import CheckpointFunction

from graphpatch_notebook.capture.naming.call_sites import facts_of, invoke
from graphpatch_notebook.interrupts import HeldSwitch, holding
from graphpatch_notebook.torch_compat import function_mode_depth, pop_function_modes, visible_flex_attention
from graphpatch_notebook.values import ABSENT


class Observer(Protocol):
    """Sees each call of a swapped `forward` made in its context."""

    def on_forward(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs `forward` (by `invoke`) and returns the result for the caller of the module."""


observer: ContextVar[Observer | None] = ContextVar("graphpatch_observer", default=None)


OfUnobserved: TypeAlias = "Callable[[Module], Observer | None]"
"""Called when a swapped `forward` runs without an observer; returns one for it, or `None`."""

_lock = threading.RLock()
_swaps: dict[int, _SwappedForward] = {}


class _SwappedForward:
    """Replaces `forward` on a module instance. It has its signature; a copy of the module gets the real `forward`."""

    def __init__(self, module: Module, of_unobserved: OfUnobserved | None) -> None:
        self.holders: set[Swaps] = set()
        self.of_unobserved = of_unobserved
        self._module = module
        self._attribute = innermost_forward(module) if "_hf_hook" in module.__dict__ else "forward"
        self._before = module.__dict__.get(self._attribute, ABSENT)
        self._is_installed = False
        # `inspect.signature` returns that of the original
        self.original = self.__wrapped__ = getattr(module, self._attribute)

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
                return self.original(*args, **kwargs)
            with holding(observer, watching):
                return watching.on_forward(self._module, self.original, args, kwargs)
        return watching.on_forward(self._module, self.original, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the module must run its own weights, not those of the module that it was copied from.
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_same, (self.original,))

    def install(self) -> None:
        """Puts it on the module, once."""
        if not self._is_installed:
            # Bypasses `nn.Module.__setattr__`, which some models override.
            self._module.__dict__[self._attribute] = self
            self._is_installed = True

    def restore(self) -> None:
        """Gives the module back what it had before."""
        if self._module.__dict__.get(self._attribute) is not self:
            return  # the user's code has set another `forward` since: keep it
        if self._before is ABSENT:
            del self._module.__dict__[self._attribute]
        else:
            self._module.__dict__[self._attribute] = self._before


def _same(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def innermost_forward(module: Module) -> str:
    """Returns the attribute that holds the module's own forward.

    accelerate puts its hooks around `forward` on the instance and keeps the module's own as `_old_forward`: weights
    are loaded between the two, so this is where parameters exist.
    """
    return "_old_forward" if "_hf_hook" in module.__dict__ and "_old_forward" in module.__dict__ else "forward"


def declared_forward(module: Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the forward with the signature of `module`: the one of its class, if FSDP wrapped it."""
    code = getattr(forward, "__code__", None)
    is_around = code is not None and facts_of(code).is_parallel
    return getattr(type(module), "forward").__get__(module) if is_around else forward  # noqa: B009


class Swaps:
    """Swaps of `forward`, as long as they are held.

    A KeyboardInterrupt may occur between any two instructions. So each swap is noted before it is made, and `let_go`
    can be called again if it was interrupted.
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
                    known = _swaps[id(module)] = _SwappedForward(module, self._of_unobserved)
                elif known.of_unobserved is None:
                    known.of_unobserved = self._of_unobserved
                known.holders.add(self)
                known.install()

    def let_go(self) -> None:
        """Releases all swaps; modules without other holders get their original `forward` back."""
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
    """Returns the module's own forward, also while it is swapped."""
    known = _swaps.get(id(module))
    original: Callable[..., Any] = known.original if known is not None else getattr(module, innermost_forward(module))
    return original


__all__ = ["Observer", "Swaps", "innermost_forward", "invoke", "is_swapped", "observer", "original_forward"]


# -- autograd functions ------------------------------------------------------------------------------------------------


class ApplyObserver(Protocol):
    """Sees calls of `Function.apply`."""

    def on_apply(
        self, cls: type[Function], apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs `apply` and returns the result for its caller."""


apply_observer: ContextVar[ApplyObserver | None] = ContextVar("graphpatch_apply_observer", default=None)


class ThreadState:
    """What a run of the model may leave changed in its thread: the observers, function modes, and the gradient mode."""

    __slots__ = ("_applied", "_depth", "_error", "_has_gradients", "_observer")

    def __init__(self) -> None:
        self._observer, self._applied = observer.get(), apply_observer.get()
        self._depth, self._has_gradients = function_mode_depth(), is_grad_enabled()
        self._error = sys.exc_info()[1]

    def restore(self) -> None:
        """Restores it all, but the gradient mode only after an interrupt: otherwise it is what the model's code left.

        `torch.no_grad` restores it by a call that function modes see, and an interrupt may arrive while ours handles
        it.
        """
        observer.set(self._observer)
        apply_observer.set(self._applied)
        pop_function_modes(self._depth)
        error = sys.exc_info()[1]
        if error is not self._error and not isinstance(error, Exception):
            set_grad_enabled(self._has_gradients)


# These run whole modules inside. Users want the nodes of these.
TRANSPARENT = (CheckpointFunction,)


class _VisibleApply(HeldSwitch):
    """Passes calls of `Function.apply` to the `apply_observer` of their context, and shows modes flex attention."""

    def __init__(self) -> None:
        super().__init__()
        self._wrapper: Any = classmethod(_apply)
        self.original: Any = Function.__dict__["apply"]

    def _switch_on(self) -> None:
        if Function.__dict__["apply"] is not self._wrapper:
            self.original = Function.__dict__["apply"]
            Function.apply = self._wrapper  # type: ignore[method-assign]
        visible_flex_attention.hold(self)

    def _switch_off(self) -> None:
        if Function.__dict__["apply"] is self._wrapper:
            Function.apply = self.original  # type: ignore[method-assign]
        visible_flex_attention.let_go(self)


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    apply = visible_apply.original.__get__(None, cls)
    watching = apply_observer.get()
    if watching is None or issubclass(cls, TRANSPARENT) or visible_flex_attention.is_inside():
        return apply(*args, **kwargs)
    return watching.on_apply(cls, apply, args, kwargs)


visible_apply = _VisibleApply()
