"""Records one frame: which value belongs to which node, the nodes in order, and their names.

Integers that remember which node they came from (`Size`) keep sizes symbolic in the graphs. They live for one frame of
one capture: anywhere else they are plain numbers. What Python makes of a size (a comparison, a float, the key of a
dict) is not in the graph, so the frame notes it as a *guard*: a graph that runs in place of the module holds as long as
Python would find the same again. C code (`range(size)`, `items[:size]`, `math.log(size)`) reads a size unseen.

Names are fixed when a frame is complete. Those that the model itself uses come first (inputs, submodules, parameters,
buffers), then `output`, then the operations by the variables that hold them, then operations on sizes: the names of the
model never change. Steps of opened and fused calls come last: they do not change other names.
"""

from __future__ import annotations

import inspect
import operator
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.call_sites import Assigned
from graphpatch_notebook.capture.modules import (
    PLAIN_VALUES,
    TensorSource,
    alias,
    find_source,
    held_tensors,
    memory_of,
    plain_tensors,
    weak,
)
from graphpatch_notebook.capture.packed_weights import held_by
from graphpatch_notebook.capture.records import (
    CallNode,
    Capture,
    CompositeCall,
    Doubt,
    ElementNode,
    Frame,
    Node,
    OpNode,
    Reason,
    Ref,
    Site,
    SizeGuard,
    Structure,
    ValueRead,
    map_leaves,
    refs_in,
)
from graphpatch_notebook.paths import call_name, numbered
from graphpatch_notebook.torch_compat import is_fully_sharded
from graphpatch_notebook.values import (
    NUMBERS,
    PLAIN_TENSORS,
    ContainerSpec,
    Key,
    ScalarSpec,
    TensorSpec,
    children,
    describe,
    tensor_specs,
)

if TYPE_CHECKING:
    from graphpatch_notebook.capture.recorder import Recorder

# -- the functions that torch dispatches -------------------------------------------------------------------------------

SIZE_READS = frozenset({"shape", "size", "numel", "nelement", "nbytes", "__len__", "sym_size.int", "sym_numel.default"})
"""Calls whose results are sizes."""

VALUE_READS = frozenset(
    {
        "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "item", "tolist", "is_nonzero",
        "equal", "allclose", "numpy", "__array__",
    }
)  # fmt: skip
"""Calls that hand a value to Python: what the model does next may depend on it."""


METADATA_READS = frozenset(
    {
        "dim", "ndim", "ndimension", "stride", "storage_offset", "element_size", "itemsize", "data_ptr",
        "get_device", "_version", "output_nr", "requires_grad", "retains_grad", "__hash__", "_is_view", "dense_dim",
        "sparse_dim", "has_names", "type", "__format__", "__repr__", "__str__", "names", "get_default_dtype",
    }
)  # fmt: skip
"""Calls that return properties of a tensor, never its values."""


def function_name(func: Callable[..., Any]) -> str:
    """Returns the short, usual name of a dispatched function: `add`, `softmax`, `shape`, `getitem`.

    Example:
        >>> import torch
        >>> function_name(torch.Tensor.__getitem__), function_name(torch.Tensor.shape.__get__)
        ('getitem', 'shape')
    """
    name = raw_name(func)
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
    name = name.split(".")[0]  # an overload of an operator: `relu.default`
    return name if name.isidentifier() else "op"


def raw_name(func: Callable[..., Any]) -> str:
    """Returns the name of a dispatched function with its underscores; for a descriptor, the name of the attribute."""
    name = getattr(func, "__name__", None)
    if name == "__get__":  # an attribute read: `x.shape` arrives as the getter of the descriptor
        return str(getattr(func.__self__, "__name__", "attribute"))  # type: ignore[attr-defined]
    if name is None:
        name = getattr(func, "_qualified_op_name", "op").rsplit("::", 1)[-1].split(".")[0]
    return str(name)


def writes_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call by this (raw) name writes into its first argument, going by torch's conventions."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name.endswith("__") and name not in _NOT_IN_PLACE)
    return name.endswith("_") or kwargs.get("inplace") is True


_NOT_IN_PLACE = {"__index__", "__int__", "__invert__"}


# -- results whose size depends on values ------------------------------------------------------------------------------

