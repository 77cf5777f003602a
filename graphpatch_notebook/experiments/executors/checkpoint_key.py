"""Digests of plain data and of weights: whether a sweep is the one that a file was written by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import BuiltinFunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments import metrics
from graphpatch_notebook.patches.kinds import AddPatch, Patch, ReplacePatch, ZeroPatch
from graphpatch_notebook.values import children

_SIMPLE = {
    bool, int, float, complex, str, bytes, type(None), type(...), slice, range, torch.dtype, torch.device,
}  # fmt: skip
_PLAIN_PATCHES = {ZeroPatch, AddPatch, ReplacePatch}
_SAMPLED = 1024


class Digester:
    """Makes digests of plain data: equal for what is equal, in this process and in others.

    Plain are numbers, texts, slices, tensors, arrays, containers of these, functions of C such as `torch.sum`, and the
    package's metrics, `ZeroPatch`, `AddPatch` and `ReplacePatch` that hold such data. Code is not looked at: of other
    objects only the class is told (of other patches also the fields), and a key must tell the rest.

    Args:
        key: What the user gave as `checkpoint_key`.
    """

    def __init__(self, key: str) -> None:
        self._has_key = key != ""
        # Cells share large tensors. With the object, or its id may become another's.
        self._known: dict[int, tuple[Any, str]] = {}

    def digest(self, value: Any, what: str) -> str:
        """Returns the digest of a value as 16 hexadecimal digits.

        Args:
            value: The value.
            what: What it is called in messages.

        Raises:
            ExperimentError: There is something in it that is not plain, and no key.
        """
        return hashlib.sha256(repr(self._description(value, what)).encode()).hexdigest()[:16]

    def _description(self, value: Any, what: str) -> Any:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if kind in _SIMPLE:
            return name, repr(value)
        if _has_memory(value):
            if id(value) not in self._known:
                self._known[id(value)] = value, _memory_digest(value)
            return name, self._known[id(value)][1]
        if isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, (type, ModuleType, type(None))):
            return name, value.__module__, value.__qualname__
        if isinstance(value, (set, frozenset)):
            return name, sorted(repr(self._description(item, what)) for item in value)
        inside, is_dataclass = children(value), not isinstance(value, (list, tuple, Mapping))
        is_ours = kind in _PLAIN_PATCHES or kind.__module__ == metrics.__name__
        if not self._has_key and (inside is None or (is_dataclass and not is_ours)):
            raise ExperimentError(
                f"checkpoint= does not see what a {kind.__name__} does ({what}): give a text to tell this sweep from "
                'others, and change it when that changes: checkpoint="sweep.jsonl", checkpoint_key="version 1"'
            )
        if inside is None or (is_dataclass and not is_ours and not isinstance(value, Patch)):
            return name
        # The field in which a probe keeps what it saw is private.
        public = [(key, part) for key, part in inside if not (is_dataclass and str(key).startswith("_"))]
        return name, [(repr(key), self._description(part, what)) for key, part in public]


def weights_digest(module: Module) -> str:
    """Returns a digest of names, shapes, dtypes and some values of all parameters and buffers of a module."""
    found = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        step = max(1, -(-tensor.numel() // _SAMPLED))
        sample = tensor.detach().reshape(-1)[::step] if _has_memory(tensor) else None
        found[name] = (str(tensor.dtype), tuple(tensor.shape), sample)
    return Digester("").digest(found, "the weights")


def _has_memory(value: Any) -> bool:
    """Whether a value is a tensor or an array of plain numbers: not sparse, quantized, sharded or on `meta`."""
    if type(value) in (Tensor, torch.nn.Parameter):
        return value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized
    return isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject


def _memory_digest(value: Any) -> str:
    memory = value
    if isinstance(value, Tensor):
        memory = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    memory = np.ascontiguousarray(memory).reshape(-1).view(np.uint8)
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(memory.data).hexdigest()}"
