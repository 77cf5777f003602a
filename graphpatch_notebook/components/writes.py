"""What a layer writes to the residual stream: attention, an MLP, or another mixer of positions.

Inside an MLP: its neurons before and after the activation, and the choice among experts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function

from graphpatch_notebook.capture.modules import module_at
from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.components.attention import Attention, Part, Parts, attentions
from graphpatch_notebook.components.dimensions import Dimensions, dimensions_of
from graphpatch_notebook.components.flow import Axes, Flow, Norm, Step, Trails, Value, walk
from graphpatch_notebook.components.operations import (
    ADDITIONS,
    ATTENTION,
    FUSED_ATTENTION,
    MIXING,
    NORMS,
    SAME_VALUES,
    SCALINGS,
    VIEWS,
)
from graphpatch_notebook.components.roles import Atom, PartRoles, Study, is_apart, stream_axes
from graphpatch_notebook.components.stacks import Layer, Slice, Stack, slice_of
from graphpatch_notebook.torch_compat import overload_path

_SAMPLES = frozenset(["grid_sample"])
"""Take values of their first tensor at positions that the others have, as deformable attention does."""

_OF_ATTENTION = re.compile("attention|attn", re.IGNORECASE)
"""What names of kernels of attention have (`FlashAttnFunc`, `_flash_attention_forward`): other kernels are mixers."""

_MOST_MAPS = 2

WriteKind: TypeAlias = Literal["attn", "cross_attn", "mlp", "mixer", "unknown"]


class PartCode(PartRoles):
    """What was found out about a part that is the same in several layers, by its nodes in the first of them.

    Attributes:
        nodes: The nodes.
        kind: What it is; empty until that was found.
        attentions: The attentions in it.
        parts: The values in it that have names; `None` until these were found.
    """

    def __init__(self, nodes: list[Node], study: Study, end: Value, groups: dict[int, str]) -> None:
        super().__init__(study, end, groups)
        self.nodes = nodes
        self.kind: WriteKind | Literal[""] = ""
        self.attentions: list[Attention] = []
        self.parts: Parts | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """One summand of the stream.

    Attributes:
        kind: The part that computes it; `unknown` if calls without records compute it.
        state: The stream that it is computed from.
        inside: The nodes that compute it from the stream.
        code: What was found out about it, or about a part of an earlier layer that runs the same operations.
        nodes: Its nodes, by those of `code`.
        norm: The norm through which it reads the stream.
        is_parallel: Whether another write of the layer is computed from the same stream.
    """

    value: Value
    kind: WriteKind
    state: Value
    step: Step
    inside: frozenset[Node]
    code: PartCode
    nodes: Mapping[Node, Node]
    norm: Norm | None = None
    is_parallel: bool = False

    @property
    def attentions(self) -> list[Attention]:
        """The attentions in `code`."""
        return self.code.attentions if self.kind in ("attn", "cross_attn") else []

    def here(self, value: Value) -> Value:
        """Returns the value in this part that corresponds to one of `code`."""
        if value == self.code.start:
            return self.state
        if value.node.is_inner:
            fused, own = next(each for each in self.nodes.items() if value.node in each[0].whole.inner)
            return Value(own.whole.inner[fused.whole.inner.index(value.node)], value.keys)
        return Value(self.nodes.get(value.node, value.node), value.keys)

    def axes(self, value: Value, last: str = "channel") -> Axes:
        """Returns what the dimensions of a value of `code` are that is laid out like the stream, features `last`."""
        return self.code.axes(value, last)

    def is_bent(self, value: Value, end: Value) -> bool | None:
        """Whether a value of `code` is not linear in another one: steps to both sides do not cancel.

        It is `None` if no step moves it.
        """
        study = self.code.study
        start, base = study.tensor(value), study.tensor(end)
        if start is None or base is None:
            return None

        def stepped(sign: int) -> Tensor | None:
            def step(tensor: Tensor) -> Tensor:
                noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0), dtype=tensor.dtype)
                return tensor + sign * tensor.abs().mean() * noise

            return study.run.tensor(end, study.run.changed(value, step, [end]))

        one, other = stepped(1), stepped(-1)
        if one is None or other is None or not one.shape == other.shape == base.shape:
            return None
        size = base.abs().mean()
        is_moved = bool((one - base).abs().mean() > 1e-6 * size)
        return bool((one + other - 2 * base).abs().mean() > 1e-3 * size) if is_moved else None


class Writes:
    """Finds what layers write, and what the dimensions of their values are.

    Attributes:
        trails, flow: The flow of values, and the norms.
        groups: What the dimensions of the inputs are that have one size: batch, or position.
    """

    def __init__(self, trails: Trails) -> None:
        self.trails = trails
        self.flow: Flow = trails.flow
        self._norms = {norm.returned.value.node: norm for norm in trails.norms.values()}
        self._codes: dict[object, PartCode] = {}
        self.groups: dict[int, str] = {}

    @functools.cached_property
    def dimensions(self) -> Dimensions:
        """The dimensions of the values of the model; the first use runs it."""
        return dimensions_of(self.flow.root)

    # -- dimensions ----------------------------------------------------------------------------------------------------

    def stream_axes(self, stack: Stack) -> Axes:
        """Returns what the dimensions of the stream of a stack are, as the parts of its layers treat them."""
        parts = [self._part(step, value, layer) for layer in stack.layers.values() for step, value in _sums(layer)]
        codes = {id(code): code for _, code, _ in parts}
        evidence: list[list[bool | None]] = []
        atoms: tuple[Atom, ...] = ()
        for code in codes.values():
            if len(code.start.shape) == len(stack.first.start.value.shape):
                atoms = atoms or code.study.atoms(code.start)
                # Behind a choice by numbers, changed tokens take other experts' places.
                choices = self.flow.choices(code.nodes)[:1]
                linear = (value for value in map(Value, code.nodes) if self.flow.is_linear_map(value))
                ends = self.flow.reads(choices[0])[:1] if choices else [code.end, *islice(linear, _MOST_MAPS)]
                evidence += [is_apart(code.study, code.start, end) for end in ends]
        return self._noted(atoms, stream_axes(atoms, evidence, self.groups) if atoms else ())

    def _noted(self, atoms: Sequence[Atom], axes: Axes) -> Axes:
        for atom, role in zip(atoms, axes, strict=True) if len(axes) == len(atoms) else ():
            if atom.group is not None and role is not None:
                self.groups.setdefault(atom.group, "batch" if role == "batch" else "position")
        return axes

    def layout(self, layer: Layer, value: Value) -> Axes:
        """Returns what the dimensions of a state of the stream in a layer are."""
        if len(value.shape) == len(layer.axes):
            return layer.axes
        return self.between(layer.start.value, value, layer.axes).axes(value)

    def between(self, start: Value, end: Value, start_axes: Axes = (), end_axes: Axes = ()) -> PartRoles:
        """Returns what the dimensions of values are that lie between two others, which are known in part."""
        flow = self.flow
        low = flow.order[start.node]

        def before(value: Value) -> list[Value]:
            is_between = value != start and value.node.kind == "op" and flow.order[value.node] >= low
            return [*flow.reads(value.node), *flow.filled.get(value.node, ())] if is_between else []

        nodes = {value.node for value in walk([end], before) if before(value)}
        return PartRoles(Study(flow, nodes, self.dimensions, start), end, self.groups, start_axes, end_axes)

    # -- writes --------------------------------------------------------------------------------------------------------

    def of(self, layer: Layer) -> list[Write]:
        """Returns what a layer writes, in order."""
        found = [write for step, value in _sums(layer) for write in self._of_sum(step, value, layer)]
        states = [write.state for write in found]
        return [replace(write, is_parallel=states.count(write.state) > 1) for write in found]

    def _of_sum(self, step: Step, value: Value, layer: Layer) -> list[Write]:
        """Returns the writes of one addition: those of its summands, if it adds attention and an MLP at once."""
        flow, inner = self.flow, value
        while inner.op in SAME_VALUES and (reads := flow.reads(inner.node)) and reads[0].size == inner.size:
            inner = reads[0]
        summands = (
            [read for read in flow.moving(inner.node) if read.size == inner.size] if inner.op in ADDITIONS else []
        )
        writes = [write for each in summands for write in self._of_sum(step, each, layer)] if len(summands) == 2 else []
        kinds = {write.kind for write in writes}
        return (
            writes if "mlp" in kinds and kinds & {"attn", "cross_attn", "mixer"} else [self._write(step, value, layer)]
        )

    def _part(self, step: Step, value: Value, layer: Layer) -> tuple[Slice, PartCode, Value]:
        """Returns the nodes that compute a summand, what is known about them, and the last state that they read."""
        order = self.flow.order
        found = slice_of(self.flow, value, set(layer.states).__contains__, layer.low)
        start = max(found.states, key=lambda state: order[state.node], default=step.source)
        nodes = sorted(found.inside, key=order.__getitem__)
        numbers = {node: number for number, node in enumerate(nodes)}
        wires = (
            tuple("start" if read == start else numbers.get(read.node) for read in self.flow.reads(node))
            for node in nodes
        )
        frames = [frame for node in nodes if (frame := self.flow.frame_of[node]) is not layer.frame]
        routed = [frame.path[-1] for frame in frames] if self.flow.choices(nodes) else []  # which experts ran
        key = (start.shape, *routed, *((node.op, node.name, Value(node).shape, next(wires)) for node in nodes))
        if key not in self._codes:
            self._codes[key] = PartCode(nodes, Study(self.flow, nodes, self.dimensions, start), value, self.groups)
        return found, self._codes[key], start

    def _write(self, step: Step, value: Value, layer: Layer) -> Write:
        found, code, state = self._part(step, value, layer)
        flow, inside = self.flow, frozenset(found.inside)
        if not code.kind:
            code.start_axes = self.layout(layer, state)
            code.end_axes = layer.axes if len(value.shape) == len(layer.axes) else ()
            others = [
                each for each in found.outside if each.is_float and not flow.is_held(each) and len(each.shape) > 2
            ]
            mixes = code.mixes(others)
            code.attentions = attentions(self.trails, code, inside) if mixes is not False else []
            code.kind = self._kind(code, found.states, mixes)
        nodes = dict(zip(code.nodes, sorted(inside, key=flow.order.__getitem__), strict=True))
        return Write(value, code.kind, state, step, inside, code, nodes, self._norm(state, inside))

    def _kind(self, code: PartCode, states: Iterable[Value], mixes: bool | None) -> WriteKind:
        """Returns what a part does: known by running it; where it cannot run, by what kinds of operations it has."""
        flow, own = self.flow, code.attentions
        ops = {node.op for node in code.nodes if not flow.is_held(Value(node))}
        sampled = [flow.reads(node)[0] for node in code.nodes if node.op in _SAMPLES]
        if mixed := [one.v for one in own[-1:] if one.v is not None] or sampled[-1:]:
            is_given = not flow.is_held(mixed[-1]) and code.study.tensor(mixed[-1]) is not None
            is_own = any(code.study.depends(mixed[-1], state) for state in states)
            return "cross_attn" if is_given and not is_own else "attn"
        if mixes is not False and ops & FUSED_ATTENTION:  # whose heads may be experts, as in JetMoE
            return "attn"
        if flow.choices(code.nodes):
            return "mlp"
        kernels = [node for node in code.nodes if self._is_kernel(node)]
        if (mixes is not False and (own or ops & ATTENTION)) or any(_OF_ATTENTION.search(node.op) for node in kernels):
            return "attn"
        if mixes or (mixes is None and (kernels or ops & MIXING)):
            return "mixer"
        return "unknown" if any(node.kind == "call" for node in code.nodes) else "mlp"

    def _is_kernel(self, node: Node) -> bool:
        """Whether an operation is a kernel of three values, as attention and scans are that cannot be opened.

        It is an `autograd.Function`, an operator that is not torch's own, or one of torch's kernels of attention.
        """
        target = node.whole.target
        function, path = getattr(target, "__self__", None), overload_path(target)
        is_own = isinstance(function, type) and issubclass(function, Function)
        is_operator = path is not None and (not path.startswith("aten.") or _OF_ATTENTION.search(path) is not None)
        return (is_own or is_operator) and sum(value.is_float for value in self.flow.moving(node)) > 2

    def _norm(self, state: Value, inside: Iterable[Node]) -> Norm | None:
        """Returns the norm at the start of a write, which reads the stream."""
        own = set(inside)
        for norm in (norm for node, norm in self._norms.items() if node in own):  # outer ones first
            given = norm.given.value
            # The stream may continue from the cast input of the norm, as in exported programs.
            if self.trails.is_same(given, state) or self.trails.is_same(state, given):
                return norm
        return None


def _sums(layer: Layer) -> list[tuple[Step, Value]]:
    return [(step, step.other) for step in layer.steps if step.kind == "add" and step.other is not None]


def norm_of(write: Write, layer: Layer) -> Value | None:
    """Returns the norm in front of a write; if there is none, the norm of the stream behind it."""
    if write.norm is not None:
        return write.norm.returned.value
    at = layer.steps.index(write.step)
    after = layer.steps[at + 1] if at + 1 < len(layer.steps) else None
    return after.result if after is not None and after.kind == "norm" else None


# -- inside an MLP -----------------------------------------------------------------------------------------------------


_OUTPUT_STEPS = SAME_VALUES | SCALINGS | VIEWS | ADDITIONS | NORMS


def mlp_of(trails: Trails, write: Write, layer: Layer) -> Parts:
    """Returns the parts of an MLP: `.pre` (what the nonlinearity reads, of the gate if it is gated), `.post`, experts.

    Names that begin with a dot follow that of the MLP, others (`router`, `experts[0].out`) that of the layer.
    """
    parts, flow = Parts(), trails.flow
    router, choice = _router(trails, write)
    if router is not None and choice is not None:
        experts = _experts(trails, write, layer, choice, router)
        parts.found["router"] = Part(router, write.axes(router, "expert"))
        for number, frame in experts.items():
            parts.found[f"experts[{number}].out"] = Part(flow.outputs(frame)[0].value, ("token", "channel"))
        why = "each expert has its own neurons, and each token other experts"
        parts.missing = dict.fromkeys((".pre", ".post"), why)
        if not experts:
            parts.missing["experts[*].out"] = "the experts are not modules that are called one by one"
        absent = [number for number in range(router.shape[-1]) if experts and number not in experts]
        parts.missing |= {f"experts[{n}].out": "no token of the example inputs was sent to it" for n in absent}
        return parts
    down = trails.linear_map(write.value, _OUTPUT_STEPS, is_whole=True)
    post = next(iter(flow.moving(down.node)), None) if flow.is_linear_map(down) else None
    pre = None if post is None else _pre(trails, post, write)
    for name, value in ((".pre", pre), (".post", post)):
        if value is not None:
            whole = _unflattened(trails, value, len(write.value.shape))
            parts.found[name] = Part(whole, write.axes(whole, "neuron"))
        elif post is None:
            parts.missing[name] = "what is added to the stream does not come from one linear map"
        else:
            parts.missing[name] = "no linear map leads to one nonlinearity"
    return parts


def _unflattened(trails: Trails, value: Value, rank: int) -> Value:
    """Returns a value before it was flattened for a linear map, or after its shape was restored behind one."""
    if len(value.shape) == rank:
        return value
    after = [Value(user) for user in trails.flow.users.get(value.node, ()) if user.op in VIEWS]
    others = [*(trails.flow.reads(value.node)[:1] if value.op in VIEWS else ()), *(after if len(after) == 1 else ())]
    return next((each for each in others if each.size == value.size and len(each.shape) == rank), value)


def _pre(trails: Trails, post: Value, write: Write) -> Value | None:
    """Returns what the nonlinearity takes: the last value that is linear in a linear map, and that `post` is not in.

    All that leads from those before to `post` leads through it. Of a gated MLP, `post` is linear in the other factor.
    """
    order, found = trails.flow.order, list[Value]()
    own = [Value(node) for node in sorted(write.inside, key=order.__getitem__) if order[node] <= order[post.node]]
    alike = [value for value in own if value.size == post.size and write.is_bent(value, post)]
    for linear in _maps_behind(trails, post, write.inside):
        parts = list[Value]()
        for value in alike:
            if value == linear or write.is_bent(linear, value) is False:
                at = next((n for n, part in enumerate(parts) if write.is_bent(part, value) is not None), None)
                if at is None:
                    parts.append(value)
                elif parts[at] not in _behind(trails.flow, post, write.inside, value):
                    parts[at] = value
        found += parts
    return found[0] if len(found) == 1 else None


def _behind(flow: Flow, end: Value, inside: Container[Node], without: Value | None = None) -> set[Value]:
    """Returns linear maps that a value is computed from, and all between, besides what leads through another value."""

    def before(value: Value) -> list[Value]:
        is_end = value == without or value.node not in inside or flow.is_linear_map(value)
        return [] if is_end else flow.moving(value.node)

    return {*walk([end], before)}


def _maps_behind(trails: Trails, end: Value, inside: Container[Node]) -> list[Value]:
    flow = trails.flow
    found = filter(flow.is_linear_map, _behind(flow, end, inside))
    return sorted(found, key=lambda value: -flow.order[value.node])


def _router(trails: Trails, write: Write) -> tuple[Value | None, Node | None]:
    flow = trails.flow
    for choice in flow.choices(write.inside):
        found = _maps_behind(trails, flow.reads(choice)[0], write.inside) if flow.reads(choice) else []
        if found:
            return found[0], choice
    return None, None


def _experts(trails: Trails, write: Write, layer: Layer, choice: Node, router: Value) -> dict[int, Frame]:
    """Returns the experts that ran and are modules in a list or a dict, by their number there."""
    flow = trails.flow
    found: dict[int, Frame] = {}
    for member in layer.frame.walk():
        is_after = member.call is not None and flow.start(member) > flow.order[choice]
        number = _number(member, router.shape[-1]) if is_after else None
        if number is not None and any(place.value.node in write.inside for place in flow.outputs(member)):
            found.setdefault(number, member)
    return dict(sorted(found.items()))


def _number(member: Frame, experts: int) -> int | None:
    """Returns the number of a module among the experts in the list or dict that it is in, be they called or not."""
    assert member.call is not None
    assert member.parent is not None
    above, _, name = str(member.call.target).rpartition(".")
    container = module_at(member.parent.module, above)
    is_list = isinstance(container, (torch.nn.ModuleList, torch.nn.ModuleDict))
    children = container.named_children() if container is not None and is_list else ()
    alike = [key for key, module in children if type(module) is type(member.module)]
    return alike.index(name) if len(alike) == experts and name in alike else None
