"""The nodes that an attribution scores, and the positions in their values."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.records import HELD_KINDS, Frame, Node, refs_in
from graphpatch_notebook.checks.dimensions import Profile, dimensions_of
from graphpatch_notebook.checks.sharding import sharding_of
from graphpatch_notebook.components.flow import Flow
from graphpatch_notebook.components.names import MEMBERS
from graphpatch_notebook.errors import ExperimentError, UnknownPathError
from graphpatch_notebook.execution import row_dimension, sequence_dim, takes_tokens, token_inputs
from graphpatch_notebook.experiments.attribution.secants import has_memory
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.methods.positions import (
    PositionDim,
    Positions,
    RowPositions,
    are_of_rows,
    check_problems,
    counted_positions,
    counts_from_end,
    found_or_problems,
    given_dims,
    rows_of,
)
from graphpatch_notebook.inspection.node_map import NodeMap, NodeRows
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, resolve_all
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.values import TensorSpec, leaves

Scores = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(eq=False)
class ScoredNode:
    """A floating-point value in the captured graph.

    Attributes:
        path: The node path.
        node: The node.
        frame: The module call that the node belongs to.
        spec: The captured shape, dtype and device of the value.
        is_wanted: Whether it gets a score.
        is_compared: Whether its values are compared between the runs: it gets a score, or the runs may begin to differ
            there. Other values are only watched, to find tensors with several names.
    """

    path: str
    node: Node
    frame: Frame
    spec: TensorSpec
    is_wanted: bool = True
    is_compared: bool = True

    @property
    def target(self) -> Target:
        """What its path refers to."""
        return Target(self.path, self.frame, self.node, (), (), self.spec)

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

        It may not for the state of a module, for a view through which the model fills in another tensor, and for a
        container that a module is given, since the module may write into that.
        """
        if self.is_state or self.node.is_view_filled_later:
            return False
        return not (self.is_in_container and self.node.kind == "input" and self.frame.parent is not None)

    def problem(self, value: Any) -> str | None:
        """Returns why a value of a run cannot have a score, or `None`."""
        if not isinstance(value, Tensor):
            return f"a tensor when it was captured, of type {type(value).__name__} now"
        if not value.is_floating_point():
            return _not_floating(value.dtype)
        if value.element_size() < 2:
            return f"of dtype {str(value.dtype).removeprefix('torch.')}, which has no arithmetic"
        if not has_memory(value):
            return "inside torch.func or vmap, where one tensor represents several values"
        return None


@dataclass(frozen=True)
class ScoredPlace:
    """The path of a value, and the head that it is of the value there.

    Attributes:
        path: The path.
        dim: The dimension of the heads (or experts); `None` for the whole value.
        number: The head.
        count: The number of heads.
    """

    path: str
    dim: int | None = None
    number: int = 0
    count: int = 1


@dataclass(frozen=True)
class Selected:
    """The nodes of an attribution.

    Attributes:
        targets: The value of each name in the result: of paths, and of names of components.
        places: Where these values are.
        nodes: All nodes that hold floating-point tensors, in order of execution.
        skipped: Why a path cannot have a score.
    """

    targets: dict[str, Target]
    places: dict[str, ScoredPlace]
    nodes: list[ScoredNode]
    skipped: dict[str, str]


