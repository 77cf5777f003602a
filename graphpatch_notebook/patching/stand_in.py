"""Runs a module's forward with other parameters, buffers or attributes, without touching the module.

The forward is bound to a *stand-in*: a shallow copy of the module, which shares everything with it except the patched
tensors. So other threads, and the user, never see these. Changes by the forward itself are copied to the module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture import Packing, held_by, passed_as, unpacked
from graphpatch_notebook.capture.modules import (
    REGISTRIES,
    held_at,
    innermost_forward,
    is_swapped,
    observer,
    original_forward,
)
from graphpatch_notebook.errors import PatchValueError
from graphpatch_notebook.torch_compat import own_call

_ORIGINAL = "_graphpatch_original"


class StandIn:
    """A module with some tensors (by attribute path: `weight`, `emb.weight`) and plain attributes replaced."""

    def __init__(
        self, module: Module, replacements: dict[str, Tensor], attributes: Mapping[str, Any] | None = None
    ) -> None:
        self._original = module
        self._inner: list[StandIn] = []
        self.module: Module = object.__new__(type(module))
        state = self.module.__dict__  # some models override `__setattr__`
        state.update(module.__dict__)
        if (swapped := state.get("_call_impl")) is not None:  # calls the module itself
            observed = swapped.func if isinstance(swapped, functools.partial) else swapped.observed
            state["_call_impl"] = functools.partial(observed, own_call(self.module))
        for registry in REGISTRIES:
            state[registry] = type(state[registry])(state[registry])
        state.update({**(attributes or {}), _ORIGINAL: module})
        below: dict[str, dict[str, Tensor]] = {}
        new: dict[int, Tensor] = {}
        for path, tensor in replacements.items():
            name, _, rest = path.partition(".")
            if rest:
                below.setdefault(name, {})[rest] = tensor
            else:
                new[id(tensor_at(module, path))] = tensor
        self._exchange(new)
        for name, inside in below.items():
            if (child := state["_modules"].get(name)) is not None:
                inner = StandIn(child, inside)
                inner._forget_in_calls(inside)
                self._inner.append(inner)
                state["_modules"][name] = inner.module
        self._remember()

    def _exchange(self, new: Mapping[int, Tensor]) -> None:
        """Puts other tensors wherever the module holds some: under each name, and in lists (as `nn.LSTM`)."""
        state = self.module.__dict__
        for holder in (state["_parameters"], state["_buffers"], state):
            for name, value in [item for item in holder.items() if item[0] not in REGISTRIES]:
                if id(value) in new:
                    holder[name] = new[id(value)]
                elif type(value) in (list, tuple) and any(id(item) in new for item in value):
                    holder[name] = type(value)(new.get(id(item), item) for item in value)

    def _remember(self) -> None:
        """Notes the state after which changes are the forward's own."""
        state = self.module.__dict__
        self._before = [dict(state), *(dict(state[name]) for name in REGISTRIES)]

    def _forget_in_calls(self, replacements: dict[str, Tensor]) -> None:
        """Makes calls of the stand-in see the module's own tensors: calls are separate frames, with separate nodes.

        What the module's hooks did to the stand-in before the call (as pruning does) is kept.
        """
        original = self._original
        own = {id(new): tensor_at(original, path) for path, new in replacements.items()}
        forward = original_forward(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            restored = StandIn(self.module, {})
            restored._exchange(own)
            restored._remember()
            bound, watching = restored.bind(forward, original), observer.get()
            try:
                if watching is None or not is_swapped(original):
                    return bound(*args, **kwargs)
                return watching.on_forward(original, bound, args, kwargs)
            finally:
                restored.copy_changes_back()

        self.module.__dict__[innermost_forward(original)] = call
        self._remember()

    def bind(self, forward: Callable[..., Any], original: Module | None = None) -> Callable[..., Any]:
        """Returns `forward` of the module (of `original`, if the module is a stand-in itself), bound to the stand-in.

        A function that cannot be bound to another module is a `PatchValueError`.
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

    def copy_changes_back(self, but: Sequence[str] = ()) -> None:
        """Copies to the module what the forward changed in the stand-in, except the attributes named in `but`."""
        for inner in self._inner:
            inner.copy_changes_back()
        now, own = self.module.__dict__, self._original.__dict__
        places = [(now, own), *((now[name], own[name]) for name in REGISTRIES)]
        for before, (after, to) in zip(self._before, places, strict=True):
            for name in [name for name in {**before, **after} if name not in but]:
                if name not in after:
                    to.pop(name, None)
                elif name not in before or before[name] is not after[name]:
                    to[name] = after[name]


def original_of(module: Module) -> Module:
    """Returns the user's module that `module` is a stand-in for; `module` itself if it is not one."""
    while (original := module.__dict__.get(_ORIGINAL)) is not None:
        module = original
    return module


def tensor_at(module: Module, path: str) -> Any:
    """Returns the tensor that `module` holds at an attribute path."""
    found = held_at(module, path)
    if not isinstance(found, Tensor):
        raise PatchValueError(f"{type(module).__name__} no longer has the {path!r} that was captured")
    return found


def held_value(module: Module, path: str) -> Any:
    """Returns the value of the node of a tensor of `module`: the tensor, or the unpacked weight."""
    packed = held_by(module, path)
    return unpacked(tensor_at(module, path)) if packed is None else packed[0].unpacked(packed[1])


def bound_with(
    module: Module, replacements: dict[str, Tensor], forward: Callable[..., Any]
) -> tuple[StandIn, Callable[..., Any]]:
    """Returns a stand-in for `module` with some tensors replaced, and the function to call instead of `forward`."""
    plain = dict(replacements)
    weight: tuple[Packing, Tensor] | None = None
    for path, value in replacements.items():
        packed = held_by(module, path)
        if packed is None:
            held = tensor_at(module, path)
            plain[path] = value if unpacked(held) is held else passed_as(held, value)
            continue
        if packed[1] is not module:
            raise PatchValueError(
                f"{path!r} is the quantized weight of another module ({type(packed[1]).__name__}), and can only be "
                "probed here: patch it in the call of that module"
            )
        weight = packed[0], plain.pop(path)
    stand_in = StandIn(module, plain)
    if computed := [path for path, value in plain.items() if tensor_at(stand_in.module, path) is not value]:
        raise PatchValueError(
            f"{type(module).__name__} computes its {computed[0]!r} now, and held it when it was captured (a "
            "parametrization?): capture it again, PatchableGraph(model, ...)"
        )
    if weight is None:
        return stand_in, stand_in.bind(forward)
    return stand_in, weight[0].bound(stand_in.module, weight[1], forward)


# -- a generation config of its own, for models of transformers (which need not be installed) --------------------------

GENERATION_CONFIG = "generation_config"
# Bound to the object that `generate` runs on, so these are not copied from a stand-in to the model.
_BOUND = ("_compiled_call", "_last_compile_config")


def generating_with(config: Any, generate: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method `generate` of a model, run on a stand-in as if `config` were the model's generation config."""

    @functools.wraps(generate)
    def generate_with(*args: Any, **kwargs: Any) -> Any:
        stand_in = StandIn(generate.__self__, {}, {GENERATION_CONFIG: config})  # type: ignore[attr-defined]
        try:
            return stand_in.bind(generate)(*args, **kwargs)
        finally:
            stand_in.copy_changes_back(but=_BOUND)

    return generate_with
