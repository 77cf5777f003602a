"""Modules: what they hold and where, which tensor is which, and how their calls are seen.

`mutable_containers` yields where a module holds values, `find_source` finds where a tensor that no op made is held;
`alias` and `memory_of` distinguish tensors that share memory.

`forward` is swapped on module instances, and `Function.apply` on its class. Without an observer they
cost one read of a context variable. Swaps are counted: several observers, also in other threads, share one swap, and
the last observer restores the original.
"""

from __future__ import annotations

import copy
import enum
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Module
from torch.utils.checkpoint import CheckpointFunction

from graphpatch_notebook.capture.call_sites import facts_of
from graphpatch_notebook.capture.records import Frame, Kind
from graphpatch_notebook.errors import GraphError, holding
from graphpatch_notebook.torch_compat import Switch, called_attribute, visible_flex_attention, without_torch_functions
from graphpatch_notebook.values import ABSENT, PLAIN_TENSORS, children

MANY = 1000
"""Larger containers are data: their items are not searched."""

LARGE = 64 * 2**20
"""Tensors of more bytes are copied only if the model is known to write into them."""

WRITTEN: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""Tensors that a model is known to write into, by id; weights too, as `torch.nn.Embedding(max_norm=...)` does."""

NOT_STATE = ("forward", "_call_impl", "_old_forward", "_hf_hook")
"""This package swaps forwards and calls; the hook of accelerate records what it loaded."""

PLAIN_VALUES: frozenset[type] = frozenset({bool, int, float, str, type(None)})
REGISTRIES = ("_parameters", "_buffers", "_modules")
OF_EACH_MODULE = frozenset(Module().__dict__)
"""The registries, those of hooks among them, and the mode."""


def is_offloaded(module: Module) -> bool:
    """Whether the weights of a module come and go: accelerate puts them in place while its forward runs."""
    return "_hf_hook" in module.__dict__


# -- modules, and the tensors in them ----------------------------------------------------------------------------------


class TensorSource(NamedTuple):
    """A tensor that a module holds: its kind, and its attribute path from the frame's module."""

    kind: Kind
    attribute_path: str


def find_source(module: Module, tensor: Tensor) -> TensorSource | None:
    """Returns where `module`, or a module inside it, holds this tensor object."""
    for path, holder in registered_modules(module):
        for source, held in held_tensors(holder):
            if held is tensor:
                return TensorSource(source.kind, f"{path}.{source.attribute_path}") if path else source
    return None


