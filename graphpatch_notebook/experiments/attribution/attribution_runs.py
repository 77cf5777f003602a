"""The runs of an attribution: a clean one and corrupted ones for each group of nodes that memory is granted for.

clean run      without gradients: values                       (clean_values)
first run      on the corrupted inputs: differences, roots     (gradient_run)
further runs   of integrated gradients, between the two        (gradient_run)
backward       of each of these but for the integrated first   (reductions)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.checks.model_state import ModuleState
from graphpatch_notebook.errors import ExperimentError, PatchMapError
from graphpatch_notebook.execution import PatchContext
from graphpatch_notebook.experiments.attribution.clean_values import CleanValues
from graphpatch_notebook.experiments.attribution.gradient_run import Differences, GradientRun, Roots
from graphpatch_notebook.experiments.attribution.reductions import Kept, Scores, scores_of
from graphpatch_notebook.experiments.attribution.scored_nodes import ScoredNode
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import noted_metric
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.interrupts import afterwards
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import Patch
from graphpatch_notebook.torch_compat import without_torch_functions
from graphpatch_notebook.warning_places import collected_warnings


class Stage:
    """Whom the patches of all runs tell what comes up: the one who watches the run that is on."""

    def __init__(self) -> None:
        self.listener: Callable[[ScoredNode, Any], Any] = _nobody


class WatchPatch(Patch[Any]):
    """Shows each value to whoever is on stage, who may put another one in its place."""

    any_shape = True

    def __init__(self, node: ScoredNode, stage: Stage) -> None:  # not that of a dataclass: there are thousands of these
        self.node = node
        self.stage = stage

    def op(self, original_output: Any) -> Any:
        if type(original_output) is not Tensor:
            return self.stage.listener(self.node, original_output)
        with without_torch_functions():  # else each look at it would go through the mode of the run
            return self.stage.listener(self.node, original_output)


class LookPatch(WatchPatch):
    """The same, where the value must stay."""

    observes_only = True


@dataclass
class Found:
    """What comes of the runs.

    Attributes:
        clean: What the metric gives for the clean run.
        corrupted: What it gives for the corrupted one.
        scores: By path: without dimensions, or by index along the dimension of the positions.
        problems: For paths without a score, the reason.
        roots: Where the runs begin to differ.
        remarks: What else is to be known, in words.
    """

    clean: float = float("nan")
    corrupted: float = float("nan")
    scores: dict[str, Scores] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    roots: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


@dataclass
class Compared:
    """A group of nodes whose values are known in both runs.

    Attributes:
        differences: The differences.
        first: The run on the corrupted inputs, and what the metric gave for it; `None` once its graph is let go.
        left: The paths that are not of the group, but were to be.
    """

    differences: Differences
    first: tuple[GradientRun, Tensor] | None
    left: set[str]


class AttributionRuns:
    """All runs of one attribution.

    Args:
        pg: The graph.
        metric: From the output to a single number.
        clean: The clean inputs.
        corrupted: The corrupted ones.
        nodes: All nodes that hold floating-point tensors, in order of execution.
        kept: For paths with positions or heads, the dimensions of the value that these are.
        fractions: Where, on the way from corrupted to clean, gradients are taken: `[0.0]` for the corrupted run.
        max_bytes: How many bytes the values that are kept, and their gradients, may take.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        metric: Callable[[Any], Any],
        clean: Inputs,
        corrupted: Inputs,
        nodes: Sequence[ScoredNode],
        kept: Mapping[str, Kept],
        fractions: Sequence[float],
        max_bytes: int,
    ) -> None:
        self._pg = pg
        self._metric = metric
        self._clean = clean
        self._corrupted = corrupted
        self._nodes = [node for node in nodes if not node.is_parameter]
        self._kept = kept
        self._fractions = fractions
        self._max_bytes = max_bytes
        self._stage = Stage()
        self._roots = Roots()
        self._copied: set[str] = set()
        self._found = Found()
        self._found.scores = {node.path: np.zeros(()) for node in nodes if node.is_parameter}

    def run(self) -> Found:
        """Returns scores and problems. The model, and the random state, are as before."""
        context = self._context()
        with collected_warnings() as messages, torch.inference_mode(False), context:
            state = ModuleState(captured(self._pg).module)
            with afterwards(state.restore):
                self._run_all(state)
        self._stage.listener = _nobody
        self._found.roots = list(dict.fromkeys(path for path, _ in self._roots.clean))
        # What does not come up is told in the result.
        self._found.remarks = [message for message in messages if "never fired" not in message]
        return self._found

    def _context(self) -> PatchContext:
        context = self._pg.patch(self._patches())
        own = [node for node in self._nodes if node.frame.has_own_graph and node.node.kind == "input"]
        if not own:
            return context
        try:
            with context:
                return context
        except PatchMapError:  # edited graphs, which look at sizes of their inputs themselves
            for node in own:
                node.can_be_cut = False
            return self._pg.patch(self._patches())

    def _patches(self) -> dict[str | NodePath, Patch[Any]]:
        return {node.path: (WatchPatch if node.can_be_cut else LookPatch)(node, self._stage) for node in self._nodes}

    def _run_all(self, state: ModuleState) -> None:
        wanted = {node.path for node in self._nodes if node.is_compared}
        if list(self._fractions) != [0.0]:
            wanted = self._scored_on_the_way(wanted, state)
        while wanted:
            wanted = self._scored(wanted, state)
        infinite = {path for path, score in self._found.scores.items() if not np.isfinite(score).all()}
        while infinite:
            infinite = self._scored(infinite, state, is_careful=True)
        for path in [path for path, score in self._found.scores.items() if not np.isfinite(score).all()]:
            self._found.problems[path] = f"its score is not finite: {self._found.scores.pop(path).sum()}"

    # -- one group -----------------------------------------------------------------------------------------------------

    def _scored_on_the_way(self, wanted: set[str], state: ModuleState) -> set[str]:
        """Finds all roots, which are to be in place in each run on the way; scores the paths if all fit at once."""
        compared = self._compared(wanted, state)
        if not compared.left:
            self._score(compared, state)
            return set()
        left = compared.left
        del compared
        while left:
            left = self._compared(left, state).left
        return wanted

    def _scored(self, wanted: set[str], state: ModuleState, is_careful: bool = False) -> set[str]:
        """Scores as many of some paths as fit; returns the others."""
        compared = self._compared(wanted, state, is_careful)
        self._score(compared, state)
        return compared.left

    def _compared(self, wanted: set[str], state: ModuleState, is_careful: bool = False) -> Compared:
        """Runs the model on the clean inputs, and on the corrupted ones to see where they differ."""
        clean = CleanValues(wanted, self._copied, self._max_bytes)
        with torch.no_grad():
            output = self._output(clean, self._clean, state)
            with noted_metric(output):
                self._found.clean = float(_number(self._metric(output)))
        differences = Differences(clean, is_careful)
        run = GradientRun(differences, self._roots)
        metric = self._gradient_run(run, state)
        self._found.corrupted = float(metric.detach())
        self._copied |= differences.rewritten
        left = clean.left | differences.rewritten
        for path in wanted - left:
            problem = clean.problems.get(path) or _uneven(
                len(clean.by_path.get(path, ())), run.counts.get(path, -1) + 1
            )
            if problem is not None:
                differences.problems.setdefault(path, problem)
        for path in differences.rewritten:
            run.by_path.pop(path, None)
        differences.settle()
        return Compared(differences, (run, metric), left)

    def _score(self, compared: Compared, state: ModuleState) -> None:
        differences = compared.differences
        problems = dict(differences.problems)
        totals: dict[str, Scores] = {}
        first, compared.first = compared.first, None
        for fraction in self._fractions:
            if first is None or fraction:
                first = None
                run = GradientRun(differences, self._roots, fraction, is_first=False)
                metric = self._gradient_run(run, state)
            else:
                run, metric = first
            scores = scores_of(metric, run, differences, self._kept, problems)
            for path, score in scores.items():
                totals[path] = totals.get(path, 0.0) + score / len(self._fractions)
        self._found.problems |= problems
        self._found.scores |= {path: score for path, score in totals.items() if path not in problems}

    # -- one run -------------------------------------------------------------------------------------------------------

    def _output(self, listener: Callable[[ScoredNode, Any], Any], inputs: Inputs, state: ModuleState) -> Any:
        state.restore()  # the same random numbers, and the same buffers, in all runs
        fresh = inputs.fresh()
        self._stage.listener = listener
        return self._pg(*fresh.args, **fresh.kwargs)

    def _gradient_run(self, run: GradientRun, state: ModuleState) -> Tensor:
        with torch.enable_grad():
            metric = _number(self._metric(self._output(run, self._corrupted, state)))
        run.finish()
        if run.edges and not metric.requires_grad:
            raise ExperimentError(
                "the metric has no gradient: it must compute a tensor from the output by operations that can be "
                "differentiated, without argmax, .item(), .detach() or torch.no_grad()"
            )
        return metric


def _nobody(_: ScoredNode, value: Any) -> Any:
    return value


def _uneven(clean: int, corrupted: int) -> str | None:
    """Returns in words that a node did not come up as often in both runs, if so."""
    if clean == corrupted:
        return None if clean else "it never came up"
    if not clean or not corrupted:
        return f"it came up in the {'clean' if clean else 'corrupted'} run only"
    return f"it came up {clean} times in the clean run, {corrupted} times in the corrupted one"


def _number(value: Any) -> Tensor:
    if value is None:
        raise ExperimentError("the metric gave None: does it lack a return?")
    if not isinstance(value, Tensor):
        shown = f"{value!r} of type" if isinstance(value, (int, float)) else "a value of type"
        raise ExperimentError(
            f"the metric gave {shown} {type(value).__name__}: to have a gradient it must give a tensor with a single "
            "number (no .item(), no float(), not the whole output of the model)"
        )
    if value.numel() != 1:
        raise ExperimentError(
            f"the metric gave a tensor of shape {tuple(value.shape)}: it must give a single number, say its .mean()"
        )
    if not value.is_floating_point():
        raise ExperimentError(f"the metric gave a number of dtype {value.dtype}: it has no gradient")
    return value.reshape(())
