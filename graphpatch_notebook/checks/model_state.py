"""Copies of what a run may change: its inputs, the buffers and attributes of its modules, and the random state."""

from __future__ import annotations

import copy
import copyreg
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.forward_swap import original_forward
from graphpatch_notebook.capture.tensor_sources import reachable_modules
from graphpatch_notebook.checks.equality import difference
from graphpatch_notebook.checks.outer_values import outer_containers
from graphpatch_notebook.values import children

LARGE = 64 * 2**20
"""Buffers of more bytes are not copied: these are weights (of quantized models), not state."""


def copied(value: Any, shared: Iterable[Tensor] = ()) -> Any:
    """Returns a copy of inputs: tensors with the same strides, aliases among them and leaves as they were.

    Modules and functions are shared, and so is what has no state, such as `object()`: it is told by its identity.

    Args:
        value: The inputs.
        shared: Tensors among them that are not copied.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    _prepare(value, memo, {})
    return copy.deepcopy(value, memo)


def _prepare(value: Any, memo: dict[int, Any], seen: dict[int, Any]) -> None:
    if isinstance(value, Tensor):
        if id(value) not in memo:
            # `detach` first: torch does not copy tensors that an op made and that require gradients.
            memo[id(value)] = _like(_copied_tensor(value.detach(), memo), value)
    elif isinstance(value, Module) or callable(value) or _is_sentinel(value):
        memo[id(value)] = value
    elif id(value) not in seen:  # a container may hold itself
        seen[id(value)] = value
        for _, child in children(value) or ():
            _prepare(child, memo, seen)


def _is_sentinel(value: Any) -> bool:
    """Whether an object can only be told by which one it is: it has no contents, and equals nothing but itself."""
    kind = type(value)
    if getattr(kind, "__eq__", None) is not object.__eq__ or hasattr(kind, "__deepcopy__"):
        return False
    try:
        maker, arguments, *state = value.__reduce_ex__(4)
    except Exception:  # it cannot be copied at all, and `deepcopy` will say so
        return False
    return maker is copyreg.__newobj__ and arguments == (kind,) and not any(state)  # type: ignore[attr-defined]


def _copied_tensor(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    try:
        return copy.deepcopy(tensor, memo)
    except (RuntimeError, NotImplementedError):  # some subclasses, and the tensors of `torch.func`
        return tensor.clone()


def _like(alias: Tensor, original: Tensor) -> Tensor:
    """Returns `alias` as a leaf of autograd, or not, as `original` is: in-place ops ask."""
    if not original.requires_grad:
        return alias
    leaf = alias.requires_grad_()
    if original.is_leaf or not torch.is_grad_enabled():
        return leaf
    inner = leaf.clone()
    return inner if inner.stride() == leaf.stride() else leaf.view_as(leaf)


class RandomState:
    """The state of torch's random number generators."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        is_used: bool = torch.cuda.is_initialized()
        self._cuda = torch.cuda.get_rng_state_all() if is_used else []

    def restore(self) -> None:
        """Puts the generators back to this state."""
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)

    def equals(self, other: RandomState) -> bool:
        """Whether both are the same state."""
        pairs = zip([self._cpu, *self._cuda], [other._cpu, *other._cuda], strict=False)
        return len(self._cuda) == len(other._cuda) and all(torch.equal(a, b) for a, b in pairs)


class SharedRandomState:
    """The state of the random number generators that all code shares: those of torch, Python and numpy."""

    def __init__(self) -> None:
        self.torch = RandomState()
        self._python = random.getstate()
        self._numpy = _numpy_state()

    def restore(self) -> None:
        """Puts the generators back to this state."""
        self.torch.restore()
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def differing(self, other: SharedRandomState) -> list[str]:
        """Returns whose generators have another state in `other`."""
        by_owner = {
            "torch": self.torch.equals(other.torch),
            "Python": self._python == other._python,
            "numpy": None in (self._numpy, other._numpy) or _same_numpy_state(self._numpy, other._numpy),
        }
        return [name for name, is_equal in by_owner.items() if not is_equal]


class BufferState:
    """The buffers of some modules at one moment, but for large ones: which tensors they are, and what is in them."""

    def __init__(self, modules: Iterable[Module]) -> None:
        self._modules = list(modules)
        self._contents = [_contents(module) for module in self._modules]
        self._objects = [dict(module._buffers) for module in self._modules]

    def change(self) -> str | None:
        """Returns the first buffer that is another one now, or holds something else, in words."""
        for module, contents, objects in zip(self._modules, self._contents, self._objects, strict=True):
            for name, saved in contents.items():
                buffer = objects[name]
                if module._buffers.get(name) is not buffer or not _holds(buffer, saved):
                    return f"{type(module).__name__} changes its buffer {name!r}"
        return None

    def restore(self) -> None:
        """Puts back the buffers that are other ones, and writes those back that were written into."""
        for module, contents, objects in zip(self._modules, self._contents, self._objects, strict=True):
            for name in (name for name, buffer in objects.items() if buffer is None):
                module._buffers[name] = None
            for name, saved in contents.items():
                buffer = objects[name]
                if module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
                if buffer is not None and not _holds(buffer, saved):
                    # Through `data`: autograd may hold this buffer, as it was left by the run that counts.
                    buffer.data.copy_(saved)

    def difference(self, other: BufferState) -> str | None:
        """Returns the first difference to the buffers of the same modules in `other`, if there is one."""
        found = (
            difference(mine, theirs, f"the buffers of {type(module).__name__}")
            for module, mine, theirs in zip(self._modules, self._contents, other._contents, strict=True)
        )
        return next((text for text in found if text is not None), None)


