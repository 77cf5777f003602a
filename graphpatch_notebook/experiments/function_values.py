"""What a function of the user's refers to, besides its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Any

from graphpatch_notebook.patches import Patch
from graphpatch_notebook.values import readable_children

_DEEPEST = 3


def looks_at_patches(function: Any) -> bool:
    """Whether a function refers to patches, such as a `ProbePatch` whose `activation` it reads.

    Seen are closures, globals that it names, defaults, attributes of callable objects, and what lists and dicts hold
    among these.

    Example:
        >>> from graphpatch_notebook.patches import ProbePatch
        >>> probe = ProbePatch()
        >>> looks_at_patches(lambda output: probe.activation), looks_at_patches(lambda output: output)
        (True, False)
    """
    return any(_holds_patch(value, _DEEPEST) for value in _referred(function, _DEEPEST))


def _referred(function: Any, depth: int) -> Iterator[Any]:
    if depth == 0:
        return
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values())
        yield from _referred(function.func, depth - 1)
        return
    inner = getattr(function, "__func__", function)
    if not isinstance(inner, FunctionType):
        yield from getattr(function, "__dict__", {}).values()
        return
    found = [cell.cell_contents for cell in inner.__closure__ or () if _is_filled(cell)]
    found += [inner.__globals__[name] for name in inner.__code__.co_names if name in inner.__globals__]
    found += [*(inner.__defaults__ or ()), *(inner.__kwdefaults__ or {}).values()]
    for value in found:
        yield value
        if isinstance(value, (FunctionType, partial)):
            yield from _referred(value, depth - 1)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises for a variable without a value
    except ValueError:
        return False
    return True


def _holds_patch(value: Any, depth: int) -> bool:
    if isinstance(value, Patch):
        return True
    if depth == 0 or isinstance(value, type):
        return False
    inside = readable_children(value) if isinstance(value, (list, tuple, dict)) else None
    return any(_holds_patch(child, depth - 1) for _, child in inside or ())
