"""The values that some nodes have in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from graphpatch_notebook.checks.model_state import SharedRandomState
from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.engine.measurements import Measurement, baseline_of, measurement
from graphpatch_notebook.experiments.engine.random_draws import draws_from_python
from graphpatch_notebook.experiments.methods.call_checks import check_inputs
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import ProbePatch
from graphpatch_notebook.warning_places import warn_each_time

Paths: TypeAlias = "Iterable[str | NodePath]"


@dataclass(frozen=True)
class Recording:
    """What one run without patches gave.

    Attributes:
        values: The values of some paths: the model's own tensors, detached.
        measurement: What the metric gave.
        drawn: Of which generators the model drew random numbers.
    """

    values: Mapping[str, Tensor]
    measurement: Measurement
    drawn: Sequence[str] = ()

    def warn_if_random(self, pg: PatchableGraph) -> None:
        """Warns where the run, and so each later one, drew random numbers of its own."""
        if self.drawn:
            repair = "; call pg.eval() first" if pg.training else ""
            warn_each_time(
                f"the model draws random numbers (of {' and '.join(self.drawn)}), others in each run: what is compared "
                f"here differs by these, too{repair}",
                ExperimentWarning,
            )


def record(
    pg: PatchableGraph, inputs: Inputs, paths: Iterable[str], metric: Callable[[Any], Any] | None = None
) -> Recording:
    """Runs the model once, without gradients, and returns the values at `paths` and what the metric gives.

    Raises:
        ExperimentError: A value is no tensor.
        PatchNotFiredError: A path did not come up.
    """
    check_inputs(pg, inputs)
    probes: dict[str | NodePath, ProbePatch] = {path: ProbePatch() for path in paths}
    with torch.no_grad(), pg.patch(probes, strict=True):
        state = SharedRandomState()
        output = inputs.run(pg)
        after = SharedRandomState()
        given = measurement(0.0) if metric is None else baseline_of(metric, output)
    drawn = state.differing(after)
    if "Python" in drawn and not draws_from_python(lambda: inputs.run(pg), captured(pg).module):
        drawn.remove("Python")
    values = {}
    for path, probe in probes.items():
        value = probe.activation
        if not isinstance(value, Tensor):
            raise ExperimentError(f"{str(path)!r} holds {value!r}, which is no tensor: give paths of tensors")
        values[str(path)] = value.detach()
    return Recording(values, given, drawn)


def several_paths(pg: PatchableGraph, given: Any, what: str = "paths") -> list[str]:
    """Returns the paths that a user gave, checked.

    Raises:
        UnknownPathError, PatchMapError: There are paths that cannot be patched: all of them are named.
        ExperimentError: One path is given alone, none, or one twice.
    """
    if isinstance(given, (str, NodePath)):
        raise ExperimentError(f"{what} must be several, in a list: {what}=[{str(given)!r}]")
    if given is None or isinstance(given, Tensor) or not isinstance(given, Iterable):
        shown = "None" if given is None else f"a {type(given).__name__}"
        raise ExperimentError(f"{what} is {shown}; give a list of paths, such as those that pg.nodes has")
    paths = [str(path) for path in given]
    if not paths:
        raise ExperimentError(f"{what} is empty: give at least one path")
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ExperimentError(f"{what} has {twice!r} more than once")
    targets(pg, paths)
    return paths


def targets(pg: PatchableGraph, paths: Iterable[str]) -> dict[str, Target]:
    """Returns what paths mean.

    Raises:
        UnknownPathError, PatchMapError: There are paths that cannot be patched: all of them are named.
    """
    probes = {str(path): ProbePatch() for path in paths}
    entries = captured(pg).entries_of(probes)
    return {path: entry.target for path, entry in zip(probes, entries, strict=True)}


def check_same_shapes(values: Mapping[str, Tensor], others: Mapping[str, Tensor], names: tuple[str, str]) -> None:
    """Checks that the values of two runs can stand for each other.

    Raises:
        ExperimentError: They cannot; the message has path and shapes.
    """
    for path, value in values.items():
        if path in others and value.shape != others[path].shape:
            raise ExperimentError(
                f"{path!r} is of shape {tuple(value.shape)} on the {names[0]} inputs and of "
                f"{tuple(others[path].shape)} on the {names[1]} ones; give inputs of the same shapes (pad the shorter)"
            )
