"""Maps over the arguments of an op: torch functions take tensors in tuples, lists, dicts and slices.

Named tuples are leaves here: their classes may refuse to hold anything but what they were made for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def map_leaves(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns `value` with `leaf` applied to all that is no plain tuple, list, dict or slice; containers are new."""
    kind = type(value)
    if kind is torch.Size:  # holds integers only, and a leaf may become something else
        return tuple([leaf(item) for item in value])
    if kind is tuple or kind is list:
        return kind([map_leaves(item, leaf) for item in value])
    if kind is dict:
        return {key: map_leaves(item, leaf) for key, item in value.items()}
    if kind is slice:
        return slice(map_leaves(value.start, leaf), map_leaves(value.stop, leaf), map_leaves(value.step, leaf))
    return leaf(value)
