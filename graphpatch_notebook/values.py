"""Containers of values: how to list, replace and describe their children. Tree, capture, patches and graphs use this.

A container is a tuple, list, deque, dict, namedtuple, a transformers `ModelOutput`, or a record: a dataclass, a class
of attrs or with public `__slots__` alone, a `SimpleNamespace`. Its children have *keys*: `sub_0`, `sub_1`, ... in
sequences, else the key or the field name.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import hashlib
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

Key: TypeAlias = Any
"""How a child is taken out of its container: by position (int), or by key or field name."""
NUMBERS = (bool, int, float, complex)
"""Types of numbers, which patches can work on as on tensors."""
IMMUTABLE = (
    *NUMBERS, str, bytes, type(None), type(Ellipsis), slice, range, type,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types of values that nothing can write into."""


class Absent(enum.Enum):
    """A marker for a missing value."""

    ABSENT = "absent"

    def __str__(self) -> str:
        return self.value


ABSENT = Absent.ABSENT


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The properties of a tensor, without the tensor itself.

    `placement` is how it is distributed over the processes of a sharded model, or why it cannot be patched there.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    type_name: str = "Tensor"
    placement: str = ""

    @property
    def badge(self) -> str:
        """The text of the placement in the tree: empty if each process has the whole value."""
        return "" if self.placement in ("", "replicated") else f" {self.placement.partition(':')[0]}"

    def __str__(self) -> str:
        return f"{self.type_name}({', '.join(map(str, self.shape))}){self.badge}"


@dataclass(frozen=True, slots=True, eq=False)
class ScalarSpec:
    """A number, or another plain constant (a string, `None`, a dtype) with the value it had.

    Example:
        >>> ScalarSpec(1) == ScalarSpec(1), ScalarSpec(1) == ScalarSpec(True), ScalarSpec(0.0) == ScalarSpec(-0.0)
        (True, False, False)
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScalarSpec) and is_same_plain(self.value, other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), repr(self.value)))

    @property
    def is_number(self) -> bool:
        """Whether patches can work on the value."""
        return isinstance(self.value, NUMBERS)

    def __str__(self) -> str:
        # Six digits distinguish numbers; more only fill the tree.
        shown = float(f"{self.value:.6g}") if isinstance(self.value, float) else self.value
        return f"{type(self.value).__name__}({shown})" if self.is_number else type(self.value).__name__


@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """An object that is neither a tensor, a constant nor a container, such as a cache."""

    type_name: str

    def __str__(self) -> str:
        return self.type_name


@dataclass(frozen=True, slots=True)
class UnknownSpec:
    """A value that is not known: of a node that was added to a graph and has not run yet."""

    def __str__(self) -> str:
        return "(not known)"


@dataclass(frozen=True, slots=True)
class ContainerSpec:
    """A container: its class, and for each child the text of its key, its key and its spec."""

    type: type
    children: tuple[tuple[str, Key, ValueSpec], ...]

    def child(self, key_text: str) -> tuple[Key, ValueSpec] | None:
        """Returns key and spec of the child with the key `key_text` in paths, if it exists."""
        return next(((key, spec) for text, key, spec in self.children if text == key_text), None)

    def __str__(self) -> str:
        return f"{self.type.__name__}({len(self.children)})"


ValueSpec: TypeAlias = "TensorSpec | ScalarSpec | ObjectSpec | UnknownSpec | ContainerSpec"


def spec_at(spec: ValueSpec | None, keys: Iterable[Key]) -> ValueSpec | None:
    """Returns the spec of the value to which `keys` lead in a container, if there is one."""
    for key in keys:
        children = spec.children if isinstance(spec, ContainerSpec) else ()
        spec = next((child for _, known, child in children if known == key), None)
    return spec


def is_same_plain(one: Any, other: Any) -> bool:
    """Whether two plain values are the same: of one class, zeros of one sign; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    return repr(one) == repr(other) if isinstance(one, (float, complex)) else bool(one == other)


def dtype_name(dtype: torch.dtype | torch.layout) -> str:
    """Returns the name of a dtype or a layout without `torch.`."""
    return str(dtype).removeprefix("torch.")


def tensor_specs(spec: ValueSpec) -> list[TensorSpec]:
    """Returns the tensors in a value."""
    return [leaf for _, leaf in all_leaves(spec) if isinstance(leaf, TensorSpec)]


def leaves(spec: ValueSpec) -> Iterator[tuple[tuple[str, ...], TensorSpec | ScalarSpec | UnknownSpec]]:
    """Yields the tensors and numbers in `spec`, each with the texts of the keys that lead to it."""
    for dig, leaf in all_leaves(spec):
        if isinstance(leaf, (TensorSpec, UnknownSpec)) or (isinstance(leaf, ScalarSpec) and leaf.is_number):
            yield dig, leaf


def all_leaves(
    spec: ValueSpec, dig: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], TensorSpec | ScalarSpec | ObjectSpec | UnknownSpec]]:
    """Yields everything in `spec` but containers, with objects and other constants, in the same form."""
    if isinstance(spec, ContainerSpec):
        for text, _, child in spec.children:
            yield from all_leaves(child, (*dig, text))
    else:
        yield dig, spec


