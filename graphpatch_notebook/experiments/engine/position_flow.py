"""Which frames work on each position alone, and whose results are read at the last position only.

Both are told by the calls of torch in a run. A frame works on each position alone if all that is made of what it is
given is made by calls that treat each vector (along the last dimension) by itself, with weights that all positions
share. Its result is read at the last position only if that holds for all that is made of it afterwards, until the last
position is picked. A call that is not known to do so is taken to mix.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from graphpatch_notebook.capture.functions import METADATA_READS, SIZE_READS, raw_name, writes_in_place
from graphpatch_notebook.execution.replay import FrameNode, FrameTree, leaves_of, tensors_among
from graphpatch_notebook.experiments.engine.steps import Steps
from graphpatch_notebook.experiments.engine.value_reads import ValueReads
from graphpatch_notebook.experiments.engine.vector_calls import keeps_vectors, picks_last

Place = tuple[tuple[int, int], ...]
"""What tells a frame in all runs, as in `FrameNode.place`."""

_READS = SIZE_READS | METADATA_READS | {"dtype", "device", "layout", "is_cuda", "is_floating_point", "is_contiguous"}


@dataclass(frozen=True, slots=True)
class _Tag:
    """What a tensor was made of, vector by vector.

    Attributes:
        given: The frames, one bit each, of whose inputs it was made.
        returned: The frames of whose results it was made.
        lead: The leading dimensions where the first of these was.
    """

    given: int
    returned: int
    lead: tuple[int, ...]


class PositionFlow(ValueReads):
    """Follows vectors through a run; it also notes reads of values, and the steps of the run.

    Args:
        tree: Tells the time.
        weights: Tensors that are the same in each run.
        inputs: Tensors that the model is given.

    Attributes:
        steps: What the run did, call by call.
    """

    def __init__(self, tree: FrameTree, weights: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        super().__init__(tree)
        self.steps = Steps()
        self._fixed = {id(tensor): weakref.ref(tensor) for tensor in weights}
        self._seen = {id(tensor): weakref.ref(tensor) for tensor in inputs}
        self._is_lost = False
        self._tags: dict[int, tuple[weakref.ref[Tensor], _Tag]] = {}
        self._bits: dict[FrameNode, int] = {}
        self._running = 0
        self._mixing = 0
        self._read = 0

    # -- frames --------------------------------------------------------------------------------------------------------

    def begins(self, node: FrameNode, value: Tensor) -> None:
        """A frame begins that is given one tensor."""
        bit = self._bits[node] = 1 << len(self._bits)
        lead = tuple(value.shape[:-1])
        tag = self._tag(value)
        if tag is not None and tag.lead != lead:
            self._read |= tag.returned
            tag = None
        given, returned = (0, 0) if tag is None else (tag.given, tag.returned)
        self._set(value, _Tag(given | bit, returned, lead))
        self._running |= bit

    def returns(self, node: FrameNode, given: Tensor, output: Any) -> bool:
        """The frame returns; says whether it works on each position alone."""
        bit = self._bits[node]
        self._running &= ~bit
        tag = self._tag(output) if isinstance(output, Tensor) else None
        if (
            self._is_lost
            or tag is None
            or not tag.given & bit
            or self._mixing & bit
            or output.shape[:-1] != given.shape[:-1]
        ):
            self._mixing |= bit
            return False
        self._set(output, _Tag(tag.given, tag.returned | bit, tag.lead))
        return True

    def fails(self, node: FrameNode) -> None:
        """The frame ends in another way."""
        bit = self._bits.get(node, 0)  # none yet, where an interrupt came as the frame began
        self._running &= ~bit
        self._mixing |= bit

    def read_at_last_only(self, output: Any) -> set[FrameNode]:
        """Returns the frames whose results are read at the last position only, by a model that returned `output`."""
        for leaf in leaves_of(output):
            if isinstance(leaf, Tensor):
                self._is_lost = self._is_lost or not (self._is_fixed(leaf) or _holds(self._seen, leaf))
                tag = self._tag(leaf)
                self._read |= 0 if tag is None else tag.returned
        return set() if self._is_lost else {n for n, bit in self._bits.items() if not (self._read | self._mixing) & bit}

    # -- calls ---------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.steps.note(func, args, kwargs)
        given = tensors_among((*args, *kwargs.values()))
        result = self._watched(func, args, kwargs, given)
        # What nobody has seen come up was made where no mode sees it: who knows of what.
        self._is_lost = self._is_lost or not all(self._is_fixed(t) or _holds(self._seen, t) for t in given)
        made = tensors_among((result,))
        for tensor in made:
            self._seen[id(tensor)] = weakref.ref(tensor)
        moving = [tensor for tensor in given if not self._is_fixed(tensor)]
        if not moving:
            for tensor in made:
                self._fixed[id(tensor)] = weakref.ref(tensor)
        else:
            name = raw_name(func)
            if name not in _READS:
                self._follow(name, args, kwargs, moving, result)
        return result

    def _follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], moving: list[Tensor], result: Any
    ) -> None:
        written = args[0] if writes_in_place(name, kwargs) and args else None
        # What was the same in each run is so no more, and others may share its memory.
        self._is_lost = self._is_lost or "out" in kwargs or (isinstance(written, Tensor) and self._is_fixed(written))
        tags = [self._tag(tensor) for tensor in moving]
        known = [tag for tag in tags if tag is not None]
        if not known:
            for tensor in tensors_among((result,)):
                self._tags.pop(id(tensor), None)
            return
        all_given, all_returned, shared = 0, 0, -1
        for tag in known:
            all_given, all_returned, shared = all_given | tag.given, all_returned | tag.returned, shared & tag.given
        is_joined = len(known) == len(tags) and all(tag.lead == known[0].lead for tag in known)
        if written is not None and (
            not isinstance(written, Tensor)
            or (own := self._tag(written)) is None
            or (all_given & ~own.given) | (all_returned & ~own.returned)
        ):
            is_joined = False
        if is_joined and keeps_vectors(name, args, kwargs, moving, result):
            # A running frame is given all that it makes its result of: nothing from elsewhere has these positions.
            self._mixing |= all_given & ~shared & self._running
            for tensor in tensors_among((result,)):
                self._set(tensor, _Tag(all_given, all_returned, known[0].lead))
            return
        self._mixing |= all_given & self._running
        if not (is_joined and picks_last(name, args, known[0].lead)):
            self._read |= all_returned
        for tensor in tensors_among((result,)):
            self._tags.pop(id(tensor), None)

    def _is_fixed(self, tensor: Tensor) -> bool:
        return _holds(self._fixed, tensor)

    def _tag(self, tensor: Tensor) -> _Tag | None:
        known = self._tags.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _set(self, tensor: Tensor, tag: _Tag) -> None:
        self._tags[id(tensor)] = (weakref.ref(tensor), tag)


def _holds(known: dict[int, weakref.ref[Tensor]], tensor: Tensor) -> bool:
    found = known.get(id(tensor))
    return found is not None and found() is tensor


@dataclass(frozen=True)
class Flow:
    """What was found of a kind of run, for others that take the same steps.

    Attributes:
        steps: What the run did.
        position_wise: The places of frames that work on each position alone.
        last_only: The places of those of them whose results are read at the last position only.
    """

    steps: Steps
    position_wise: frozenset[Place]
    last_only: frozenset[Place]

    def begins(self, node: FrameNode, value: Tensor) -> None:
        """Needs not be told."""

    def returns(self, node: FrameNode, given: Tensor, output: Any) -> bool:
        """Whether the frame works on each position alone."""
        return node.place in self.position_wise

    def fails(self, node: FrameNode) -> None:
        """Needs not be told."""
