"""The notebook layer, the only part of the package that imports IPython and widgets.

A graph has one session (`session`): the chosen patches as data. The magics (`magics`, with `completion`) and the tree
browser (`views/browser`) edit the session, and find nodes with `search`. Cells run under its patches (`magics`), the
*Run* button of the browser runs the model with them (`runs`), and `export` writes them as Python code. `views` has the
attention view, the lens and others that share one selection, and answers the requests of all widgets. `display` has the
tables, progress bars and widgets that show results, and `extension` adds all of this to an IPython shell.

`register_patch_kind` adds a kind of patch to all of these.
"""

from __future__ import annotations

from graphpatch_notebook.notebook.session.chosen_patch import PATCH_KINDS, PatchKind, PatchValue

__all__ = ["PATCH_KINDS", "PatchKind", "PatchValue", "register_patch_kind"]


def register_patch_kind(kind: PatchKind) -> None:
    """Adds a kind of patch to `%graphpatch`, the browser, session files and exported code.

    Args:
        kind: The kind. A kind that you registered before under the same name is replaced.

    Raises:
        ValueError: The name is that of a command of `%graphpatch`, or of a kind that this package defines.

    Example:
        >>> import torch
        >>> from dataclasses import dataclass
        >>> from graphpatch_notebook import Patch
        >>> @dataclass(kw_only=True, eq=False)
        ... class NegatePatch(Patch[torch.Tensor]):
        ...     def op(self, original_output):
        ...         return -original_output
        >>> register_patch_kind(PatchKind("negate", NegatePatch, "negates the value"))
        >>> del PATCH_KINDS["negate"]
    """
    from graphpatch_notebook.notebook.magics.commands import commands

    before = PATCH_KINDS.get(kind.name)
    is_own = before is not None and before.patch.__module__.partition(".")[0] == __name__.partition(".")[0]
    if is_own or (before is None and kind.name in commands()):
        raise ValueError(f"%graphpatch has a command {kind.name!r} already; choose another name for the patch kind")
    PATCH_KINDS[kind.name] = kind
