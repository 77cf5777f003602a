"""Whose hook is it? Hooks of this package and of libraries do other things to a run than those of users."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

_OWN = __name__.partition(".")[0]
_LIBRARIES = ("torch", "transformers", "accelerate")
_COLLECTING = "transformers.utils.output_capturing"


class HookOwner(enum.Enum):
    """What a hook on a module belongs to."""

    OWN = enum.auto()
    """A patch context. Without patches it does nothing."""
    COLLECTING = enum.auto()
    """How transformers collects hidden states: it is on all layers, and does nothing unless these are requested."""
    LIBRARY = enum.auto()
    """How a model works: it moves weights, or splits and joins values."""
    USER = enum.auto()


def owner_of(hook: Callable[..., Any]) -> HookOwner:
    """Returns what a hook on a module belongs to.

    Example:
        >>> import torch
        >>> owner_of(print).name, owner_of(torch.nn.ReLU()).name
        ('USER', 'LIBRARY')
    """
    module = str(getattr(hook, "__module__", ""))
    package = module.partition(".")[0]
    if package == _OWN:
        return HookOwner.OWN
    if module.startswith(_COLLECTING):
        return HookOwner.COLLECTING
    return HookOwner.LIBRARY if package in _LIBRARIES else HookOwner.USER


def is_inert(hook: Callable[..., Any]) -> bool:
    """Whether a hook neither changes nor keeps anything by itself."""
    return owner_of(hook) in (HookOwner.OWN, HookOwner.COLLECTING)
