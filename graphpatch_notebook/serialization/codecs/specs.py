"""Descriptions of recorded values as JSON."""

from __future__ import annotations

from typing import Any

import torch

from graphpatch_notebook.serialization.codecs.classes import class_described, described_class
from graphpatch_notebook.serialization.codecs.reading import Item
from graphpatch_notebook.serialization.codecs.values import (
    UnstorableError,
    decoded,
    decoded_device,
    decoded_key,
    dtype_of,
    encoded,
    encoded_key,
    name_of_dtype,
)
from graphpatch_notebook.values import (
    ContainerSpec,
    ObjectSpec,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    ValueSpec,
    key_text,
)

_DEEPEST = 100


def encoded_spec(spec: ValueSpec) -> list[Any]:
    """Returns the JSON of `spec`; a value that cannot be written is described as an object."""
    if isinstance(spec, TensorSpec):
        return ["tensor", list(spec.shape), name_of_dtype(spec.dtype), str(spec.device), spec.type_name]
    if isinstance(spec, ContainerSpec):
        try:
            children = [[encoded_key(key), encoded_spec(child)] for _, key, child in spec.children]
        except UnstorableError:  # a key of a dict that is an object
            return ["object", spec.type.__name__]
        return ["container", described_class(spec.type), children]
    if isinstance(spec, ScalarSpec):
        try:
            return ["value", encoded(spec.value)]
        except UnstorableError:
            return ["object", type(spec.value).__name__]
    return ["unknown"] if isinstance(spec, UnknownSpec) else ["object", str(spec)]


def decoded_spec(item: Item, depth: int = 0) -> ValueSpec:
    """Returns the description in `item`.

    Raises:
        SerializationError: There is none.
    """
    if depth > _DEEPEST:
        raise item.error("it is nested too deeply")
    parts = item.items()
    kind = parts[0].one_of(("tensor", "container", "value", "object", "unknown")) if parts else ""
    if kind == "unknown":
        return UnknownSpec()
    if kind == "tensor":
        _, shape, dtype, device, name = item.items(5)
        sizes = torch.Size([size.whole() for size in shape.items()])
        return TensorSpec(sizes, dtype_of(dtype), decoded_device(device), name.text())
    if kind == "container":
        _, cls, inside = item.items(3)
        pairs = [pair.items(2) for pair in inside.items()]
        keyed = [(decoded_key(key), decoded_spec(child, depth + 1)) for key, child in pairs]
        return ContainerSpec(class_described(cls), tuple((key_text(key), key, child) for key, child in keyed))
    inner = item.items(2)[1]
    return ScalarSpec(decoded(inner)) if kind == "value" else ObjectSpec(inner.text())
