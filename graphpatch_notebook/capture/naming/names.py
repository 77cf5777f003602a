"""Gives the nodes of a complete frame their names.

The names that the model itself uses come first (inputs, submodules, parameters, buffers), then `output`, then the
operations by the variables that hold them, then operations on sizes: the names of the model never
change. Steps of opened and fused calls come last: they do not change other names.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphpatch_notebook.capture.records import CallNode, Frame, Node
from graphpatch_notebook.paths import call_name, numbered
from graphpatch_notebook.values import tensor_specs

_RANKS = {"input": 0, "call": 1, "parameter": 2, "buffer": 2, "attribute": 2, "output": 3, "constant": 4, "op": 4}
SIZE_PREFIX = "size_"


def name_nodes(frame: Frame, size_prefix: str = SIZE_PREFIX) -> None:
    """Fixes `Node.name` of every node of `frame` (with `size_prefix`, if it carries sizes), and fills `frame.names`."""
    frame.names.clear()
    _number_calls(frame)
    # Each numbering continues where it stopped: counting from one each time takes minutes in a loop of 50,000 ops.
    numberings: dict[str, Iterator[str]] = {}
    for node in sorted(frame.nodes, key=_rank):  # a stable sort: execution order within a rank
        if not node.name:
            node.name = base = _base(node, size_prefix)
            if base in frame.names:
                numbering = numberings.get(base) or numberings.setdefault(base, numbered(base))
                node.name = next(n for n in numbering if n not in frame.names)
        frame.names[node.name] = node


def _rank(node: Node) -> int:
    rank = 5 if node.is_size else _RANKS[node.kind]
    return rank if node.composite is None else 6 + node.is_size


def _base(node: Node, size_prefix: str) -> str:
    base = node.base_name or node.op
    if isinstance(node, CallNode):
        base = call_name(base)
        return f"{base}_{node.call_index}" if node.call_count > 1 else base
    if node.kind in ("parameter", "buffer", "attribute"):
        return base.replace(".", "_")
    return f"{size_prefix}{base}" if node.is_size and not tensor_specs(node.spec) else base


def _number_calls(frame: Frame) -> None:
    by_module: dict[int, list[CallNode]] = {}
    for node in frame.calls():
        by_module.setdefault(id(node.frame.module), []).append(node)
    for nodes in by_module.values():
        # An attempt that raised leaves a gap, but still was the call with that number.
        count = max(len(nodes), nodes[-1].call_index + 1)
        for node in nodes:
            node.call_count = count
