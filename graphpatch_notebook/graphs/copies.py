"""Copies of the contents of graph modules (records of frames, and graphs), for `copy.deepcopy`."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from torch import fx

from graphpatch_notebook.capture.custom_graphs import RECORD
from graphpatch_notebook.capture.records import (
    CallNode,
    Capture,
    ElementNode,
    Frame,
    Node,
    OpNode,
    Ref,
    Site,
    SourceLine,
    Structure,
    map_leaves,
)
from graphpatch_notebook.graphs.build import BuiltGraph
from graphpatch_notebook.torch_compat import codegen_of


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SavedSite(Site):
    """A call site of a file or an exported program: it has the source lines, but no code objects."""

    lines: tuple[SourceLine, ...] = ()

    def source_lines(self) -> list[SourceLine]:
        """Returns the user's source lines, outermost first."""
        return list(self.lines)


def copied_graph(built: BuiltGraph, frame: Frame, memo: dict[int, Any]) -> BuiltGraph:
    """Returns a copy of the graph that a frame was copied with, over the records of that copy, `frame`."""
    graph = copy.deepcopy(built.graph, memo)
    graph.set_codegen(codegen_of(built.graph))
    for node in graph.nodes:
        if RECORD in node.meta:
            node.meta[RECORD] = frame.names[node.meta[RECORD].name]
    copies = {name: copy.deepcopy(get(), memo) for name, get in built.constants.items()}
    constants: dict[str, Callable[[], Any]] = {name: partial(copies.get, name) for name in copies}
    return BuiltGraph(graph, constants)


def copied_frame(frame: Frame, memo: dict[int, Any]) -> Frame:
    """Returns a copy of `frame` with all frames below it, over copies of their modules.

    Call sites and specs are shared: they are immutable. If only part of a capture is copied, the original frame still
    calls the copy.
    """
    if id(frame) in memo:
        return memo[id(frame)]  # type: ignore[no-any-return]
    nodes: dict[Node, Node] = {}
    frames: dict[int, Frame] = {}
    capture = Capture(frame.capture.options, has_escaped_sizes=frame.capture.has_escaped_sizes)
    for old in frame.walk():
        new = dataclasses.replace(old, nodes=[], names={}, doubts=list(old.doubts), capture=capture)
        frames[id(old)] = memo[id(old)] = new
        nodes |= {node: dataclasses.replace(node) for node in old.nodes}
    for old in frame.walk():
        new = frames[id(old)]
        new.module = copy.deepcopy(old.module, memo)
        new.custom_graph = _copied_graph(old.custom_graph, nodes, memo)
        new.parent = frames.get(id(old.parent), old.parent)
        new.call = cast(CallNode, nodes.get(old.call, old.call)) if old.call is not None else None
        new.nodes = [_connected(nodes[node], nodes, frames) for node in old.nodes]
        new.names = {name: nodes.get(node, node) for name, node in old.names.items()}
        new.output = _mapped(old.output, nodes)
        new.size_guards = [dataclasses.replace(g, operands=_mapped(g.operands, nodes)) for g in old.size_guards]
    return memo[id(frame)]  # type: ignore[no-any-return]


def _copied_graph(graph: fx.Graph | None, nodes: dict[Node, Node], memo: dict[int, Any]) -> fx.Graph | None:
    result = copy.deepcopy(graph, memo)
    for node in result.nodes if result is not None else ():
        if RECORD in node.meta:
            node.meta[RECORD] = nodes.get(node.meta[RECORD], node.meta[RECORD])
    return result


def _connected(node: Node, nodes: dict[Node, Node], frames: dict[int, Frame]) -> Node:
    if isinstance(node, (OpNode, CallNode)):
        node.args = _mapped(node.args, nodes)
        node.kwargs = _mapped(node.kwargs, nodes)
    if isinstance(node, OpNode):
        node.inner = tuple(nodes[step] for step in node.inner)
    if isinstance(node, ElementNode):
        node.whole = cast(OpNode, nodes[node.whole])
    if isinstance(node, CallNode):
        node.frame = frames[id(node.frame)]
    return node


def _mapped(value: Any, nodes: dict[Node, Node]) -> Any:
    """Returns recorded arguments with references to other nodes."""

    def leaf(item: Any) -> Any:
        if type(item) is Ref:
            return Ref(nodes[item.node], item.dig)
        if type(item) is Structure:
            return Structure(item.type, tuple((key, _mapped(child, nodes)) for key, child in item.children))
        if isinstance(item, tuple) and any(isinstance(part, Ref) for part in item):
            return type(item)(*[_mapped(part, nodes) for part in item])
        return item

    return map_leaves(value, leaf)
