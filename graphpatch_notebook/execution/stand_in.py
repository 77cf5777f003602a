"""Runs a module's forward with other parameters, buffers or attributes, without touching the module.

The forward is bound to a *stand-in*: a shallow copy of the module, which shares everything with it but the patched
tensors. So other threads, and the user, never see them. What the forward itself changes is handed on to the module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.observers import innermost_forward, is_swapped, observer, original_forward
from graphpatch_notebook.capture.quantization.packed_weights import Packing, held_by
from graphpatch_notebook.errors import PatchValueError

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_ORIGINAL = "_graphpatch_original"


class StandIn:
    """A module with some tensors replaced.

    Args:
        module: The module.
        replacements: New tensors by attribute path (`weight`, `emb.weight`).
        attributes: New plain attributes by name.
    """

    def __init__(
        self, module: Module, replacements: dict[str, Tensor], attributes: Mapping[str, Any] | None = None
    ) -> None:
        self._original = module
        self._inner: list[StandIn] = []
        self.module: Module = object.__new__(type(module))
        # A dict of its own first: some models override `__setattr__`.
        state = dict(module.__dict__)
        for registry in _REGISTRIES:
            state[registry] = type(state[registry])(state[registry])
        self.module.__dict__.update(state)
        self.module.__dict__.update(attributes or {})
        self.module.__dict__[_ORIGINAL] = module
        self._put(replacements)
        self._remember()

    def _remember(self) -> None:
        """Notes the state after which changes are the forward's own."""
        self._before = dict(self.module.__dict__)
        self._registered_before = {name: dict(self.module.__dict__[name]) for name in _REGISTRIES}

    def _put(self, replacements: dict[str, Tensor]) -> None:
        state = self.module.__dict__
        below: dict[str, dict[str, Tensor]] = {}
        swapped: dict[int, Tensor] = {}
        for path, new in replacements.items():
            name, _, rest = path.partition(".")
            if rest:
                below.setdefault(name, {})[rest] = new
                continue
            for holder in (state["_parameters"], state["_buffers"], state):
                if name in holder and holder[name] is not None:
                    swapped[id(holder[name])] = new
        self._exchange(state, swapped)
        for name, inside in below.items():
            child = state["_modules"].get(name)
            if child is not None:
                inner = StandIn(child, inside)
                inner.forget_in_calls(inside)
                self._inner.append(inner)
                state["_modules"][name] = inner.module

    @staticmethod
    def _exchange(state: dict[str, Any], swapped: dict[int, Tensor]) -> None:
        """Puts new tensors wherever the module holds the old ones: under each name, and in lists (as `nn.LSTM`)."""
        for holder in (state["_parameters"], state["_buffers"], state):
            for name, value in list(holder.items()):
                if name in _REGISTRIES:
                    continue
                if id(value) in swapped:
                    holder[name] = swapped[id(value)]
                elif type(value) in (list, tuple) and any(id(item) in swapped for item in value):
                    holder[name] = type(value)(swapped.get(id(item), item) for item in value)

    def bind(self, forward: Callable[..., Any], original: Module | None = None) -> Callable[..., Any]:
        """Returns `forward` of the module (or of `original`, of which the module is a stand-in), bound to the stand-in.

        Raises:
            PatchValueError: The forward is a function of its own that cannot be bound to another module.
        """
        original = original or self._original
        if getattr(forward, "__self__", None) is original and hasattr(forward, "__func__"):
            return forward.__func__.__get__(self.module)  # type: ignore[no-any-return]
        if isinstance(forward, functools.partial) and forward.args and forward.args[0] is original:
            return functools.partial(forward.func, self.module, *forward.args[1:], **forward.keywords)
        raise PatchValueError(
            f"the parameters of this {type(self._original).__name__} cannot be patched: its forward was replaced by "
            f"{forward!r}, which is not a method of it; patch its inputs, its output, or the op that uses the parameter"
        )

    def forget_in_calls(self, replacements: dict[str, Tensor]) -> None:
        """Makes calls of the stand-in see the module's own tensors again.

        They are frames of their own, with nodes of their own. What the module's hooks did to the stand-in before the
        call (as pruning does) is kept.
        """
        original = self._original
        own = {id(new): tensor_at(original, path) for path, new in replacements.items()}
        forward = original_forward(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            restored = StandIn(self.module, {})
            self._exchange(restored.module.__dict__, own)
            restored._remember()
            bound = restored.bind(forward, original)
            watching = observer.get()
            try:
                if watching is None or not is_swapped(original):
                    return bound(*args, **kwargs)
                return watching.on_forward(original, bound, args, kwargs)
            finally:
                restored.hand_on_changes()

        self.module.__dict__[innermost_forward(original)] = call
        self._remember()

    def hand_on_changes(self, but: Sequence[str] = ()) -> None:
        """Does to the module what the forward did to the stand-in, all `but` the attributes of these names."""
        for inner in self._inner:
            inner.hand_on_changes()
        after = {name: value for name, value in self.module.__dict__.items() if name not in but}
        _hand_on({name: self._before[name] for name in self._before if name not in but}, after, self._original.__dict__)
        for name, before in self._registered_before.items():
            _hand_on(before, self.module.__dict__[name], self._original.__dict__[name])


def original_of(module: Module) -> Module:
    """Returns the user's module that `module` stands in for; `module` itself where it is that."""
    while (original := module.__dict__.get(_ORIGINAL)) is not None:
        module = original
    return module


def tensor_at(module: Module, path: str) -> Any:
    """Returns the tensor that `module` holds at an attribute path."""
    *parents, name = path.split(".")
    for parent in parents:
        child = module._modules.get(parent)  # an attribute of that name may be something else: `half`, say
        module = child if child is not None else getattr(module, parent)
    for holder in (module._parameters, module._buffers, module.__dict__):
        if name in holder:
            return holder[name]
    raise PatchValueError(f"{type(module).__name__} no longer has the {name!r} that was captured")


def held_value(module: Module, path: str) -> Any:
    """Returns what the node of a tensor that `module` holds stands for: the tensor, or the weight packed in it."""
    packed = held_by(module, path)
    return tensor_at(module, path) if packed is None else packed[0].unpacked(packed[1])


def bound_with(
    module: Module, replacements: dict[str, Tensor], forward: Callable[..., Any]
) -> tuple[StandIn, Callable[..., Any]]:
    """Returns a stand-in for `module` with some tensors replaced, and what runs in place of `forward` with these.

    Raises:
        PatchValueError: The forward cannot run with these tensors.
    """
    plain = dict(replacements)
    unpacked: tuple[Packing, Tensor] | None = None
    for path in replacements:
        packed = held_by(module, path)
        if packed is None:
            continue
        if packed[1] is not module:
            raise PatchValueError(
                f"{path!r} is the quantized weight of another module ({type(packed[1]).__name__}), and can only be "
                "probed here: patch it in the call of that module"
            )
        unpacked = packed[0], plain.pop(path)
    stand_in = StandIn(module, plain)
    if unpacked is None:
        return stand_in, stand_in.bind(forward)
    return stand_in, unpacked[0].bound(stand_in.module, unpacked[1], forward)


def _hand_on(before: dict[str, Any], after: dict[str, Any], to: dict[str, Any]) -> None:
    to.update({name: value for name, value in after.items() if name not in before or before[name] is not value})
    for name in before:
        if name not in after:
            to.pop(name, None)
