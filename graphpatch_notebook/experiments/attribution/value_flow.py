"""What the records tell of where values come from and where they go, for values of which autograd does not tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.records import CallNode, Frame, Node, Ref, Structure, refs_in
from graphpatch_notebook.experiments.attribution.scored_nodes import ScoredNode

_NO_USE = ("requires_grad_",)
_HOLDERS = (tuple, list, dict, slice, Structure)


class ValueFlow:
    """Follows values through the records of a capture, across frames."""

    def __init__(self) -> None:
        self._uses: dict[int, Counter[int]] = {}

    def has_one_use(self, node: ScoredNode) -> bool:
        """Whether the value of a node is known to be used once, under this name."""
        used, frame = node.node, node.frame
        if node.node.kind == "output":
            if frame.call is None or frame.parent is None:
                return True
            used, frame = frame.call, frame.parent
        if frame.opaque_reason is not None or frame.has_own_graph:
            return False
        uses = self._uses.get(id(frame))
        if uses is None:
            uses = self._uses[id(frame)] = Counter(id(ref.node) for ref in refs_in(frame.output))
            for inner in frame.nodes:
                if inner.op not in _NO_USE:
                    for value in (*inner.args, *inner.kwargs.values()):
                        if type(value) is Ref:
                            uses[id(value.node)] += 1
                        elif isinstance(value, _HOLDERS):
                            uses.update(id(ref.node) for ref in refs_in(value))
        return uses[id(used)] == 1

    def comes_from(self, node: ScoredNode, sources: Collection[int]) -> bool:
        """Whether a value is computed, by whatever operations, from one of some nodes (by id)."""
        waiting = list(_made_of(node.node, node.frame))
        seen: set[int] = set()
        while waiting:
            inner, frame = waiting.pop()
            if id(inner) in sources:
                return True
            if id(inner) not in seen:
                seen.add(id(inner))
                waiting += _made_of(inner, frame)
        return False

    def made_of(self, node: ScoredNode) -> list[Node]:
        """Returns the nodes that a value is directly made of; for a call, the output node of what is called."""
        direct = (inner for inner, _ in _made_of(node.node, node.frame))
        return [_returned(inner) for inner in direct]


def _returned(node: Node) -> Node:
    """Returns the output node of what is called, for a call."""
    return node.frame.output_node if isinstance(node, CallNode) and node.frame.nodes else node


def _made_of(node: Node, frame: Frame) -> Iterator[tuple[Node, Frame]]:
    if node.kind == "call":
        if isinstance(node, CallNode) and node.frame.nodes:
            yield node.frame.output_node, node.frame
    elif node.kind == "input":
        if frame.parent is not None and frame.call is not None:
            given = given_input(frame.parameters, node.target, frame.call.args, frame.call.kwargs)
            for ref in refs_in(given):
                yield ref.node, frame.parent
    elif node.kind == "output" and frame.opaque_reason is None:
        for ref in refs_in(frame.output):
            yield ref.node, frame
    elif node.kind == "output":
        for inner in frame.nodes:
            if inner.kind in ("input", "call"):
                yield inner, frame
    else:
        made = node.whole
        for ref in refs_in((made.args, made.kwargs)):
            yield ref.node, frame
