"""The components of a model by their standard names, each with the path of its value."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from graphpatch_notebook.capture.records import CallNode, Frame, once_a_capture, spliced_calls
from graphpatch_notebook.components.attention import Part, Parts
from graphpatch_notebook.components.chain import Trails
from graphpatch_notebook.components.ends import find_ends
from graphpatch_notebook.components.flow import Axes, Flow, Value
from graphpatch_notebook.components.layouts import MERGED, Layout, canonical
from graphpatch_notebook.components.mlp import mlp_of
from graphpatch_notebook.components.names import find_one, look_up, why_missing
from graphpatch_notebook.components.operations import CREATIONS
from graphpatch_notebook.components.stacks import Layer, Stack, stacks_of
from graphpatch_notebook.components.writes import Write, Writes, norm_of
from graphpatch_notebook.patching.model_state import RandomState
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import TensorSpec

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
        >>> pg.components.why_missing("layers[0].attn.q_rot")
        'nothing rotates it (as rotary embeddings do) before the product of queries and keys'
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
    for start, name in (("cross_attn", "ln_cross"), ("mlp", "ln2")):
        if kind.startswith(start):
            return name + kind.removeprefix(start)
    return "ln1" + kind.lstrip("abcdefghijklmnopqrstuvwxyz")


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
