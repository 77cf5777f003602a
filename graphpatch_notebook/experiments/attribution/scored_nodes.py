"""The nodes that an attribution scores, and the positions in their values."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.capture.records import HELD_KINDS, CallNode, Frame, Node, once_a_capture
from graphpatch_notebook.components import operations
from graphpatch_notebook.components.flow import Flow, Value
from graphpatch_notebook.components.names import MEMBERS
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.attribution.secants import has_memory
from graphpatch_notebook.experiments.engine.inputs import (
    Inputs,
    PositionDim,
    are_of_rows,
    check_ends,
    check_problems,
    counted_positions,
    counts_from_end,
    found_or_problems,
    given_dims,
    input_tensors,
    targets,
)
from graphpatch_notebook.inspection.resolution import NodeMap, NodeRows, Target, resolve
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patching import row_dimension, sequence_dim, takes_tokens
from graphpatch_notebook.patching.model_state import sharding_of
from graphpatch_notebook.values import TensorSpec

if TYPE_CHECKING:
    from graphpatch_notebook.components.components import Layout

Scores = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(eq=False)
class ScoredNode:
    """A floating-point value in the captured graph.

    Attributes:
        path: The node path.
        node: The node.
        frame: The module call that the node belongs to.
        spec: The captured shape, dtype and device of the value.
        flow: The flow of values through the capture.
        is_wanted: Whether it gets a score.
        is_compared: Whether its values are compared between the runs: it gets a score, or the runs may begin to differ
            there. Other values are only watched, to find tensors with several names.
    """

    path: str
    node: Node
    frame: Frame
    spec: TensorSpec
    flow: Flow
    is_wanted: bool = True
    is_compared: bool = True

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter, which is the same in all runs."""
        return self.node.kind == "parameter"

    @property
    def is_state(self) -> bool:
        """Whether it is a parameter, a buffer or a tensor attribute, which is one tensor in all runs."""
        return self.node.kind in HELD_KINDS

    @property
    def is_in_container(self) -> bool:
        """Whether this is an item of the node's value, which is a container."""
        return self.spec is not self.node.spec

    @functools.cached_property
    def can_be_cut(self) -> bool:
        """Whether another tensor may replace the value in a run.

        It may not for the state of a module, for a view through which the model fills in another tensor, for a
        container that a module is given, since the module may write into that, and for the inputs of edited graphs.
        """
        if self.is_state or self.node.is_view_filled_later:
            return False
        is_edited = self.frame.has_own_graph and not self.frame.capture.is_program
        return self.node.kind != "input" or not (is_edited or (self.is_in_container and self.frame.parent is not None))

    @functools.cached_property
    def computed(self) -> Value | None:
        """The value at the operation that computes it; `None` if it is not a single value."""
        frame, node, flow = self.frame, self.node, self.flow
        if node.kind == "output" and frame.opaque_reason is not None and frame.call is not None:
            node = frame.call
        return flow.resolve(node, resolve(flow.root, self.path).dig if self.is_in_container else ())

    @property
    def operation(self) -> Node:
        """The operation that computes the value."""
        return self.node if self.computed is None else self.computed.node

    def problem(self, value: Any) -> str | None:
        """Returns why a value of a run cannot have a score, or `None`."""
        if not isinstance(value, Tensor):
            return f"a tensor when it was captured, of type {type(value).__name__} now"
        if not value.is_floating_point() or value.element_size() < 2:
            return _not_floating(value.dtype)
        return None if has_memory(value) else "sparse, or one tensor for several values (torch.func, vmap)"


@dataclass(frozen=True)
class Selected:
    """The nodes of an attribution.

    Attributes:
        targets: By name in the result, the value of each path, or name of a component, that was asked for; empty for
            all values.
        heads: Which dimension of values at paths of heads the heads are.
        nodes: All nodes that hold floating-point tensors, in order of execution.
        skipped: Why a path cannot have a score.
        flow: The flow of values through the capture.
        idle: Watched runs of the nodes that no attribution uses now, to be used again.
    """

    targets: dict[str, Target]
    heads: dict[str, KeptDims]
    nodes: list[ScoredNode]
    skipped: dict[str, str]
    flow: Flow
    idle: list[Any] = field(default_factory=list)

    @functools.cached_property
    def places(self) -> dict[str, tuple[str, int | None]]:
        """By name in the result, the path, and the number of the head that it is of the value there; `None` for all."""
        if not self.targets:
            return {node.path: (node.path, None) for node in self.nodes if node.is_wanted}
        heads = {name: self.heads.get(each.path) if each.index else None for name, each in self.targets.items()}
        return {
            name: (each.path, None if heads[name] is None else next(part for part in each.index if part != slice(None)))
            for name, each in self.targets.items()
        }

    @functools.cached_property
    def same_values(self) -> dict[str, str]:
        """For each path whose value has other names among those with a score, the name that represents them all.

        A value keeps its identity when modules pass it on, and when it is reshaped with all its entries. It is
        represented by a module output (of the outermost module), otherwise by its first name.
        """
        groups: dict[Any, list[ScoredNode]] = {}
        for scored in self.nodes:
            value = scored.computed if scored.is_wanted else None
            while value is not None and not isinstance(value.node, CallNode) and value.node.whole.op in _SAME:
                moving = self.flow.moving(value.node)
                if len(moving) != 1 or math.prod(moving[0].shape) != math.prod(value.shape):
                    break
                value = moving[0]
            groups.setdefault(scored.path if value is None else value, []).append(scored)
        names: dict[str, str] = {}
        for group in groups.values():
            outputs = [scored.path for scored in group if scored.node.kind == "output"]
            standing = min(outputs, key=len, default=group[0].path)
            names |= {scored.path: standing for scored in group if len(group) > 1}
        return names


