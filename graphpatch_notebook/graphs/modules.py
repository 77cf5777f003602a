"""The graph modules: a hierarchy that mirrors the model's, in which graphs run in place of the modules' own code.

    GraphModule                  one frame of one of the user's modules
    ├── CompiledGraphModule      has a graph, and runs it if it replaces the module
    ├── OpaqueGraphModule        has no graph: runs the module
    └── UnusedModule             was not reached by the example: runs the module
    MultiplyInvokedModule        the graph modules of a module that was called several times

A graph module shares parameters, buffers and hooks with its module (the same dictionaries), has the graph modules of
the submodules under the same names, and reads all other attributes from its module.

In a live run the module's own code runs in place of its graph, and so does that of all it calls. Graphs below it do not
run: code may pass on a value that no graph holds, through a global, a context variable or a hook (transformers collects
hidden states like that), and only other code reads it.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module, ModuleList, Parameter

from graphpatch_notebook.capture import call_sites
from graphpatch_notebook.capture.modules import (
    Swaps,
    delegate,
    innermost_forward,
    observer,
    original_forward,
    plain_tensors,
)
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import GraphError, afterwards, holding
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.torch_compat import forward_hooks, forward_pre_hooks, version_of

# -- what runs ---------------------------------------------------------------------------------------------------------


class RunningGraph:
    """The graph that is running, and how the graph modules that it calls run."""

    __slots__ = ("counts", "is_patched_run", "is_record")

    def __init__(self, is_record: bool, is_patched_run: bool) -> None:
        # Whether it is a record of the module's own code. It includes what hooks of submodules do to tensors.
        self.is_record = is_record
        # Whether it runs in place of its module in a call of a `PatchableGraph`. Then it calls the user's modules, as
        # such a run sees their calls.
        self.is_patched_run = is_patched_run
        self.counts: dict[int, int] = {}  # how often it called each module that it calls several times


running_graph: ContextVar[RunningGraph | None] = ContextVar("graphpatch_running_graph", default=None)


interpreter: ContextVar[Callable[..., Any] | None] = ContextVar("graphpatch_interpreter", default=None)
"""Runs graphs node by node, given a graph module and its inputs; `None` if their generated code runs."""


def run_as(
    function: Callable[..., Any], running: RunningGraph, owner: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with afterwards(partial(_take_back, running_graph.get(), torch.is_grad_enabled())):
        running_graph.set(running)
        return function(owner, *args, **kwargs)


def _take_back(outer: RunningGraph | None, grad_was_enabled: bool) -> None:
    running_graph.set(outer)
    # In the graph `with torch.no_grad():` is two calls. The second one may be missing: after an error, or
    # where torch itself does it (in `autograd.Function`), out of sight.
    if torch.is_grad_enabled() != grad_was_enabled:
        torch.set_grad_enabled(grad_was_enabled)


# -- the module's own code ---------------------------------------------------------------------------------------------


def is_hooked(module: Module) -> bool:
    """Whether hooks of accelerate wrap the module's own forward."""
    return innermost_forward(module) != "forward"


