"""Plain values as JSON: values that JSON has are written directly, others as an object with one field, its kind.

1, 0.5, "a", None, [..]     ->  the same
(1, 2)                      ->  {"tuple": [1, 2]}
torch.float32               ->  {"dtype": "float32"}
the value of the node 3     ->  {"node": 3}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphpatch_notebook.serialization.codecs.reading import JsonValue
from graphpatch_notebook.values import dict_key, dtype_name, plain_dict_key

_DEEPEST = 100
_WIDEST = 2**64
_KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class UnstorableError(Exception):
    """A value that cannot be written to a file (caught inside the package); the message names it."""


def encoded(value: Any, leaf: Callable[[Any], Any] | None = None) -> Any:
    """Returns the JSON of `value`: plain values, in tuples, lists, dicts and slices; `leaf` writes all others."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, (tuple, list, dict, slice, range)):
        found = _encoded_container(value, leaf)
        if found is not None:
            return found
    elif isinstance(value, (int, float, complex)) and kind in (int, float, complex):
        return _encoded_number(value)
    elif kind is bytes:
        return {"bytes": value.hex()}
    elif value is Ellipsis:
        return {"ellipsis": True}
    elif kind is torch.device:
        return {"device": str(value)}
    else:
        for name, plain in _KINDS.items():
            if kind is plain:
                return {name: dtype_name(value)}
    if leaf is not None:
        return leaf(value)
    raise UnstorableError(f"it holds an object of type {kind.__name__}")


def _encoded_number(value: int | float | complex) -> Any:
    if isinstance(value, int):
        if abs(value) >= _WIDEST:
            raise UnstorableError(f"it holds the number {str(value)[:20]}..., which is too large")
        return value
    if isinstance(value, complex):
        return {"complex": [_encoded_number(value.real), _encoded_number(value.imag)]}
    return value if math.isfinite(value) else {"float": repr(value)}


def _encoded_container(value: Any, leaf: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, torch.Size):
        return {"size": [encoded(item, leaf) for item in value]}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"tuple": [encoded(item, leaf) for item in value]}
    if isinstance(value, list):
        return [encoded(item, leaf) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encoded(key, leaf), encoded(item, leaf)] for key, item in value.items()]}
    if isinstance(value, slice):
        return {"slice": [encoded(part, leaf) for part in (value.start, value.stop, value.step)]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    return None


def decoded(item: JsonValue, leaves: Mapping[str, Callable[[JsonValue], Any]] | None = None, depth: int = 0) -> Any:
    """Returns the value of a JSON item; `leaves` read other kinds than those of plain values, by kind."""
    if depth > _DEEPEST:
        raise item.error("it is nested too deeply")
    value = item.value
    if value is None or type(value) in (bool, str, float):
        return value
    if type(value) is int:
        return item.whole(-_WIDEST, _WIDEST)
    if type(value) is list:
        return [decoded(child, leaves, depth + 1) for child in item.items()]
    entries = item.entries()
    if len(entries) != 1:
        raise item.error("there should be one field that names the kind of value")
    ((name, inside),) = entries.items()
    if leaves is not None and name in leaves:
        return leaves[name](inside)
    reader = _READERS.get(name)
    if reader is None:
        raise item.error(f"{name[:40]!r} is not a kind of value")
    return reader(inside, lambda child: decoded(child, leaves, depth + 1))


_Decode = Callable[[JsonValue], Any]


def _decoded_dict(item: JsonValue, decode: _Decode) -> dict[Any, Any]:
    pairs = [pair.items(2) for pair in item.items()]
    try:
        return {decode(key): decode(value) for key, value in pairs}
    except TypeError:
        raise item.error("it is not a valid key of a dict") from None


def _decoded_range(item: JsonValue, _: _Decode) -> range:
    start, stop, step = (part.whole(-_WIDEST, _WIDEST) for part in item.items(3))
    if step == 0:
        raise item.error("a range cannot have steps of zero")
    return range(start, stop, step)


def _decoded_complex(item: JsonValue, decode: _Decode) -> complex:
    parts = [decode(part) for part in item.items(2)]
    if not all(type(part) in (int, float) for part in parts):
        raise item.error("there should be two numbers")
    return complex(*parts)


def _decoded_size(item: JsonValue, _: _Decode) -> torch.Size:
    return torch.Size([part.whole() for part in item.items()])


def _decoded_bytes(item: JsonValue, _: _Decode) -> bytes:
    try:
        return bytes.fromhex(item.text())
    except ValueError:
        raise item.error("there should be bytes in hexadecimal digits") from None


def decoded_device(item: JsonValue) -> torch.device:
    """Returns a device that is given as text."""
    try:
        return torch.device(item.text())
    except RuntimeError:
        raise item.error(f"unknown device {item.text()[:40]!r} here") from None


def _constant_of(name: str) -> Callable[[JsonValue, _Decode], Any]:
    kind = _KINDS[name]
    known = {str(v).removeprefix("torch."): v for v in vars(torch).values() if type(v) is kind}

    def read(item: JsonValue, _: _Decode) -> Any:
        text = item.text()
        if text not in known:
            raise item.error(f"this version of torch has no {name} {text[:40]!r}")
        return known[text]

    return read


_READERS: dict[str, Callable[[JsonValue, _Decode], Any]] = {
    "tuple": lambda item, decode: tuple(decode(child) for child in item.items()),
    "dict": _decoded_dict,
    "slice": lambda item, decode: slice(*(decode(part) for part in item.items(3))),
    "range": _decoded_range,
    "size": _decoded_size,
    "float": lambda item, _: float(item.one_of(("nan", "inf", "-inf"))),
    "complex": _decoded_complex,
    "bytes": _decoded_bytes,
    "ellipsis": lambda item, _: Ellipsis if item.flag() else None,
    "device": lambda item, _: decoded_device(item),
    **{name: _constant_of(name) for name in _KINDS},
}


def dtype_of(item: JsonValue) -> torch.dtype:
    """Returns a dtype that is given by its name."""
    return _READERS["dtype"](item, decoded)  # type: ignore[no-any-return]


def encoded_key(key: Any) -> Any:
    """Returns the JSON of the key of a child in its container."""
    plain = plain_dict_key(key)
    return encoded(key) if plain is key else {"tuple": [encoded(plain)]}


def decoded_key(item: JsonValue) -> Any:
    """Returns the key of a child in its container: a name, a position, or another key of a dict."""
    key = decoded(item)
    if type(key) is tuple and len(key) == 1:
        return dict_key(key[0])
    if type(key) is not str and not (type(key) is int and key >= 0):
        raise item.error("there should be a name or a position")
    return key
