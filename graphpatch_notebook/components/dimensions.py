"""Determines where each dimension of each value comes from: from the inputs, the model, or the values of tensors.

At the first query the captured model runs again (`meta_runs`), each time with another size of some dimensions of its
inputs. A dimension of a value that keeps its size in all runs is the model's own; what changes is a size of the inputs,
a product of these with a feature, one of them with some more entries, or follows them in another way. Nothing is
concluded from equal sizes: a dimension of a value that does not occur in these runs is not known.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from graphpatch_notebook.capture import is_sized_by_values
from graphpatch_notebook.capture.inputs import inputs_of_call
from graphpatch_notebook.capture.records import CallNode, Frame, Node, once_a_capture, refs_in, spliced_calls
from graphpatch_notebook.components.meta_runs import (
    MetaRunError,
    Variation,
    captured_tensors,
    input_shapes,
    kind_of,
    run_on_meta,
)
from graphpatch_notebook.patching.model_state import RandomState
from graphpatch_notebook.values import TensorSpec, ValueSpec, describe, spec_at, tensor_specs

InputDim: TypeAlias = "tuple[int, int]"
"""A dimension of the inputs: the number of the tensor among them, and the position in its shape; see `input_shapes`."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How a dimension follows the sizes of the inputs: `factor` times those of some groups, plus `extra`."""

    groups: tuple[int, ...] = ()
    factor: int = 1
    extra: int = 0

    def at(self, sizes: Sequence[int]) -> int:
        """Returns its size, given one for each group."""
        return self.factor * math.prod(sizes[group] for group in self.groups) + self.extra


class SizeRun(NamedTuple):
    """A run at other sizes.

    Attributes:
        group: The group of dimensions of the inputs that had another size; `None` if what depends on values had.
        size: That size.
        shapes: The shape of each tensor of the capture, in order; `None` if it does not occur in the run.
    """

    group: int | None
    size: int
    shapes: Sequence[Sequence[int] | None]


class StoredRuns(NamedTuple):
    """The runs at other sizes, as a file has them.

    Attributes:
        groups: The dimensions of the inputs that have other sizes, those of one group only together.
        runs: The group and the size of each run.
        shapes: The shapes that a tensor has in the runs, those of each kind of tensor once.
        tensors: The number of the kind, for each tensor in order.
    """

    groups: list[list[InputDim]]
    runs: list[tuple[int | None, int]]
    shapes: list[list[list[int] | None]]
    tensors: list[int]


_FAR = (307, 131, 67)
_FEW = 12
_SMALL = 5
_lock = threading.RLock()


@once_a_capture
def dimensions_of(root: Frame) -> Dimensions:
    """Returns the dimensions of all values of a capture; the first call runs the model, on meta."""
    return Dimensions(root)


