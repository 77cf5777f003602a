"""Builds the `fx.Graph` of a frame from its record, and connects records as a graph connects its nodes.

    Frame.parameters   ->  placeholder       named as in `forward`, defaults kept
    parameter, ...     ->  get_attr          self.weight
    op                 ->  call_function, call_method
    call               ->  call_module       a graph module: self.h, getattr(self.h, "3"), ...
    element, Ref.dig   ->  getitem, getattr
    Structure          ->  call_function     of a `Container`
    other objects      ->  get_attr          self._constant_0

The fx node of a record has it as `meta["graphpatch_node"]`. Its fx name is a Python identifier close to the name that
users know, which is that of the record.
"""

from __future__ import annotations

import builtins
import inspect
import operator
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, fx
from torch.fx.graph import CodeGen

from graphpatch_notebook.capture.custom_graphs import map_arguments
from graphpatch_notebook.capture.frame_recorder import function_name
from graphpatch_notebook.capture.records import (
    RECORD,
    CallNode,
    ElementNode,
    Frame,
    InputParameter,
    Node,
    OpNode,
    Ref,
    Structure,
    at_keys,
    map_leaves,
    refs_in,
)
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import is_overload
from graphpatch_notebook.values import (
    NUMBERS,
    ContainerSpec,
    Key,
    ScalarSpec,
    TensorSpec,
    ValueSpec,
    rebuilt,
    spec_at,
    take,
)

OWNER_NAMES = ("self", "this", "graph_module", "graph_module_")
"""What generated code calls the graph module: the first name that no parameter of `forward` has."""

AUXILIARY = "graphpatch_auxiliary"
"""The key in `fx.Node.meta` that marks nodes without a record: containers, and values that are read from them."""

_EMPTY = inspect.Parameter.empty
_PRINTABLE = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

_LITERALS = (bool, int, str, bytes, type(None), type(Ellipsis))


class Targets(Protocol):
    """The names by which the code of a frame's graph module refers to modules and tensors outside the graph."""

    def of_call(self, node: CallNode) -> str:
        """Returns the attribute path of the graph module that a call node calls."""

    def of_attribute(self, path: str) -> str:
        """Returns the attribute path of the tensor or module that the user's module has at `path`."""


@dataclass(slots=True)
class BuiltGraph:
    """A graph, and the values of its `get_attr` nodes called `_constant_0`, `_constant_1`, ...

    A constant is a function that returns the object: tensors that nobody owns are held weakly.
    """

    graph: fx.Graph
    constants: dict[str, Callable[[], Any]] = field(default_factory=dict)


def build(frame: Frame, targets: Targets) -> BuiltGraph:
    """Returns the graph of `frame`, or raises a `GraphError` if it is opaque."""
    if frame.opaque_reason is not None:
        where = format_path(frame.path) or "the root"
        raise GraphError(f"{where} has no graph ({type(frame.module).__name__}): {frame.opaque_reason}")
    if frame.custom_graph is not None:
        return BuiltGraph(frame.custom_graph)
    return _GraphBuilder(frame, targets).build()


def records(graph: fx.Graph) -> dict[str, fx.Node]:
    """Returns the fx nodes of a graph by their names in node paths."""
    return {node.meta[RECORD].name: node for node in graph.nodes if RECORD in node.meta}


