"""The components of a model by their standard names, each with the path of its value.

A name sees its value in canonical axes, which are the same on every model:

("batch", "head", "query", "channel")    what the dimensions of a value at its path are
  -> ("batch", "position", "head", "channel"), Layout    what they are by the component's name, and how to see them so
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import digits
from typing import TypeAlias

from torch import Tensor

from graphpatch_notebook.capture.records import CallNode, Frame, once_a_capture, spliced_calls
from graphpatch_notebook.components.attention import Part, Parts
from graphpatch_notebook.components.flow import Axes, Flow, Trails, Value, walk
from graphpatch_notebook.components.names import find_one, look_up, why_missing
from graphpatch_notebook.components.operations import (
    ADDITIONS,
    CONVOLUTIONS,
    CREATIONS,
    NORMS,
    PRODUCTS,
    SAME_VALUES,
    SCALINGS,
    VIEWS,
)
from graphpatch_notebook.components.roles import Rerun
from graphpatch_notebook.components.stacks import Layer, Stack, stacks_of
from graphpatch_notebook.components.writes import Write, Writes, mlp_of, norm_of
from graphpatch_notebook.patching.model_state import RandomState
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import TensorSpec

_BEFORE = ("batch", "window", "token")
_AFTER = ("channel", "neuron", "expert", "latent", "vocab")
_ORDER = (*_BEFORE, "position", "group", "head", *_AFTER)
_ORDER_OF_PATTERNS = (*_BEFORE, "group", "head", "query", "key")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a value at a path is seen in canonical axes: a view of it, with a dimension of two axes divided.

    Attributes:
        order: The dimensions in canonical order, as they are numbered after the division.
        merged: The dimension at the path that has two axes; `None` if there is none.
        factors: The sizes of these, of which the one that follows the inputs is -1.

    Example:
        >>> import torch
        >>> layout = Layout((0, 2, 1, 3), merged=0, factors=(-1, 4))
        >>> seen = layout.view(torch.ones(12, 5, 8))
        >>> seen.shape, layout.back(seen).shape, layout.sizes((None, None, 8)), layout.dims
        (torch.Size([3, 5, 4, 8]), torch.Size([12, 5, 8]), [None, None, 4, 8], [0, 1, 0, 2])
    """

    order: tuple[int, ...]
    merged: int | None = None
    factors: tuple[int, ...] = ()

    @property
    def dims(self) -> list[int]:
        """The dimension at the path of each axis."""
        return [dim - (self.merged is not None and dim > self.merged) for dim in self.order]

    def view(self, value: Tensor) -> Tensor:
        """Returns a view of a value at the path in canonical axes.

        Raises:
            RuntimeError: It has another number of dimensions, or its merged dimension cannot be divided.
        """
        return (value if self.merged is None else value.unflatten(self.merged, self.factors)).permute(self.order)

    def back(self, seen: Tensor) -> Tensor:
        """Returns a value as it is at the path, from what it is in canonical axes: a view where there can be one.

        Raises:
            RuntimeError: It has another number of dimensions.
        """
        value = seen.permute([self.order.index(dim) for dim in range(len(self.order))])
        return value if self.merged is None else value.flatten(self.merged, self.merged + 1)

    def sizes(self, sizes: Sequence[int | None]) -> list[int | None]:
        """Returns the sizes of the axes, from those at the path; `None` for unknown ones."""
        found = list(sizes)
        if self.merged is not None:
            whole, known = found[self.merged], max(self.factors)
            other = None if whole is None else whole // known
            found[self.merged : self.merged + 1] = [other if factor < 0 else factor for factor in self.factors]
        return [found[dim] for dim in self.order]


