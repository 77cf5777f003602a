"""Checks that the stream is a sum, from values of a run: of what each layer reads, and what is added to it there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.capture.held_values import memory_of
from graphpatch_notebook.components.attention import Attention
from graphpatch_notebook.components.chain import Layer, Stack, Step, Trails
from graphpatch_notebook.components.ends import End, Start
from graphpatch_notebook.components.flow import UnknownValueError, Value
from graphpatch_notebook.components.mlp import Mlp
from graphpatch_notebook.components.writes import Write
from graphpatch_notebook.patches.kinds import CustomPatch, Patch

ProofRun: TypeAlias = "Callable[[Mapping[str, Patch[Any]]], Any]"
"""Runs the model with patches, on the inputs of the checks, and returns its result."""

_TOLERANCE = 1e-4


@dataclass(slots=True, eq=False)
class NamedWrite:
    """A write of a layer, with its parts and the prefix of their names."""

    kind: str
    write: Write
    parts: Attention | None = None
    mlp: Mlp | None = None


@dataclass(slots=True, eq=False)
class NamedLayer:
    """A layer, the prefix of the names of its components, and its writes."""

    name: str
    layer: Layer
    writes: list[NamedWrite] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Evidence:
    """What was found in a capture.

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
    """How components were proved, and what is in doubt."""

    proofs: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    doubts: dict[str, str] = field(default_factory=dict)


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
        self._paths, self._known, self._run = paths, known, run
        self._values: dict[str, Tensor] = {}
        self._weights = {memory_of(weight) for weight in self._flow.root.module.parameters()} - {None}
        self.verdicts = Verdicts()
        layers = [named for _, stack in evidence.stacks for named in stack]
        states = [state for named in layers for state in named.layer.states]
        others = [step.other for named in layers for step in named.layer.steps if step.other is not None]
        self._record([*paths.values(), *map(self._flow.path, [*states, *others, *evidence.values.values()])])
        for name, value in evidence.values.items():
            self._check_path(name, value)
        for named in layers:
            self._attempt(named)

    def _record(self, paths: Iterable[str]) -> None:
        """Keeps copies of values of a run."""
        kept = self._values
        self._run({path: keeping(kept, path, self._weights) for path in sorted({*paths}) if path in self._known})

    def _value(self, value: Value) -> Tensor:
        return self._at(self._flow.path(value))

    def _at(self, path: str) -> Tensor:
        if path not in self._values:
            raise UnknownValueError(f"the value at {path!r} cannot be recorded")
        return self._values[path]

    def _check_path(self, name: str, value: Value) -> None:
        """Checks that there is no other value at the path of a component."""
        path, own = self._paths[name], self._flow.path(value)
        if path in self._values and own in self._values and not is_close(self._at(path), self._at(own), 0.0):
            self.verdicts.doubts[name] = f"{path} has another value than {own}"
        else:
            self.verdicts.proofs[name].append("found by running")

    def _attempt(self, named: NamedLayer) -> None:
        """Recomputes the stream of a layer step by step; the control leaves out what is added."""
        ends = [f"{named.name}{each}" for each in ("resid_pre", "resid_mid", "resid_post")]
        names = [
            name for name in (*ends, *(f"{named.name}{each.kind}_out" for each in named.writes)) if name in self._paths
        ]
        try:
            for step in named.layer.steps:
                if step.kind == "add" and step.other is not None:
                    self._check_sum(step, step.other)
        except (_DoubtError, UnknownValueError) as doubt:
            self.verdicts.doubts |= dict.fromkeys(names, str(doubt))
            return
        for name in names:
            self.verdicts.proofs[name].append("residual sum recomputed")

    def _check_sum(self, step: Step, added: Value) -> None:
        result, source, other = map(self._value, (step.result, step.source, added))
        where, alpha = self._flow.path(step.result), step.result.node.kwargs.get("alpha", 1)
        is_sum = is_close(source + alpha * other, result) or is_close(alpha * source + other, result)
        _require(is_sum, f"{where} is not the sum of the stream and what is added")
        is_changed = not is_close(source, result) or not bool(other.abs().max() > 0)
        _require(is_changed, f"{where} is the same without what is added")


def norm_name(kind: str) -> str:
    """Returns the name of the norm of a write: `ln1` of attention or a mixer, `ln2` of an MLP."""
    for start, name in (("cross_attn", "ln_cross"), ("mlp", "ln2")):
        if kind.startswith(start):
            return name + kind.removeprefix(start)
    return "ln1" + kind.lstrip("abcdefghijklmnopqrstuvwxyz")


def keeping(kept: dict[str, Tensor], path: str, weights: Container[Any] = ()) -> Patch[Any]:
    """Returns a patch that keeps a copy of a value, but not of what has the memory of one of the weights."""

    def keep(value: Any) -> Any:
        if isinstance(value, Tensor) and path not in kept:
            # The model may write into other values later.
            kept[path] = value.detach() if memory_of(value) in weights else value.detach().clone()
        return value

    return CustomPatch(custom_op=keep, requires_clone=False)


def is_close(one: Tensor, other: Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Whether two tensors have the same elements in the same order, in any shape, up to rounding."""
    if one.numel() != other.numel():
        return False
    eps = torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0
    tolerance = max(tolerance, 4 * eps) if tolerance else 0.0
    one, other = (each.detach().double().reshape(-1).nan_to_num() for each in (one, other))
    largest = max(float(each.abs().max()) for each in (one, other)) if one.numel() else 0.0
    return bool(((one - other).abs() <= tolerance * largest).all())