class _GraphBuilder:
    def __init__(self, frame: Frame, targets: Targets) -> None:
        self.frame = frame
        self.targets = targets
        self.graph = fx.Graph()
        self.constants: dict[str, Callable[[], Any]] = {}
        self.values: dict[tuple[Node, tuple[Key, ...]], fx.Node] = {}
        self.digs = _digs(frame)
        self.objects: dict[int, fx.Node] = {}
        self.parameter_names = {parameter.name for parameter in frame.parameters}

    def build(self) -> BuiltGraph:
        by_name = {node.target: node for node in self.frame.nodes if node.kind == "input"}
        codegen = ForwardCodeGen(self.frame.parameters)
        for parameter in self.frame.parameters:
            self._add_placeholder(parameter, by_name.get(parameter.name), codegen)
        if codegen.is_needed:
            self.graph.set_codegen(codegen)
        for node in self.frame.graph_nodes:
            if node.kind == "output":
                fx_node = self.graph.output(self._output(self.frame.output, node.spec))
                fx_node.meta[RECORD] = node
            elif node.kind != "input":
                self._add(node)
        for fx_node in self.graph.nodes:
            if RECORD not in fx_node.meta:
                fx_node.meta[AUXILIARY] = True
        return BuiltGraph(self.graph, self.constants)

    def _add_placeholder(self, parameter: InputParameter, node: Node | None, codegen: ForwardCodeGen) -> None:
        default = () if parameter.default is _EMPTY else (codegen.default(parameter),)
        is_tensor = node is not None and isinstance(node.spec, TensorSpec) and node.spec.type_name == "Tensor"
        fx_node = self.graph.create_node(
            "placeholder",
            parameter.starred_name,
            default,
            name=identifier(parameter.name),
            type_expr=Tensor if is_tensor else None,
        )
        if node is not None:
            self._register(node, fx_node)

    def _register(self, node: Node, fx_node: fx.Node) -> None:
        fx_node.meta[RECORD] = node
        if node.name in self.frame.example_values:
            fx_node.meta["val"] = self.frame.example_values[node.name]
        # The value of `x[i] = v` as a record is `x`, which has just been written into.
        self.values[node, ()] = self._written(node) or fx_node
        # Read at once: the model may write something else there later.
        for dig in self.digs.get(node, ()):
            self._dug(node, dig)

    def _written(self, node: Node) -> fx.Node | None:
        """Returns the node of the tensor into which an op without a result wrote."""
        is_silent = getattr(node.target, "__name__", "") in ("__setitem__", "__set__", "__iset__")
        if not node.is_in_place or not (is_silent or is_overload(node.target)):
            return None
        wrote = node.written_of(node.args, node.kwargs)
        return self._ref(wrote) if isinstance(wrote, Ref) else None

    def _add(self, node: Node) -> None:
        name = identifier(node.name)
        if isinstance(node, ElementNode):
            parent, position = node.whole, node.position
            fx_node = self.graph.create_node(
                "call_function", operator.getitem, (self.values[parent, ()], position), name=name
            )
        elif isinstance(node, CallNode):
            args, kwargs = self._arguments(node)
            fx_node = self.graph.create_node("call_module", self.targets.of_call(node), args, kwargs, name)
        elif node.kind == "op":
            fx_node = self._add_op(node, name)
        elif node.kind == "constant":
            fx_node = self.graph.create_node("get_attr", self._constant(node.target), name=name)
        else:
            fx_node = self.graph.create_node("get_attr", self.targets.of_attribute(node.target), name=name)
        self._register(node, fx_node)

    def _add_op(self, node: Node, name: str) -> fx.Node:
        args, kwargs = self._arguments(node)
        call = written(node.target, tuple(map(_operand, node.args)), bool(node.kwargs))
        if call.order is not None:
            args = tuple(args[part] if isinstance(part, int) else part for part in call.order)
        return self.graph.create_node(call.op, call.target, args, kwargs, name)

    def _arguments(self, node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(self._value, node.args)), {key: self._value(value) for key, value in node.kwargs.items()}

    def _output(self, value: Any, spec: ValueSpec | None) -> Any:
        """Returns the recorded output as the graph holds it; a `torch.Size` is recorded as a tuple of its sizes."""
        if not isinstance(spec, ContainerSpec) or type(value) not in (tuple, list, dict):
            return self._value(value)
        if spec.type is torch.Size:
            return self.graph.create_node("call_function", torch.Size, (self._value(value),), name="size")
        specs = [child for _, _, child in spec.children]
        if len(specs) != len(value) or (type(value) is dict and any(type(key) not in _PRINTABLE for key in value)):
            return self._value(value)
        if type(value) is dict:
            return {key: self._output(v, s) for (key, v), s in zip(value.items(), specs, strict=True)}
        return type(value)([self._output(v, s) for v, s in zip(value, specs, strict=True)])

    def _value(self, value: Any) -> Any:
        """Returns a recorded argument as the graph holds it."""
        if isinstance(value, (tuple, list)) and type(value) not in (tuple, list, torch.Size):
            return self._container(type(value), range(len(value)), value)
        if type(value) in (tuple, list):
            return type(value)([self._value(item) for item in value])
        if type(value) is dict and all(type(key) in _PRINTABLE for key in value):
            return {key: self._value(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*map(self._value, (value.start, value.stop, value.step)))
        return self._leaf(value)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self._ref(value)
        if isinstance(value, Structure):
            return self._container(value.type, [k for k, _ in value.children], [v for _, v in value.children])
        if type(value) is torch.Size:
            return tuple(value)
        if type(value) in _PRINTABLE and not self._is_hidden(value):
            return value
        known = self.objects.get(id(value))
        if known is None:
            known = self.objects[id(value)] = self.graph.create_node("get_attr", self._constant(lambda: value))
        return known

    def _is_hidden(self, value: Any) -> bool:
        """Whether a parameter of `forward` has a name that the code of `value` needs, as in `device(type='cpu')`."""
        is_literal = type(value) in _LITERALS
        return not is_literal and not self.parameter_names.isdisjoint(re.findall(r"[^\W\d]\w*", repr(value)))

    def _container(self, kind: type, keys: Sequence[Key], items: Sequence[Any]) -> fx.Node:
        make = Container(kind, tuple(keys))
        children = [self._value(item) for item in items]
        if make.is_by_name:
            return self.graph.create_node("call_function", make, (), dict(zip(make.keys, children, strict=True)))
        return self.graph.create_node("call_function", make, tuple(children))

    def _constant(self, get: Callable[[], Any]) -> str:
        name = f"_constant_{len(self.constants)}"
        self.constants[name] = get
        return name

    def _ref(self, ref: Ref) -> fx.Node:
        try:
            return self._dug(ref.node, ref.dig)
        except KeyError:
            where = format_path((*self.frame.path, ref.node.name))
            raise GraphError(f"{where!r} is used before it is computed, or outside of its frame") from None

    def _dug(self, node: Node, dig: tuple[Key, ...]) -> fx.Node:
        known = self.values.get((node, dig))
        if known is None:
            if not dig:
                raise KeyError(node)
            parent = self._dug(node, dig[:-1])
            known = self.values[node, dig] = self._taken(parent, spec_at(node.spec, dig[:-1]), dig[-1])
        return known

    def _taken(self, parent: fx.Node, spec: ValueSpec | None, key: Key) -> fx.Node:
        func: Callable[..., Any] = take
        if isinstance(spec, ContainerSpec) and type(key) in (int, str):
            is_indexed = type(key) is int or hasattr(spec.type, "keys")
            func = operator.getitem if is_indexed else getattr
        name = f"{parent.name}_sub_{key}" if type(key) is int else f"{parent.name}_{key}"
        taken = self.graph.create_node("call_function", func, (parent, self._value(key)), name=identifier(name))
        if "val" in parent.meta:
            taken.meta["val"] = take(parent.meta["val"], key)
        return taken


def _operand(value: Any) -> Operand:
    spec = spec_at(value.node.spec, value.dig) if isinstance(value, Ref) else None
    if isinstance(spec, TensorSpec):
        return "tensor" if spec.type_name == "Tensor" else "other"
    if isinstance(spec, ScalarSpec):
        value = spec.value
    return "number" if type(value) in NUMBERS else "other"


def _digs(frame: Frame) -> dict[Node, list[tuple[Key, ...]]]:
    """Returns for each node the parts of its value that the frame uses later."""
    found: dict[Node, dict[tuple[Key, ...], None]] = {}
    for value in (*((node.args, node.kwargs) for node in frame.graph_nodes), frame.output):
        for ref in refs_in(value):
            if ref.dig:
                found.setdefault(ref.node, {})[ref.dig] = None
    return {node: list(digs) for node, digs in found.items()}


def identifier(name: str) -> str:
    """Returns the name requested from fx; fx itself escapes keywords, builtins and other characters."""
    return f"{name}_1" if name == "self" else name


class ForwardCodeGen(CodeGen):
    """Prints signatures that fx cannot print: `/`, a bare `*`, and defaults that are not literals."""

    def __init__(self, parameters: list[InputParameter]) -> None:
        super().__init__()
        self._kinds = {parameter.name: parameter.kind for parameter in parameters}
        self._defaults: list[tuple[str, Any]] = []

    @property
    def is_needed(self) -> bool:
        """Whether fx cannot print the signature."""
        kinds = set(self._kinds.values())
        has_bare_star = _KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds
        return _POSITIONAL_ONLY in kinds or has_bare_star or bool(self._defaults) or "self" in self._kinds

    def default(self, parameter: InputParameter) -> Any:
        """Returns an object whose repr is the default of `parameter`."""
        if _is_printable(parameter.default):
            return parameter.default
        name = f"_default_{parameter.name}"
        self._defaults.append((name, parameter.default))
        return DefaultName(name)

    def gen_fn_def(self, free_vars: list[str], *args: Any, **kwargs: Any) -> str:
        """Returns the line with `def`."""
        marked = self._with_markers(free_vars)
        if "self" not in self._kinds:
            return super().gen_fn_def(marked, *args, **kwargs)
        # A parameter of `forward` is called `self`: the module gets another name, see `generated_code`.
        taken = {_parameter_name(text) for text in free_vars}
        owner = next(name for name in OWNER_NAMES if name not in taken)
        return super().gen_fn_def(["self", *marked], *args, **kwargs).replace("self", owner, 1)

    def _with_markers(self, free_vars: list[str]) -> list[str]:
        kinds = [self._kinds.get(_parameter_name(text)) for text in free_vars]
        marked = list(free_vars)
        if _KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
            marked.insert(kinds.index(_KEYWORD_ONLY), "*")
        if _POSITIONAL_ONLY in kinds:
            marked.insert(len(kinds) - kinds[::-1].index(_POSITIONAL_ONLY), "/")
        return marked

    def additional_globals(self) -> list[tuple[str, Any]]:
        """Returns the defaults that are not literals, by the names that the code uses for them."""
        return [*super().additional_globals(), *self._defaults]


_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY


def _parameter_name(text: str) -> str:
    match = re.match(r"\**(\w+)", text)
    return match.group(1) if match else text


def _is_printable(value: Any) -> bool:
    leaves: list[Any] = []
    map_leaves(value, leaves.append)
    return all(type(leaf) in _PRINTABLE for leaf in leaves)


class DefaultName:
    """Prints as a name, under which the code finds a default that is not a literal."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


# -- how calls are written ---------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A call as a graph holds it: the fx opcode, and the function or the name of the method.

    `order` is what is written as positional arguments (positions of recorded arguments, and names of attributes), if
    that is not the recorded arguments.
    """

    op: str
    target: Any
    order: tuple[int | str, ...] | None = None


def is_written_as(node: Node, fx_node: fx.Node) -> bool:
    """Whether `fx_node` calls what `build` writes for the function of a record."""
    if not callable(node.target):
        return False
    call = written(node.target, tuple(map(_operand, node.args)), bool(node.kwargs))
    return (call.op, call.target) == (fx_node.op, fx_node.target)


Operand: TypeAlias = Literal["tensor", "number", "other"]


def written(func: Callable[..., Any], operands: Sequence[Operand], has_kwargs: bool) -> Written:
    """Returns how to write a call of `func`, the function that torch dispatched.

    Python's operators are sure to reach it only if their operands are plain tensors and numbers.
    """
    name = str(getattr(func, "__name__", ""))
    is_method = bool(operands) and operands[0] == "tensor"
    if is_method and len(operands) == 2 and not has_kwargs:
        if operands[1] != "other" and func in _BINARY:
            return Written("call_function", _BINARY[func])
        if operands[1] == "number" and func in _REFLECTED:
            return Written("call_function", _REFLECTED[func], order=(1, 0))
    if is_method and not has_kwargs and func in _ALWAYS:
        return Written("call_function", _ALWAYS[func])
    if (attribute := _attribute_of(func)) is not None:
        if name == "__get__":
            return Written("call_function", getattr, order=(0, attribute))
        return Written("call_function", setattr, order=(0, attribute, 1))
    if is_method and getattr(Tensor, name, None) is func:
        return Written("call_method", name)
    return Written("call_function", printable(func))


def _attribute_of(accessor: Any) -> str | None:
    if getattr(accessor, "__name__", None) not in ("__get__", "__set__"):
        return None
    descriptor = getattr(accessor, "__self__", None)
    name = getattr(descriptor, "__name__", None)
    return name if isinstance(name, str) and getattr(Tensor, name, None) is descriptor else None


def printable(func: Any) -> Any:
    """Returns `func`, or a `NamedFunction` around it if fx cannot print a name that refers to it."""
    if isinstance(func, (NamedFunction, Container)) or is_overload(func):
        return func
    name = getattr(func, "__name__", None)
    module = getattr(func, "__module__", None)
    if isinstance(name, str) and name.isidentifier():
        if getattr(builtins, name, None) is func or getattr(operator, name, None) is func:
            return func
        if module is None and any(getattr(m, name, None) is func for m in (torch, torch.nn.functional)):
            return func
        if isinstance(module, str) and _at(f"{module}.{name}") is func:
            return func
        if isinstance(func, (MethodDescriptorType, WrapperDescriptorType)) and getattr(Tensor, name, None) is func:
            return func  # printed as `torch.Tensor.name`
    return NamedFunction(func)


def _at(path: str) -> Any:
    first, *rest = path.split(".")
    found: Any = sys.modules.get(first)
    for name in rest:
        found = getattr(found, name, None)
    return found


class NamedFunction:
    """A function under a name that generated code can use: an `autograd.Function.apply`, a lambda, a bound method."""

    def __init__(self, function: Callable[..., Any]) -> None:
        owner = getattr(function, "__self__", None)
        name = str(getattr(function, "__name__", type(function).__name__))
        if isinstance(owner, type):
            name = f"{owner.__name__}.{name}"
        self.function = function
        self.__name__ = self.__qualname__ = name
        self.__module__ = _module_of(owner if isinstance(owner, type) else function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NamedFunction) and self.function == other.function

    def __hash__(self) -> int:
        return hash((NamedFunction, self.function))

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


class Container:
    """Makes a container of a special class (dataclass, `ModelOutput`, namedtuple, ...) from its children.

    Keys that are names are passed as keyword arguments, all others by position.
    """

    def __init__(self, kind: type, keys: tuple[Key, ...]) -> None:
        self.type = kind
        self.keys = keys
        self.is_by_name = all(isinstance(key, str) and key.isidentifier() for key in keys)
        self.__name__ = self.__qualname__ = kind.__name__
        self.__module__ = _module_of(kind)

    def __call__(self, *items: Any, **by_name: Any) -> Any:
        return rebuilt(self.type, self.keys, [*items, *by_name.values()])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Container) and (self.type, self.keys) == (other.type, other.keys)

    def __hash__(self) -> int:
        return hash((self.type, self.keys))

    def __repr__(self) -> str:
        return f"<{self.__name__}>"


