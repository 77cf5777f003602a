"""The IPython extension: `%load_ext graphpatch` adds the magics and the completer, `%unload_ext` removes them."""

from __future__ import annotations

import weakref
from typing import Any

from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.completion.completion import PathCompleter
from graphpatch_notebook.notebook.magics.cells import CellTransformer, mark_cell, remove_leftover_patches
from graphpatch_notebook.notebook.magics.magics import GraphPatchMagic
from graphpatch_notebook.notebook.session.workspace import ActiveGraph, forget_workspace, workspace_of

_NAME = "graphpatch"
_NAMES = frozenset({"graphpatch", "graphpatch_notebook"})  # the names that the extension can be loaded under


class Extension:
    """The extension in one shell, which is `Any` here and below: most of IPython has no types."""

    def __init__(self, shell: Any) -> None:
        proxy = weakref.proxy(shell)  # `_extensions` must not keep shells alive
        self.magic = GraphPatchMagic(proxy, workspace_of(shell))
        self._transformer = CellTransformer(lambda: str(proxy.ast_node_interactivity))
        tables = shell.magics_manager.magics
        self._before = {kind: tables[kind][_NAME] for kind in tables if _NAME in tables[kind]}
        shell.register_magic_function(self.magic.graphpatch, magic_kind="line_cell", magic_name=_NAME)
        shell.input_transformers_cleanup.append(mark_cell)
        shell.ast_transformers.append(self._transformer)
        # Patches that an interrupt left active must not apply to the next cell, even if that has no magic.
        shell.events.register("pre_execute", remove_leftover_patches)
        self._completer = PathCompleter(proxy, self._active, taken=self.magic.workspace.results.names_of_others)
        self._completer.install()

    def _active(self) -> ActiveGraph | None:
        """Returns the active graph, or `None` if there is none, or several and none is selected."""
        try:
            return self.magic.workspace.find()
        except SessionError:
            return None

    def remove(self, shell: Any) -> None:
        """Restores the shell."""
        self._completer.uninstall()
        shell.events.unregister("pre_execute", remove_leftover_patches)
        for table in shell.magics_manager.magics.values():
            table.pop(_NAME, None)
        for kind, magic in self._before.items():
            shell.magics_manager.magics[kind][_NAME] = magic
        _remove(shell.input_transformers_cleanup, mark_cell)
        _remove(shell.ast_transformers, self._transformer)


def _remove(items: list[Any], item: Any) -> None:
    items[:] = [other for other in items if other is not item]


_extensions: weakref.WeakKeyDictionary[Any, Extension] = weakref.WeakKeyDictionary()


def load(shell: Any) -> None:
    """Adds the extension to a shell. Does nothing if it is loaded."""
    if shell not in _extensions:
        _extensions[shell] = Extension(shell)


def unload(shell: Any) -> None:
    """Removes the extension when the last of the names that it was loaded under is unloaded."""
    if len(_NAMES & shell.extension_manager.loaded) > 1:  # includes the name that is being unloaded
        return
    extension = _extensions.pop(shell, None)
    forget_workspace(shell)
    if extension is not None:
        extension.remove(shell)
