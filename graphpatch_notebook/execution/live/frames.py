"""The frames of a patched run: which captured frame each module call is, and what is patched in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn import Module

from graphpatch_notebook.checks.dimensions import CallInputs
from graphpatch_notebook.execution.plan import FramePlan, RunPlan
from graphpatch_notebook.execution.reports import Repetitions


class FrameRun:
    """One frame of a patched run."""

    __slots__ = ("counts", "inputs", "plan", "sites", "visits_left")

    def __init__(self, plan: FramePlan | None, inputs: CallInputs = ((), {})) -> None:
        self.plan = plan  # what is patched in it; `None` if nothing is
        # The call sites of patched ops that are still to come in it; `None` if there are none.
        self.sites = None if plan is None else plan.sites
        # How many calls at these have entries; negative if that is not known.
        self.visits_left = 0 if self.sites is None else self.sites.visits
        # How often each submodule was called, and each patched call site was reached, so far (by id).
        self.counts: dict[int, int] = {}
        self.inputs = inputs  # the arguments of its `forward`


class RunningFrames:
    """The frames that are running, innermost last."""

    def __init__(self, root: Module, plan: RunPlan, repetitions: Repetitions) -> None:
        self.stack = [FrameRun(plan.root)]  # these frames; the first is outside of all module calls
        self.repetitions = repetitions  # warns of calls beyond those of the example
        self._root = root
        self._plan = plan

    def plan_of(self, module: Module) -> FramePlan | None:
        """Returns the plan of the frame of `module` that begins now, and counts it."""
        plan, index = self.next_plan(module)
        caller = self.stack[-1]
        caller.counts[id(module)] = index + 1
        if plan is not None:
            return plan
        if index > 0 and caller.plan is not None:
            self.repetitions.of_module(module, index, caller.plan.calls.get(id(module)))
        return self._plan.custom.get(id(module))

    def next_plan(self, module: Module) -> tuple[FramePlan | None, int]:
        """Returns the plan of the next frame of `module`, and the number of that call."""
        caller = self.stack[-1]
        key = id(module)
        index = caller.counts.get(key, 0)
        if len(self.stack) == 1:
            if module is self._root:
                return self._plan.root, index
            if self._plan.callers.has_one_frame(module):
                return self._plan_without_caller(module), index
        by_index = caller.plan.calls.get(key) if caller.plan is not None else None
        return (None if by_index is None else by_index.get(index)), index

    def _plan_without_caller(self, module: Module) -> FramePlan | None:
        """Returns the plan of a module that methods of the model call outside of all frames."""
        (frame,) = self._plan.callers.frames_of(module)
        by_index = self._plan.root.calls.get(id(module))
        plans = self._plan.root.walk() if by_index is None else by_index.values()
        return next((plan for plan in plans if plan.frame is frame), None)

    @contextmanager
    def inside_one_node(self, inside: FramePlan | None = None) -> Iterator[None]:
        """Inside the block, no value belongs to the plan except those of `inside`."""
        self.stack.append(FrameRun(inside))
        try:
            yield
        finally:
            self.stack.pop()