class ModuleState:
    """What a run of a module may change, at one moment: in the module and in all that can be reached from it."""

    def __init__(self, root: Module) -> None:
        self._modules = reachable_modules(root)
        self._buffers = BufferState(self._modules)
        self._attributes = [_attributes(module) for module in self._modules]
        self._versions = [_versions(module) for module in self._modules]
        self._outer = {
            name: (container, container.copy())
            for name, container in outer_containers(root, original_forward(root)).items()
        }
        self.random = SharedRandomState()

    def unrepeatable_change(self) -> str | None:
        """Returns what has happened since that no graph repeats, or that a trial run cannot take back, if anything."""
        for module, attributes, versions in zip(self._modules, self._attributes, self._versions, strict=True):
            if (name := _changed(attributes, _attributes(module))) is not None:
                return f"{type(module).__name__} changes its {name!r} while it runs"
            if _versions(module) != versions:
                return f"{type(module).__name__} writes into its parameters while it runs"
        for name, (container, content) in self._outer.items():
            if not _is_same_container(container, content):
                return f"it changes the global {name!r} while it runs"
        if set(self.random.differing(SharedRandomState())) - {"torch"}:
            return "it draws random numbers of Python or numpy"
        return None

    def restore(self) -> None:
        """Writes the buffers back, and the state of the random generators, those of Python and numpy too."""
        self.random.restore()
        self.restore_buffers()

    def restore_buffers(self) -> None:
        """Writes the buffers back that were changed."""
        self._buffers.restore()

    def difference(self, other: ModuleState) -> str | None:
        """Returns the first difference of the buffers and the random state to those of `other`, if there is one."""
        if (text := self._buffers.difference(other._buffers)) is not None:
            return text
        return None if self.random.torch.equals(other.random.torch) else "it leaves another random state behind"


def _contents(module: Module) -> dict[str, Tensor]:
    return {
        name: buffer.detach().clone()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.numel() * buffer.element_size() <= LARGE and not _is_lazy(buffer)
    }


def _holds(buffer: Tensor | None, content: Tensor) -> bool:
    return buffer is not None and difference(buffer.detach(), content, "") is None


def _is_lazy(tensor: Tensor) -> bool:
    return torch.nn.parameter.is_lazy(tensor)


def _versions(module: Module) -> list[int]:
    return [
        version_of(tensor)
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if not is_offloaded(module)
        and tensor is not None
        and (tensor.numel() * tensor.element_size() > LARGE or _is_parameter(tensor))
    ]


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was written into."""
    try:
        return tensor._version
    except RuntimeError:  # inference tensors do not count
        return 0


def _attributes(module: Module) -> dict[str, Any]:
    """Returns the attributes of a module, the insides of plain containers and objects among them."""
    found: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        if name in ("_parameters", "_buffers") and is_offloaded(module):
            continue
        if name in ("_parameters", "_buffers", "_modules"):
            found |= {f"{name}.{inner}": item for inner, item in value.items()}
        elif name not in NOT_STATE:
            found[name] = value
            found |= {f"{name}.{inner}": item for inner, item in _insides(value)}
    return found


def is_offloaded(module: Module) -> bool:
    """Whether the weights of a module come and go."""
    # accelerate puts the weights in place for the length of each run of the module's forward.
    return "_hf_hook" in module.__dict__


NOT_STATE = ("forward", "_old_forward", "_hf_hook")
"""Forwards are swapped by this very package; the hook of accelerate keeps account of what it loaded."""

MANY = 1000
"""Containers of more items are not looked into: they are data."""


def _insides(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields what one can look into one level deep: the attribute of an object that counts, an item of a list."""
    if isinstance(value, (Module, Tensor, type)) or callable(value):
        return
    if type(value) in (list, tuple, set, deque):
        items: Any = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    else:
        value = getattr(value, "__dict__", {})
        items = value.items()
    if len(value) <= MANY:
        yield from items


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    if before.keys() != after.keys():
        return str(next(iter(before.keys() ^ after.keys())))
    return next((name for name, value in before.items() if not is_same(value, after[name])), None)


def is_same(a: Any, b: Any) -> bool:
    """Whether an attribute is what it was: the same object, or an equal plain value."""
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, (bool, int, float, str, bytes)) and a == b


def _is_same_container(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):  # tensors and arrays have no one truth value
        return False


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


def _same_numpy_state(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return a[0] == b[0] and bool((a[1] == b[1]).all()) and tuple(a[2:]) == tuple(b[2:])
