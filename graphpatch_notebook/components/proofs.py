"""Proofs that components are what their names say, from values of a run.

Each proof recomputes a value from others with plain torch: the residual sum, the norms, `pattern @ v`, `z @ W_O + b`.
Most have a control, which must fail: the same with one summand left out, heads exchanged, or positions moved. A proof
whose control does not fail proves nothing, and leaves a doubt. To rerun a norm, alone, needs none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.capture.held_values import memory_of
from graphpatch_notebook.capture.records import Frame, refs_in
from graphpatch_notebook.components.attention import Attention, Part, Parts
from graphpatch_notebook.components.chain import Layer, Stack, Step, Trails, region
from graphpatch_notebook.components.ends import End, Start
from graphpatch_notebook.components.flow import Place, UnknownValueError, Value, called, walk
from graphpatch_notebook.components.mlp import Mlp
from graphpatch_notebook.components.operations import CREATIONS, SHAPED_LIKE
from graphpatch_notebook.components.writes import Write, norm_of
from graphpatch_notebook.patches.kinds import AddPatch, CustomPatch, Patch
from graphpatch_notebook.values import TensorSpec, children

ProofRun: TypeAlias = "Callable[[Mapping[str, Patch[Any]]], Any]"
"""Runs the model with patches, on the inputs of the proofs, and returns its result."""

_HEAD_COUNTS = (
    *("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)


@dataclass(slots=True, eq=False)
class NamedWrite:
    """A write of a layer, with its parts and the prefix of their names."""

    kind: str
    write: Write
    parts: Parts | None = None
    mlp: Mlp | None = None


@dataclass(slots=True, eq=False)
class NamedLayer:
    """A layer, the prefix of the names of its components, and its writes."""

    name: str
    layer: Layer
    writes: list[NamedWrite] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Evidence:
    """The findings that proofs need.

    Attributes:
        trails: The flow of values, and the norms.
        stacks: The layers of each stack.
        starts, ends: Both ends of each stack, with the prefix of the names of their components.
        values: The value of each component, by name.
    """

    trails: Trails
    stacks: list[tuple[Stack, list[NamedLayer]]] = field(default_factory=list)
    starts: list[tuple[str, Start]] = field(default_factory=list)
    ends: list[tuple[str, End]] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)


@dataclass(slots=True)
class Verdicts:
    """What proofs found: how a component was proved, and what is in doubt."""

    proofs: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    doubts: dict[str, str] = field(default_factory=dict)

    def note(self, names: str | Iterable[str], proof: str, problem: str | None) -> None:
        """Notes a proof of components, or why it failed."""
        for name in (names,) if isinstance(names, str) else names:
            if problem is None:
                self.proofs[name].append(proof)
            else:
                self.doubts.setdefault(name, problem)


class _DoubtError(Exception):
    """A component may not be what its name says, for this reason."""


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise _DoubtError(problem)


def prove(evidence: Evidence, paths: Mapping[str, str], known: Collection[str], run: ProofRun) -> Verdicts:
    """Returns how components, with `paths` by name, were proved in runs of the model with patches on `known` paths."""
    return _Prover(evidence, paths, known, run).verdicts


class _Prover:
    def __init__(self, evidence: Evidence, paths: Mapping[str, str], known: Collection[str], run: ProofRun) -> None:
        self._trails = evidence.trails
        self._flow = evidence.trails.flow
        self._paths = paths
        self._components = evidence.values
        self._known = known
        self._run = run
        self._values: dict[str, Tensor] = {}
        self._weights = {memory_of(weight) for weight in self._flow.root.module.parameters()} - {None}
        self.verdicts = Verdicts()
        for _, layers in evidence.stacks:
            for layer in layers:
                self._prove_layer(layer)
        self._record_components([name for name in paths if "@" in name], ())
        for prefix, start in evidence.starts:
            self._prove_start(prefix, start)
        for prefix, end in evidence.ends:
            self._prove_end(prefix, end)
        for _, layers in evidence.stacks:
            self._prove_positions(layers)
            self._prove_chain(layers)

    # -- values --------------------------------------------------------------------------------------------------------

    def _recorded(self, paths: Iterable[str]) -> dict[str, Tensor]:
        """Runs the model, and returns copies of values."""
        kept: dict[str, Tensor] = {}
        if patches := {path: keeping(kept, path, self._weights) for path in sorted({*paths}) if path in self._known}:
            self._run(patches)
        return kept

    def _record(self, paths: Iterable[str], values: Iterable[Value] = ()) -> None:
        """Keeps copies of values of a run until the next time."""
        self._values = self._recorded([*paths, *map(self._flow.path, values)])

    def _record_components(self, names: Collection[str], values: Iterable[Value]) -> None:
        """Records values, and those of components; a path at which there is another value is in doubt."""
        own = {name: self._components[name] for name in names if name in self._components}
        self._record([self._paths[name] for name in names], [*values, *own.values()])
        for name, value in own.items():
            at_path, known = self._values.get(self._paths[name]), self._values.get(self._flow.path(value))
            if at_path is not None and known is not None and not is_close(at_path, known, 0.0):
                self.verdicts.note(name, "", f"{self._paths[name]} has another value than {self._flow.path(value)}")

    def _at(self, path: str) -> Tensor:
        value = self._values.get(path)
        if not isinstance(value, Tensor):
            raise UnknownValueError(f"the value at {path!r} cannot be recorded")
        return value

    def _value(self, value: Value) -> Tensor:
        return self._at(self._flow.path(value))

    def _called(self, frame: Frame, returned: Place) -> Tensor | None:
        """Returns one of the tensors that a module returns for its recorded inputs."""
        call = frame.call
        assert call is not None
        args, kwargs = self._flow.arguments((call.args, call.kwargs), self._copy)
        tensors = list(floats(called(frame, frame.module, args, kwargs)))
        places = self._flow.outputs(frame)
        return tensors[places.index(returned)] if len(tensors) == len(places) else next(iter(tensors), None)

    def _copy(self, value: Value) -> Tensor:
        return self._value(value).clone()

    def _check_rerun(self, value: Value) -> None:
        """Checks that an operation, or a norm, returns the same alone."""
        norm = self._trails.norms.get(value)
        result = self._flow.rerun(value.node, self._copy) if norm is None else self._called(norm.frame, norm.returned)
        _require(is_close(result, self._value(value)), f"the rerun of {self._flow.path(value)} differs")

    def _needed(self, values: Iterable[Value]) -> list[Value]:
        """Returns the values that reruns of the operations and norms that return some values need."""
        found = list[Value]()
        for value in values:
            made = value.node.whole
            if value.op in SHAPED_LIKE:
                refs = refs_in((made.args, made.kwargs))
                found += filter(None, (self._flow.resolve(ref.node, ref.dig) for ref in refs))
            norm = self._trails.norms.get(value)
            inputs = self._flow.inputs(norm.frame) if norm is not None else []
            found += [value, *self._flow.reads(value.node), *(place.value for place in inputs)]
        return found

    def _attempt(self, names: str | Iterable[str], proof: str, check: Callable[..., None], *args: Any) -> None:
        names = [names] if isinstance(names, str) else list(names)
        problem = None
        try:
            check(*args)
        except (_DoubtError, UnknownValueError) as doubt:
            problem = str(doubt)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
            problem = f"{proof}: {type(error).__name__}: {' '.join(str(error).split())[:100]}"
        self.verdicts.note([name for name in names if name in self._paths], proof, problem)

    # -- layers --------------------------------------------------------------------------------------------------------

    def _prove_layer(self, named: NamedLayer) -> None:
        layer, start = named.layer, named.name
        names = [name for name in self._paths if name.startswith(start)]
        self._record_components(names, self._values_in(named))
        stream = [f"{start}resid_pre", f"{start}resid_mid", f"{start}resid_post"]
        stream += [f"{start}{each.kind}_out" for each in named.writes]
        self._attempt(stream, "residual sum recomputed", self._check_sum, named)
        for each in named.writes:
            if (norm := norm_of(each.write, layer)) is not None:
                self._attempt(f"{start}{norm_name(each.kind)}", "norm rerun", self._check_rerun, norm)
            if each.parts is not None:
                self._prove_attention(f"{start}{each.kind}", each.write.attentions[-1], each.parts, each.write)
            if each.mlp is not None:
                self._prove_mlp(start, each.kind, each.mlp, each.write)

    def _values_in(self, named: NamedLayer) -> list[Value]:
        """Returns the values in a layer, and what they are computed from."""
        nodes = {step.result.node for step in named.layer.steps}.union(*(each.write.inside for each in named.writes))
        found = self._needed(value for value in map(Value, nodes) if value.op and isinstance(value.spec, TensorSpec))
        experts = [frame for each in named.writes if each.mlp is not None for frame in each.mlp.experts.values()]
        found += [place.value for frame in experts for place in self._flow.inputs(frame)]
        return [*named.layer.states, *found]

    def _check_sum(self, named: NamedLayer) -> None:
        """Recomputes the stream step by step; the control leaves out what is added."""
        layer = named.layer
        for place in (layer.start, layer.end):
            _require(is_close(self._at(place.path), self._value(place.value)), f"{place.path} is not the stream")
        for step in layer.steps:
            self._check_step(step)
        for each in named.writes:
            path = self._paths.get(f"{named.name}{each.kind}_out")
            is_added = path is None or is_close(self._at(path), self._value(each.write.value))
            _require(is_added, f"{path} is not what is added")

    def _check_step(self, step: Step) -> None:
        result, source = self._value(step.result), self._value(step.source)
        where = self._flow.path(step.result)
        if step.kind == "same" and is_close(result, source):
            return
        if step.kind != "add" or step.other is None:
            self._check_rerun(step.result)
            return
        other = self._value(step.other)
        alpha = step.result.node.kwargs.get("alpha", 1)
        is_sum = is_close(source + alpha * other, result) or is_close(alpha * source + other, result)
        _require(is_sum, f"{where} is not the sum of the stream and what is added")
        is_changed = not is_close(source, result) or not bool(other.abs().max() > 0)
        _require(is_changed, f"{where} is the same without what is added")

    # -- attention -----------------------------------------------------------------------------------------------------

    def _prove_attention(self, name: str, attention: Attention, parts: Parts, write: Write) -> None:
        found, operands = parts.found, parts.operands
        for letter in "qkv":
            part, rotated = found.get(letter), found.get(f"{letter}_rot")
            last = rotated or part
            if last is None or letter not in operands:
                continue
            used = "values" if letter == "v" else "queries" if letter == "q" else "keys"
            own = f"{name}.{letter}"
            last_name = own if rotated is None else f"{own}_rot"
            self._attempt(last_name, f"the {used} of the products", self._check_same, operands[letter], last)
            if rotated is not None and part is not None:
                self._attempt(own, f"{letter}_rot is a rotation of it", self._check_rotation, part, rotated)
        factors = [f"{name}.{each}_rot" if f"{each}_rot" in found else f"{name}.{each}" for each in "qk"]
        scores, pattern, z = (found.get(each) for each in ("scores", "pattern", "z"))
        if attention.dot is None and scores is not None and attention.z.node.whole.op == "flex_attention":
            # A rerun would take functions of scores, and masks of blocks: not recorded.
            self._attempt(factors, "scores from q @ k", self._check_changed_scores, operands, scores)
        else:
            proof = "scores from q @ k" if attention.dot is not None else "fused call rerun"
            self._attempt(factors, proof, self._check_dot, attention, operands)
        if pattern is not None and z is not None and "v" in operands:
            names = [f"{name}.{each}" for each in ("pattern", "z", "v")]
            self._attempt(names, "pattern @ v = z", self._check_varied_product, pattern, operands["v"], z)
            self._attempt(f"{name}.pattern", "rows sum to 1", self._check_rows, pattern)
        if scores is not None and pattern is not None:
            self._attempt(f"{name}.scores", "softmax(scores) = pattern", self._check_softmax, scores, pattern)
        if z is not None and parts.output is not None:
            self._attempt(f"{name}.z", "z @ W_O + b", self._check_output, z, parts.output, write)
        self._attempt([f"{name}.{each}" for each in found], "heads agree with config", self._check_heads, parts)

    def _arranged(self, part: Part, last: tuple[str, str], heads: int) -> Tensor:
        """Returns a value of attention with batch and heads as one dimension in front of two axes.

        Keys and values are repeated for each of the heads.
        """
        rows = tuple("query" if axis == "position" else axis for axis in part.axes)
        front = sorted((axis for axis in rows if axis not in last), key=lambda axis: axis in _HEADS)
        order = [rows.index(axis) for axis in (*dict.fromkeys(front), *last)]
        if len(order) != len(rows):
            order = [*(n for n, axis in enumerate(rows) if axis not in last), *(rows.index(axis) for axis in last)]
        arranged = self._value(part.value).permute(order)
        if _heads(part) and heads and arranged.shape[-3] != heads:
            arranged = arranged.repeat_interleave(heads // arranged.shape[-3], dim=-3)
        return arranged.flatten(0, -3) if arranged.ndim > 2 else arranged[None]

    def _check_same(self, operand: Part, part: Part) -> None:
        """Checks that a part is what the products read, up to layout, repeated heads, and a number."""
        rows = "query" if "query" in operand.axes else "key"
        heads = _heads(operand)
        used, own = (self._arranged(each, (rows, "channel"), heads) for each in (operand, part))
        if used.shape != own.shape and used.shape[-2] > own.shape[-2]:
            used = used[..., -own.shape[-2] :, :]  # behind those of a cache
        if is_multiple(own, used) or is_normed(own, used) or is_shifted(own, used, heads):
            return
        tiled = self._arranged(part, (rows, "channel"), 0)  # heads that are repeated all together, not one by one
        if heads and tiled.shape[0] < used.shape[0]:
            tiled = tiled.unflatten(0, (-1, _heads(part))).repeat(1, heads // _heads(part), 1, 1).flatten(0, 1)
        _require(is_multiple(tiled, used), "it is not what the products read")

    def _check_rotation(self, part: Part, rotated: Part) -> None:
        """Checks that a part has the same lengths before and after, head by head and position by position."""
        rows = "query" if "query" in rotated.axes else "key"
        before, after = (self._arranged(each, (rows, "channel"), 0) for each in (part, rotated))
        _require(before.shape == after.shape, "the rotation changes its shape")
        _require(is_multiple(before.norm(dim=-1), after.norm(dim=-1)), "the rotation changes its length")

    def _check_dot(self, attention: Attention, operands: Mapping[str, Part]) -> None:
        """Checks that queries and keys give the scores, before masks and biases; or that a fused call gives `z`."""
        product = attention.dot if attention.dot is not None else attention.z
        if any(read.op in CREATIONS for read in self._flow.reads(product.node)):
            return  # the model fills these in after the recorded value
        if attention.dot is None or attention.dot.op == "baddbmm" or not {"q", "k", "dot"} <= set(operands):
            self._check_rerun(product)
            return
        result = self._arranged(operands["dot"], ("query", "key"), _heads(operands["q"]))
        _require(is_multiple(self._dots(operands), result), "q @ k is not the scores")

    def _check_changed_scores(self, operands: Mapping[str, Part], scores: Part) -> None:
        """Checks that queries and keys give the scores where no mask is."""
        result = self._arranged(scores, ("query", "key"), _heads(operands["q"])).float()
        is_seen = torch.isfinite(result)
        is_product = is_multiple(self._dots(operands)[is_seen], result[is_seen])
        _require(is_product, "q @ k is not the scores: they are changed")

    def _dots(self, operands: Mapping[str, Part]) -> Tensor:
        heads = _heads(operands["q"])
        queries = self._arranged(operands["q"], ("query", "channel"), heads).float()
        return queries @ self._arranged(operands["k"], ("key", "channel"), heads).float().transpose(-1, -2)

    def _check_varied_product(self, pattern: Part, v: Part, z: Part) -> None:
        """Checks that `pattern @ v` is `z`; where `v` is the same at all positions, with noise added to it."""
        values, recorded = self._arranged(v, ("key", "channel"), 0), self._values
        path = self._flow.path(v.value)
        if path in self._known and is_close(values, values.roll(1, -2)):
            added, kept = noise(recorded[path]), dict[str, Tensor]()
            others = {self._flow.path(part.value) for part in (pattern, z)} & set(self._known)
            self._run({path: AddPatch(value=added), **{other: keeping(kept, other) for other in others}})
            self._values = {**recorded, **kept, path: recorded[path] + added}
        try:
            self._check_product(pattern, v, z)
        finally:
            self._values = recorded

    def _check_product(self, pattern: Part, v: Part, z: Part) -> None:
        heads = _heads(pattern)
        probabilities = self._arranged(pattern, ("query", "key"), heads).float()
        values = self._arranged(v, ("key", "channel"), heads).float()
        result = self._arranged(z, ("query", "channel"), heads)
        _require(probabilities.shape[-1] == values.shape[-2], "the pattern has other keys than there are values")
        product = probabilities @ values
        _require(is_close(product, result), "pattern @ v is not z")
        for dim, what in ((0, "heads"), (-2, "positions")):
            is_alone = values.shape[dim] == 1 or is_closer(product, probabilities @ values.roll(1, dim), result)
            _require(is_alone, f"pattern @ v is the same with other {what}")

    def _check_rows(self, pattern: Part) -> None:
        values = self._arranged(pattern, ("query", "key"), 0)
        sums, most = values.float().sum(-1), rounding(values, 1e-3)
        is_full = ((sums - 1).abs() < most) | (sums.abs() < 1e-6)
        has_sink = bool((sums <= 1 + most).all())  # a part of the attention goes to a learned sink
        are_shares = bool((values >= -1e-6).all()) and (bool(is_full.all()) or has_sink)
        _require(are_shares, "its rows do not sum to 1")

    def _check_softmax(self, scores: Part, pattern: Part) -> None:
        own = self._arranged(scores, ("query", "key"), 0)
        used = self._arranged(pattern, ("query", "key"), 0)
        _require(own.shape == used.shape, "the scores have another shape than the pattern")
        probabilities = torch.softmax(own.float(), -1).nan_to_num()
        sums = used.float().sum(-1, keepdim=True)
        has_sink = bool((sums < 1 - rounding(used, 1e-3)).any()) and bool((sums > 1e-6).all())
        if has_sink:
            probabilities = probabilities * sums
        _require(is_close(probabilities * (sums > 1e-6), used), "their softmax is not the pattern")

    def _check_output(self, z: Part, output: Value, write: Write) -> None:
        """Checks that the output projection maps the heads of `z`, one after the other, to what is written."""
        given = (self._flow.moving(output.node) or self._flow.reads(output.node))[0]
        self._check_rerun(output)
        if "batch" not in z.axes or not _heads(z):
            return  # one head, or heads and batch in one: nothing to lay out
        heads = self._arranged(z, ("query", "channel"), 0).unflatten(0, (-1, _heads(z)))
        flat = heads.transpose(-2, -3).reshape(-1)
        read = self._value(given)
        if is_close(read, flat):
            other = heads.roll(1, -3).transpose(-2, -3).reshape(-1)
            is_alone = _heads(z) == 1 or is_closer(flat, other, read.reshape(-1))
            _require(is_alone, "z @ W_O is the same with other heads")
        elif read.numel() == flat.numel() or not any(region(self._trails, given, write.inside).ops.values()):
            self._check_gate(z, given)

    def _check_gate(self, z: Part, given: Value) -> None:
        """Checks that `z` is gated, scaled or normed before the output projection, or in another order there."""
        order = self._flow.order

        def is_after(value: Value) -> bool:
            return bool(value.op) and order[value.node] > order[z.value.node]

        between = walk([given], lambda value: self._flow.reads(value.node) if is_after(value) else [])
        ops = {value.op for value in between if is_after(value)}
        own, read = self._value(z.value), self._value(given)
        has_same = own.numel() == read.numel() and is_close(own.flatten().sort().values, read.flatten().sort().values)
        _require(has_same or bool(ops & _GATES), "the output projection reads something else than z")

    def _check_heads(self, parts: Parts) -> None:
        counts = set(_config_numbers(self._flow.root.module, _HEAD_COUNTS))
        part = parts.found.get("z") or parts.found.get("pattern")
        heads = _heads(part) if part is not None else 0
        are_known = not counts or not heads or any(count % heads == 0 for count in counts)  # some layers have fewer
        _require(are_known, f"it has {heads} heads, and the config says {', '.join(map(str, sorted(counts)))}")

    # -- MLPs ----------------------------------------------------------------------------------------------------------

    def _prove_mlp(self, start: str, kind: str, mlp: Mlp, write: Write) -> None:
        if mlp.down is not None and mlp.post is not None:
            self._attempt(f"{start}{kind}.post", "post @ W_out + b", self._check_down, mlp.post, mlp.down, write)
        for name, value in ((f"{kind}.pre", mlp.pre), ("router", mlp.router)):
            if value is not None:
                self._attempt(f"{start}{name}", "linear map rerun", self._check_linear, value, write)
        for number, frame in mlp.experts.items():
            self._attempt(f"{start}experts[{number}].out", "expert rerun", self._check_expert, frame)

    def _check_expert(self, frame: Frame) -> None:
        returned = self._flow.outputs(frame)[0]
        is_same = is_close(self._called(frame, returned), self._value(returned.value))
        _require(is_same, "the expert's rerun differs")

    def _check_down(self, post: Value, down: Value, write: Write) -> None:
        self._check_rerun(down)
        given = next(iter(self._flow.moving(down.node)))
        _require(is_close(self._value(given), self._value(post)), "it is not what the last linear map reads")
        steps = self._trails.find(write.value, down, adds=False)
        _require(steps is not None, "the last linear map does not lead to what is written")
        for step in steps or ():
            self._check_step(step)

    def _check_linear(self, value: Value, write: Write) -> None:
        """Recomputes the way from a linear map to a value, the map included."""
        for waist in region(self._trails, value, write.inside).waists:
            self._check_rerun(waist)

    # -- both ends -----------------------------------------------------------------------------------------------------

    def _prove_start(self, prefix: str, start: Start) -> None:
        for word, values in (("embed", start.tokens), ("pos_embed", start.positions)):
            name = f"{prefix}@{word}"
            if len(values) == 1 and name in self._paths:
                self._record([self._paths[name]], self._needed(values))
                self._attempt(name, "lookup rerun", self._check_lookup, self._paths[name], values[0])

    def _check_lookup(self, path: str, value: Value) -> None:
        self._at(path)
        if value.op:  # else it is a parameter
            self._check_rerun(value)

    def _prove_end(self, prefix: str, end: End) -> None:
        if (norm := end.norm) is not None:
            self._record([], self._needed([norm]))
            self._attempt(f"{prefix}@final_norm", "norm rerun", self._check_rerun, norm)
        if end.logits is not None and end.unembedding is not None:
            self._record([end.logits.path], self._needed([end.unembedding]))
            self._attempt("@logits", "unembedding rerun", self._check_lookup, end.logits.path, end.unembedding)

    # -- runs with noise: what moves values between positions, and whether layers follow each other ------------------

    def _prove_positions(self, layers: list[NamedLayer]) -> None:
        """Whether attention and mixers move values between positions, and MLPs do not: by noise at one position."""
        seen: dict[tuple[type, str], str | None] = {}
        for named in layers:
            for each in named.writes:
                key = type(named.layer.frame.module), each.kind
                if key not in seen:
                    try:
                        seen[key] = self._position_problem(named.layer, each.write)
                    except UnknownValueError:  # the model takes another way with noise, as experts do
                        seen[key] = None
                if seen[key] is not None:
                    names = (f"{named.name}{each.kind}{part}" for part in ("_out", ".pre", ".post"))
                    self.verdicts.note(names, "", seen[key])

    def _position_problem(self, layer: Layer, write: Write) -> str | None:
        state = write.state
        path = self._flow.path(state)
        given = [place.path for place in self._flow.inputs(layer.frame) if place.value == state]
        if len(given) == 1:  # else noise at the input would not change the others
            path = given[0]
        own = self._flow.boundary_path(write.value, layer.frame)  # with noise, other experts may write the result
        axes = layer.axes(state)
        if (
            sorted(axes) != ["batch", "channel", "position"]
            or axes[-1] != "channel"
            or state.shape[dim := axes.index("position")] < 3
            or write.value.size != state.size
            or path not in self._known
        ):
            return None
        values = self._recorded([path, own])
        if len(values) < len({path, own}):
            return None
        stream = values[path]

        def is_local(position: int) -> bool:
            return self._is_local(values, path, own, (*[slice(None)] * dim, position))

        if write.kind == "mlp":
            is_allowed = write.has_convolution or is_local(1)
            return None if is_allowed else "it moves values between positions, as a mixer does"
        # Noise at one position may not reach the others: these may be masked, or may not sample it.
        positions = [1, 0, *range(2, min(stream.shape[dim], _MOST_POSITIONS))]
        if write.kind in ("attn", "mixer") and all(map(is_local, positions)):
            return "it does not move values between positions"
        return None

    def _is_local(self, values: dict[str, Tensor], path: str, own: str, at: tuple[slice | int, ...]) -> bool:
        """Whether noise at one position of the stream changes what is written at that position only."""
        stream, before = values[path], values[own]
        kept: dict[str, Tensor] = {}
        self._run({path: AddPatch(value=noise(stream[at]), slice=at), own: keeping(kept, own)})
        if own not in kept:
            raise UnknownValueError(f"the value at {own!r} cannot be recorded")
        change = (kept[own] - before).abs().reshape(stream.shape)
        change[at] = 0
        return bool(change.max() <= 1e-5 * (1 + before.abs().max()))

    def _prove_chain(self, layers: list[NamedLayer]) -> None:
        """Whether a patch at the end of a layer has the same effect as one at the start of the next layer."""
        pairs = [pair for pair in pairwise(layers) if self._is_chained(*pair)]
        for one, other in dict.fromkeys([*pairs[:1], *pairs[-1:]]):
            values = self._recorded([one.layer.end.path, other.layer.start.path])
            if one.layer.end.path in values:
                self._prove_link(one, other, values)

    def _is_chained(self, one: NamedLayer, other: NamedLayer) -> bool:
        """Whether a layer, and nothing else, reads the output of the layer before it."""
        flow, end, start = self._flow, one.layer.end.value, other.layer.start.value
        steps = self._trails.find(start, end, adds=False)
        if steps is None or any(step.kind != "same" for step in steps):
            return False
        states = {end, *(step.result for step in steps)}
        frame = other.layer.frame
        if len([place for place in flow.inputs(frame) if place.value in states]) > 1:
            return False
        after = flow.order[one.layer.frame.output_node]
        inside = range(flow.start(frame), flow.order[frame.output_node] + 1)
        readers = [user for state in states for user in flow.users.get(state.node, ()) if flow.order[user] > after]
        return all(flow.order[user] in inside or Value(user) in states for user in readers)

    def _prove_link(self, one: NamedLayer, other: NamedLayer, values: dict[str, Tensor]) -> None:
        end, start = one.layer.end, other.layer.start
        added = noise(values[end.path])
        shape = values[start.path].shape if start.path in values else start.value.shape
        at_end = first_float(self._run({end.path: AddPatch(value=added)}))
        at_start = first_float(self._run({start.path: AddPatch(value=added.reshape(shape))}))
        name, proof = f"{one.name}resid_post", "patching it = patching the next layer's input"
        if not is_close(at_end, at_start):
            self.verdicts.note(name, proof, f"patching {end.path} is not patching {start.path}")
        elif not is_close(at_end, first_float(self._run({})), 0.0):  # else the result does not depend on either
            self.verdicts.note(name, proof, None)


_MOST_POSITIONS = 8
_GATES = frozenset("mul imul sigmoid silu layer_norm rms_norm group_norm rsqrt".split())


def norm_name(kind: str) -> str:
    """Returns the name of the norm of a write: `ln1` of attention or a mixer, `ln2` of an MLP."""
    for start, name in (("cross_attn", "ln_cross"), ("mlp", "ln2")):
        if kind.startswith(start):
            return name + kind.removeprefix(start)
    return "ln1" + kind.lstrip("abcdefghijklmnopqrstuvwxyz")


_HEADS = ("head", "query_head")


def _heads(part: Part) -> int:
    return next((size for axis, size in zip(part.axes, part.value.shape, strict=True) if axis in _HEADS), 0)


def _config_numbers(module: Any, names: tuple[str, ...]) -> Iterator[int]:
    """Yields what the config of a model, and the configs in it, say of some sizes."""
    config = getattr(module, "config", None)
    for each in (config, *vars(config).values()) if hasattr(config, "__dict__") else ():
        for name in names:
            found = vars(each).get(name) if hasattr(each, "__dict__") else None
            values = found if isinstance(found, (list, tuple)) else [found]
            yield from (value for value in values if type(value) is int)


def keeping(kept: dict[str, Tensor], path: str, weights: Container[Any] = ()) -> Patch[Any]:
    """Returns a patch that keeps a copy of a value, but not of what has the memory of one of the weights."""

    def keep(value: Any) -> Any:
        if isinstance(value, Tensor) and path not in kept:
            # The model may write into other values later.
            kept[path] = value.detach() if memory_of(value) in weights else value.detach().clone()
        return value

    return CustomPatch(custom_op=keep, requires_clone=False)


def noise(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(like.shape, generator=generator).to(like)
    scale = float(like.float().std().nan_to_num(1.0))
    return noise * (scale or 1.0)  # constants, such as the zeros that a decoder of queries begins with, get noise, too


def floats(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of floating-point numbers in a value."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    for _, child in children(value) or () if not isinstance(value, Tensor) else ():
        yield from floats(child)


def first_float(value: Any) -> Tensor | None:
    return next(floats(value), None)


# -- equal up to rounding, and to what proofs do not care for: a factor, a norm, a bias --------------------------------

_TOLERANCE = 1e-4


def is_close(one: Any, other: Any, tolerance: float = _TOLERANCE) -> bool:
    """Whether two tensors have the same elements in the same order, in any shape, up to rounding."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.numel() != other.numel():
        return False
    if tolerance:
        tolerance = max(rounding(one, tolerance), rounding(other, tolerance))
    one, other = one.detach().double().reshape(-1), other.detach().double().reshape(-1)
    finite = torch.isfinite(one)
    if not torch.equal(finite, torch.isfinite(other)):
        return False
    if not finite.any():
        return True
    one, other = one[finite], other[finite]
    return bool((one - other).abs().max() <= tolerance * torch.maximum(one.abs().max(), other.abs().max()))


