"""Connects the records of a frame as its graph connects its nodes: the reverse of `build`.

Capture records what each operation is given. Where a graph is the module (it was loaded, exported or edited), only the
graph says so.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from graphpatch_notebook.capture.custom_graphs import RECORD, map_arguments
from graphpatch_notebook.capture.functions import function_name
from graphpatch_notebook.capture.records import CallNode, ElementNode, Frame, Node, OpNode, Ref, Structure, at_keys
from graphpatch_notebook.graphs.build import Container, Structured, is_written_as
from graphpatch_notebook.values import ContainerSpec, children, spec_at, take


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
        if isinstance(record, OpNode) and part is not None and isinstance(part.node, OpNode) and len(part.dig) == 1:
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
    if not isinstance(target, Structured):
        return None
    try:
        made = target(*args)
    except Exception:  # a class that does not take records in place of tensors
        return None
    return Structure(type(made), tuple(children(made) or ()))


def _element(record: OpNode, part: Ref) -> ElementNode:
    assert isinstance(part.node, OpNode)
    same = {
        field.name: getattr(record, field.name)
        for field in dataclasses.fields(Node)
        if field.name not in ("kind", "op")
    }
    return ElementNode(op=part.node.op, whole=part.node, position=part.dig[0], **same)


def _note_function(record: OpNode, fx_node: fx.Node) -> None:
    function: Any = fx_node.target
    if fx_node.op == "call_method":
        function = getattr(Tensor, str(fx_node.target), None) or operator.methodcaller
    is_same = record.target is function or is_written_as(record, fx_node)
    if not is_same and callable(record.target):  # the user put another function there
        record.op = str(fx_node.target) if fx_node.op == "call_method" else function_name(function)
    record.target = function