def canonical(axes: Axes, heads: Sequence[int | None]) -> tuple[Axes, Layout | None]:
    """Returns the canonical axes of a value, and how to see it so; `None` if it has them at its path.

    Where an axis is not known, or has no place in the order (`height`), the order is that at the path.

    Args:
        axes: What the dimensions at the path are.
        heads: For each dimension that has the batch and heads, how many heads there are; `None` if that is not known.

    Example:
        >>> canonical(("position", "batch", "channel"), [None] * 3)
        (('batch', 'position', 'channel'), Layout(order=(1, 0, 2), merged=None, factors=()))
        >>> canonical(("batch", None, "channel"), [None] * 3)
        (('batch', None, 'channel'), None)
    """
    is_pattern = {"query", "key"} <= {*axes}
    order = _ORDER_OF_PATTERNS if is_pattern else _ORDER
    merged = next((dim for dim, axis in enumerate(axes) if axis in MERGED and heads[dim] is not None), None)
    found, factors = list(axes), list[int]()
    if merged is not None:
        found[merged : merged + 1] = parts = MERGED[str(axes[merged])]
        factors = [heads[merged] or -1 if part == "head" else -1 for part in parts]
    named = [axis if is_pattern or axis not in ("query", "key") else "position" for axis in found]
    if not {*named} <= {*order} or len({*named}) < len(named):
        return axes, None
    dims = tuple(sorted(range(len(named)), key=lambda dim: order.index(named[dim])))
    is_same = merged is None and dims == tuple(range(len(dims)))
    return tuple(named[dim] for dim in dims), None if is_same else Layout(dims, merged, tuple(factors))


MERGED = {"batch_head": ["batch", "head"], "head_batch": ["head", "batch"]}
"""Dimensions that are divided."""


_MOST_NODES = 200
_FARTHEST = 60
_WRITTEN_INTO = frozenset("setitem index_put masked_scatter index_put_ index_copy scatter masked_scatter_".split())
_LOOKUPS = frozenset("index_select getitem gather".split())
_INDEX_STEPS = SAME_VALUES | VIEWS | frozenset("long int index_put setitem".split())
_STEPS = SAME_VALUES | VIEWS | NORMS
_MAPS = SCALINGS | PRODUCTS | {"linear", "addmm"}


def find_ends(writes: Writes, stacks: Sequence[Stack]) -> None:
    """Finds the embeddings at the start of the stream of each stack, and the norm and the logits at its end."""
    for stack in stacks:
        stack.tokens, stack.positions = _embeddings(writes, stack.first.start.value)
        stack.norm = _norm_behind(writes.trails, stack, stacks)
        places = (place for place in writes.flow.outputs(writes.flow.root) if place.value.is_float)
        stack.logits = next((place for place in places if _is_mapped(writes.flow, place.value, stack)), None)


def _embeddings(writes: Writes, first: Value) -> tuple[list[Value], list[Value]]:
    """Returns the embeddings of tokens, and those of positions, whose sum a value is, up to norms and scalings."""
    flow, tokens, positions = writes.flow, list[Value](), list[Value]()

    def is_token(value: Value) -> bool:
        return value.op in CONVOLUTIONS or (table_of(flow, value) is not None and _is_of_inputs(flow, value))

    def before(value: Value) -> list[Value]:
        return [] if is_token(value) or value.op == "embedding" else _before(writes.trails, value)

    for value in walk([first], before, _MOST_NODES):
        if is_token(value):
            tokens.append(value)
        elif value.op == "embedding":
            positions += [value] if _differs_by_position(writes, value) else []  # not kinds of tokens
        elif not before(value) and (flow.is_held(value) or value.op in _LOOKUPS):
            held = [each for each in walk([value], lambda each: flow.reads(each.node)) if each.node.kind == "parameter"]
            is_vector = bool(held) and all(each.size <= first.shape[-1] for each in held)  # as that of a class
            has_rows = len(value.shape) > 1 and value.shape[-1] == first.shape[-1]
            positions += [value] if has_rows and not is_vector else []
    # Tables of segments, and registers, have fewer rows than there are positions.
    length = max((value.shape[-2] for value in positions if len(value.shape) > 1), default=0)
    return tokens, [each for each in positions if (table_of(flow, each) or each).shape[-2] >= length]


