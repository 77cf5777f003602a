"""What is made of the nodes of a graph, and kept as long as the graph is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from graphpatch_notebook.inspection.nodes import NodeMap
from graphpatch_notebook.patchable_graph import PatchableGraph

T = TypeVar("T")


class KeptByGraph(Generic[T]):
    """Something for each graph, made when it is asked for, and anew when the graphs were edited since.

    Args:
        make: Makes it of the nodes. What it returns must not hold the graph.
    """

    def __init__(self, make: Callable[[NodeMap], T]) -> None:
        self._make = make
        self._kept: weakref.WeakKeyDictionary[PatchableGraph, tuple[NodeMap, T]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # the widget asks in another thread than the cells

    def of(self, pg: PatchableGraph) -> T:
        """Returns that of a graph."""
        nodes = pg.nodes  # another object after an edit
        with self._lock:
            known = self._kept.get(pg)
            if known is None or known[0] is not nodes:
                known = self._kept[pg] = nodes, self._make(nodes)
            return known[1]
