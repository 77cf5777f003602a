"""The operations between linear maps of the model and a value that is computed from their results.

A *waist* is a value that everything between passes through. Between two waists next to each other there is one
operation, or several that belong together: a rotation, a norm, an activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphpatch_notebook.capture.records import Node
from graphpatch_notebook.components.chain import Trails
from graphpatch_notebook.components.flow import Value
from graphpatch_notebook.components.operations import MOMENTS, NORMS, SAME_VALUES, VIEWS

_LARGEST = 300


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """The values between linear maps and a value that is computed from them.

    Attributes:
        sources: The linear maps.
        waists: The values that everything passes through, in order of execution; the last is the value itself.
        ops: The torch functions between each waist and the one before it; for a norm, `layer_norm`.
    """

    sources: tuple[Value, ...]
    waists: tuple[Value, ...]
    ops: Mapping[Value, tuple[str, ...]]

    def is_view(self, waist: Value) -> bool:
        """Whether a waist has the values of the one before, or a part of them."""
        return all(op in VIEWS or op in SAME_VALUES for op in self.ops[waist])

    def is_norm(self, waist: Value) -> bool:
        """Whether a waist is a norm of the one before."""
        return any(op in MOMENTS for op in self.ops[waist])


def region(trails: Trails, end: Value, inside: frozenset[Node]) -> Region:
    """Returns the region of a value, among the nodes `inside`."""
    flow = trails.flow
    reads: dict[Value, list[Value]] = {}
    sources: list[Value] = []
    waiting = [end]
    while waiting and len(reads) < _LARGEST:
        value = waiting.pop()
        if value in reads:
            continue
        reads[value] = []
        if value.node not in inside or flow.is_linear_map(value):
            sources.append(value)
        elif (norm := trails.norms.get(value)) is not None:
            reads[value] = [norm.given.value]
        else:
            reads[value] = flow.moving(value.node)
        waiting += reads[value]
    values = sorted(reads, key=lambda value: flow.order[value.node])
    last_use = {read: position for position, value in enumerate(values) for read in reads[value]}
    open_values: set[Value] = set()
    waists: list[Value] = []
    ops: dict[Value, tuple[str, ...]] = {}
    between: list[str] = []
    rest = len(sources)
    for position, value in enumerate(values):
        open_values = {each for each in open_values if last_use[each] > position} | {value}
        rest -= value in sources
        if value not in sources:
            between.append("layer_norm" if value in trails.norms or value.op in NORMS else value.op)
        if len(open_values) == 1 and not rest:
            waists.append(value)
            ops[value] = tuple(between)
            between = []
    return Region(tuple(sources), tuple(waists), ops)
