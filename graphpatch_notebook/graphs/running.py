"""What graph runs at present: tells the graph modules that it calls how they are called."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from graphpatch_notebook.interrupts import afterwards


class RunningGraph:
    """The graph that runs at present, and how the graph modules that it calls are to run.

    Attributes:
        is_record: Whether it is a record of the module's own code: then what the hooks of submodules do to tensors is
            part of it.
        is_patched_run: Whether it runs in place of its module in a call of a `PatchableGraph`: then what it calls are
            the user's modules, whose calls such a run sees.
        counts: How often it called each module that it calls several times.
    """

    __slots__ = ("counts", "is_patched_run", "is_record")

    def __init__(self, is_record: bool, is_patched_run: bool) -> None:
        self.is_record = is_record
        self.is_patched_run = is_patched_run
        self.counts: dict[int, int] = {}


running_graph: ContextVar[RunningGraph | None] = ContextVar("graphpatch_running_graph", default=None)


interpreter: ContextVar[Callable[..., Any] | None] = ContextVar("graphpatch_interpreter", default=None)
"""What runs graphs node by node at present, given a graph module and its inputs; `None` where their code runs."""


def run_as(
    function: Callable[..., Any], running: RunningGraph, owner: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with afterwards(partial(_take_back, running_graph.get(), torch.is_grad_enabled())):
        running_graph.set(running)
        return function(owner, *args, **kwargs)


def _take_back(outer: RunningGraph | None, grad_was_enabled: bool) -> None:
    running_graph.set(outer)
    # In the graph `with torch.no_grad():` is two calls, of which the second may be missing: after an error, or
    # where torch itself does it (in `autograd.Function`), out of sight.
    if torch.is_grad_enabled() != grad_was_enabled:
        torch.set_grad_enabled(grad_was_enabled)