def _differs_by_position(writes: Writes, embedding: Value) -> bool:
    """Whether the rows that an embedding takes differ at small sizes, where there are several positions."""
    index = next(each for each in writes.flow.reads(embedding.node) if not each.is_float)
    nodes = [each.node for each in walk([index], lambda each: writes.flow.reads(each.node))]
    sizes = writes.dimensions.small_sizes
    numbers = Rerun(writes.flow, nodes, writes.dimensions, sizes).base.get(index.node)
    return numbers is None or len(numbers.unique()) > 1


def table_of(flow: Flow, value: Value) -> Value | None:
    """Returns the table whose rows a value has, one for each number in a tensor; `None` for other values."""
    reads = flow.reads(value.node)
    if value.op == "embedding":
        return next((read for read in reads if read.is_float and len(read.shape) == 2), None)
    if value.op not in ("getitem", "index_select") or len(reads) != 2 or not flow.is_held(reads[0]):
        return None
    table, index = reads
    has_rows = len(table.shape) == 2 and value.shape == (*index.shape, table.shape[1])
    return table if table.is_float and has_rows and not (index.is_float or index.is_mask) else None


def _before(trails: Trails, value: Value) -> list[Value]:
    """Returns the terms of a value that is a sum, up to norms, scalings and linear maps."""
    flow, op = trails.flow, value.op
    if (norm := trails.norms.get(value)) is not None:
        return [norm.given.value]
    reads = [read for read in flow.reads(value.node) if read.is_float] if op else []
    moving = [read for read in reads if not flow.is_held(read)]
    if op in ADDITIONS:
        return reads if moving else []
    if op in _LOOKUPS and reads and flow.is_held(reads[0]):
        return []
    if op in _STEPS:
        return [read for read in reads if not flow.is_held(value) or read.size == value.size]
    return reads[:1] if op in _WRITTEN_INTO else moving[:1] if op in _MAPS else []


def _is_of_inputs(flow: Flow, embedding: Value) -> bool:
    """Whether the indices of an embedding are an input of the model, as it is."""

    def before(value: Value) -> list[Value]:
        reads = [read for read in flow.moving(value.node) if not read.is_mask] if value.op in _INDEX_STEPS else []
        return reads[:1]

    for value in walk(flow.moving(embedding.node)[:1], before, _FARTHEST):
        is_shifted = value.op in ADDITIONS and any(read.node.kind == "input" for read in flow.reads(value.node))
        if value.node.kind == "input" or is_shifted:
            return True
    return False


def _norm_behind(trails: Trails, stack: Stack, stacks: Sequence[Stack]) -> Value | None:
    """Returns the norm after the last layer of a stack; the layers of others may have norms that read it, too."""
    order, last = trails.flow.order, stack.last.end.value
    others = [layer for other in stacks if other is not stack for layer in other.layers.values()]
    spans = [range(layer.low + 1, order[layer.end.value.node] + 1) for layer in others]
    norms = (value for value, found in trails.norms.items() if trails.is_same(found.given.value, last))
    return next((value for value in norms if not any(order[value.node] in span for span in spans)), None)


def _is_mapped(flow: Flow, result: Value, stack: Stack) -> bool:
    """Whether a result of the model comes from the end of the stream by a linear map."""
    last = stack.last.end.value

    def before(value: Value) -> list[Value]:
        reads = [read for read in flow.moving(value.node) if read.is_float] if value.node.kind == "op" else []
        is_after = flow.order[value.node] > flow.order[last.node]
        return reads[:1] if is_after and not (value.op in PRODUCTS and len(reads) > 1) else []

    trail = list(walk([result], before, _FARTHEST))
    ends = [number for number, value in enumerate(trail) if value in (last, stack.norm)]
    return bool(ends) and any(map(flow.is_linear_map, trail[: ends[0]]))


Index: TypeAlias = "tuple[int | slice, ...]"


