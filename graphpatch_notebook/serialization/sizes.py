"""Determines the input sizes for which a saved graph holds.

`checks.dimensions` reports which sizes of the inputs can change. The model is recorded again at other sizes on the
meta device, where nothing is computed. The graph holds at these sizes if both records have the same steps: the same
operations with the same arguments. Arguments that are sizes refer to the node that they come from, so every number that
the code itself made of a size (`range(n)`, a table cut to a length, a branch) is a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeAlias

from graphpatch_notebook.capture.records import CallNode, Frame, Ref, Structure
from graphpatch_notebook.checks.dimensions import InputDim, dimensions_of
from graphpatch_notebook.checks.meta_runs import MetaRunError, input_shapes, recorded_on_meta
from graphpatch_notebook.checks.model_state import ModuleState
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.serialization.forms import Form

_Step: TypeAlias = "tuple[str, Any]"

_NEAR = (1, 2, 3)
"""How far from the example's size each size is tried: a model may look at whether one is even, or divides by three."""

_LARGE = (48, 307)
"""Other sizes that are tried: one with many divisors, and a prime."""


def find_sizes(root: Frame, form: Form) -> None:
    """Stores in `form` which sizes may differ from those of the example, and their ranges.

    Sizes that the model cannot be recorded at stay those of the example, until a call of the user shows more.
    """
    with afterwards(ModuleState(root.module).restore):  # a copy runs, but may write into objects outside the model
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
        try:
            self._steps: list[_Step] | None = list(steps_of(recorded_on_meta(root, self._shapes)))
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
        if self._steps is None:
            return None
        try:
            found = list(steps_of(recorded_on_meta(self._root, shapes)))
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
    if isinstance(value, Ref):
        return "node", numbers.get(id(value.node)), value.dig
    if isinstance(value, Structure):
        return value.type, [(key, _plain(child, numbers)) for key, child in value.children]
    if isinstance(value, (tuple, list)):
        return type(value), [_plain(item, numbers) for item in value]
    if isinstance(value, dict):
        return type(value), [(key, _plain(item, numbers)) for key, item in value.items()]
    if isinstance(value, slice):
        return slice, [_plain(item, numbers) for item in (value.start, value.stop, value.step)]
    return type(value), repr(value) if isinstance(value, float) else value


def _is_equal(step: Any, other: Any) -> bool:
    try:
        return bool(step == other)
    except (ValueError, TypeError, RuntimeError):  # of arrays among the arguments
        return False
