"""What can be seen of a wrong call of an experiment before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.checks.sharding import REPAIR, sharding
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import ProbePatch
from graphpatch_notebook.values import ContainerSpec, TensorSpec

# What models of transformers may take among their `**kwargs`, and is close to an option.
_OF_MODELS = {"position_ids", "head_mask", "cache_position"}


def check_graph(pg: Any) -> None:
    """Checks that an experiment is given a `PatchableGraph`.

    Raises:
        TypeError: It is something else, such as the model.
    """
    if not isinstance(pg, PatchableGraph):
        raise TypeError(f"give a PatchableGraph, not a {_kind(pg)}: PatchableGraph(model, *example_inputs)")


def check_unsharded(pg: PatchableGraph, what: str) -> None:
    """Checks that the values of a model are whole on this process.

    Raises:
        ExperimentError: The model is sharded over several.
    """
    if (sharded := sharding(pg.nodes.root)) is not None:
        raise ExperimentError(f"{what}: {sharded}, and each has parts of its values only; {REPAIR}")


def check_metric(metric: Any) -> None:
    """Checks that a metric can be called with an output.

    Raises:
        ExperimentError: It is a class (where an instance is meant), or nothing that can be called.

    Example:
        >>> check_metric(max)
    """
    if isinstance(metric, type) and not issubclass(metric, (int, float)):
        raise ExperimentError(f"metric is the class {metric.__name__}; give an instance: metric={_instance(metric)}")
    if not callable(metric):
        shown = repr(metric) if metric is None or isinstance(metric, (str, int, float)) else f"a {_kind(metric)}"
        raise ExperimentError(
            f"metric is {shown}, which cannot be called; give a function of the model's output, such as "
            "metric=lambda output: output.loss, or Probability(token)"
        )


def check_input_names(pg: PatchableGraph, names: Iterable[str], function: Callable[..., Any]) -> None:
    """Checks that no input by keyword is a misspelt option: a model with `**kwargs` would take it and say nothing.

    Args:
        pg: The graph.
        names: The names of inputs by keyword.
        function: Whose call it is.

    Raises:
        ExperimentError: A name is close to one of an option, and no module of the model has a parameter called so.
    """
    options = option_names(function)
    if "backward" not in options:
        _check_no_gradients(names, function)
    close = {name: found for name in names if name not in _OF_MODELS and (found := _nearest(name, options))}
    if not close:
        return
    root = pg.nodes.root
    known = {parameter.name for frame in root.walk() for parameter in frame.parameters}
    for node in root.inputs():
        if isinstance(node.spec, ContainerSpec):  # what came by **kwargs in the example
            known |= {str(name) for name, *_ in node.spec.children}
    for name, option in close.items():
        if name not in known:
            raise ExperimentError(
                f"{function.__name__} has no option {name!r}, and neither has forward of the model such a parameter; "
                f"did you mean {option}=?"
            )


def check_inputs(pg: PatchableGraph, inputs: Inputs) -> None:
    """Checks that inputs which were tensors when the model was captured are tensors.

    Raises:
        ExperimentError: One is a list of numbers, or an array of numpy.
    """
    root = pg.nodes.root
    for node in root.inputs():
        value = given_input(root.parameters, node.target, inputs.args, inputs.kwargs)
        if isinstance(node.spec, TensorSpec) and (isinstance(value, np.ndarray) or _is_list_of_numbers(value)):
            raise ExperimentError(
                f"{node.target!r} is {'an array' if isinstance(value, np.ndarray) else 'a list'} of numbers, but a "
                "tensor was captured there; give torch.as_tensor(...) of it"
            )


def _is_list_of_numbers(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
        if isinstance(value, (int, float)):
            return True
    return False


def check_no_inputs(**options: Any) -> None:
    """Checks that no option is a tensor, which was meant for the model.

    Raises:
        ExperimentError: One is.
    """
    for name, value in options.items():
        if isinstance(value, Tensor):
            raise ExperimentError(
                f"{name}= is an option of the sweep, but a tensor was given; if the model has an input called "
                f"{name!r}, give it positionally"
            )


def check_options(given: Mapping[str, Any], function: Callable[..., Any], others: Callable[..., Any]) -> None:
    """Checks the names of options that a function hands on.

    Args:
        given: What it hands on.
        function: The function that was called.
        others: The function that takes them.

    Raises:
        TypeError: There is no such option, as Python says it, with what may be meant.
        ExperimentError: `backward` is among them: between two runs, or with values cut out, there is nothing to add up.
    """
    _check_no_gradients(given, function)
    known = [name for name in option_names(others) if name != "backward"]
    for name in given:
        if name not in known:
            near = _nearest(name, [*option_names(function), *known])
            hint = f"; did you mean {near}=?" if near else f"; there are {', '.join(known)}"
            raise TypeError(f"{function.__name__} has no option {name!r}{hint}")


def _check_no_gradients(names: Iterable[str], function: Callable[..., Any]) -> None:
    if "backward" in names:
        raise ExperimentError(
            f"{function.__name__} takes no backward=: it compares numbers; to add up the gradients of each cell's "
            "metric use pg.sweep(..., backward=True), for scores by gradients attribute(...)"
        )


def option_names(function: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters that can be given by keyword only."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def _nearest(name: str, options: list[str]) -> str | None:
    """Returns the option that a name seems to be meant for."""
    for option in options:
        if (len(name) > 2 and option.startswith(name)) or name.startswith(f"{option}_"):
            return option
    return next(iter(get_close_matches(name, options, n=1, cutoff=0.7)), None)


def _instance(made: Callable[..., Any]) -> str:
    """Returns in words how an instance of a class is made."""
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


Paths: TypeAlias = "Iterable[str | NodePath]"


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
