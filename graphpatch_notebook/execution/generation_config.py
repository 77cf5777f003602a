"""A generation config of its own for the `PatchableGraph` of a transformers model, which need not be installed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from graphpatch_notebook.execution.stand_in import StandIn
from graphpatch_notebook.torch_compat import EagerCode

GENERATION_CONFIG = "generation_config"
# Bound to the object that `generate` runs on: a model must not keep those of a stand-in.
_BOUND = ("_compiled_call", "_last_compile_config")


def copied_config(module: Module) -> Any:
    """Returns a copy of a model's generation config; `None` where the model has none, or cannot generate."""
    config = module.__dict__.get(GENERATION_CONFIG)
    return copy.deepcopy(config) if callable(getattr(module, "generate", None)) else None


def generating_with(config: Any, generate: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `generate`, a method of a model, as it would be if `config` were the generation config of the model.

    The model never sees `config`: where it differs from the model's, the method runs on a stand-in.
    """

    def generate_with(*args: Any, **kwargs: Any) -> Any:
        module: Module = generate.__self__  # type: ignore[attr-defined]  # a bound method
        if _are_equal(config, module.__dict__.get(GENERATION_CONFIG)):
            return generate(*args, **kwargs)
        stand_in = StandIn(module, {}, {GENERATION_CONFIG: config})
        try:
            return stand_in.bind(generate)(*args, **kwargs)
        finally:
            stand_in.hand_on_changes(but=_BOUND)

    return generate_with


def compiling_nothing(module: Module) -> dict[str, Any]:
    """Returns the keyword arguments that keep `generate` from compiling decoding steps, as it does with a static cache.

    They are for patched runs, and empty where this torch can be asked to run what is compiled as it was written: with
    an older one, patches of operations would be lost in all but the first step.
    """
    is_known = hasattr(getattr(module, GENERATION_CONFIG, None), "disable_compile")
    return {"disable_compile": True} if is_known and not EagerCode.is_possible else {}


def _are_equal(one: Any, other: Any) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(vars(one) == vars(other)))
    except (RuntimeError, TypeError, ValueError):  # tensors among the values
        return False