_CHOSEN = frozenset("gather index_select flip roll clamp clip where masked_fill nan_to_num".split())
_SAME = (operations.VIEWS | operations.SAME_VALUES) - _CHOSEN


def all_nodes(nodes: NodeMap) -> Selected:
    """Returns the nodes for scores of all floating-point values."""
    return _selected(nodes, {})


def named_nodes(pg: PatchableGraph, paths: Iterable[Any]) -> Selected:
    """Returns the nodes for scores of `paths`.

    Raises:
        UnknownPathError: A path does not exist, or is not a single value.
        ExperimentError: There are no paths.
    """
    named = targets(pg, map(str, [paths] if isinstance(paths, (str, bytes)) else paths))
    if not named:
        raise ExperimentError("paths is empty: give at least one path, or leave it out for all nodes")
    return _selected(pg.nodes, {target.text: target for target in named.values()})


def _selected(nodes: NodeMap, named: dict[str, Target]) -> Selected:
    found: list[ScoredNode] = []
    skipped: dict[str, str] = {}
    heads = {target.path: _heads_of(target) for target in named.values() if target.index}
    wanted = {target.path for target in named.values()}
    root = nodes.root
    sharding, flow = sharding_of(root), flow_of(root)
    refused = {} if sharding is None else sharding.refusals(nodes)
    rows = NodeRows(root, with_sizes=bool(named))
    for path, node, frame, spec in zip(rows.paths, rows.nodes, rows.frames, rows.specs, strict=True):
        is_hidden = node.is_size or node.is_inner  # to watch an inner node would open the fused call
        is_wanted = path in wanted if named else not is_hidden
        if is_hidden and not is_wanted:
            continue
        if path in refused and is_wanted:
            skipped[path] = f"sharded over processes, and {refused[path]}"
        elif path not in refused and isinstance(spec, TensorSpec) and spec.dtype.is_floating_point:
            is_compared = is_wanted or _is_source(flow, node, frame)
            found.append(ScoredNode(path, node, frame, spec, flow, is_wanted, is_compared))
        elif is_wanted and (named or (isinstance(spec, TensorSpec) and spec.dtype.is_complex)):
            skipped[path] = _not_floating(spec.dtype) if isinstance(spec, TensorSpec) else f"not a tensor, but {spec}"
    return Selected(named, heads, found, skipped, flow)


@once_a_capture
def flow_of(root: Frame) -> Flow:
    """Returns the flow of values through a capture; each capture is searched once."""
    return Flow(root, with_splices=True)


def _heads_of(target: Target) -> KeptDims:
    """Returns the dimension of the heads (or experts) of which a target is one."""
    taken, layout = [dim for dim, part in enumerate(target.index) if part != slice(None)], target.layout
    axes = () if target.component is None else target.component.axes
    if [axes[dim] in MEMBERS.values() and isinstance(target.index[dim], int) for dim in taken] != [True]:
        raise ExperimentError(
            f"{target.text!r}: there are scores of whole values, of heads and of positions; give a name without a "
            "slice (layers[*].attn.heads[*].z), and positions="
        )
    if layout is None or layout.merged is None:
        return KeptDims(taken[0] if layout is None else layout.dims[taken[0]])
    return KeptDims(taken[0], layout=layout)


def _not_floating(dtype: torch.dtype) -> str:
    return f"of dtype {str(dtype).removeprefix('torch.')}: scores are of floating-point values"


def _is_source(flow: Flow, node: Node, frame: Frame) -> bool:
    """Whether a value is computed from no other floating-point values than parameters and buffers."""
    if node.kind in ("input", "output"):
        return frame.parent is None if node.kind == "input" else frame.opaque_reason is not None
    return node.kind == "op" and (frame.has_own_graph or not any(value.is_float for value in flow.moving(node)))


