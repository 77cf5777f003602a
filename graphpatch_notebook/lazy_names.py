"""What is imported when it is first asked for: names of a package, and optional packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from typing import Any

from graphpatch_notebook.errors import ExperimentError


def lazy_names(package: str, names: Collection[str], modules: Collection[str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package: it looks up `names` in its `modules`, in order, which it imports.

    `modules` may be a mapping to the names in each module, if it matters which modules are imported.
    """
    where = modules if isinstance(modules, Mapping) else dict.fromkeys(modules, names)

    def get(name: str) -> Any:
        for module in [module for module in where if name in where[module]] if name in names else ():
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
        raise _missing(name, purpose, instead) from error


def check_extra(name: str, purpose: str) -> None:
    """Raises the `ExperimentError` of `extra` if a module is not installed, without importing it."""
    if name not in sys.modules and find_spec(name) is None:
        raise _missing(name, purpose)


def _missing(name: str, purpose: str, instead: str = "") -> ExperimentError:
    return ExperimentError(
        f"{purpose} needs {name.partition('.')[0]}: pip install 'graphpatch-notebook[experiments]'{instead}"
    )
