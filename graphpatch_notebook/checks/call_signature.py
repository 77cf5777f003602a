"""What a call looks like, apart from the numbers in its tensors: a recorded graph holds for calls that look alike.

CallSignature     the inputs: structure, plain values, and what code can ask of a tensor; the settings of torch
├── of            the signature of a call
├── of_frame      the signature of the call that a frame is the record of
└── differences   in what a call differs from it
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.values import (
    ContainerSpec,
    ObjectSpec,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    ValueSpec,
    children,
    describe,
    is_same_plain,
    key_text,
    plain_dict_key,
    take,
)

Dimension: TypeAlias = "int | str"
"""A size, or the name of a symbolic one, which is the same wherever it has this name."""

Layout: TypeAlias = "tuple[int, ...] | bool | None"
"""How a tensor lies in memory: `True`, contiguous; `False`, not contiguous; its strides; `None`, not known."""

_AUTOCAST_DEVICES = ("cpu", "cuda")


class Aspect(enum.Enum):
    """In what two calls may differ."""

    VALUE = "value"
    """The structure of the inputs, a plain value, or the number of dimensions of a tensor."""
    CLASS = "class"
    DTYPE = "dtype"
    DEVICE = "device"
    SIZE = "size"
    LAYOUT = "layout"
    REQUIRES_GRAD = "requires_grad"
    SPLIT = "split"
    """Two inputs were one tensor, and are two."""
    JOINED = "joined"
    """Two inputs were two tensors, and are one."""
    SETTING = "setting"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which a call differs from a signature.

    Attributes:
        aspect: What differs.
        name: The input, or the setting.
        was: What the signature says.
        now: What the call has.
        position: The dimension, if it is a size.
    """

    aspect: Aspect
    name: str
    was: Any
    now: Any
    position: int = 0

    def __str__(self) -> str:
        name = repr(self.name)
        if self.aspect is Aspect.SIZE:
            return f"dimension {self.position} of {name} is {self.now}, and was {self.was} in the example"
        if self.aspect in (Aspect.SPLIT, Aspect.JOINED):
            is_or_not = "is not" if self.aspect is Aspect.SPLIT else "is"
            return f"{name} {is_or_not} the same tensor as {self.was!r}, unlike in the example"
        if self.aspect is Aspect.LAYOUT:
            return f"the input {name} {_layout_text(self.now)}, and {_layout_text(self.was)} in the example"
        if self.aspect is Aspect.SETTING:
            return f"{self.name} is {self.now}, and was {self.was} in the example"
        if self.aspect is Aspect.VALUE:
            return f"the input {name} is {_value_text(self.now)}, and was {_value_text(self.was)} in the example"
        return f"the {self.aspect.value} of the input {name} is {self.now}, and was {self.was} in the example"


def _layout_text(layout: Layout) -> str:
    if isinstance(layout, tuple):
        return f"has the strides {layout}"
    return "is contiguous in memory" if layout else "is not contiguous in memory"


def _value_text(spec: ValueSpec | None) -> str:
    if spec is None:
        return "absent"
    if isinstance(spec, TensorSpec):
        return f"{spec} of {str(spec.dtype).removeprefix('torch.')}"
    return repr(spec.value) if isinstance(spec, ScalarSpec) else str(spec)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of torch that code may ask for; `None` where any will do."""

    gradients: bool | None = None
    inference_mode: bool | None = None
    default_dtype: torch.dtype | None = None
    autocast: tuple[torch.dtype | None, ...] = (None,) * len(_AUTOCAST_DEVICES)

    @classmethod
    def now(cls) -> Settings:
        """Returns the settings as they are."""
        autocast = tuple(
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            for device in _AUTOCAST_DEVICES
        )
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), autocast)

    def differences(self) -> list[Difference]:
        """Returns in what the settings differ now."""
        now = Settings.now()
        pairs = [
            ("whether gradients are on", self.gradients, now.gradients),
            ("whether inference mode is on", self.inference_mode, now.inference_mode),
            ("the default dtype", self.default_dtype, now.default_dtype),
        ]
        found = [Difference(Aspect.SETTING, name, a, b) for name, a, b in pairs if a is not None and a != b]
        if self.autocast != now.autocast:
            found.append(Difference(Aspect.SETTING, "autocast", _autocast_text(self), _autocast_text(now)))
        return found


def _autocast_text(settings: Settings) -> str:
    pairs = zip(_AUTOCAST_DEVICES, settings.autocast, strict=True)
    return ", ".join(f"{dtype} on {device}" for device, dtype in pairs if dtype is not None) or "off"


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a call says of a tensor beside its class and dtype.

    Attributes:
        sizes: Its shape.
        device: Where it is.
        layout: How it lies in memory.
        requires_grad: Whether it requires gradients; `None` where that is not known.
    """

    sizes: tuple[Dimension, ...]
    device: torch.device
    layout: Layout = None
    requires_grad: bool | None = None


