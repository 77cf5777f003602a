"""Determines where each dimension of each value comes from: from the inputs, the model, or the values of tensors.

At the first query the captured model runs again at other sizes of its inputs (`meta_runs`). Each dimension of a value
then has a *profile*: its sizes in all these runs. Two dimensions are the same one if their profiles are equal. What
never changes is the model's own; what changes follows the inputs (as one of their sizes, or a product, a sum, a
rounding up of these), or the values of tensors.

If the model cannot run like that (the example had a cache, say), or a value does not occur in these runs, equal sizes
are taken to be the same dimension: a size that equals a size of an input follows that input.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard

import torch

from graphpatch_notebook.capture import is_sized_by_values
from graphpatch_notebook.capture.inputs import given_input, passed_on
from graphpatch_notebook.capture.records import HELD_KINDS, CallNode, Frame, Node, Ref, refs_in
from graphpatch_notebook.components.meta_runs import MetaRunError, Variation, input_shapes, matched, recorded_on_meta
from graphpatch_notebook.patching.model_state import preserved
from graphpatch_notebook.values import (
    ContainerSpec,
    ObjectSpec,
    ScalarSpec,
    TensorSpec,
    ValueSpec,
    all_leaves,
    describe,
    leaves,
    tensor_specs,
)

InputDim: TypeAlias = "tuple[int, int]"
"""A dimension of the inputs: the number of the tensor among them, and the position in its shape; see `input_shapes`."""

Profile: TypeAlias = "tuple[int, ...]"
"""The sizes of one dimension: in the capture, and in each of the runs at other sizes."""

CallInputs: TypeAlias = "tuple[tuple[object, ...], dict[str, object]]"
"""The arguments of a `forward`, positional and by keyword."""


class NoBatchError(Exception):
    """It is not known which dimension of a value holds the batch, for the reason given (caught inside the package)."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How a dimension follows the sizes of the inputs: `factor` times those of some groups, plus `extra`."""

    groups: tuple[int, ...] = ()
    factor: int = 1
    extra: int = 0

    def at(self, sizes: Sequence[int]) -> int:
        """Returns its size, given one for each group."""
        return self.factor * math.prod(sizes[group] for group in self.groups) + self.extra


_ABSENT = -1  # the size of what does not occur in a run
_FAR = (307, 131, 67)
_FEW = 12
_lock = threading.RLock()


def dimensions_of(root: Frame) -> Dimensions:
    """Returns the dimensions of all values of a capture; the first call runs the model, on meta."""
    with _lock:
        findings = root.capture.findings
        if dimensions_of not in findings:
            findings[dimensions_of] = Dimensions(root)
        return findings[dimensions_of]  # type: ignore[no-any-return]


