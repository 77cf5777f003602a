"""The graph module of a frame that has a graph, and the hierarchy of the graph modules of a capture."""

from __future__ import annotations

import copy
import functools
import itertools
import keyword
import threading
from collections.abc import Callable
from operator import attrgetter
from textwrap import indent
from typing import Any, final

from torch import fx
from torch.compiler import is_compiling
from torch.nn import Module, ModuleDict, ModuleList, Sequential

from graphpatch_notebook.capture.modules import held_at, module_at
from graphpatch_notebook.capture.records import RECORD, CallNode, Frame, Node, refer_to_copies
from graphpatch_notebook.errors import CaptureError, GraphError, holding
from graphpatch_notebook.graphs.build import BuiltGraph, build
from graphpatch_notebook.graphs.edits import (
    SnapshotCalls,
    check_doubts,
    check_edited,
    fingerprint,
    guarded,
    update_records,
    where,
)
from graphpatch_notebook.graphs.generated_code import GeneratedCode, generate, name_of_module, weave, woven_patches
from graphpatch_notebook.graphs.modules import (
    GraphModule,
    MultiplyInvokedModule,
    OpaqueGraphModule,
    RunningGraph,
    UnusedModule,
    interpreter,
    run_as,
    run_live,
)
from graphpatch_notebook.paths import call_name, format_path, unique_name
from graphpatch_notebook.torch_compat import (
    codegen_of,
    is_tracing,
    never_compiled,
    run_while_compiling,
    tensor_metadata,
)
from graphpatch_notebook.values import ABSENT, TensorSpec

_build_lock = threading.RLock()
_NO_NAMES: frozenset[str] = frozenset()


