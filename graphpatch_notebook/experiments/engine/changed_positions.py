"""In a batch of cells, position-wise modules compute only the positions that patches have changed.

In a causal model, patches do not change the positions before them. A *position-wise* frame (an MLP, a projection)
computes the vector at each position from the input vector at that position only. Where its input is the same as in the
run without patches, its result is the recorded one. On GPT-2 124M this makes a sweep over 12 layers x 16 positions 1.8
times as fast. Whether a frame is position-wise is found in its first call with changed positions: known vectors are
among these, in another order, and must have their known results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture.held_values import all_modules
from graphpatch_notebook.experiments.engine.rows import is_close, wild
from graphpatch_notebook.patching import TensorCall

_WHOLE = 0.8
"""If a larger fraction of positions has changed, all are computed: selecting them would cost more."""

LEAST_OPERATIONS = {"cpu": 5e7, "other": 4e9}
"""A module that needs fewer operations for a forward computes all positions: to find those that changed costs more."""

_FEWEST = 4
"""With fewer vectors, whether they meet in a module is not tested."""


def least_vectors(module: Module | None, value: Tensor) -> float:
    """Returns for how many vectors of a value, at least, it is worth the effort to select those that changed."""
    if module is None or value.dim() < 2 or not value.is_floating_point():
        return math.inf
    weights = {id(w): w for inner in all_modules(module) for w in inner._parameters.values() if w is not None}
    operations = 2 * sum(weight.numel() for weight in weights.values())
    least = LEAST_OPERATIONS["cpu" if value.device.type == "cpu" else "other"]
    return least / operations if operations else math.inf


class ChangedPositions:
    """Replaces the `forward` of one frame; if this is not position-wise, it runs as it is.

    Args:
        module: Its module.
        call: Its input and result in the run without patches.

    Attributes:
        is_position_wise: Whether vectors do not meet in it; `None` before that is known.
        only_last: Whether it is known that of its result only the last position is read; `None` if others may be. While
            it is `False`, the last rows, which must come out as without patches, have wild numbers at others.
    """

    def __init__(self, module: Module, call: TensorCall) -> None:
        self._given, self._returned, self._keyword = call
        self._least = least_vectors(module, call.given)
        self.only_last: bool | None = None
        self.is_position_wise = None if self._given.numel() >= _FEWEST * self._given.shape[-1] else False

    def __call__(self, forward: Callable[..., Any], apart: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns the result; `apart` calls the `forward` on other vectors than those of the frame."""
        __tracebackhide__ = True
        (value,) = (*args, *kwargs.values())
        given, returned = self._given, self._returned
        if self.is_position_wise is False or not self._is_like_given(value):
            return forward(*args, **kwargs)
        count = value.shape[0] // given.shape[0]
        differs = differing(value.view(count, *given.shape), given)
        if self.only_last is not None:
            differs[..., :-1] = False
        places = differs.flatten().nonzero().squeeze(1)
        changed = places.shape[0]
        if changed > _WHOLE * (value.numel() // value.shape[-1]):
            return forward(*args, **kwargs)
        shared = returned.expand(count, *returned.shape)
        result = shared.clone(memory_format=torch.contiguous_format).flatten(0, 1)
        if changed:
            compute = self._computed if self.is_position_wise else self._tested
            computed = compute(apart, value.flatten(0, -2).index_select(0, places))
            if computed is None or computed.dtype != result.dtype:  # under another autocast
                return forward(*args, **kwargs)
            result.flatten(0, -2).index_copy_(0, places, computed)
        if self.only_last is False:
            spoiled = result[-given.shape[0] :, ..., :-1, :]
            spoiled.copy_(wild(spoiled))
        return result

    @property
    def has_positions(self) -> bool:
        """Whether there are several positions, along the last dimension but one."""
        return self._given.dim() > 2 and self._given.shape[-2] > 1

    def _is_like_given(self, value: Any) -> bool:
        given = self._given
        return (
            type(value) is Tensor
            and value.shape[1:] == given.shape[1:]
            and value.dtype == given.dtype
            and value.device == given.device
            and value.shape[0] > given.shape[0]
            and value.shape[0] % given.shape[0] == 0
            and value.numel() // value.shape[-1] > self._least
        )

    def _computed(self, forward: Callable[..., Any], vectors: Tensor) -> Tensor:
        """Returns what the module computes from some vectors, in sequences of the usual length."""
        lead, count = self._given.shape[1:-1], vectors.shape[0]
        missing = -count % math.prod(lead)
        padded = torch.cat([vectors, vectors[-1:].expand(missing, -1)]) if missing else vectors
        shaped = padded.view(-1, *lead, vectors.shape[-1])
        output: Tensor = forward(shaped) if self._keyword is None else forward(**{self._keyword: shaped})
        return output.flatten(0, -2)[:count]

    def _tested(self, forward: Callable[..., Any], vectors: Tensor) -> Tensor | None:
        """Returns the same, with a wild vector and known ones among the others; `None` if the known ones change."""
        known, expected = self._given.flatten(0, -2), self._returned.flatten(0, -2)
        length, changed = math.prod(self._given.shape[1:-1]), vectors.shape[0]
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
            found = found.view(sequences, length, -1).transpose(0, 1).flatten(0, 1)[1:]
        except Exception:  # whatever the module raises for such values
            return None
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
