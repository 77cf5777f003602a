"""The records of an exported program: a frame for each call of a module. Nothing runs.

The specs of the values come from the program, which holds a fake tensor for each of them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch.nn import Module

from graphpatch_notebook.capture import name_nodes
from graphpatch_notebook.capture.custom_graphs import custom_record, map_arguments
from graphpatch_notebook.capture.records import RECORD, CallNode, Conditions, Frame, Node, OpNode, SavedSite, SourceLine
from graphpatch_notebook.graphs.exported.conversion import CALLED, Converter, Group, at
from graphpatch_notebook.graphs.exported.modules import ExportedModule
from graphpatch_notebook.torch_compat import STRUCTURE_FUNCTIONS
from graphpatch_notebook.values import (
    ContainerSpec,
    ObjectSpec,
    ScalarSpec,
    TensorSpec,
    ValueSpec,
    children,
    describe,
    key_text,
    leaves,
)

_TRACE_LINE = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


class FrameBuilder:
    """Makes the frames of a program, and records the calls at its modules."""

    def __init__(self, converter: Converter) -> None:
        self._converter = converter
        self._turns: dict[int, int] = {}

    def build(self) -> Frame:
        """Returns the root frame."""
        group = self._converter.root_group
        assert isinstance(group.module, ExportedModule)
        group.module.add_call(0)
        root = Frame(group.module, "", None, conditions=Conditions(group.module.training))
        root.parameters = [known.parameter for known in self._converter.inputs]
        self._fill(root, group, 0, {})
        return root

    def _fill(self, frame: Frame, group: Group, number: int, given: dict[str, Any]) -> Any:
        """Makes the nodes of a frame, and returns the example value of its output.

        Graph `number` of the group of its module runs, on example values by parameter; those of the root are in the
        program.
        """
        graph = self._converter.graph(group, number)
        frame.custom_graph = graph
        values = ExampleValues(graph, frame.module, given)
        records: dict[fx.Node, Node] = {}
        for fx_node in graph.nodes:
            if fx_node.op == "output":
                break
            record = self._call(fx_node, frame, values) if CALLED in fx_node.meta else _record(fx_node, frame, values)
            records[fx_node] = record
            frame.nodes.append(record)
        returned = values.returned()
        spec = spec_of(returned)
        frame.nodes.append(Node(kind="output", op="output", target="output", spec=spec, base_name="output"))
        _mark_written(records)
        _mark_sizes(records)
        name_nodes(frame, size_prefix="")  # the names of the program
        for fx_node, record in records.items():
            fx_node.meta = {RECORD: record}
        return returned

    def _call(self, fx_node: fx.Node, frame: Frame, values: ExampleValues) -> Node:
        group, number = fx_node.meta[CALLED]
        module = group.module
        assert isinstance(module, ExportedModule)
        if number is None:
            turn = self._turns.get(id(group), 0)
            self._turns[id(group)] = turn + 1
            number = group.turns[turn % len(group.turns)]
        module.add_call(number)
        path = str(fx_node.target)
        conditions = Conditions(module.training)
        callee = Frame(module, path, frame, parameters=group.parameters(), conditions=conditions, capture=frame.capture)
        call = CallNode(op=type(module).__name__, target=path, base_name=path, site=_site(fx_node), frame=callee)
        call.call_index = sum(1 for other in frame.calls() if other.frame.module is module)
        callee.call = call
        args, kwargs = values.arguments(fx_node)
        given = dict(zip((p.name for p in callee.parameters), args, strict=False)) | kwargs
        values.set(fx_node, self._fill(callee, group, number, given))
        call.spec = callee.output_node.spec
        return call


def _record(fx_node: fx.Node, frame: Frame, values: ExampleValues) -> Node:
    record = custom_record(fx_node, frame.module)
    record.base_name = record.op if record.kind == "input" else fx_node.name
    record.spec = spec_of(values.example(fx_node))
    if isinstance(record, OpNode):
        record.site = _site(fx_node)
    elif record.kind != "input":
        held = at(frame.module, record.target)
        record.spec = describe(held) if isinstance(held, Tensor) else ObjectSpec(type(held).__name__)
    return record


def _site(fx_node: fx.Node) -> SavedSite | None:
    """Returns the lines of the model's code that the program has recorded, in place of a call site."""
    found = _TRACE_LINE.findall(fx_node.meta.get("stack_trace") or "")
    lines = tuple(SourceLine(file, int(line), function) for file, line, function in found)
    return SavedSite((), lines) if lines else None


# -- what follows from the whole graph ---------------------------------------------------------------------------------


def _mark_sizes(records: dict[fx.Node, Node]) -> None:
    """Marks nodes that only carry sizes, or that unpack or pack the values of other nodes."""
    for fx_node, record in records.items():
        holds_tensors = any(not isinstance(leaf, ScalarSpec) for _, leaf in leaves(record.spec))
        first = fx_node.args[0] if fx_node.args else None
        is_part = (
            fx_node.target is operator.getitem
            and isinstance(first, fx.Node)
            and (
                records[first].kind in ("call", "input")
                or first.target in STRUCTURE_FUNCTIONS
                or records[first].is_size
            )
        )
        is_structure = fx_node.op == "call_function" and fx_node.target in STRUCTURE_FUNCTIONS
        if record.kind in ("op", "attribute"):
            record.is_size = is_part or is_structure or not holds_tensors


