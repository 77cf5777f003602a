"""What modules need not compute again: the run without patches is recorded, and later runs reuse its results.

A frame is one call of one module. `FrameRecording` keeps when each frame ended, and what it returned. In a run with
`FrameReplay`, some frames return that, and others compute only what patches have changed (`ChangedPositions`). Frames
are identified during the run, not by the capture: on other inputs a model may call its modules differently.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.modules import all_modules
from graphpatch_notebook.torch_compat import version_of, without_torch_functions
from graphpatch_notebook.values import ABSENT, IMMUTABLE, children, mapped, with_own_containers

NEVER = math.inf
Forward = Callable[..., Any]


class TensorCall(NamedTuple):
    """A call of a module with one tensor, which returned one."""

    given: Tensor
    returned: Tensor
    keyword: str | None  # the name of the argument, if it was given by keyword


@dataclass(eq=False, slots=True)
class FrameNode:
    """One frame, the same one in all runs: a call of a module, and its number among the calls in the frame above."""

    module: Any  # `None` for the frame above the model
    children: dict[tuple[int, int], FrameNode] = field(default_factory=dict)
    is_open: bool = False  # whether it holds a value that will be patched: the frames that it calls are recorded
    ended: float = NEVER  # when its `forward` returned, by the clock of the recording
    value: Any = ABSENT  # what it returned, if runs may return that instead of computing it
    call: TensorCall | None = None  # for frames that may be computed in parts

    def child(self, module: Module, number: int) -> FrameNode:
        """Returns the frame of the call of `module` with that number in this frame."""
        key = (id(module), number)
        found = self.children.get(key)
        if found is None:
            found = self.children[key] = FrameNode(module)
        return found

    def walk(self) -> list[FrameNode]:
        """Returns this frame and all below it, each before those that it calls."""
        found = [self]
        for node in found:
            found += node.children.values()
        return found

    def modules_around(self, nodes: Iterable[FrameNode]) -> list[Module]:
        """Returns the modules whose calls must be seen to identify some frames below: their own, and all callers."""
        ids = {id(node.module) for node in nodes}
        found: dict[int, Module] = {}
        for node in self.walk()[:0:-1]:  # callees first
            if id(node.module) in ids or any(key[0] in found for key in node.children):
                found[id(node.module)] = node.module
        return list(found.values())


class _FrameRun:
    """Runs the `forward` of each frame of a run, and knows which frame it is."""

    def __init__(self, root: FrameNode) -> None:
        self._running: list[tuple[FrameNode, dict[int, int]]] = [(root, {})]  # innermost last, with calls by module

    def __call__(self, module: Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        caller, counts = self._running[-1]
        number = counts[id(module)] = counts.get(id(module), -1) + 1
        node = caller.child(module, number)
        self._running.append((node, {}))
        try:
            return self.run(caller, node, forward, args, kwargs)
        finally:
            self._running.pop()

    def run(
        self, caller: FrameNode, node: FrameNode, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns the result of the frame `node`."""
        raise NotImplementedError


class FrameRecording(_FrameRun):
    """Records when frames end, and what those return that an open frame calls.

    Args:
        root: Receives the records; its open frames must be marked already.
        parts: The modules whose calls with one tensor are kept, too, since they may compute only a part of it.

    Attributes:
        tick: Returns a time that is later than all earlier ones.
    """

    def __init__(self, root: FrameNode, parts: Collection[Module]) -> None:
        super().__init__(root)
        self._parts = parts
        self.tick = itertools.count(1).__next__

    def run(
        self, caller: FrameNode, node: FrameNode, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = given = None
        with without_torch_functions():
            if caller.is_open:
                leaves = leaves_of((args, kwargs))
                # Not with a cache among what it is given, which a call fills.
                before = (
                    _versions(leaves) if all(isinstance(leaf, _LEAVES) or callable(leaf) for leaf in leaves) else None
                )
            if node.module in self._parts and not node.is_open and len(args) + len(kwargs) == 1:
                (value,) = args or kwargs.values()
                is_vectors = type(value) is Tensor and value.dim() > 1 and value.is_floating_point()
                given = value.clone() if is_vectors and value.shape[:-1].numel() >= _FEWEST else None
        output = call_sites.invoke(forward, args, kwargs)
        node.ended = self.tick()
        with without_torch_functions():
            # Copies, since the model may write into these later.
            if before is not None and before == _versions(leaves_of((args, kwargs))):
                returned = leaves_of(output)
                is_plain = all(isinstance(leaf, _LEAVES) for leaf in returned)
                if is_plain and not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in returned):
                    node.value = own_tensors(output)
            if given is not None and type(output) is Tensor and output.shape[:-1] == given.shape[:-1]:
                node.call = TensorCall(given, output.clone(), next(iter(kwargs), None))
        return output