def selected_nodes(nodes: NodeMap, paths: Iterable[Any] | None) -> Selected:
    """Returns the nodes for scores of `paths`, or of all floating-point values.

    Raises:
        UnknownPathError: A path does not exist, or is not a single value.
        ExperimentError: There are no paths.
    """
    named = {} if paths is None else {target.text: target for target in _targets(nodes, paths)}
    places = {name: _place_of(target) for name, target in named.items()}
    if paths is not None and not places:
        raise ExperimentError("paths is empty: give at least one path, or leave it out for all nodes")
    wanted = None if paths is None else list(dict.fromkeys(place.path for place in places.values()))
    of_interest = set(wanted or ())
    found: list[ScoredNode] = []
    skipped: dict[str, str] = {}
    sharding = sharding_of(nodes.root)
    refused = {} if sharding is None else sharding.refusals(nodes)
    rows = NodeRows.of(nodes.root, with_sizes=wanted is not None)
    for path, node, frame, spec in zip(rows.paths, rows.nodes, rows.frames, rows.specs, strict=True):
        is_hidden = node.is_size or node.is_inner  # to watch an inner node would open the fused call
        is_wanted = path in of_interest if wanted is not None else not is_hidden
        if not is_wanted and is_hidden:
            continue
        if path in refused:
            if is_wanted:
                skipped[path] = f"sharded over processes, and {refused[path]}"
        elif isinstance(spec, TensorSpec) and spec.dtype.is_floating_point:
            found.append(ScoredNode(path, node, frame, spec, is_wanted, is_wanted or _is_source(node, frame)))
        elif path in of_interest or (isinstance(spec, TensorSpec) and spec.dtype.is_complex and is_wanted):
            skipped[path] = _not_floating(spec.dtype) if isinstance(spec, TensorSpec) else f"not a tensor, but {spec}"
    if wanted is None:
        places = {node.path: ScoredPlace(node.path) for node in found if node.is_wanted}
    return Selected(named, places, found, skipped)


def flow_of(root: Frame) -> Flow:
    """Returns the flow of values through a capture; each capture is searched once."""
    findings = root.capture.findings
    if Flow not in findings:
        findings[Flow] = Flow(root)
    return cast("Flow", findings[Flow])


def _targets(nodes: NodeMap, paths: Iterable[Any]) -> list[Target]:
    """Returns the values that paths and names of components mean."""
    if isinstance(paths, (str, bytes)):
        paths = [paths]
    found, unknown = [], []
    for path in map(str, paths):
        try:
            targets = resolve_all(nodes.root, path)
        except Unresolvable as problem:
            unknown.append(problem.message)
            continue
        found += targets
    if unknown:
        raise UnknownPathError("; ".join(unknown))
    return found


def _place_of(target: Target) -> ScoredPlace:
    taken = [dim for dim, part in enumerate(target.index) if part != slice(None)]
    if target.component is None or not taken:
        return ScoredPlace(target.path)
    dim = taken[0]
    number = target.index[dim]
    if len(taken) > 1 or not isinstance(number, int) or target.component.axes[dim] not in MEMBERS.values():
        raise ExperimentError(
            f"{target.text!r}: there are scores of whole values, of heads and of positions; give a name without a "
            "slice (layers[*].attn.heads[*].z), and positions="
        )
    count = target.component.shape[dim]
    return ScoredPlace(target.path, dim, number % count, count)


def _not_floating(dtype: torch.dtype) -> str:
    return f"of dtype {str(dtype).removeprefix('torch.')}: scores are of floating-point values"


def _is_source(node: Node, frame: Frame) -> bool:
    """Whether a value is computed from no other floating-point values than parameters and buffers."""
    if node.kind == "input":
        return frame.parent is None
    if node.kind == "output":
        return frame.opaque_reason is not None
    if node.kind != "op":
        return False
    made = node.whole
    arguments = (*refs_in(made.args), *refs_in(made.kwargs))
    return frame.has_own_graph or not any(_is_computed_float(ref.node) for ref in arguments)


def _is_computed_float(node: Node) -> bool:
    if node.kind in HELD_KINDS:
        return False
    return any(isinstance(leaf, TensorSpec) and leaf.dtype.is_floating_point for _, leaf in leaves(node.spec))


