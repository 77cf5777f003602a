"""Digests of data, which are equal for equal data in all processes: to compare patches, inputs and settings."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.values import IMMUTABLE, tensor_bytes

_DEPTH = 3
"""How many objects inside each other are read: the last are known by their class alone."""


def digest(*values: Any) -> str:
    """Returns a digest of values as hexadecimal digits.

    Tensors, arrays, numbers, texts and containers of these count by their contents, functions by their names and code,
    and other objects, such as patches, by their class and public fields. What functions refer to does not count.

    Example:
        >>> digest([1, "a"]) == digest([1, "a"]), digest([1, "a"]) == digest((1, "a"))
        (True, False)
    """
    return hashlib.sha256(repr(_described(values, {}, _DEPTH)).encode()).hexdigest()


def _described(value: Any, known: dict[int, Any], depth: int) -> Any:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        if id(value) not in known:  # cells of a sweep share large tensors
            known[id(value)] = value, (name, str(value.dtype), tuple(value.shape), _memory_digest(value))
        return known[id(value)][1]
    if isinstance(value, IMMUTABLE):
        return name, repr(value)
    if isinstance(value, Mapping):
        return name, [(str(key), _described(item, known, depth)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return name, sorted(repr(_described(item, known, depth)) for item in value)
    if isinstance(value, (list, tuple)):
        return name, [_described(item, known, depth) for item in value]
    if inspect.isroutine(value):
        code = getattr(value, "__code__", None)
        facts = () if code is None else (code.co_code, [each for each in code.co_consts if isinstance(each, IMMUTABLE)])
        return name, getattr(value, "__qualname__", ""), facts
    fields = sorted(getattr(value, "__dict__", {}).items()) if depth else []
    # What a patch keeps for itself is private.
    return name, [(key, _described(item, known, depth - 1)) for key, item in fields if not key.startswith("_")]


def _memory_digest(value: Any) -> str:
    """Returns a digest of the numbers of a tensor or an array; of those that are not all here, an empty text."""
    if isinstance(value, Tensor):
        is_plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided
        is_here = is_plain and not value.is_meta and not value.is_quantized
        return hashlib.sha256(tensor_bytes(value).data).hexdigest() if is_here else ""
    return hashlib.sha256(repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()).hexdigest()
