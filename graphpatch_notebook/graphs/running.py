"""What is running: a graph or the module's own code, and the hooks between them.

In a live run the module's own code runs in place of its graph, and so does that of all it calls. Graphs below it do not
run: code may pass on a value that no graph holds, through a global, a context variable or a hook (transformers collects
hidden states like that), and only other code reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from graphpatch_notebook.capture.held_values import plain_tensors
from graphpatch_notebook.capture.observers import (
    Observer,
    Swaps,
    innermost_forward,
    invoke,
    observer,
)
from graphpatch_notebook.errors import GraphError
from graphpatch_notebook.interrupts import afterwards, holding
from graphpatch_notebook.torch_compat import forward_hooks, forward_pre_hooks, version_of


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


trusted: ContextVar[Collection[Module]] = ContextVar("graphpatch_trusted_graphs", default=())
"""The graphs that currently run in place of their modules although they are only records."""


def is_hooked(module: Module) -> bool:
    """Whether hooks of accelerate wrap the module's own forward."""
    return innermost_forward(module) != "forward"


def run_in_hook(module: Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `run(args, kwargs)` where the hooks of accelerate run the module's own forward."""
    swaps = Swaps()
    with afterwards(swaps.let_go), observed_by(Redirection(lambda other: run if other is module else None)):
        swaps.hold([module])
        return module.forward(*args, **kwargs)


def observed_by(watching: Observer) -> AbstractContextManager[None]:
    """Makes `watching` observe the swapped forwards that run in the block."""
    return holding(observer, watching)


def unobserved() -> AbstractContextManager[None]:
    """Hides the forwards that run in the block from the current observer."""
    return observed_by(_NOBODY)


class Redirection:
    """Hides forwards from other observers, and runs what `instead_of` returns for a module in place of its forward."""

    def __init__(self, instead_of: Callable[[Module], Callable[..., Any] | None]) -> None:
        self._instead_of = instead_of

    def on_forward(self, module: Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._instead_of(module)
        with unobserved():
            return invoke(forward, args, kwargs) if run is None else run(args, kwargs)


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
