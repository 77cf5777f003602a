"""The heads of an attention in values: equal parts of the last dimension, or a dimension of their own.

    q_proj -> q -> attention product -> z -> (reshaped, gated, normed, ...) -> output projection -> (added, ...)
    separate heads ........................................................    mixed heads ...............

A value has separate heads if nothing but elementwise operations and views lie between it and a component with heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from graphpatch_notebook.capture.records import CallNode
from graphpatch_notebook.components import Component, operations
from graphpatch_notebook.components.flow import Value, walk
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.methods.arguments import targets
from graphpatch_notebook.experiments.methods.positions import (
    PositionCells,
    Positions,
    RowPositions,
    check_problems,
    found_or_problems,
    position_cells,
)
from graphpatch_notebook.inspection.resolution import Target, axes_of
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patching import sequence_dim

Shape: TypeAlias = "tuple[int, ...]"

_MIXING = operations.LINEAR_MAPS | operations.PRODUCTS | operations.MIXING
_ATTENTIONS = {"scaled_dot_product_attention", "flex_attention", "multi_head_attention_forward"}


@dataclass(frozen=True)
class HeadLayout:
    """Where heads are in values, by path: their dimension, and how many entries of it belong to one head."""

    dims: Mapping[str, int]
    sizes: Mapping[str, int]

    def part(self, path: str, head: int) -> slice:
        """Returns the entries of a head in dimension `dims[path]`."""
        size = self.sizes[path]
        return slice(size * head, size * (head + 1))


def head_layout(
    pg: PatchableGraph,
    shapes: Mapping[str, Shape],
    count: Any,
    sequences: Mapping[str, int] = MappingProxyType({}),
) -> HeadLayout:
    """Returns the positions of `count` heads in values.

    The shapes of values are given by path, and their sequence dimensions if the user chose positions.

    Raises:
        ExperimentError: A value does not have this number of separate heads, or it is not known where they are.
    """
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ExperimentError(f"heads must be the number of heads, a positive integer, not {count!r}")
    dims, problems = found_or_problems(
        targets(pg, shapes), lambda path, target: _head_dim(pg, target, shapes[path], int(count), sequences.get(path))
    )
    check_problems(problems, f"heads={count} needs values with {count} separate heads:")
    return HeadLayout(dims, {path: shapes[path][dim] // int(count) for path, dim in dims.items()})


def _head_dim(pg: PatchableGraph, target: Target, shape: Shape, count: int, sequence: int | None) -> int:
    """Returns the dimension of the heads in a value; raises a `ValueError`."""
    if count == 1:
        return len(shape) - 1
    names = axes_of(pg.nodes.root, target)
    own = [dim for dim, whole in enumerate(target.kept_dims) if names[whole : whole + 1] == ("head",)]
    if own and shape[own[0]] == count:
        return own[0]
    name, component = _component_near(pg, target)
    heads = component.shape[component.axes.index("head")]
    if heads != count:
        raise ValueError(f"this attention has {heads} heads ({name})")
    channels = component.shape[-1] if component.axes[-1] == "channel" else 0
    if shape[-1] == heads * channels:
        return len(shape) - 1
    if sequence is None:
        with suppress(ValueError):
            sequence = target.kept_dims.index(sequence_dim(pg.nodes.root, target)[0])
    own = [dim for dim in range(1, len(shape) - 1) if shape[dim] == heads and dim != sequence]
    if len(own) != 1:
        raise ValueError("it is not known which dimension has them; give inputs of another length")
    return own[0]


def _component_near(pg: PatchableGraph, target: Target) -> tuple[str, Component]:
    """Returns the component with heads that a value is computed from, or the other way round, without mixing heads."""
    components = pg.components
    evidence = components.evidence
    flow, node = evidence.trails.flow, target.node
    if node.kind == "output" and target.frame.opaque_reason is not None and target.frame.call is not None:
        node = target.frame.call
    start = flow.resolve(node, target.dig)
    headed = {evidence.values[name]: name for name, each in components.items() if "head" in each.axes}

    def before(value: Value) -> list[Value]:
        is_mixing = isinstance(value.node, CallNode) or value.node.whole.op in _MIXING | _ATTENTIONS
        moving = [] if is_mixing else flow.moving(value.node)
        return [each for each in moving if math.prod(each.shape) == math.prod(value.shape)]

    near: list[Value] = [] if start is None else [start]
    name = next((headed[value] for value in walk(near, before) if value in headed), None)
    if name is None:
        name = next(
            (name for value, name in headed.items() if any(each in near for each in walk([value], before))), None
        )
    if name is None:
        z = (
            f"layers[*].attn.z: {components['layers[0].attn.z'].path!r}, ..."
            if "layers[0].attn.z" in components
            else ""
        )
        raise ValueError(f"not a value with separate heads, such as the input of an output projection, or {z or 'z'}")
    return name, components[name]


class ValueParts:
    """The parts of values that the cells of a sweep are about: a head of a value, a position, both, or all of it.

    Without a number of heads, all heads are one part; without positions, all positions are. `sequences` has the
    sequence dimension by path, if there are positions.

    Attributes:
        axes: The axes of the sweep: `path`, and `head` and `position` for parts of values.
        has_rows: Whether each row of the batch has positions of its own.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        values: Mapping[str, Tensor],
        heads: int | None,
        positions: Positions | RowPositions,
        sequences: Mapping[str, int],
    ) -> None:
        self._values = values
        self._heads: HeadLayout | None = None
        self._positions: PositionCells | None = None
        self.axes: dict[str, Any] = {"path": list(values)}
        if heads is not None:
            shapes = {path: tuple(value.shape) for path, value in values.items()}
            self._heads = head_layout(pg, shapes, heads, sequences)
            self.axes["head"] = range(heads)
        if positions is not None:
            self._positions = position_cells(pg, positions, values, sequences)
            self.axes["position"] = self._positions.labels
        self.has_rows = self._positions is not None and bool(self._positions.columns)

    def index(self, path: str, cell: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the index of the part of a value that a cell is about, from the labels of the cell."""
        index: list[Any] = [slice(None)] * self._values[path].ndim
        if self._positions is not None:
            self._positions.place(index, path, cell["position"])
        if self._heads is not None:
            index[self._heads.dims[path]] = self._heads.part(path, cell["head"])
        return tuple(index)
