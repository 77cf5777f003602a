"""The name that documentation and users write: `from graphpatch import PatchableGraph`, `%load_ext graphpatch`.

Everything here is `graphpatch_notebook`'s own. The build puts this file beside that package, as a module `graphpatch`.
"""

from __future__ import annotations

from typing import Any

import graphpatch_notebook
from graphpatch_notebook import *  # noqa: F403

__all__ = graphpatch_notebook.__all__


def __getattr__(name: str) -> Any:
    # What a star import leaves out: `__version__`, `load_ipython_extension`, `unload_ipython_extension`.
    return getattr(graphpatch_notebook, name)
