"""A cache of values that are computed from the nodes of a graph."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from graphpatch_notebook.inspection.node_map import NodeMap
from graphpatch_notebook.patchable_graph import PatchableGraph

T = TypeVar("T")


class KeptByGraph(Generic[T]):
    """A value for each graph, computed at first use, and again after an edit of the graphs.

    Args:
        make: Computes the value from the nodes. The value must not hold a reference to the graph.
    """

    def __init__(self, make: Callable[[NodeMap], T]) -> None:
        self._make = make
        self._kept: weakref.WeakKeyDictionary[PatchableGraph, tuple[NodeMap, T]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # the widget reads it in another thread than the cells

    def of(self, pg: PatchableGraph) -> T:
        """Returns the value of a graph."""
        nodes = pg.nodes  # a new object after each edit
        with self._lock:
            known = self._kept.get(pg)
            if known is None or known[0] is not nodes:
                known = self._kept[pg] = nodes, self._make(nodes)
            return known[1]
