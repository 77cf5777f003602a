"""Classes of containers by name: Python's and torch's own, the outputs of transformers, and what the caller allows."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from graphpatch_notebook.serialization.codecs.names import Allowed, dotted, imported, is_name, name_of_object
from graphpatch_notebook.serialization.codecs.reading import Item
from graphpatch_notebook.serialization.codecs.values import UnstorableError

# Where transformers defines the outputs of its models; what is in these files runs when it is imported, as for any
# transformers model that is used at all.
_TRANSFORMERS = re.compile(r"transformers\.(modeling_outputs|models\.[a-z0-9_]+\.modeling_[a-z0-9_]+):\w+")
_KINDS = {"tuple": tuple, "list": list, "mapping": collections.UserDict, "object": object}


@cache
def _known() -> dict[str, type]:
    found: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict, "torch.Size": torch.Size}
    found["collections.OrderedDict"] = collections.OrderedDict
    found["torch.nn.utils.rnn.PackedSequence"] = torch.nn.utils.rnn.PackedSequence
    values: dict[str, Any] = vars(torch.return_types)
    for name, value in values.items():
        if isinstance(value, type) and issubclass(value, tuple) and not name.startswith("_"):
            found[f"torch.return_types.{name}"] = value
    return found


@cache
def _names_of_known() -> dict[type, str]:
    return {cls: name for name, cls in _known().items()}


def name_of_class(cls: type) -> str:
    """Returns the name of a class of containers that a graph makes.

    Raises:
        UnstorableError: There is none.
    """
    name = _names_of_known().get(cls)
    if name is None and not _is_container(cls):
        raise UnstorableError(f"it makes a {cls.__name__}, which is no kind of container that can be written")
    return name or name_of_object(cls)


def class_of(item: Item, allowed: Allowed) -> type | None:
    """Returns the class of containers of that name; `None` where it is not allowed, which `allowed` notes.

    Raises:
        SerializationError: It is none, or not to be found here.
    """
    name = item.text()
    if name in _known():
        return _known()[name]
    if not is_name(name):
        raise item.error(f"{name[:60]!r} is no name of a class")
    is_transformers = _TRANSFORMERS.fullmatch(name) is not None and not allowed.covers(dotted(name))
    if not is_transformers and not allowed.require(dotted(name)):
        return None
    found = imported(name, item.where)
    if not isinstance(found, type) or not _is_container(found) or (is_transformers and not _is_output(found)):
        raise item.error(f"{dotted(name)} is no class of containers")
    return found


def _is_container(cls: type) -> bool:
    return issubclass(cls, (tuple, list, Mapping)) or dataclasses.is_dataclass(cls)


def _is_output(cls: type) -> bool:
    return any(base.__name__ == "ModelOutput" and base.__module__.startswith("transformers.") for base in cls.__mro__)


# -- classes of recorded values, of which nothing is ever made --------------------------------------------------------


def described_class(cls: type) -> list[str]:
    """Returns what is told of the class of a recorded container: its name, and what kind of container it is."""
    if cls in _names_of_known():
        return [_names_of_known()[cls]]
    bases: list[tuple[str, Any]] = [("tuple", tuple), ("list", list), ("mapping", Mapping)]
    kind = next((name for name, base in bases if issubclass(cls, base)), "object")
    return [class_text(cls), kind]


def class_text(cls: type) -> str:
    """Returns the full name of any class."""
    return _names_of_known().get(cls) or f"{cls.__module__}:{cls.__qualname__}"


def class_described(item: Item) -> type:
    """Returns the class of a recorded container: itself if it is well known, else a class that stands for it."""
    parts = item.items()
    if not 1 <= len(parts) <= 2:
        raise item.error("there should be a name and a kind")
    name = parts[0].text()
    if len(parts) == 1:
        if name not in _known():
            raise parts[0].error(f"{name[:60]!r} is no known class of containers")
        return _known()[name]
    return _stand_in(name, parts[1].one_of(tuple(_KINDS)))


@cache
def _stand_in(name: str, kind: str) -> type:
    module, _, qualified = name.rpartition(":")
    namespace: dict[str, Any] = {"__module__": module, "__qualname__": qualified}
    return type(qualified.rsplit(".", 1)[-1], (_KINDS[kind],), namespace)