class Dimensions:
    """The dimensions of all values of a capture.

    Attributes:
        groups: The dimensions of the inputs that can have other sizes: those of one group only together.
        runs: The runs at other sizes, those of each group first, in order.
        unseen: The dimensions of the inputs whose sizes Python computes with unseen, so that a graph has other numbers.
        reason: Why no dimension is known; `None` if the model can run at other sizes.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> class Doubled(torch.nn.Module):
        ...     def forward(self, x):
        ...         return torch.cat([x, x]) @ torch.ones(4, 4)
        >>> root = PatchableGraph(Doubled(), torch.ones(4, 4)).nodes.root
        >>> known = dimensions_of(root)
        >>> known.groups
        [[(0, 0)]]
        >>> known.extents(root.output_node.spec)
        (Extent(groups=(0,), factor=2, extra=0), Extent(groups=(), factor=4, extra=0))
    """

    def __init__(self, root: Frame, stored: StoredRuns | None = None) -> None:
        self._root = root
        self._sizes = input_shapes(root)
        self._splices = spliced_calls(root)
        every = [*captured_tensors(root), *(spec for call in self._splices for spec in captured_tensors(call.frame))]
        self._numbers = {id(spec): number for number, spec in enumerate(every)}
        self.groups: list[list[InputDim]] = []
        self.runs: list[SizeRun] = []
        self.unseen: set[InputDim] = set()
        self.reason: str | None = None
        numbers: dict[object, int] = {}
        self._kind_of = functools.cache(lambda frame: numbers.setdefault(kind_of(frame), len(numbers)))
        self._is_far = stored is not None
        if stored is not None:
            self.groups = stored.groups
            kinds = [stored.shapes[number] for number in stored.tensors]
            self.runs = [SizeRun(*run, [kind[number] for kind in kinds]) for number, run in enumerate(stored.runs)]
            self.reason = None if self.groups else "the file does not have them"
            return
        before = RandomState()  # a copy of the model runs, but it may draw random numbers
        try:
            self._explore()
        finally:
            before.restore()

    # -- runs at other sizes -------------------------------------------------------------------------------------------

    def _explore(self) -> None:
        rejected = [(number, dim) for number, shape in enumerate(self._sizes) for dim in range(len(shape))]
        ways: list[Callable[[InputDim], object]] = [tuple, lambda one: (self._size(one), one[1]), self._size]
        for way in ways if len(rejected) <= _FEW else ways[1:]:  # each alone, and then those of one size together
            tied: dict[object, list[InputDim]] = {}
            for place in rejected:
                tied.setdefault(way(place), []).append(place)
            rejected = []
            for group in tied.values():
                # Alone, a size of one may be broadcast: those of all inputs first.
                if (way is tuple and self._size(group[0]) == 1) or not self._vary(group):
                    rejected += group
        if self.groups:
            self.reason = None
        nodes = [node for frame in self._root.walk() for node in frame.nodes]
        reads = [read for frame in self._root.walk() for read in frame.value_reads]
        if any(map(is_sized_by_values, nodes)) or any(type(read.value) is int for read in reads):
            self._run(None, Variation(self._sizes, more=1))

    def _size(self, place: InputDim) -> int:
        return self._sizes[place[0]][place[1]]

    def _vary(self, places: list[InputDim]) -> bool:
        """Runs the model with other sizes at `places`; returns whether it could."""
        size, group = self._size(places[0]), len(self.groups)
        self.groups.append(places)
        # Not one: if only one input has a size of one, it is broadcast, and the results keep their size.
        if any(self._run_at(group, other) for other in (2 * size + 3, size + 1, size - 1) if other > 1):
            return True
        self.groups.pop()
        return False

    def _run_at(self, group: int, size: int) -> bool:
        shapes = [list(shape) for shape in self._sizes]
        for number, dim in self.groups[group]:
            shapes[number][dim] = size
        return self._run(group, Variation(shapes), size)

    def _run(self, group: int | None, variation: Variation, size: int = 0) -> bool:
        try:
            found = run_on_meta(self._root, variation, self._kind_of)
        except MetaRunError as error:
            self.reason = self.reason or str(error)
            return False
        for call in self._splices:
            found.shapes.extend(self._shapes_in(call, found.shapes))
        self.runs.append(SizeRun(group, size, found.shapes))
        if group is not None and found.has_other_numbers:
            self.unseen.update(self.groups[group])
        return True

    def _shapes_in(self, call: CallNode, shapes: Sequence[tuple[int, ...] | None]) -> Sequence[tuple[int, ...] | None]:
        """Returns the shape of each tensor in a splice, given those before it, some of which it reads."""
        specs = [spec_at(ref.node.spec, ref.dig) for ref in refs_in(call.args)]
        read = [shapes[self._numbers[id(spec)]] for spec in specs]
        try:
            if None not in read:
                return run_on_meta(call.frame, Variation([each for each in read if each is not None]), kind_of).shapes
        except MetaRunError:  # such as an SAE that looks at numbers
            pass
        return [None] * len(captured_tensors(call.frame))

    def run_at_other_sizes(self) -> bool:
        """Runs the model at large and small sizes, too, if it was not yet.

        What is rounded up to a multiple, of the length of a chunk, say, or cut to some length, may change nowhere near
        the example's size.
        """
        if self._is_far or self.reason is not None:
            return False
        with _lock:
            before, self._is_far = RandomState(), True
            for group, places in enumerate(self.groups):
                size = self._size(places[0])
                any(self._run_at(group, far) for far in _FAR if far > 2 * size)
                self._run_at(group, (size + 1) // 2)
            before.restore()
        return True

    def stored(self, specs: Iterable[TensorSpec]) -> StoredRuns:
        """Returns what is known about some captured tensors, to make it again over a copy of their records."""
        kinds: dict[tuple[tuple[int, ...] | None, ...], int] = {}
        numbers = []
        for spec in specs:
            kind = tuple(None if shape is None else tuple(shape) for _, shape in self._runs_of(spec))
            numbers.append(kinds.setdefault(kind, len(kinds)))
        shapes = [[None if shape is None else list(shape) for shape in kind] for kind in kinds]
        return StoredRuns(self.groups, [(run.group, run.size) for run in self.runs], shapes, numbers)

    # -- questions -----------------------------------------------------------------------------------------------------

    def group_sizes(self) -> list[int]:
        """Returns the size of each group in the capture."""
        return [self._size(places[0]) for places in self.groups]

    @functools.cached_property
    def small_sizes(self) -> list[int]:
        """A small size for each group, at which parts of the model run."""
        return [size if 1 < size <= _SMALL + 2 else _SMALL for size in self.group_sizes()]

    def shape_at(self, spec: TensorSpec, sizes: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of a captured value at other sizes of the groups, as far as it follows them."""
        extents = zip(spec.shape, self.extents(spec), strict=True)
        return tuple(size if extent is None else extent.at(sizes) for size, extent in extents)

    def group_of(self, spec: TensorSpec, dim: int) -> int | None:
        """Returns the group of which a dimension of a captured value has the size; `None` if there is none."""
        extent = self.extents(spec)[dim]
        is_one = extent is not None and len(extent.groups) == 1 and (extent.factor, extent.extra) == (1, 0)
        return extent.groups[0] if extent is not None and is_one else None

    def extents(self, spec: TensorSpec) -> tuple[Extent | None, ...]:
        """Returns how each dimension of a captured value follows the inputs; `None` if that is not known."""
        runs = self._runs_of(spec)[: len(self.groups)]  # the same answer after `run_at_other_sizes`
        if not runs or any(shape is None for _, shape in runs):
            return (None,) * len(spec.shape)
        found = []
        for dim, size in enumerate(spec.shape):
            found.append(self._extent(size, [(run, shape[dim]) for run, shape in runs if shape is not None]))
        return tuple(found)

    def dims_like(self, spec: TensorSpec, extent: Extent | None) -> list[int]:
        """Returns the dimensions of a captured value that follow the inputs like this."""
        follows = extent is not None and bool(extent.groups)
        return [dim for dim, own in enumerate(self.extents(spec)) if follows and own == extent]

    def changes(self, spec: TensorSpec) -> tuple[bool | None, ...]:
        """Returns whether each dimension of a captured value has other sizes in some runs; `None` if not known."""
        shapes = [shape for _, shape in self._runs_of(spec) if shape is not None]
        if not shapes:
            return (None,) * len(spec.shape)
        return tuple(any(shape[dim] != size for shape in shapes) for dim, size in enumerate(spec.shape))

    def _runs_of(self, spec: TensorSpec) -> list[tuple[SizeRun, Sequence[int] | None]]:
        number = self._numbers.get(id(spec))
        return [] if number is None else [(run, run.shapes[number]) for run in self.runs]

    def _extent(self, size: int, found: Sequence[tuple[SizeRun, int]]) -> Extent | None:
        """Returns the only line through the size in the capture and those at other sizes of the inputs, if any."""
        sizes = self.group_sizes()
        changed = [(run.group, run.size, now) for run, now in found if run.group is not None and now != size]
        groups = tuple(group for group, _, _ in changed)
        base = math.prod(sizes[group] for group in groups)
        if all(now * sizes[group] == size * to for group, to, now in changed) and size % base == 0:
            return Extent(groups, size // base)
        if len(changed) == 1:
            ((group, to, now),) = changed
            factor, rest = divmod(now - size, to - sizes[group])
            if factor > 0 and not rest:
                return Extent(groups, factor, size - factor * sizes[group])
        return None


def shape_problem(
    frame: Frame, spec: ValueSpec, shape: torch.Size, given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
) -> str | None:
    """Returns how `shape` differs from the captured shape; `None` if that is allowed, in a call with `given` inputs."""
    if not isinstance(spec, TensorSpec) or spec.shape == shape:
        return None
    if len(spec.shape) != len(shape):
        dimensions = "1 dimension" if len(spec.shape) == 1 else f"{len(spec.shape)} dimensions"
        return f"it had {dimensions} when it was captured, and has {len(shape)} now"
    if _has_no_sizes(frame):
        return None
    if frame.parent is None and any(spec is given for node in frame.inputs() for given in tensor_specs(node.spec)):
        return None
    known = dimensions_of(frame.root)
    problem = _size_problem(known, spec, shape)
    if problem is not None and known.run_at_other_sizes():
        problem = _size_problem(known, spec, shape)
    return None if problem is not None and given is not None and _is_any_sized(frame.root, *given) else problem


def _is_any_sized(root: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call has other sizes where the model could not run at others, as for images: no size is known then."""
    known, given = dimensions_of(root), inputs_of_call(root, args, kwargs)
    varied = {place for group in known.groups for place in group}
    tensors = [spec for node in root.inputs() for spec in tensor_specs(describe(given[str(node.target)]))]
    pairs = zip(input_shapes(root), tensors, strict=False)
    return any(
        (number, dim) not in varied and now != then
        for number, (shape, spec) in enumerate(pairs)
        for dim, (then, now) in enumerate(zip(shape, spec.shape, strict=False))
    )


def fixed_sizes(frame: Frame, node: Node, spec: ValueSpec) -> tuple[int | None, ...] | None:
    """Returns the sizes of a captured value, with `None` for those that depend on inputs; `None` if not a tensor.

    If a fixed size has changed, `shape_problem` refuses the value. `node` has the value, or a container with it.
    """
    if not isinstance(spec, TensorSpec):
        return None
    if node.kind == "parameter":
        return tuple(spec.shape)
    if _has_no_sizes(frame):
        return (None,) * len(spec.shape)
    known = dimensions_of(frame.root)
    known.run_at_other_sizes()
    sizes = zip(spec.shape, known.changes(spec), strict=True)
    return tuple(None if size == 1 or is_changed is not False else size for size, is_changed in sizes)


def unpacked_shape(
    frame: Frame, node: Node, spec: ValueSpec, shape: torch.Size, here: int | None = None
) -> tuple[int, ...] | None:
    """Returns the shape of a value of attention in the captured layout, if the heads are where positions should be.

    With one position, `(batch, key heads, heads of each, ...)` is a view of `(batch, heads, 1, ...)`. `None` if heads
    are not packed like this. `here` is how many of the heads this process holds; `None` for all.
    """
    if not isinstance(spec, TensorSpec) or len(spec.shape) != 4 or len(shape) != 4:
        return None
    heads = spec.shape[1] if here is None else here
    if shape[1] == heads or shape[1] * shape[2] != heads:
        return None
    sizes = fixed_sizes(frame, node, spec)
    return (shape[0], heads, 1, shape[3]) if sizes is not None and sizes[1] == spec.shape[1] else None


def _has_no_sizes(frame: Frame) -> bool:
    """Whether the capture does not have what is inside of a frame."""
    return frame.opaque_reason is not None or frame.has_own_graph or frame.capture.is_program


def _size_problem(known: Dimensions, spec: TensorSpec, shape: torch.Size) -> str | None:
    for dim, (then, now, is_changed) in enumerate(zip(spec.shape, shape, known.changes(spec), strict=True)):
        # A dimension of size one is broadcast by the model's own code; of what did not run at other sizes, nothing is
        # known.
        if then not in {now, 1} and is_changed is False:
            return f"dimension {dim} does not follow the inputs' sizes, yet was {then} and is {now} now"
    return None