def _mark_written(records: dict[fx.Node, Node]) -> None:
    """Marks the nodes into which operators write, and those whose values share memory with them."""
    memory: dict[fx.Node, fx.Node] = {}
    views: dict[fx.Node, list[Node]] = {}
    for fx_node, record in records.items():
        source = next(iter(_aliased(fx_node)), None)
        base = memory[fx_node] = memory[source] if source is not None else fx_node
        views.setdefault(base, []).append(record)
        for position, written in _written(fx_node):
            if isinstance(record, OpNode):
                record.written_argument = position
            for other in views[memory[written]]:
                other.is_mutated_later |= other is not record
            is_view = memory[written] is not written and not records[written].is_in_place
            records[written].is_view_filled_later |= is_view


def _written(fx_node: fx.Node) -> Iterable[tuple[int | str, fx.Node]]:
    return _arguments(fx_node, lambda alias: alias is not None and alias.is_write)


def _aliased(fx_node: fx.Node) -> Iterable[fx.Node]:
    """Yields the arguments that share memory with the result of an operator."""
    if fx_node.target is operator.getitem and isinstance(fx_node.args[0], fx.Node):
        return [fx_node.args[0]]
    return [node for _, node in _arguments(fx_node, lambda alias: alias is not None)]


def _arguments(fx_node: fx.Node, is_wanted: Any) -> list[tuple[int | str, fx.Node]]:
    schema = getattr(fx_node.target, "_schema", None) if fx_node.op == "call_function" else None
    found: list[tuple[int | str, fx.Node]] = []
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        is_positional = position < len(fx_node.args)
        value = fx_node.args[position] if is_positional else fx_node.kwargs.get(argument.name)
        if isinstance(value, fx.Node) and is_wanted(argument.alias_info):
            found.append((position if is_positional else argument.name, value))
    return found


_ABSENT = object()


class ExampleValues:
    """The example values of the nodes of one graph, on the way through it.

    A graph that serves several calls keeps the examples of the first. If another call has other shapes, the examples
    are computed again, with the fake tensors of the program.
    """

    def __init__(self, graph: fx.Graph, module: Module, given: dict[str, Any]) -> None:
        self._graph = graph
        self._module = module
        self._given = given
        self._values: dict[fx.Node, Any] = {}
        self._is_known = True

    def set(self, node: fx.Node, value: Any) -> None:
        """Notes the example value of a node."""
        self._values[node] = value

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a node, with example values for nodes."""
        return map_arguments(node.args, self._lookup), map_arguments(node.kwargs, self._lookup)

    def returned(self) -> Any:
        """Returns the example value of the graph's output, without the tuple around it."""
        output = next(iter(reversed(self._graph.nodes)))
        return map_arguments(output.args[0], self._lookup)[0]

    def example(self, node: fx.Node) -> Any:
        """Finds, stores and returns the example value of a node."""
        value = self._example(node)
        self._values[node] = value
        return value

    def _lookup(self, leaf: Any) -> Any:
        return self._values[leaf] if isinstance(leaf, fx.Node) else leaf

    def _example(self, node: fx.Node) -> Any:
        known = node.meta.get("val", _ABSENT)
        if node.op == "placeholder":
            value = self._given.get(str(node.target), None if known is _ABSENT else known)
            if isinstance(known, Tensor):
                self._is_known &= isinstance(value, Tensor) and _sizes(value) == _sizes(known)
            return value
        if node.op == "get_attr":
            return at(self._module, str(node.target)) if known is _ABSENT else known
        if known is not _ABSENT and self._is_known:
            return known
        try:
            with torch.no_grad():
                return self._run(node)
        except Exception:  # an operator that fake tensors cannot run: the example of the first call is used
            return None if known is _ABSENT else known

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = self.arguments(node)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        target: Any = node.target
        return target(*args, **kwargs)


def spec_of(value: Any) -> ValueSpec:
    """Returns the spec of an example value: symbolic sizes get their values in the example inputs."""
    if isinstance(value, Tensor):
        return TensorSpec(torch.Size(_sizes(value)), value.dtype, value.device)
    if isinstance(value, (SymInt, SymFloat, SymBool)):
        return ScalarSpec(_hint(value))
    inside = children(value) if not isinstance(value, torch.Size) else None
    if inside is not None:
        return ContainerSpec(type(value), tuple((key_text(key), key, spec_of(child)) for key, child in inside))
    return describe(value)


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    return tuple(int(_hint(size)) for size in tensor.shape)


def _hint(size: Any) -> Any:
    """Returns the value of a symbol for the example inputs; another number if the program does not have it."""
    if not isinstance(size, (SymInt, SymFloat, SymBool)):
        return size
    hint = getattr(size.node, "hint", None)
    return hint if hint is not None else {SymInt: 0, SymFloat: 0.0, SymBool: False}[type(size)]
