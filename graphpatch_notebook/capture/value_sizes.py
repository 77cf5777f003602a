"""Tensors that are as long as values say, and what a model does as often: `for expert in is_chosen.nonzero(): ...`."""

from __future__ import annotations

import torch

from graphpatch_notebook.capture.records import Node, refs_in
from graphpatch_notebook.values import ContainerSpec, TensorSpec

PARTS = frozenset({"unbind", "split", "chunk", "tensor_split"})
"""Functions that give the parts of a tensor; a loop over a tensor is one over what `unbind` gives."""

_SIZED_BY_VALUES = frozenset({"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"})


def part_count_by_values(node: Node) -> int | None:
    """Returns how many parts a tensor was taken into at `node`, where that depends on values of tensors.

    Example:
        >>> from graphpatch_notebook import PatchableGraph
        >>> class Loop(torch.nn.Module):
        ...     def forward(self, x):
        ...         return sum(x[i] for i in (x > 0).nonzero())
        >>> nodes = PatchableGraph(Loop(), torch.ones(3))._root_frame.nodes
        >>> [part_count_by_values(node) for node in nodes if node.op == "unbind"]
        [3]
    """
    if node.op not in PARTS or node.kind != "op" or not isinstance(node.spec, ContainerSpec):
        return None
    return len(node.spec.children) if comes_of_values(node) else None


def comes_of_values(node: Node) -> bool:
    """Whether the tensor that `node` is made from, as its first argument, has a shape that depends on values."""
    while (ref := next(refs_in(node.args), None)) is not None and ref.node is not node:
        node = ref.node
        if is_sized_by_values(node):
            return True
    return False


def is_sized_by_values(node: Node) -> bool:
    """Whether the function called at `node` gives as many entries as the values of its arguments say."""
    if node.op in _SIZED_BY_VALUES or (node.op == "where" and len(node.args) == 1):
        return True
    if node.op != "getitem":
        return False
    indices = (found.node.spec for found in list(refs_in(node.args))[1:])
    return any(isinstance(index, TensorSpec) and index.dtype in _BOOLS for index in indices)


_BOOLS = (torch.bool, torch.uint8)
