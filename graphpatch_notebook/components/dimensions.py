"""Determines where each dimension of each value comes from: from the inputs, the model, or the values of tensors.

At the first query the captured model runs again, each time with another size of some dimensions of its inputs. A
dimension of a value that keeps its size in all runs is the model's own; what changes is a size of the inputs, a product
of these with a feature, one of them with some more entries, or follows them in another way. Nothing is concluded from
equal sizes: a dimension of a value that does not occur in these runs is not known.

These runs are on the meta device, which computes shapes only. A copy of the model runs, so that its code writes into
the copy; weights take no memory there. If the code reads a value into Python, it reads the captured value; if a size
depends on values, it is the captured size. Calls of modules that ran the same operations on values of the same shapes
at capture, such as the layers of a transformer, run once: a run costs as much as one layer, however deep the model is.
"""

from __future__ import annotations

import copy
import functools
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import CellType, FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from graphpatch_notebook.capture import (
    META,
    OnMeta,
    OpPlace,
    Recorder,
    has_values,
    is_sized_by_values,
    packing_of,
    record,
    result_of_size,
)
from graphpatch_notebook.capture.frame_recorder import VALUE_READS, FrameRecorder
from graphpatch_notebook.capture.inputs import call_like, inputs_of_call, value_like
from graphpatch_notebook.capture.modules import OF_EACH_MODULE, innermost_forward, mutable_containers, reachable_modules
from graphpatch_notebook.capture.records import (
    CallNode,
    CompositeCall,
    Frame,
    Node,
    Site,
    ValueRead,
    map_leaves,
    once_a_capture,
    refs_in,
    spliced_calls,
)
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.patching.model_state import (
    RandomState,
    communicates,
    drop_machinery,
    is_parallel_machinery,
    note_whole_tensors,
    owner_of,
)
from graphpatch_notebook.values import (
    ContainerSpec,
    ObjectSpec,
    ScalarSpec,
    TensorSpec,
    UnknownSpec,
    ValueSpec,
    all_leaves,
    describe,
    leaves,
    spec_at,
    tensor_specs,
)

InputDim: TypeAlias = "tuple[int, int]"
"""A dimension of the inputs: the number of the tensor among them, and the position in its shape; see `input_shapes`."""


class Extent(NamedTuple):
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


# -- runs at other sizes -----------------------------------------------------------------------------------------------


InputShapes: TypeAlias = "Sequence[Sequence[int]]"
"""The shapes of the tensors among the inputs of the root, in order, and then the whole numbers among them."""

KindOf: TypeAlias = "Callable[[Frame], object]"
"""Returns what is equal of frames that run once for all of them: see `kind_of`."""

_MOST_TIMES_AS_MANY_OPS = 4
"""How many times as many ops as the capture a run may have: loops over a sequence have more of them when it is long."""


class MetaRunError(Exception):
    """The model cannot run without its values, or not at these sizes (caught inside the package)."""


class Variation(NamedTuple):
    """How a run differs from the capture.

    Attributes:
        shapes: The shapes of the inputs.
        more: How many more entries than in the capture there are wherever values decide on their number; and by how
            much whole numbers that are read into Python are larger.
    """

    shapes: InputShapes
    more: int = 0


class MetaRun(NamedTuple):
    """A run at other sizes.

    Attributes:
        shapes: The shape of each tensor of `captured_tensors`; `None` if it does not occur there.
        has_other_numbers: Whether an operation is given another plain number than at capture, by the same code: Python
            computed it from sizes unseen.
    """

    shapes: list[tuple[int, ...] | None]
    has_other_numbers: bool


def run_on_meta(root: Frame, variation: Variation, kinds: KindOf) -> MetaRun:
    """Returns what a run differs in from the capture.

    Raises:
        MetaRunError: The model cannot run like that.
    """
    for known in (kinds, None):  # what modules leave elsewhere, such as in a cache, may be missing if some do not run
        repeated: dict[int, Frame] = {}
        try:
            found = recorded_on_meta(root, variation, known, repeated)
        except MetaRunError:
            if not repeated:
                raise
            continue
        if not repeated or _keys(root.output_node.spec) == _keys(found.output_node.spec):
            break
    specs: dict[int, ValueSpec] = {}
    has_other_numbers = _match(root, found, repeated, specs)
    nodes = (node for frame in root.walk() for node in frame.nodes)
    shapes = [shape for node in nodes for shape in _shapes(node.spec, specs.get(id(node)))]
    return MetaRun(shapes, has_other_numbers)


def captured_tensors(root: Frame) -> list[TensorSpec]:
    """Returns what was recorded of each tensor of a capture, in order."""
    return [spec for frame in root.walk() for node in frame.nodes for spec in tensor_specs(node.spec)]


