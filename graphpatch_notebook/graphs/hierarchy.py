"""Builds the hierarchy of graph modules from the frames of a capture, and runs the user's postprocessing function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module, ModuleDict, ModuleList, Sequential

from graphpatch_notebook.capture.records import CallNode, Frame
from graphpatch_notebook.errors import CaptureError
from graphpatch_notebook.graphs.compiled_module import CompiledGraphModule
from graphpatch_notebook.graphs.edits import fingerprint
from graphpatch_notebook.graphs.modules import (
    GraphModule,
    MultiplyInvokedModule,
    OpaqueGraphModule,
    UnusedModule,
)
from graphpatch_notebook.paths import call_name, format_path, unique_name

_CONTAINERS = (ModuleList, ModuleDict, Sequential)


def build_hierarchy(root: Frame) -> GraphModule:
    """Returns the graph module of the root frame, with those of all frames below it under the names of the model.

    Containers that are not called themselves (`ModuleList`, ...) are containers of the same class here. No graphs are
    built, and no code.
    """
    return _HierarchyBuilder().build(root)


class _HierarchyBuilder:
    def __init__(self) -> None:
        # The first graph module of each module: a frame may call a module that another frame holds.
        self._by_module: dict[int, Module] = {}
        self._pending: list[tuple[Module, str, Module]] = []

    def build(self, root: Frame) -> GraphModule:
        result = self._graph_module(root)
        self._by_module.setdefault(id(root.module), result)
        for holder, name, module in self._pending:
            holder._modules[name] = self._elsewhere(module)
        return result

    def _graph_module(self, frame: Frame) -> GraphModule:
        cls = CompiledGraphModule if frame.opaque_reason is None else OpaqueGraphModule
        result = cls(frame)
        calls: dict[int, list[GraphModule]] = {}
        for node in frame.calls():
            if isinstance(node, CallNode):
                callee = self._graph_module(node.frame)
                result.callees.append(callee)
                calls.setdefault(id(callee.frame.module), []).append(callee)
        called = {key: _together(graph_modules) for key, graph_modules in calls.items()}
        for key, module in called.items():
            self._by_module.setdefault(key, module)
        unplaced = dict(called)
        self._fill(result, frame.module, called, _holders(frame), unplaced)
        for key, module in unplaced.items():  # modules in plain lists, modules of other modules
            name = call_name(calls[key][0].frame.attribute_path)
            result._modules[unique_name(name, {*result._modules, *result._parameters, *result._buffers})] = module
        return result

    def _fill(
        self,
        mirror: Module,
        module: Module,
        called: dict[int, Module],
        holders: set[int],
        unplaced: dict[int, Module],
    ) -> None:
        """Gives `mirror` a child for each child of `module`, under the same name."""
        for name, child in module._modules.items():
            key = id(child)
            if child is None:
                mirror._modules[name] = None
            elif key in called:
                mirror._modules[name] = called[key]
                unplaced.pop(key, None)
            elif key in holders:
                mirror._modules[name] = container = _container(child)
                self._fill(container, child, called, holders, unplaced)
            else:
                mirror._modules[name] = None  # keeps its place
                self._pending.append((mirror, name, child))

    def _elsewhere(self, module: Module) -> Module:
        """Returns the graph module of a module that is not called by the frame that holds it."""
        known = self._by_module.get(id(module))
        if known is None:
            is_used = any(id(inside) in self._by_module for inside in module.modules())
            self._by_module[id(module)] = known = _container(module) if is_used else UnusedModule(module)
            if is_used:
                known._modules.update({n: c and self._elsewhere(c) for n, c in module._modules.items()})
        return known


def _together(graph_modules: list[GraphModule]) -> Module:
    """Returns one module with the graph modules of all calls of a module in a frame."""
    first = graph_modules[0]
    call = first.frame.call
    if call is None or call.call_count == 1:
        return first
    by_index: dict[int, Module] = {}
    for graph_module in graph_modules:
        if (call := graph_module.frame.call) is not None:
            by_index[call.call_index] = graph_module
    # A call that raised, and whose error the model handled, leaves a gap.
    calls = [by_index.get(i) or UnusedModule(first.frame.module) for i in range(max(by_index) + 1)]
    return MultiplyInvokedModule(first.frame.module, calls)


def _holders(frame: Frame) -> set[int]:
    """Returns the ids of the modules that only contain modules that the frame calls."""
    found: set[int] = set()
    for node in frame.calls():
        holder: Module | None = frame.module
        for name in str(node.target).split(".")[:-1]:
            holder = holder._modules.get(name) if holder is not None else None
            found.add(id(holder))
    return found


def _container(module: Module) -> Module:
    """Returns an empty module of the same kind."""
    if type(module) in _CONTAINERS:
        return type(module)()
    return UnusedModule(module, children=dict)


# -- postprocessing ----------------------------------------------------------------------------------------------------


def postprocess(graph_module: GraphModule, function: Callable[[Any, Module], None]) -> None:
    """Calls `function(graph_module, module)` for each graph module that has a graph, innermost first.

    If it edits the graph, the edited graph replaces the module; if not, nothing changes.

    Raises:
        CaptureError: An edited graph is malformed, or refers to something that is gone.
        Exception: Any error that `function` raises.
    """
    for callee in graph_module.callees:
        postprocess(callee, function)
    if not isinstance(graph_module, CompiledGraphModule):
        return
    before = fingerprint(graph_module.graph)
    function(graph_module, graph_module.frame.module)
    if fingerprint(graph_module.graph) == before:
        return
    try:
        graph_module.recompile()
    except RuntimeError as error:
        frame = graph_module.frame
        raise CaptureError(
            f"the postprocessing function left the graph of {format_path(frame.path) or '<root>'!r} "
            f"({type(frame.module).__name__}) in a state that cannot run: {error}"
        ) from error
