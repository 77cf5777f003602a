"""Sizes that are as many as values say, so that nothing along them stands at a position of the sequence.

The rows that a mixture of experts gives to one of them can be as many as the sequence has tokens, by accident. As in
`shapes`, sizes are followed by their values from where they come up through the recorded nodes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.records import HELD_KINDS, Frame, Node, refs_in
from graphpatch_notebook.capture.value_sizes import is_sized_by_values
from graphpatch_notebook.execution.shapes import sizes_of
from graphpatch_notebook.values import ContainerSpec, TensorSpec, ValueSpec

_INTO_FIRST = frozenset(
    "index_add index_copy index_fill index_put index_reduce masked_scatter scatter scatter_add scatter_reduce".split()
)
"""Functions whose result is as their first argument, whatever they put into it; besides those that work in place."""

_NONE: frozenset[int] = frozenset()


@dataclass(slots=True)
class RowSizes:
    """The sizes of the values of one frame that do not count positions, by the id of the node.

    Attributes:
        counted: As many as values say: the entries of a mask that are true.
        sorted: In an order that values say. Whoever sorts rows puts them back before returning them, so these sizes are
            followed into the modules that are called, not out of the frame that sorts.
    """

    counted: dict[int, frozenset[int]]
    sorted: dict[int, frozenset[int]]


def sizes_without_positions(frame: Frame, node: Node) -> frozenset[int]:
    """Returns the sizes of the value of `node`, in `frame`, along which its entries are chosen, or sorted, by values.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> class Chosen(torch.nn.Module):
        ...     def forward(self, x):
        ...         rows = x[x[:, 0] > 0]
        ...         return torch.zeros_like(x).index_add(0, torch.arange(len(rows)), rows * 2)
        >>> frame = PatchableGraph(Chosen(), torch.ones(3, 5))._root_frame
        >>> [(node.op, *sizes_without_positions(frame, node)) for node in frame.nodes if node.op in ("mul", "output")]
        [('mul', 3), ('output',)]
    """
    root = frame
    while root.parent is not None:
        root = root.parent
    with _lock:
        _of(root)  # what a frame is given is known once its caller is known up to the call
        known = _of(frame)
    return known.counted.get(id(node), _NONE) | known.sorted.get(id(node), _NONE)


_lock = threading.Lock()


def _of(frame: Frame) -> RowSizes:
    known: RowSizes | None = frame.row_sizes
    if known is None:
        known = frame.row_sizes = RowSizes({}, {})  # the frames below ask for it
        try:
            for node in frame.nodes:
                counted, in_order = _node(frame, node, known)
                if counted:
                    known.counted[id(node)] = counted
                if in_order:
                    known.sorted[id(node)] = in_order
        except BaseException:  # an interrupt: half of it would pass for all
            frame.row_sizes = None
            raise
    return known


def _node(frame: Frame, node: Node, known: RowSizes) -> tuple[frozenset[int], frozenset[int]]:
    if node.kind in HELD_KINDS:
        return _NONE, _NONE
    if node.kind == "call":
        if node.frame is None or not node.frame.nodes:
            return _NONE, _NONE
        inner, result = _of(node.frame), id(node.frame.output_node)
        return inner.counted.get(result, _NONE), inner.sorted.get(result, _NONE)
    if node.kind == "input":
        outside = frame.parent.row_sizes if frame.parent is not None else None
        if outside is None or frame.call is None or not (outside.counted or outside.sorted):
            return _NONE, _NONE
        return _among(outside, given_input(frame.parameters, node.target, frame.call.args, frame.call.kwargs), node)
    if node.kind == "output":
        counted, in_order = _among(known, frame.output, node)
        given = _NONE.union(*(known.sorted.get(id(each), _NONE) for each in frame.inputs()))
        return counted, in_order & given
    source = node.element[0] if node.element is not None else node
    if source.is_in_place or source.op in _INTO_FIRST:
        return _among(known, source.args[:1], node)
    counted, in_order = _among(known, (source.args, source.kwargs), node)
    if is_sized_by_values(source):
        counted |= _rows_of(source, node.spec)
    if source.op in ("sort", "argsort"):
        in_order |= _sorted_size(source, node.spec)
    return counted, in_order


def _among(known: RowSizes, values: object, node: Node) -> tuple[frozenset[int], frozenset[int]]:
    """Returns the sizes of `node` that its arguments have from where rows were chosen, and sorted."""
    if not known.counted and not known.sorted:
        return _NONE, _NONE
    own, nodes = frozenset(sizes_of(node.spec)), [id(ref.node) for ref in refs_in(values)]
    counted = _NONE.union(*(known.counted.get(each, _NONE) for each in nodes))
    return own & counted, own & _NONE.union(*(known.sorted.get(each, _NONE) for each in nodes))


def _rows_of(source: Node, spec: ValueSpec) -> frozenset[int]:
    """Returns the size that values say, of what `source` gives: that of the first dimension, or of the one indexed."""
    if isinstance(spec, ContainerSpec):
        return _NONE.union(*(_rows_of(source, child) for _, _, child in spec.children))
    if not isinstance(spec, TensorSpec) or not spec.shape:
        return _NONE
    place = 0
    if source.op == "getitem" and isinstance(source.args[1], tuple):
        for index in source.args[1]:
            if index is not None and not isinstance(index, slice):
                break
            place += 1
    return frozenset({spec.shape[min(place, len(spec.shape) - 1)]})


def _sorted_size(source: Node, spec: ValueSpec) -> frozenset[int]:
    if isinstance(spec, ContainerSpec):
        return _NONE.union(*(_sorted_size(source, child) for _, _, child in spec.children))
    given = source.kwargs.get("dim", source.args[1] if len(source.args) > 1 else -1)
    dim = given if type(given) is int else -1
    is_there = isinstance(spec, TensorSpec) and -len(spec.shape) <= dim < len(spec.shape)
    return frozenset({spec.shape[dim]}) if is_there else _NONE  # type: ignore[union-attr]
