"""How the values of axes, and metrics, are written down: in coordinates, files and messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor


def plain_label(value: Any) -> bool | int | float | str:
    """Returns the value of an axis as one that coordinates and files can hold.

    Example:
        >>> plain_label(np.int64(3)), plain_label("wte.output"), plain_label(slice(0, 2))
        (3, 'wte.output', 'slice(0, 2, None)')
    """
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and value.ndim == 0:
        value = value.item()
    return value if type(value) in (bool, int, float, str) else str(value)


def coordinate(name: str, values: Sequence[Any]) -> tuple[str, np.ndarray[Any, Any]]:
    """Returns the values of an axis as `xarray` takes coordinates; of mixed ones each keeps its type."""
    plain = [plain_label(value) for value in values]
    is_mixed = len({type(value) for value in plain}) > 1
    return (name, np.array(plain, dtype=object) if is_mixed else np.array(plain))


def metric_name(metric: Callable[[Any], Any]) -> str:
    """Returns what a metric is called: its `name`, that of the function, or its class.

    Example:
        >>> metric_name(max), metric_name(functools.partial(max, 1))
        ('max', 'max')
    """
    while isinstance(metric, functools.partial):
        metric = metric.func
    for name in (getattr(metric, "name", None), getattr(metric, "__name__", None)):
        if isinstance(name, str):
            return name
    return type(metric).__name__
