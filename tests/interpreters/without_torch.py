"""The checks of this folder in an interpreter that has no torch and no numpy: `js/tests/python/` starts it."""

from __future__ import annotations

import importlib
import json
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKS = ("assignments", "call_sites", "source")


class TorchClasses(types.ModuleType):
    """Stands for a module of torch or numpy, of which what is tested here asks for classes and a file, no more."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


class TorchFinder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ("torch", "numpy") else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = TorchClasses(spec.name)
        module.__file__ = f"/torch/{spec.name}/__init__.py"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare() -> None:
    """Makes single files of the package importable, without the rest of it."""
    sys.meta_path.insert(0, TorchFinder())
    for name in ("graphpatch_notebook", "graphpatch_notebook.capture"):
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
        sys.modules[name] = package
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, package)


def results() -> str:
    """Returns, as JSON, the version of Python and the problems that each check finds."""
    prepare()
    checks = {name: importlib.import_module(f"tests.interpreters.{name}") for name in CHECKS}
    found = {name: list(check.problems()) for name, check in checks.items()}
    return json.dumps({"version": sys.version.split()[0], "problems": found})
