"""Imports of optional packages, which only experiments need."""

from __future__ import annotations

import importlib
from typing import Any

from graphpatch_notebook.errors import ExperimentError


def extra(name: str, purpose: str, instead: str = "") -> Any:
    """Imports and returns a module of the optional dependencies `experiments`.

    Args:
        name: The name of the module.
        purpose: The feature that needs it, for the message.
        instead: An alternative, appended to the message.

    Raises:
        ExperimentError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ExperimentError(
            f"{purpose} needs {name.partition('.')[0]}: pip install 'graphpatch-notebook[experiments]'{instead}"
        ) from error
