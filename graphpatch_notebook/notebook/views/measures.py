"""The columns of the tree that a run fills: what each row costs, and statistics of its value.

measure -> a run in which a patch reads each value, while torch counts floating-point operations
        -> for times, a second run, in which only the calls of modules are seen
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from graphpatch_notebook.errors import SessionError, collected_warnings
from graphpatch_notebook.notebook.run_report import norm_of, statistics_of
from graphpatch_notebook.notebook.runs import Job, ModelCalls
from graphpatch_notebook.notebook.views.skeleton import PATCHABLE, Skeleton
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.patching.model_state import preserved
from graphpatch_notebook.values import NUMBERS

MEASURES: Mapping[str, str] = {
    "parameters": "Elements of the parameters of a module, as they are stored",
    "bytes": "Bytes of a value; of a module, of its parameters and buffers",
    "FLOPs": "Floating-point operations as torch counts them: of matrix products, convolutions and attention",
    "ms": "Milliseconds that a call of a module took, with those of measuring the modules in it",
    "mean": "Mean of the finite elements; of a module, those of its output",
    "std": "Standard deviation of the finite elements; of a module, those of its output",
    "norm": "Norm of the finite elements; of a module, those of its output",
    "NaN": "Share of the elements that are NaN; of a module, those of its output",
    "gradient": "Norm of the gradient of the loss, which the output must have: give labels as inputs of the run",
}
"""The columns, with what they say."""

Found = dict[str, dict[int, float]]
"""By column: the numbers by row."""


@dataclass(kw_only=True, eq=False)
class _Reading(Patch[Any]):
    """Tells of a value."""

    observes_only: ClassVar[bool] = True
    any_shape: bool = True
    row: int
    read: Callable[[int, Any], None]

    def op(self, original_output: Any) -> Any:
        self.read(self.row, original_output)
        return original_output


def measure(job: Job[Any], calls: ModelCalls, skeleton: Skeleton, *, timed: bool, differentiated: bool) -> Found:
    """Returns the columns, in the thread of a job. The chosen patches are not applied.

    Args:
        job: The job.
        calls: The graph, and the inputs of the run.
        skeleton: The rows.
        timed: Whether to measure times, by a second run.
        differentiated: Whether to compute gradients.

    Raises:
        SessionError: Gradients are asked for, and the output has no loss that depends on parameters.
    """
    found: Found = {name: {} for name in MEASURES}
    job.total = 1 + timed
    rows = [row for row in range(len(skeleton)) if skeleton.flags[row] & PATCHABLE]
    _add_parameters(found, skeleton)
    with calls.settings.applied(job), collected_warnings():
        _read_values(job, calls, skeleton, rows, found, differentiated=differentiated)
        job.done += 1
        if timed:
            _read_times(job, calls, skeleton, rows, found)
            job.done += 1
    return found


def _call(
    job: Job[Any], calls: ModelCalls, skeleton: Skeleton, rows: list[int], read: Callable[[int, Any], None], end: Any
) -> None:
    """Calls the graph with a reading of each row, and `end` with its output."""
    args, kwargs = calls.inputs.copy()

    def call() -> None:
        with calls.graph.patch({skeleton.path(row): _Reading(row=row, read=read) for row in rows}):
            end(calls.graph(*args, **kwargs))

    with preserved(captured(calls.graph).module):
        job.interruptibly(call)


def _add_parameters(found: Found, skeleton: Skeleton) -> None:
    for row, kind in enumerate(skeleton.kind):
        place = skeleton.place(row) if kind == "graph" else None
        if place is None or place.graph is None:
            continue
        held = [*place.graph.module.parameters()]
        found["parameters"][row] = sum(one.numel() for one in held)
        every = [*held, *place.graph.module.buffers()]
        found["bytes"][row] = sum(one.numel() * one.element_size() for one in every)


def _read_values(
    job: Job[Any], calls: ModelCalls, skeleton: Skeleton, rows: list[int], found: Found, *, differentiated: bool
) -> None:
    flops, hooks, module = dict.fromkeys(range(len(skeleton)), 0), [], captured(calls.graph).module
    counter, counted = FlopCounterMode(display=False), 0

    def keep_gradient(row: int, gradient: Tensor) -> None:
        found["gradient"][row] = norm_of(gradient)

    def read(row: int, value: Any) -> None:
        nonlocal counted
        # What was counted since the value before this one was computed for this one.
        flops[row] += counter.get_total_flops() - counted
        _add_statistics(found, row, value)
        if differentiated and isinstance(value, Tensor) and value.requires_grad:
            hooks.append(value.register_hook(lambda gradient, row=row: keep_gradient(row, gradient)))
        counted = counter.get_total_flops()

    def end(output: Any) -> None:
        if differentiated:
            leaves = [parameter for parameter in module.parameters() if parameter.requires_grad]
            torch.autograd.grad(_loss(output), leaves, allow_unused=True)

    try:
        with torch.set_grad_enabled(differentiated), counter:
            _call(job, calls, skeleton, rows, read, end)
    finally:
        for hook in hooks:
            hook.remove()
    for row in reversed(range(1, len(skeleton))):
        flops[skeleton.parent[row]] += flops[row]
    found["FLOPs"] = {row: count for row, count in flops.items() if count}
    _copy_outputs(found, skeleton)


def _add_statistics(found: Found, row: int, value: Any) -> None:
    if not isinstance(value, (Tensor, *NUMBERS)):
        return
    statistics = statistics_of(value)
    if isinstance(value, Tensor):
        found["bytes"][row] = value.numel() * value.element_size()
    if statistics.count:
        found["NaN"][row] = statistics.nan / statistics.count
    if statistics.mean is not None:
        found["mean"][row], found["norm"][row] = statistics.mean, norm_of(value)
    if statistics.std is not None:
        found["std"][row] = statistics.std


def _copy_outputs(found: Found, skeleton: Skeleton) -> None:
    """Gives modules the statistics of their outputs."""
    for row, kind in enumerate(skeleton.kind):
        if kind == "output":
            for name in ("mean", "std", "norm", "NaN", "gradient"):
                if row in found[name]:
                    found[name][skeleton.parent[row]] = found[name][row]


def _loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not (isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad):
        raise SessionError(
            "gradients need a loss: an output `loss`, or one number, that depends on parameters which require "
            "gradients; type inputs with labels for Run, such as `ids, labels=ids`"
        )
    return loss.sum()


def _read_times(job: Job[Any], calls: ModelCalls, skeleton: Skeleton, rows: list[int], found: Found) -> None:
    ends: dict[int, tuple[int, str]] = {}  # by row of an input or output: its module, and which of both it is
    for row in rows:
        node = row
        while skeleton.kind[node] == "item":
            node = skeleton.parent[node]
        if skeleton.kind[node] in ("input", "output"):
            ends[row] = skeleton.parent[node], skeleton.kind[node]
    started: dict[int, float] = {}

    def read(row: int, _: Any) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        module, kind = ends[row]
        if kind == "input":
            started.setdefault(module, time.perf_counter())
        elif module in started:
            found["ms"][module] = 1000 * (time.perf_counter() - started[module])

    with torch.no_grad():
        _call(job, calls, skeleton, [*ends], read, lambda _: None)
