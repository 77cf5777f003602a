"""Gives warnings that name the line of the user's code that led to them.

If a click started the run, rather than a line of the user's code, they are collected, to be shown with its results.
Collection is local to a context; `warnings.catch_warnings` would affect all threads.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from graphpatch_notebook.errors import GraphPatchWarning
from graphpatch_notebook.interrupts import holding

_INSIDE = (
    os.path.dirname(__file__),
    os.path.dirname(torch.__file__),
    os.path.dirname(contextlib.__file__) + os.sep + "contextlib",
    "<graphpatch",
)

_collected: ContextVar[dict[str, str] | None] = ContextVar("graphpatch_collected_warnings", default=None)


@contextlib.contextmanager
def collected_warnings() -> Iterator[dict[str, str]]:
    """Collects the warnings that this package gives in the block, in its thread or task: their kinds by message."""
    messages: dict[str, str] = {}
    with holding(_collected, messages):
        yield messages


def _is_collected(message: str, kind: str) -> bool:
    messages = _collected.get()
    if messages is not None:
        messages[message] = kind
    return messages is not None


def level_of_caller() -> int:
    """Returns the `stacklevel` at which a warning, given by the caller of this, names a line of the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level


def warn_each_time(message: str, kind: str) -> None:
    """Gives a warning that names a line of the user's code, even if that line gave the same warning before.

    By default Python shows a warning once for each line of code, so running a cell again would show nothing.
    """
    if _is_collected(message, kind):
        return
    frame = sys._getframe(level_of_caller() - 1)
    warnings.warn_explicit(
        GraphPatchWarning(message, kind), None, frame.f_code.co_filename, frame.f_lineno, registry={}
    )


def warn(message: str, kind: str, stacklevel: int) -> None:
    """Gives a warning, once for each line of code; `stacklevel` counts from the caller of this function."""
    if not _is_collected(message, kind):
        warnings.warn(GraphPatchWarning(message, kind), stacklevel=stacklevel + 1)
