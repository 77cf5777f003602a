"""Warnings of this package name a line of the user's code, whatever lies between that line and the warning."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings

import torch

from graphpatch_notebook.errors import GraphPatchWarning

_INSIDE = (
    os.path.dirname(__file__),
    os.path.dirname(torch.__file__),
    os.path.dirname(contextlib.__file__) + os.sep + "contextlib",
    "<graphpatch",
)


def level_of_caller() -> int:
    """Returns the `stacklevel` at which a warning, given by the caller of this, names a line of the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level


def warn_each_time(message: str, category: type[GraphPatchWarning]) -> None:
    """Gives a warning that names a line of the user's code, also where that line gave the same one before.

    By default Python shows a warning once for each line of code: who runs a cell again would see nothing.
    """
    frame = sys._getframe(level_of_caller() - 1)
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, registry={})
