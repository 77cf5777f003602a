"""Signatures of calls: structure, sizes, dtypes and flags of their inputs; a snapshot is for calls of one."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.values import (
    ABSENT,
    SEQUENCES,
    ContainerSpec,
    ObjectSpec,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    ValueSpec,
    all_leaves,
    children,
    describe,
    dtype_name,
    is_same_plain,
    key_text,
    plain_dict_key,
    take,
)

Dimension: TypeAlias = "int | str"
"""A size, or the name of a symbolic one, which is the same wherever it has this name."""


class Aspect(enum.Enum):
    """In what two calls may differ."""

    VALUE = "value"
    """The structure of the inputs, a plain value, or the number of dimensions of a tensor."""
    DTYPE = "dtype"
    SIZE = "size"
    SPLIT = "split"
    """Two inputs were one tensor, and are two."""
    GRAD_MODE = "grad mode"
    DEFAULT_DTYPE = "default dtype"
    AUTOCAST = "autocast"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which a call differs from a signature.

    `name` is the input, and empty for a setting of torch; `position` is the dimension, if it is a size.
    """

    aspect: Aspect
    was: Any
    now: Any
    name: str = ""
    position: int = 0

    @property
    def subject(self) -> str:
        """What differs, for messages."""
        if self.aspect is Aspect.SIZE:
            return f"dimension {self.position} of {self.name!r}"
        what = "" if self.aspect is Aspect.VALUE else f"the {self.aspect.value}"
        return " of ".join(filter(None, (what, f"the input {self.name!r}" * bool(self.name))))

    def __str__(self) -> str:
        if self.aspect is Aspect.SPLIT:
            return f"{self.name!r} is not the same tensor as {self.was!r}, unlike in the example"
        return f"{self.subject} is {_spec_text(self.now)}, and was {_spec_text(self.was)} in the example"


def _spec_text(what: Any) -> str:
    if isinstance(what, TensorSpec):
        return f"{what} of {dtype_name(what.dtype)}"
    return repr(what.value) if isinstance(what, ScalarSpec) else str(what)


Settings: TypeAlias = "tuple[tuple[Aspect, Any], ...]"
"""The settings of torch that code may read."""


def _current_settings() -> dict[Aspect, Any]:
    autocast = [(name, torch.get_autocast_dtype(name)) for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)]
    return {
        Aspect.GRAD_MODE: torch.is_grad_enabled(),
        Aspect.DEFAULT_DTYPE: torch.get_default_dtype(),
        Aspect.AUTOCAST: tuple(autocast) or None,
    }


@dataclass(frozen=True)
class CallSignature:
    """The form of a call, without the numbers in its tensors.

    Attributes:
        inputs: The inputs by name: structure and plain values.
        sizes: The sizes of each tensor in them, in order.
        same: For each tensor which of them, the first, is the same object.
        any_size: Whether tensors may have any sizes.

    Example:
        >>> from graphpatch_notebook.patchable_graph import PatchableGraph, captured
        >>> pg = PatchableGraph(torch.nn.ReLU(), torch.ones(2))
        >>> print(*CallSignature.of_frame(captured(pg).root).differences([torch.ones(4)]))
        dimension 0 of 'input' is 4, and was 2 in the example
    """

    inputs: tuple[tuple[str, ValueSpec], ...]
    sizes: tuple[tuple[Dimension, ...], ...]
    same: tuple[int, ...]
    settings: Settings = ()
    any_size: bool = False

    @classmethod
    def of_frame(cls, frame: Frame) -> CallSignature:
        """Returns the signature of the call that `frame` recorded, without the settings of torch."""
        by_name = {str(node.target): node.spec for node in frame.inputs()}
        inputs = tuple((p.name, by_name.get(p.name, ScalarSpec(None))) for p in frame.parameters)
        tensors = [leaf for name, spec in inputs for leaf in tensor_leaves(name, spec)]
        numbers = {name: number for number, (name, _) in enumerate(tensors)}
        same = list(range(len(tensors)))
        for places in frame.conditions.same_inputs:
            names = [functools.reduce(_below, map(key_text, dig), parameter) for parameter, dig in places]
            one, other = sorted(numbers.get(name, 0) for name in names)
            same[other] = same[one]
        return cls(inputs, tuple(tuple(spec.shape) for _, spec in tensors), tuple(same))

    @property
    def objects(self) -> list[str]:
        """The classes of the objects among the inputs; the signature has no other data about them."""
        return object_classes(spec for _, spec in self.inputs)

    def differences(self, values: Sequence[Any]) -> list[Difference]:
        """Returns how a call with these inputs differs from the signature. `torch.compile` can trace this.

        If tensors are missing, only that is reported.
        """
        found: list[Difference] = []
        tensors: list[tuple[str, Tensor]] = []
        for number, (name, spec) in enumerate(self.inputs):
            _compare_values(name, spec, values[number], tensors, found)
        if len(tensors) != len(self.sizes):
            return found
        if not self.any_size:
            self._compare_sizes(tensors, found)
        same = _first_same(tensors)
        for number, now in enumerate(same):
            if (was := self.same[number]) != now and now == number:
                found.append(Difference(Aspect.SPLIT, tensors[was][0], None, tensors[number][0]))
        if self.settings:
            settings = _current_settings()
            found += [Difference(key, was, settings[key]) for key, was in self.settings if settings[key] != was]
        return found

    def _compare_sizes(self, tensors: list[tuple[str, Tensor]], found: list[Difference]) -> None:
        sizes: dict[str, int] = {}
        for number, (name, tensor) in enumerate(tensors):
            for position, dimension in enumerate(self.sizes[number]):
                size, was = tensor.shape[position], dimension
                if isinstance(dimension, str):
                    was = sizes.setdefault(dimension, size)
                if size != was:
                    found.append(Difference(Aspect.SIZE, was, size, name, position))


