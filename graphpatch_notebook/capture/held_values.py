"""What modules hold and where it is, and which tensor is which.

`mutable_containers` yields where a module holds values, `find_source` finds where a tensor that no op made is held;
`alias` and `memory_of` distinguish tensors that share memory.
"""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.records import Frame, Kind
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.torch_compat import without_torch_functions
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
    are_plain = all(type(tensor) in PLAIN_TENSORS for tensor in plain_tensors(values))
    return without_torch_functions() if are_plain else nullcontext()


def plain_tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in a value, also in containers. Fast, since it runs for each call of torch."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for child in value if type(value) in (tuple, list) else [child for _, child in children(value) or ()]:
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