def _keys(spec: ValueSpec) -> list[object]:
    return [keys for keys, _ in all_leaves(spec)]


def _shapes(spec: ValueSpec, found: ValueSpec | None) -> Iterator[tuple[int, ...] | None]:
    """Yields the shape that each tensor in a captured value had in another run."""
    others = {} if found is None else dict(all_leaves(found))
    for keys, leaf in all_leaves(spec):
        if isinstance(leaf, TensorSpec):
            other = others.get(keys)
            is_alike = isinstance(other, TensorSpec) and len(other.shape) == len(leaf.shape)
            yield tuple(other.shape) if is_alike and isinstance(other, TensorSpec) else None


def recorded_on_meta(
    root: Frame, variation: Variation, kinds: KindOf | None = None, repeated: dict[int, Frame] | None = None
) -> Frame:
    """Returns the record of a run of the captured model.

    With `kinds`, modules that run the same code run once: `repeated` gets the captured frame of the first such call,
    by the id of the record of each later one, which has inputs and an output only.

    Raises:
        MetaRunError: The model cannot run like that.
    """
    if communicates(root):  # a copy shares the hooks that do it, and their state
        raise MetaRunError("the model exchanges tensors with other processes")
    thread = ThreadPoolExecutor(1, "graphpatch-sizes")  # without the modes and contexts of the caller, who may patch
    try:
        return thread.submit(_run, root, variation, kinds, {} if repeated is None else repeated).result()
    except Exception as failure:
        raise MetaRunError(f"{type(failure).__name__}: {failure}") from failure
    finally:
        thread.shutdown(wait=False)


def _run(root: Frame, variation: Variation, kinds: KindOf | None, repeated: dict[int, Frame]) -> Frame:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model, copies = _copied(root)
        for frame in root.walk():
            if id(frame.module) in copies:  # not a module that the forward itself made
                copies[id(frame.module)].training = frame.conditions.training
        specs = [leaf for leaf in _input_leaves(root) if isinstance(leaf, TensorSpec)]
        tensors, numbers = iter(variation.shapes[: len(specs)]), iter(variation.shapes[len(specs) :])
        args, kwargs = call_like(
            root,
            lambda _, spec: torch.empty(tuple(next(tensors)), dtype=spec.dtype, device=META),
            lambda spec: next(numbers)[0] if _is_size(spec) else spec.value,
        )
        with OnMeta(specs[0].device if specs else torch.device("cpu")):
            return record(_MetaRecorder(model, root, variation, kinds, repeated), args, kwargs)


def input_shapes(root: Frame) -> list[list[int]]:
    """Returns the shapes of the tensors in the example inputs, then the integers there: these are sizes, too."""
    shapes = [list(leaf.shape) for leaf in _input_leaves(root) if isinstance(leaf, TensorSpec)]
    return shapes + [[leaf.value] for leaf in _input_leaves(root) if _is_size(leaf)]


def _input_leaves(root: Frame) -> list[Any]:
    return [leaf for node in root.inputs() for _, leaf in leaves(node.spec)]


def _is_size(spec: Any) -> bool:
    return isinstance(spec, ScalarSpec) and type(spec.value) is int and spec.value > 1


def copy_on_meta(root: Frame) -> Module:
    """Returns a copy of a captured model on the meta device, without weights and without hooks of users."""
    return _copied(root)[0]


# -- the copy ----------------------------------------------------------------------------------------------------------


