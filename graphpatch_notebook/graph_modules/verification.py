"""`verify`: compares every graph of a model with the module that it is a record of, in one run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch.nn import Module

from graphpatch_notebook.capture.forward_swap import invoke, swap, unswap
from graphpatch_notebook.capture.tensor_sources import reachable_modules
from graphpatch_notebook.graph_modules import belief
from graphpatch_notebook.graph_modules.belief import RunnableGraph
from graphpatch_notebook.graph_modules.live_runs import Runnable, observed_by
from graphpatch_notebook.graph_modules.snapshots import ModuleState, copied
from graphpatch_notebook.paths import format_path

Status: TypeAlias = Literal["equal", "refused", "opaque", "own graph", "not reached"]


@dataclass(frozen=True)
class FrameReport:
    """How the graph of one frame compares with its module.

    Attributes:
        path: The path of the frame; empty for the root.
        module_class: The class of the module.
        status: `equal` bit for bit; `refused`, then the module runs in its place; `opaque`, there is no graph;
            `own graph`, the graph *is* the module (edited, or custom); `not reached` by these inputs.
        reason: Why it was refused, or why there is no graph.
    """

    path: str
    module_class: str
    status: Status
    reason: str | None = None


@dataclass(frozen=True)
class VerificationReport:
    """How all graphs of a model compare with their modules on the same inputs.

    Attributes:
        frames: A report for each frame, in order of execution.
    """

    frames: tuple[FrameReport, ...]

    @property
    def refused(self) -> tuple[FrameReport, ...]:
        """The reports of the frames whose graphs were refused."""
        return tuple(frame for frame in self.frames if frame.status == "refused")

    @property
    def is_equal(self) -> bool:
        """Whether no graph was refused."""
        return not self.refused

    def counts(self) -> dict[str, int]:
        """Returns how many frames there are of each status."""
        found: dict[str, int] = {}
        for frame in self.frames:
            found[frame.status] = found.get(frame.status, 0) + 1
        return found

    def __str__(self) -> str:
        title = ", ".join(f"{count} {status}" for status, count in self.counts().items())
        rows = [(f.path or "<root>", f.module_class, f.status, f.reason or "") for f in self.frames if f.reason]
        widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else []
        lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
        return "\n".join([title, *lines])

    def __iter__(self) -> Iterator[FrameReport]:
        return iter(self.frames)


def verify(root: Runnable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> VerificationReport:
    """Compares every graph with its module on the inputs that it gets when the model runs on `args`, `kwargs`.

    The model runs on copies of the inputs, and its buffers and the random state are put back afterwards. The graphs
    that prove equal are believed for inputs of this form from then on.

    Raises:
        Exception: Whatever the model raises on these inputs.
    """
    verifier = _Verifier(root)
    state = ModuleState(root.frame.module)
    first, second = copied((args, kwargs)), copied((args, kwargs))
    swapped = swap(reachable_modules(root.frame.module))
    try:
        with observed_by(verifier):
            root.frame.module(*first[0], **first[1])
    finally:
        unswap(swapped)
        state.restore()
    if isinstance(root, RunnableGraph) and verifier.reasons.get(root, "") is None:
        try:
            verifier.reasons[root] = _whole(root, *second)
        finally:
            state.restore()
    return VerificationReport(tuple(_report(g, verifier.reasons) for g in _walk(root)))


def _whole(root: RunnableGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Returns why the graphs do not equal the model when all of them run together, if they do not."""
    key, reason = belief.signature(root, args, kwargs)
    if reason is None:
        with belief.unreported():
            belief.confirm(root, key, args, kwargs)
        reason = root.belief.verdicts[key]
    return reason


class _Verifier:
    """Examines each graph when the frame that it is a record of comes up."""

    def __init__(self, root: Runnable) -> None:
        self._root: Runnable | None = root
        self._stack: list[tuple[Runnable | None, dict[int, int]]] = []
        self.reasons: dict[Runnable, str | None] = {}

    def on_forward(self, module: Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        graph_module = self._graph_module(module)

        def run() -> Any:
            self._stack.append((graph_module, {}))
            try:
                with observed_by(self):
                    return invoke(forward, args, kwargs)
            finally:
                self._stack.pop()

        if graph_module is not None and graph_module.has_own_graph:
            return graph_module.run_frame(args, kwargs)
        if graph_module is None or graph_module.frame.opaque_reason is not None:
            return run()
        assert isinstance(graph_module, RunnableGraph)
        key, reason = belief.signature(graph_module, args, kwargs)
        if reason is not None:
            self.reasons[graph_module] = reason
            return run()
        result = belief.examine(graph_module, key, args, kwargs, run, is_alone=True)
        self.reasons[graph_module] = graph_module.belief.verdicts[key]
        return result

    def _graph_module(self, module: Module) -> Runnable | None:
        """Returns the graph module of the frame that begins, if it came up during capture."""
        if not self._stack:
            root, self._root = self._root, None
            return root if root is not None and root.frame.module is module else None
        caller, counts = self._stack[-1]
        call_index = counts.get(id(module), 0)
        counts[id(module)] = call_index + 1
        return caller.callee(module, call_index) if caller is not None else None


def _walk(graph_module: Runnable) -> Iterator[Runnable]:
    yield graph_module
    for callee in graph_module.callees():
        yield from _walk(callee)


def _report(graph_module: Runnable, reasons: dict[Runnable, str | None]) -> FrameReport:
    frame = graph_module.frame
    status: Status = "equal"
    reason = reasons.get(graph_module)
    if graph_module.has_own_graph:
        status = "own graph"
    elif frame.opaque_reason is not None:
        status, reason = "opaque", frame.opaque_reason
    elif graph_module not in reasons:
        status = "not reached"
    elif reason is not None:
        status = "refused"
    return FrameReport(format_path(frame.path), type(frame.module).__name__, status, reason)


__all__ = ["FrameReport", "VerificationReport", "verify"]