def held_tensors(module: Module) -> Iterator[tuple[TensorSource, Tensor]]:
    """Yields all tensors that `module` itself holds, and can be run with others: parameters, buffers, attributes."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    registries: tuple[tuple[Kind, Any], ...]
    registries = ("parameter", module._parameters), ("buffer", module._buffers), ("attribute", module.__dict__)
    for kind, held in registries:
        for name, value in held.items():
            if isinstance(value, Tensor):
                yield TensorSource(kind, name), value


def reachable_modules(root: Module) -> list[Module]:
    """Returns all modules that can be reached from `root`: registered ones, and those in plain lists and dicts."""
    found: dict[int, Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) in found:
            continue
        found[id(module)] = module
        waiting.extend(child for child in module._modules.values() if child is not None)
        waiting.extend(child for _, child in unregistered_modules(module))
    return list(found.values())


def registered_modules(module: Module) -> Iterator[tuple[str, Module]]:
    """Yields `module` and all modules in it, each with its shortest attribute path: that is what code writes."""
    waiting = deque([("", module)])
    seen: set[int] = set()
    while waiting:
        path, current = waiting.popleft()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield path, current
        waiting.extend((f"{path}.{n}" if path else n, m) for n, m in current._modules.items() if m is not None)


def module_at(module: Module, path: str) -> Module | None:
    """Returns the submodule at an attribute path; `None` where there is none."""
    found: Module | None = module
    for name in path.split(".") if path else ():
        found = found._modules.get(name) if found is not None else None
    return found


def held_at(module: Any, path: str) -> Any:
    """Returns what a module holds at an attribute path; `ABSENT` where there is nothing.

    What is registered comes first: a parameter may have the name of a method of the class.
    """
    found = module
    for name in path.split("."):
        state = found.__dict__ if isinstance(found, Module) else {}
        holders = [state.get(registry, {}) for registry in REGISTRIES]
        holder = next((each for each in holders if name in each), None)
        found = getattr(found, name, ABSENT) if holder is None else holder[name]
    return found


# -- what the model holds now ------------------------------------------------------------------------------------------

Held: TypeAlias = "tuple[dict[str, Any], str, object]"
"""The registry or the attributes of a module or a config, a name, and what is there under this name."""
_COMPILED_MODULE = "_orig_mod"
_MISSING = object()


def held_now(frame: Frame) -> tuple[object, list[Held]]:
    """Returns the module that is now where the module of a frame was, and what leads there.

    It is `None` if that is not known, and another object if there is none. A frame of a module that the model does not
    hold has a path that leads nowhere.
    """
    for start in () if frame.parent is None else (frame.parent.module, frame.root.module):
        found: Any = start
        held: list[Held] = []
        is_registered = False
        for name in frame.attribute_path.split("."):
            registry = found._modules if isinstance(found, Module) else {}
            inner = registry.get(name)
            if inner is None and is_registered:
                return _MISSING, []
            is_registered, attributes = inner is not None, getattr(found, "__dict__", {})
            if is_registered:
                held.append((attributes, "_modules", registry))  # lists of modules make another one
            holder = registry if is_registered else attributes
            found = holder.get(name)
            held.append((holder, name, found))
        while found is not frame.module and isinstance(found, Module) and _COMPILED_MODULE in found._modules:
            held.append((found._modules, _COMPILED_MODULE, found._modules[_COMPILED_MODULE]))
            found = found._modules[_COMPILED_MODULE]
        if isinstance(found, Module):
            return found, held
    return None, []


def exchange(frame: Frame, now: object) -> str | None:
    """Returns what is `now` where the module of a frame was, as a text; `None` if it is that module, or not known."""
    if now in (None, frame.module):
        return None
    there = f"another {type(now).__name__} is" if isinstance(now, Module) else "nothing is"
    return f"{there} where a {type(frame.module).__name__} was"


def changed_model(text: str, frame: Frame, change: str) -> GraphError:
    """Returns the error of a name that the module of a frame had: what has changed since the capture."""
    where = f" {frame.attribute_path_from_root!r}" if frame.parent is not None else ""
    return GraphError(
        f"{text!r}: the model's{where} was changed since it was captured: {change}; capture it again, "
        "PatchableGraph(model, ...)"
    )


def unregistered_modules(module: Module) -> Iterator[tuple[str, Module]]:
    """Yields the modules that `module` holds in plain attributes, and lists, tuples and dicts of these."""
    for name, value in module.__dict__.items():
        if name in OF_EACH_MODULE or type(value) in PLAIN_VALUES:
            continue
        if isinstance(value, Module):
            yield name, value
        elif isinstance(value, (list, tuple, dict)):
            yield from ((f"{name}.{key}", item) for key, item in _entries(value) if isinstance(item, Module))


def _entries(container: Any) -> list[tuple[Any, Any]]:
    """Returns the keys and items of a container as the built-in class has them: a subclass may say anything."""
    if isinstance(container, dict):
        return list(dict.items(container))
    kind: Any = next(kind for kind in (list, tuple, set, deque) if isinstance(container, kind))
    return list(enumerate(kind.__iter__(container)))


def mutable_containers(
    module: Module, without: Container[str] = (), seen: set[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yields what `module` itself holds values in, each with its name: its `__dict__` (""), and the containers in it.

    These are dicts, lists, sets, deques and the attributes of plain objects (a cache, the config), also inside of each
    other. Large ones are data: they are not searched. Attributes in `without`, and what is in `seen`, are left out.
    """
    waiting: list[tuple[str, Any]] = [("", module.__dict__)]
    seen = set() if seen is None else seen
    for name, container in waiting:
        if id(container) in seen:
            continue
        seen.add(id(container))
        if not isinstance(container, tuple):
            yield name, container
        if name != "_modules" and (len(container) <= MANY or name in REGISTRIES):
            prefix = f"{name}." if name else ""
            for key, item in _entries(container):
                if type(item) in PLAIN_VALUES or (not name and (key in without or key in NOT_STATE)):
                    continue
                if (inside := _inside(item)) is not None:
                    waiting.append((f"{prefix}{key}", inside))


