"""Maps over the arguments of an op: torch functions take tensors in tuples, lists, dicts and slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphpatch_notebook.values import rebuilt_sequence


def map_leaves(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns `value` with `leaf` applied to all that is no plain tuple, list, dict or slice; containers are new."""
    kind = type(value)
    if kind is torch.Size:  # holds integers only, and a leaf may become something else
        return tuple([leaf(item) for item in value])
    if kind is tuple or kind is list:
        return kind([map_leaves(item, leaf) for item in value])
    if isinstance(value, tuple):
        return rebuilt_sequence(value, [map_leaves(item, leaf) for item in value])
    if kind is dict:
        return {key: map_leaves(item, leaf) for key, item in value.items()}
    if kind is slice:
        return slice(map_leaves(value.start, leaf), map_leaves(value.stop, leaf), map_leaves(value.step, leaf))
    return leaf(value)
