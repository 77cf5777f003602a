"""Makes module calls and calls of `autograd.Function.apply` visible to the observer of their context.

`forward` is swapped on module instances, and `Function.apply` on its class. Without an observer they
cost one read of a context variable. Swaps are counted: several observers, also in other threads, share one swap, and
the last observer restores the original.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

from torch.autograd import Function
from torch.nn import Module
from torch.utils.checkpoint import CheckpointFunction

from graphpatch_notebook.capture.call_sites import facts_of
from graphpatch_notebook.interrupts import holding
from graphpatch_notebook.torch_compat import Switch, called_attribute, visible_flex_attention
from graphpatch_notebook.values import ABSENT


class Observer(Protocol):
    """Sees each call of a swapped `forward` made in its context.

    If it has a method `on_call`, it is handed swapped calls of modules, too, with the hooks of these; and if it has
    one `on_apply`, the calls of `Function.apply`: each runs what it is given, and returns the result for the caller.
    """

    def on_forward(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs `forward` (by `invoke`) and returns the result for the caller of the module."""


observer: ContextVar[Observer | None] = ContextVar("graphpatch_observer", default=None)


OfUnobserved: TypeAlias = "Callable[[Module], Observer | None]"
"""Called when a swapped `forward` runs without an observer; returns one for it, or `None`."""


class _SwappedForward:
    """Replaces `forward` on a module instance. It has its signature; a copy of the module gets the real `forward`."""

    def __init__(self, module: Module, name: str) -> None:
        self.holders: set[Swaps] = set()
        self.of_unobserved: OfUnobserved | None = None
        self._module, self._name = module, name
        self._before = module.__dict__.get(name, ABSENT)
        # `inspect.signature` returns that of the original
        self.original = self.__wrapped__ = getattr(module, name)
        # Bypasses `nn.Module.__setattr__`, which some models override.
        module.__dict__[name] = self

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watching = observer.get()
        if watching is None:
            return self._unobserved(args, kwargs)
        return watching.on_forward(self._module, self.original, args, kwargs)

    def _unobserved(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watching = self.of_unobserved(self._module) if self.of_unobserved is not None else None
        if watching is None:
            return self.original(*args, **kwargs)
        with holding(observer, watching):
            return self(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the module must run its own weights, not those of the module that it was copied from.
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_same, (self.original,))

    def restore(self) -> None:
        """Gives the module back what it had before."""
        if self._module.__dict__.get(self._name) is not self:
            return  # the user's code has set another one since: keep it
        if self._before is ABSENT:
            del self._module.__dict__[self._name]
        else:
            self._module.__dict__[self._name] = self._before


class _SwappedCall(_SwappedForward):
    """Replaces what `Module.__call__` calls: `forward` with the hooks of the module."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watching = observer.get()
        if watching is None:
            return self._unobserved(args, kwargs)
        return self.observed(self.original, *args, **kwargs)

    def observed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Hands a call of the module, or of a copy that stands for it, to the observer."""
        on_call = getattr(observer.get(), "on_call", None)
        return call(*args, **kwargs) if on_call is None else on_call(self._module, call, args, kwargs)


_lock = threading.RLock()
_forwards: dict[int, _SwappedForward] = {}  # by the id of the module
_calls: dict[int, _SwappedCall] = {}


def _same(original: Callable[..., Any]) -> Callable[..., Any]:
    return original


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


def all_modules(module: Module) -> list[Module]:
    """Returns `module` and all modules in it, each once: faster than `module.modules()`, which makes their names."""
    found = [module]
    if not module._modules:
        return found
    seen = {id(module)}
    for current in found:
        for inside in current._modules.values() if current._modules else ():
            if inside is not None and id(inside) not in seen:
                seen.add(id(inside))
                found.append(inside)
    return found


class Swaps:
    """Swaps of `forward`, and of whole calls, as long as they are held."""

    def __init__(self, of_unobserved: OfUnobserved | None = None) -> None:
        self._forwards: dict[int, Module] = {}
        self._calls: dict[int, Module] = {}
        self._of_unobserved = of_unobserved

    def hold(self, modules: Iterable[Module], called: Iterable[Module] = ()) -> None:
        """Swaps `forward` of `modules`, and the calls of those in `called`, until `release`."""
        with _lock:
            for module in modules:
                if (known := _forwards.get(id(module))) is None:
                    known = _forwards[id(module)] = _SwappedForward(module, innermost_forward(module))
                self._forwards[id(module)] = module
                self._add(known)
            for module in called:
                if (known := _calls.get(id(module))) is None:
                    known = _calls[id(module)] = _SwappedCall(module, called_attribute(module))
                self._calls[id(module)] = module
                self._add(known)

    def _add(self, known: _SwappedForward) -> None:
        known.of_unobserved = known.of_unobserved or self._of_unobserved
        known.holders.add(self)

    def release(self) -> None:
        """Releases all swaps; modules without other holders get back what they had."""
        with _lock:
            for held, swapped in ((self._forwards, _forwards), (self._calls, _calls)):
                for key in held:
                    known = swapped[key]
                    known.holders.discard(self)
                    if not known.holders:
                        known.restore()
                        del swapped[key]
                held.clear()


def is_swapped(module: Module) -> bool:
    """Whether `forward` of `module` is swapped at present."""
    return id(module) in _forwards


def original_forward(module: Module) -> Callable[..., Any]:
    """Returns the module's own forward, also while it is swapped."""
    known = _forwards.get(id(module))
    original: Callable[..., Any] = known.original if known is not None else getattr(module, innermost_forward(module))
    return original


# -- autograd functions ------------------------------------------------------------------------------------------------


# These run whole modules inside. Users want the nodes of these.
TRANSPARENT = (CheckpointFunction,)


class _VisibleApply(Switch):
    """Passes calls of `Function.apply` to the observer of their context, and shows modes flex attention."""

    def __init__(self) -> None:
        super().__init__()
        self._wrapper: Any = classmethod(_apply)
        self.original: Any = Function.__dict__["apply"]

    def __enter__(self) -> None:
        super().__enter__()
        visible_flex_attention.__enter__()

    def __exit__(self, *_: object) -> None:
        visible_flex_attention.__exit__()
        super().__exit__()

    def _switch_on(self) -> None:
        if Function.__dict__["apply"] is not self._wrapper:
            self.original = Function.__dict__["apply"]
            Function.apply = self._wrapper  # type: ignore[method-assign]

    def _switch_off(self) -> None:
        if Function.__dict__["apply"] is self._wrapper:
            Function.apply = self.original  # type: ignore[method-assign]


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    apply = visible_apply.original.__get__(None, cls)
    on_apply = getattr(observer.get(), "on_apply", None)
    if on_apply is None or issubclass(cls, TRANSPARENT) or visible_flex_attention.is_inside():
        return apply(*args, **kwargs)
    return on_apply(cls, apply, args, kwargs)


visible_apply = _VisibleApply()
