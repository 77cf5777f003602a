"""Plumbing: masks, indices, positions and flags, which prepare what a model computes, and which trees fold away.

Integers and booleans are plumbing. A tensor of floating-point numbers is, if it is computed from plumbing alone (a mask
that is added to scores), and if no linear map and no output of the model reads it: an image of bytes is not.
"""

from __future__ import annotations

from collections.abc import Set

import torch

from graphpatch_notebook.capture.inputs import passed_on
from graphpatch_notebook.capture.records import CallNode, Frame, Node, Ref, refs_in
from graphpatch_notebook.components.operations import CREATIONS, LINEAR_MAPS, PRODUCTS
from graphpatch_notebook.values import ScalarSpec, TensorSpec, ValueSpec, leaves

_WHOLE = frozenset([torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
_WEIGHTED = LINEAR_MAPS | PRODUCTS | {"embedding", "conv_transpose1d", "conv_transpose2d"}
_CREATIONS = CREATIONS | frozenset(
    "tensor scalar_tensor new_tensor full new_full full_like ones new_ones ones_like eye arange linspace".split()
)


def plumbing(root: Frame) -> Set[int]:
    """Returns the ids of the nodes of a capture that are plumbing; each capture is searched once.

    The tensors that the model is given, parameters, and what the model returns are never plumbing; the call of a module
    is, if everything in it is.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> class Masked(torch.nn.Module):
        ...     def forward(self, x):
        ...         mask = torch.ones(2, dtype=torch.bool)
        ...         bias = (~mask).float()
        ...         return x + bias
        >>> frame = PatchableGraph(Masked(), torch.ones(2)).nodes.root
        >>> found = plumbing(frame)
        >>> [node.name for node in frame.nodes if id(node) in found]
        ['mask', 'invert', 'bias']
    """
    findings = root.capture.findings
    if plumbing not in findings:
        search = _Search()
        search.sort_frame(root)
        findings[plumbing] = search.result() - {id(ref.node) for ref in refs_in(root.output)}
    found: Set[int] = findings[plumbing]
    return found


class _Search:
    """The search in one capture.

    Attributes:
        found: The ids of what is plumbing, or was given to the model as integers (`given`).
        made_of: Of the plumbing of floating-point numbers: what it is computed from.
        read: What linear maps read, and what frames return: not plumbing, if it is in `made_of`.
    """

    def __init__(self) -> None:
        self.found: set[int] = set()
        self.given: set[int] = set()
        self.made_of: dict[int, list[Node]] = {}
        self.read: list[Node] = []

    def result(self) -> set[int]:
        """Returns the ids of the plumbing, without values that other nodes read, and without the sources of these."""
        found, left = self.found - self.given, self.read
        while left:
            node = left.pop()
            if id(node) in found and id(node) in self.made_of:
                found.remove(id(node))
                left += self.made_of[id(node)]
        return found

    def sort_frame(self, frame: Frame) -> bool:
        """Finds the plumbing of a frame. Returns whether everything in the frame is plumbing."""
        is_all, found, before = True, self.found, len(self.made_of)
        for node in frame.nodes:
            kind = node.kind
            if kind == "output":
                continue
            if kind == "op" and node.op in _WEIGHTED:
                is_all = False
                if len(self.made_of) > before:
                    self.read += _sources(node)
            elif self._is_plumbing_call(node) if kind == "call" else self._is_plumbing(node, frame):
                found.add(id(node))
            elif kind != "constant":
                is_all = False
        if not is_all and len(self.made_of) > before:
            self.read += [ref.node for ref in refs_in(frame.output)]
        return is_all and len(frame.nodes) > 1

    def _is_plumbing_call(self, node: Node) -> bool:
        if not isinstance(node, CallNode) or not self.sort_frame(node.frame):
            return False
        returned = [ref.node for ref in refs_in(node.frame.output)]
        if any(id(one) in self.made_of for one in returned):
            self.made_of[id(node)] = returned
        return True

    def _is_plumbing(self, node: Node, frame: Frame) -> bool:
        kind, spec = node.kind, node.spec
        if kind == "parameter" or node.is_size:
            return node.is_size
        is_given = kind == "input" and frame.parent is None
        if type(spec) is TensorSpec:  # most nodes
            if spec.dtype in _WHOLE:
                if is_given:
                    self.given.add(id(node))
                return True
        elif not (inside := [leaf for _, leaf in leaves(spec)]):
            return False
        elif all(map(_is_whole, inside)):
            return True
        made_of = self._op_sources(node) if kind == "op" else _given_to(node, frame) if kind == "input" else None
        if made_of is None or not all(id(one) in self.found for one in made_of):
            return False
        self.made_of[id(node)] = made_of
        return True

    def _op_sources(self, node: Node) -> list[Node] | None:
        """Returns the values that an op is computed from; `None` if the op cannot be plumbing."""
        first = node.args[0] if node.args else None
        if type(first) is Ref and id(first.node) not in self.found:  # most ops; finding all sources takes long
            return None
        sources = _sources(node)
        return sources if sources or node.op in _CREATIONS else None


def _sources(node: Node) -> list[Node]:
    return [ref.node for ref in node.whole.sources]


def _given_to(node: Node, frame: Frame) -> list[Node] | None:
    """Returns the nodes of the caller that an input holds; `None` if it does not hold any."""
    given = passed_on(node, frame)
    return [ref.node for ref in refs_in(given[0])] or None if given is not None else None


def _is_whole(spec: ValueSpec) -> bool:
    if isinstance(spec, TensorSpec):
        return spec.dtype in _WHOLE
    return isinstance(spec, ScalarSpec) and isinstance(spec.value, int)