PART_FUNCTIONS = frozenset({"unbind", "split", "chunk", "tensor_split"})
"""Functions that give the parts of a tensor; a loop over a tensor is one over what `unbind` gives."""

SIZED_BY_VALUES = frozenset(
    {"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "_unique2", "bincount"}
)
TRUTHS = (torch.bool, torch.uint8)
"""The dtypes of masks: as an index, such a tensor selects the entries where it is true."""


def part_count_by_values(node: Node) -> int | None:
    """Returns how many parts a tensor was split into at `node`, if that depends on values of tensors."""
    if node.op not in PART_FUNCTIONS or node.kind != "op" or not isinstance(node.spec, ContainerSpec):
        return None
    return len(node.spec.children) if comes_of_values(node) else None


def comes_of_values(node: Node) -> bool:
    """Whether the tensor that `node` is made from, as its first argument, has a shape that depends on values."""
    while (ref := next(refs_in(node.args), None)) is not None and ref.node is not node:
        node = ref.node
        if is_sized_by_values(node):
            return True
    return False


def is_sized_by_values(node: Node) -> bool:
    """Whether the size of the result of the function called at `node` depends on the values of its arguments."""
    if node.op in SIZED_BY_VALUES or (node.op == "where" and len(node.args) == 1):
        return True
    if node.op != "getitem":
        return False
    indices = (found.node.spec for found in list(refs_in(node.args))[1:])
    return any(isinstance(index, TensorSpec) and index.dtype in TRUTHS for index in indices)


def is_call_sized_by_values(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the values of `args` decide how many entries the result of a function has, going by its (raw) name."""
    if name == "__getitem__":
        found: list[Any] = []
        map_leaves(args[1], found.append)
        return any(isinstance(each, Tensor) and each.dtype in TRUTHS for each in found)
    if name == "where":
        return len(args) == 1
    return name in SIZED_BY_VALUES or (name == "repeat_interleave" and len(args) > 1 and isinstance(args[1], Tensor))


# -- sizes -------------------------------------------------------------------------------------------------------------


class Size(int):
    """A size, or what was computed from sizes."""

    owner: FrameRecorder | None
    ref: Ref | None
    capture: Capture

    def current_owner(self) -> FrameRecorder | None:
        """Returns the frame that it belongs to if that runs now; else it is used as a plain number, which is noted."""
        if self.owner is not None and self.owner.is_current:
            return self.owner
        self.capture.has_escaped_sizes = True
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return (int, (plain(self),))

    def __copy__(self) -> int:
        return plain(self)

    def __deepcopy__(self, memo: Any) -> int:
        return plain(self)


plain = int.__index__
"""Returns the plain number of a size."""


_OPERATIONS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in "add sub mul floordiv mod truediv pow eq ne lt le gt ge neg".split()
}
"""What is recorded, if its result is a size; else a graph checks that the result is the same."""

_READS = "and or xor lshift rshift divmod abs ceil float floor hash int invert pos round trunc format repr".split()
"""What uses a size as a plain number, which a graph then holds as a constant."""


def _method(name: str, func: Callable[..., Any] | None, *, is_reflected: bool = False) -> Callable[..., Any]:
    of_int = getattr(int, name)

    def method(self: Size, *others: Any) -> Any:
        result = of_int(self, *others)
        # Python goes on with the plain number; so does torch, but not its function modes, which see the call.
        is_fixed = func is None or (result is NotImplemented and isinstance(others[0], (float, list, tuple, str)))
        if (result is NotImplemented and not is_fixed) or (owner := self.current_owner()) is None:
            return result
        operands = (*others, self) if is_reflected else (self, *others)
        if is_fixed or func is None:
            owner.guard_size(None, (self,), plain(self))
        elif type(result) is int:
            return owner.record_size(func, operands, result)
        else:
            owner.guard_size(func, operands, result)
        return result

    return method


for _name, _func in (*_OPERATIONS.items(), ("bool", operator.truth), *((name, None) for name in _READS)):
    setattr(Size, f"__{_name}__", _method(f"__{_name}__", _func))
    if hasattr(int, f"__r{_name}__"):
        setattr(Size, f"__r{_name}__", _method(f"__r{_name}__", _func, is_reflected=True))
for _name in ("bit_length", "bit_count", "to_bytes"):
    if hasattr(int, _name):
        setattr(Size, _name, _method(_name, None))


# -- frames ------------------------------------------------------------------------------------------------------------


# Not a range or a slice, which may hold sizes that were computed.
_WITHOUT_A_NODE = (
    *NUMBERS, str, bytes, type(None), type(Ellipsis), type, Module,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator,
)  # fmt: skip
_EMPTY = inspect.Parameter.empty


class FrameRecorder:
    """The frame being recorded: its record, and for each live value the node that it came from."""

    def __init__(self, record: Frame, recorder: Recorder) -> None:
        self.record = record
        self.recorder = recorder
        self.wants_ops = True
        is_inside = bool(recorder.stack) and recorder.stack[-1].gathers_weights
        self.gathers_weights: bool = is_inside or is_fully_sharded(record.module)
        self._switches = _switches()
        self.composite: CompositeCall | None = None
        self._values: dict[int, tuple[Callable[[], Any], Ref]] = {}
        self._occurrences: dict[Site, int] = {}
        self._calls: dict[int, int] = {}
        self._sizes: list[Size] = []

    @property
    def is_current(self) -> bool:
        """Whether this is the innermost frame that runs at this moment."""
        return bool(self.recorder.stack) and self.recorder.stack[-1] is self

    def close(self) -> None:
        """Drops the values. Sizes that the model keeps somewhere become plain numbers."""
        self._values.clear()
        for size in self._sizes:
            size.owner = size.ref = None  # its frame is over, and must not stay alive
        self._sizes.clear()

    def _size(self, value: int, ref: Ref) -> Size:
        size = int.__new__(Size, value)
        size.owner, size.ref, size.capture = self, ref, self.record.capture
        self._sizes.append(size)
        return size

    # -- which value belongs to which node -----------------------------------------------------------------------------

    def has_node_of(self, value: Any) -> bool:
        """Whether this object is the value of a node."""
        return self._lookup(value) is not None

    def alias_of(self, value: Tensor) -> Tensor:
        """Returns an alias of a tensor that a call received and returned, to distinguish the two values.

        The model's own tensors stay: code may put back what it gets (`self.table = self.table.to(device)`).
        """
        return value if self.recorder.held.get(id(value)) is value else alias(value)

    def node_of(self, value: Any) -> Node | None:
        """Returns the node whose value is this object, not a part of its value."""
        ref = self._lookup(value)
        return ref.node if ref is not None and not ref.dig else None

    def _lookup(self, value: Any) -> Ref | None:
        known = self._values.get(id(value))
        # A new object may have the id of an object that was freed.
        return known[1] if known is not None and known[0]() is value else None

    def register(self, value: Any, node: Node, dig: tuple[Key, ...] = ()) -> None:
        """Notes that `value`, and what it contains, comes from `node`."""
        if isinstance(value, Tensor):
            if node.kind == "input" and (other := self._lookup(value)) is not None:
                same = ((other.node.target, other.dig), (node.target, dig))
                self.record.conditions.same_inputs += (same,)
            self._values[id(value)] = (weakref.ref(value), Ref(node, dig))
            self._own(value, node)
            return
        if isinstance(value, _WITHOUT_A_NODE) and type(value) is not Size:
            return
        # Containers and objects are held for the length of the frame: many of them cannot be referenced weakly.
        self._values[id(value)] = ((lambda: value), Ref(node, dig))
        for key, child in children(value) or ():
            self.register(child, node, (*dig, key))

    def _own(self, value: Any, node: Node) -> None:
        """Notes which memory the value of `node` uses."""
        if isinstance(value, Tensor):
            if (memory := memory_of(value)) is not None:
                self.recorder.owners.setdefault(memory, []).append(node)
                node.is_mutated_later |= memory in self.recorder.freed_later
            return
        for _, child in children(value) or ():
            self._own(child, node)

    def refs(self, value: Any) -> Any:
        """Returns arguments with a `Ref` in place of each value that has a node."""
        if type(value) is not tuple:
            return map_leaves(value, self._ref)
        found = []  # the same, faster: these are the arguments of all calls
        for item in value:
            if type(item) not in PLAIN_VALUES:
                item = self._ref(item) if type(item) in PLAIN_TENSORS else map_leaves(item, self._ref)  # noqa: PLW2901
            found.append(item)
        return tuple(found)

    def _ref(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._lookup(leaf) or self._tensor_from_elsewhere(leaf)
        if type(leaf) is Size:
            return leaf.ref if leaf.owner is self else self._lookup(leaf) or self._size_from_elsewhere(leaf)
        if isinstance(leaf, _WITHOUT_A_NODE) or (callable(leaf) and not getattr(leaf, "__closure__", None)):
            return leaf
        known, inside = self._lookup(leaf), children(leaf)
        if known is not None and (inside is None or self._is_unchanged(known, inside)):
            return known
        if inside is not None:
            return Structure(type(leaf), tuple((key, self.refs(child)) for key, child in inside))
        return self._object_from_elsewhere(leaf)

    def _size_from_elsewhere(self, size: Size) -> int:
        self.record.capture.has_escaped_sizes = True
        return plain(size)

    def _is_unchanged(self, known: Ref, inside: list[tuple[Key, Any]]) -> bool:
        """Whether a container is unchanged since it was recorded: models assign into a child's output."""
        return all(
            self._lookup(child) == Ref(known.node, (*known.dig, key))
            for key, child in inside
            if isinstance(child, Tensor)
        )

    def _tensor_from_elsewhere(self, tensor: Tensor) -> Ref:
        source = find_source(self.record.module, tensor)
        if source is not None:
            node = _held_node(self.record.module, source, tensor)
            self.recorder.held[id(tensor)] = tensor
        else:
            callers = self.recorder.stack[:-1]
            node = Node(
                kind="constant", op="constant", target=weakref.ref(tensor), spec=describe(tensor), is_live=False,
                base_name="constant", is_of_caller=any(each.node_of(tensor) is not None for each in callers),
            )  # fmt: skip
        if node.kind == "parameter" and self.gathers_weights:
            self.recorder.freed_later.add(memory_of(tensor) or 0)
        self.record.nodes.append(node)
        self.register(tensor, node)
        return Ref(node)

    def _object_from_elsewhere(self, value: Any) -> Ref:
        name = type(value).__name__
        self.doubt(Reason.USES_OBJECT, name)
        node = Node(
            kind="constant", op=name, target=weak(value), spec=describe(value), is_live=False, base_name="constant"
        )
        self.record.nodes.append(node)
        self.register(value, node)
        return Ref(node)

    def notice_switches(self) -> None:
        """Notes a doubt if the frame's code switched a mode, which torch functions do not show."""
        if _switches() != self._switches:
            self.doubt(Reason.SWITCHES_MODES)

    def doubt(self, reason: Reason, what: str = "", line: str = "") -> None:
        """Notes a reason why the graph may not do what the module does."""
        if (doubt := Doubt(reason, what, line)) not in self.record.doubts:
            self.record.doubts.append(doubt)

    def pass_through(self, value: Any, result: Any) -> None:
        """Notes that `result` is `value` on another device: the code that moves it is not part of the model."""
        ref = self._lookup(value)
        if ref is not None and isinstance(result, Tensor):
            self.register(result, ref.node, ref.dig)

    # -- inputs and output ---------------------------------------------------------------------------------------------

    def add_inputs(self, bound: dict[str, Any]) -> dict[str, Any]:
        """Adds a node for each parameter of `forward`; returns the values that `forward` gets in place of others."""
        others: dict[str, Any] = {}
        for parameter in self.record.parameters:
            default = None if parameter.default is _EMPTY else parameter.default
            value = bound.get(parameter.name, default)
            node = Node.named("input", parameter.name, describe(value))
            self.record.nodes.append(node)
            if parameter.name in bound:
                own = self._own_sizes(value, node, ())
                if own is not value:
                    others[parameter.name] = own
                self.register(own, node)
        return others

    def _own_sizes(self, value: Any, node: Node, dig: tuple[Key, ...]) -> Any:
        """Returns `value` with sizes that belong to this frame in place of those of the calling frame."""
        if type(value) is Size:
            return self._size(plain(value), Ref(node, dig))
        if type(value) in (tuple, list, torch.Size) and any(type(item) is Size for item in value):
            return type(value)([self._own_sizes(item, node, (*dig, i)) for i, item in enumerate(value)])
        return value

    def add_output(self, output: Any) -> None:
        """Adds the output node."""
        if self.record.custom_graph is None:
            self.record.output = self.refs(output)
        self._append_output(output)

    def _append_output(self, output: Any) -> None:
        node = Node.named("output", "output", describe(output))
        self.record.nodes.append(node)
        self._own(output, node)

    def make_opaque(self, output: Any) -> None:
        """Leaves the boundary of the frame only: inputs, held tensors, submodule calls, output."""
        record = self.record
        boundary = [node for node in record.nodes if node.kind == "input"]
        for source, tensor in held_tensors(record.module):
            node = _held_node(record.module, source, tensor)
            node.is_mutated_later = source.kind == "parameter" and self.gathers_weights
            boundary.append(node)
        boundary += record.calls()
        record.nodes = boundary
        record.output = None
        self._append_output(output)

    # -- ops and calls -------------------------------------------------------------------------------------------------

    def count(self, site: Site) -> int:
        """Returns how often `site` ran before in this frame, and counts this run."""
        before = self._occurrences.get(site, 0)
        self._occurrences[site] = before + 1
        return before

    @contextmanager
    def inside(self, call: CompositeCall) -> Iterator[None]:
        """Records the ops in the block as steps of `call`; the occurrences of their call sites start at zero."""
        outside = self.composite, self._occurrences
        self.composite, self._occurrences = call, {}
        try:
            yield
        finally:
            self.composite, self._occurrences = outside

    def add_call(self, node: CallNode) -> None:
        """Adds a call of a submodule."""
        key = id(node.frame.module)
        node.call_index = self._calls.get(key, 0)
        self._calls[key] = node.call_index + 1
        self.record.nodes.append(node)

    def forget(self, call: CallNode) -> None:
        """Removes the record of a call that raised an error: its frame is not complete."""
        self.record.nodes.remove(call)
        self.doubt(Reason.HANDLES_ERROR, str(call.target))

    def forget_old_owners(self, arguments: Any, result: Any) -> None:
        """Notes that the memory of a new tensor, which the arguments do not share, left its old owners."""
        owners, freed = self.recorder.owners, self.recorder.freed_later
        if type(result) in PLAIN_TENSORS and (memory := memory_of(result)) not in owners and memory not in freed:
            return
        used = {memory for memory in map(memory_of, plain_tensors(result)) if memory in owners or memory in freed}
        for memory in used.difference(map(memory_of, plain_tensors(arguments) if used else ())):
            owners.pop(memory, None)
            freed.discard(memory)

    def add_op(self, node: OpNode, name: str, result: Any, wrote: list[Tensor], variable: Assigned) -> Any:
        """Adds an op with its result, and returns the value that the model continues with.

        `wrote` are the tensors that it wrote into; the value of an in-place operation is the first of them.
        """
        node.base_name = variable if isinstance(variable, str) else node.op.rstrip("_") or node.op
        self.notice_switches()
        for tensor in wrote:
            self._mark_mutated(tensor)
        if (wrote or result is None) and _is_on_parameter(node):
            self.doubt(Reason.WRITES_PARAMETER, node.op)  # a graph that ran on trial would do so, too
        if node.is_in_place:
            node.spec = describe(wrote[0])
            self._append(node, wrote[0])
            return result
        if isinstance(result, Tensor):
            if self._lookup(result) is not None:
                result = self.alias_of(result)
            node.spec = describe(result)
            self._append(node, result)
            return result
        if name in SIZE_READS:
            return self._add_size_read(node, result, variable)
        if name in VALUE_READS:
            if node.site is not None:
                read = ValueRead(node.site, node.occurrence, node.composite, _kept(result))
                self.record.value_reads.append(read)
            line = str(node.site.source_lines()[-1].text) if node.site else ""
            self.doubt(Reason.READS_VALUE, node.op, line)
        if not _is_recorded(name, result):
            return result
        node.spec = describe(result)
        node.is_size = result is None
        if part_count_by_values(node) is not None:
            self.doubt(Reason.COUNTS_PARTS, node.op)
        self._append(node, result)
        if isinstance(node.spec, ContainerSpec) and isinstance(variable, tuple):
            self._add_elements(node, result, variable)
        return result

    def _append(self, node: Node, value: Any) -> None:
        self.record.nodes.append(node)
        self.register(value, node)

    def _mark_mutated(self, tensor: Tensor) -> None:
        """Marks the nodes whose values change with `tensor`: those that use its memory, in any frame."""
        for node in self.recorder.owners.get(memory_of(tensor) or 0, ()):
            node.is_mutated_later = True
        if tensor._is_view():
            for frame in self.recorder.stack:
                if (ref := frame._lookup(tensor)) is not None:
                    ref.node.is_view_filled_later = True

    def _add_size_read(self, node: OpNode, result: Any, variable: Assigned) -> Any:
        node.spec = describe(result)
        node.is_size = True
        self.record.nodes.append(node)
        if isinstance(result, int):
            result = self._size(result, Ref(node))
        else:
            result = torch.Size([self._size(size, Ref(node, (i,))) for i, size in enumerate(result)])
        if isinstance(variable, tuple):
            self._add_elements(node, result, variable)
        return result

    def _add_elements(self, node: OpNode, result: Any, variables: tuple[str | None, ...]) -> None:
        """Adds a node for each value that the user's code unpacked into a variable of its own."""
        if len(variables) != len(result):
            return
        for position, (variable, value) in enumerate(zip(variables, result, strict=True)):
            is_value = isinstance(value, Tensor) or type(value) is Size
            if variable is None or not is_value:
                continue
            element = ElementNode(
                op=node.op, target=node.target, spec=describe(value), base_name=variable, whole=node, position=position,
                is_size=node.is_size, site=node.site, occurrence=node.occurrence, composite=node.composite,
            )  # fmt: skip
            self.record.nodes.append(element)
            if type(value) is Size:
                value.ref = Ref(element)
            else:
                self.register(value, element)
        node.is_size = True

    def guard_size(self, func: Callable[..., Any] | None, operands: tuple[Any, ...], result: Any) -> None:
        """Notes what Python found out about sizes: a graph holds as long as it would find the same."""
        guard = SizeGuard(func, self.refs(operands), result)
        if guard not in self.record.size_guards:
            self.record.size_guards.append(guard)

    def record_size(self, func: Callable[..., Any], operands: tuple[Any, ...], result: int) -> Any:
        """Records arithmetic on sizes."""
        variable = call_sites.result_variable(call_sites.caller(1), func.__name__)
        node = OpNode(
            op=func.__name__, target=func, args=self.refs(operands), spec=ScalarSpec(result),
            base_name=variable if isinstance(variable, str) else func.__name__, is_size=True, is_live=False,
            composite=self.composite,
        )  # fmt: skip
        self.record.nodes.append(node)
        return self._size(result, Ref(node))


def _held_node(module: Module, source: TensorSource, tensor: Tensor) -> Node:
    """Returns the node of a tensor that `module` holds; for a packed weight, of the weight that it represents."""
    packed = held_by(module, source.attribute_path)
    spec = describe(tensor) if packed is None else packed[0].spec(packed[1])
    return Node.named(source.kind, source.attribute_path, spec)


def _switches() -> tuple[bool, ...]:
    """Returns the modes of torch that torch functions do not show."""
    return torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), torch.is_inference_mode_enabled()


def _is_on_parameter(node: Node) -> bool:
    first = node.args[0] if node.args else next(iter(node.kwargs.values()), None)
    return isinstance(first, Ref) and first.node.kind == "parameter"


def _kept(value: Any) -> Any:
    """Returns a value that was read into Python, if it is a number or a short list of numbers."""
    is_short = type(value) is list and len(value) <= _SHORT and all(type(item) in _NUMBERS for item in value)
    return list(value) if is_short else value if type(value) in _NUMBERS else None


_NUMBERS = (bool, int, float)
_SHORT = 256


def _is_recorded(name: str, result: Any) -> bool:
    if result is None:  # done for its side effect, such as switching gradients off
        return True
    if isinstance(result, NUMBERS):
        return (name not in METADATA_READS and not name.startswith("is_")) or name in VALUE_READS
    inside = children(result)
    return inside is not None and any(isinstance(child, Tensor) or children(child) for _, child in inside)


# -- names -------------------------------------------------------------------------------------------------------------

_RANKS = {"input": 0, "call": 1, "parameter": 2, "buffer": 2, "attribute": 2, "output": 3, "constant": 4, "op": 4}
SIZE_PREFIX = "size_"


def name_nodes(frame: Frame, size_prefix: str = SIZE_PREFIX) -> None:
    """Fixes `Node.name` of every node of `frame` (with `size_prefix`, if it carries sizes), and fills `frame.names`."""
    frame.names.clear()
    numbers = _number_calls(frame)
    # Each numbering continues where it stopped: counting from one each time takes minutes in a loop of 50,000 ops.
    numberings: dict[str, Iterator[str]] = {}
    for node in sorted(frame.nodes, key=_rank):  # a stable sort: execution order within a rank
        if not node.name:
            node.name = base = _base(node, size_prefix, numbers)
            if base in frame.names:
                numbering = numberings.get(base) or numberings.setdefault(base, numbered(base))
                while node.name in frame.names:
                    node.name = next(numbering)
        frame.names[node.name] = node
    frame.names.update({call.name: call for _, call in frame.splices})


def _rank(node: Node) -> int:
    rank = 5 if node.is_size else _RANKS[node.kind]
    return rank if node.composite is None else 6 + node.is_size


def _base(node: Node, size_prefix: str, numbers: Mapping[int, int]) -> str:
    base = node.base_name or node.op
    if isinstance(node, CallNode):
        base = call_name(base)
        return f"{base}_{numbers[id(node)]}" if node.call_count > 1 else base
    if node.kind in ("parameter", "buffer", "attribute"):
        return base.replace(".", "_")
    is_plain = isinstance(node.spec, ScalarSpec) or getattr(node.spec, "type", None) is torch.Size
    return f"{size_prefix}{base}" if node.is_size and (is_plain or not tensor_specs(node.spec)) else base


def _number_calls(frame: Frame) -> dict[int, int]:
    """Counts the calls of each module, and returns their numbers in names, by the ids of their nodes."""
    by_module: dict[int, list[CallNode]] = {}
    for node in frame.calls():
        by_module.setdefault(id(node.frame.module), []).append(node)
    numbers = {}
    for nodes in by_module.values():
        # An attempt that raised leaves a gap, but still was the call with that number.
        count = max(len(nodes), nodes[-1].call_index + 1)
        for node in nodes:
            node.call_count, numbers[id(node)] = count, node.call_index
        if count > 1:
            _order_by_reads(nodes, numbers)
    return numbers


def _order_by_reads(nodes: Sequence[CallNode], numbers: dict[int, int]) -> None:
    """Orders the calls of one line that only their texts, buffers and numbers tell apart by these.

    Loops over sets of texts (`for layer_type in set(config.layer_types)`) run in another order in each process.
    """
    by_line: dict[Site | None, list[CallNode]] = {}
    for node in nodes:
        by_line.setdefault(node.site, []).append(node)
    for calls in by_line.values():
        texts, held, computed = zip(*map(_given, calls), strict=True)
        keys = texts if len(set(computed)) > 1 else [*zip(texts, held, strict=True)]
        if len(set(keys)) == len(calls) > 1:
            ordered = sorted(range(len(calls)), key=keys.__getitem__)
            places = [numbers[id(node)] for node in calls]
            numbers.update({id(calls[number]): place for number, place in zip(ordered, places, strict=True)})


def _given(call: CallNode) -> tuple[tuple[str, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Returns what a call is given: its texts, what the module holds (by name) with its numbers, and other values."""
    values = (*call.args, *call.kwargs.values())
    own = [value for value in values if isinstance(value, Ref) and value.node.kind in ("parameter", "buffer")]
    names = tuple(re.sub(r"\d+", lambda found: found[0].zfill(9), ref.node.target) for ref in own)
    numbers = tuple(value for value in values if isinstance(value, (bool, int, float)))
    texts = tuple(value for value in values if isinstance(value, str))
    return texts, (names, numbers), tuple(ref for ref in call.sources if ref not in own)
