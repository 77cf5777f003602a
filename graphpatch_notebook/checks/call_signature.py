"""What a run of a frame depends on, as far as it can be seen from outside: for which runs a verdict holds.

    input_key      of the inputs: structure, plain values, and of tensors all but what they hold
    settings_key   grad mode, autocast, ...
    Watch          of the module: flags, attributes, classes, submodules, hooks, dtypes of parameters, globals

A verdict on a graph holds for one key and as long as the watch sees no change.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.forward_swap import original_forward
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.checks.outer_values import outer_values
from graphpatch_notebook.values import children

_PLAIN = (
    bool, int, str, bytes, type(None), type(Ellipsis), range,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_AUTOCAST_DEVICES = ("cpu", "cuda")


class UnseenError(Exception):
    """A value whose insides cannot be seen."""


def input_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Returns a key that is equal for calls that differ in the contents of tensors only.

    Raises:
        UnseenError: One of the inputs is an object, such as a cache: what is in it cannot be seen.

    Example:
        >>> input_key((torch.ones(2), 3), {}) == input_key((torch.zeros(2), 3), {})
        True
        >>> input_key((torch.ones(2), 3), {}) == input_key((torch.ones(2), True), {})
        False
    """
    tensors: list[Tensor] = []
    key = (tuple([_key(value, tensors) for value in args]), _key(kwargs, tensors))
    ids = [id(tensor) for tensor in tensors]
    # Some modules ask whether two inputs are one object (attention: are query and key the same?).
    return key if len(set(ids)) == len(ids) else (key, tuple(map(ids.index, ids)))


