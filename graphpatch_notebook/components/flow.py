"""Values across frames: where an argument comes from, what an operation reads, and which operations read a value.

A value has one name here: an input of a frame is what the caller gave, and the result of a call is what the called
module returned, down to the operation that computed it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

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
    Structure,
    at_keys,
    map_leaves,
    refs_in,
)
from graphpatch_notebook.components.operations import LINEAR_MAPS, SHAPED_LIKE
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
    def is_float(self) -> bool:
        """Whether it is a tensor of floating-point numbers."""
        spec = self.spec
        return isinstance(spec, TensorSpec) and spec.dtype.is_floating_point

    @property
    def is_mask(self) -> bool:
        """Whether it is a tensor of truth values."""
        spec = self.spec
        return isinstance(spec, TensorSpec) and spec.dtype == torch.bool


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
    """The flow of values through a capture.

    Attributes:
        frames: All frames, outer ones first.
        frame_of: The frame of each node.
        order: The number of each node, in order of execution.
        users: The operations that read each node's value.
    """

    def __init__(self, root: Frame) -> None:
        self.root = root
        self.frames: list[Frame] = []
        self.frame_of: dict[Node, Frame] = {}
        self.order: dict[Node, int] = {}
        self.users: dict[Node, list[Node]] = defaultdict(list)
        self._elements: dict[tuple[Node, Key], ElementNode] = {}
        self._starts: dict[int, int] = {}
        self._reads: dict[Node, list[Value]] = {}
        self._outputs: dict[int, list[Place]] = {}
        self._inputs: dict[int, list[Place]] = {}
        self._held: set[Node] = set()
        self._number(root)
        for node in self.order:
            self._note(node)

    def _number(self, frame: Frame) -> None:
        self._starts[id(frame)] = len(self.order)
        self.frames.append(frame)
        for node in frame.nodes:
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

    def arguments(self, given: Any, of: Callable[[Value], Any]) -> Any:
        """Returns recorded arguments: numbers unchanged, and the result of `of` for every other value.

        Raises:
            UnknownValueError: An argument is not one value.
        """

        def argument(each: Any) -> Any:
            if not isinstance(each, Ref):
                return each
            value = self.resolve(each.node, each.dig)
            if value is None:
                raise UnknownValueError(f"the value of {each.node.name!r} is not one value")
            return value.spec.value if isinstance(value.spec, ScalarSpec) else of(value)

        return map_leaves(given, argument)

    def rerun(self, node: Node, of: Callable[[Value], Any]) -> Any:
        """Returns the result of an operation on other values: on the result of `of` for each value that it reads.

        Raises:
            UnknownValueError: An argument is not one value.
        """
        made = node.whole
        args, kwargs = self.arguments((made.args, made.kwargs), of)
        result = made.target(*args, **kwargs)
        return result if node.position is None else result[node.position]

    def reads(self, node: Node) -> list[Value]:
        """Returns the tensors whose values an operation reads, in order."""
        found = self._reads.get(node)
        if found is None:
            made = node.whole
            found = self._reads[node] = []
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

    def is_held(self, value: Value) -> bool:
        """Whether a value is computed from weights and constants of the model only, and not from inputs."""
        return value.node in self._held

    def moving(self, node: Node) -> list[Value]:
        """Returns the tensors that an operation reads and that come from inputs."""
        return [value for value in self.reads(node) if value.node not in self._held]

    def weights(self, node: Node) -> list[Value]:
        """Returns the matrices of the model that an operation reads."""
        return [value for value in self.reads(node) if value.node in self._held and len(value.shape) > 1]

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

    def outputs(self, frame: Frame) -> list[Place]:
        """Returns the tensors that a frame returns."""
        found = self._outputs.get(id(frame))
        if found is None:
            places = _references(frame.output, ()) if frame.opaque_reason is None else ()
            node = frame.output_node
            found = [place for keys, ref in places for place in self._places(frame, node, keys, ref)]
            self._outputs[id(frame)] = found
        return found

    def inputs(self, frame: Frame) -> list[Place]:
        """Returns the tensors in the inputs of a frame."""
        found = self._inputs.get(id(frame))
        if found is None:
            given = [node for node in frame.inputs() if _has_tensor(node.spec)]
            found = [place for node in given for place in self._places(frame, node, (), Ref(node))]
            self._inputs[id(frame)] = found
        return found

    def _places(self, frame: Frame, node: Node, keys: tuple[Key, ...], ref: Ref) -> Iterator[Place]:
        value = self.resolve(ref.node, ref.dig)
        spec = value.spec if value is not None else ref.node.spec if node is ref.node else None
        for inner in _tensor_keys(spec):
            if (found := self.resolve(ref.node, ref.dig + inner)) is not None:
                yield Place(format_path((*frame.path, node.name), map(key_text, keys + inner)), found)


def called(frame: Frame, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a frame returns for other inputs: by its custom graph, or else by a function of its module."""
    if frame.custom_graph is None:
        return forward(*args, **kwargs)
    given = inputs_of_call(frame, args, kwargs)
    return GraphRun(frame.module, frame.custom_graph, given).run(enable_io_processing=False)[0]


def _references(value: Any, at: tuple[Key, ...]) -> Iterator[tuple[tuple[Key, ...], Ref]]:
    """Yields each reference in an output, with the keys that lead to it."""
    if isinstance(value, Ref):
        yield at, value
        return
    if isinstance(value, Structure):
        items: Any = value.children
    elif isinstance(value, (tuple, list)):
        items = enumerate(value)
    else:
        items = value.items() if isinstance(value, dict) else ()
    for key, child in items:
        yield from _references(child, (*at, key))


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