@dataclass(frozen=True, slots=True)
class Component:
    """A value that has a standard name.

    Attributes:
        name: The name, such as `layers[3].attn.q`.
        path: The path of the value.
        shape: Its shape in the capture, in the order of `axes`.
        axes: What its dimensions are, in the order in which it is seen by its name, which is one for all models:
            `batch`, `position`, `head`, `channel` (or `neuron`, `expert`), and of attention patterns and scores
            `batch`, `head`, `query`, `key`. Where a dimension is not known (`None`), the order is that at the path.
        index: The part of the value, in this order, that is meant; `()` for all of it.
        is_tiled: Whether the heads of queries read the heads of these keys or values by turns (`0, 1, 0, 1`). Else
            neighbors share one (`0, 0, 1, 1`).
        path_axes: What the dimensions of the value at `path` are, in the model's own order.
        layout: How the value at `path` is seen in the order of `axes`; `None` if that is its own.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    axes: Axes
    index: Index = ()
    is_tiled: bool = False
    path_axes: Axes = ()
    layout: Layout | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path_axes", self.path_axes or self.axes)

    def head_of(self, number: int, queries: int) -> int:
        """Returns which head of keys or values a head of queries reads, given the number of query heads."""
        heads = self.shape[self.axes.index("head")] if "head" in self.axes else 1
        return number % heads if self.is_tiled else number * heads // queries

    def seen(self, value: Tensor) -> Tensor:
        """Returns the value at `path` in the order of `axes`: a view."""
        return value if self.layout is None else self.layout.view(value)

    def at_path(self, seen: Tensor) -> Tensor:
        """Returns a value in the order of `axes` as it is at `path`: a view where there can be one."""
        return seen if self.layout is None else self.layout.back(seen)

    @property
    def kept_dims(self) -> list[int]:
        """The dimensions of the whole value that the part has, in order."""
        return [dim for dim in range(len(self.shape)) if dim >= len(self.index) or isinstance(self.index[dim], slice)]


@dataclass(slots=True, eq=False)
class Evidence:
    """What was found in a capture.

    Attributes:
        trails: The flow of values, and the norms.
        stacks: The stacks of layers.
        values: The value of each component, by name.
    """

    trails: Trails
    stacks: list[Stack] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)


class Components(Mapping[str, Component]):
    """The components of a captured model by name, in order; its repr is a table.

    Attributes:
        layers: The number of layers of each stack, by the name of the stack (`""` if there is only one).
        missing: Why components were not found, by their name, or by a pattern such as `layers[*]`.
        groups: What each group of the inputs' dimensions is, by its number in `dimensions_of`: `batch`, or `position`.
        evidence: What they were found in.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> pg = PatchableGraph(model, torch.randn(1, 5, 8))
        >>> [component.name for component in pg.components.lookup("layers[*].mlp_out[:, -1]")]
        ['layers[0].mlp_out[:, -1]', 'layers[1].mlp_out[:, -1]']
        >>> "multi_head_attention_forward" in pg.components.why_missing("layers[0].attn.q_rot")
        True
        >>> pg.components.axes_at("layers_0.dropout2.output"), pg.components.axes_at("src")
        (('batch', 'position', 'channel'), ())
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.layers: dict[str, int] = {}
        self.missing: dict[str, str] = {}
        self.groups: dict[int, str] = {}
        self._by_name: dict[str, Component] = {}

    def add(self, component: Component, value: Value) -> None:
        """Adds a component, with its value in the flow of values."""
        self._by_name[component.name] = component
        self.evidence.values[component.name] = value

    def add_splice(self, call: CallNode) -> None:
        """Adds the parts of a splice at a component: `layers[5].resid_post.sae.latents`."""
        for one in [one for one in self._by_name.values() if one.path == call.target and not one.index]:
            for part in ("value", "latents", "skipped", "reconstruction", "error", "output"):
                node = call.frame.names.get(part)
                if node is None or not isinstance(node.spec, TensorSpec):
                    continue
                name, shape = f"{one.name}.{call.op}.{part}", tuple(node.spec.shape)
                axes: Axes = one.path_axes if len(shape) == len(one.path_axes) else (None,) * len(shape)
                axes = (*axes[:-1], "latent") if part == "latents" else axes
                heads = [max(one.layout.factors, default=None) if one.layout is not None else None] * len(axes)
                self._by_name[name] = _component(name, format_path((*call.frame.path, part)), shape, axes, heads)

    def __getitem__(self, name: str) -> Component:
        found = self._by_name.get(name)
        return find_one(self, name, name) if found is None else found

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def why_missing(self, name: str) -> str | None:
        """Returns why a component was not found; `None` if that is not known."""
        return why_missing(self.missing, name)

    def axes_at(self, path: str) -> Axes:
        """Returns the names of the dimensions of the value at a path, if it is a component or contains one."""
        return next((one.path_axes for one in self.values() if one.path == path), ())

    def lookup(self, text: str) -> list[Component]:
        """Returns the components that a name refers to: one, or several for lists, slices and `*`, also in words.

        Negative numbers count from the end. With `*`, layers that do not have the component are left out. A bracket at
        the end is a slice of the value.

        Raises:
            UnknownPathError: The model has no such component. The message has the reason, and the nearest names.
        """
        return look_up(self, text)

    def __repr__(self) -> str:
        return table(self)


