"""The residual stream: which frames are the layers of a stack, and what each layer adds to its input.

A layer is a frame whose output is its input plus something: from the output, a trail of additions, norms and scalings
by constants leads back to an input. At an addition the trail follows the summand that reaches the input; the other
summand is what the layer writes.

A `Region` is what lies between linear maps and a value. A *waist* is a value that everything between passes through.
Between two waists next to each other there is one operation, or several that belong together: a rotation, a norm, an
activation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from string import digits
from typing import Literal, TypeAlias

from torch.nn import Module, ModuleDict

from graphpatch_notebook.capture.records import CallNode, Frame, Node
from graphpatch_notebook.components.flow import Axes, Flow, Place, Value
from graphpatch_notebook.components.operations import (
    ADDITIONS,
    ATTENTION,
    LINEAR_MAPS,
    MOMENTS,
    NORMS,
    SAME_VALUES,
    SCALINGS,
    SOFTMAXES,
    VIEWS,
)
from graphpatch_notebook.paths import format_path

StepKind: TypeAlias = Literal["add", "bias", "norm", "scale", "same"]

_LONGEST = 2000
_NORM_FRAMES = 3
_LARGEST = 300


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
        kind: What it does with the stream: adds a value, or a constant (`bias`), normalizes, scales by a constant, or
            only gives it another shape (`same`).
        result, source: The stream after it, and before it.
        other: What it adds.
    """

    kind: StepKind
    result: Value
    source: Value
    other: Value | None = None


@dataclass(eq=False)
class Layer:
    """One layer of a stack.

    Attributes:
        start, end: The stream at its input and at its output.
        steps: The trail from `start` to `end`.
        axes: What the dimensions of the stream are.
    """

    frame: Frame
    start: Place
    end: Place
    steps: list[Step] = field(default_factory=list)
    axes: Axes = ()

    @property
    def states(self) -> list[Value]:
        """The values of the stream in the layer, in order."""
        return [self.start.value, *(step.result for step in self.steps)]


@dataclass(slots=True, eq=False)
class Stack:
    """The layers of one list, in order.

    Attributes:
        name: Its name; empty if the model has one stack.
        frame: The frame that calls the layers.
        container: The attribute path of the list in that frame's module.
        unlike: The members of the list that do not add to their input, by number.
    """

    name: str
    frame: Frame
    container: str
    layers: list[Layer]
    unlike: dict[int, Frame]

    @property
    def prefix(self) -> str:
        """What names of its components begin with."""
        return f"{self.name}." if self.name else ""


