"""The form of the calls that a loaded graph is valid for.

A graph is a record of one run. It holds the flags, the branches and the absent inputs of the example, so all of these
must be the same. Sizes may differ within the ranges that were found when it was saved.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch.nn import Module

from graphpatch_notebook.capture.inputs import bind, signature_with
from graphpatch_notebook.capture.records import CallNode, Frame, InputParameter, Ref, Structure, map_leaves
from graphpatch_notebook.checks.call_signature import (
    CONTIGUOUS,
    Aspect,
    CallSignature,
    Difference,
    Dimension,
    TensorForm,
    tensor_leaves,
)
from graphpatch_notebook.checks.dimensions import InputDim, dimensions_of
from graphpatch_notebook.checks.meta_runs import MetaRunError, Variation, input_shapes, recorded_on_meta
from graphpatch_notebook.checks.model_state import preserved
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.serialization.codecs.reading import JsonValue
from graphpatch_notebook.serialization.codecs.values import dtype_of
from graphpatch_notebook.values import ValueSpec, dtype_name

_EMPTY = inspect.Parameter.empty
_REPAIR = "make the PatchableGraph with such inputs and save it again"


def given_values(parameters: Sequence[InputParameter], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the arguments of a call by parameter; `None` if the call does not fit the parameters."""
    bound = bind(signature_with(parameters), args, kwargs)
    if bound is None:
        return None
    defaults = {p.name: None if p.default is _EMPTY else p.default for p in parameters}
    return {name: bound.get(name, default) for name, default in defaults.items()}


