"""What is imported when it is first asked for: names of a package, and optional packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection
from typing import Any

from graphpatch_notebook.errors import ExperimentError


def lazy_names(package: str, names: Collection[str], modules: Collection[str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package: it looks up `names` in its `modules`, in order, which it imports."""

    def get(name: str) -> Any:
        for module in modules if name in names else ():
            found = importlib.import_module(f"{package}.{module}")
            if hasattr(found, name):
                return vars(sys.modules[package]).setdefault(name, getattr(found, name))
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


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
