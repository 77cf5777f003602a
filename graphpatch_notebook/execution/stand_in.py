"""Runs a module's forward with other parameters, buffers or attributes, without touching the module.

The forward is bound to a *stand-in*: a shallow copy of the module, which shares everything with it but the patched
tensors. So other threads, and the user, never see them. What the forward itself changes is handed on to the module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.forward_swap import innermost_forward
from graphpatch_notebook.errors import PatchValueError

_REGISTRIES = ("_parameters", "_buffers", "_modules")


class StandIn:
    """A module with some tensors replaced.

    Args:
        module: The module.
        replacements: New tensors by attribute path (`weight`, `emb.weight`).
    """

    def __init__(self, module: Module, replacements: dict[str, Tensor]) -> None:
        self._original = module
        self._inner: list[StandIn] = []
        self.module: Module = object.__new__(type(module))
        # A dict of its own first: some models override `__setattr__`.
        state = dict(module.__dict__)
        for registry in _REGISTRIES:
            state[registry] = type(state[registry])(state[registry])
        self.module.__dict__.update(state)
        self._put(replacements)
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
                # Calls of the child are frames of their own, with nodes of their own: they see the child as it is.
                attribute = innermost_forward(child)
                inner.module.__dict__.setdefault(attribute, getattr(child, attribute))
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

    def bind(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `forward` of the module, bound to the stand-in.

        Raises:
            PatchValueError: The forward is a function of its own that cannot be bound to another module.
        """
        if getattr(forward, "__self__", None) is self._original and hasattr(forward, "__func__"):
            return forward.__func__.__get__(self.module)  # type: ignore[no-any-return]
        if isinstance(forward, functools.partial) and forward.args and forward.args[0] is self._original:
            return functools.partial(forward.func, self.module, *forward.args[1:], **forward.keywords)
        raise PatchValueError(
            f"the parameters of this {type(self._original).__name__} cannot be patched: its forward was replaced by "
            f"{forward!r}, which is not a method of it; patch its inputs, its output, or the op that uses the parameter"
        )

    def hand_on_changes(self) -> None:
        """Does to the module what the forward did to the stand-in."""
        for inner in self._inner:
            inner.hand_on_changes()
        _hand_on(self._before, self.module.__dict__, self._original.__dict__)
        for name, before in self._registered_before.items():
            _hand_on(before, self.module.__dict__[name], self._original.__dict__[name])


def _hand_on(before: dict[str, Any], after: dict[str, Any], to: dict[str, Any]) -> None:
    for name, value in after.items():
        if name not in before or before[name] is not value:
            to[name] = value
    for name in before:
        if name not in after:
            to.pop(name, None)