class Dimensions:
    """The dimensions of all values of a capture.

    Attributes:
        groups: The dimensions of the inputs that can have other sizes: those of one group only together.
        reason: Why dimensions are matched by equal sizes only; `None` if runs at other sizes distinguished them.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> class Doubled(torch.nn.Module):
        ...     def forward(self, x):
        ...         return torch.cat([x, x]) @ torch.ones(4, 4)
        >>> root = PatchableGraph(Doubled(), torch.ones(4, 4)).nodes.root
        >>> known = dimensions_of(root)
        >>> known.groups
        [[(0, 0)]]
        >>> [known.follows_inputs(dim) for dim in known.profiles(root.output_node.spec)]
        [True, False]
    """

    def __init__(self, root: Frame) -> None:
        self._root = root
        self._sizes = [input_shapes(root)]
        self._tensor_count = sum(
            isinstance(leaf, TensorSpec) for node in root.inputs() for _, leaf in leaves(node.spec)
        )
        self.groups: list[list[InputDim]] = []
        self.reason: str | None = None
        self._group_runs: list[int] = []
        self._values_runs: list[int] = []
        self._rejected: list[InputDim] = []
        self._profiles: dict[int, tuple[Profile, ...]] = {}
        self._reordered: dict[int, set[Profile]] | None = None
        self._is_far = False
        # A copy of the model runs, but it may draw random numbers, and write into objects outside the model.
        with preserved(root.module):
            try:
                self._note_run(recorded_on_meta(root, Variation(self._sizes[0])))
                self._explore()
            except MetaRunError as error:
                self.reason = str(error)
                self._suppose()

    # -- runs at other sizes -------------------------------------------------------------------------------------------

    def _explore(self) -> None:
        places = [(number, dim) for number, shape in enumerate(self._sizes[0]) for dim in range(len(shape))]
        is_alone = len(places) <= _FEW
        rejected = [place for place in places if not (is_alone and self._vary([place]))]
        for is_tied in (lambda a, b: self._size(a) == self._size(b) and a[1] == b[1], self._have_one_size):
            tied: list[list[InputDim]] = []
            for place in rejected:
                group = next((group for group in tied if is_tied(group[0], place)), None)
                tied.append([place]) if group is None else group.append(place)
            rejected = []
            for group in tied:
                if (is_alone and len(group) == 1) or not self._vary(group):
                    rejected += group
        self._rejected = rejected
        nodes = [node for frame in self._root.walk() for node in frame.nodes]
        if any(map(is_sized_by_values, nodes)) and self._run(Variation(self._sizes[0], more_entries=5)):
            self._values_runs.append(len(self._sizes) - 1)
        reads = [read for frame in self._root.walk() for read in frame.value_reads]
        if any(type(read.value) is int for read in reads) and self._run(Variation(self._sizes[0], more=1)):
            self._values_runs.append(len(self._sizes) - 1)

    def _size(self, place: InputDim) -> int:
        return self._sizes[0][place[0]][place[1]]

    def _have_one_size(self, one: InputDim, other: InputDim) -> bool:
        return self._size(one) == self._size(other)

    def _vary(self, places: list[InputDim]) -> bool:
        """Runs the model with other sizes at `places`; returns whether it could."""
        size = self._size(places[0])
        # Not one: if only one input has a size of one, it is broadcast, and the results keep their size.
        if not any(
            self._run(Variation(self._at(places, other))) for other in (2 * size + 3, size + 1, size - 1) if other > 1
        ):
            return False
        self.groups.append(places)
        self._group_runs.append(len(self._sizes) - 1)
        return True

    def run_at_other_sizes(self) -> bool:
        """Runs the model at large and small sizes, too, if it was not yet.

        What is rounded up to a multiple, of the length of a chunk, say, or cut to some length, may change nowhere near
        the example's size.
        """
        if self._is_far or self.reason is not None:
            return False
        self._is_far = True
        with _lock, preserved(self._root.module):
            for places in self.groups:
                size = self._size(places[0])
                any(self._run(Variation(self._at(places, far))) for far in _FAR if far > 2 * size)
                self._run(Variation(self._at(places, (size + 1) // 2)))
            # Images of other sizes, say, may be taken under a flag only (`interpolate_pos_encoding`).
            flags = [node.spec for node in self._root.inputs() if _may_be_flag(node.spec)]
            for place in self._rejected:
                shapes = self._at([place], 2 * self._size(place))
                any(self._run(Variation(shapes, flipped=flag)) for flag in flags)
        return True

    def _at(self, places: list[InputDim], size: int) -> list[list[int]]:
        shapes = [list(shape) for shape in self._sizes[0]]
        for number, dim in places:
            shapes[number][dim] = size
        return shapes

    def _run(self, variation: Variation) -> bool:
        try:
            found = recorded_on_meta(self._root, variation)
        except MetaRunError:
            return False
        self._note_run(found)
        self._sizes.append([list(shape) for shape in variation.shapes])
        return True

    def _suppose(self) -> None:
        """Treats dimensions with the same size and position as one, since no run is possible."""
        groups: dict[InputDim, list[InputDim]] = {}
        for number, shape in enumerate(self._sizes[0]):
            for dim, size in enumerate(shape):
                groups.setdefault((size, dim), []).append((number, dim))
        self.groups = list(groups.values())
        self._sizes += [self._at(places, 2 * self._size(places[0]) + 3) for places in self.groups]

    def _note_run(self, record: Frame) -> None:
        found = matched(self._root, record)
        for frame in self._root.walk():
            for node in frame.nodes:
                self._note(node.spec, found.get(id(node)))
        self._reordered = None

    def _note(self, spec: ValueSpec, found: ValueSpec | None) -> None:
        """Notes the sizes of a captured value, and of those in it, in one more run."""
        if isinstance(spec, ContainerSpec):
            inside = {text: child for text, _, child in found.children} if isinstance(found, ContainerSpec) else {}
            for text, _, child in spec.children:
                self._note(child, inside.get(text))
        elif isinstance(spec, TensorSpec):
            shape = found.shape if isinstance(found, TensorSpec) and len(found.shape) == len(spec.shape) else None
            known = self._profiles.get(id(spec))
            if known is not None:
                more = shape or (_ABSENT,) * len(spec.shape)
                self._profiles[id(spec)] = tuple((*sizes, size) for sizes, size in zip(known, more, strict=True))
            elif shape == spec.shape and len(self._sizes) == 1:  # the run at the very sizes of the capture
                self._profiles[id(spec)] = tuple((size,) for size in shape)

    # -- questions -----------------------------------------------------------------------------------------------------

    def profiles(self, spec: TensorSpec) -> tuple[Profile, ...]:
        """Returns the profile of each dimension of a captured value; `spec` is the recorded object itself."""
        known = self._profiles.get(id(spec))
        return tuple(map(self._coinciding, spec.shape)) if known is None else known

    def is_known(self, spec: TensorSpec) -> bool:
        """Whether the dimensions of a value are known from more than sizes that coincide."""
        return id(spec) in self._profiles

    def group_sizes(self, run: int = 0) -> list[int]:
        """Returns the size of each group in a run; by default, in the capture."""
        return [self._sizes[run][number][dim] for (number, dim), *_ in self.groups]

    def extents(self, spec: TensorSpec) -> tuple[Extent | None, ...]:
        """Returns how each dimension of a captured value follows the inputs; `None` if that is not known."""
        return tuple(map(self._extent, self._profiles.get(id(spec), [()] * len(spec.shape))))

    def shape_at(self, spec: TensorSpec, sizes: Sequence[int] | None) -> tuple[int, ...]:
        """Returns the shape of a captured value at other sizes of the groups, as far as it follows them."""
        extents = self.extents(spec)
        known = [None if sizes is None or one is None else one.at(sizes) for one in extents]
        return tuple(size if other is None else other for size, other in zip(spec.shape, known, strict=True))

    def _extent(self, profile: Profile) -> Extent | None:
        if not profile or self.reason is not None:
            return None
        sizes, size = self.group_sizes(), profile[0]
        runs = {group: run for group, run in enumerate(self._group_runs) if profile[run] != size}
        if any(profile[run] == _ABSENT for run in self._group_runs):
            return None
        now = {group: (profile[run], self.group_sizes(run)[group]) for group, run in runs.items()}
        base = math.prod(sizes[group] for group in runs)
        if all(after * sizes[group] == size * to for group, (after, to) in now.items()) and size % base == 0:
            return Extent(tuple(runs), size // base)
        if len(now) == 1 and all(after - size == to - sizes[group] for group, (after, to) in now.items()):
            return Extent(tuple(runs), 1, size - base)
        return None

    def follows_inputs(self, profile: Profile) -> bool:
        """Whether a dimension has other sizes at other sizes of the inputs, or at other values."""
        return len({size for size in profile if size != _ABSENT}) > 1

    def batch_dim(self, spec: TensorSpec) -> int | None:
        """Returns the dimension of a captured value that holds the batch; `None` if all of the batch uses one value.

        The batch is dimension 0 of the inputs, see `batch_inputs`. The dimension grows as the batch does. It may hold
        more than that (batch x heads): in which order is not known. It is a `NoBatchError` if more than one dimension
        grows, or one grows in another way, or the model cannot run with another batch.
        """
        runs = self._batch_runs()
        known = self._profiles.get(id(spec))
        if known is None or not runs:
            raise NoBatchError(
                f"it is not known which dimension of a value of shape {tuple(spec.shape)} holds the batch"
            )
        growing = [dim for dim, sizes in enumerate(known) if any(sizes[run] != sizes[0] for run in runs)]
        if not growing:
            return None
        sizes = known[growing[0]]
        # If inputs may have separate batches, each run changes the batch of one of them.
        if len(growing) > 1 or any(sizes[run] not in (sizes[0], sizes[0] * factor) for run, factor in runs.items()):
            raise NoBatchError(f"a value of shape {tuple(spec.shape)} does not grow as the batch does")
        return growing[0]

    def _batch_runs(self) -> dict[int, float]:
        """Returns the runs in which only the batch had another size, each with the factor."""
        places = [(number, 0) for number in batch_inputs(self._sizes[0][: self._tensor_count])]
        found = {}
        for run, sizes in enumerate(self._sizes):
            changed = {
                (number, dim)
                for number, (shape, now) in enumerate(zip(self._sizes[0], sizes, strict=True))
                for dim, (size, other) in enumerate(zip(shape, now, strict=True))
                if size != other
            }
            if changed and changed <= set(places):
                number, dim = min(changed)
                found[run] = sizes[number][dim] / self._sizes[0][number][dim]
        return found

    def dims_like(self, spec: TensorSpec, profile: Profile) -> list[int]:
        """Returns the dimensions of a captured value that have this profile."""
        return [dim for dim, own in enumerate(self.profiles(spec)) if _is_same(own, profile)]

    def is_placed_by_values(
        self, frame: Frame, node: Node, spec: TensorSpec, dims: Iterable[int], sequences: Iterable[Profile]
    ) -> bool:
        """Whether values say what is where along a dimension that was as long as a sequence: it is chosen, or sorted.

        `dims` are the dimensions of the value that may be meant, `sequences` those of the sequences.
        """
        lengths = {profile[0] for profile in sequences}
        alike = [self.profiles(spec)[dim] for dim in dims if spec.shape[dim] in lengths]
        if not self.is_known(spec):
            nodes = (each for above in frame.frames_above() for each in above.nodes)
            return bool(alike) and any(is_sized_by_values(each) or each.op in _SORTS for each in nodes)
        if self._reordered is None:
            self._reordered = {}
            self._order(self._root)
        reordered = self._reordered.get(id(node), set())
        of_values = (profile for profile in alike if any(profile[run] != profile[0] for run in self._values_runs))
        return any(of_values) or any(profile in reordered for profile in alike)

    def _coinciding(self, size: int) -> Profile:
        """Returns the profile of the inputs' dimension with that size, or of a product of two, or a constant one."""
        of_inputs = [
            tuple(sizes[number][dim] for sizes in self._sizes) for group in self.groups for number, dim in group[:1]
        ]
        pairs = (tuple(a * b for a, b in zip(one, other, strict=True)) for one in of_inputs for other in of_inputs)
        candidates = [*of_inputs, *pairs] if size > 1 else []
        return next((profile for profile in candidates if profile[0] == size), (size,) * len(self._sizes))

    # -- rows in an order that values give -----------------------------------------------------------------------------

    def _order(self, frame: Frame) -> None:
        """Follows what is sorted from where it is: into modules that are called, not out of the frame that sorts it.

        Code that sorts rows puts them back before it returns them.
        """
        assert self._reordered is not None
        for node in frame.nodes:
            if isinstance(node, CallNode):
                self._order(node.frame)
            own = {profile for spec in tensor_specs(node.spec) for profile in self.profiles(spec)}
            if found := self._order_of(frame, node) & own:
                self._reordered[id(node)] = found

    def _order_of(self, frame: Frame, node: Node) -> set[Profile]:
        if node.kind in HELD_KINDS:
            return set()
        if node.kind in ("input", "call"):
            given, _ = passed_on(node, frame) or (None, frame)
            return self._order_among(given)
        if node.kind == "output":
            return self._order_among(frame.output) & self._order_among([Ref(each) for each in frame.inputs()])
        source = node.whole
        if source.is_in_place or source.op in _INTO_FIRST:
            return self._order_among(source.args[:1])
        found = self._order_among((source.args, source.kwargs))
        if source.op in _SORTS:
            given = source.kwargs.get("dim", source.args[1] if len(source.args) > 1 else -1)
            dim = given if type(given) is int else -1
            specs = [spec for spec in tensor_specs(source.spec) if -len(spec.shape) <= dim < len(spec.shape)]
            found |= {self.profiles(spec)[dim] for spec in specs}
        return found

    def _order_among(self, values: object) -> set[Profile]:
        assert self._reordered is not None
        return {profile for ref in refs_in(values) for profile in self._reordered.get(id(ref.node), ())}


def batch_inputs(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Returns which tensors of the inputs hold the batch in dimension 0: those with the same length there as the first.

    Example:
        >>> batch_inputs([(), (2, 7), (2,), (7, 7)])
        [1, 2]
    """
    first = next((shape for shape in shapes if len(shape)), None)
    return [n for n, shape in enumerate(shapes) if first is not None and len(shape) and shape[0] == first[0]]


_SORTS = ("sort", "argsort")
_INTO_FIRST = frozenset(
    "index_add index_copy index_fill index_put index_reduce masked_scatter scatter scatter_add scatter_reduce".split()
)
"""Functions whose result has the shape of their first argument, besides in-place functions."""


def _may_be_flag(spec: ValueSpec) -> TypeGuard[ScalarSpec]:
    return isinstance(spec, ScalarSpec) and type(spec.value) in (bool, type(None))


def _is_same(one: Profile, other: Profile) -> bool:
    # One of them may be older than the runs at large sizes.
    return all(a == b or _ABSENT in (a, b) for a, b in zip(one, other, strict=False))


def shape_problem(frame: Frame, spec: ValueSpec, shape: torch.Size, inputs: CallInputs | None = None) -> str | None:
    """Returns a message about how `shape` differs from the captured shape, or `None` if that difference is allowed.

    `inputs` are the arguments of the frame's `forward`, for the value of an op.
    """
    if not isinstance(spec, TensorSpec) or spec.shape == shape:
        return None
    if len(spec.shape) != len(shape):
        dimensions = "1 dimension" if len(spec.shape) == 1 else f"{len(spec.shape)} dimensions"
        return f"it had {dimensions} when it was captured, and has {len(shape)} now"
    if (
        frame.opaque_reason is not None or frame.has_own_graph or frame.capture.is_program
    ):  # the record has no contents of the value
        return None
    if frame.parent is None and any(spec is given for node in frame.inputs() for given in tensor_specs(node.spec)):
        return None
    known = dimensions_of(frame.root)
    problem = _size_problem(known, spec, shape)
    if problem is not None and known.run_at_other_sizes():
        problem = _size_problem(known, spec, shape)
    if problem is not None or inputs is None or known.is_known(spec):
        return problem
    return _problem_beside_cache(frame, spec, shape, inputs)


def fixed_sizes(frame: Frame, node: Node, spec: ValueSpec) -> tuple[int | None, ...] | None:
    """Returns the sizes of a captured value, with `None` for those that depend on inputs; `None` if not a tensor.

    If a fixed size has changed, `shape_problem` refuses the value. `node` has the value, or a container with it.
    """
    if not isinstance(spec, TensorSpec):
        return None
    if node.kind == "parameter":
        return tuple(spec.shape)
    if frame.opaque_reason is not None or frame.has_own_graph or frame.capture.is_program:
        return (None,) * len(spec.shape)
    known = dimensions_of(frame.root)
    known.run_at_other_sizes()
    sizes = zip(spec.shape, known.profiles(spec), strict=True)
    return tuple(None if size == 1 or known.follows_inputs(dim) else size for size, dim in sizes)


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


def _size_problem(known: Dimensions, spec: TensorSpec, shape: torch.Size) -> str | None:
    for position, (then, now, dim) in enumerate(zip(spec.shape, shape, known.profiles(spec), strict=True)):
        # A dimension of size one is broadcast by the model's own code.
        if then not in {now, 1} and not known.follows_inputs(dim):
            return f"dimension {position} does not follow the inputs' sizes, yet was {then} and is {now} now"
    return None


def _problem_beside_cache(frame: Frame, spec: TensorSpec, shape: torch.Size, inputs: CallInputs) -> str | None:
    """Returns a message about a shape in a frame that receives an object, such as a cache; `None` if it is allowed.

    There, a node may compute different things in different steps: it may pack heads that share keys into the sequence,
    say. So a size may differ only if it was the size of an input that differs too, or a multiple of such a size.
    """
    nodes = list(frame.inputs())
    given = [describe(given_input(frame.parameters, node.target, *inputs)) for node in nodes]
    if not any(isinstance(leaf, ObjectSpec) for each in given for _, leaf in all_leaves(each)):
        return None
    sizes = [pair for node, spec in zip(nodes, given, strict=True) for pair in _size_pairs(node.spec, spec)]
    changed = {then for then, now in sizes if then not in {now, 1}}
    explained = changed | {one * other for one in changed for other, _ in sizes}
    for position, (then, now) in enumerate(zip(spec.shape, shape, strict=True)):
        if then not in {now, 1} and then not in explained:
            return f"dimension {position} was {then} and is {now}, though no input's size changed from {then}"
    return None


def _size_pairs(then: ValueSpec, now: ValueSpec) -> Iterator[tuple[int, int]]:
    if isinstance(then, TensorSpec) and isinstance(now, TensorSpec):
        yield from zip(then.shape, now.shape, strict=False)
    elif isinstance(then, ContainerSpec) and isinstance(now, ContainerSpec):
        by_name = {text: child for text, _, child in now.children}
        for text, _, child in then.children:
            if text in by_name:
                yield from _size_pairs(child, by_name[text])
