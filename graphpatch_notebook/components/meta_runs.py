"""Runs of a captured model at other sizes, on the meta device, which computes shapes only.

A copy of the model runs, so that its code writes into the copy; weights take no memory there. If the code reads a
value into Python, it reads the captured value; if a size depends on values, it is the captured size.
"""

from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

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
from graphpatch_notebook.capture.frame_recorder import VALUE_READS
from graphpatch_notebook.capture.held_values import reachable_modules
from graphpatch_notebook.capture.inputs import call_like
from graphpatch_notebook.capture.observers import innermost_forward
from graphpatch_notebook.capture.records import CallNode, CompositeCall, Frame, Node, Site, ValueRead
from graphpatch_notebook.options import ExtractionOptions
from graphpatch_notebook.patching.model_state import owner_of
from graphpatch_notebook.patching.sharding import (
    communicates,
    drop_machinery,
    is_parallel_machinery,
    note_whole_tensors,
)
from graphpatch_notebook.values import ContainerSpec, ScalarSpec, TensorSpec, ValueSpec, leaves

InputShapes: TypeAlias = "Sequence[Sequence[int]]"
"""The shapes of the tensors among the inputs of the root, in order, and then the whole numbers among them."""

_MOST_TIMES_AS_MANY_OPS = 4
"""How many times as many ops as the capture a run may have: loops over a sequence have more of them when it is long."""


class MetaRunError(Exception):
    """The model cannot run without its values, or not at these sizes (caught inside the package)."""


@dataclass(frozen=True, slots=True)
class Variation:
    """How a run differs from the capture.

    Attributes:
        shapes: The shapes of the inputs.
        more_entries: How many more entries than in the capture there are wherever values decide on their number.
        more: By how much whole numbers that are read into Python are larger than in the capture.
        flipped: What the example gave to the one flag that is given the other way round.
    """

    shapes: InputShapes
    more_entries: int = 0
    more: int = 0
    flipped: ScalarSpec | None = None


def recorded_on_meta(root: Frame, variation: Variation) -> Frame:
    """Returns the record of a run of the captured model.

    Raises:
        MetaRunError: The model cannot run like that.
    """
    if communicates(root):  # a copy shares the hooks that do it, and their state
        raise MetaRunError("the model exchanges tensors with other processes")
    result: list[Frame] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            result.append(_run(root, variation))
        except BaseException as failure:
            failures.append(failure)

    # A new thread does not have the modes and contexts of the caller, which may be patching.
    thread = threading.Thread(target=run, name="graphpatch-sizes", daemon=True)
    thread.start()
    thread.join()
    if failures and not isinstance(failures[0], Exception):  # of the model's code, which asks Python to exit
        raise failures[0]
    if failures:
        raise MetaRunError(f"{type(failures[0]).__name__}: {failures[0]}") from failures[0]
    return result[0]


def _run(root: Frame, variation: Variation) -> Frame:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model, copies = _copied(root)
        for frame in root.walk():
            if id(frame.module) in copies:  # not a module that the forward itself made
                copies[id(frame.module)].training = frame.conditions.training
        specs = [leaf for leaf in _input_leaves(root) if isinstance(leaf, TensorSpec)]
        tensors, numbers = iter(variation.shapes[: len(specs)]), iter(variation.shapes[len(specs) :])
        flipped = variation.flipped
        args, kwargs = call_like(
            root,
            lambda _, spec: torch.empty(tuple(next(tensors)), dtype=spec.dtype, device=META),
            lambda spec: next(numbers)[0] if _is_size(spec) else not spec.value if spec is flipped else spec.value,
        )
        with OnMeta(specs[0].device if specs else torch.device("cpu")):
            return record(_MetaRecorder(model, root, variation), args, kwargs)


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
    for module in reachable_modules(root.module):
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            memo[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if _is_machinery(hook))
        for backward in (module._backward_hooks, module._backward_pre_hooks):
            memo[id(backward)] = OrderedDict()
        note_whole_tensors(memo, module, META)
        if packing_of(module) is not None:
            memo[id(module.weight)] = Parameter(torch.empty(0, device=META))  # its class does not support meta tensors
    classes = {type(module) for module in reachable_modules(root.module)}
    unnamed = [kind for kind in classes if "__slotnames__" not in vars(kind)]
    with _Weightless():
        model = copy.deepcopy(root.module, memo)
    for module in reachable_modules(root.module):
        if isinstance(copied := memo.get(id(module)), Module):
            drop_machinery(copied)
    for kind in unnamed:  # `copyreg` leaves a cache on the classes that it copies objects of
        if "__slotnames__" in vars(kind):
            delattr(kind, "__slotnames__")
    for module in reachable_modules(root.module):
        if (packing := packing_of(module)) is not None:  # its own kernels work on values
            spec, twin = packing.spec(module), memo[id(module)]
            name = innermost_forward(twin)
            weight, forward = torch.empty(spec.shape, dtype=spec.dtype, device=META), getattr(twin, name)
            twin.__dict__[name] = functools.update_wrapper(packing.bound(twin, weight, forward), forward)
    return model, memo


