"""The features in place of the MLPs of a model, latents or neurons, and runs in which all but the stream is frozen.

A feature is linear in what its MLP reads, as far as it is active, and adds its activation times a vector to the stream.

With attention patterns and the denominators of norms held at what they were, and what MLPs write taken as given, each
state of the stream is linear in the embeddings and in what MLPs wrote. The derivatives of such a run are these linear
maps, which hold for values of any size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from graphpatch_notebook.capture.records import CallNode, spliced_calls
from graphpatch_notebook.components import projection
from graphpatch_notebook.components.names import parse_name
from graphpatch_notebook.components.stacks import Layer
from graphpatch_notebook.components.weights import NoWeightError, index_of
from graphpatch_notebook.errors import ExperimentError, GraphError, UnknownPathError
from graphpatch_notebook.experiments.attribution.rules import FrozenDenominators
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.methods.lens import layer_count
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import CustomPatch
from graphpatch_notebook.patching import CrossLayerDecoder, CrossLayerEncoder, SaeSplice
from graphpatch_notebook.patching.model_state import preserved
from graphpatch_notebook.torch_compat import ProductsWithoutZeros

_AT_ONCE = 2**24
"""How many numbers one-hot activations have at most."""


@dataclass
class Features(ABC):
    """Features of one layer. Those that are active in a run are numbered in order of their positions.

    Attributes:
        name: What the names of the features begin with: `layers[2].mlp_out.sae.latents`.
        layer: The number of the layer.
        read: The path of the value that features are linear in.
        item: How the name of one of them goes on.
        positions, numbers, values: Of each active feature, where it is, which one it is, and its activation.
        sums: What constants and all that it is linear in sum to.
        gains: By what share of itself the activation grows, if one is added to that.
        written: By path, what each active feature adds there, (features, channels).
        constants: By path, what is written there where no feature is active, (1, channels).
    """

    name: str
    layer: int
    read: str
    item: ClassVar[str]
    positions: Tensor = field(init=False)
    numbers: Tensor = field(init=False)
    values: Tensor = field(init=False)
    sums: Tensor = field(init=False)
    gains: Tensor = field(init=False)
    written: dict[str, Tensor] = field(init=False, default_factory=dict)
    constants: dict[str, Tensor] = field(init=False, default_factory=dict)

    @abstractmethod
    def activate(self, run: FrozenRun) -> None:
        """Finds what is active in a run, and what it writes."""

    def _number(self, active: Tensor) -> None:
        self.positions, self.numbers = active.nonzero(as_tuple=True)
        self.sums = self.values = active[self.positions, self.numbers]

    @abstractmethod
    def readers(self, run: FrozenRun, which: Tensor) -> Tensor:
        """Returns the coefficients of some active features in what they read, (features, channels)."""

    @abstractmethod
    def contributions(self, derivatives: Mapping[str, Tensor]) -> Tensor:
        """Returns what each active feature adds to functions with some derivatives, (functions, features)."""


@dataclass
class Latents(Features):
    """Latents of a transcoder.

    Attributes:
        encode: Returns activations, (rows, features), for rows of what is read.
        decode: By the path of each value that is written into, what activations are decoded to, (rows, channels).
    """

    encode: Callable[[Tensor], Tensor]
    decode: Mapping[str, Callable[[Tensor], Tensor]]
    item = "[{}]"

    def activate(self, run: FrozenRun) -> None:
        with torch.no_grad():
            active = self.encode(rows_of(run.values[self.read]))
            self._number(active)
            self.gains, self.counts = 1 / self.values, self.positions.bincount(minlength=len(active)).tolist()
            every, own = self.numbers.unique(return_inverse=True)
            for path, decode in self.decode.items():
                self.constants[path] = none = decode(active.new_zeros(1, active.shape[1]))
                parts = every.split(max(1, _AT_ONCE // active.shape[1]))
                alone = (functional.one_hot(some, active.shape[1]).to(active.dtype) for some in parts)
                vectors = torch.cat([decode(each) - none for each in alone])
                self.written[path] = self.values[:, None] * vectors[own]
                total = none.expand(len(active), -1).index_add(0, self.positions, self.written[path])
                if not torch.allclose(total, decode(active), rtol=1e-3, atol=1e-4 * float(total.abs().max())):
                    raise ExperimentError(f"{self.name} are not decoded by a linear map")

    def readers(self, run: FrozenRun, which: Tensor) -> Tensor:
        rows = rows_of(run.values[self.read])[self.positions[which]].clone().requires_grad_()
        with torch.inference_mode(False), torch.enable_grad():
            own = self.encode(rows)[torch.arange(len(which)), self.numbers[which]]
            return torch.autograd.grad(own.sum(), rows)[0]

    def contributions(self, derivatives: Mapping[str, Tensor]) -> Tensor:
        found = self.values.new_zeros(len(next(iter(derivatives.values()))), len(self.values))
        for path in derivatives.keys() & self.written.keys():
            parts = zip(derivatives[path].to(found.dtype).unbind(1), self.written[path].split(self.counts), strict=True)
            found += torch.cat([rows @ vectors.mT for rows, vectors in parts], 1)
        return found


class Neurons(Features):
    """Neurons of an MLP: they write into what the last linear map reads."""

    item = "[..., {}]"

    def activate(self, run: FrozenRun) -> None:
        active = rows_of(run.leaves[self.name])
        self._number(active)
        slopes = torch.ones_like(active)
        if self.read != self.name:
            post, pre = (run.values[name] for name in (self.name, self.read))
            slopes = rows_of(torch.autograd.grad(post.sum(), pre, retain_graph=True)[0])
            self.sums = rows_of(pre)[self.positions, self.numbers]
        self.gains = slopes[self.positions, self.numbers] / self.values

    def readers(self, run: FrozenRun, which: Tensor) -> Tensor:
        return functional.one_hot(self.numbers[which], run.values[self.read].shape[-1]).to(self.values.dtype)

    def contributions(self, derivatives: Mapping[str, Tensor]) -> Tensor:
        if self.name not in derivatives:
            return self.values.new_zeros(len(next(iter(derivatives.values()))), len(self.values))
        return derivatives[self.name][:, self.positions, self.numbers] * self.values


@dataclass
class Linearized:
    """What is frozen in a model, and which values are taken as given.

    Attributes:
        features: The features, by layer.
        start: The path of the first state of the stream.
        constants: The paths of attention patterns, and of gates of neurons.
        errors: The paths of what is not explained, in place of an MLP or mixer, or the rest beside features: the layer
            and the name of that.
        kept: By path, what is not taken as given of a value there, since it is linear in others.
        slim: By the path of values that are made with queries and keys, what they get the derivative of: a zero that
            depends on what they are made of.
        read: The paths of that.
        skipped: Why a part of the model is not explained, by its name.
    """

    start: str
    features: list[Features] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    kept: dict[str, Callable[[Mapping[str, Tensor]], Tensor]] = field(default_factory=dict)
    slim: dict[str, Callable[[Mapping[str, Tensor]], Tensor]] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def leaves(self) -> list[str]:
        """The paths of all values that are taken as given."""
        return list(
            dict.fromkeys([self.start, *self.errors, *(f.name for f in self.features if isinstance(f, Neurons))])
        )


def linearized(pg: PatchableGraph, stack: str) -> Linearized:
    """Returns linear parts in place of those of a model that are not linear in its stream.

    Raises:
        ExperimentError: The model has no such stream, or an SAE that is spliced in is not a transcoder.
    """
    prefix, count = f"{stack}." if stack else "", layer_count(pg, stack)
    layers = next(each for each in pg.components.evidence.stacks if each.name == stack).layers
    if lost := [number for number in range(count) if number not in layers]:
        raise ExperimentError(f"{prefix}layers[{lost[0]}]: its output is not its input plus something")
    found = Linearized(f"{prefix}layers[0].resid_pre")
    calls = spliced_calls(pg.nodes.root)
    found.features += _transcoders(pg, calls)
    for call in calls:
        host = _component_at(pg, call.target)
        if not isinstance(call.frame.module, CrossLayerEncoder):
            found.errors[host] = (_layer_of(host), f"{host}.{call.op}.error")
        splice: Any = call.frame.module
        skip = getattr(splice.sae, "W_skip", None)
        if skip is not None:
            found.kept[host] = _skipping(_component_at(pg, splice.sources[0]), skip)
    for number, layer in layers.items():
        _add_layer(pg, found, number, layer, has_transcoders=bool(calls))
    found.features.sort(key=lambda each: each.layer)
    return found


def _skipping(read: str, skip: Tensor) -> Callable[[Mapping[str, Tensor]], Tensor]:
    return lambda values: values[read].to(skip.dtype) @ skip.mT


def _component_at(pg: PatchableGraph, path: str) -> str:
    """Returns the name of the component at a path.

    Raises:
        ExperimentError: There is none.
    """
    names = (each.name for each in pg.components.values() if each.path == path and not each.index)
    name = next(names, None)
    if name is None:
        raise ExperimentError(f"{path!r} is not a component of the model, so its layer is unknown: see pg.components")
    return name


def _layer_of(name: str) -> int:
    number: Any = parse_name(name).layers
    return int(number)


def _transcoders(pg: PatchableGraph, calls: list[CallNode]) -> Iterator[Features]:
    """Yields the transcoders of a graph.

    Raises:
        ExperimentError: Something that is spliced in is not a transcoder, or its error is not added.
    """
    encoders: list[tuple[str, Any]] = []
    writers: list[tuple[str, Any]] = []
    for call in calls:
        splice, host = call.frame.module, _component_at(pg, call.target)
        if not splice.has_error:
            raise ExperimentError(f"the splice at {host!r} leaves out its error: splice it with error=True")
        if isinstance(splice, CrossLayerEncoder):
            encoders.append((host, call))
        elif isinstance(splice, CrossLayerDecoder):
            writers.append((host, splice))
        elif not isinstance(splice, SaeSplice) or len(splice.sources) != 1:
            raise ExperimentError(
                f"the SAE at {host!r} is not a transcoder: it encodes what it replaces, which is not linear in the "
                "stream"
            )
        else:
            read = _component_at(pg, splice.sources[0])
            yield Latents(
                f"{host}.{call.op}.latents", _layer_of(host), read, _encoding(splice), {host: splice.sae.decode}
            )
    for host, call in encoders:
        splice = call.frame.module
        decode = {
            path: _decoding(splice, writer.number)
            for path, writer in writers
            if writer.sae is splice.sae and writer.number >= splice.number
        }
        yield Latents(f"{host}.{call.op}.latents", _layer_of(host), host, _encoding(splice), decode)


def _encoding(splice: Any) -> Callable[[Tensor], Tensor]:
    def encode(rows: Tensor) -> Tensor:
        rows = splice.as_read(rows)
        if isinstance(splice, SaeSplice):
            return splice.sae.encode(rows)  # type: ignore[no-any-return]
        places = rows.new_zeros(splice.count, *rows.shape)
        places = places.index_copy(0, torch.tensor([splice.number]), rows[None])
        return splice.sae.encode(places)[splice.number]  # type: ignore[no-any-return]

    return encode


def _decoding(splice: Any, place: int) -> Callable[[Tensor], Tensor]:
    """Returns what latents of one place of a cross-layer transcoder write at another one."""

    def decode(latents: Tensor) -> Tensor:
        places = latents.new_zeros(splice.count, *latents.shape)
        places[splice.number] = latents
        return splice.sae.decode(places)[place]  # type: ignore[no-any-return]

    return decode


def _add_layer(pg: PatchableGraph, found: Linearized, number: int, layer: Layer, *, has_transcoders: bool) -> None:
    """Adds what is frozen of one layer, and what replaces its MLP."""
    for kind in layer.writes:
        start = f"{layer.name}{kind}"
        patterns = [name for name in pg.components if name.startswith(f"{start}.") and name.endswith(".pattern")]
        if patterns:
            found.constants += patterns
            with suppress(NoWeightError, UnknownPathError):
                _slim(pg, found, f"{start}.v")
            continue
        out, why = f"{start}_out", "its MLP has no transcoder"
        if out in found.errors:
            continue
        if not kind.startswith("mlp"):
            why = pg.components.why_missing(f"{start}.pattern") or "it has no attention pattern to freeze"
        elif not has_transcoders:
            if f"{start}.pre" in pg.components and f"{start}.post" in pg.components:
                found.features.append(_neurons(pg, found, number, start))
                continue
            why = pg.components.why_missing(f"{start}.pre") or "its neurons are not known"
        found.errors[out] = (number, out)
        found.skipped[out] = why


def _slim(pg: PatchableGraph, found: Linearized, name: str) -> None:
    """Adds the map that makes values alone, if it is a part of one that makes queries and keys, too.

    These have no derivative, where patterns are frozen: a third of the work is left.
    """
    made, flow, component = projection(pg.nodes.root, name), pg.components.evidence.trails.flow, pg.components[name]
    if made.channels == made.heads.numel() or component.axes != ("batch", "position", "head", "channel"):
        return
    given, weight = flow.path(made.map.given), made.weight()[:, index_of(made.heads.reshape(-1))].detach()

    def zero(values: Mapping[str, Tensor]) -> Tensor:
        read = values[given]
        return ((read - read.detach()) @ weight).reshape(1, -1, *made.heads.shape)

    found.slim[component.name] = zero
    found.read.append(given)


def _neurons(pg: PatchableGraph, found: Linearized, number: int, start: str) -> Features:
    """Returns the neurons of an MLP: linear in what its nonlinearity reads, or in what a frozen gate multiplies."""
    pre, post = (pg.components[f"{start}.{part}"].name for part in ("pre", "post"))
    weights = pg.weights[parse_name(start).stack]
    try:
        weights.W_gate[number]
    except GraphError:
        return Neurons(post, number, pre)
    found.constants.append(pre)
    return Neurons(post, number, post)


class FrozenRun:
    """A run of the model with gradients, in which patterns and denominators are constants, and some values are leaves.

    Attributes:
        values: What was computed at paths, with gradients to the leaves before.
        leaves: What took the place of some of these.
    """

    def __init__(self, pg: PatchableGraph, inputs: Inputs, plan: Linearized, read: Collection[str]) -> None:
        self.values: dict[str, Tensor] = {}
        self.leaves: dict[str, Tensor] = {}
        self._pg, self._inputs, self._plan, self._denominators = pg, inputs, plan, FrozenDenominators()
        self._constants: dict[str, Tensor] = {}
        every = (*plan.leaves, *plan.constants, *plan.slim, *plan.read, *(each.read for each in plan.features), *read)
        self._paths, leaves = dict.fromkeys(every), {*plan.leaves}

        def note(path: str, value: Tensor) -> Tensor:
            self.values[path] = value = value.clone()  # the model may write into its own
            if path in plan.constants:
                self._constants[path] = value.detach()
                return value.detach().clone()
            if path in plan.slim:
                return value.detach() + plan.slim[path](self.values)
            if path not in leaves:
                return value.clone()
            rest = self._rest(path, self.values)
            self.leaves[path] = (value - rest).detach().requires_grad_()
            result: Tensor = (self.leaves[path] + rest).to(value.dtype)
            return result

        with torch.inference_mode(False), torch.enable_grad(), self._denominators:
            self._run(note)

    def _run(self, note: Callable[[str, Tensor], Tensor]) -> None:
        patches: dict[Any, CustomPatch] = {
            path: CustomPatch(custom_op=partial(note, path), requires_clone=False) for path in self._paths
        }
        with preserved(captured(self._pg).module), self._pg.patch(patches, strict=True):
            self._inputs.run(self._pg)

    def _rest(self, path: str, values: Mapping[str, Tensor]) -> Any:
        """Returns the part of a value that stays attached to what it is made of."""
        return self._plan.kept[path](values) if path in self._plan.kept else 0.0

    def with_leaves(self, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the values of the same run with other leaves, and the same patterns and denominators."""
        found: dict[str, Tensor] = {}

        def note(path: str, value: Tensor) -> Tensor:
            found[path] = value.clone()
            if path in self._constants:
                return self._constants[path].clone()
            return (
                (leaves[path].expand_as(value) + self._rest(path, found)).to(value.dtype) if path in leaves else value
            )

        with torch.no_grad(), self._denominators.again():
            self._run(note)
        return found

    def derivatives(self, path: str, directions: Tensor, at: Tensor, by: Sequence[Tensor]) -> list[Tensor | None]:
        """Returns the derivatives of linear functions of a value, each (functions, positions, channels).

        Args:
            path: The path of the value, whose rows are the positions.
            directions: The coefficients of each function, (functions, channels).
            at: The position of each function.
            by: By what: values of the run that come before; `None` is returned for others.
        """
        value = self.values[path]
        given = directions.new_zeros(len(at), value.numel() // value.shape[-1], value.shape[-1])
        given[torch.arange(len(at)), at] = directions
        with ProductsWithoutZeros():  # a function of one position has no derivative at those that it does not read
            found: Any = torch.autograd.grad(
                value, by, given.view(-1, *value.shape).to(value.dtype),
                retain_graph=True, allow_unused=True, is_grads_batched=True,
            )  # fmt: skip
        return [None if each is None else each.reshape(len(at), -1, each.shape[-1]) for each in found]


def rows_of(value: Tensor) -> Tensor:
    """Returns a value of one prompt as (positions, channels)."""
    return value.detach().reshape(-1, value.shape[-1])
