"""Runs of a captured model at other sizes, on the meta device, which computes shapes only.

A copy of the model runs, so that its code writes into the copy; weights take no memory there. If the code reads a
value into Python, it reads the captured value; if a size depends on values, it is the captured size.

Calls of modules that ran the same operations on values of the same shapes at capture, such as the layers of a
transformer, run once: a run costs as much as one layer, however deep the model is.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from graphpatch_notebook.capture.held_values import OF_EACH_MODULE, mutable_containers, reachable_modules
from graphpatch_notebook.capture.inputs import call_like, value_like
from graphpatch_notebook.capture.observers import innermost_forward
from graphpatch_notebook.capture.records import CallNode, CompositeCall, Frame, Node, Site, ValueRead, map_leaves
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.patching.model_state import owner_of
from graphpatch_notebook.patching.sharding import (
    communicates,
    drop_machinery,
    is_parallel_machinery,
    note_whole_tensors,
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
    tensor_specs,
)

InputShapes: TypeAlias = "Sequence[Sequence[int]]"
"""The shapes of the tensors among the inputs of the root, in order, and then the whole numbers among them."""

KindOf: TypeAlias = "Callable[[Frame], object]"
"""Returns what is equal of frames that run once for all of them: see `kind_of`."""

_MOST_TIMES_AS_MANY_OPS = 4
"""How many times as many ops as the capture a run may have: loops over a sequence have more of them when it is long."""


class MetaRunError(Exception):
    """The model cannot run without its values, or not at these sizes (caught inside the package)."""


@dataclass(frozen=True, slots=True)
class Variation:
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
