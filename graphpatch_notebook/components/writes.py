"""What a layer writes to the residual stream: attention, an MLP, or another mixer of positions."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar

from torch.autograd import Function

from graphpatch_notebook.capture.records import Node
from graphpatch_notebook.components.attention import Attention, Part, attentions
from graphpatch_notebook.components.chain import Layer, Norm, Stack, Step, Trails
from graphpatch_notebook.components.flow import Axes, Flow, Value
from graphpatch_notebook.components.operations import (
    ADDITIONS,
    ATTENTION,
    CHOICES,
    CONVOLUTIONS,
    MIXING,
    SAME_VALUES,
)
from graphpatch_notebook.components.roles import Atom, PartRoles, SmallSizes, Study, is_apart, stream_axes
from graphpatch_notebook.torch_compat import overload_path

_MIXED = {"multi_head_attention_forward": 2, "grid_sample": 0}
"""Which of its tensors a function takes the values from."""

_OF_ATTENTION = re.compile("attention|attn", re.IGNORECASE)
"""What names of kernels of attention have (`FlashAttnFunc`, `_flash_attention_forward`): other kernels are mixers."""

_MOST_MAPS = 2
_UNKNOWN = object()

_Found = TypeVar("_Found")

WriteKind: TypeAlias = Literal["attn", "cross_attn", "mlp", "mixer", "unknown"]


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """One summand of the stream.

    Attributes:
        kind: The part that computes it; `unknown` if calls without records compute it.
        state: The stream that it is computed from.
        inside: The nodes that compute it from the stream.
        roles: What the dimensions of its values are.
        norm: The norm through which it reads the stream.
        is_parallel: Whether another write of the layer is computed from the same stream.
        has_convolution: Whether an MLP has a convolution over positions, too.
    """

    value: Value
    kind: WriteKind
    state: Value
    step: Step
    inside: frozenset[Node]
    roles: WriteRoles
    norm: Norm | None = None
    attentions: tuple[Attention, ...] = ()
    is_parallel: bool = False
    has_convolution: bool = False


@dataclass(slots=True)
class Slice:
    """The nodes that compute a value, back to states of the stream and to the start of the layer."""

    inside: set[Node] = field(default_factory=set)
    outside: list[Value] = field(default_factory=list)
    states: set[Value] = field(default_factory=set)


@dataclass(slots=True)
class _Shared:
    """The nodes of a part that is the same in several layers, in order, and what was found out about it."""

    nodes: list[Node]
    start: Value
    end: Value
    study: Study
    roles: PartRoles | None = None
    attentions: list[Attention] | None = None
    mixes: Any = _UNKNOWN


class WriteRoles:
    """What the dimensions of the values of a write are: those of the first write that runs the same operations."""

    def __init__(self, shared: _Shared, own: list[Node], start: Value, end: Value, trails: Trails) -> None:
        self._shared, self._trails = shared, trails
        self._first = dict(zip(own, shared.nodes, strict=True))
        self._own = dict(zip(shared.nodes, own, strict=True))
        self._outside = {start: shared.start, end: shared.end}

    def axes(self, value: Value, last: str = "channel") -> Axes:
        """Returns what the dimensions of a value are that is laid out like the stream: its features are `last`."""
        found = self._outside.get(value) or Value(self._first.get(value.node, value.node), value.keys)
        assert self._shared.roles is not None
        return self._shared.roles.axes(found, last)

    def mixes(self, others: Iterable[Value]) -> bool | None:
        """Whether the write moves values between positions of the stream or of others; `None` if it is not known."""
        assert self._shared.roles is not None
        if self._shared.mixes is _UNKNOWN:
            self._shared.mixes = self._shared.roles.mixes(others)
        found: bool | None = self._shared.mixes
        return found

    def attentions(self) -> tuple[Attention, ...]:
        """Returns the attentions of the write, in order."""
        shared = self._shared
        assert shared.roles is not None
        if shared.attentions is None:
            shared.attentions = attentions(self._trails, shared.roles, frozenset(shared.nodes))
        return tuple(map(self._moved, shared.attentions))

    def _moved(self, one: Attention) -> Attention:
        found = {name: Part(self._of_own(part.value), part.axes) for name, part in one.found.items()}
        z, v, output = self._of_own(one.z), one.v and self._of_own(one.v), one.output and self._of_output(one)
        return replace(one, z=z, v=v, output=output, found=found)

    def _of_own(self, value: Value) -> Value:
        node = value.node
        if node in self._own:
            return Value(self._own[node], value.keys)
        for first, own in self._own.items():  # a step inside of a fused call
            if node in first.inner:
                return Value(own.inner[first.inner.index(node)], value.keys)
        return value

    def _of_output(self, one: Attention) -> Value | None:
        assert one.output is not None
        return self._of_own(one.output)


class Writes:
    """Finds what layers write, and what the dimensions of their values are.

    Attributes:
        groups: What the dimensions of the inputs are that have one size: batch, or position.
    """

    def __init__(self, trails: Trails) -> None:
        self._trails = trails
        self._flow: Flow = trails.flow
        self._norms = _by_node((value.node, norm) for value, norm in trails.norms.items())
        self._shared: dict[object, _Shared] = {}
        self.groups: dict[int, str] = {}

    @functools.cached_property
    def sizes(self) -> SmallSizes:
        """The sizes at which parts of the model run."""
        return SmallSizes(self._flow.root)

    def stream_axes(self, stack: Stack) -> Axes:
        """Returns what the dimensions of the stream of a stack are, as the parts of its layers treat them."""
        found: dict[int, _Shared] = {}
        for layer in stack.layers:
            for step in layer.steps:
                if step.kind == "add" and step.other is not None and self._is_computed(step.other, layer):
                    part = self.slice(step.other, layer)
                    shared, _ = self._share(part, step, step.other)
                    found[id(shared)] = shared
        evidence: list[list[bool | None]] = []
        atoms: tuple[Atom, ...] = ()
        first = self.sizes.first
        for shared in found.values():
            if shared.study.tensor(shared.end) is None:
                first = None
            is_routed = any(node.op in CHOICES for node in shared.nodes)  # changed tokens take other experts' places
            if len(shared.start.shape) == len(stack.layers[0].start.value.shape) and not is_routed:
                atoms = atoms or shared.study.atoms(shared.start)
                linear = (value for value in map(Value, shared.nodes) if self._flow.is_linear_map(value))
                ends = [shared.end, *islice(linear, _MOST_MAPS)]
                evidence += [is_apart(shared.study, shared.start, end) for end in ends]
        axes = stream_axes(atoms, evidence, self.groups, first) if atoms else ()
        self._note_groups(atoms, axes)
        return axes

    def layout(self, layer: Layer, value: Value) -> Axes:
        """Returns what the dimensions of a state of the stream in a layer are."""
        if len(value.shape) == len(layer.axes):
            return layer.axes
        return self.between(layer.start.value, value, layer.axes).axes(value)

    def between(self, start: Value, end: Value, start_axes: Axes = (), end_axes: Axes = ()) -> PartRoles:
        """Returns what the dimensions of values are that lie between two others, which are known in part."""
        found, waiting, low = set[Node](), [end], self._flow.order[start.node]
        while waiting:
            value = waiting.pop()
            if value == start or value.node in found or value.node.kind != "op" or self._flow.order[value.node] < low:
                continue
            found.add(value.node)
            waiting += self._flow.reads(value.node)
        return PartRoles(Study(self._flow, found, self.sizes, start), start, end, self.groups, start_axes, end_axes)

    def axes_alone(self, start: Value, end: Value) -> Axes:
        """Returns what the dimensions of a value are in a model without layers, by what it does to the end."""
        study = self.between(start, end).study
        first = None if study.tensor(end) is None else self.sizes.first
        axes = stream_axes(study.atoms(start), [is_apart(study, start, end)], self.groups, first)
        self._note_groups(study.atoms(start), axes)
        return axes

    def _note_groups(self, atoms: Sequence[Atom], axes: Axes) -> None:
        for atom, role in zip(atoms, axes, strict=True) if len(axes) == len(atoms) else ():
            if atom.group is not None and role is not None:
                self.groups.setdefault(atom.group, "batch" if role == "batch" else "position")

    def _share(self, part: Slice, step: Step, end: Value) -> tuple[_Shared, list[Node]]:
        """Returns what is known about the nodes of a part, and these in order."""
        start = max(part.states, key=lambda state: self._flow.order[state.node], default=step.source)
        nodes = sorted(part.inside, key=self._flow.order.__getitem__)
        key = (start.shape, *((node.op, node.name, Value(node).shape) for node in nodes))
        if key not in self._shared:
            self._shared[key] = _Shared(nodes, start, end, Study(self._flow, nodes, self.sizes, start))
        return self._shared[key], nodes

    def of(self, layer: Layer) -> list[Write]:
        """Returns what a layer writes, in order."""
        found: list[Write] = []
        for step in layer.steps:
            if step.kind == "add" and step.other is not None and self._is_computed(step.other, layer):
                found += self._of_step(step, step.other, layer)
        states = [write.state for write in found]
        return [replace(write, is_parallel=states.count(write.state) > 1) for write in found]

    def _is_computed(self, value: Value, layer: Layer) -> bool:
        """Whether a value comes from inputs, or from the stream, which may start as a constant."""
        return not self._flow.is_held(value) or bool(self.slice(value, layer).states)

    def _of_step(self, step: Step, value: Value, layer: Layer) -> list[Write]:
        """Returns the writes of one addition: two, if it adds attention and an MLP at once."""
        parts = self._summands(value, layer)
        if parts:
            writes = [write for part in parts for write in self._of_step(step, part, layer)]
            kinds = {write.kind for write in writes}
            if "mlp" in kinds and kinds & {"attn", "cross_attn"}:
                return writes
        return [self._write(step, value, layer)]

    def _summands(self, value: Value, layer: Layer) -> list[Value]:
        flow = self._flow
        while value.op in SAME_VALUES and (reads := flow.reads(value.node)) and reads[0].size == value.size:
            value = reads[0]
        if value.op not in ADDITIONS:
            return []
        moving = [read for read in flow.moving(value.node) if read.size == value.size]
        return moving if len(moving) == 2 else []

    def slice(self, value: Value, layer: Layer) -> Slice:
        """Returns the nodes that compute a value in a layer."""
        flow, found = self._flow, Slice()
        states, low = set(layer.states), flow.start(layer.frame)
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if value in states:
                found.states.add(value)
            elif value.node in found.inside:
                continue
            elif value.node.kind == "input" or flow.order[value.node] <= low:
                found.outside.append(value)
            else:
                found.inside.add(value.node)
                waiting += flow.reads(value.node)
        return found

    def _write(self, step: Step, value: Value, layer: Layer) -> Write:
        found = self.slice(value, layer)
        latest = max(found.states, key=lambda state: self._flow.order[state.node], default=step.source)
        flow, inside = self._flow, frozenset(found.inside)
        roles = self._roles(found, step, value, layer)
        others = [each for each in found.outside if each.is_float and not flow.is_held(each) and len(each.shape) > 2]
        mixes = roles.mixes(others)
        own = roles.attentions() if mixes is not False else ()
        kind = self._kind(found, own, layer, mixes=mixes)
        if kind not in ("attn", "cross_attn"):
            own = ()
        has_convolution = kind == "mlp" and any(map(self._is_convolution, inside))
        norm = self._norm(latest, found)
        return Write(value, kind, latest, step, inside, roles, norm, own, has_convolution=has_convolution)

    def _roles(self, found: Slice, step: Step, value: Value, layer: Layer) -> WriteRoles:
        shared, nodes = self._share(found, step, value)
        start = max(found.states, key=lambda state: self._flow.order[state.node], default=step.source)
        if shared.roles is None:
            both = (self.layout(layer, start), layer.axes if len(value.shape) == len(layer.axes) else ())
            shared.roles = PartRoles(shared.study, shared.start, shared.end, self.groups, *both)
        return WriteRoles(shared, nodes, start, value, self._trails)

    def _kind(self, found: Slice, own: tuple[Attention, ...], layer: Layer, *, mixes: bool | None) -> WriteKind:
        flow, nodes = self._flow, found.inside
        if read := [own[-1].v] if own and own[-1].v is not None else self._mixed(found):
            values = self.slice(read[-1], layer)
            others = [value for value in values.outside if len(value.shape) > 2 and not flow.is_held(value)]
            return "cross_attn" if others and not values.states else "attn"
        ops = {node.op for node in nodes}
        if ops & CHOICES:
            return "mlp"
        kernels = list(filter(self._is_kernel, nodes))
        if (mixes is not False and (own or ops & ATTENTION)) or any(_OF_ATTENTION.search(node.op) for node in kernels):
            return "attn"
        if mixes or ops & MIXING or kernels or any(map(self._is_convolution, nodes)):
            return "mixer"
        return "unknown" if any(node.kind == "call" for node in found.inside) else "mlp"

    def _is_kernel(self, node: Node) -> bool:
        """Whether an operation is a kernel of three values, as attention and scans are that cannot be opened.

        It is an `autograd.Function`, an operator that is not torch's own, or one of torch's kernels of attention.
        """
        target = node.whole.target
        function, path = getattr(target, "__self__", None), overload_path(target)
        is_own = isinstance(function, type) and issubclass(function, Function)
        is_operator = path is not None and (not path.startswith("aten.") or _OF_ATTENTION.search(path) is not None)
        return (is_own or is_operator) and sum(value.is_float for value in self._flow.moving(node)) > 2

    def _mixed(self, found: Slice) -> list[Value]:
        """Returns the values that are mixed by calls of attention that cannot be opened."""
        calls = [(node, _MIXED[node.op]) for node in found.inside if node.op in _MIXED]
        reads = [(self._flow.reads(node), position) for node, position in calls]
        return [values[position] for values, position in reads if len(values) > position]

    def _is_convolution(self, node: Node) -> bool:
        """Whether an operation is a convolution over positions, and not a linear map written as one."""
        return node.op in CONVOLUTIONS and any(
            size > 1 for weight in self._flow.weights(node) for size in weight.shape[2:]
        )

    def _norm(self, state: Value, found: Slice) -> Norm | None:
        """Returns the norm at the start of a write, which reads the stream."""
        is_same = self._trails.is_same
        for norm in _among(self._norms, found.inside):
            given = norm.given.value
            # The stream may continue from the cast input of the norm, as in exported programs.
            if is_same(given, state) or is_same(state, given):
                return norm
        return None


def _by_node(found: Iterable[tuple[Node, _Found]]) -> dict[Node, list[tuple[int, _Found]]]:
    """Returns what was found at each node, with its number in the order of `found`."""
    result: dict[Node, list[tuple[int, _Found]]] = {}
    for number, (node, each) in enumerate(found):
        result.setdefault(node, []).append((number, each))
    return result


def _among(found: Mapping[Node, list[tuple[int, _Found]]], nodes: Iterable[Node]) -> list[_Found]:
    """Returns what was found at some nodes, in the order of its numbers."""
    numbered = dict(pair for node in nodes for pair in found.get(node, ()))
    return [numbered[number] for number in sorted(numbered)]


def norm_of(write: Write, layer: Layer) -> Value | None:
    """Returns the norm in front of a write; if there is none, the norm of the stream behind it."""
    if write.norm is not None:
        return write.norm.returned.value
    at = layer.steps.index(write.step)
    after = layer.steps[at + 1] if at + 1 < len(layer.steps) else None
    return after.result if after is not None and after.kind == "norm" else None