_NO_STACK = (
    "nothing is added again and again to what it is computed from, by modules of a list or in a loop; you can say "
    "which modules are the layers: ExtractionOptions(layers=[...])"
)
_NO_NORM = "no norm reads"


@once_a_capture
def find(root: Frame) -> Components:
    """Returns the components of a captured model, found in its records; each capture is searched once."""
    before = RandomState()  # operations that draw numbers do so from one state
    try:
        found = _ComponentFinder(root).found
    finally:
        before.restore()
    for call in spliced_calls(root):
        found.add_splice(call)
    return found


def _unrecorded(frame: Frame) -> str:
    """Returns why no components were found inside an opaque frame."""
    who = format_path(frame.path) or "the model"
    return f"{who!r} ({type(frame.module).__name__}) has no graph to find them in: {frame.opaque_reason}"


def _component(
    name: str, path: str, shape: Sequence[int], path_axes: Axes, heads: Sequence[int | None], *, is_tiled: bool = False
) -> Component:
    """Returns a component by what it is at its path; `heads` are those of `canonical`."""
    axes, layout = canonical(path_axes, heads)
    seen = tuple(shape) if layout is None else tuple(size for size in layout.sizes(shape) if size is not None)
    return Component(name, path, seen, axes, is_tiled=is_tiled, path_axes=path_axes, layout=layout)