def run_in_hook(module: Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `run(args, kwargs)` where the hooks of accelerate run the module's own forward."""
    swaps = Swaps()
    with afterwards(swaps.release), holding(observer, Redirection(lambda other: run if other is module else None)):
        swaps.hold([module])
        return module.forward(*args, **kwargs)


def unobserved() -> AbstractContextManager[None]:
    """Hides the forwards that run in the block from the current observer."""
    return holding(observer, _NOBODY)


class Redirection:
    """Hides forwards from other observers, and runs what `instead_of` returns for a module in place of its forward."""

    def __init__(self, instead_of: Callable[[Module], Callable[..., Any] | None]) -> None:
        self._instead_of = instead_of

    def on_forward(self, module: Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._instead_of(module)
        with unobserved():
            return call_sites.invoke(forward, args, kwargs) if run is None else run(args, kwargs)


_NOBODY = Redirection(lambda _: None)


# -- hooks -------------------------------------------------------------------------------------------------------------


def call_with_hooks(module: Module, recorded: Collection[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `forward` of `module` between its hooks, and returns the result that the caller gets.

    Hooks that ran when the caller was captured (their ids are `recorded`) run for their side effects: what they return
    is dropped, as the caller's graph computes it. One that writes into a tensor is a `GraphError`: the graph does, too.
    """
    for key, hook, takes_kwargs in forward_pre_hooks(module):
        if key in recorded:
            _run_recorded(module, hook, (args, kwargs) if takes_kwargs else (args,))
        elif takes_kwargs:
            args, kwargs = hook(module, args, kwargs) or (args, kwargs)
        elif (result := hook(module, args)) is not None:
            args = result if isinstance(result, tuple) else (result,)
    output = module.forward(*args, **kwargs)
    for key, hook, takes_kwargs in forward_hooks(module):
        given = (args, kwargs, output) if takes_kwargs else (args, output)
        if key in recorded:
            _run_recorded(module, hook, given)
        elif (result := hook(module, *given)) is not None:
            output = result
    return output


def _run_recorded(module: Module, hook: Callable[..., Any], given: tuple[Any, ...]) -> None:
    tensors = plain_tensors(given)
    versions = [*map(version_of, tensors)]
    hook(module, *given)
    if [*map(version_of, tensors)] != versions:
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise GraphError(
            f"the forward hook {name} of a {type(module).__name__} writes into a tensor in place, as the edited graph "
            "of its caller does, too: make the hook return a new tensor, or remove it before the model is captured"
        )


# -- graph modules -----------------------------------------------------------------------------------------------------


# What every module has: parameters, buffers, hooks. Plain flags among them are read off the user's module.
_SHARED = tuple(
    (name, type(value))
    for name, value in vars(Module()).items()
    if isinstance(value, (dict, set)) and name != "_modules"
)
_MAKE_MODULES = type(vars(Module())["_modules"])


class Mirror(Module):
    """A module that shares everything but the submodules with another module. Abstract."""

    # Set without `Module.__init__`: a hierarchy may have thousands of these.
    _original_module: Module

    def __init__(self, module: Module) -> None:
        state = self.__dict__
        original = module.__dict__
        for name, make in _SHARED:
            # Modules of torchscript do not have all of them.
            state[name] = original[name] if name in original else make()
        state["_modules"] = _MAKE_MODULES()
        state["_original_module"] = module

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__
        for registry in ("_parameters", "_buffers", "_modules"):
            if name in state.get(registry, ()):
                return state[registry][name]
        if "_original_module" not in state:  # being copied or unpickled
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r} yet")
        return getattr(state["_original_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name) or name in self.__dict__:
            object.__setattr__(self, name, value)
        elif isinstance(value, (Tensor, Module)) and not hasattr(self._original_module, name):
            # For an edited graph: the user's module does not change.
            own: dict[str, Any] = self._modules if isinstance(value, Module) else self.__dict__
            own[name] = value
        else:
            setattr(self._original_module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self._original_module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._modules, *dir(self._original_module)})

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Gives this module, for its graph, a tensor that the user's module does not have."""
        setattr(self, name, tensor)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Gives this module, for its graph, a parameter that the user's module does not have."""
        setattr(self, name, param)


delegate(Mirror, "_original_module", "train state_dict load_state_dict named_parameters named_buffers _apply".split())


class GraphModule(Mirror):
    """The graph module of one frame: one invocation of one of the user's modules. Abstract.

    It is called like the module, and returns what the module returns.
    """

    _frame: Frame
    callees: list[GraphModule]  # those of the calls of this one, in order

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame.module)
        state = self.__dict__
        state["_frame"] = frame
        state["callees"] = []

    @property
    def frame(self) -> Frame:
        """The record of the frame."""
        return self._frame

    @property
    def path(self) -> str:
        """The path of the frame from the root; empty for the root."""
        return format_path(self._frame.path)

    @property
    def reason(self) -> str | None:
        """Why there is no graph, or why the graph may differ from the module; `None` if neither applies."""
        reasons = (self._frame.opaque_reason, self._frame.custom_failure)
        return "; ".join(reason for reason in reasons if reason is not None) or None

    @property
    def has_own_graph(self) -> bool:
        """Whether there is a graph that replaces the module (edited, or custom), rather than records it."""
        return self._frame.has_own_graph

    def callee(self, module: Module, call_index: int) -> GraphModule | None:
        """Returns the graph module of the given call of `module` in this frame, if the capture had that call."""
        for callee in self.callees:
            call = callee._frame.call
            if callee._original_module is module and call is not None and call.call_index == call_index:
                return callee
        return None

    def walk(self) -> Iterator[GraphModule]:
        """Yields this graph module and all below it, in order of execution."""
        yield self
        for callee in self.callees:
            yield from callee.walk()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the hooks of the user's module and the frame, or the frame alone if a graph calls it.

        The graph of the caller already has what hooks do to tensors.
        """
        if is_compiling():
            is_inside = self._frame.parent is not None
            return self.forward(*args, **kwargs) if is_inside else super().__call__(*args, **kwargs)
        caller = running_graph.get()
        if caller is None:
            return super().__call__(*args, **kwargs)
        if not caller.is_record:
            return Module.__call__(self, *args, **kwargs)
        if caller.is_patched_run:
            return call_with_hooks(self._original_module, self._frame.conditions.hooks, args, kwargs)
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the frame: its graph, or the module if no graph can replace it."""
        if is_hooked(self._original_module):
            return run_in_hook(self._original_module, self.run_frame, args, kwargs)
        return self.run_frame(args, kwargs)

    @abstractmethod
    def run_frame(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the frame inside of all hooks."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        result = memo[id(self)] = type(self).__new__(type(self))
        # The frame first: copying it also copies all frames below it, and the callees then use these copies.
        result.__dict__["_frame"] = copy.deepcopy(self._frame, memo)
        module = result.__dict__["_original_module"] = copy.deepcopy(self._original_module, memo)
        for name, value in self.copied_attributes().items():
            # The registries of TorchScript modules cannot be copied by themselves.
            is_shared = value is self._original_module.__dict__.get(name)
            result.__dict__[name] = module.__dict__.get(name) if is_shared else copy.deepcopy(value, memo)
        return result

    def copied_attributes(self) -> dict[str, Any]:
        """Returns the attributes, other than the frame, that a deep copy copies."""
        return {name: value for name, value in self.__dict__.items() if name != "_frame"}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise GraphError("graphs cannot be pickled: use pg.save(file), or pickle a module of pg.to_fx(...)")


# -- live runs


def run_live(graph_module: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the module's own forward, inside of all hooks."""
    forward = original_forward(graph_module.frame.module)
    if not graph_module.frame.runs_own_graphs:
        with unobserved():
            return call_sites.invoke(forward, args, kwargs)
    counts: dict[int, int] = {}

    def instead_of(module: Module) -> Callable[..., Any] | None:
        index = counts[id(module)] = counts.get(id(module), -1) + 1
        callee = graph_module.callee(module, index)
        return None if callee is None else callee.run_frame

    swaps = Swaps()
    with afterwards(swaps.release), holding(observer, Redirection(instead_of)):
        swaps.hold(callee.frame.module for callee in graph_module.callees)
        return call_sites.invoke(forward, args, kwargs)


@final
class OpaqueGraphModule(GraphModule):
    """A module without a graph. Runs the module itself.

    The options say to skip it, it could not be captured, or its weight is quantized; `reason` says which.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import ExtractionOptions, PatchableGraph
        >>> pg = PatchableGraph(torch.nn.ReLU(), ExtractionOptions(skip_compilation=True), torch.ones(2))
        >>> pg._graph_module.reason
        'the options say to skip it'
    """

    def run_frame(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module."""
        return run_live(self, args, kwargs)


@final
class UnusedModule(Mirror):
    """A submodule that the example did not reach, or only in part. Runs the module itself.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> class Spare(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.spare = torch.nn.ReLU()
        ...     def forward(self, x):
        ...         return x + 1
        >>> PatchableGraph(Spare(), torch.ones(2))
        PatchableGraph(
          (_graph_module): CompiledGraphModule(
            (spare): UnusedModule()
          )
        )
    """

    def __init__(self, module: Module, children: Callable[[], dict[str, Module | None]] | None = None) -> None:
        super().__init__(module)
        self.__dict__["_modules"].update(module._modules if children is None else children())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        return self._original_module.forward(*args, **kwargs)


@final
class MultiplyInvokedModule(ModuleList):
    """The graph modules of a module that was called several times in one frame, in order of the calls.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> class Twice(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.act = torch.nn.ReLU()
        ...     def forward(self, x):
        ...         return self.act(self.act(x) - 1)
        >>> pg = PatchableGraph(Twice(), torch.ones(2))
        >>> len(pg._graph_module.act), "act_0.output" in pg.nodes, "act_1.output" in pg.nodes
        (2, True, True)
    """

    def __init__(self, module: Module, calls: list[Module]) -> None:
        super().__init__(calls)
        self.__dict__["_original_module"] = module

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules", {})
        if name in modules:
            return modules[name]
        if "_original_module" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_original_module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the next of the calls if a graph calls it; else it is not known which call is meant (a `GraphError`)."""
        caller = running_graph.get()
        if caller is not None:
            index = caller.counts.get(id(self), 0)
            caller.counts[id(self)] = index + 1
            return (self[index] if index < len(self) else self._original_module)(*args, **kwargs)
        name = type(self._original_module).__name__
        raise GraphError(f"this {name} was called {len(self)} times; call one of its graphs: module[0](...)")
