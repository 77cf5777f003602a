"""Attributes and coordinates of results as JSON, from which the same objects are read: types, NaN and all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphpatch_notebook.errors import ExperimentError

KINDS = "biufUO"  # of the arrays that can be written: booleans, numbers, texts, and objects that are one of these


def encoded(value: Any, where: str) -> Any:
    """Returns a value as JSON.

    Args:
        value: `None`, a number, a text, an array of these, or a list, tuple or dict of such values.
        where: What it is called in messages.

    Raises:
        ExperimentError: It is none of these.

    Example:
        >>> encoded({"a": (1, float("nan"))}, "attrs")
        {'a': {'$tuple': [1, {'$float': 'nan'}]}}
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return [encoded(item, where) for item in value]
    if kind is tuple:
        return {"$tuple": [encoded(item, where) for item in value]}
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encoded(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {"$dict": [[encoded(key, where), encoded(item, where)] for key, item in value.items()]}
    if isinstance(value, np.generic):
        return {"$scalar": encoded_array(np.asarray(value), where)}
    if kind is np.ndarray:
        return {"$array": encoded_array(value, where)}
    raise ExperimentError(
        f"{where} holds an object of {kind.__module__}.{kind.__qualname__}, which cannot be written: put numbers, "
        "texts, lists or dicts there, or delete it"
    )


def decoded(data: Any) -> Any:
    """Returns the value that `encoded` was given."""
    if isinstance(data, list):
        return [decoded(item) for item in data]
    if not isinstance(data, dict):
        return data
    tag = next(iter(data), "")
    if not tag.startswith("$"):
        return {key: decoded(item) for key, item in data.items()}
    inside = data[tag]
    if tag == "$float":
        return float(inside)
    if tag == "$tuple":
        return tuple(map(decoded, inside))
    if tag == "$dict":
        return {decoded(key): decoded(item) for key, item in inside}
    array = decoded_array(inside)
    return array[()] if tag == "$scalar" else array


def encoded_array(array: np.ndarray[Any, Any], where: str) -> dict[str, Any]:
    """Returns an array as JSON.

    Raises:
        ExperimentError: Its items are no numbers and no texts.
    """
    if array.dtype.kind not in KINDS or array.dtype == np.longdouble:  # which Python's numbers do not hold
        raise ExperimentError(f"{where} is of dtype {array.dtype}, which cannot be written: convert it by .astype(str)")
    items = [encoded(item, where) for item in array.ravel().tolist()]
    return {"dtype": array.dtype.str, "shape": list(array.shape), "values": items}


def decoded_array(data: Any) -> np.ndarray[Any, Any]:
    """Returns the array that `encoded_array` was given."""
    items = decoded(data["values"])
    array: np.ndarray[Any, Any] = np.empty(len(items), dtype=np.dtype(data["dtype"]))
    for number, item in enumerate(items):
        array[number] = item  # one by one: numpy would look into lists and tuples
    shaped: np.ndarray[Any, Any] = array.reshape(data["shape"])
    return shaped