class _ComponentFinder:
    """Finds components, and names them."""

    def __init__(self, root: Frame) -> None:
        self._flow = Flow(root)
        self._trails = Trails(self._flow)
        self.found = Components(Evidence(self._trails))
        self._writes = Writes(self._trails)
        self.found.groups = self._writes.groups
        options = root.capture.options
        stacks = stacks_of(self._trails, None if options is None else options.layers)
        find_ends(self._writes, stacks)
        for stack in stacks:
            axes = self._writes.stream_axes(stack)
            for layer in stack.layers.values():
                layer.axes = axes
            self._add_start(stack.prefix, stack)
            self._add_stack(stack.prefix, stack)
        self._add_end(stacks[::-1])
        if not stacks:
            opaque = self._flow.opaque
            why = _unrecorded(opaque[0]) if opaque else _NO_STACK
            self.found.missing |= dict.fromkeys(("layers[*]", "@embed", "@logits"), why)

    def _add_stack(self, start: str, stack: Stack) -> None:
        self.found.layers[stack.name] = len(stack.layers) + len(stack.unlike)
        for number, frame in stack.unlike.items():
            why = "its output is not its input plus something" if frame.opaque_reason is None else _unrecorded(frame)
            self.found.missing[f"{start}layers[{number}]"] = why
        for number, layer in stack.layers.items():
            layer.name = f"{start}layers[{number}]."
            self._add_layer(layer)
        self.found.missing = _joined(self.found.missing, start, len(stack.layers))
        self.found.evidence.stacks.append(stack)

    def _add_layer(self, layer: Layer) -> None:
        start = layer.name
        self._add(f"{start}resid_pre", layer.start.path, layer.start.value, layer.axes)
        counts: Counter[str] = Counter()
        for number, write in enumerate(self._writes.of(layer)):
            counts[write.kind] += 1
            kind = write.kind if counts[write.kind] == 1 else f"{write.kind}{counts[write.kind]}"
            if number == 1:
                self._add_middle(start, layer, write)
            if write.kind == "unknown":
                opaque = next(frame for frame in self._flow.opaque if frame.call in write.inside)
                self.found.missing |= dict.fromkeys((f"{start}attn_out", f"{start}mlp_out"), _unrecorded(opaque))
            else:
                layer.writes[kind] = write
                self._add_write(start, kind, write, layer)
        self._add(f"{start}resid_post", layer.end.path, layer.end.value, self._writes.layout(layer, layer.end.value))

    def _add_middle(self, start: str, layer: Layer, write: Write) -> None:
        if write.is_parallel:
            self.found.missing[f"{start}resid_mid"] = "attention and MLP read the same state of the stream"
        else:
            states = layer.states
            before = layer.steps[: states.index(write.state)]
            state = next((step.result for step in reversed(before) if step.kind != "same"), write.state)
            self._add_value(f"{start}resid_mid", state, layer.frame, self._writes.layout(layer, state))

    def _add_write(self, start: str, kind: str, write: Write, layer: Layer) -> None:
        norm, norm_name = norm_of(write, layer), f"{start}{_norm_name(kind)}"
        if norm is not None:
            self._add_value(norm_name, norm, layer.frame, self._writes.layout(layer, norm))
        else:
            self.found.missing[norm_name] = f"{_NO_NORM} the stream for it"
        if write.code.parts is None:  # this is the first layer with it
            write.code.parts = self._parts(write, layer)
        parts = write.code.parts
        names = {key: f"{start}{kind if key[0] in '._' else ''}{key}" for key in (*parts.found, *parts.missing)}
        for key, part in parts.found.items():
            self._add_value(names[key], write.here(part.value), layer.frame, part.axes, is_tiled=key in parts.tiled)
        self.found.missing |= {names[key]: why for key, why in parts.missing.items()}

    def _parts(self, write: Write, layer: Layer) -> Parts:
        """Returns the values inside of a write that have names.

        Names that begin with a dot or an underscore (`.q`, `_out`) follow that of the write, others that of the layer.
        """
        parts, own = Parts(), write.attentions
        axes = {axis for one in own for part in one.found.values() for axis in part.axes}
        are_heads = "head" not in axes and len({tuple(one.found) for one in own}) == 1
        if len(own) == 1:
            parts.take(".", own[0])
        elif own and are_heads and own[0].found:  # a module for each head
            for number, one in enumerate(own):
                parts.take(f".heads[{number}].", one)
        elif own:
            paths = list(dict.fromkeys(repr(self._trails.path(each.z, layer.frame)) for each in own))
            returned = ", ".join([*paths[:3], *["..."][: len(paths) - 3]])
            parts.missing[".*"] = f"it consists of {len(own)} attentions; what they return is {returned}"
        elif write.kind == "attn":
            parts.missing[".*"] = (
                "no softmax lies between two products alone, and no call that can be opened computes all three"
            )
        elif write.kind == "mlp":
            parts = mlp_of(self._trails, write, layer)
        is_written_into = self._trails.path(write.value, layer.frame) == self._flow.path(write.value)
        if is_written_into and write.value.node.is_in_place and self._flow.choices(write.inside):
            why = "the layer writes the results of experts into it one by one, and other inputs may have other experts"
            parts.missing["_out"] = f"{why}; a module of its own for the mixture would return all"
        else:
            parts.found["_out"] = Part(write.value, write.axes(write.value))
        return parts

    def _add_start(self, prefix: str, stack: Stack) -> None:
        layer = stack.first
        for word, values in (("embed", stack.tokens), ("pos_embed", stack.positions)):
            name = f"{prefix}@{word}"
            if len(values) != 1:
                many = f"the first layer's input is a sum of {len(values)} such embeddings"
                self.found.missing[name] = many if values else "no such embedding is a part of the first layer's input"
            elif values[0].op in CREATIONS:
                self.found.missing[name] = "the model fills in this tensor part by part"
            else:
                roles = self._writes.between(values[0], layer.start.value, (), layer.axes)
                self._add_value(name, values[0], self._flow.root, roles.axes(values[0]))

    def _add_end(self, stacks: Sequence[Stack]) -> None:
        """Adds what the streams of stacks end in, the last one first."""
        for stack in stacks:
            if stack.norm is not None:
                self._add_value(
                    f"{stack.prefix}@final_norm", stack.norm, self._flow.root, self._after(stack, stack.norm)
                )
            else:
                self.found.missing[f"{stack.prefix}@final_norm"] = f"{_NO_NORM} what the last layer returns"
        last = next((stack for stack in stacks if stack.logits is not None), None)
        if last is not None and last.logits is not None:
            value = last.logits.value
            self._add("@logits", last.logits.path, value, self._after(last, value, "vocab"))
        else:
            self.found.missing["@logits"] = "no result of the model is a linear map of the last layer's output"

    def _after(self, stack: Stack, value: Value, last: str = "channel") -> Axes:
        """Returns the axes of a value that is computed from the end of a stream."""
        layer = stack.last
        end = layer.end.value
        return self._writes.between(end, value, self._writes.layout(layer, end)).axes(value, last)

    def _add(self, name: str, path: str, value: Value, axes: Axes, *, is_tiled: bool = False) -> None:
        heads: list[int | None] = [None] * len(axes)
        if isinstance(value.spec, TensorSpec) and not MERGED.keys().isdisjoint(axes):
            heads = [each.factor if each is not None else None for each in self._writes.dimensions.extents(value.spec)]
        self.found.add(_component(name, path, value.shape, axes, heads, is_tiled=is_tiled), value)

    def _add_value(self, name: str, value: Value, inside: Frame, axes: Axes, *, is_tiled: bool = False) -> None:
        self._add(name, self._trails.path(value, inside), value, axes, is_tiled=is_tiled)


