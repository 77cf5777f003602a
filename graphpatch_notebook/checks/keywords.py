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
    options = _option_names(like or function)
    for name in sorted(names):
        is_of_patches = name in _FIELDS_OF_PATCHES and name not in options
        begun = [one for one in options if (len(name) > 2 and one.startswith(name)) or name.startswith(f"{one}_")]
        close = [] if name in _OF_MODELS else begun or get_close_matches(name, options, n=1, cutoff=0.7)
        if not (is_of_patches or close) or name in _input_names(root):
            continue
        if is_of_patches:
            raise ExperimentError(
                f"{function.__name__} has no {name}=; patches have: pg.patch({{path: ZeroPatch({name}=...)}})"
            )
        repair = f"did you mean {close[0]}=?" if like is None else f"{like.__name__} has {close[0]}="
        raise ExperimentError(
            f"{name!r} is neither an option of {function.__name__} nor a parameter of the model's forward; {repair}"
        )


def _input_names(root: Frame) -> set[str]:
    known = {parameter.name for frame in root.walk() for parameter in frame.parameters}
    kwargs = [node.spec for node in root.inputs() if isinstance(node.spec, ContainerSpec)]  # of the example inputs
    return known.union(str(name) for spec in kwargs for name, *_ in spec.children)


@functools.lru_cache(maxsize=256)
def _option_names(function: Callable[..., Any]) -> Sequence[str]:
    """Returns the names of the keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)
