"""In rows, modules that work on each position alone compute only positions that patches have changed.

Rows of a forward are alike up to what is patched in them, and in a causal model so are the positions before a patched
one. A frame that makes the vector at a position of the vector at that position alone (an MLP, a projection) returns for
one that it was given in the run without patches what it returned then. `position_flow` tells which frames are such.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.execution.replay import FrameNode, all_modules
from graphpatch_notebook.experiments.engine.clean_run import Survey

_WHOLE = 0.8
"""Where a larger share of positions has changed, all are computed: to take them apart would cost more."""

LEAST_OPERATIONS = {"cpu": 4e6, "other": 4e9}
"""A module that needs fewer for a forward is computed as a whole."""


class ChangedPositions:
    """Stands in for the `forward` of one frame of a module that works on each position alone.

    Args:
        node: The frame, with what it was given and returned in a run without patches.
        least: Where there are not more positions than these, all are computed.
    """

    def __init__(self, node: FrameNode, least: float) -> None:
        assert node.pair is not None
        self._given, self._returned = node.pair
        self._last_only = False
        self._may_share = not node.is_written_later
        self._least = least

    def __call__(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        (value,) = (*args, *kwargs.values())
        given, returned = self._given, self._returned
        if not self._is_like_given(value):
            return forward(*args, **kwargs)
        size = len(given)
        count = len(value) // size
        places = self._changed(value.unflatten(0, (count, size)))
        if len(places) > _WHOLE * (value.numel() // value.shape[-1]):
            return forward(*args, **kwargs)
        shared = returned.expand(count, *returned.shape)
        if not len(places) and self._may_share and size == 1:
            return shared.squeeze(1)
        result = shared.clone(memory_format=torch.contiguous_format).flatten(0, 1)
        if len(places):
            computed = self._computed(forward, value.flatten(0, -2), places, *kwargs)
            if computed.dtype != result.dtype:
                return forward(*args, **kwargs)
            result.flatten(0, -2).index_copy_(0, places, computed)
        return result

    def _changed(self, values: Tensor) -> Tensor:
        """Returns the places of vectors to be computed, among all, in `(interventions, batch, positions, size)`."""
        if not self._last_only:
            return differing(values, self._given).flatten().nonzero().squeeze(1)
        length = values.shape[2]
        changed = differing(values[:, :, -1], self._given[:, -1]).flatten()
        return changed.nonzero().squeeze(1) * length + (length - 1)

    def _is_like_given(self, value: Any) -> bool:
        given = self._given
        return (
            type(value) is Tensor
            and value.shape[1:] == given.shape[1:]
            and value.dtype == given.dtype
            and value.device == given.device
            and len(value) > len(given)
            and len(value) % len(given) == 0
            and value.numel() // value.shape[-1] > self._least
        )

    def _computed(self, forward: Callable[..., Any], vectors: Tensor, places: Tensor, *keyword: str) -> Tensor:
        """Returns what the module makes of some vectors, given to it in sequences as long as it is used to."""
        lead = self._given.shape[1:-1]
        missing = -len(places) % math.prod(lead)
        padded = torch.cat([places, places[-1:].expand(missing)]) if missing else places
        shaped = vectors.index_select(0, padded).unflatten(0, (-1, *lead))
        output: Tensor = forward(**{keyword[0]: shaped}) if keyword else forward(shaped)
        return output.flatten(0, -2)[: len(places)]

    @property
    def has_positions(self) -> bool:
        """Whether what the frame is given is `(batch, positions, size)`."""
        return self._given.dim() == 3

    def at_last_only(self) -> ChangedPositions:
        """Returns what can stand in where nobody reads the result at other positions than the last."""
        other = copy.copy(self)
        other._last_only = True
        return other


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(value: Tensor, reference: Tensor) -> Tensor:
    """Returns at which positions vectors differ in any bit, without the last dimension: -0.0 is not 0.0 here."""
    word = _WORDS.get(value.element_size())
    if word is None:
        return (value != reference).any(-1)
    if value.is_contiguous() and reference.is_contiguous() and value.shape[-1] * value.element_size() % 64 == 0:
        # Eight bytes at a time: then eight of the answers at a time.
        return (value.view(torch.int64) != reference.view(torch.int64)).view(torch.int64).any(-1)
    return (value.view(word) != reference.view(word)).any(-1)


def stand_ins(survey: Survey, count: int) -> dict[FrameNode, ChangedPositions]:
    """Returns what can stand in for frames that work on each position alone.

    Args:
        survey: What a run without patches told.
        count: How many interventions share a forward: where there is little to do for all of them, nothing stands in.
    """
    found = {}
    for node in survey.tree.root.walk():
        if node.pair is None or node.module is None:
            continue
        least = LEAST_OPERATIONS["cpu" if node.pair[0].device.type == "cpu" else "other"] / _operations(node.module)
        if count * len(node.pair[0].flatten(0, -2)) >= least:
            found[node] = ChangedPositions(node, least)
    return found


def _operations(module: Module) -> int:
    """Returns how many operations a module needs for one position, roughly."""
    weights = {id(w): w for inner in all_modules(module) for w in inner._parameters.values() if w is not None}
    return 2 * sum(weight.numel() for weight in weights.values())


def read_at_last_only(among: dict[FrameNode, ChangedPositions], survey: Survey) -> dict[FrameNode, ChangedPositions]:
    """Returns what can stand in for those of some frames whose results are read at the last position only.

    Pure patches make what is at a position of what was there.

    Args:
        among: What stands in for frames.
        survey: What a run without patches told.
    """
    return {
        node: stand_in.at_last_only()
        for node, stand_in in among.items()
        if node.place in survey.last_only and stand_in.has_positions
    }
