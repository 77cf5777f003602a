"""The arguments that experiments share: a graph, a metric, paths, and inputs of the same shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

from torch import Tensor

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.components.names import is_component_name
from graphpatch_notebook.errors import ExperimentError, UnknownPathError
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import ProbePatch
from graphpatch_notebook.paths import is_pattern
from graphpatch_notebook.values import readable_children

Paths: TypeAlias = "str | Iterable[str | NodePath]"


def check_graph(pg: Any) -> None:
    """Raises a `TypeError` if an experiment is given something else than a `PatchableGraph`, such as a model."""
    if not isinstance(pg, PatchableGraph):
        raise TypeError(f"give a PatchableGraph, not a {type(pg).__name__}: PatchableGraph(model, *example_inputs)")


def check_metric(metric: Any) -> None:
    """Checks that a metric can be called with an output, and is not a class.

    Example:
        >>> check_metric(max)
    """
    if not callable(metric) or (isinstance(metric, type) and not issubclass(metric, (int, float))):
        raise ExperimentError(
            f"metric={metric!r} must be a function of the model's output, such as Probability(token), or "
            "lambda output: output.loss"
        )


def several_paths(pg: PatchableGraph, given: Any, what: str = "paths") -> list[str]:
    """Returns the given paths as text. Component names and patterns that mean several values become several.

    Raises:
        UnknownPathError, PatchMapError: Some paths cannot be patched. The message names all of them.
        ExperimentError: The paths are not in a list, the list is empty, or a path is repeated.
    """
    if isinstance(given, str) and (is_component_name(given) or is_pattern(given)):
        given = [given]
    if isinstance(given, (str, NodePath, Tensor)) or not isinstance(given, Iterable):
        raise ExperimentError(f"{what} must be a list of paths, not {given!r}")
    paths = [str(path) for path in given]
    if not paths or len(set(paths)) < len(paths):
        raise ExperimentError(f"{what} must have at least one path, and each once, not {paths}")
    return list(targets(pg, paths))


def targets(pg: PatchableGraph, paths: Iterable[str]) -> dict[str, Target]:
    """Returns the node that each path refers to. Component names and patterns may mean several.

    Raises:
        UnknownPathError, PatchMapError: Some paths cannot be patched. The message names all of them.
    """
    probes = {name: ProbePatch() for path in paths for name in _meant(pg, str(path))}
    entries = captured(pg).entries_of(probes)
    if inside := [path for path, entry in zip(probes, entries, strict=True) if entry.patches != (probes[path],)]:
        raise ExperimentError(f"{inside[0]!r} is a part of a splice: patch it in pg.sweep(axes, make_patches, ...)")
    return {path: entry.target for path, entry in zip(probes, entries, strict=True)}


def _meant(pg: PatchableGraph, text: str) -> list[str]:
    """Returns the paths and names that a path means; the text itself if it means nothing, which is reported later."""
    with suppress(UnknownPathError):
        if is_component_name(text) or is_pattern(text):
            return captured(pg).paths_of(text)
    return [text]


def check_same_shapes(clean: Mapping[str, Tensor], corrupted: Mapping[str, Tensor]) -> None:
    """Raises an `ExperimentError` if values of the clean and the corrupted run differ in shape."""
    for path, value in clean.items():
        if path in corrupted and value.shape != corrupted[path].shape:
            raise ExperimentError(
                f"{path!r} has shape {tuple(value.shape)} on the clean inputs and {tuple(corrupted[path].shape)} "
                "on the corrupted inputs; give inputs of the same shapes (pad the shorter ones)"
            )


def check_same_input_shapes(pg: PatchableGraph, clean: Inputs, corrupted: Inputs) -> None:
    """Raises an `ExperimentError` if the tensors in the clean and the corrupted inputs differ in shape."""
    check_same_shapes(*(input_tensors(pg, inputs) for inputs in (clean, corrupted)))


def input_tensors(pg: PatchableGraph, inputs: Inputs) -> dict[str, Tensor]:
    """Returns the tensors in the inputs of `forward`, by parameter name and path within it."""
    parameters = pg.nodes.root.parameters
    found: dict[str, Tensor] = {}
    waiting = [(each.name, given_input(parameters, each.name, inputs.args, inputs.kwargs)) for each in parameters]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, (list, tuple, dict)):
            waiting += [(f"{name}|{key}", child) for key, child in readable_children(value) or ()]
    return found