class _Weightless(TorchFunctionMode):
    """Makes `deepcopy` put tensors on the meta device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.__deepcopy__, Tensor.clone):
            return args[0].detach().to(META)
        return func(*args, **(kwargs or {}))


def _copied(root: Frame) -> tuple[Module, dict[int, Any]]:
    memo: dict[int, Any] = {}
    modules, seen = reachable_modules(root.module), set[int]()
    for module in modules:
        for _, container in mutable_containers(module, OF_EACH_MODULE, seen):
            values = container.values() if isinstance(container, dict) else container
            memo |= {id(each): copy.deepcopy(each) for each in values if isinstance(each, torch.Generator)}
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            memo[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if _is_machinery(hook))
        for backward in (module._backward_hooks, module._backward_pre_hooks):
            memo[id(backward)] = OrderedDict()
        for empty in [each for each in vars(module).values() if type(each) is OrderedDict and not each]:
            memo[id(empty)] = OrderedDict()  # `deepcopy` takes ten times as long
        note_whole_tensors(memo, module, META)
        if packing_of(module) is not None:
            memo[id(module.weight)] = Parameter(torch.empty(0, device=META))  # its class does not support meta tensors
    with _Weightless():
        model = copy.deepcopy(root.module, memo)
        pairs = [(module, twin) for module in modules if isinstance(twin := memo.get(id(module)), Module)]
        for module, twin in pairs:
            functions = {name: each for name, each in vars(module).items() if isinstance(each, FunctionType)}
            twin.__dict__.update({name: _with_copies(each, memo) for name, each in functions.items()})
            drop_machinery(twin)
    for module, twin in pairs:
        if (packing := packing_of(module)) is not None:  # its own kernels work on values
            spec, name = packing.spec(module), innermost_forward(twin)
            weight, forward = torch.empty(spec.shape, dtype=spec.dtype, device=META), getattr(twin, name)
            twin.__dict__[name] = functools.update_wrapper(packing.bound(twin, weight, forward), forward)
    return model, memo


def _with_copies(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """Returns a function that uses copies of the modules around it: `deepcopy` leaves minGPT's `mlpf` as it is."""
    empty, closure = CellType(), function.__closure__ or ()
    cells = tuple(
        CellType(copy.deepcopy(cell.cell_contents, memo))
        if cell != empty and isinstance(cell.cell_contents, Module)
        else cell
        for cell in closure
    )
    made = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made if cells != closure else function


def _is_machinery(hook: Callable[..., Any]) -> bool:
    """Whether a hook belongs to how the model works: users' hooks do not run without values."""
    return owner_of(hook) in ("library", "collecting") and not is_parallel_machinery(hook)


# -- the run -----------------------------------------------------------------------------------------------------------