class Trails:
    """Trails along the stream, and the norms on them.

    Attributes:
        norms: The norm that returns a value.
        edited: The paths of norms whose graphs the user edited; these are not in `norms`.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.norms: dict[Value, Norm] = {}
        self.edited: list[str] = []
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
        if len(returned) > 1:  # an exported norm also returns its input, if other operations read the cast input
            returned = [place for place in returned if not self.is_same(place.value, given[0].value)]
        is_norm = bool(given) and len(returned) == 1 and given[0].value.shape == returned[0].value.shape
        # Where the user edited its graph, the norm is a call in that graph: the module computes something else.
        if is_norm and any(inner.is_edited and inner.custom_graph is None for inner in frames):
            self.edited.append(format_path(frame.path))
            return None
        return Norm(frame, given[0], returned[0]) if is_norm else None

    def why_no_norm(self, reads: str) -> str:
        """Returns a message: that no norm reads something."""
        edited = f"; the graphs of norms were edited: {', '.join(map(repr, self.edited))}" if self.edited else ""
        return f"no norm reads {reads}{edited}"

    def source(self, value: Value, ops: Collection[str] | None = None, *, is_whole: bool = False) -> Value | None:
        """Returns the only value that a norm, or an operation among `ops`, reads; `None` if there are several.

        With `is_whole`, only values of the same size count.
        """
        if (norm := self.norms.get(value)) is not None:
            return norm.given.value
        if not value.op or (ops is not None and value.op not in ops):
            return None
        reads = self.flow.moving(value.node)
        reads = [read for read in reads if (read.size == value.size if is_whole else read.is_float)]
        return reads[0] if len(reads) == 1 else None

    def linear_map(self, value: Value, ops: Collection[str] | None = None, *, is_whole: bool = False) -> Value:
        """Returns the linear map that norms and some operations compute a value from, or where the way to it ends."""
        while not self.flow.is_linear_map(value) and (source := self.source(value, ops, is_whole=is_whole)) is not None:
            value = source
        return value

    def find(self, end: Value, start: Value, low: int = 0, *, adds: bool = True) -> list[Step] | None:
        """Returns the shortest trail from `start` to `end`, in order of execution; `None` if there is none.

        It does not go before the node with the number `low`. With `adds`, it may pass additions of values that come
        from inputs.
        """
        came_by: dict[Value, Step | None] = {end: None}
        waiting = deque([end])
        while waiting and len(came_by) < _LONGEST:
            value = waiting.popleft()
            if value == start:
                return list(_unwound(value, came_by))
            if value.node.kind != "op" or self.flow.order[value.node] <= low:
                continue
            for step in self._back(value, adds=adds):
                if step.source not in came_by:
                    came_by[step.source] = step
                    waiting.append(step.source)
        return None

    def is_same(self, end: Value, start: Value) -> bool:
        """Whether a value equals another one, up to its shape."""
        steps = self.find(end, start, adds=False)
        return steps is not None and all(step.kind == "same" for step in steps)

    def _back(self, value: Value, *, adds: bool) -> Iterator[Step]:
        """Yields the steps that may have led to a value of the stream."""
        flow, op = self.flow, value.op
        if (norm := self.norms.get(value)) is not None:
            yield Step("norm", value, norm.given.value)
            return
        reads, size = flow.reads(value.node), value.size
        if op in ADDITIONS and len(reads) > 1:
            for source, other in ((reads[0], reads[1]), (reads[1], reads[0])):
                is_constant = flow.is_held(other)
                if source.size == size and (adds or is_constant):
                    is_bias = is_constant and other.size < size
                    yield Step("bias" if is_bias else "add", value, source, other)
        elif op in NORMS and reads:
            yield Step("norm", value, reads[0])
        elif op in SAME_VALUES or op in VIEWS or op in ADDITIONS:
            sources = reads[:1] if op in ("to", "type_as") else reads  # the other has the dtype only
            yield from (Step("same", value, source) for source in sources if source.size == size)
        elif op in SCALINGS:
            for source in reads:
                others = [other for other in reads if other is not source]
                if source.size == size and all(map(flow.is_held, others)):
                    yield Step("scale", value, source)


def _unwound(value: Value, came_by: dict[Value, Step | None]) -> Iterator[Step]:
    while (step := came_by[value]) is not None:
        yield step
        value = step.result


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
    closing = [0] * (len(values) + 2)  # how many of the values before are read for the last time at a position
    count = 0  # of the values before that are read later
    waists: list[Value] = []
    ops: dict[Value, tuple[str, ...]] = {}
    between: list[str] = []
    rest = set(sources)
    for position, value in enumerate(values):
        count -= closing[position]
        if value in rest:
            rest.remove(value)
        else:
            between.append("layer_norm" if value in trails.norms or value.op in NORMS else value.op)
        if not count and not rest:
            waists.append(value)
            ops[value] = tuple(between)
            between = []
        count += 1
        closing[max(last_use.get(value, 0), position + 1)] += 1
    return Region(tuple(sources), tuple(waists), ops)


class Stacks:
    """Finds the stacks of layers."""

    def __init__(self, trails: Trails) -> None:
        self._trails = trails
        self._flow = trails.flow
        self._layers: dict[int, Layer | None] = {}
        self.found: list[Stack] = []
        self._search(self._flow.root)
        _name(self.found)

    def layer(self, frame: Frame) -> Layer | None:
        """Returns a frame as a layer, if it adds something to an input."""
        if id(frame) not in self._layers:
            self._layers[id(frame)] = self._layer(frame)
        return self._layers[id(frame)]

    def _layer(self, frame: Frame) -> Layer | None:
        if frame.opaque_reason is not None or not _has_matrix(frame):
            return None
        low = self._flow.start(frame)
        for end in self._flow.outputs(frame)[:3]:
            if len(end.value.shape) < 2:
                continue
            for start in self._flow.inputs(frame)[:6]:
                if start.value.size == end.value.size:
                    steps = self._trails.find(end.value, start.value, low)
                    if steps is not None and any(step.kind == "add" for step in steps):
                        return Layer(frame, start, end, steps)
        return None

    def _search(self, frame: Frame) -> None:
        taken: set[int] = set()
        for container, members in (*lists(frame), *filter(self._is_chain, numbered(frame))):
            if not any(map(_has_matrix, members)):
                continue
            layers = [self.layer(member) for member in members]
            found = [layer for layer in layers if layer is not None]
            if not found or any(map(self._holds_stack, members)):
                continue
            unlike = {number: members[number] for number, layer in enumerate(layers) if layer is None}
            self.found.append(Stack("", frame, container, found, unlike))
            taken |= set(map(id, members))
        for call in frame.calls():
            if id(call.frame) not in taken:
                self._search(call.frame)

    def _is_chain(self, container: tuple[str, list[Frame]]) -> bool:
        """Whether each of some modules is a layer that reads the output of the layer before it."""
        _, members = container
        layers = [layer for layer in map(self.layer, members) if layer is not None]
        return len(layers) == len(members) > 1 and all(
            self._trails.find(after.start.value, before.end.value, adds=False) is not None
            for before, after in pairwise(layers)
        )

    def _holds_stack(self, frame: Frame) -> bool:
        """Whether a frame holds layers itself: members of one class that pass the stream on, one after the other.

        The last parts of a layer may be such a chain, too (MobileBERT): then the layer also has attention.
        """
        for inner in frame.walk():
            for _, members in lists(inner):
                if len(members) < 2 or len({type(member.module) for member in members}) > 1:
                    continue
                layers = [self.layer(member) for member in members]
                if None in layers or not self._is_chain(("", members[:2])):
                    continue
                if _has_attention(inner) <= any(map(_has_attention, members)):
                    return True
        return False


def lists(frame: Frame) -> list[tuple[str, list[Frame]]]:
    """Returns the modules that a frame calls from lists, or calls repeatedly, by the attribute path of the list."""
    found: dict[str, list[Frame]] = {}
    for call in frame.calls():
        if (container := _container(call)) is not None:
            found.setdefault(container, []).append(call.frame)
    return list(found.items())


def numbered(frame: Frame) -> list[tuple[str, list[Frame]]]:
    """Returns the modules of one class that a frame calls from a dict, or from attributes like `block0` and `block1`.

    They are by the attribute path of the dict, or by the attributes' names without numbers.
    """
    found: dict[tuple[str, type], list[Frame]] = {}
    for call in frame.calls():
        if _container(call) is None:
            above, _, name = str(call.target).rpartition(".")
            is_in_dict = isinstance(container_of(call.frame), ModuleDict)
            stem = above if is_in_dict else str(call.target).rstrip(digits)
            if is_in_dict or not stem.endswith(name):
                found.setdefault((stem, type(call.frame.module)), []).append(call.frame)
    return [(stem, members) for (stem, _), members in found.items()]


def container_of(member: Frame) -> Module | None:
    """Returns the module that holds a called module as a child; `None` if it is held by a plain list or dict."""
    assert member.call is not None
    assert member.parent is not None
    above, _, name = str(member.call.target).rpartition(".")
    try:
        container = member.parent.module.get_submodule(above)
    except AttributeError:
        return None
    return container if name in dict(container.named_children()) else None


def _container(call: CallNode) -> str | None:
    above, _, last = str(call.target).rpartition(".")
    if last.isdigit():
        return above
    return str(call.target) if call.call_count > 1 else None


def _has_attention(frame: Frame) -> bool:
    return any(node.op in ATTENTION for inner in frame.walk() for node in inner.nodes)


def _has_matrix(frame: Frame) -> bool:
    return any(parameter.ndim > 1 for parameter in frame.module.parameters())


def _name(stacks: list[Stack]) -> None:
    """Names each of several stacks: by the path of its frame, and by the list if a frame has several."""
    if len(stacks) < 2:
        return
    for stack in stacks:
        others = [other for other in stacks if other.frame is stack.frame]
        names = [*stack.frame.path, *([stack.container.replace(".", "_")] if len(others) > 1 else [])]
        stack.name = ".".join(names)