def key_text(key: Key) -> str:
    """Returns how a path writes `key`."""
    return f"sub_{key}" if type(key) is int else str(key)


def tensor_bytes(value: Tensor) -> Any:
    """Returns the bytes of the entries of a plain tensor, in order, as an array of numpy."""
    # A copy: memory that was lent to NumPy can be neither resized nor freed.
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous().clone()
    return plain.reshape(-1).view(torch.uint8).numpy()


def children(value: Any) -> list[tuple[Key, Any]] | None:
    """Returns the children of a container with their keys, or `None` if `value` is not one, or its own code fails."""
    try:
        if isinstance(value, SEQUENCES):
            return list(enumerate(value))
        if isinstance(value, Mapping):
            # An int key of a dict would read like a position: only text keys can be dug into by name.
            return [(dict_key(key), item) for key, item in value.items()]
        names = list(vars(value)) if isinstance(value, SimpleNamespace) else fields_of(type(value))
    except Exception:
        return None
    if names is None:
        return None
    return [(name, found) for name in names if (found := _readable(value, name)) is not ABSENT]


SEQUENCES = (tuple, list, deque)
"""Classes of containers whose keys are positions."""


def _readable(value: Any, name: str) -> Any:
    """Returns an attribute; `ABSENT` if there is none, or if the class refuses it, as configs of transformers may."""
    try:
        return getattr(value, name)
    except Exception:
        return ABSENT


def fields_of(kind: type) -> tuple[str, ...] | None:
    """Returns the names of what instances of a class hold, if the class says so; `None` of other classes.

    Example:
        >>> class Pair:
        ...     __slots__ = ("a", "b")
        >>> fields_of(Pair), fields_of(int)
        (('a', 'b'), None)
    """
    # Not by a loop: this runs for each value of a capture.
    says = hasattr(kind, "__dataclass_fields__") or hasattr(kind, "__slots__") or hasattr(kind, "__attrs_attrs__")
    return _fields(kind) if says else None


@functools.lru_cache(maxsize=1024)
def _fields(kind: type) -> tuple[str, ...] | None:
    if (declared := getattr(kind, "__dataclass_fields__", getattr(kind, "__attrs_attrs__", None))) is not None:
        return tuple(field.name for field in (dataclasses.fields(kind) if isinstance(declared, dict) else declared))
    slots = [vars(base).get("__slots__", ()) for base in reversed(kind.__mro__)]
    names = [name for own in slots for name in ((own,) if isinstance(own, str) else own) if name != "__weakref__"]
    is_open = kind.__dictoffset__ or any(name.startswith("_") for name in names)  # it holds more than these
    return None if is_open else tuple(names) or None


@dataclass(frozen=True, slots=True)
class _DictKey:
    """A dictionary key that is not a string."""

    key: Any

    def __str__(self) -> str:
        return str(self.key)


def dict_key(key: Any) -> Key:
    """Returns the key that `children` uses for the item of a dict at `key`."""
    return key if isinstance(key, str) else _DictKey(key)


def plain_dict_key(key: Key) -> Any:
    """Returns the key of a dict for the key that `children` uses; other keys are returned unchanged."""
    return key.key if isinstance(key, _DictKey) else key


def take(value: Any, key: Key) -> Any:
    """Returns the child of `value` at `key`.

    Raises:
        LookupError, AttributeError: This value has no such child.
    """
    if isinstance(key, _DictKey):
        return value[key.key]
    if isinstance(value, (*SEQUENCES, Mapping)):
        return value[key]
    return getattr(value, key)


def replaced(value: Any, key: Key, child: Any) -> Any:
    """Returns a copy of a container with another child at `key`; `value` itself does not change.

    A shallow copy: the other children are the same objects.
    """
    if isinstance(value, (tuple, list)):
        return rebuilt(type(value), (), [child if i == key else v for i, v in enumerate(value)])
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)({**value, plain_dict_key(key): child})  # type: ignore[call-arg]  # made from a dict
    return _with_items(value, [(key, child)])


def _with_items(value: Any, items: Iterable[tuple[Key, Any]]) -> Any:
    """Returns a shallow copy of a container with these items: it keeps what else there is, as the length of a deque."""
    result = copy.copy(value)
    for key, item in items:
        if isinstance(result, (*SEQUENCES, Mapping)):
            result[plain_dict_key(key)] = item  # type: ignore[index]
        else:
            object.__setattr__(result, key, item)
    return result


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Returns `value` with `function` applied to everything in it except containers.

    If no object changes, the result is `value` itself; else containers are copied, never modified.

    Example:
        >>> mapped({"a": (1, 2), "b": [3]}, lambda number: number + 1)
        {'a': (2, 3), 'b': [4]}
    """
    is_changed = []

    def leaf(old: Any) -> Any:
        new = function(old)
        is_changed.append(new is not old)
        return new

    result = with_own_containers(value, leaf)
    return result if any(is_changed) else value


def with_own_containers(value: Any, function: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Returns the same as `mapped`, but always with new containers, also if no leaf changes.

    Example:
        >>> value = {"a": [1]}
        >>> copy = with_own_containers(value)
        >>> copy, copy["a"] is value["a"]
        ({'a': [1]}, False)
    """
    inside = None if isinstance(value, Tensor) else children(value)
    if inside is None:
        return function(value)
    items = [(key, with_own_containers(child, function)) for key, child in inside]
    if not isinstance(value, (tuple, list, Mapping)):
        return _with_items(value, items)
    return rebuilt(type(value), [key for key, _ in items], [item for _, item in items])


