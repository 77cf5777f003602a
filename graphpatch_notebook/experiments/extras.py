"""The packages that experiments need and the rest of this package does not."""

from __future__ import annotations

import importlib
from typing import Any

from graphpatch_notebook.errors import ExperimentError


def extra(name: str, purpose: str, instead: str = "") -> Any:
    """Returns a module of the extra `experiments`.

    Args:
        name: The name of the module.
        purpose: What it is needed for, in words.
        instead: What can be done without it, in words that follow the repair.

    Raises:
        ExperimentError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ExperimentError(
            f"{purpose} needs {name.partition('.')[0]}: pip install 'graphpatch-notebook[experiments]'{instead}"
        ) from error