@final
class CompiledGraphModule(GraphModule):
    """Runs the graph of one frame as generated code.

    The code is generated when it is first needed. A graph that is a record of the module runs only where it is asked
    for (`verify`, the interpreter, `to_fx`); in calls the module itself runs. A graph that was edited, or that a custom
    extraction function made, replaces the module: it always runs.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> pg = PatchableGraph(torch.nn.ReLU(), torch.ones(2))
        >>> print(pg._graph_module.code)
        def forward(self, input : torch.Tensor):
            input_1 = input
            relu = torch.nn.functional.relu(input_1, inplace = False);  input_1 = None
            return relu
    """

    _built: BuiltGraph | None = None  # what runs
    _draft: fx.Graph | None = None  # a copy, which the user may have edited since
    _edited_calls: SnapshotCalls | None = None
    _generated: dict[frozenset[str], GeneratedCode]
    _aliases: dict[str, Any]
    _callee_by_frame: dict[int, GraphModule]

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame)
        self.__dict__.update(_generated={}, _aliases={}, _callee_by_frame={})

    @property
    def graph(self) -> fx.Graph:
        """The graph, built when it is first read. Edits have an effect after `recompile()`. May be set."""
        if self._draft is None:
            self._draft = weave(self.built().graph, ())
        return self._draft

    @graph.setter
    def graph(self, graph: fx.Graph) -> None:
        self._draft = graph
        self.recompile()

    def recompile(self) -> None:
        """Marks the graph as edited: from now on it replaces the module, and its code is generated again when needed.

        Raises:
            RuntimeError: The graph is malformed, or refers to something that is gone.
        """
        graph, built = self.graph, self.built()
        graph.lint()
        check_edited(graph, self._frame, self, self.original_path)
        if self._frame.custom_graph is None:
            check_doubts(self._frame)
        self._generated.clear()
        self._frame.is_edited = True
        update_records(self._frame, graph, lambda path: attrgetter(path)(self))
        built.graph = weave(graph, ())
        if self._frame.custom_graph is None:
            self._edited_calls = SnapshotCalls(self._frame, graph)
        else:
            self._frame.custom_graph = built.graph
        self._frame.note_own_graph()
        self._frame.capture.edits += 1

    def _why_gone(self, name: str) -> str:
        nodes = (node for node in self.built().graph.nodes if node.op == "get_attr" and node.target == name)
        what = next((str(node.meta[RECORD].spec) for node in nodes if RECORD in node.meta), "a value")
        return (
            f"{where(self._frame)} uses an object ({what}) that existed only while the model was captured, such as a "
            "cache; to run it, make the PatchableGraph with inputs that do not need it (transformers: use_cache=False)"
        )

    @property
    def code(self) -> str:
        """The Python code of the current graph."""
        return self._code().text

    def print_readable(self, print_output: bool = True, **options: Any) -> str:
        """Prints and returns the code of this graph and those below it, with shapes, dtypes and the user's lines.

        Arguments are those of `torch.fx.GraphModule.print_readable`.
        """
        graph = weave(self.built().graph, ())
        for node in graph.nodes:
            if isinstance(record := node.meta.get(RECORD), Node):
                if isinstance(spec := record.spec, TensorSpec):
                    node.meta.setdefault("tensor_meta", tensor_metadata(spec.shape, spec.dtype))
                if record.site is not None:
                    node.meta["stack_trace"] = "\n".join(map(str, record.site.source_lines()))
        text = graph.python_code(name_of_module(graph), verbose=True, **options).src.lstrip("\n")
        inner = [each.print_readable(False, **options) for each in self.callees if isinstance(each, type(self))]
        name = self._frame.call.name if self._frame.call is not None else type(self._original_module).__name__
        text = f"class {name}(torch.nn.Module):\n" + indent("\n".join([text, *inner]), "    ")
        if print_output:
            print(text)
        return text

    @property
    def doubts(self) -> list[str]:
        """Why the graph may differ from the module, on other inputs or on all; a sentence each."""
        return list(map(str, self._frame.doubts))

    def input_problem(self, node: Node) -> str | None:
        """Returns why an input cannot be patched in this edited graph, if it cannot."""
        return None if self._edited_calls is None else self._edited_calls.input_problem(node)

    def run_frame(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the graph if it replaces the module, or is requested; else the module."""
        if is_compiling() or is_tracing():
            if self.has_own_graph:
                return self.run_graph(args, kwargs)
            # The calls below are traced, unless graphs below are edited: then they run untraced.
            is_live = self._frame.runs_own_graphs
            return _run_live(self, args, kwargs) if is_live else self._original_module.forward(*args, **kwargs)
        if self.has_own_graph:
            self._check_call(args, kwargs)
            return self.run_graph(args, kwargs)
        return run_live(self, args, kwargs) if interpreter.get() is None else self.run_graph(args, kwargs)

    def run_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the current graph: its generated code, or node by node in an interpreted run."""
        if is_compiling():
            _generate_code(self)
            return self._unwrapped(self._generated[_NO_NAMES].function(self, *args, **kwargs))
        function = interpreter.get() or self._code().function
        running = RunningGraph(self._frame.custom_graph is None, is_patched_run=False)
        return self._unwrapped(run_as(function, running, self, args, kwargs))

    def run_patched(
        self,
        names: frozenset[str],
        patched: Callable[[str, Any], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs the graph in place of its module; the values of the nodes `names` go through `patched(name, value)`."""
        is_record = self._frame.custom_graph is None
        self._check_call(args, kwargs)
        function = self._code(names).function
        # The graph of a custom extraction function is written over the user's module, others over this one.
        owner = self if is_record else self._original_module
        with holding(woven_patches, patched):
            return self._unwrapped(run_as(function, RunningGraph(is_record, is_patched_run=True), owner, args, kwargs))

    def _check_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Checks that the graph, if it was edited, is valid for this call."""
        if self._edited_calls is not None:
            self._edited_calls.check(args, kwargs)

    def _unwrapped(self, result: Any) -> Any:
        # The graphs of custom extraction functions return a one-element tuple.
        return result[0] if self._frame.custom_graph is not None else result

    def built(self) -> BuiltGraph:
        """Returns the current graph with its constants."""
        if self._built is None:
            with _build_lock:
                if self._built is None:
                    self._aliases.clear()
                    self._built = build(self._frame, self)
        return self._built

    def _code(self, names: frozenset[str] = _NO_NAMES) -> GeneratedCode:
        """Returns the code in which the values of the nodes called `names` are passed to patches."""
        generated = self._generated.get(names)
        if generated is None:
            graph = self.built().graph
            graph = weave(graph, names) if names or self._edited_calls is not None else graph
            if self._edited_calls is not None:
                graph = guarded(graph, self._frame)
            generated = self._generated[names] = generate(graph)
        return generated

    # -- what the code refers to ---------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__
        if name in state.get("_aliases", ()):
            alias = state["_aliases"][name]
            held = held_at(self._original_module, alias) if isinstance(alias, str) else alias
            if held is ABSENT:
                raise AttributeError(f"{type(self._original_module).__name__} has no attribute {alias!r}")
            return held
        built = state.get("_built")
        if built is not None and name in built.constants:
            value = built.constants[name]()
            if value is None:
                raise GraphError(self._why_gone(name))
            return value
        return super().__getattr__(name)

    def of_call(self, node: CallNode) -> str:
        """Returns the expression by which the code calls the graph module of a call node."""
        callee = self.callee_of(node)
        if callee is None:
            raise GraphError(f"the call {node.name!r} in {self.path or 'the root'!r} has no graph module")
        # The target first, as it usually fits: a graph may have thousands of calls and children.
        names = itertools.chain([node.target], (name for name, _ in self.named_children()))
        paths = (f"{name}.{node.call_index}" if node.call_count > 1 else name for name in names)
        return next((p for p in paths if _is_writable(p) and module_at(self, p) is callee), None) or self._alias(
            node.name, callee
        )

    def callee_of(self, node: CallNode) -> GraphModule | None:
        """Returns the graph module that a call node of the graph calls."""
        known = self._callee_by_frame
        if len(known) != len(self.callees):
            known.clear()
            known.update((id(callee.frame), callee) for callee in self.callees)
        return known.get(id(node.frame))

    def of_attribute(self, path: str) -> str:
        """Returns the expression by which the code reads what the user's module has at `path`."""
        return path if _is_writable(path) else self._alias(path, path)

    def original_path(self, target: str) -> str:
        """Returns the attribute path of the user's module that the code reads as `target`."""
        alias = self._aliases.get(target)
        return alias if isinstance(alias, str) else target

    def _alias(self, name: str, what: Any) -> str:
        text = "_" + "".join(letter if letter.isalnum() else "_" for letter in name)
        alias = unique_name(text, {*self._aliases, *dir(self)})
        self._aliases[alias] = what
        return alias

    # -- copies --------------------------------------------------------------------------------------------------------

    def copied_attributes(self) -> dict[str, Any]:
        """Returns the attributes of a copy. Code is generated again when it is needed, graphs are built again."""
        empty: dict[str, Any] = {"_generated": {}, "_callee_by_frame": {}}
        return super().copied_attributes() | empty | dict.fromkeys(("_built", "_draft", "_edited_calls"))

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledGraphModule:
        result: CompiledGraphModule = super().__deepcopy__(memo)
        if self._frame.is_edited:
            own = self.built().graph
            graph = copy.deepcopy(own, memo)
            graph.set_codegen(codegen_of(own))
            refer_to_copies(graph, memo)
            copies = {name: copy.deepcopy(get(), memo) for name, get in self.built().constants.items()}
            result._built = BuiltGraph(graph, {name: functools.partial(copies.get, name) for name in copies})
            if result.frame.custom_graph is not None:
                result.frame.custom_graph = result._built.graph
            else:
                result._edited_calls = SnapshotCalls(result.frame, result._built.graph)
        return result


def own_graphs(graph_module: GraphModule) -> list[CompiledGraphModule]:
    """Returns the graph modules in this hierarchy whose graph replaces the module, in order of execution."""
    return [graph for graph in graph_module.walk() if isinstance(graph, CompiledGraphModule) and graph.has_own_graph]


_run_live = never_compiled(run_live)
_generate_code = run_while_compiling(CompiledGraphModule._code)


def _is_writable(path: str) -> bool:
    """Whether Python code can reach `path` from a graph module by attributes."""
    return not any(keyword.iskeyword(name) or name in _TAKEN or not _is_quotable(name) for name in path.split("."))


def _is_quotable(name: str) -> bool:
    """Whether a name can be written in double quotes: fx writes `getattr(self, "...")` without escapes."""
    return name.isprintable() and '"' not in name and "\\" not in name


_TAKEN = frozenset(dir(CompiledGraphModule)) | frozenset(dir(ModuleList))


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
