"""The name that documentation and users write: `from graphpatch import PatchableGraph`, `%load_ext graphpatch`.

Everything here is `graphpatch_notebook`'s own. The build puts this file beside that package, as a module `graphpatch`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import graphpatch_notebook

if TYPE_CHECKING:
    from graphpatch_notebook import *  # noqa: F403  # which imports all names, also those that few programs need

__all__ = graphpatch_notebook.__all__


class _Submodules(MetaPathFinder, Loader):
    """Makes `graphpatch.experiments` the very module `graphpatch_notebook.experiments`, and not a second copy of it."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, inner = name.partition(".")
        is_there = package == __name__ and inner and find_spec(f"{graphpatch_notebook.__name__}.{inner}") is not None
        return ModuleSpec(name, self) if is_there else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(graphpatch_notebook.__name__ + spec.name.removeprefix(__name__))
        spec.loader_state = module.__spec__  # the import puts its own there
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


sys.meta_path.insert(0, _Submodules())


def __dir__() -> list[str]:
    return dir(graphpatch_notebook)


def __getattr__(name: str) -> Any:
    return getattr(graphpatch_notebook, name)