def _key(value: Any, tensors: list[Tensor]) -> Hashable:
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        strides = value.stride() if value.layout is torch.strided else None
        return kind, value.shape, strides, value.dtype, value.device, value.requires_grad
    if kind in _PLAIN or isinstance(value, enum.Enum):
        return kind, value
    if kind is float or kind is complex:
        return kind, repr(value)  # 0.0 is not -0.0
    if kind is tuple or kind is list:
        return kind, tuple([_key(item, tensors) for item in value])
    if kind is dict:
        return kind, tuple([(key, _key(item, tensors)) for key, item in value.items()])
    if kind is slice:
        return kind, tuple([_key(part, tensors) for part in (value.start, value.stop, value.step)])
    if isinstance(value, (Module, type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return kind, value
    if (inside := children(value)) is not None:
        return kind, tuple([(key, _key(item, tensors)) for key, item in inside])
    raise UnseenError(f"it is given an object ({kind.__name__}), and what is in that cannot be seen")


def settings_key() -> Hashable:
    """Returns the settings of torch that the code of a module may ask for."""
    return (
        torch.is_grad_enabled(),
        # `torch.compile` cannot trace this question.
        not torch.compiler.is_compiling() and torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        *[
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            for device in _AUTOCAST_DEVICES
        ],
    )


class Watch:
    """Remembers what the module of a frame looks like, and tells whether it still does.

    Args:
        frame: The frame.

    Attributes:
        flags: Plain attributes of the modules, `training` among them: module, name, value.
        problem: Why nothing that is seen from outside could tell for which runs the graph holds; `None` if it can.
    """

    def __init__(self, frame: Frame) -> None:
        module = self._module = frame.module
        called = [node.frame.module for node in frame.calls() if node.frame is not None]
        near = list(_near(module, called))
        self.flags = [flag for m in near for flag in _flags(m)]
        self._forward = original_forward(module)
        self._outer = list(outer_values(module, self._forward))
        self._classes = [(m, m.__class__) for m in near]
        self._registries = [registry for m in near for registry in (m._parameters, m._buffers) if registry]
        self._kinds = [_tensor_kinds(registry) for registry in self._registries]
        self._states = [m.__dict__ for m in near]
        self._saved_states = [dict(state) for state in self._states]
        # One comparison in C for all of them: it looks at the identities first.
        self._insides = [inside for state in self._states for inside in _insides(state)]
        self._saved_insides = [inside.copy() for inside in self._insides]
        self.problem = _hook_problem(called) or _constant_problem(frame, [value for _, value in self._outer])

    def sees_change(self) -> bool:
        """Whether the module looks different now."""
        try:
            return (
                self._insides != self._saved_insides
                or (self._states != self._saved_states and self._sees_changed_state())
                or any(m.__class__ is not cls for m, cls in self._classes)
                or [_tensor_kinds(registry) for registry in self._registries] != self._kinds
                or original_forward(self._module) != self._forward
                or any(not _is_same(current(), value) for current, value in self._outer)
            )
        except (RuntimeError, ValueError, TypeError):  # tensors and arrays have no one truth value
            return True

    def _sees_changed_state(self) -> bool:
        # The package itself swaps forwards; whether the module's own was replaced is asked separately.
        pairs = zip(self._states, self._saved_states, strict=True)
        return any(state != saved and _without_swaps(state) != _without_swaps(saved) for state, saved in pairs)


_ABSENT = object()
_OWN_SWAPS = ("forward", "_old_forward")
_MANY = 1000


def _near(module: Module, called: Sequence[Module]) -> Iterator[Module]:
    """Yields the module, the modules that it calls, and what holds these (`ModuleList`, ...)."""
    calls = {id(child) for child in called}
    waiting, seen = [module, *called], set()
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        if current is module or id(current) not in calls:
            waiting += [child for child in current._modules.values() if child is not None]


def _flags(module: Module) -> Iterator[tuple[Module, str, Any]]:
    for name, value in module.__dict__.items():
        if type(value) in (bool, int, float, str):
            yield module, name, value


def _tensor_kinds(registry: Mapping[str, Tensor | None]) -> list[Any]:
    return [None if t is None else (t.dtype, t.device, t.requires_grad) for t in registry.values()]


def _insides(state: dict[str, Any]) -> Iterator[Any]:
    """Yields the containers among the attributes of a module, and the attributes of plain objects among them."""
    for name, value in state.items():
        if name in _NOT_LOOKED_INTO:
            continue
        if isinstance(value, (list, dict, set)):
            inside: Any = value
        elif isinstance(value, (Module, Tensor, type)) or not hasattr(value, "__dict__") or callable(value):
            continue
        else:
            inside = value.__dict__
        if len(inside) <= _MANY:
            yield inside


# Parameters and buffers are used as they are at the time, and what accelerate loads too.
_NOT_LOOKED_INTO = frozenset({"_parameters", "_buffers", "_hf_hook"})

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
# What these hooks do is either done to tensors, and so part of the graph, or only meant for the module's own run.
_KNOWN_HOOKS = ("transformers.", "torch.", "accelerate.", "graphpatch_notebook.")


def _hook_problem(called: Iterable[Module]) -> str | None:
    for module in called:
        if type(hook := module.__dict__.get("_hf_hook")).__module__.split(".")[0] not in ("builtins", "accelerate"):
            return f"a {type(hook).__name__} on a {type(module).__name__} that it calls would not run"
        for name in _HOOKS:
            for hook in module.__dict__.get(name, {}).values():
                if not str(getattr(hook, "__module__", "")).startswith(_KNOWN_HOOKS):
                    return f"hooks on a {type(module).__name__} that it calls would not run"
    return None


def _without_swaps(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in _OWN_SWAPS}


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b))


def _constant_problem(frame: Frame, outer: Sequence[Any]) -> str | None:
    """A tensor that comes from nowhere may be another one in the next run."""
    held = {id(value) for value in outer if isinstance(value, Tensor)}
    for value in frame.module.__dict__.values():
        if isinstance(value, (list, tuple)):
            held.update(map(id, value))
        elif isinstance(value, dict):
            held.update(map(id, value.values()))
    for node in frame.nodes:
        if node.kind == "constant":
            value = node.target()
            if id(value) not in held:
                return f"it uses a value ({node.spec}) that is neither made in it nor held by its module or its code"
    return None
