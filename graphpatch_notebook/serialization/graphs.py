"""Graphs as JSON, and back, over the attribute paths of their module.

{"op": "call_function", "name": "mul", "function": "operator.mul", "args": [{"node": 0}, 2], "record": 3}
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from graphpatch_notebook.capture.custom_graphs import RECORD
from graphpatch_notebook.capture.held_values import module_at
from graphpatch_notebook.capture.records import CallNode, Frame, InputParameter, Node
from graphpatch_notebook.graphs import GraphModule, own_graphs
from graphpatch_notebook.graphs.build import BuiltGraph, ForwardCodeGen, build
from graphpatch_notebook.serialization.codecs.names import (
    Allowed,
    check_attribute,
    check_method,
    decoded_function,
    encoded_function,
)
from graphpatch_notebook.serialization.codecs.reading import JsonValue
from graphpatch_notebook.serialization.codecs.values import UnstorableError, decoded, encoded
from graphpatch_notebook.serialization.modules import (
    ALIAS,
    LoadedModule,
    ModuleTable,
    is_writable,
    own_tensor_attribute,
    tensor_at,
)
from graphpatch_notebook.serialization.value_reads import read_value, unchanged
from graphpatch_notebook.values import TensorSpec

_OPS = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")


class Builds:
    """The graphs of frames as written to a file: with the attribute paths of their modules."""

    def __init__(self, root: GraphModule) -> None:
        self._edited = {id(m.frame): m for m in own_graphs(root) if m.frame.is_edited and m.frame.custom_graph is None}

    def built(self, frame: Frame) -> BuiltGraph:
        """Returns the graph of `frame`."""
        edited = self._edited.get(id(frame))
        return build(frame, self) if edited is None else edited.built()

    def of_call(self, node: Node) -> str:
        """Returns the attribute path of a submodule that is called."""
        return str(node.target)

    def of_attribute(self, path: str) -> str:
        """Returns the attribute path of a tensor."""
        return path

    def original_path(self, frame: Frame, target: str) -> str:
        """Returns the attribute path that `target` refers to in the graph of `frame`."""
        edited = self._edited.get(id(frame))
        return target if edited is None else edited.original_path(target)

    def own_tensor(self, frame: Frame, target: str) -> Tensor | None:
        """Returns the tensor that the user set as attribute `target` of the graph module of `frame` itself."""
        edited = self._edited.get(id(frame))
        return None if edited is None else own_tensor_attribute(edited, target)


# -- writing -----------------------------------------------------------------------------------------------------------


def encoded_graph(frame: Frame, builds: Builds, modules: ModuleTable) -> list[dict[str, Any]]:
    """Returns the JSON of the graph of `frame`."""
    built = builds.built(frame)
    numbers: dict[fx.Node, int] = {}
    records = {id(node): number for number, node in enumerate(frame.graph_nodes)}

    def leaf(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"node": numbers[value]}
        raise UnstorableError(f"it uses an object of type {type(value).__name__}")

    entries: list[dict[str, Any]] = []
    for fx_node in built.graph.nodes:
        args = fx_node.args
        if fx_node.op == "output" and frame.custom_graph is None:
            args = ((args[0],),)
        entry = {"op": fx_node.op, "name": fx_node.name, **_encoded_target(fx_node, frame, built, builds, modules)}
        if fx_node.op not in ("placeholder", "get_attr"):
            entry["args"] = [encoded(value, leaf) for value in args]
            if fx_node.kwargs:
                entry["kwargs"] = [[name, encoded(value, leaf)] for name, value in fx_node.kwargs.items()]
        record = fx_node.meta.get(RECORD)
        if id(record) in records:
            entry["record"] = records[id(record)]
        numbers[fx_node] = len(entries)
        entries.append(entry)
        if frame.custom_graph is None and (read := read_value(record)) is not None:
            entries.append(_check_of(fx_node, len(entries) - 1, read.value))
    return entries


def _check_of(fx_node: fx.Node, number: int, expected: Any) -> dict[str, Any]:
    args = [{"node": number}, encoded(expected)]
    name = f"{fx_node.name}_unchanged"
    return {"op": "call_function", "name": name, "function": encoded_function(unchanged), "args": args}


def _encoded_target(
    fx_node: fx.Node, frame: Frame, built: BuiltGraph, builds: Builds, modules: ModuleTable
) -> dict[str, Any]:
    target: Any = fx_node.target
    if fx_node.op == "call_function":
        check_attribute(target, fx_node.args)
        return {"function": encoded_function(target)}
    if fx_node.op == "call_method":
        return {"method": check_method(target)}
    if fx_node.op == "call_module":
        record = fx_node.meta.get(RECORD)
        if not isinstance(record, CallNode):
            raise UnstorableError(f"it calls {target!r}, which has no record")
        found = module_at(frame.module, target) if frame.custom_graph is not None else None
        if found is not None and found is not record.frame.module:
            raise UnstorableError(f"it calls {target!r}, which was replaced by another module since the capture")
        return {"path": modules.reach_module(frame.module, target, record.frame.module)}
    if fx_node.op == "get_attr":
        if (own := builds.own_tensor(frame, str(target))) is not None:
            return {"path": modules.hold(frame.module, own)}
        if target not in built.constants:
            return {"path": modules.reach_tensor(frame.module, builds.original_path(frame, target))}
        value = built.constants[target]()
        if value is None:
            raise UnstorableError("it uses a tensor that no longer exists: the graph and its module do not hold it")
        if not isinstance(value, Tensor):
            raise UnstorableError(f"it uses an object of type {type(value).__name__}")
        return {"path": modules.hold(frame.module, value)}
    return {"parameter": target} if fx_node.op == "placeholder" else {}


# -- reading -----------------------------------------------------------------------------------------------------------


class GraphReader:
    """Reads the graph of a frame whose records are known."""

    def __init__(self, frame: Frame, allowed: Allowed) -> None:
        self.frame = frame
        self.allowed = allowed
        self.graph = fx.Graph()
        self.codegen = ForwardCodeGen(frame.parameters)
        self.made: list[fx.Node] = []
        self.recorded: set[int] = set()

    def read(self, items: Sequence[JsonValue]) -> fx.Graph:
        """Returns the graph."""
        parameters = iter(self.frame.parameters)
        for number, item in enumerate(items):
            fields = item.fields(
                "op", "name", optional=("args", "kwargs", "record", "function", "method", "path", "parameter")
            )
            op = fields["op"].one_of(_OPS)
            if (op == "output") != (number == len(items) - 1):
                raise item.error("a graph ends with its one output")
            if op == "placeholder":
                fx_node = self._placeholder(item, fields, next(parameters, None))
            else:
                fx_node = self._node(item, fields, op)
            self.made.append(fx_node)
            self._record(fields.get("record"), fx_node)
        if not items or next(parameters, None) is not None:
            raise self._error("its placeholders must be the parameters of forward")
        if self.codegen.is_needed:
            self.graph.set_codegen(self.codegen)
        return self.graph

    def _error(self, problem: str) -> Exception:
        return JsonValue(None, f"the graph of {'.'.join(self.frame.path) or 'the root'}").error(problem)

    def _node(self, item: JsonValue, fields: dict[str, JsonValue], op: str) -> fx.Node:
        name = _name(fields["name"])
        if op == "get_attr":
            return self.graph.create_node("get_attr", self._tensor_path(_given(fields, "path", item)), name=name)
        args = tuple(decoded(value, self._leaves) for value in _given(fields, "args", item).items())
        kwargs = self._kwargs(fields["kwargs"]) if "kwargs" in fields else {}
        if op == "output":
            if len(args) != 1 or type(args[0]) is not tuple or len(args[0]) != 1 or kwargs:
                raise item.error("the output must be wrapped in a tuple")
            return self.graph.create_node("output", "output", args, name=name)
        target = self._target(item, fields, op, args)
        return self.graph.create_node(op, target, args, kwargs, name)

    def _placeholder(self, item: JsonValue, fields: dict[str, JsonValue], parameter: InputParameter | None) -> fx.Node:
        name, given = _name(fields["name"]), _given(fields, "parameter", item)
        if parameter is None or given.text() != (target := parameter.starred_name):
            raise given.error("the placeholders must be the parameters of forward, in order")
        default = () if parameter.default is inspect.Parameter.empty else (self.codegen.default(parameter),)
        record = self.frame.names.get(parameter.name)
        is_tensor = record is not None and isinstance(record.spec, TensorSpec) and record.spec.type_name == "Tensor"
        return self.graph.create_node(
            "placeholder", target, default, name=name, type_expr=Tensor if is_tensor else None
        )

    @property
    def _leaves(self) -> dict[str, Callable[[JsonValue], fx.Node]]:
        return {"node": lambda item: self.made[item.whole(0, len(self.made) - 1)]}

    def _kwargs(self, item: JsonValue) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for pair in item.items():
            name, value = pair.items(2)
            if not is_identifier(name.text()) or name.text() in found:
                raise name.error(f"{name.text()[:60]!r} is not the name of an argument")
            found[name.text()] = decoded(value, self._leaves)
        return found

    def _target(self, item: JsonValue, fields: dict[str, JsonValue], op: str, args: tuple[Any, ...]) -> Any:
        try:
            if op == "call_method":
                return check_method(_given(fields, "method", item).text())
            if op == "call_function":
                function = decoded_function(_given(fields, "function", item), self.allowed)
                check_attribute(function, args)
                return function
        except UnstorableError as problem:
            raise item.error(str(problem)) from None
        return self._module_path(_given(fields, "path", item), fields)

    def _tensor_path(self, item: JsonValue) -> str:
        path, module = item.text(), self.frame.module
        if path.startswith(ALIAS) and isinstance(module, LoadedModule):
            if path in module.tensor_paths or own_tensor_attribute(module, path) is not None:
                return path
        elif is_writable(path):
            parents, _, name = path.rpartition(".")
            holder = module_at(module, parents)
            if tensor_at(module, path) is not None:
                return path
            if holder is not None and own_tensor_attribute(holder, name) is not None:
                return path
        raise item.error(f"{path[:80]!r} leads to no tensor of the module")

    def _module_path(self, item: JsonValue, fields: dict[str, JsonValue]) -> str:
        path, module = item.text(), self.frame.module
        record = self._recorded(_given(fields, "record", item))
        found = module.__dict__.get(path) if path.startswith(ALIAS) else None
        if is_writable(path) and found is None:
            found = module_at(module, path)
        if not isinstance(record, CallNode) or found is not record.frame.module:
            raise item.error(f"{path[:80]!r} does not lead to the module that is called")
        return path

    # -- records ---------------------------------------------------------------------------------------------------

    def _recorded(self, item: JsonValue) -> Node:
        return self.frame.nodes[item.whole(0, len(self.frame.nodes) - 1)]

    def _record(self, item: JsonValue | None, fx_node: fx.Node) -> None:
        """Connects a node with its record."""
        if item is None:
            return
        record = self._recorded(item)
        if id(record) in self.recorded or (record.kind == "output") != (fx_node.op == "output"):
            raise item.error("this is the record of another node")
        self.recorded.add(id(record))
        fx_node.meta[RECORD] = record


def _name(item: JsonValue) -> str:
    if not item.text().isidentifier():
        raise item.error(f"{item.text()[:60]!r} is not a name")
    return item.text()


def _given(fields: dict[str, JsonValue], name: str, item: JsonValue) -> JsonValue:
    if name not in fields:
        raise item.error(f"the field {name!r} is missing")
    return fields[name]


def is_identifier(name: str) -> bool:
    """Whether `name` can be the name of an argument."""
    return name.isidentifier() and not keyword.iskeyword(name)
