"""Checks of the arguments of experiments, before the model runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.checks import keywords
from graphpatch_notebook.checks.keywords import nearest_option, option_names
from graphpatch_notebook.components.names import is_component_name
from graphpatch_notebook.errors import ExperimentError, UnknownPathError
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import ProbePatch
from graphpatch_notebook.paths import is_pattern
from graphpatch_notebook.values import TensorSpec, readable_children


def check_graph(pg: Any) -> None:
    """Raises a `TypeError` if an experiment is given something else than a `PatchableGraph`, such as a model."""
    if not isinstance(pg, PatchableGraph):
        raise TypeError(f"give a PatchableGraph, not a {_kind(pg)}: PatchableGraph(model, *example_inputs)")


def check_metric(metric: Any) -> None:
    """Checks that a metric can be called with an output, and is not a class.

    Example:
        >>> check_metric(max)
    """
    if isinstance(metric, type) and not issubclass(metric, (int, float)):
        raise ExperimentError(f"metric is the class {metric.__name__}; give an instance: metric={_instance(metric)}")
    if not callable(metric):
        shown = repr(metric) if metric is None or isinstance(metric, (str, int, float)) else f"a {_kind(metric)}"
        raise ExperimentError(
            f"metric is {shown}, which is not callable; give a function of the model's output, such as "
            "metric=lambda output: output.loss, or Probability(token)"
        )


def check_input_names(pg: PatchableGraph, names: Iterable[str], function: Callable[..., Any]) -> None:
    """Checks that no keyword input is a misspelled option, which a model with `**kwargs` would accept silently.

    Raises:
        ExperimentError: A name is similar to that of an option of `function`, the experiment that was called, and no
            module of the model has a parameter of that name.
    """
    if "backward" not in option_names(function):
        _check_no_gradients(names, function)
    keywords.check_input_names(pg.nodes.root, names, function)


def check_inputs(pg: PatchableGraph, inputs: Inputs) -> None:
    """Raises an `ExperimentError` if an input is a list of numbers, or an array, where a tensor was captured."""
    root = pg.nodes.root
    for node in root.inputs():
        value = given_input(root.parameters, node.target, inputs.args, inputs.kwargs)
        if isinstance(node.spec, TensorSpec) and (isinstance(value, np.ndarray) or _is_list_of_numbers(value)):
            raise ExperimentError(
                f"{node.target!r} is {'an array' if isinstance(value, np.ndarray) else 'a list'} of numbers, but a "
                "tensor was captured; convert it with torch.as_tensor(...)"
            )


def _is_list_of_numbers(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
        if isinstance(value, (int, float)):
            return True
    return False


def check_no_inputs(**options: Any) -> None:
    """Raises an `ExperimentError` if an option is a tensor, which is likely an input of the model."""
    for name, value in options.items():
        if isinstance(value, Tensor):
            raise ExperimentError(
                f"{name}= is an option of the sweep, but a tensor was given; if the model has an input called "
                f"{name!r}, give it positionally"
            )


def check_options(given: Mapping[str, Any], function: Callable[..., Any], others: Callable[..., Any]) -> None:
    """Checks the names of the options that a function passes on to another one.

    Raises:
        TypeError: An option does not exist. The message names a similar one.
        ExperimentError: `backward` is given, which only `sweep` supports.
    """
    _check_no_gradients(given, function)
    known = [name for name in option_names(others) if name != "backward"]
    for name in given:
        if name not in known:
            near = nearest_option(name, [*option_names(function), *known])
            hint = f"; did you mean {near}=?" if near else f"; the options are {', '.join(known)}"
            raise TypeError(f"{function.__name__} has no option {name!r}{hint}")


def _check_no_gradients(names: Iterable[str], function: Callable[..., Any]) -> None:
    if "backward" in names:
        raise ExperimentError(
            f"{function.__name__} does not take backward=, since it compares numbers; use pg.sweep(..., backward=True) "
            "to accumulate the gradients of each cell's metric, or attribute(...) for scores by gradients"
        )


def _instance(made: Callable[..., Any]) -> str:
    """Returns the code that makes an instance of a class."""
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):
        return f"{made.__name__}(...)"
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    return f"{made.__name__}({', '.join(needed) if len(needed) < 4 else '...'})"


def _kind(value: Any) -> str:
    return type(value).__name__


Paths: TypeAlias = "str | Iterable[str | NodePath]"


def several_paths(pg: PatchableGraph, given: Any, what: str = "paths") -> list[str]:
    """Returns the given paths as text. Component names and patterns that mean several values become several.

    Raises:
        UnknownPathError, PatchMapError: Some paths cannot be patched. The message names all of them. ExperimentError:
            The paths are not in a list, the list is empty, or a path is repeated.
    """
    if isinstance(given, str) and (is_component_name(given) or is_pattern(given)):
        given = [given]
    if isinstance(given, (str, NodePath)):
        raise ExperimentError(f"{what} must be a list: {what}=[{str(given)!r}]")
    if given is None or isinstance(given, Tensor) or not isinstance(given, Iterable):
        shown = "None" if given is None else f"a {type(given).__name__}"
        raise ExperimentError(f"{what} is {shown}; give a list of paths, such as those in pg.nodes")
    paths = [str(path) for path in given]
    if not paths:
        raise ExperimentError(f"{what} is empty: give at least one path")
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ExperimentError(f"{what} has {twice!r} more than once")
    return list(targets(pg, paths))


def targets(pg: PatchableGraph, paths: Iterable[str]) -> dict[str, Target]:
    """Returns the node that each path refers to. Component names and patterns may mean several.

    Raises:
        UnknownPathError, PatchMapError: Some paths cannot be patched. The message names all of them.
    """
    probes = {name: ProbePatch() for path in paths for name in _meant(pg, str(path))}
    entries = captured(pg).entries_of(probes)
    if inside := [path for path, entry in zip(probes, entries, strict=True) if entry.patches != (probes[path],)]:
        raise ExperimentError(
            f"{inside[0]!r} is a part of a splice, whose shape is not known before a run: patch it in "
            "pg.sweep(axes, make_patches, ...)"
        )
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
    check_same_shapes(*(_input_tensors(pg.nodes.root, inputs) for inputs in (clean, corrupted)))


def _input_tensors(root: Frame, inputs: Inputs) -> dict[str, Tensor]:
    """Returns the tensors in the inputs of `forward`, by parameter name and path within it."""
    found: dict[str, Tensor] = {}

    def collect(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, (list, tuple, dict)):
            for key, child in readable_children(value) or ():
                collect(f"{name}|{key}", child)

    for parameter in root.parameters:
        collect(parameter.name, given_input(root.parameters, parameter.name, inputs.args, inputs.kwargs))
    return found


def checked_bytes(max_bytes: Any) -> int:
    """Returns a limit for memory as an integer; raises an `ExperimentError` if it is not a positive number."""
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, (int, float)) or not max_bytes > 0:
        raise ExperimentError(f"max_bytes must be a number of bytes, such as 2**30, not {max_bytes!r}")
    return int(min(max_bytes, 2**62))