@dataclass(frozen=True)
class CallSignature:
    """What a call looks like, apart from the numbers in its tensors. Signatures can be compared and hashed.

    Attributes:
        inputs: The inputs by name: structure and plain values.
        tensors: What else is known of each tensor in them, in order.
        same: For each tensor which of them, the first, is the same object.
        settings: The settings of torch; `None` where they are not known.
        ranges: The smallest and the largest that a symbolic size may be.
        ignored: In what calls may differ: with `Aspect.SIZE` tensors may have any size.

    Example:
        >>> one = CallSignature.of({"x": torch.ones(2), "scale": 3})
        >>> one == CallSignature.of({"x": torch.zeros(2), "scale": 3})
        True
        >>> print(*one.differences([torch.ones(4), 3]))
        dimension 0 of 'x' is 4, and was 2 in the example
    """

    inputs: tuple[tuple[str, ValueSpec], ...]
    tensors: tuple[TensorForm, ...]
    same: tuple[int, ...]
    settings: Settings | None = None
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)
    ignored: frozenset[Aspect] = frozenset()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> CallSignature:
        """Returns the signature of a call with these inputs, under the settings of now."""
        inputs = tuple((name, describe(value)) for name, value in values.items())
        tensors: list[tuple[str, Tensor]] = []
        for (name, spec), value in zip(inputs, values.values(), strict=True):
            _compare_values(name, spec, value, tensors, [])
        forms = tuple(TensorForm(tuple(t.shape), t.device, layout_of(t), t.requires_grad) for _, t in tensors)
        return cls(inputs, forms, _first_same(tensors), Settings.now())

    @classmethod
    def of_frame(cls, frame: Frame) -> CallSignature:
        """Returns the signature of the call that `frame` is the record of, as far as the record says."""
        by_name = {str(node.target): node.spec for node in frame.inputs()}
        inputs = tuple((p.name, by_name.get(p.name, ScalarSpec(None))) for p in frame.parameters)
        tensors = [leaf for name, spec in inputs for leaf in tensor_leaves(name, spec)]
        forms = [TensorForm(tuple(spec.shape), spec.device) for _, spec in tensors]
        if len(frame.input_flags) == len(forms):
            pairs = zip(forms, frame.input_flags, strict=True)
            forms = [replace(form, requires_grad=grad, layout=is_contiguous) for form, (grad, is_contiguous) in pairs]
        numbers = {name: number for number, (name, _) in enumerate(tensors)}
        same = list(range(len(tensors)))
        for places in frame.same_inputs:
            pair = sorted(numbers[name] for name in (_leaf_name(*place) for place in places) if name in numbers)
            if len(pair) == len(places):
                same[pair[1]] = same[pair[0]]
        return cls(inputs, tuple(forms), tuple(same))

    @property
    def objects(self) -> list[str]:
        """The classes of the objects among the inputs, of which nothing else is known."""
        found: list[str] = []
        for _, spec in self.inputs:
            _collect_objects(spec, found)
        return found

    def differences(self, values: Sequence[Any]) -> list[Difference]:
        """Returns in what a call with these inputs, in order, differs. `torch.compile` can trace it.

        If the structure or a plain value differs, nothing else is looked at.
        """
        found: list[Difference] = []
        tensors: list[tuple[str, Tensor]] = []
        for number, (name, spec) in enumerate(self.inputs):
            _compare_values(name, spec, values[number], tensors, found)
        if found and any(difference.aspect is Aspect.VALUE for difference in found):
            return found
        is_sized = Aspect.SIZE not in self.ignored
        for number, (name, tensor) in enumerate(tensors):
            _compare_tensors(name, self.tensors[number], tensor, is_sized, found)
        if is_sized:
            self._compare_symbolic_sizes(tensors, found)
        self._compare_objects(tensors, found)
        if self.settings is not None:
            found.extend(self.settings.differences())
        return [difference for difference in found if difference.aspect not in self.ignored]

    def _compare_symbolic_sizes(self, tensors: list[tuple[str, Tensor]], found: list[Difference]) -> None:
        sizes: dict[str, int] = {}
        for (name, tensor), form in zip(tensors, self.tensors, strict=True):
            for position, dimension in enumerate(form.sizes):
                if not isinstance(dimension, str):
                    continue
                size = tensor.shape[position]
                least, most = self.ranges.get(dimension, (size, size))
                if sizes.setdefault(dimension, size) != size:
                    was: Any = f"the same as a size that is {sizes[dimension]} now"
                    found.append(Difference(Aspect.SIZE, name, was, size, position))
                elif not least <= size <= most:
                    found.append(Difference(Aspect.SIZE, name, range(least, most), size, position))

    def _compare_objects(self, tensors: list[tuple[str, Tensor]], found: list[Difference]) -> None:
        same = _first_same(tensors)
        for number, (name, _) in enumerate(tensors):
            was, now = self.same[number], same[number]
            if was != now:
                aspect = Aspect.SPLIT if now == number else Aspect.JOINED
                found.append(Difference(aspect, name, tensors[min(was, now)][0], None))


