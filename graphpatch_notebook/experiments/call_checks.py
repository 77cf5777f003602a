"""What can be seen of a wrong call of an experiment before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from graphpatch_notebook.errors import ExperimentError


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
