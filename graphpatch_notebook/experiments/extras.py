"""Imports of optional packages, which only experiments need."""

from __future__ import annotations

import importlib
from typing import Any

from graphpatch_notebook.errors import ExperimentError


def extra(name: str, purpose: str, instead: str = "") -> Any:
    """Imports and returns a module of the optional dependencies `experiments`.

    The message of the `ExperimentError`, if it is not installed, names the feature that needs it, and an alternative.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ExperimentError(
            f"{purpose} needs {name.partition('.')[0]}: pip install 'graphpatch-notebook[experiments]'{instead}"
        ) from error