class PositionAxis:
    """The chosen positions of a run, and where they are in the values of nodes.

    `position_dim` is the sequence dimension, as for `attribute`.

    Attributes:
        positions: The chosen positions, counted from the start; numbers of columns, if each row has its own.
        columns: For each column, the position in each row; empty if positions are the same for all rows.
        dims: The dimensions of the sequence and (if each row has its own positions) of the batch, of each path.
        problems: Why the positions of a path are unknown.

    Raises:
        ExperimentError: Positions are out of range, or unknown: of a value that is named, or of all values.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        selected: Selected,
        inputs: Inputs,
        positions: Positions | RowPositions,
        position_dim: PositionDim,
    ) -> None:
        root = self._root = pg.nodes.root
        has_rows = are_of_rows(positions)
        targets = {node.path: node.target for node in selected.nodes if node.is_wanted}
        targets |= {target.path: target for target in selected.targets.values() if target.path in targets}
        is_of_input = not (selected.targets or position_dim is None or isinstance(position_dim, Mapping))
        of_input = self._sequence_of_input(position_dim) if is_of_input else None
        given = {} if is_of_input else given_dims(pg, selected.targets or targets, position_dim)

        def place(_: str, target: Target) -> tuple[int, bool, int | None]:
            dim, is_encoder = sequence_dim(root, target, given.get(target.text), of_input)
            return dim, is_encoder, row_dimension(root, target, dim) if has_rows else None

        found, self.problems = found_or_problems(targets, place)
        if selected.targets or not found:
            check_problems(self.problems)
        self.dims = {path: (dim, row) for path, (dim, _, row) in found.items()}
        self._lengths = {path: self._length(targets[path], dim, e, inputs) for path, (dim, e, _) in found.items()}
        lengths = set(self._lengths.values())
        if len(lengths) > 1 and (has_rows or counts_from_end(positions)):
            raise ExperimentError(
                f"positions={positions!r} are of one sequence, but values have {sorted(lengths)} positions: count "
                "from the start, or give paths= of one sequence"
            )
        self.columns: tuple[tuple[int, ...], ...] = ()
        if has_rows:
            if inputs.rows != len(cast("Any", positions)):
                raise ExperimentError(f"positions={positions!r} must have {inputs.rows} rows")
            self.columns = tuple(zip(*rows_of(positions, max(lengths)), strict=True))
        self.positions = list(range(len(self.columns))) if has_rows else counted_positions(positions, max(lengths))

    def row(self, path: str, scores: Scores) -> Scores:
        """Returns the scores of a path at `positions`, or NaN; adds to `problems`."""
        length = len(self.columns) or self._lengths.get(path)
        if length is None:
            return np.full(len(self.positions), np.nan)
        if scores.ndim == 0:  # equal in both runs
            scores = np.zeros(length)
        if len(scores) != length:
            self.problems[path] = f"the positions of its {len(scores)} entries are unknown"
            return np.full(len(self.positions), np.nan)
        return np.array([scores[at] if at < length else np.nan for at in self.positions])

    # -- sequences -----------------------------------------------------------------------------------------------------

    def _sequence_of_input(self, dim: Any) -> Profile:
        """Returns the dimension `dim` of the first input that has it, of a model that does not take tokens."""
        if type(dim) is not int or takes_tokens(self._root):
            raise ExperimentError(f"position_dim={dim!r} is not that of all values: give paths=, or a dict by path")
        for node in self._root.inputs():
            if isinstance(node.spec, TensorSpec) and -len(node.spec.shape) <= dim < len(node.spec.shape):
                return dimensions_of(self._root).profiles(node.spec)[dim]
        raise ExperimentError(f"position_dim={dim} is out of range for all inputs of the model")

    def _length(self, target: Target, dim: int, is_encoder: bool, inputs: Inputs) -> int:
        """Returns how long the sequence of a value is in a run: as long as a dimension of an input, or always so."""
        given = {
            node.target: given_input(self._root.parameters, node.target, inputs.args, inputs.kwargs)
            for node in self._root.inputs()
        }
        caches = (each for each in (*inputs.args, *inputs.kwargs.values()) if hasattr(each, "get_seq_length"))
        if any(cache.get_seq_length() for cache in caches):
            raise ExperimentError("positions= are not known with a cache; give the whole sequence")
        if takes_tokens(self._root):
            tokens = [given.get(name) for name in token_inputs(self._root, is_encoder=is_encoder)]
            return next(value.shape[1] for value in tokens if isinstance(value, Tensor))
        known = dimensions_of(self._root)
        profile = known.profiles(cast("TensorSpec", target.whole))[dim]
        for node in self._root.inputs():
            if isinstance(given[node.target], Tensor) and isinstance(node.spec, TensorSpec):
                for own in known.dims_like(node.spec, profile):
                    return int(given[node.target].shape[own])
        if known.follows_inputs(profile):
            raise ExperimentError(f"the positions of {target.text!r} are not known: no input has that dimension")
        return profile[0]