def _is_machinery(hook: Callable[..., Any]) -> bool:
    """Whether a hook belongs to how the model works: users' hooks do not run without values."""
    return owner_of(hook) in ("library", "collecting") and not is_parallel_machinery(hook)


# -- the run -----------------------------------------------------------------------------------------------------------


class _MetaRecorder(Recorder):
    """Records a run in which values that are read into Python are those of the capture."""

    def __init__(self, model: Module, captured: Frame, variation: Variation) -> None:
        options = captured.capture.options or ExtractionOptions()
        super().__init__(model, replace(options, custom_extraction_functions={}, error_on_compilation_failure=False))
        self.count = None
        self._root = captured
        self._variation = variation
        self._indices: dict[Any, dict[Any, Any]] = {}
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
            read = self._captured(place, _reads_by_key)
            if read is None or read.value is None:
                raise MetaRunError(f"the model reads a value into Python ({name})")
            return read.value + self._variation.more if type(read.value) is int else read.value
        node = self._captured(place, nodes_by_key) if self._is_any_sized_by_values else None
        if node is not None and is_sized_by_values(node) and not has_values(args):
            return result_of_size(func, name, args, kwargs, _count(node) + self._variation.more_entries)
        return func(*args, **kwargs)

    def _captured(self, place: OpPlace, by_key: Callable[[Frame], dict[Any, Any]]) -> Any:
        """Returns the record of the next call; in an additional iteration, the record of the last one captured."""
        frame, (site, occurrence) = self._frame(self.stack[-1].record), place
        if frame is None or site is None or occurrence is None:
            return None
        known, inside = self._index(frame, by_key), self.stack[-1].composite
        keys = (_op_key(site, number, inside, None) for number in range(occurrence, -1, -1))
        return next((known[key] for key in keys if key in known), None)

    def _frame(self, record: Frame) -> Frame | None:
        call = record.call
        if record.parent is None or call is None:
            return self._root
        above = self._frame(record.parent)
        known = {} if above is None else self._index(above, nodes_by_key)
        keys = ((call.kind, call.target, number) for number in range(call.call_index, -1, -1))
        return next((known[key].frame for key in keys if key in known), None)

    def _index(self, frame: Frame, by_key: Callable[[Frame], dict[Any, Any]]) -> dict[Any, Any]:
        known = self._indices.get((id(frame), by_key))
        if known is None:
            known = self._indices[id(frame), by_key] = by_key(frame)
        return known


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


def matched(captured: Frame, found: Frame) -> dict[int, ValueSpec]:
    """Returns the values that captured nodes of a frame, and of frames below it, had in another run, by their ids."""
    known, result = nodes_by_key(found), {}
    for node in captured.nodes:
        other = known.get(node_key(node))
        if other is not None:
            result[id(node)] = other.spec
            if isinstance(node, CallNode) and isinstance(other, CallNode):
                result |= matched(node.frame, other.frame)
    return result


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
