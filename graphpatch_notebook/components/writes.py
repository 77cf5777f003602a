"""What a layer writes to the residual stream: attention, an MLP, or another mixer of positions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, TypeVar

from torch.autograd import Function

from graphpatch_notebook.capture.records import Node
from graphpatch_notebook.components.attention import Attention
from graphpatch_notebook.components.chain import Layer, Norm, Step, Trails
from graphpatch_notebook.components.flow import Flow, Value
from graphpatch_notebook.components.operations import (
    ADDITIONS,
    ATTENTION,
    CHOICES,
    CONVOLUTIONS,
    MIXING,
    SAME_VALUES,
    SOFTMAXES,
)
from graphpatch_notebook.torch_compat import overload_path

_MIXED = {"multi_head_attention_forward": 2, "grid_sample": 0}
"""Which of its tensors a function takes the values from."""

_OF_ATTENTION = re.compile("attention|attn", re.IGNORECASE)
"""What names of kernels of attention have (`FlashAttnFunc`, `_flash_attention_forward`): other kernels are mixers."""

_Found = TypeVar("_Found")

WriteKind: TypeAlias = Literal["attn", "cross_attn", "mlp", "mixer", "unknown"]


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """One summand of the stream.

    Attributes:
        kind: The part that computes it; `unknown` if calls without records compute it.
        state: The stream that it is computed from.
        inside: The nodes that compute it from the stream.
        norm: The norm through which it reads the stream.
        is_parallel: Whether another write of the layer is computed from the same stream.
        has_convolution: Whether an MLP has a convolution over positions, too.
    """

    value: Value
    kind: WriteKind
    state: Value
    step: Step
    inside: frozenset[Node]
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


class Writes:
    """Finds what layers write."""

    def __init__(self, trails: Trails, attentions: Iterable[Attention]) -> None:
        self._trails = trails
        self._flow: Flow = trails.flow
        self._attentions = _by_node((attention.z.node, attention) for attention in attentions)
        self._norms = _by_node((value.node, norm) for value, norm in trails.norms.items())

    def of(self, layer: Layer) -> list[Write]:
        """Returns what a layer writes, in order."""
        found = []
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
            if len({write.kind for write in writes}) > 1:
                return writes
        return [self._write(step, value, layer)]

    def _summands(self, value: Value, layer: Layer) -> list[Value]:
        flow = self._flow
        while value.op in SAME_VALUES and (reads := flow.reads(value.node)) and reads[0].size == value.size:
            value = reads[0]
        if value.op not in ADDITIONS or flow.frame_of[value.node] is not layer.frame:
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
        inside = frozenset(found.inside)
        every = _among(self._attentions, inside)
        own = tuple(each for each in every if not _is_at_one_position(each, layer))
        rest = inside - {each.z.node if each.softmax is None else each.softmax for each in every if each not in own}
        kind = self._kind(found, rest, own, layer)
        softmaxes = {node for node in rest if node.op in SOFTMAXES}
        if softmaxes - {each.softmax for each in own}:
            own = ()  # only a part of its attention is understood
        has_convolution = kind == "mlp" and any(map(self._is_convolution, inside))
        norm = self._norm(latest, found)
        return Write(value, kind, latest, step, inside, norm, own, has_convolution=has_convolution)

    def _kind(self, found: Slice, nodes: Collection[Node], own: tuple[Attention, ...], layer: Layer) -> WriteKind:
        flow = self._flow
        if read := [own[-1].v] if own else self._mixed(found):
            values = self.slice(read[-1], layer)
            others = [value for value in values.outside if len(value.shape) > 2 and not flow.is_held(value)]
            return "cross_attn" if others and not values.states else "attn"
        ops = {node.op for node in nodes}
        if ops & CHOICES:
            return "mlp"
        kernels = list(filter(self._is_kernel, nodes))
        if ops & ATTENTION or any(_OF_ATTENTION.search(node.op) for node in kernels):
            return "attn"
        if ops & MIXING or kernels or any(map(self._is_convolution, nodes)):
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


def _is_at_one_position(attention: Attention, layer: Layer) -> bool:
    """Whether attention is computed at each position alone, such as over the states after earlier layers."""
    stream, q, k = (value.shape for value in (layer.start.value, attention.q, attention.k))
    if attention.pattern is not None:
        pattern = attention.pattern.shape
    else:
        pattern = (*q[:-1], k[-2]) if len(q) == len(k) == 4 else ()
    is_layout_alike = len(stream) == 3 and len(pattern) == 4 and pattern[:2] == stream[:2]
    return is_layout_alike and stream[1] not in pattern[2:]