def _joined(missing: Mapping[str, str], start: str, layers: int) -> dict[str, str]:
    """Returns why components are missing, at once for those of all layers of a stack, but for numbered ones."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, why in missing.items():
        every = re.sub(r"layers\[\d+(?=\]\.(?!.*\[\d))", "layers[*", name) if name.startswith(start) else name
        names.setdefault((every, why), []).append(name)
    return {one: why for (every, why), own in names.items() for one in ([every] if len(own) == layers else own)}


def _norm_name(kind: str) -> str:
    """Returns the name of the norm of a write: `ln1` of attention or a mixer, `ln2` of an MLP."""
    part = kind.rstrip(digits)
    return {"cross_attn": "ln_cross", "mlp": "ln2"}.get(part, "ln1") + kind.removeprefix(part)


def table(components: Components) -> str:
    """Returns components as a table: equal components of several layers are one row, with `*` for the layer."""
    groups: dict[tuple[str, ...], list[tuple[int, Component]]] = {}
    for each in components.values():
        before, after, number, rest = "", "", -1, each.name
        if (layer := _LAYER.search(each.name)) is not None:
            before, number, rest = each.name[: layer.start(1)], int(layer[1]), each.name[layer.end(1) :]
            after = re.sub(rf"_{number}(?=\.|$)", "_*", each.path, count=1)
        axes, own = (" ".join(axis or "?" for axis in axes) for axes in (each.axes, each.path_axes))
        axes = axes if each.layout is None else f"{axes} (path: {own})"
        columns = str(each.shape), axes
        groups.setdefault((before, rest, after or each.path, *columns), []).append((number, each))
    rows: list[tuple[str, ...]] = [("component", "path", "shape", "axes")]
    for (before, rest, path, *others), found in groups.items():
        numbers = [number for number, _ in found]
        is_one = len(found) == 1
        name = found[0][1].name if is_one else f"{before}{_numbers_text(numbers)}{rest}"
        rows.append((name, found[0][1].path if is_one else path, *others))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


_LAYER = re.compile(r"(?:^|\.)layers\[(\d+)")


def _numbers_text(numbers: Sequence[int]) -> str:
    start, end = numbers[0], numbers[-1] + 1
    return f"{start}:{end}" if numbers == list(range(start, end)) else ", ".join(map(str, numbers))