class _MetaRecorder(Recorder):
    """Records a run in which values that are read into Python are those of the capture."""

    def __init__(
        self,
        model: Module,
        captured: Frame,
        variation: Variation,
        kinds: KindOf | None,
        repeated: dict[int, Frame],
    ) -> None:
        options = captured.capture.options or ExtractionOptions()
        super().__init__(model, replace(options, custom_extraction_functions={}, error_on_compilation_failure=False))
        self._root = captured
        self._variation = variation
        self._kinds, self._repeated = kinds, repeated
        self._ran: dict[object, tuple[Frame, ValueSpec]] = {}
        self._nodes: Callable[[Frame], dict[Any, Any]] = functools.cache(nodes_by_key)
        self._reads = functools.cache(_reads_by_key)
        nodes = [node for frame in captured.walk() for node in frame.nodes]
        self._left = 1000 + _MOST_TIMES_AS_MANY_OPS * len(nodes)
        self._is_any_sized_by_values = any(map(is_sized_by_values, nodes))

    def run_op(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], place: OpPlace
    ) -> Any:
        self._left -= 1
        if self._left < 0:
            raise MetaRunError("the model does far more at these sizes")
        if name in VALUE_READS and not has_values(args):
            read = self._captured(place, self._reads)
            if read is None or read.value is None:
                raise MetaRunError(f"the model reads a value into Python ({name})")
            return read.value + self._variation.more if type(read.value) is int else read.value
        node = self._captured(place, self._nodes) if self._is_any_sized_by_values else None
        if node is not None and is_sized_by_values(node) and not has_values(args):
            return result_of_size(func, name, args, kwargs, _count(node) + self._variation.more)
        return func(*args, **kwargs)

    def _run_custom(
        self,
        frame: FrameRecorder,
        module: Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs a module, or returns values like those of a call before that runs the same code."""
        captured = self._frame(frame.record)
        if captured is None or self._kinds is None:
            return super()._run_custom(frame, module, forward, args, kwargs)
        key = self._kinds(captured), tuple(_facts(node.spec) for node in frame.record.inputs())
        if key in self._ran:
            first, spec = self._ran[key]
            self._repeated[id(frame.record)] = first
            frame.wants_ops = False
            return value_like(spec, lambda _, each: torch.empty(tuple(each.shape), dtype=each.dtype, device=META))
        output = super()._run_custom(frame, module, forward, args, kwargs)
        spec = describe(output)
        if not any(isinstance(leaf, (ObjectSpec, UnknownSpec)) for _, leaf in all_leaves(spec)):
            self._ran[key] = captured, spec
        return output

    def _captured(self, place: OpPlace, by_key: Callable[[Frame], dict[Any, Any]]) -> Any:
        """Returns the record of the next call; in an additional iteration, the record of the last one captured."""
        frame, (site, occurrence) = self._frame(self.stack[-1].record), place
        if frame is None or site is None or occurrence is None:
            return None
        known, inside = by_key(frame), self.stack[-1].composite
        keys = (_op_key(site, number, inside, None) for number in range(occurrence, -1, -1))
        return next((known[key] for key in keys if key in known), None)

    def _frame(self, record: Frame) -> Frame | None:
        call = record.call
        if record.parent is None or call is None:
            return self._root
        above = self._frame(record.parent)
        known = {} if above is None else self._nodes(above)
        keys = ((call.kind, call.target, number) for number in range(call.call_index, -1, -1))
        return next((known[key].frame for key in keys if key in known), None)


def _count(node: Node) -> int:
    """Returns the number of entries at capture, where it depends on values."""
    spec = node.spec
    while isinstance(spec, ContainerSpec) and spec.children:
        spec = spec.children[0][2]
    if not isinstance(spec, TensorSpec) or not spec.shape:
        raise MetaRunError(f"the result of {node.op} is sized by values")
    place = 0
    if node.op == "getitem" and isinstance(node.args[1], tuple):
        place = next(n for n, index in enumerate(node.args[1]) if index is not None and not isinstance(index, slice))
    return spec.shape[min(place, len(spec.shape) - 1)]


# -- which node is which -----------------------------------------------------------------------------------------------


def kind_of(frame: Frame) -> object:
    """Returns what is equal of frames that ran the same operations on values of the same shapes.

    For a frame that ran operations on values, or has no record, it is equal to nothing.
    """
    frames = list(frame.walk())
    nodes = [node for each in frames for node in each.nodes]
    is_unknown = any(each.opaque_reason is not None or each.has_own_graph or each.value_reads for each in frames)
    if is_unknown or any(map(is_sized_by_values, nodes)):
        return object()
    modules = tuple((type(each.module), each.conditions.training) for each in frames)
    return modules, tuple(
        (node.kind, node.op, node_key(node) if node.kind == "op" else None, _facts(node.spec), *_numbers(node))
        for node in nodes
    )


def _facts(spec: ValueSpec) -> tuple[object, ...]:
    """Returns what of a value may decide on shapes."""
    return tuple(
        (dig, tuple(leaf.shape), leaf.dtype) if isinstance(leaf, TensorSpec)
        else (dig, repr(leaf.value) if isinstance(leaf, ScalarSpec) else type(leaf))
        for dig, leaf in all_leaves(spec)
    )  # fmt: skip


def _match(captured: Frame, found: Frame, repeated: Mapping[int, Frame], specs: dict[int, ValueSpec]) -> bool:
    """Adds the values that captured nodes of a frame, and of frames below it, had in another run, by their ids.

    Returns whether an operation of a frame that ran the same ones is given another plain number.
    """
    if id(found) in repeated:
        for one, other in zip(repeated[id(found)].walk(), captured.walk(), strict=True):
            pairs = zip(one.nodes, other.nodes, strict=True)
            specs.update((id(node), specs[id(first)]) for first, node in pairs if id(first) in specs)
        return False
    known, has_other_numbers = nodes_by_key(found), False
    matched = [(node, known[key]) for node in captured.nodes if (key := node_key(node)) in known]
    for node, other_node in matched:
        specs[id(node)] = other_node.spec
        if isinstance(node, CallNode) and isinstance(other_node, CallNode):
            has_other_numbers |= _match(node.frame, other_node.frame, repeated, specs)
        elif len(matched) == len(captured.nodes):
            has_other_numbers |= _numbers(node) != _numbers(other_node)
    return has_other_numbers


def _numbers(node: Node) -> list[object]:
    found: list[object] = []
    map_leaves((node.args, node.kwargs), lambda given: found.append(given if type(given) in (int, float) else None))
    return found


def nodes_by_key(frame: Frame) -> dict[Any, Node]:
    """Returns the nodes of a frame by a key that identifies them in another run: see `node_key`."""
    found: dict[Any, Node] = {}
    for node in frame.nodes:
        if node.kind != "op" or node.site is not None:
            found.setdefault(node_key(node), node)
    return found


def _reads_by_key(frame: Frame) -> dict[Any, ValueRead]:
    return {_op_key(read.site, read.occurrence, read.composite, None): read for read in frame.value_reads}


def node_key(node: Node) -> tuple[Any, ...]:
    """Returns a key that identifies a node in its frame, also in another run: for an op, its call site."""
    if node.kind == "op":
        return _op_key(node.site, node.occurrence, node.composite, node.position)
    if node.kind == "constant":
        return node.kind, id(node)
    return node.kind, node.target, node.call_index if isinstance(node, CallNode) else 0


def _op_key(
    site: Site | None, occurrence: int | None, composite: CompositeCall | None, position: Any
) -> tuple[Any, ...]:
    steps = () if site is None else tuple((id(code), offset) for code, offset in site.steps)
    inside = None if composite is None else _op_key(composite.site, composite.occurrence, composite.outer, None)
    return steps, occurrence, inside, position