def inputs_of_call(frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns what a call of the module of `frame` gives to each parameter."""
    return {p.name: given_input(frame.parameters, p.name, args, kwargs) for p in frame.parameters}


def tensor_leaves(name: str, spec: ValueSpec) -> Iterator[tuple[str, TensorSpec]]:
    """Yields the tensors in an input, each with what it is called in messages."""
    if isinstance(spec, TensorSpec):
        yield name, spec
    elif isinstance(spec, ContainerSpec):
        for text, _, child in spec.children:
            yield from tensor_leaves(_below(name, text), child)


def _below(name: str, text: str) -> str:
    return f"{name}.{text}" if "|" in name else f"{name}|{text}"


def _leaf_name(parameter: str, dig: Sequence[Any]) -> str:
    return functools.reduce(_below, map(key_text, dig), parameter)


def _collect_objects(spec: ValueSpec, found: list[str]) -> None:
    if isinstance(spec, (ObjectSpec, UnknownSpec)):
        found.append(str(spec))
    elif isinstance(spec, ContainerSpec):
        for _, _, child in spec.children:
            _collect_objects(child, found)


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
        kind = "Tensor" if type(value) is torch.nn.Parameter else type(value).__name__
        if kind != spec.type_name:
            found.append(Difference(Aspect.CLASS, name, spec.type_name, kind))
        if value.dtype != spec.dtype:
            found.append(Difference(Aspect.DTYPE, name, spec.dtype, value.dtype))
    elif not _is_known_to_fit(spec, value):
        found.append(Difference(Aspect.VALUE, name, spec, describe(value)))


def _is_known_to_fit(spec: ValueSpec, value: Any) -> bool:
    """Whether a plain value is the same, an object of the same class, or nothing is known."""
    if isinstance(spec, ScalarSpec):
        return is_same_plain(spec.value, value)
    return isinstance(spec, UnknownSpec) or (isinstance(spec, ObjectSpec) and type(value).__name__ == spec.type_name)


def _compare_children(
    name: str, spec: ContainerSpec, value: Any, tensors: list[tuple[str, Tensor]], found: list[Difference]
) -> None:
    count = 0
    for text, key, child in spec.children:
        if _has(value, key):
            count += 1
            _compare_values(_below(name, text), child, take(value, key), tensors, found)
        else:
            found.append(Difference(Aspect.VALUE, _below(name, text), child, None))
    if isinstance(value, (tuple, list, Mapping)) and len(value) > count:
        known = {text for text, _, _ in spec.children}
        for key, item in children(value) or ():
            if key_text(key) not in known:
                found.append(Difference(Aspect.VALUE, _below(name, key_text(key)), None, describe(item)))


def _has(value: Any, key: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return int(key) < len(value)
    return plain_dict_key(key) in value if isinstance(value, Mapping) else hasattr(value, key)


def _is_of_class(spec: ContainerSpec, value: Any) -> bool:
    """Whether a container is of the class that the spec names; in a loaded graph another class stands for it."""
    one, other = type(value), spec.type
    if one is torch.Size or other is torch.Size:  # graphs make tuples of sizes
        return one in _OF_SIZES and other in _OF_SIZES
    return one is other or (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


_OF_SIZES = (tuple, torch.Size)


def _compare_tensors(name: str, form: TensorForm, tensor: Tensor, is_sized: bool, found: list[Difference]) -> None:
    for position, size in enumerate(form.sizes):
        if is_sized and isinstance(size, int) and tensor.shape[position] != size:
            found.append(Difference(Aspect.SIZE, name, size, tensor.shape[position], position))
    if tensor.device != form.device:
        found.append(Difference(Aspect.DEVICE, name, form.device, tensor.device))
    if form.requires_grad is not None and tensor.requires_grad is not form.requires_grad:
        found.append(Difference(Aspect.REQUIRES_GRAD, name, form.requires_grad, tensor.requires_grad))
    if form.layout is not None:
        layout = layout_of(tensor)
        if not _is_same_layout(form.layout, layout, is_sized):
            found.append(Difference(Aspect.LAYOUT, name, form.layout, layout))


def layout_of(tensor: Tensor) -> Layout:
    """Returns how a tensor lies in memory; strides are 0 where they make no difference."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    if tensor.is_contiguous():
        return True
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _is_same_layout(was: Layout, now: Layout, is_sized: bool) -> bool:
    if was is False:
        return now is not True
    if is_sized or not isinstance(was, tuple) or not isinstance(now, tuple):
        return was == now
    return _order(was) == _order(now)


def _order(strides: tuple[int, ...]) -> list[int]:
    return sorted(range(len(strides)), key=lambda position: strides[position])
