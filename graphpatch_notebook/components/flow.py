"""Values across frames, and the trails along them.

A value has one name here: an input of a frame is what the caller gave, and the result of a call is what the called
module returned, down to the operation that computed it. `Flow` says what an operation reads, and which operations read
a value. `Trails` lead along the residual stream: back from a value through norms, scalings by constants, and changes of
shape.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch

from graphpatch_notebook.capture.custom_graphs import GraphRun
from graphpatch_notebook.capture.inputs import inputs_of_call, passed_on
from graphpatch_notebook.capture.records import (
    HELD_KINDS,
    CallNode,
    ElementNode,
    Frame,
    Node,
    Ref,
    at_keys,
    map_leaves,
    refs_in,
)
from graphpatch_notebook.components.operations import (
    ADDITIONS,
    CREATIONS,
    LINEAR_MAPS,
    MOMENTS,
    NORMS,
    SAME_VALUES,
    SCALINGS,
    SHAPED_LIKE,
    SOFTMAXES,
    VIEWS,
)
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import (
    ContainerSpec,
    Key,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    ValueSpec,
    key_text,
    spec_at,
)

Axes: TypeAlias = "tuple[str | None, ...]"
"""What the dimensions of a value are; `None` where that is not known."""

_INTEGERS = frozenset([torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
_BOUNDARY = frozenset({"input", "call", "output"})
_CONTAINERS = (tuple, list, dict, slice)


class UnknownValueError(GraphError):
    """A value is not known; the text has its path (caught inside the package)."""


class Value(NamedTuple):
    """The value of a node, or the part of it at `keys`."""

    node: Node
    keys: tuple[Key, ...] = ()

    @property
    def op(self) -> str:
        """The torch function that computed it; empty if none did."""
        return self.node.op if self.node.kind == "op" else ""

    @property
    def spec(self) -> ValueSpec:
        """What is recorded of it."""
        found = spec_at(self.node.spec, self.keys) if self.keys else self.node.spec
        return found if found is not None else UnknownSpec()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor; `()` if it is not a tensor."""
        spec = self.spec
        return tuple(spec.shape) if isinstance(spec, TensorSpec) else ()

    @property
    def size(self) -> int:
        """The number of elements; -1 if it is not a tensor."""
        spec = self.spec
        return spec.shape.numel() if isinstance(spec, TensorSpec) else -1

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the tensor; `None` if it is not a tensor."""
        spec = self.spec
        return spec.dtype if isinstance(spec, TensorSpec) else None

    @property
    def is_float(self) -> bool:
        """Whether it is a tensor of floating-point numbers."""
        return self.dtype is not None and self.dtype.is_floating_point

    @property
    def is_mask(self) -> bool:
        """Whether it is a tensor of truth values."""
        return self.dtype == torch.bool


_Item = TypeVar("_Item", bound=Hashable)


def walk(starts: Iterable[_Item], following: Callable[[_Item], Iterable[_Item]], most: int = 2**31) -> Iterator[_Item]:
    """Yields values and those that follow them, nearest first: each once, and not more than `most`."""
    waiting, seen = deque(starts), set[_Item]()
    while waiting and len(seen) < most:
        item = waiting.popleft()
        if item not in seen:
            seen.add(item)
            yield item
            waiting += following(item)


class Place(NamedTuple):
    """A tensor at the boundary of a frame: its path there, and the value that it is."""

    path: str
    value: Value


class Flow:
    """The flow of values through a capture; with splices, they read values, and nothing reads what they return.

    Attributes:
        frames: All frames, outer ones first.
        frame_of: The frame of each node.
        order: The number of each node, in order of execution.
        users: The operations that read each node's value.
        reads: The tensors whose values an operation reads, in order.
        inputs: The tensors in the inputs of a frame.
        outputs: The tensors that a frame returns.
    """

    def __init__(self, root: Frame, *, with_splices: bool = False) -> None:
        self.root, self._with_splices = root, with_splices
        self.frames: list[Frame] = []
        self.frame_of: dict[Node, Frame] = {}
        self.order: dict[Node, int] = {}
        self.users: dict[Node, list[Node]] = defaultdict(list)
        self._elements: dict[tuple[Node, Key], ElementNode] = {}
        self._starts: dict[int, int] = {}
        self.reads = functools.cache(self._tensors_read)
        self.inputs = functools.cache(self._inputs)
        self.outputs = functools.cache(self._outputs)
        self._held: set[Node] = set()
        self._number(root)
        for node in self.order:
            self._note(node)

    def _number(self, frame: Frame) -> None:
        self._starts[id(frame)] = len(self.order)
        self.frames.append(frame)
        for node in frame.nodes_and_splices if self._with_splices else frame.nodes:
            self.frame_of[node] = frame
            if node.is_inner:  # the flow uses its call instead
                continue
            if isinstance(node, ElementNode):
                self._elements.setdefault((node.whole, node.position), node)
            if isinstance(node, CallNode):
                self._number(node.frame)
            self.order[node] = len(self.order)

    def _note(self, node: Node) -> None:
        """Records which operations read each value, and which values are computed from the model's own tensors only."""
        if node.kind in HELD_KINDS:
            if not node.is_of_caller:
                self._held.add(node)
        elif self._is_computed(node):
            is_held = True
            for value in self.reads(node):
                self.users[value.node].append(node)
                is_held = is_held and value.node in self._held
            if is_held:
                self._held.add(node)

    def _is_computed(self, node: Node) -> bool:
        if node.kind == "op":
            if node.op == "getitem" and any(map(_is_container, node.args[:1])):
                return False  # a part of it, which is a value of the container
            return type(node.spec) is TensorSpec or _has_tensor(node.spec)  # others are arithmetic on sizes
        return isinstance(node, CallNode) and node.frame.opaque_reason is not None

    @property
    def opaque(self) -> list[Frame]:
        """The frames that have no graph, outer ones first."""
        return [frame for frame in self.frames if frame.opaque_reason is not None]

    def start(self, frame: Frame) -> int:
        """Returns the number of the first node of a frame."""
        return self._starts[id(frame)]

    def resolve(self, node: Node, keys: tuple[Key, ...] = ()) -> Value | None:
        """Returns the value that a reference refers to; `None` if it is not a single value."""
        while node.kind in _BOUNDARY:
            is_opaque = isinstance(node, CallNode) and node.frame.opaque_reason is not None
            passed = None if is_opaque else passed_on(node, self.frame_of[node])
            if passed is None:
                break
            found = at_keys(passed[0], keys)
            if not isinstance(found, Ref):
                return None
            node, keys = found.node, found.dig
        element = self._elements.get((node, keys[0])) if keys else None
        return Value(element, keys[1:]) if element is not None else Value(node, keys)

    def read(self, ref: Ref) -> Value:
        """Returns the value that an operation reads by a reference.

        Raises:
            UnknownValueError: It is not one value.
        """
        value = self.resolve(ref.node, ref.dig)
        if value is None:
            raise UnknownValueError(f"the value of {ref.node.name!r} is not one value")
        return value

    def rerun(self, node: Node, of: Callable[[Value], Any]) -> Any:
        """Returns the result of an operation on other values: on the result of `of` for each that is not a number.

        Raises:
            UnknownValueError: An argument is not one value.
        """

        def argument(each: Any) -> Any:
            value = self.read(each) if isinstance(each, Ref) else None
            if value is None:
                return each
            return value.spec.value if isinstance(value.spec, ScalarSpec) else of(value)

        made = node.whole
        args, kwargs = map_leaves((made.args, made.kwargs), argument)
        result = made.target(*args, **kwargs)
        return result if node.position is None else result[node.position]

    def _tensors_read(self, node: Node) -> list[Value]:
        made, found = node.whole, list[Value]()
        every = (*made.args, *made.kwargs.values())
        for given in every[:1] if node.op in SHAPED_LIKE else every:
            kind = type(given)
            if kind is not Ref and kind not in _CONTAINERS:
                continue
            for ref in (given,) if kind is Ref else refs_in(given):
                value = self.resolve(ref.node, ref.dig)
                if value is not None and (type(value.node.spec) is TensorSpec or _has_tensor(value.spec)):
                    found.append(value)
        return found

    @functools.cached_property
    def filled(self) -> dict[Node, list[Value]]:
        """The operations that write into views of tensors that are created without numbers, by these."""
        found: dict[Node, list[Value]] = defaultdict(list)
        for node in self.order:
            if node.kind != "op" or node.written_argument != 0:
                continue
            into = self.reads(node)[0]
            while into.op in VIEWS and (before := self.reads(into.node)):
                into = before[0]
            if into.op in CREATIONS:
                found[into.node].append(Value(node))
        return found

    def is_held(self, value: Value) -> bool:
        """Whether a value is computed from weights and constants of the model only, and not from inputs."""
        return value.node in self._held

    def moving(self, node: Node) -> list[Value]:
        """Returns the tensors that an operation reads and that come from inputs."""
        return [value for value in self.reads(node) if value.node not in self._held]

    def weights(self, node: Node) -> list[Value]:
        """Returns the matrices of the model that an operation reads."""
        return [value for value in self.reads(node) if value.node in self._held and len(value.shape) > 1]

    def choices(self, nodes: Iterable[Node]) -> list[Node]:
        """Returns the operations that choose by numbers, in order: their results are integers that are read."""
        reads = (read for node in sorted(nodes, key=self.order.__getitem__) for read in self.reads(node))
        found = (read.node.whole for read in reads if read.dtype in _INTEGERS)
        return list(dict.fromkeys(node for node in found if any(each.is_float for each in self.moving(node))))

    def is_linear_map(self, value: Value) -> bool:
        """Whether a value is the result of a linear map of the model."""
        return value.op in LINEAR_MAPS and bool(self.weights(value.node))

    def _is_read_in(self, value: Value, frame: Frame) -> bool:
        end = self.order[frame.output_node]
        return any(self.order[user] <= end for user in self.users.get(value.node, ()))

    def path(self, value: Value) -> str:
        """Returns the path of a value at the operation that computed it."""
        node = value.node
        return format_path((*self.frame_of[node].path, node.name), map(key_text, value.keys))

    def frames_around(self, value: Value) -> Iterator[Frame]:
        """Yields the frames that an operation is in, innermost first."""
        return self.frame_of[value.node].frames_above()

    def boundary_path(self, value: Value, inside: Frame | None = None, *, is_unread: bool = False) -> str:
        """Returns the path of a value at the output of the outermost frame that returns it, if one does.

        Args:
            value: The value.
            inside: The frame that this frame is in; `None` for the whole model.
            is_unread: Nothing in that frame may read the value: a patch on the output would not reach it there.
        """
        found = None
        for frame in self.frames_around(value):
            place = next((place for place in self.outputs(frame) if place.value == value), None)
            if frame is inside or place is None or (is_unread and self._is_read_in(value, frame)):
                break
            found = place.path
        return self.path(value) if found is None else found

    def _outputs(self, frame: Frame) -> list[Place]:
        return [] if frame.opaque_reason is not None else self._places(frame, [frame.output_node])

    def _inputs(self, frame: Frame) -> list[Place]:
        return self._places(frame, frame.inputs())

    def _places(self, frame: Frame, nodes: Iterable[Node]) -> list[Place]:
        found = [(node, keys, self.resolve(node, keys)) for node in nodes for keys in _tensor_keys(node.spec)]
        return [
            Place(format_path((*frame.path, node.name), map(key_text, keys)), value)
            for node, keys, value in found
            if value is not None
        ]


def called(frame: Frame, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a frame returns for other inputs: by its custom graph, or else by a function of its module."""
    if frame.custom_graph is None:
        return forward(*args, **kwargs)
    given = inputs_of_call(frame, args, kwargs)
    return GraphRun(frame.module, frame.custom_graph, given).run(enable_io_processing=False)[0]


def _is_container(given: Any) -> bool:
    return isinstance(given, Ref) and isinstance(spec_at(given.node.spec, given.dig), ContainerSpec)


def _has_tensor(spec: ValueSpec) -> bool:
    return next(_tensor_keys(spec), None) is not None


def _tensor_keys(spec: ValueSpec | None) -> Iterator[tuple[Key, ...]]:
    """Yields the keys that lead to each tensor in a value."""
    if isinstance(spec, TensorSpec):
        yield ()
    for _, key, child in spec.children if isinstance(spec, ContainerSpec) else ():
        yield from ((key, *rest) for rest in _tensor_keys(child))


# -- trails along the stream -------------------------------------------------------------------------------------------


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