@dataclass(frozen=True)
class KeptDims:
    """The dimensions of a value that scores are not summed over.

    `None` for those that it does not have, or that are not asked for: rows are if each has positions of its own. Where
    one dimension has the batch and the heads, they are those of the value as its `layout` shows it.
    """

    heads: int | None = None
    row: int | None = None
    position: int | None = None
    layout: Layout | None = None

    def at(self, others: KeptDims | None) -> KeptDims:
        """Returns these heads with the rows and positions of the value at the path."""
        row, position = (None, None) if others is None else (others.row, others.position)
        if self.layout is not None and position is not None:
            position = self.layout.dims.index(position)
        return replace(self, row=row, position=position)

    def summed(self, product: Tensor) -> Tensor:
        """Returns the sum of a tensor over all other dimensions: (heads, rows, positions), as far as they are kept."""
        product = product if self.layout is None else self.layout.view(product)
        dims = [dim for dim in (self.heads, self.row, self.position) if dim is not None]
        others = [dim for dim in range(product.dim()) if dim not in dims]
        sums = product.sum(others) if others else product
        return sums.permute([sorted(dims).index(dim) for dim in dims])


class PositionAxis:
    """The chosen positions of a run, and where they are in the values of nodes.

    `position_dim` is the sequence dimension, as for `attribute`.

    Attributes:
        kept: The dimensions of the sequence and (if each row has its own positions) of the batch, of each path.
        problems: Why the positions of a path are unknown.

    Raises:
        ExperimentError: Positions are out of range, or unknown: of a value that is named, or of all values.
    """

    def __init__(
        self, pg: PatchableGraph, selected: Selected, inputs: Inputs, positions: Any, position_dim: PositionDim
    ) -> None:
        root = pg.nodes.root
        self._given, self._has_rows, self._takes_tokens = positions, are_of_rows(positions), takes_tokens(root)
        caches = (each for each in (*inputs.args, *inputs.kwargs.values()) if hasattr(each, "get_seq_length"))
        if any(cache.get_seq_length() for cache in caches):
            raise ExperimentError("positions= are not known with a cache; give the whole sequence")
        if self._has_rows and inputs.rows != len(positions):
            raise ExperimentError(f"positions={positions!r} must have {inputs.rows} rows")
        if isinstance(position_dim, int) and not selected.targets:
            raise ExperimentError(f"position_dim={position_dim!r} is not that of all values: give paths=, or a dict")
        nodes = [node for node in selected.nodes if node.is_wanted]
        asked = {node.path: Target(node.path, node.frame, node.node, (), (), node.spec) for node in nodes}
        asked |= {target.path: target for target in selected.targets.values() if target.path in asked}
        given = given_dims(pg, selected.targets or asked, position_dim)

        stacks: set[bool] = set()

        def place(_: str, target: Target) -> KeptDims:
            dim, is_encoder = sequence_dim(root, target, given.get(target.text))
            stacks.add(is_encoder)
            if self._has_rows and target.layout is not None and target.layout.merged is not None:
                raise ValueError(f"its rows are in one dimension with the heads at {target.path!r}")
            return KeptDims(row=row_dimension(root, target, dim) if self._has_rows else None, position=dim)

        self.kept, self.problems = found_or_problems(asked, place)
        if selected.targets or not self.kept:
            check_problems(self.problems)
        self._sizes = {size for value in input_tensors(pg, inputs).values() for size in value.shape}
        counted_positions(positions, max(self._sizes, default=1))  # an error before anything runs
        check_ends(pg, inputs, positions, is_encoder=True in stacks)

    def chosen(self, scores: Mapping[str, Scores]) -> tuple[list[int], dict[str, Scores]]:
        """Returns the labels of the positions, and scores at these; adds to `problems`.

        The last dimension of the given scores has all positions, and the one before all rows if each has its own.
        """
        lengths = {path: scores[path].shape[-1] for path in self.kept if path in scores and scores[path].ndim}
        if self._takes_tokens:
            others = {path: length for path, length in lengths.items() if length not in self._sizes}
            self.problems |= {path: f"the positions of its {n} entries are unknown" for path, n in others.items()}
        known = {length for path, length in lengths.items() if path not in self.problems}
        if len(known) > 1 and (self._has_rows or counts_from_end(self._given)):
            raise ExperimentError(
                f"positions={self._given!r} are of one sequence, but values have {sorted(known)} positions: count "
                "from the start, or give paths= of one sequence"
            )
        longest = max(known, default=max(self._sizes, default=1))
        numbers = np.array(counted_positions(self._given, longest))
        found: dict[str, Scores] = {}
        for path in scores.keys() & self.kept.keys() - self.problems.keys():
            found[path] = each = scores[path]
            if each.ndim:  # else it is equal in both runs
                padded = np.pad(
                    each, [*[(0, 0)] * (each.ndim - 1), (0, longest - each.shape[-1])], constant_values=np.nan
                )
                every_row = np.arange(len(numbers))[:, None]
                found[path] = padded[..., every_row, numbers].sum(-2) if self._has_rows else padded[..., numbers]
        return list(range(numbers.shape[-1])) if self._has_rows else numbers.tolist(), found