@dataclass
class Form:
    """The calls that a stored graph is valid for.

    Attributes:
        specs: The specs of the values of the parameters in the example.
        dims: The sizes of each tensor among the inputs, as numbers or names.
        ranges: The smallest and the largest size that the graph was checked for, by the name of the size.
        same: For each tensor among the inputs, the number of the first one that is the same object.
        grad_modes: Whether gradients may be on, off, or both.
        is_contiguous: Whether it is only valid for contiguous inputs.
        note: Why fixed sizes are fixed.
        default_dtype: The default dtype of torch when it was saved.
    """

    parameters: list[InputParameter]
    specs: list[tuple[str, ValueSpec]]
    dims: list[list[Dimension]]
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    same: list[int] = field(default_factory=list)
    grad_modes: list[bool] = field(default_factory=list)
    is_contiguous: bool = True
    note: str = ""
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    @classmethod
    def of_example(cls, frame: Frame) -> Form:
        """Returns the form of calls that equal the example in all sizes and arguments."""
        specs = [(str(node.target), node.spec) for node in frame.inputs()]
        leaves = [spec for name, spec in specs for _, spec in tensor_leaves(name, spec)]
        return cls(list(frame.parameters), specs, [list(spec.shape) for spec in leaves], same=list(range(len(leaves))))

    def widen(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Extends the ranges to the sizes of a call on which the graph equals the model; returns whether it could."""
        ranges = dict(self.ranges)
        for sizes, dims in zip(shapes, self.dims, strict=True):
            for size, dim in zip(sizes, dims, strict=True):
                if isinstance(dim, str):
                    least, most = ranges[dim]
                    ranges[dim] = (min(least, size), max(most, size))
                elif size != dim:
                    return False
        self.ranges = ranges
        return True

    def problem(self, args: tuple[Any, ...], kwargs: dict[str, Any], advice: str = "") -> str | None:
        """Returns why the graph does not hold for a call, with the repair and `advice`, or `None` where it does."""
        found = self._problem(args, kwargs)
        return None if found is None else f"{found}; {_REPAIR}{advice}"

    def _problem(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        values = given_values(self.parameters, args, kwargs)
        if values is None:
            return f"the call does not fit forward({', '.join(p.name for p in self.parameters)})"
        if torch.is_grad_enabled() not in self.grad_modes:
            is_on = "on" if torch.is_grad_enabled() else "off"
            return f"the graph was not found equal to the model with gradients {is_on}"
        signature = self._signature()
        if objects := signature.objects:
            return f"it has an object ({objects[0]}) among its inputs, whose contents cannot be compared"
        differences = signature.differences([values.get(name) for name, _ in self.specs])
        return self._text(differences[0]) if differences else None

    def _signature(self) -> CallSignature:
        tensors = [spec for name, spec in self.specs for _, spec in tensor_leaves(name, spec)]
        forms = [
            TensorForm(tuple(dims), spec.device, layout=CONTIGUOUS if self.is_contiguous else None)
            for spec, dims in zip(tensors, self.dims, strict=True)
        ]
        settings = ((Aspect.DEFAULT_DTYPE, self.default_dtype), (Aspect.AUTOCAST, None))
        return CallSignature(tuple(self.specs), tuple(forms), tuple(self.same), settings, self.ranges)

    def _text(self, difference: Difference) -> str:
        where = f"{difference.subject} is {difference.now}"
        if difference.aspect is Aspect.SIZE and isinstance(difference.was, int):
            return f"{where}, and the graph holds for {difference.was} only ({self.note or 'fixed'})"
        if difference.aspect is Aspect.SIZE and isinstance(difference.was, range):
            least, most = difference.was.start, difference.was.stop
            checked = f"{least} to {most}" if least < most else f"{least} only"
            return (
                f"{where}, and the graph was checked for {checked} when it was saved (pg.save(file, "
                "check=[((inputs of that size,), {})]) checks others)"
            )
        return str(difference)


class Guard:
    """Finds calls that a loaded graph with these modules is not valid for.

    With a model, `changed` is what its modules held otherwise when it was saved.
    """

    def __init__(self, form: Form, modules: Sequence[Module], changed: str | None) -> None:
        self.form = form
        self._changed = changed
        self._modes = [(module, module.training) for module in modules]
        self._dtypes = [
            (registry, name, tensor.dtype)
            for module in modules
            for registry in (module._parameters, module._buffers)
            for name, tensor in registry.items()
            if tensor is not None
        ]

    def problem(self, args: tuple[Any, ...], kwargs: dict[str, Any], advice: str = "") -> str | None:
        """Returns why the graph does not hold for a call, with the repair and `advice`, or `None` where it does."""
        for module, training in self._modes:
            if module.training is not training:
                was, call = ("train", "train()") if training else ("eval", "eval()")
                return f"{type(module).__name__} was in {was} mode when the graph was captured; call pg.{call}"
        for registry, name, dtype in self._dtypes:
            tensor = registry.get(name)
            if tensor is None or tensor.dtype != dtype:
                now = "gone" if tensor is None else f"of {tensor.dtype}"
                return f"the tensor {name!r} was of {dtype} when the graph was captured, and is {now}"
        if self._changed is not None:
            return f"{self._changed} has changed since it was saved"
        return self.form.problem(args, kwargs, advice)


# -- as JSON -----------------------------------------------------------------------------------------------------------


def encoded_form(form: Form) -> dict[str, Any]:
    """Returns the JSON of a form, without parameters and specs, which the root frame has."""
    return {
        "dims": form.dims,
        "ranges": {name: list(bounds) for name, bounds in form.ranges.items()},
        "same": form.same,
        "grad_modes": form.grad_modes,
        "is_contiguous": form.is_contiguous,
        "note": form.note,
        "default_dtype": dtype_name(form.default_dtype),
    }


def decoded_form(item: JsonValue, frame: Frame) -> Form:
    """Returns the form of the calls of the root frame."""
    fields = item.fields("dims", "ranges", "same", "grad_modes", "is_contiguous", "note", "default_dtype")
    form = Form.of_example(frame)
    form.ranges = {}
    for name, bounds in fields["ranges"].entries().items():
        least, most = (bound.whole() for bound in bounds.items(2))
        form.ranges[name] = (least, most)
    form.dims = [
        [_decoded_dim(part, size, form.ranges) for part, size in zip(dims.items(len(shape)), shape, strict=True)]
        for dims, shape in zip(fields["dims"].items(len(form.dims)), form.dims, strict=True)
    ]
    form.same = [part.whole(0, number) for number, part in enumerate(fields["same"].items(len(form.same)))]
    form.grad_modes = [mode.flag() for mode in fields["grad_modes"].items()]
    form.is_contiguous = fields["is_contiguous"].flag()
    form.note = fields["note"].text()
    form.default_dtype = dtype_of(fields["default_dtype"])
    return form


def _decoded_dim(item: JsonValue, example: Any, ranges: dict[str, tuple[int, int]]) -> Dimension:
    if type(item.value) is str:
        return item.one_of(tuple(ranges))
    return item.whole(example, example)


# -- which sizes the graph holds for -----------------------------------------------------------------------------------

# `checks.dimensions` reports which sizes of the inputs can change. The model is recorded again at other sizes on the
# meta device, where nothing is computed. The graph holds at these sizes if both records have the same steps: the same
# operations with the same arguments. Arguments that are sizes refer to the node that they come from, so every number
# that the code itself made of a size (`range(n)`, a table cut to a length, a branch) is a difference.

_Step: TypeAlias = "tuple[str, Any]"

_NEAR = (1, 2, 3)
"""How far from the example's size each size is tried: a model may look at whether one is even, or divides by three."""

_LARGE = (48, 307)
"""Other sizes that are tried: one with many divisors, and a prime."""


def find_sizes(root: Frame, form: Form) -> None:
    """Stores in `form` which sizes may differ from those of the example, and their ranges.

    Sizes that the model cannot be recorded at stay those of the example, until a call of the user shows more.
    """
    with preserved(root.module):  # a copy runs, but may write into objects outside the model
        explorer = _Explorer(root)
        groups = [g for g in dimensions_of(root).groups if all(number < len(form.dims) for number, _ in g)]
        found = [(places, sizes) for places in groups if (sizes := explorer.sizes(places))]
        # Two sizes may be fine one at a time, and not together: both large, both small, or both the same.
        common = min((max(sizes) for _, sizes in found), default=0)
        for pick in (max, min, lambda sizes: max(common, min(sizes))):
            if explorer.is_same({place: pick(sizes) for places, sizes in found for place in places}) is False:
                found.clear()
    for number, (places, sizes) in enumerate(found):
        name = f"size_{number}"
        form.ranges[name] = (min(sizes), max(sizes))
        for tensor, position in places:
            form.dims[tensor][position] = name
    form.note = "; ".join(explorer.notes) or "the model was not found to take other sizes"


class _Explorer:
    """Compares the steps that a model takes at other sizes with those at the sizes of the example."""

    def __init__(self, root: Frame) -> None:
        self.notes: list[str] = []
        self._root = root
        self._shapes = input_shapes(root)
        self._outcomes: dict[tuple[tuple[int, ...], ...], bool | None] = {}
        try:
            self._steps: list[_Step] | None = list(steps_of(recorded_on_meta(root, Variation(self._shapes))))
        except MetaRunError:
            self._steps = None

    def sizes(self, places: Sequence[InputDim]) -> list[int]:
        """Returns sizes at `places` with the same steps, the example's size first; empty if no other size has them."""
        size = self._shapes[places[0][0]][places[0][1]]
        found, is_different = [size], False
        larger = {*(size + step for step in _NEAR), 2 * size + 3, *_LARGE}
        smaller = {*(size - step for step in _NEAR), size // 2, 1}
        for others in (
            sorted(other for other in larger if other > size),
            sorted((other for other in smaller if 0 < other < size), reverse=True),
        ):
            for other in others:
                outcome = self.is_same(dict.fromkeys(places, other))
                if outcome is False:
                    is_different = True
                    break
                if outcome:
                    found.append(other)
        return [] if is_different and len(found) == 1 else found

    def is_same(self, changes: Mapping[InputDim, int]) -> bool | None:
        """Whether the steps are the same with these sizes; `None` if the model cannot be recorded there."""
        shapes = [list(shape) for shape in self._shapes]
        for (number, position), size in changes.items():
            shapes[number][position] = size
        tried = tuple(map(tuple, shapes))
        if tried not in self._outcomes:
            self._outcomes[tried] = self._has_same_steps(shapes)
        return self._outcomes[tried]

    def _has_same_steps(self, shapes: list[list[int]]) -> bool | None:
        if self._steps is None:
            return None
        try:
            found = list(steps_of(recorded_on_meta(self._root, Variation(shapes))))
        except MetaRunError:
            return None
        for (name, step), (other_name, other) in zip_longest(self._steps, found, fillvalue=("its end", None)):
            if not _is_equal(step, other):
                if len(self.notes) < 3:
                    where = " and ".join(str(tuple(shape)) for shape in shapes)
                    self.notes.append(f"at {where}: the model does something else, {other_name} in place of {name}")
                return False
        return True


def steps_of(frame: Frame) -> Iterator[_Step]:
    """Yields the steps of a record, each with its name in messages: operations, what they are given, the outputs."""
    numbers = {id(node): number for number, node in enumerate(frame.nodes)}
    path = format_path(frame.path)
    for node in frame.nodes:
        name = f"{node.kind} {(f'{path}.' if path else '') + (node.name or node.op)!r}"
        target = (id(node.target), node.spec) if node.kind == "constant" else node.target
        index = node.call_index if isinstance(node, CallNode) else 0
        source = numbers.get(id(node.whole)), node.position, index
        yield name, (node.kind, target, source, _plain(node.args, numbers), _plain(node.kwargs, numbers))
        if isinstance(node, CallNode):
            yield from steps_of(node.frame)
    yield f"what {path or 'the model'!r} returns", _plain(frame.output, numbers)


def _plain(value: Any, numbers: Mapping[int, int]) -> Any:
    """Returns arguments with node numbers in place of references, and each value with its type."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Ref):
            return "node", numbers.get(id(value.node)), value.dig
        if isinstance(value, Structure):
            return value.type, [(key, _plain(child, numbers)) for key, child in value.children]
        return type(value), repr(value) if isinstance(value, float) else value

    return map_leaves(value, leaf)


def _is_equal(step: Any, other: Any) -> bool:
    try:
        return bool(step == other)
    except (ValueError, TypeError, RuntimeError):  # of arrays among the arguments
        return False
