"""The name that documentation and users write: `from graphpatch import PatchableGraph`, `%load_ext graphpatch`.

Everything here is `graphpatch_notebook`'s own. The build puts this file beside that package, as a module `graphpatch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import graphpatch_notebook

if TYPE_CHECKING:
    from graphpatch_notebook import *  # noqa: F403  # which imports all names, also those that few programs need

__all__ = graphpatch_notebook.__all__


def __dir__() -> list[str]:
    return dir(graphpatch_notebook)


def __getattr__(name: str) -> Any:
    return getattr(graphpatch_notebook, name)
