"""Plain values as JSON: values that JSON has are written directly, others as an object with one field, their kind.

1, 0.5, "a", None, [..]     ->  the same
(1, 2)                      ->  {"tuple": [1, 2]}
torch.float32               ->  {"dtype": "float32"}
the value of the step 3     ->  {"step": 3}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from graphpatch_notebook.values import dict_key, dtype_name, plain_dict_key


class UnstorableError(Exception):
    """A value that cannot be written to a file (caught inside the package); the message names it."""


_AS_THEY_ARE = (bool, str, type(None))
_Write = Callable[[Any], Any]
_WRITERS: dict[type, Callable[[Any, _Write], Any]] = {
    int: lambda value, _: value if abs(value) < 2**63 else None,
    float: lambda value, _: value if math.isfinite(value) else {"float": repr(value)},
    list: lambda value, write: [write(item) for item in value],
    tuple: lambda value, write: {"tuple": [write(item) for item in value]},
    torch.Size: lambda value, write: {"size": [write(item) for item in value]},
    dict: lambda value, write: {"dict": [[write(key), write(item)] for key, item in value.items()]},
    slice: lambda value, write: {"slice": [write(part) for part in (value.start, value.stop, value.step)]},
    range: lambda value, write: {"range": [write(part) for part in (value.start, value.stop, value.step)]},
    complex: lambda value, write: {"complex": [write(value.real), write(value.imag)]},
    bytes: lambda value, _: {"bytes": value.hex()},
    type(Ellipsis): lambda *_: {"ellipsis": True},
    torch.device: lambda value, _: {"device": str(value)},
    torch.dtype: lambda value, _: {"dtype": dtype_name(value)},
    torch.layout: lambda value, _: {"layout": dtype_name(value)},
    torch.memory_format: lambda value, _: {"memory_format": dtype_name(value)},
}


def encoded(value: Any, leaf: Callable[[Any], Any] | None = None) -> Any:
    """Returns the JSON of `value`: plain values, in tuples, lists, dicts and slices; `leaf` writes all others."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind not in _WRITERS and not hasattr(value, "_fields"):  # containers of fx are immutable subclasses
        kind = next((base for base in (list, dict) if isinstance(value, base)), kind)
    if kind in _WRITERS:
        found = _WRITERS[kind](value, lambda inner: encoded(inner, leaf))
        if found is not None:
            return found
    elif leaf is not None:
        return leaf(value)
    raise UnstorableError(f"it holds an object of type {kind.__name__}, or a number that is too large")


def decoded(value: Any, leaves: Mapping[str, Callable[[Any], Any]] | None = None) -> Any:
    """Returns the value that JSON stands for; `leaves` read other kinds than those of plain values, by kind.

    Raises:
        ValueError, TypeError, LookupError: It stands for none.
    """
    if type(value) is list:
        return [decoded(item, leaves) for item in value]
    if type(value) is not dict:
        return value
    ((kind, inside),) = value.items()
    if leaves is not None and kind in leaves:
        return leaves[kind](inside)
    if kind in _OF_TEXT:
        return _OF_TEXT[kind](inside)
    if kind == "dict":
        return {decoded(key, leaves): decoded(item, leaves) for key, item in inside}
    return _OF_ITEMS[kind]([decoded(item, leaves) for item in inside])


@cache
def _constants(kind: type) -> dict[str, Any]:
    return {str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is kind}


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of this name, or raises a `LookupError`."""
    return _constants(torch.dtype)[name]  # type: ignore[no-any-return]


_OF_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "size": torch.Size,
    "slice": lambda parts: slice(*parts),
    "range": lambda parts: range(*parts),
    "complex": lambda parts: complex(*parts),
}
_OF_TEXT: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": bytes.fromhex,
    "ellipsis": lambda _: Ellipsis,
    "device": torch.device,
    "dtype": dtype_of,
    "layout": lambda name: _constants(torch.layout)[name],
    "memory_format": lambda name: _constants(torch.memory_format)[name],
}


def encoded_key(key: Any) -> Any:
    """Returns the JSON of the key of a child in its container."""
    plain = plain_dict_key(key)
    return encoded(key) if plain is key else {"tuple": [encoded(plain)]}


def decoded_key(value: Any) -> Any:
    """Returns the key of a child in its container: a name, a position, or another key of a dict."""
    key = decoded(value)
    return dict_key(key[0]) if type(key) is tuple else key
