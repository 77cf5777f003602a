"""Runs the graphs of a model node by node, each by a `torch.fx.Interpreter`, instead of as generated code.

It is slower than generated code, but an error names its node, and a callback sees every value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.nn import Module

from graphpatch_notebook.capture.custom_graphs import GraphRun
from graphpatch_notebook.capture.inputs import signature_with
from graphpatch_notebook.capture.records import RECORD, CallNode, Frame, Node, OpNode
from graphpatch_notebook.errors import add_note, afterwards, has_note, holding
from graphpatch_notebook.graphs.compiled_module import CompiledGraphModule
from graphpatch_notebook.graphs.modules import interpreter
from graphpatch_notebook.patching.model_state import ModelSnapshot
from graphpatch_notebook.paths import format_path


class GraphInterpreter:
    """Runs a hierarchy of graph modules node by node.

    All graphs run, as snapshots of the model (`verify` compares them with it). Modules without a graph run their own
    code.

    Args:
        graph_module: The root of the hierarchy.
        on_node: Called with the path and the value (not a copy) of each node once it is computed.
        before_run: Called before each run.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2))
        >>> report = pg.verify(torch.ones(2))
        >>> pg.interpreter(on_node=lambda path, value: print(path)).run(torch.ones(2))
        input
        sub_0.input
        sub_0.relu
        sub_0.output
        output
        tensor([1., 1.])
    """

    def __init__(
        self,
        graph_module: Module,
        on_node: Callable[[str, Any], object] | None = None,
        before_run: Callable[[], None] | None = None,
    ) -> None:
        self._graph_module: Any = graph_module
        self._on_node = on_node
        self._before_run = before_run

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the graphs on these inputs, bit for bit the same as that of the generated code.

        Buffers that the graphs write into, and the random generators, are restored afterwards.

        Raises:
            Exception: Raised by a node, with a note that names the node, its operation, the shapes and the line.
        """
        if self._before_run is not None:
            self._before_run()

        def run_graph(graph_module: CompiledGraphModule, *args: Any, **kwargs: Any) -> Any:
            return _FrameInterpreter(graph_module, _bound(graph_module, args, kwargs), self._on_node).run()

        snapshot = ModelSnapshot(self._graph_module.frame.module)
        with afterwards(lambda: snapshot.restore(counts_writes=True)), holding(interpreter, run_graph):
            return snapshot.separated(self._graph_module(*args, **kwargs))


class _FrameInterpreter(GraphRun):
    """Runs the graph of one frame."""

    def __init__(
        self, graph_module: CompiledGraphModule, bound: dict[str, Any], on_node: Callable[[str, Any], object] | None
    ) -> None:
        super().__init__(graph_module, graph_module.built().graph, bound)
        self._graph_module = graph_module
        self._node: fx.Node | None = None
        self._frame: Frame = graph_module.frame
        self._on_node = on_node

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Calls a graph module. Graphs of files refer to some modules by names that only the user's module has."""
        module = self.fetch_attr(target)
        record = self._node.meta.get(RECORD) if self._node is not None else None
        if isinstance(record, CallNode) and module is record.frame.module:
            module = self._graph_module.callee_of(record) or module
        return module(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node; adds a note about it to an error that it raises."""
        self._node = n
        try:
            value = super().run_node(n)
        except Exception as error:
            if not isinstance(error, (StopIteration, StopAsyncIteration)) and not has_note(error):
                add_note(error, self._failure(n))
            raise
        if self._on_node is not None:
            self._show(n, value, self._on_node)
        return value

    def _show(self, n: fx.Node, value: Any, on_node: Callable[[str, Any], object]) -> None:
        record = n.meta.get(RECORD)
        if n.op == "output":
            is_wrapped = self._frame.custom_graph is not None
            on_node(format_path((*self._frame.path, self._frame.output_node.name)), value[0] if is_wrapped else value)
        elif isinstance(record, Node) and record.kind != "call":
            on_node(format_path((*self._frame.path, record.name)), value)
        elif isinstance(record, CallNode) and record.frame.opaque_reason is not None:
            on_node(format_path((*record.frame.path, record.frame.output_node.name)), value)

    def _failure(self, n: fx.Node) -> str:
        record = n.meta.get(RECORD)
        node = record if isinstance(record, Node) else OpNode(op=n.op, target=n.target, name=n.name)
        line = node.site.source_lines()[-1] if node.site is not None else n.format_node()
        return f"raised by {format_path((*self._frame.path, node.name))!r} ({node.op})\n  {line}"


def _bound(graph_module: CompiledGraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the value that the generated code would receive for each placeholder."""
    bound = signature_with(graph_module.frame.parameters).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
