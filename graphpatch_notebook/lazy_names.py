"""Names of a package that are imported when they are first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


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
