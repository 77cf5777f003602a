"""Trails along the residual stream: back from a value through norms, scalings by constants, and changes of shape."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.components.flow import Flow, Place, Value, walk
from graphpatch_notebook.components.operations import (
    ADDITIONS,
    LINEAR_MAPS,
    MOMENTS,
    NORMS,
    SAME_VALUES,
    SCALINGS,
    SOFTMAXES,
    VIEWS,
)

StepKind: TypeAlias = Literal["add", "bias", "norm", "scale", "same"]

_LONGEST = 200
_NORM_FRAMES = 3


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A module that normalizes its input: the values of its input and its output."""

    frame: Frame
    given: Place
    returned: Place


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One operation of a trail.

    Attributes:
        kind: What it does with the stream: adds what is computed from it, or something else (`bias`), normalizes,
            scales by a constant, or only gives it another shape (`same`).
        result, source: The stream after it, and before it.
        other: What it adds.
    """

    kind: StepKind
    result: Value
    source: Value
    other: Value | None = None


class Trails:
    """Trails along the stream, and the norms on them.

    Attributes:
        norms: The norm that returns a value.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.norms: dict[Value, Norm] = {}
        for frame in flow.frames:  # outer ones first: a norm may consist of norms
            if frame.call is not None and (norm := self._norm(frame)) is not None:
                self.norms.setdefault(norm.returned.value, norm)

    def _norm(self, frame: Frame) -> Norm | None:
        """Returns a frame as a norm, if its module takes moments of its input, and has no linear map."""
        if frame.opaque_reason is not None:
            return None
        frames = list(islice(frame.walk(), _NORM_FRAMES + 1))
        if len(frames) > _NORM_FRAMES:
            return None
        ops = {node.op for inner in frames for node in inner.graph_nodes if node.kind == "op"}
        if not ops & MOMENTS or ops & (SOFTMAXES | LINEAR_MAPS):
            return None
        if any(parameter.squeeze().ndim > 1 for parameter in frame.module.parameters()):
            return None
        given, returned = self.flow.inputs(frame), self.flow.outputs(frame)
        added = (self.flow.reads(node) for inner in frames for node in inner.graph_nodes if node.op in ADDITIONS)
        if any(len({place.value for place in given} & {*reads}) > 1 for reads in added):
            return None
        if len(returned) > 1:  # an exported norm also returns its input, if other operations read the cast input
            returned = [place for place in returned if not self.is_same(place.value, given[0].value)]
        is_norm = bool(given) and len(returned) == 1 and given[0].value.shape == returned[0].value.shape
        # Where the user edited its graph, the norm is a call in that graph: the module computes something else.
        is_norm = is_norm and not any(inner.is_edited and inner.custom_graph is None for inner in frames)
        return Norm(frame, given[0], returned[0]) if is_norm else None

    def path(self, value: Value, inside: Frame) -> str:
        """Returns the path at which a value in a frame is patched: at the outermost module that only returns it."""
        norm = self.norms.get(value)
        return self.flow.boundary_path(value, inside, is_unread=True) if norm is None else norm.returned.path

    def _source(self, value: Value, ops: Collection[str], *, is_whole: bool) -> Value | None:
        """Returns the only value that a norm, or an operation among `ops`, reads; `None` if there are several.

        With `is_whole`, only values of the same size count.
        """
        if (norm := self.norms.get(value)) is not None:
            return norm.given.value
        reads = self.flow.moving(value.node) if value.op in ops else []
        reads = [read for read in reads if (read.size == value.size if is_whole else read.is_float)]
        return reads[0] if len(reads) == 1 else None

    def sources(self, value: Value, ops: Collection[str], *, is_whole: bool = False) -> Iterator[Value]:
        """Yields a value, and what norms and some operations compute it from, as far as a linear map."""
        source: Value | None = value
        while source is not None:
            yield source
            source = None if self.flow.is_linear_map(source) else self._source(source, ops, is_whole=is_whole)

    def linear_map(self, value: Value, ops: Collection[str], *, is_whole: bool = False) -> Value:
        """Returns the linear map that norms and some operations compute a value from, or where the way to it ends."""
        return deque(self.sources(value, ops, is_whole=is_whole), 1)[0]

    def back(self, end: Value) -> Iterator[tuple[Value, list[Step]]]:
        """Yields the values that norms, scalings and the like make a value of, nearest first, with the steps from them.

        Nothing that comes from inputs is added on the way.
        """
        came_by: dict[Value, list[Step]] = {end: []}
        for value in walk([end], lambda value: [step.source for step in self._steps(value)], _LONGEST):
            yield value, came_by[value]
            for step in self._steps(value):
                came_by.setdefault(step.source, [step, *came_by[value]])

    def is_same(self, end: Value, start: Value) -> bool:
        """Whether a value equals another one, up to its shape."""
        found = next((steps for value, steps in self.back(end) if value == start), None)
        return found is not None and all(step.kind == "same" for step in found)

    def _steps(self, value: Value) -> Iterator[Step]:
        """Yields the steps that may have led to a value of the stream."""
        flow, op = self.flow, value.op
        if (norm := self.norms.get(value)) is not None:
            yield Step("norm", value, norm.given.value)
            return
        reads = flow.reads(value.node) if op else []
        whole = [read for read in reads if read.size == value.size]
        if op in ADDITIONS and len(reads) > 1:
            for source, other in (reads[:2], reads[1::-1]):
                if source in whole and flow.is_held(other):
                    yield Step("bias", value, source, other)
        elif op in NORMS and reads:
            yield Step("norm", value, reads[0])
        elif op in SAME_VALUES or op in VIEWS or op in ADDITIONS:  # of a number
            # The other one of these has the dtype only.
            yield from (Step("same", value, source) for source in (whole[:1] if op in ("to", "type_as") else whole))
        elif op in SCALINGS:
            yield from (
                Step("scale", value, source)
                for source in whole
                if all(flow.is_held(other) or self._is_mask(other) for other in reads if other is not source)
            )

    def _is_mask(self, value: Value) -> bool:
        """Whether a value is made of integers or truth values."""
        before = walk([value], lambda each: self.flow.reads(each.node) if each.op in SAME_VALUES | VIEWS else [])
        return any(not each.is_float for each in before)
