"""Graphs with patches woven in: a copy of a graph that hands the values of some of its nodes to whoever runs it.

    hidden = torch.relu(up)        ->    hidden = torch.relu(up)
    mul = hidden * 2                     patched = woven_patched(hidden, 'hidden')
                                         mul = patched * 2

Which patches stand there is looked up while the code runs, so that one piece of code serves all contexts in which the
same nodes are patched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from torch import fx

from graphpatch_notebook.capture.custom_graphs import RECORD
from graphpatch_notebook.capture.records import Node
from graphpatch_notebook.interrupts import holding
from graphpatch_notebook.torch_compat import codegen_of

_patches: ContextVar[Callable[[str, Any], Any] | None] = ContextVar("graphpatch_woven_patches", default=None)


def patches_from(patched: Callable[[str, Any], Any]) -> AbstractContextManager[None]:
    """Makes `patched(name, value)` answer for the patched values that come up in the block."""
    return holding(_patches, patched)


def woven_patched(value: Any, name: str) -> Any:
    """Returns what stands in for the value of the node `name`; what woven code calls."""
    patched = _patches.get()
    return value if patched is None else patched(name, value)


def weave(graph: fx.Graph, names: Collection[str]) -> fx.Graph:
    """Returns a copy of `graph` in which the values of the nodes called `names` go through `woven_patched`.

    Args:
        graph: A graph whose nodes have records in their `meta`.
        names: The names of these records.
    """
    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result.output(result.graph_copy(graph, copies))
    result.set_codegen(codegen_of(graph))
    for node, copied in copies.items():
        record = node.meta.get(RECORD)
        if isinstance(record, Node) and record.name in names:
            _insert(result, copied, record)
    return result


def _insert(graph: fx.Graph, node: fx.Node, record: Node) -> None:
    value = written_value(node, record)
    with graph.inserting_after(node):
        patched = graph.call_function(woven_patched, (value, record.name))
    if not record.is_in_place:  # else the patched value was written into the tensor itself
        node.replace_all_uses_with(patched, delete_user_cb=lambda user: user is not patched)


def written_value(node: fx.Node, record: Node) -> fx.Node:
    """Returns the node of the tensor that an in-place op wrote into; `x[i] = v` itself has no value."""
    if not record.is_in_place:
        return node
    value = record.written_of(node.args, node.kwargs)
    return value if isinstance(value, fx.Node) else node
