"""The heads of an attention in values: equal parts of the last dimension, or a dimension of their own.

    queries, keys, values -> attention product -> (reshaped, gated, ...) -> projection -> (added, normed, ...)
                             separate heads ............................    mixed heads ....................

Values with mixed heads are rejected where the captured graph shows it: the value depends on a product with a weight
(the projection), whose input depends on a product of two values of the run (the attention).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from graphpatch_notebook.capture.records import CallNode, Frame
from graphpatch_notebook.checks.dimensions import dimensions_of
from graphpatch_notebook.components.flow import Flow, Value, walk
from graphpatch_notebook.components.names import parse_name
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.execution import sequence_dim
from graphpatch_notebook.experiments.methods.arguments import targets
from graphpatch_notebook.experiments.methods.positions import (
    PositionCells,
    Positions,
    RowPositions,
    position_cells,
)
from graphpatch_notebook.inspection.resolution import Target, axes_of, is_patchable
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.paths import parse_path
from graphpatch_notebook.values import TensorSpec

_ATTENTIONS = ("scaled_dot_product_attention", "flex_attention")
_WITH_PROJECTION = "multi_head_attention_forward"
_MATMULS = ("linear", "matmul", "mm", "bmm", "mv", "einsum", "tensordot", "grouped_mm", "_grouped_mm")
_ADDING_MATMULS = ("addmm", "baddbmm", "addbmm", "addmv")  # the first argument is added
_CONVOLUTIONS = ("conv1d", "conv2d")
_SUMS = ("add", "iadd", "add_", "sub", "isub", "sub_", "rsub")


def mixing_of(flow: Flow, target: Target) -> str | None:
    """Returns what to give in place of a value in which the heads of an attention are mixed.

    `None` if they are not, or it is unknown.
    """
    frame, node = target.frame, target.node
    if node.kind == "output" and frame.opaque_reason is not None and frame.call is not None:
        node = frame.call
    start = flow.resolve(node, target.dig)

    def behind(value: Value) -> list[Value]:
        is_end = value.node.whole.op == _WITH_PROJECTION or _multiplies(flow, value)
        return [] if is_end else flow.moving(value.node)

    # Nearest first: the attention of this layer before those of earlier layers.
    for value in walk([] if start is None else [start], behind):
        if value.node.whole.op == _WITH_PROJECTION:
            if value.node.position in (None, 0):  # the other is the pattern
                return f"open it: ExtractionOptions(decompose=[{_WITH_PROJECTION!r}])"
        elif (projected := _projected(flow, value)) is not None:
            product = _product_behind(flow, projected)
            if product is not None and projected.shape[-1:] > product.shape[-1:]:
                separate = _input_of_projection(flow, value, projected)
                return "give the input of that projection" if separate is None else f"give {separate!r}"
    return None


def _projected(flow: Flow, value: Value) -> Value | None:
    """Returns the value that is multiplied with a weight, if the given value is such a product."""
    node = value.node
    if isinstance(node, CallNode):  # a quantized linear map
        given = [place.value for place in flow.inputs(node.frame) if isinstance(place.value.spec, TensorSpec)]
        is_map = len(given) == 1 and not any(True for _ in node.frame.calls()) and _has_matrix(node.frame)
        return given[0] if is_map else None
    factors = _factors(flow, value)
    weights = [factor for factor in factors if flow.is_held(factor)]
    others = [factor for factor in factors if factor not in weights]
    if len(weights) != 1 or len(others) != 1:
        return None
    shape = weights[0].shape
    if node.whole.op in _CONVOLUTIONS:  # depthwise convolutions do not mix channels
        return others[0] if shape[1] > 1 and not set(shape[2:]) - {1} else None
    return others[0] if len(shape) == 2 else None  # other weights may belong to one head each


def _has_matrix(frame: Frame) -> bool:
    module = frame.module
    return any(state.ndim > 1 for states in (module.parameters(), module.buffers()) for state in states)


def _multiplies(flow: Flow, value: Value) -> bool:
    """Whether a value is a product."""
    return isinstance(value.node, CallNode) or value.node.whole.op in _ATTENTIONS or bool(_factors(flow, value))


def _factors(flow: Flow, value: Value) -> list[Value]:
    """Returns the tensors that an operation multiplies with each other."""
    op = value.node.whole.op
    if op in _ADDING_MATMULS:
        return flow.reads(value.node)[1:3]
    return flow.reads(value.node)[:2] if op in _MATMULS or op in _CONVOLUTIONS else []  # the third is a bias


def _product_behind(flow: Flow, value: Value) -> Value | None:
    """Returns the attention product that a value is computed from, without a weight or a sum in between."""
    seen: dict[Value, Value | None] = {}

    def search(value: Value) -> Value | None:
        if value not in seen:
            seen[value] = None
            seen[value] = found(value)
        return seen[value]

    def found(value: Value) -> Value | None:
        if value.node.whole.op in _ATTENTIONS:
            return value
        if _multiplies(flow, value):
            factors = _factors(flow, value)
            return value if len(factors) > 1 and not any(map(flow.is_held, factors)) else None
        products = [search(source) for source in flow.moving(value.node)]
        if value.node.whole.op in _SUMS and None in products:
            return None  # a residual stream
        return next((product for product in products if product is not None), None)

    return search(value)


def _input_of_projection(flow: Flow, product: Value, read: Value) -> str | None:
    """Returns the path of the input of a projection, or of its module; `None` if it cannot be patched."""
    node = product.node
    frame = node.frame if isinstance(node, CallNode) else flow.frame_of[node]
    given = {place.value: place.path for place in flow.inputs(frame)}
    for value in walk([read], lambda value: moving if len(moving := flow.moving(value.node)) == 1 else ()):
        if value in given:
            return given[value]
    return flow.boundary_path(read, frame) if is_patchable(read.node) else None


Shape: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True)
class HeadLayout:
    """Where heads are in values, by path: their dimension, and how many entries of it belong to one head."""

    dims: Mapping[str, int]
    sizes: Mapping[str, int]

    def part(self, path: str, head: int) -> slice:
        """Returns the entries of a head in dimension `dims[path]`."""
        size = self.sizes[path]
        return slice(size * head, size * (head + 1))


_HEADED = {"head", "query", "key"}
"""The axes of components that values inside of attention have."""


def head_layout(
    pg: PatchableGraph,
    shapes: Mapping[str, Shape],
    count: Any,
    rows: int | None,
    sequences: Mapping[str, int] = MappingProxyType({}),
) -> HeadLayout:
    """Returns the positions of `count` heads in values.

    Heads have the dimension that a component at the path says. Elsewhere they are equal parts of the last dimension, or
    have a dimension of their own: in a value with at least four dimensions, one of size `count` that is not the first,
    the last or the sequence, and does not follow the sizes of inputs, as far as that is known.

    The shapes of values are given by path, and their sequence dimensions if the user chose positions; `rows` is the
    batch size, if known.
    """
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ExperimentError(f"heads must be the number of heads, a positive integer, not {count!r}")
    count = int(count)
    dims = {}
    places = targets(pg, shapes)
    axes = {path: axes_of(pg.nodes.root, target) for path, target in places.items()}
    for path, shape in shapes.items():
        known = [axes[path][dim : dim + 1] for dim in places[path].kept_dims]
        if ("head",) in known and shape[known.index(("head",))] == count:
            dims[path] = known.index(("head",))
            continue
        dims[path] = _dim(pg.nodes.root, path, places[path], shape, count, sequences.get(path))
        _check_rows(path, shape, count, rows)
    _check_counts(pg, places, shapes, count)
    _check_heads_are_separate(pg, places)
    for path, names in axes.items():
        if count > 1 and names and not _HEADED.intersection(names):
            raise ExperimentError(f"{path!r} is not a value of attention: it has no heads ({', '.join(names)})")
    return HeadLayout(dims, {path: shapes[path][dim] // count for path, dim in dims.items()})


def _dim(root: Frame, path: str, target: Target, shape: Shape, count: int, sequence: int | None) -> int:
    kept, whole, known = target.kept_dims, target.whole, dimensions_of(root)
    if sequence is None:
        with suppress(ValueError):
            sequence = kept.index(sequence_dim(root, target)[0])
    own = [dim for dim in range(1, len(shape) - 1) if shape[dim] == count and dim != sequence] if len(shape) > 3 else []
    if own and isinstance(whole, TensorSpec) and known.is_known(whole):
        profiles = known.profiles(whole)
        own = [dim for dim in own if not known.follows_inputs(profiles[kept[dim]])]
    if len(own) > 1:
        raise ExperimentError(
            f"{path!r} has shape {shape}: the {count} heads could be in any of the dimensions "
            f"{', '.join(map(str, own))}; give inputs of another length"
        )
    if own:
        return own[0]
    if not shape or shape[-1] % count:
        raise ExperimentError(f"{path!r} has shape {shape}: its last dimension cannot be split into {count} heads")
    if sequence == len(shape) - 1:
        raise ExperimentError(f"{path!r} has shape {shape}: its last dimension is the sequence, and has no heads")
    return len(shape) - 1


def _check_rows(path: str, shape: Shape, count: int, rows: int | None) -> None:
    """Rejects values whose first dimension combines the batch and the heads."""
    if count > 1 and rows is not None and len(shape) == 3 and shape[0] == rows * count and shape[1] != rows:
        raise ExperimentError(
            f"{path!r} has shape {shape}: its first dimension combines {rows} rows with {count} heads; give a path "
            "with the heads in the last dimension, such as the input of the output projection"
        )


def _check_counts(pg: PatchableGraph, places: Mapping[str, Target], shapes: Mapping[str, Shape], count: int) -> None:
    """Rejects other numbers of heads than that of the attention which a value belongs to, where that is known."""
    for path, target in places.items():
        known = _heads_around(pg, target, shapes[path])
        if known and count not in (1, *known):  # with one, values are whole
            listed = " or ".join(f"{number} ({name!r})" for number, name in known.items())
            raise ExperimentError(f"{path!r}: heads={count}, but this attention has {listed}")


def _heads_around(pg: PatchableGraph, target: Target, shape: Shape) -> dict[int, str]:
    """Returns the numbers of heads that a value may have, and components that have them; empty if none is known."""
    components = pg.components
    found: dict[int, str] = {}
    own = target.frame.path
    for name in components:
        one = components[name]
        parts = parse_name(name).words
        if "head" not in one.axes or parts[-1] not in ("z", "k"):
            continue
        place = parse_path(one.path).names[:-1]
        heads, size = one.shape[one.axes.index("head")], one.shape[-1]
        if place and own[: len(place)] == place and (heads in shape[1:-1] or shape[-1:] == (heads * size,)):
            found[heads] = name
    return found


def _check_heads_are_separate(pg: PatchableGraph, places: Mapping[str, Target]) -> None:
    """Rejects values in which heads are mixed."""
    flow = pg.components.evidence.trails.flow
    repairs = {path: mixing_of(flow, target) for path, target in places.items()}
    if problems := [f"{path!r}: {repair}" for path, repair in repairs.items() if repair is not None]:
        raise ExperimentError(
            "heads= needs values with separate heads; after the output projection of an attention, each number depends "
            "on all heads:\n  " + "\n  ".join(problems)
        )


class ValueParts:
    """The parts of values that the cells of a sweep are about: a head of a value, a position, both, or all of it.

    Without a number of heads, all heads are one part; without positions, all positions are.
    `rows` is the batch size, if known; `sequences` has the sequence dimension by path, if there are positions.

    Attributes:
        axes: The axes of the sweep: `path`, and `head` and `position` for parts of values.
        has_rows: Whether each row of the batch has positions of its own.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        values: Mapping[str, Tensor],
        rows: int | None,
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
            self._heads = head_layout(pg, shapes, heads, rows, sequences)
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