def object_classes(specs: Iterable[ValueSpec]) -> list[str]:
    """Returns the classes of the objects in these values."""
    leaves = (leaf for spec in specs for _, leaf in all_leaves(spec))
    return [str(leaf) for leaf in leaves if isinstance(leaf, (ObjectSpec, UnknownSpec))]


def tensor_leaves(name: str, spec: ValueSpec) -> Iterator[tuple[str, TensorSpec]]:
    """Yields the tensors in an input, each with its name in messages."""
    leaves = ((dig, leaf) for dig, leaf in all_leaves(spec) if isinstance(leaf, TensorSpec))
    return ((functools.reduce(_below, dig, name), leaf) for dig, leaf in leaves)


def _below(name: str, text: str) -> str:
    return f"{name}.{text}" if "|" in name else f"{name}|{text}"


def _first_same(tensors: list[tuple[str, Tensor]]) -> tuple[int, ...]:
    found = []
    for number, (_, tensor) in enumerate(tensors):
        first = number
        for other in range(number):
            if first == number and tensors[other][1] is tensor:  # not by `id`, which `torch.compile` does not trace
                first = other
        found.append(first)
    return tuple(found)


def _compare_values(
    name: str, spec: ValueSpec, value: Any, tensors: list[tuple[str, Tensor]], found: list[Difference]
) -> None:
    """Compares structure and plain values; adds the tensors that are where they were to `tensors`."""
    if isinstance(spec, ContainerSpec) and _is_of_class(spec, value):
        _compare_children(name, spec, value, tensors, found)
    elif isinstance(spec, TensorSpec) and isinstance(value, Tensor) and value.dim() == len(spec.shape):
        tensors.append((name, value))
        if value.dtype != spec.dtype:
            found.append(Difference(Aspect.DTYPE, spec.dtype, value.dtype, name))
    elif not _is_known_to_fit(spec, value):
        found.append(Difference(Aspect.VALUE, spec, describe(value), name))


def _is_known_to_fit(spec: ValueSpec, value: Any) -> bool:
    if isinstance(spec, ScalarSpec):
        return is_same_plain(spec.value, value)
    return isinstance(spec, UnknownSpec) or (isinstance(spec, ObjectSpec) and type(value).__name__ == spec.type_name)


def _compare_children(
    name: str, spec: ContainerSpec, value: Any, tensors: list[tuple[str, Tensor]], found: list[Difference]
) -> None:
    count = 0
    for text, key, child in spec.children:
        if has_child(value, key):
            count += 1
            _compare_values(_below(name, text), child, take(value, key), tensors, found)
        else:
            found.append(Difference(Aspect.VALUE, child, ABSENT, _below(name, text)))
    if isinstance(value, (*SEQUENCES, Mapping)) and len(value) > count:
        known = {text for text, _, _ in spec.children}
        for key, item in children(value) or ():
            if key_text(key) not in known:
                found.append(Difference(Aspect.VALUE, ABSENT, describe(item), _below(name, key_text(key))))


def has_child(value: Any, key: Any) -> bool:
    """Whether a container or an object has a child at `key`, as `values.take` would return it."""
    if isinstance(value, SEQUENCES):
        return int(key) < len(value)
    return plain_dict_key(key) in value if isinstance(value, Mapping) else hasattr(value, key)


def _is_of_class(spec: ContainerSpec, value: Any) -> bool:
    """Whether a container is of the class that the spec names; a loaded graph has another class in its place."""
    one, other = type(value), spec.type
    if one is torch.Size or other is torch.Size:  # graphs make tuples of sizes
        return one in _OF_SIZES and other in _OF_SIZES
    return one is other or (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


_OF_SIZES = (tuple, torch.Size)
