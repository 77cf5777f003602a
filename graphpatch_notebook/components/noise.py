"""Proofs by runs with noise: what moves values between positions, and whether layers follow each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.components.chain import Layer, Trails
from graphpatch_notebook.components.closeness import is_close
from graphpatch_notebook.components.flow import Value
from graphpatch_notebook.components.writes import Write
from graphpatch_notebook.patches.kinds import AddPatch, CustomPatch, Patch
from graphpatch_notebook.values import children

if TYPE_CHECKING:
    from graphpatch_notebook.components.proofs import NamedLayer

ProofRun: TypeAlias = "Callable[[Mapping[str, Patch[Any]]], Any]"
"""Runs the model with patches, on the inputs of the proofs, and returns its result."""

Proof: TypeAlias = "tuple[str, str, str | None]"
"""The name of a component, how it was proved, and why it was not."""

_MOST_POSITIONS = 8
_PATCHED = "patching it = patching the next layer's input"


class NoiseRuns:
    """Runs the model with noise added to the stream.

    Args:
        trails: The flow of values, and the norms.
        known: The paths that can be patched.
        run: Runs the model.
    """

    def __init__(self, trails: Trails, known: Collection[str], run: ProofRun) -> None:
        self._trails = trails
        self._flow = trails.flow
        self._known = known
        self._run = run

    def proofs(self, layers: list[NamedLayer]) -> Iterator[Proof]:
        """Yields what runs with noise prove, or refute, of the layers of a stack."""
        yield from self._positions(layers)
        yield from self._patches(layers)

    def _recorded(self, *paths: str) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {}
        if patches := {path: keeping(kept, path) for path in paths if path in self._known}:
            self._run(patches)
        return kept

    def _positions(self, layers: list[NamedLayer]) -> Iterator[Proof]:
        """Whether attention and mixers move values between positions, and MLPs do not: by noise at one position."""
        seen: dict[tuple[type, str], str | None] = {}
        for named in layers:
            for each in named.writes:
                key = type(named.layer.frame.module), each.kind
                name = f"{named.name}{each.kind}_out"
                if key not in seen:
                    seen[key] = self._position_problem(named.layer, each.write)
                if seen[key] is not None:
                    yield name, "", seen[key]

    def _position_problem(self, layer: Layer, write: Write) -> str | None:
        state = write.state
        path = self._flow.path(state)
        given = [place.path for place in self._flow.inputs(layer.frame) if place.value == state]
        if len(given) == 1:  # else noise at the input would leave the others as they are
            path = given[0]
        own = self._flow.path(write.value)
        axes = layer.axes(state)
        if (
            sorted(axes) != ["batch", "channel", "position"]
            or axes[-1] != "channel"
            or state.shape[dim := axes.index("position")] < 3
            or write.value.size != state.size
            or path not in self._known
        ):
            return None
        values = self._recorded(path, own)
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
        change = (kept[own] - before).abs().reshape(stream.shape)
        change[at] = 0
        return bool(change.max() <= 1e-5 * (1 + before.abs().max()))

    def _patches(self, layers: list[NamedLayer]) -> Iterator[Proof]:
        """Whether a patch on the end of a layer does what one on the begin of the next does."""
        pairs = [pair for pair in pairwise(layers) if self._is_chained(*pair)]
        for one, other in dict.fromkeys([*pairs[:1], *pairs[-1:]]):
            end = self._recorded(one.layer.end.path).get(one.layer.end.path)
            if end is not None:
                yield from self._patched(one, other, noise(end))

    def _is_chained(self, one: NamedLayer, other: NamedLayer) -> bool:
        """Whether a layer reads what the one before returns, as one of its inputs, and nothing else reads that."""
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

    def _patched(self, one: NamedLayer, other: NamedLayer, added: Tensor) -> Iterator[Proof]:
        end, start = one.layer.end, other.layer.start
        at_end = first_float(self._run({end.path: AddPatch(value=added)}))
        at_start = first_float(self._run({start.path: AddPatch(value=added.reshape(start.value.shape))}))
        if not is_close(at_end, at_start):
            yield f"{one.name}resid_post", "", f"patching {end.path} is not patching {start.path}"
        elif not is_close(at_end, first_float(self._run({})), 0.0):  # else the result does not depend on either
            yield f"{one.name}resid_post", _PATCHED, None


def keeping(kept: dict[str, Tensor], path: str) -> Patch[Any]:
    def keep(value: Any) -> Any:
        if isinstance(value, Tensor):
            kept.setdefault(path, value.detach().clone())  # the model may write into it later
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