def rounding(value: Tensor, least: float) -> float:
    """Returns the relative rounding error of a value in its dtype: at least `least`."""
    return max(least, 4 * torch.finfo(value.dtype).eps) if value.is_floating_point() else least


def is_closer(one: Tensor, control: Tensor, result: Tensor) -> bool:
    """Whether a value is much closer to a result than the control is."""
    own, other = ((value.double() - result).abs().max() for value in (one, control))
    return bool(other > 10 * own)


def is_multiple(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal up to a positive factor."""
    if one.shape != other.shape:
        return False
    scale = other.double().norm() / one.double().norm().clamp_min(1e-30)
    return is_close(one.double() * scale, other, rounding(one, 1e-3))


def is_shifted(one: Tensor, other: Tensor, heads: int) -> bool:
    """Whether a tensor equals another one up to a positive factor, plus a number for each head and channel."""
    if one.shape != other.shape or one.shape[-2] < 3:
        return False
    one, other = (value.unflatten(0, (-1, heads or 1)) for value in (one, other))
    return is_multiple(*(value - value.mean((0, 2), keepdim=True) for value in (one, other)))


def is_normed(one: Tensor, other: Tensor) -> bool:
    """Whether a tensor is another one with its vectors scaled to one length, times a number for each channel."""
    if one.shape != other.shape:
        return False
    normed = torch.nn.functional.normalize(one.double(), dim=-1)
    weights = (normed * other).flatten(0, -2).sum(0) / normed.square().flatten(0, -2).sum(0).clamp_min(1e-30)
    return is_close(normed * weights, other, rounding(one, 1e-3))
