"""Live runs of a frame: the module's own code runs in place of its graph, and so does that of all it calls.

Graphs below it do not run: code may hand something on that no graph holds, by a global, a context variable or a hook
(transformers collects hidden states so), and only other code picks it up. But graphs that *are* their module (edited,
or from custom extraction functions) run where the code calls the module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from graphpatch_notebook.capture.forward_swap import (
    Observer,
    Swaps,
    innermost_forward,
    invoke,
    observer,
    original_forward,
)
from graphpatch_notebook.interrupts import afterwards, holding

if TYPE_CHECKING:
    from graphpatch_notebook.graphs.modules import GraphModule


trusted: ContextVar[Collection[GraphModule]] = ContextVar("graphpatch_trusted_graphs", default=())
"""The graphs that run in place of their modules at present although they are only records of these."""


def run_live(graph_module: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the module's own forward, inside of all hooks."""
    forward = original_forward(graph_module.frame.module)
    if not graph_module.calls_own_graphs:
        with observed_by(_NOBODY):
            return invoke(forward, args, kwargs)
    swaps = Swaps()
    with afterwards(swaps.let_go), observed_by(_Router(graph_module)):
        swaps.hold(callee.frame.module for callee in graph_module.callees())
        return invoke(forward, args, kwargs)


def is_hooked(module: Module) -> bool:
    """Whether hooks of accelerate lie around the module's own forward."""
    return innermost_forward(module) != "forward"


def run_in_hook(module: Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `run(args, kwargs)` where the hooks of accelerate run the module's own forward."""
    swaps = Swaps()
    with afterwards(swaps.let_go), observed_by(_Diversion(module, run)):
        swaps.hold([module])
        return module.forward(*args, **kwargs)


def observed_by(watching: Observer) -> AbstractContextManager[None]:
    """Makes `watching` see the swapped forwards that run in the block."""
    return holding(observer, watching)


def unobserved() -> AbstractContextManager[None]:
    """Keeps whoever observes at present from seeing the forwards that run in the block."""
    return observed_by(_NOBODY)


class _Nobody:
    """Takes no notice, and keeps others from taking notice."""

    def on_forward(self, module: Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return invoke(forward, args, kwargs)


_NOBODY = _Nobody()


class _Router:
    """Diverts what a module calls to the graph modules of these calls."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        self._counts: dict[int, int] = {}

    def on_forward(self, module: Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call_index = self._counts.get(id(module), 0)
        self._counts[id(module)] = call_index + 1
        callee = self._graph_module.callee(module, call_index)
        with observed_by(_NOBODY):
            return invoke(forward, args, kwargs) if callee is None else callee.run_frame(args, kwargs)


class _Diversion:
    """Diverts the forward of one module."""

    def __init__(self, module: Module, run: Callable[..., Any]) -> None:
        self._module = module
        self._run = run

    def on_forward(self, module: Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with observed_by(_NOBODY):
            return self._run(args, kwargs) if module is self._module else invoke(forward, args, kwargs)
