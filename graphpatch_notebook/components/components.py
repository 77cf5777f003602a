"""The components of a model by their standard names, each with the path of its value."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, get_args

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.components.attention import Attention
from graphpatch_notebook.components.chain import Layer, Stack, Stacks, Trails
from graphpatch_notebook.components.ends import end_of, ends_alone, start_of
from graphpatch_notebook.components.flow import Axes, Flow, Value
from graphpatch_notebook.components.mlp import Mlp, mlp_of
from graphpatch_notebook.components.names import find_one, look_up, why_missing
from graphpatch_notebook.components.operations import CHOICES, CREATIONS
from graphpatch_notebook.components.proofs import Evidence, NamedLayer, NamedWrite, ProofRun, norm_name, prove
from graphpatch_notebook.components.writes import Write, WriteKind, Writes, norm_of
from graphpatch_notebook.patching.model_state import RandomState
from graphpatch_notebook.paths import format_path

Index: TypeAlias = "tuple[int | slice, ...]"


@dataclass(frozen=True, slots=True)
class Component:
    """A value that has a standard name.

    Attributes:
        name: The name, such as `layers[3].attn.q`.
        path: The path of the value.
        shape: The shape of the value at `path`, in the capture.
        axes: What its dimensions are: `batch`, `position`, `head`, `query`, `key`, `channel`, `neuron`, ...; `None`
            where that is not known.
        index: The part of the value at `path` that is meant; `()` for all of it.
        proof: How it was proved that the value is what the name says; empty if it was not yet.
        doubt: Why it may not be; empty if there is no reason to doubt it.
        is_tiled: Whether the heads of queries read the heads of these keys or values by turns (`0, 1, 0, 1`). Else
            neighbors share one (`0, 0, 1, 1`).
    """

    name: str
    path: str
    shape: tuple[int, ...]
    axes: Axes
    index: Index = ()
    proof: str = ""
    doubt: str = ""
    is_tiled: bool = False

    def head_of(self, number: int, queries: int) -> int:
        """Returns which head of keys or values a head of queries reads, given the number of query heads."""
        heads = self.shape[self.axes.index("head")] if "head" in self.axes else 1
        return number % heads if self.is_tiled else number * heads // queries

    @property
    def kept_dims(self) -> list[int]:
        """The dimensions of the value at `path` that the part has, in order."""
        return [dim for dim in range(len(self.shape)) if dim >= len(self.index) or isinstance(self.index[dim], slice)]


@dataclass(slots=True)
class _Findings:
    """What was found in a capture; all `Components` of the capture share it."""

    evidence: Evidence
    by_name: dict[str, Component] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


Verify: TypeAlias = "Callable[[Callable[[ProofRun, Collection[str]], None], tuple[Any, ...], dict[str, Any]], None]"
"""Calls a function with a runner of the captured model on inputs, and the paths that can be patched."""


class Components(Mapping[str, Component]):
    """The components of a captured model by name, in order; its repr is a table.

    Attributes:
        layers: The number of layers of each stack, by the name of the stack (`""` if there is only one).
        missing: Why components were not found, by their name, or by a pattern such as `layers[*]`.
        evidence: What the proofs are made from.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> pg = PatchableGraph(model, torch.randn(1, 5, 8))
        >>> [component.name for component in pg.components.lookup("layers[*].mlp_out[:, -1]")]
        ['layers[0].mlp_out[:, -1]', 'layers[1].mlp_out[:, -1]']
        >>> pg.components.verify()["layers[0].mlp_out"].proof
        'found by running; residual sum recomputed'
        >>> pg.components.why_missing("layers[0].cross_attn.z")
        'only attn_out and mlp_out are added to the stream here'
        >>> pg.components.axes_at("layers_0.dropout2.output"), pg.components.axes_at("src")
        (('batch', 'position', 'channel'), ())
    """

    def __init__(self, findings: _Findings, verify: Verify | None = None) -> None:
        self._findings = findings
        self._verify = verify
        self.layers: Mapping[str, int] = findings.layers
        self.missing: Mapping[str, str] = findings.missing
        self.evidence = findings.evidence

    def with_runs(self, verify: Verify) -> Components:
        """Returns the same components, which can be verified in runs of the model."""
        return Components(self._findings, verify)

    def verify(self, *args: Any, **kwargs: Any) -> Components:
        """Checks the residual sum in a run of the model on these inputs, or on the example inputs.

        Returns:
            The components: `proof` says how each was proved, or `doubt` why not. The inputs, the model's state and the
            random generators do not change.

        Raises:
            GraphError: There are no example inputs; give inputs.
            Exception: Any error that the model raises on these inputs.
        """
        assert self._verify is not None  # `PatchableGraph.components` has runs
        self._verify(self._prove, args, kwargs)
        return self

    def take(self, proved: Mapping[str, Component]) -> None:
        """Takes the proofs and doubts of the same components, proved elsewhere."""
        for name, component in proved.items():
            found = self._findings.by_name[name]
            self._findings.by_name[name] = replace(found, proof=component.proof, doubt=component.doubt)

    def _prove(self, run: ProofRun, known: Collection[str]) -> None:
        found = self._findings
        verdicts = prove(found.evidence, {name: each.path for name, each in found.by_name.items()}, known, run)
        for name, component in found.by_name.items():
            proof = "; ".join(dict.fromkeys(verdicts.proofs.get(name, ())))
            doubt = verdicts.doubts.get(name, "" if proof else "nothing proves it")
            found.by_name[name] = replace(component, proof="" if doubt else proof, doubt=doubt)

    def __getitem__(self, name: str) -> Component:
        found = self._findings.by_name.get(name)
        return find_one(self, name, name) if found is None else found

    def __contains__(self, name: object) -> bool:
        return name in self._findings.by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._findings.by_name)

    def __len__(self) -> int:
        return len(self._findings.by_name)

    def why_missing(self, name: str) -> str | None:
        """Returns why a component was not found; `None` if that is not known."""
        return why_missing(self.missing, name)

    def axes_at(self, path: str) -> Axes:
        """Returns the names of the dimensions of the value at a path, if it is a component or contains one."""
        return next((one.axes for one in self.values() if one.path == path and len(one.axes) == len(one.shape)), ())

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


_NO_STACK = "no module of a list adds to its input, nor do modules of a dict, or with numbered names, in turn"
_ATTENTION = ("q", "k", "v", "q_rot", "k_rot", "scores", "pattern", "z")
_lock = threading.RLock()


def find(root: Frame) -> Components:
    """Returns the components of a captured model, found in its records; each capture is searched once."""
    with _lock:
        findings = root.capture.findings
        if find not in findings:
            before = RandomState()  # operations that draw numbers do so from one state
            try:
                findings[find] = _ComponentFinder(root).found
            finally:
                before.restore()
        return Components(findings[find])


def _unrecorded(frame: Frame) -> str:
    """Returns why no components were found inside an opaque frame."""
    who = format_path(frame.path) or "the model"
    return f"{who!r} ({type(frame.module).__name__}) has no graph to find them in: {frame.opaque_reason}"


class _ComponentFinder:
    """Finds components, and names them."""

    def __init__(self, root: Frame) -> None:
        self._flow = Flow(root)
        self._trails = Trails(self._flow)
        self.found = _Findings(Evidence(self._trails))
        self._writes = Writes(self._trails)
        stacks = Stacks(self._trails).found
        for stack in stacks:
            axes = self._writes.stream_axes(stack)
            for layer in stack.layers:
                layer.axes = axes
            self._add_start(stack.prefix, stack)
            self._add_stack(stack.prefix, stack)
        self._add_end(stacks)
        if not stacks:
            opaque = self._flow.opaque
            why = _unrecorded(opaque[0]) if opaque else _NO_STACK
            self.found.missing |= dict.fromkeys(("layers[*]", "@logits", "@embed")[: 3 if opaque else 1], why)
        if len(stacks) < 2 and "@logits" in self.found.missing:
            self._add_ends_alone()

    def _add_ends_alone(self) -> None:
        """Adds the embedding and the logits of a model in which no stack of layers was found between them."""
        start, end = ends_alone(self._trails)
        if end.logits is None:
            return
        value, embed = end.logits.value, start.tokens[0]
        axes = self._writes.axes_alone(embed, value)
        roles = self._writes.between(embed, value, axes)
        self._add("@logits", end.logits.path, value, roles.axes(value, "vocab"))
        self.found.evidence.ends.append(("", end))
        if "@embed" not in self.found.by_name:
            self._add_value("@embed", embed, self._flow.root, axes)
            self.found.evidence.starts.append(("", start))
        for name in ("@embed", "@logits"):
            self.found.missing.pop(name, None)

    def _add_stack(self, start: str, stack: Stack) -> None:
        self.found.layers[stack.name] = len(stack.layers) + len(stack.unlike)
        for number, frame in stack.unlike.items():
            why = "its output is not its input plus something" if frame.opaque_reason is None else _unrecorded(frame)
            self.found.missing[f"{start}layers[{number}]"] = why
        numbers = (n for n in range(len(stack.layers) + len(stack.unlike)) if n not in stack.unlike)
        named = [
            self._add_layer(NamedLayer(f"{start}layers[{number}].", layer))
            for number, layer in zip(numbers, stack.layers, strict=True)
        ]
        self._join_missing(f"{start}layers[*].", named)
        self.found.evidence.stacks.append((stack, named))

    def _join_missing(self, all_layers: str, named: Sequence[NamedLayer]) -> None:
        """Says at once what is missing in all layers of a stack for the same reason."""
        missing = self.found.missing
        first = named[0].name
        for name, why in list(missing.items()):
            part = name.removeprefix(first)
            is_of_all = part != name and not re.search(r"\[\d", part)  # numbers of experts are looked up one by one
            if is_of_all and all(missing.get(f"{layer.name}{part}") == why for layer in named):
                for layer in named:
                    del missing[f"{layer.name}{part}"]
                missing[f"{all_layers}{part}"] = why

    def _add_layer(self, named: NamedLayer) -> NamedLayer:
        start, layer = named.name, named.layer
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
                continue
            named.writes.append(self._add_write(start, kind, write, layer))
        self._add(f"{start}resid_post", layer.end.path, layer.end.value, self._writes.layout(layer, layer.end.value))
        if not counts["unknown"]:
            self._add_absent(start, counts)
        return named

    def _add_absent(self, start: str, kinds: Collection[str]) -> None:
        """Adds the reasons why kinds of writes are missing that a layer does not have."""
        alone = " and ".join(f"{kind}_out" for kind in kinds)
        why = f"only {alone} {'is' if len(kinds) == 1 else 'are'} added to the stream here"
        absent = [kind for kind in get_args(WriteKind) if kind not in (*kinds, "unknown")]
        reasons = {part: why for kind in absent for part in (kind, f"{kind}_out", norm_name(kind))}
        if len(kinds) == 1:
            reasons["resid_mid"] = why
        if f"{start}router" not in self.found.by_name:
            reasons |= dict.fromkeys(("router", "experts"), why if "mlp" in absent else "no MLP chooses among experts")
        for part, reason in reasons.items():
            if f"{start}{part}" not in self.found.by_name:
                self.found.missing.setdefault(f"{start}{part}", reason)

    def _add_middle(self, start: str, layer: Layer, write: Write) -> None:
        if write.is_parallel:
            self.found.missing[f"{start}resid_mid"] = "attention and MLP read the same state of the stream"
        else:
            states = layer.states
            before = layer.steps[: states.index(write.state)]
            state = next((step.result for step in reversed(before) if step.kind != "same"), write.state)
            self._add_value(f"{start}resid_mid", state, layer.frame, self._writes.layout(layer, state))

    def _add_write(self, start: str, kind: str, write: Write, layer: Layer) -> NamedWrite:
        named = NamedWrite(kind, write)
        norm = norm_of(write, layer)
        if norm is not None:
            axes = write.roles.axes(norm) if norm.node in write.inside else self._writes.layout(layer, norm)
            self._add_value(f"{start}{norm_name(kind)}", norm, layer.frame, axes)
        else:
            self.found.missing[f"{start}{norm_name(kind)}"] = self._trails.why_no_norm("the stream for it")
        if len(write.attentions) > 1:
            paths = list(dict.fromkeys(repr(self._path(each.z, layer.frame)) for each in write.attentions))
            returned = ", ".join([*paths[:3], *["..."][: len(paths) - 3]])
            why = f"it consists of {len(write.attentions)} attentions; what they return is {returned}"
            self.found.missing[f"{start}{kind}.*"] = why
        elif write.attentions:
            named.parts = self._add_attention(start, kind, write, layer)
        elif write.kind == "attn":
            self.found.missing[f"{start}{kind}.*"] = (
                "no softmax lies between two products alone, and no call that can be opened computes all three"
            )
        elif write.kind == "mlp":
            named.mlp = self._add_mlp(start, kind, write, layer)
        path = self._path(write.value, layer.frame)
        is_written_into = write.value.node.is_in_place and path == self._flow.path(write.value)
        if is_written_into and any(node.op in CHOICES for node in write.inside):
            why = "the layer writes the results of experts into it one by one, and other inputs may have other experts"
            self.found.missing[f"{start}{kind}_out"] = f"{why}; a module of its own for the mixture would return all"
        else:
            self._add(f"{start}{kind}_out", path, write.value, write.roles.axes(write.value))
        return named

    def _add_attention(self, start: str, kind: str, write: Write, layer: Layer) -> Attention:
        parts = write.attentions[-1]
        for name in _ATTENTION:
            if (part := parts.found.get(name)) is not None:
                self._add_value(f"{start}{kind}.{name}", part.value, layer.frame, part.axes)
        for name in parts.tiled & set(parts.found):
            own = f"{start}{kind}.{name}"
            self.found.by_name[own] = replace(self.found.by_name[own], is_tiled=True)
        for name, reason in parts.missing.items():
            self.found.missing[f"{start}{kind}.{name}"] = reason
        return parts

    def _add_mlp(self, start: str, kind: str, write: Write, layer: Layer) -> Mlp:
        mlp = mlp_of(self._trails, write, layer)
        if mlp.router is not None:
            self._add_value(f"{start}router", mlp.router, layer.frame, write.roles.axes(mlp.router, "expert"))
        for number, frame in mlp.experts.items():
            place = self._flow.outputs(frame)[0]
            self._add(f"{start}experts[{number}].out", place.path, place.value, ("token", "channel"))
        for name, value in (("pre", mlp.pre), ("post", mlp.post)):
            if value is not None:
                self._add_value(f"{start}{kind}.{name}", value, layer.frame, write.roles.axes(value, "neuron"))
        for name, reason in mlp.missing.items():
            self.found.missing[f"{start}{name.replace('mlp', kind)}"] = reason
        return mlp

    def _add_start(self, prefix: str, stack: Stack) -> None:
        found = start_of(self._trails, stack)
        self.found.evidence.starts.append((prefix, found))
        for word, values in (("embed", found.tokens), ("pos_embed", found.positions)):
            name = f"{prefix}@{word}"
            if len(values) == 1 and values[0].op in CREATIONS:
                self.found.missing[name] = "the model fills in this tensor part by part"
            elif len(values) == 1:
                layer = stack.layers[0]
                roles = self._writes.between(values[0], layer.start.value, (), layer.axes)
                self._add_value(name, values[0], self._flow.root, roles.axes(values[0]))
            elif not values:
                self.found.missing[name] = "no such embedding is a part of the first layer's input"
            else:
                self.found.missing[name] = f"the first layer's input is a sum of {len(values)} such embeddings"

    def _add_end(self, stacks: Sequence[Stack]) -> None:
        ends = [(stack, end_of(self._trails, stack, stacks)) for stack in reversed(stacks)]
        for stack, end in ends:
            prefix = stack.prefix
            self.found.evidence.ends.append((prefix, end))
            if end.norm is not None:
                self._add_value(f"{prefix}@final_norm", end.norm, self._flow.root, self._after(stack, end.norm))
            else:
                self.found.missing[f"{prefix}@final_norm"] = self._trails.why_no_norm("what the last layer returns")
        last = next(((stack, end.logits) for stack, end in ends if end.logits is not None), None)
        if last is None:
            self.found.missing["@logits"] = "no result of the model is a linear map of the last layer's output"
        else:
            of_stack, logits = last
            self._add("@logits", logits.path, logits.value, self._after(of_stack, logits.value, "vocab"))

    def _after(self, stack: Stack, value: Value, last: str = "channel") -> Axes:
        """Returns the axes of a value that is computed from the end of a stream."""
        layer = stack.layers[-1]
        end = layer.end.value
        return self._writes.between(end, value, self._writes.layout(layer, end)).axes(value, last)

    def _add(self, name: str, path: str, value: Value, axes: Axes) -> None:
        self.found.by_name[name] = Component(name, path, value.shape, axes)
        self.found.evidence.values[name] = value

    def _add_value(self, name: str, value: Value, inside: Frame, axes: Axes) -> None:
        self._add(name, self._path(value, inside), value, axes)

    def _path(self, value: Value, inside: Frame) -> str:
        norm = self._trails.norms.get(value)
        return self._flow.boundary_path(value, inside, is_unread=True) if norm is None else norm.returned.path


def table(components: Components) -> str:
    """Returns components as a table: equal components of several layers are one row, with `*` for the layer."""
    groups: dict[tuple[str, ...], list[tuple[int, Component]]] = {}
    for each in components.values():
        before, after, number, rest = "", "", -1, each.name
        if (layer := _LAYER.search(each.name)) is not None:
            before, number, rest = each.name[: layer.start(1)], int(layer[1]), each.name[layer.end(1) :]
            after = re.sub(rf"_{number}(?=\.|$)", "_*", each.path, count=1)
        columns = str(each.shape), " ".join(axis or "?" for axis in each.axes), each.doubt or each.proof
        groups.setdefault((before, rest, after or each.path, *columns), []).append((number, each))
    rows: list[tuple[str, ...]] = [("component", "path", "shape", "axes", "proved")]
    for (before, rest, path, *others), found in groups.items():
        numbers = [number for number, _ in found]
        is_one = len(found) == 1
        name = found[0][1].name if is_one else f"{before}{_numbers_text(numbers)}{rest}"
        rows.append((name, found[0][1].path if is_one else path, *others))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


_LAYER = re.compile(r"(?:^|\.)layers\[(\d+)")


def _numbers_text(numbers: Sequence[int]) -> str:
    start, end = numbers[0], numbers[-1] + 1
    return f"{start}:{end}" if numbers == list(range(start, end)) else ", ".join(map(str, numbers))
