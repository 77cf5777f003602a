"""Whose hook is it? Hooks of this package and of libraries do other things to a run than those of users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

_OWN = __name__.partition(".")[0]
_LIBRARIES = ("torch", "transformers", "accelerate")
_COLLECTING = "transformers.utils.output_capturing"


HookOwner: TypeAlias = Literal["own", "collecting", "library", "user"]
"""What a hook on a module belongs to.

own: A patch context. Without patches it does nothing.
collecting: How transformers collects hidden states: it is on all layers, and does nothing unless these are requested.
library: How a model works: it moves weights, or splits and joins values.
"""


def owner_of(hook: Callable[..., Any]) -> HookOwner:
    """Returns what a hook on a module belongs to.

    Example:
        >>> import torch
        >>> owner_of(print), owner_of(torch.nn.ReLU())
        ('user', 'library')
    """
    module = str(getattr(hook, "__module__", ""))
    package = module.partition(".")[0]
    if package == _OWN:
        return "own"
    if module.startswith(_COLLECTING):
        return "collecting"
    return "library" if package in _LIBRARIES else "user"


def is_inert(hook: Callable[..., Any]) -> bool:
    """Whether a hook neither changes nor keeps anything by itself."""
    return owner_of(hook) in ("own", "collecting")