def describe(value: Any) -> ValueSpec:
    """Returns the spec of `value` without keeping it."""
    if isinstance(value, Tensor):
        is_plain = type(value) in PLAIN_TENSORS
        name = "Tensor" if is_plain else type(value).__name__
        if not is_plain and is_lazy(value):  # a lazy module's parameter that has no shape yet
            return ObjectSpec(name)
        if value.is_nested:  # sizes of one that is strided are an error, and those of a jagged one no numbers
            return ObjectSpec("NestedTensor")
        try:
            return TensorSpec(value.shape, value.dtype, value.device, name)
        except (NotImplementedError, RuntimeError):  # a subclass for one function only (torch.nn.attention.bias, 2.4)
            return ObjectSpec(name)
    if value is None or isinstance(value, _SCALARS):
        # Capture counts sizes with a subclass of int that must not outlive it.
        return ScalarSpec(int.__index__(value) if isinstance(value, int) and type(value) is not bool else value)
    if (inside := children(value)) is not None:
        return ContainerSpec(type(value), tuple((key_text(k), k, describe(v)) for k, v in inside))
    return ObjectSpec(type(value).__name__)


PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
"""The classes of tensors that torch itself makes: others may have functions of their own."""

_SCALARS = (*NUMBERS, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, slice)


def rebuilt(kind: type, keys: Sequence[Key], items: Sequence[Any]) -> Any:
    """Returns a container of class `kind` with `items` at `keys`, which sequences do not need: reverses `children`.

    The constructor of the class does not run if it could change the items: a `ModelOutput` gets only the fields that
    it had, even if the class requires others (these are `None`).

    Example:
        >>> from collections import OrderedDict
        >>> rebuilt(OrderedDict, ["a", "b"], [1, None])
        OrderedDict([('a', 1), ('b', None)])
    """
    if issubclass(kind, SEQUENCES):
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    named = dict(zip(map(plain_dict_key, keys), items, strict=True))
    if not dataclasses.is_dataclass(kind) and issubclass(kind, Mapping) and not issubclass(kind, dict):
        return kind(named)  # type: ignore[call-arg]  # a mapping made from a dict
    make: Any = kind.__new__
    result = make(kind)
    if dataclasses.is_dataclass(kind) or not isinstance(result, Mapping):
        # The items of a `ModelOutput` are the fields that are not None.
        fields = dict.fromkeys(fields_of(kind) or ()) if isinstance(result, Mapping) else named
        for name, item in fields.items():
            object.__setattr__(result, name, item)
    if isinstance(result, Mapping):
        for key, item in named.items():
            result[key] = item  # type: ignore[index]
    return result


# -- digests -----------------------------------------------------------------------------------------------------------

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
    if isinstance(value, IMMUTABLE):
        return name, repr(value)
    if id(value) not in known:  # cells of a sweep share large tensors; containers may hold themselves
        known[id(value)] = value, name
        with contextlib.suppress(Exception):  # of the user's own classes
            known[id(value)] = value, (name, *_contents(value, known, depth))
    return known[id(value)][1]


def _contents(value: Any, known: dict[int, Any], depth: int) -> Any:
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return str(value.dtype), tuple(value.shape), _memory_digest(value)
    if isinstance(value, Mapping):
        return [(str(key), _described(item, known, depth)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_described(item, known, depth)) for item in value)
    if isinstance(value, (list, tuple)):
        return [_described(item, known, depth) for item in value]
    if inspect.isroutine(value):
        code = getattr(value, "__code__", None)
        facts = () if code is None else (code.co_code, [each for each in code.co_consts if isinstance(each, IMMUTABLE)])
        return getattr(value, "__qualname__", ""), facts
    fields = sorted(getattr(value, "__dict__", {}).items()) if depth else []
    # What a patch keeps for itself is private.
    return [(key, _described(item, known, depth - 1)) for key, item in fields if not key.startswith("_")]


def _memory_digest(value: Any) -> str:
    """Returns a digest of the numbers of a tensor or an array; of those that are not all here, an empty text."""
    if isinstance(value, Tensor):
        is_plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided
        is_here = is_plain and not value.is_meta and not value.is_quantized
        return hashlib.sha256(tensor_bytes(value).data).hexdigest() if is_here else ""
    return hashlib.sha256(repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes()).hexdigest()
