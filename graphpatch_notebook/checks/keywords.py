"""Tells misspelled options from inputs: a model that takes `**kwargs` accepts any keyword without a word."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.values import ContainerSpec

_FIELDS_OF_PATCHES = {"slice", "steps", "positions", "position_dim", "any_shape", "allow_empty"}
# Inputs that transformers models may take in `**kwargs`, and whose names are similar to those of options.
_OF_MODELS = {"position_ids", "head_mask", "cache_position"}


def check_input_names(
    root: Frame, names: Iterable[str], function: Callable[..., Any], like: Callable[..., Any] | None = None
) -> None:
    """Checks that no keyword input is a misspelled option, which a model with `**kwargs` would accept silently.

    `function` was called; `like` is a function whose options are meant, if it has none.

    Raises:
        ExperimentError: A name is similar to that of an option, or it is that of a field of patches, and no module of
            the model has a parameter of that name.
    """
    close = _similar_options(tuple(names), like or function)
    of_patches = _FIELDS_OF_PATCHES.intersection(names).difference(option_names(function))
    if not close and not of_patches:
        return
    known = {parameter.name for frame in root.walk() for parameter in frame.parameters}
    for node in root.inputs():
        if isinstance(node.spec, ContainerSpec):  # **kwargs of the example inputs
            known |= {str(name) for name, *_ in node.spec.children}
    for name in sorted(of_patches - known):
        raise ExperimentError(
            f"{function.__name__} has no {name}=; patches have: pg.patch({{path: ZeroPatch({name}=...)}})"
        )
    for name, option in close.items():
        if name not in known:
            repair = f"did you mean {option}=?" if like is None else f"{like.__name__} has {option}="
            raise ExperimentError(
                f"{name!r} is neither an option of {function.__name__} nor a parameter of the model's forward; {repair}"
            )


@functools.lru_cache(maxsize=256)  # `pg.record` calls this each time
def _similar_options(names: tuple[str, ...], function: Callable[..., Any]) -> dict[str, str]:
    options = option_names(function)
    return {name: found for name in names if name not in _OF_MODELS and (found := nearest_option(name, options))}


@functools.lru_cache(maxsize=256)
def option_names(function: Callable[..., Any]) -> Sequence[str]:
    """Returns the names of the keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def nearest_option(name: str, options: Sequence[str]) -> str | None:
    """Returns the option with the most similar name."""
    for option in options:
        if (len(name) > 2 and option.startswith(name)) or name.startswith(f"{option}_"):
            return option
    return next(iter(get_close_matches(name, options, n=1, cutoff=0.7)), None)
