"""What is derived from the records of a capture, once for all patch contexts."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from graphpatch_notebook.capture.records import Frame
from graphpatch_notebook.execution import context as contexts
from graphpatch_notebook.execution.context import Prepared
from graphpatch_notebook.execution.plan import Callers, Entry
from graphpatch_notebook.graphs import CompiledGraphModule
from graphpatch_notebook.inspection.nodes import NodeMap
from graphpatch_notebook.inspection.resolution import Target


class Derived:
    """What is derived from the records of a capture: holds until somebody edits a graph.

    Attributes:
        edits: How often graphs had been edited when it was derived.
        own_graphs: The graph modules whose graph *is* the module.
        targets: What paths mean, as far as anybody asked.
        callers: Which frames call which module.
    """

    def __init__(self, root: Frame, edits: int, own_graphs: Sequence[CompiledGraphModule]) -> None:
        self._root = root
        self.edits = edits
        self.own_graphs = own_graphs
        self.targets: dict[str, Target] = {}

    @functools.cached_property
    def callers(self) -> Callers:
        return Callers(self._root)

    @functools.cached_property
    def nodes(self) -> NodeMap:
        """All paths that can be patched."""
        return NodeMap(self._root)

    @functools.cached_property
    def without_patches(self) -> Prepared:
        """What it takes to run graphs that are their module, where nothing is patched."""
        return self.prepare(())

    def prepare(self, entries: Sequence[Entry]) -> Prepared:
        """Returns what it takes to activate `entries`."""
        return contexts.prepare(self._root, entries, self.callers, self.own_graphs)
