"""Digests of plain data and of weights: whether a sweep is the one that a file was written by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments import metrics
from graphpatch_notebook.patches import AddPatch, Patch, ReplacePatch, ZeroPatch

_SIMPLE = {bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device}
_PLAIN_PATCHES = {ZeroPatch, AddPatch, ReplacePatch}
_SAMPLED = 1024


class Digester:
    """Makes digests of plain data: equal for what is equal, in this process and in others.

    Plain are numbers, texts, slices, tensors, arrays, containers of these, functions of C such as `torch.sum`, and the
    package's metrics, `ZeroPatch`, `AddPatch` and `ReplacePatch` that hold such data. Code is not looked at: of other
    objects only the class is told (of other patches also the attributes), and a key must tell the rest.

    Args:
        key: What the user gave as `checkpoint_key`.
    """

    def __init__(self, key: str) -> None:
        self._has_key = key != ""
        self._tensors: dict[Tensor, bytes] = {}  # cells share large ones

    def digest(self, value: Any, what: str) -> str:
        """Returns the digest of a value as 16 hexadecimal digits.

        Args:
            value: The value.
            what: What it is called in messages.

        Raises:
            ExperimentError: There is something in it that is not plain, and no key.
        """
        return self._bytes(value, what).hex()[:16]

    def _bytes(self, value: Any, what: str) -> bytes:
        if isinstance(value, Tensor) and value in self._tensors:
            return self._tensors[value]
        kind = type(value)
        result = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}\n".encode())
        if kind in _SIMPLE:
            result.update(repr(value).encode())
        elif _has_memory(value):
            result.update(f"{value.dtype} {tuple(value.shape)}\n".encode())
            result.update(_memory(value))
        elif isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, (type, ModuleType, type(None))):
            result.update(f"{value.__module__} {value.__qualname__}".encode())
        else:
            for part in self._parts(value, what):
                result.update(self._bytes(part, what))
        if isinstance(value, Tensor):
            self._tensors[value] = result.digest()
        return result.digest()

    def _parts(self, value: Any, what: str) -> Iterable[Any]:
        if isinstance(value, (slice, range)):
            return (value.start, value.stop, value.step)
        if isinstance(value, (list, tuple)):
            return value
        if isinstance(value, Mapping):
            return [part for item in value.items() for part in item]
        if isinstance(value, (set, frozenset)):
            return sorted(self._bytes(item, what) for item in value)
        kind = type(value)
        if kind not in _PLAIN_PATCHES and kind.__module__ != metrics.__name__ and not self._has_key:
            raise ExperimentError(
                f"checkpoint= does not see what a {kind.__name__} does ({what}): give a text to tell this sweep from "
                'others, and change it when that changes: checkpoint="sweep.jsonl", checkpoint_key="version 1"'
            )
        if not isinstance(value, Patch) and kind.__module__ != metrics.__name__:
            return ()
        return sorted(item for item in vars(value).items() if not item[0].startswith("_"))  # what a probe has kept


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


def _memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