def _inside(value: Any) -> Any:
    """Returns the container in which a value holds others; `None` for modules, tensors, functions and the like."""
    if isinstance(value, (dict, list, set, deque, tuple)):
        try:
            len(value)
            next(iter(value.items() if isinstance(value, dict) else value), None)
        except Exception:  # a class with methods of its own, as e3nn's `Irreps`: what it holds is its own
            return None
        return value
    is_plain = not (callable(value) or isinstance(value, (Tensor, enum.Enum)))
    if not is_plain or type(value).__module__.partition(".")[0] in _SHARED_BY_PROGRAM:
        return None
    try:
        attributes = value.__dict__
    except Exception:  # it has none, or is a proxy of something that is gone
        return None
    return attributes if type(attributes) is dict else None


_SHARED_BY_PROGRAM = ("torch", "logging", "threading", "asyncio", "concurrent", "builtins", "bitsandbytes")
"""Packages whose objects belong to the whole program, or keep records of their own."""


class AttributePaths:
    """Attribute paths between modules, for naming calls."""

    def __init__(self, root: Module) -> None:
        self._root = root
        self._known: dict[int, dict[int, str]] = {}

    def path(self, module: Module, child: Module) -> str:
        """Returns how `module`'s code would write `child`; from the root if `child` is elsewhere."""
        if child is not module:
            for name, held in module._modules.items():  # most calls are of these
                if held is child:
                    return name
            if path := self._inside(module).get(id(child)):
                return path
        from_root = self._inside(self._root).get(id(child), "")
        if child is module:  # recursion: it is known by its own name
            from_root = from_root.rsplit(".", 1)[-1]
        return from_root or type(child).__name__.lower()

    def _inside(self, module: Module) -> dict[int, str]:
        """Returns the paths of the modules in `module`, through plain attributes if they are not registered."""
        if id(module) not in self._known:
            registered = list(registered_modules(module))
            paths = self._known[id(module)] = {id(inner): path for path, inner in registered}
            for prefix, holder in registered:
                for name, inner in unregistered_modules(holder):
                    paths.setdefault(id(inner), f"{prefix}.{name}" if prefix else name)
        return self._known[id(module)]


def looking_at(*values: Any) -> AbstractContextManager[None]:
    """Returns a context for looks at the tensors in `values` that function modes do not see.

    A class of tensors with functions of its own still answers itself.
    """
    others = [tensor for tensor in plain_tensors(values) if type(tensor) not in PLAIN_TENSORS]
    return nullcontext() if others else without_torch_functions()


def plain_tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in a value, also in containers. Fast, since it runs for each call of torch."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    kind = type(value)
    inside = value if kind is tuple or kind is list else value.values() if kind is dict else None
    for child in [child for _, child in children(value) or ()] if inside is None else inside:
        if isinstance(child, Tensor):
            found.append(child)
        elif type(child) not in PLAIN_VALUES:
            found += plain_tensors(child)
    return found


# -- which tensor is which ---------------------------------------------------------------------------------------------


def alias(tensor: Tensor) -> Tensor:
    """Returns another tensor object over the same memory, or the same one where torch cannot make one."""
    if type(tensor) is not Tensor:  # a parameter must stay one: code may put it back into its module
        return tensor
    try:
        return tensor.view_as(tensor)
    except RuntimeError:
        return tensor


def memory_of(value: Any) -> int | None:
    """Returns the address of the memory of a tensor; `None` if it does not have memory."""
    if not isinstance(value, Tensor):
        return None
    try:
        return value.untyped_storage().data_ptr() or None
    except Exception:  # sparse, not initialised yet, some subclasses
        return None


def weak(value: Any) -> Callable[[], Any]:
    """Returns a function that returns `value`: by a weak reference, if its type allows one."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


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
        """Hands a call of the module, or of a copy in its place, to the observer."""
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
                known.of_unobserved = known.of_unobserved or self._of_unobserved
                known.holders.add(self)
            for module in called:
                if (known := _calls.get(id(module))) is None:
                    known = _calls[id(module)] = _SwappedCall(module, called_attribute(module))
                self._calls[id(module)] = module
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


# -- modules that are used like others ---------------------------------------------------------------------------------


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