def _module_of(value: Any) -> str:
    module = str(getattr(value, "__module__", "") or "")
    # fx writes the names of torch's functions without a global that could be another object.
    return "function" if module.split(".", maxsplit=1)[0] in ("torch", "builtins", "_operator", "") else module


def _table(names: dict[str, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Functions of `Tensor` by name, those that this version of torch has."""
    return {getattr(Tensor, name): function for name, function in names.items() if hasattr(Tensor, name)}


_BINARY = _table(
    {
        "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
        "__floordiv__": operator.floordiv, "remainder": operator.mod, "pow": operator.pow, "__pow__": operator.pow,
        "matmul": operator.matmul, "eq": operator.eq, "__eq__": operator.eq, "ne": operator.ne, "lt": operator.lt,
        "le": operator.le, "gt": operator.gt, "ge": operator.ge, "__and__": operator.and_, "__or__": operator.or_,
        "__xor__": operator.xor, "__lshift__": operator.lshift, "__rshift__": operator.rshift,
    }
)  # fmt: skip
_REFLECTED = _table(
    {
        "__rsub__": operator.sub, "__rdiv__": operator.truediv, "__rtruediv__": operator.truediv,
        "__rpow__": operator.pow, "__rfloordiv__": operator.floordiv, "__rmod__": operator.mod,
        "__rlshift__": operator.lshift, "__rrshift__": operator.rshift,
    }
)  # fmt: skip
_ALWAYS = _table(
    {
        "neg": operator.neg, "positive": operator.pos, "__invert__": operator.invert, "__getitem__": operator.getitem,
        "__setitem__": operator.setitem, "__len__": len,
    }
)  # fmt: skip


# -- the reverse: where a graph is the module (loaded, exported or edited), only it connects the records ---------------


def connect_records(frame: Frame, graph: fx.Graph, attribute: Callable[[str], Any] = lambda _: None) -> None:
    """Records the values that the graph computes each node of a frame from, and the value that the frame returns.

    A record that takes a part of what an operation returned becomes an `ElementNode`. `attribute` returns what
    `get_attr` nodes without records read, by its path.
    """
    _Connector(frame, attribute).connect(graph)


class _Connector:
    def __init__(self, frame: Frame, attribute: Callable[[str], Any]) -> None:
        self._frame = frame
        self._attribute = attribute
        self._values: dict[fx.Node, Any] = {}
        self._elements: dict[Node, Node] = {}

    def connect(self, graph: fx.Graph) -> None:
        frame = self._frame
        for fx_node in graph.nodes:
            args = map_arguments(tuple(fx_node.args), self._value)
            kwargs = map_arguments(dict(fx_node.kwargs), self._value)
            if fx_node.op == "output":
                frame.output = args[0][0] if frame.custom_graph is not None else args[0]
            else:
                self._values[fx_node] = self._connected(fx_node, args, kwargs)
        if self._elements:
            frame.nodes = [self._elements.get(node, node) for node in frame.nodes]
            frame.names.update((node.name, node) for node in self._elements.values())

    def _value(self, leaf: Any) -> Any:
        return self._values[leaf] if isinstance(leaf, fx.Node) else leaf

    def _connected(self, fx_node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Connects the record of a node, and returns the form of its value in arguments of other nodes."""
        record = fx_node.meta.get(RECORD)
        part = _part(fx_node, args)
        if (
            isinstance(record, OpNode)
            and isinstance(part, Ref)
            and isinstance(part.node, OpNode)
            and len(part.dig) == 1
        ):
            element = self._elements[record] = _element(record, part)
            record = fx_node.meta[RECORD] = element
        elif isinstance(record, OpNode):
            _note_function(record, fx_node)
        if isinstance(record, (OpNode, CallNode)):
            record.args, record.kwargs = args, kwargs
        if isinstance(record, ElementNode):
            return Ref(record)
        if part is not None:
            return part
        if (structure := _structure(fx_node.target, args, kwargs)) is not None:
            return structure
        if not isinstance(record, Node):
            return self._without_record(fx_node, args)
        wrote = record.written_of(fx_node.args, fx_node.kwargs) if record.is_in_place else None
        if isinstance(wrote, fx.Node):  # later nodes that read the tensor read the written value
            self._values[wrote] = Ref(record)
        return Ref(record)

    def _without_record(self, fx_node: fx.Node, args: tuple[Any, ...]) -> Any:
        if fx_node.op == "get_attr":
            return self._attribute(str(fx_node.target))
        if fx_node.target is torch.Size or len(args) == 1:
            return args[0]
        return args


def _part(fx_node: fx.Node, args: tuple[Any, ...]) -> Any:
    """Returns the value that a node reads from a container, if it does so."""
    if fx_node.target not in (operator.getitem, getattr, take) or len(args) != 2:
        return None
    container, key = args
    if isinstance(container, Ref) and not isinstance(spec_at(container.node.spec, container.dig), ContainerSpec):
        return None
    return at_keys(container, (key,)) if isinstance(container, (Ref, Structure, tuple, list, dict)) else None


def _structure(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Structure | None:
    """Returns the container that a node puts values into, if it does so."""
    if isinstance(target, Container):
        return Structure(target.type, tuple(zip(target.keys, (*args, *kwargs.values()), strict=True)))
    return None


def _element(record: OpNode, part: Ref) -> ElementNode:
    assert isinstance(part.node, OpNode)
    whole = part.node
    own = ("target", "spec", "base_name", "name", "is_size", "is_live", "is_mutated_later", "is_view_filled_later")
    same = {name: getattr(record, name) for name in own}
    return ElementNode(
        op=whole.op, whole=whole, position=part.dig[0], site=whole.site, occurrence=whole.occurrence, **same
    )


def _note_function(record: OpNode, fx_node: fx.Node) -> None:
    function: Any = fx_node.target
    if fx_node.op == "call_method":
        function = getattr(Tensor, str(fx_node.target), None) or operator.methodcaller
    is_same = record.target is function or is_written_as(record, fx_node)
    if not is_same and callable(record.target):  # the user put another function there
        record.op = str(fx_node.target) if fx_node.op == "call_method" else function_name(function)
    record.target = function