def _versions(leaves: Iterable[Any]) -> list[tuple[int, int | None]]:
    """Returns which tensors and other leaves these are, and how often each was written into."""
    return [(id(leaf), version_of(leaf) if isinstance(leaf, Tensor) else None) for leaf in leaves]


class FrameReplay(_FrameRun):
    """Skips frames of a run, which return known values, or computes parts of frames.

    Args:
        root: The frame above the model.
        values: What some frames return.
        parts: How others are computed.
        on_return: Is given what the other frames return.
    """

    def __init__(
        self,
        root: FrameNode,
        values: Mapping[FrameNode, Any],
        parts: Mapping[FrameNode, ChangedPositions],
        on_return: Callable[[FrameNode, Any], None] | None,
    ) -> None:
        super().__init__(root)
        self._values, self._parts, self._on_return = values, parts, on_return
        self._is_apart = False  # whether other values than those of a frame are computed: no frame is in that

    def __call__(self, module: Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (
            call_sites.invoke(forward, args, kwargs)
            if self._is_apart
            else super().__call__(module, forward, args, kwargs)
        )

    def run(
        self, caller: FrameNode, node: FrameNode, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if node in self._values:
            return with_own_containers(self._values[node])  # the caller may write into a list or a dict
        if (part := self._parts.get(node)) is None:
            output = call_sites.invoke(forward, args, kwargs)
        else:
            output = part(forward, lambda *args, **kwargs: self._apart(forward, args, kwargs), *args, **kwargs)
        if self._on_return is not None:
            self._on_return(node, output)
        return output

    def _apart(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._is_apart = True
        try:
            return call_sites.invoke(forward, args, kwargs)
        finally:
            self._is_apart = False


# -- modules that compute only the positions that patches have changed ------------------------------------------------

LEAST_OPERATIONS = {"cpu": 5e7, "other": 4e9}
"""A module that needs fewer operations for a forward computes all positions: to find those that changed costs more."""
_WHOLE = 0.8
"""If a larger fraction of positions has changed, all are computed: selecting them would cost more."""
_FEWEST = 4
"""With fewer vectors, whether they meet in a module is not tested."""


def least_vectors(module: Module) -> float:
    """Returns for how many vectors, at least, it is worth the effort to select those that changed."""
    weights = {id(w): w for inner in all_modules(module) for w in inner._parameters.values() if w is not None}
    operations = 2 * sum(weight.numel() for weight in weights.values())
    on_cpu = all(weight.device.type == "cpu" for weight in weights.values())
    return LEAST_OPERATIONS["cpu" if on_cpu else "other"] / operations if operations else math.inf


class ChangedPositions:
    """Computes one frame at the positions that patches have changed.

    In a causal model, patches do not change the positions before them. A *position-wise* frame (an MLP, a projection)
    computes the vector at each position from the input vector at that position only. Where its input is the same as in
    the run without patches, its result is the recorded one. Whether a frame is position-wise is found in its first call
    with changed positions: known vectors are among these, in another order, and must have their known results.

    Args:
        module: Its module.
        call: Its input and result in the run without patches.

    Attributes:
        is_position_wise: Whether vectors do not meet in it; `None` before that is known. If they do, it runs as it is.
    """

    def __init__(self, module: Module, call: TensorCall) -> None:
        self._given, self._returned, self._keyword = call
        self._least = least_vectors(module)
        self.is_position_wise: bool | None = None

    def __call__(self, forward: Forward, apart: Forward, *args: Any, **kwargs: Any) -> Any:
        """Returns the result; `apart` calls the `forward` on other vectors than those of the frame."""
        __tracebackhide__ = True
        (value,) = (*args, *kwargs.values())
        if self.is_position_wise is False or not self._is_like_given(value):
            return call_sites.invoke(forward, args, kwargs)
        given, returned = self._given, self._returned
        count = value.shape[0] // given.shape[0]
        places = differing(value.view(count, *given.shape), given).flatten().nonzero().squeeze(1)
        if len(places) > _WHOLE * value.shape[:-1].numel():
            return call_sites.invoke(forward, args, kwargs)
        result = returned.repeat(count, *[1] * (returned.dim() - 1))
        if len(places):
            compute = self._computed if self.is_position_wise else self._tested
            computed = compute(apart, value.flatten(0, -2).index_select(0, places))
            if computed is None or computed.dtype != result.dtype:  # under another autocast
                return call_sites.invoke(forward, args, kwargs)
            result.flatten(0, -2).index_copy_(0, places, computed)
        return result

    def _is_like_given(self, value: Any) -> bool:
        given = self._given
        return (
            type(value) is Tensor
            and value.shape[1:] == given.shape[1:]
            and (value.dtype, value.device) == (given.dtype, given.device)
            and value.shape[0] % given.shape[0] == 0
            and value.shape[:-1].numel() > self._least
        )

    def _computed(self, forward: Forward, vectors: Tensor) -> Tensor:
        """Returns what the module computes from some vectors, in sequences of the usual length."""
        lead, count = self._given.shape[1:-1], len(vectors)
        missing = -count % lead.numel()
        padded = torch.cat([vectors, vectors[-1:].expand(missing, -1)]) if missing else vectors
        shaped = padded.view(-1, *lead, vectors.shape[-1])
        output: Tensor = forward(shaped) if self._keyword is None else forward(**{self._keyword: shaped})
        return output.flatten(0, -2)[:count]

    def _tested(self, forward: Forward, vectors: Tensor) -> Tensor | None:
        """Returns the same, with a wild vector and known ones among the others; `None` if the known ones change."""
        known, expected = self._given.flatten(0, -2), self._returned.flatten(0, -2)
        length, changed = self._given.shape[1:-1].numel(), len(vectors)
        # Some known vectors for each sequence, and other sequences than in the run without patches.
        least = 1 + changed + _FEWEST + (changed // length if length > 1 else 0)
        sequences = max(-(-least // length), len(self._given) + 1)
        count = sequences * length - 1 - changed
        turns = -(-count // len(known))
        mixed = torch.cat([wild(known[:1]), vectors, torch.cat([known.flip(0)] * turns)[:count]])
        # Each sequence has every n-th of them, so that all have known ones among others.
        mixed = mixed.view(length, sequences, -1).transpose(0, 1).flatten(0, 1)
        self.is_position_wise = False
        try:
            found = self._computed(forward, mixed)
        except Exception:  # whatever the module raises for such values
            return None
        found = found.view(sequences, length, -1).transpose(0, 1).flatten(0, 1)[1:]
        self.is_position_wise = is_close(found[changed:], torch.cat([expected.flip(0)] * turns)[:count])
        return found[:changed] if self.is_position_wise else None


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(value: Tensor, reference: Tensor) -> Tensor:
    """Returns a mask of positions with vectors that differ in any bit (-0.0 differs from 0.0)."""
    word = _WORDS[value.element_size()]
    if value.is_contiguous() and reference.is_contiguous() and value.shape[-1] * value.element_size() % 64 == 0:
        # Compare eight bytes at a time, then reduce eight booleans at a time.
        return (value.view(torch.int64) != reference.view(torch.int64)).view(torch.int64).any(-1)
    return (value.view(word) != reference.view(word)).any(-1)


# -- values of frames --------------------------------------------------------------------------------------------------

_LEAVES = (Tensor, *IMMUTABLE)
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4, torch.complex128: 1e-9}
_COARSE = 3e-2


def leaves_of(value: Any) -> list[Any]:
    """Returns what a value made of containers holds: tensors, and everything else that is not a container."""
    inside: Any = value if type(value) in (tuple, list) else value.values() if type(value) is dict else None
    if inside is None:  # not the usual containers, which this reads faster
        parts = None if isinstance(value, _LEAVES) else children(value)
        if parts is None:
            return [value]
        inside = [child for _, child in parts]
    return [leaf for child in inside for leaf in leaves_of(child)]


def own_tensors(value: Any) -> Any:
    """Returns a value made of containers, with copies of its tensors."""
    return mapped(value, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def is_close(value: Tensor, reference: Tensor) -> bool:
    """Whether two values are equal up to the rounding errors of kernels for other batch sizes."""
    if value.shape != reference.shape or value.dtype != reference.dtype:
        return False
    if not (value.is_floating_point() or value.is_complex()):
        return torch.equal(value, reference)
    tolerance = _TOLERANCES.get(value.dtype, _COARSE)
    # A faster check for finite values: this function runs for many values.
    if not value.numel() or (value - reference).abs().max() <= tolerance * reference.abs().max():
        return True
    scale = reference[reference.isfinite()].abs().amax().item() if reference.isfinite().any() else 0.0
    return torch.allclose(value, reference, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def wild(value: Tensor) -> Tensor:
    """Returns other numbers, larger than those of a value; integers and booleans in another order."""
    if not (value.is_floating_point() or value.is_complex()):
        return value.roll(1, -1)
    steps = torch.arange(1, value.numel() + 1, device=value.device, dtype=torch.float32).view(value.shape)
    return (steps.cos() * 100 * value.abs().max().clamp(min=1)).to(value.dtype)
