"""Modules that work on each position alone: in rows, they compute only positions that patches have changed.

Rows of a forward are alike up to what is patched in them, and in a causal model so are the positions before a patched
one. A module that makes the vector at a position of the vector at that position alone (an MLP, a projection) gives for
one that it was given before what it returned then. Which modules are such is not taken on trust: a test with
positions left out, in another order, and beside wild ones shows it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.execution.frame_results import FrameNode, FrameTree
from graphpatch_notebook.experiments.rows import is_close, wild

_WHOLE = 0.8
"""Where a larger share of positions has changed, all are computed: to take them apart would cost more."""

LEAST_OPERATIONS = {"cpu": 4e6, "other": 4e9}
"""A module that needs fewer for a forward is computed as a whole."""


class PositionWise:
    """Which modules of a model work on each position alone, as far as that was tested; while nobody changes them."""

    def __init__(self) -> None:
        self._known: dict[Module, bool] = {}
        self._operations: dict[Module, int] = {}

    def __call__(self, module: Module) -> bool | None:
        """Whether a module does; `None` where that is not known yet."""
        known = self._known.get(module)
        return known if known is not None or self.operations(module) else False

    def tested(self, node: FrameNode) -> bool:
        """Whether the module of a frame does; it is tested, if it was not yet."""
        assert node.module is not None
        if node.module not in self._known:
            self._known[node.module] = _passes(node)
        return self._known[node.module]

    def operations(self, module: Module) -> int:
        """Returns how many operations a module needs for one position, roughly."""
        found = self._operations.get(module)
        if found is None:
            found = 2 * sum(weight.numel() for weight in module.parameters() if weight.dim() > 1)
            self._operations[module] = found
        return found

    def least_positions(self, node: FrameNode) -> float:
        """Returns of how many positions on it takes less time to find out which have changed."""
        assert node.pair is not None
        assert node.module is not None
        least = LEAST_OPERATIONS["cpu" if node.pair[0].device.type == "cpu" else "other"]
        return least / max(1, self.operations(node.module))


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
            some = value.flatten(0, -2).index_select(0, places)
            computed = _called(forward, some, value.dim(), *kwargs)
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

    def at_last_only(self) -> ChangedPositions:
        """Returns what can stand in where nobody reads the result at other positions than the last."""
        other = copy.copy(self)
        other._last_only = True
        return other


def _called(forward: Callable[..., Any], some: Tensor, dims: int, *keyword: str) -> Tensor:
    """Returns what a module makes of vectors, `(number, size)`, given to it in as many dimensions as it is used to."""
    count = len(some)
    if count == 1:
        some = some.expand(2, -1)  # ones may be squeezed away
    shaped = some.reshape(*[1] * (dims - 2), *some.shape)
    output: Tensor = forward(**{keyword[0]: shaped}) if keyword else forward(shaped)
    return output.reshape(len(some), -1)[:count]


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


def stand_ins(tree: FrameTree, position_wise: PositionWise, count: int) -> dict[FrameNode, ChangedPositions]:
    """Returns what can stand in for the outermost frames whose modules work on each position alone.

    Args:
        tree: The frames, as a run without patches recorded them.
        position_wise: What is known of their modules.
        count: How many interventions share a forward: where there is little to do for all of them, nothing stands in.
    """
    return {
        node: ChangedPositions(node, position_wise.least_positions(node))
        for node in _outermost(tree.root, position_wise, count)
    }


def _outermost(node: FrameNode, position_wise: PositionWise, count: int) -> Iterator[FrameNode]:
    for child in node.children.values():
        is_worth_it = True
        if child.pair is not None:
            is_worth_it = count * len(child.pair[0].flatten(0, -2)) >= position_wise.least_positions(child)
            if is_worth_it and position_wise.tested(child):
                yield child
                continue
        if is_worth_it:  # else what is inside it is less so
            yield from _outermost(child, position_wise, count)


def _passes(node: FrameNode) -> bool:
    assert node.pair is not None
    assert node.module is not None
    given, returned = (tensor.detach().flatten(0, -2) for tensor in node.pair)
    order = torch.randperm(len(given), generator=torch.Generator().manual_seed(0)).to(given.device)
    some = order[: math.ceil(len(order) / 2)]
    beside = [wild(given, number) for number in range(3)]
    for places, others in ((some, []), (order, beside), (some[:1], beside[:1])):
        try:
            with torch.no_grad():
                output = _called(node.module, torch.cat([given[places], *others]), node.pair[0].dim())
        except Exception:
            return False
        # Of another dtype where the model calls it under autocast, which a test on its own does not see.
        if output.dtype != returned.dtype or not is_close(output[: len(places)], returned[places]):
            return False
    return True
