"""The nodes that an attribution scores, and the positions in their values."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.records import HELD_KINDS, Frame, Node, refs_in
from graphpatch_notebook.checks.dimensions import Profile, dimensions_of, shape_problem
from graphpatch_notebook.components.names import MEMBERS
from graphpatch_notebook.errors import ExperimentError, UnknownPathError
from graphpatch_notebook.execution import (
    Entry,
    GenerationStep,
    GenerationSteps,
    Restriction,
    StepCount,
    row_dimension,
    sequence_dim,
    takes_tokens,
)
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
from graphpatch_notebook.patches.kinds import ProbePatch
from graphpatch_notebook.patches.selections import selection
from graphpatch_notebook.sharded import sharding_of
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
        if value.layout is not torch.strided:
            return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
        if not has_storage(value):
            return "inside torch.func or vmap, where one tensor represents several values"
        if value.shape != self.spec.shape:
            problem = shape_problem(self.frame, self.spec, value.shape)
            if problem is not None:
                return f"its name may mean another value for these inputs: {problem}"
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


def has_storage(value: Tensor) -> bool:
    """Whether a tensor has memory: wrappers of `torch.func` do not."""
    try:
        value.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


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


_ALL = selection(slice(None), "positions")


class PositionAxis:
    """The chosen positions of a run, and where they are in the values of nodes.

    `position_dim` is the sequence dimension, as for `attribute`.

    Attributes:
        dims: The sequence dimension of each path.
        problems: Why the positions of a path are unknown, or not computed.
        cached: The positions that some values lack, since they are in a given key/value cache.

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
        self._root = pg.nodes.root
        rows: Any = positions if are_of_rows(positions) else None
        self.cached: set[int] = set()
        targets = {node.path: node.target for node in selected.nodes if node.is_wanted}
        targets |= {target.path: target for target in selected.targets.values() if target.path in targets}
        is_of_input = not (selected.targets or position_dim is None or isinstance(position_dim, Mapping))
        of_input = self._sequence_of_input(position_dim) if is_of_input else None
        given = {} if is_of_input else given_dims(pg, selected.targets or targets, position_dim)

        def place(_: str, target: Target) -> Restriction:
            dim, is_encoder = sequence_dim(self._root, target, given.get(target.text), of_input)
            row = None if rows is None else row_dimension(self._root, target, dim)
            return Restriction(None, _ALL, dim, is_encoder, row)

        self._places, self.problems = found_or_problems(targets, place)
        if selected.targets or not self._places:
            check_problems(self.problems)
        self._columns: tuple[tuple[int, ...], ...] = ()
        self.dims = {path: place.dim for path, place in self._places.items()}
        self._step = self._step_of(inputs, targets)
        if rows is None:
            self.positions = self._chosen(positions)
        else:
            if inputs.rows != len(rows):
                raise ExperimentError(f"positions has {len(rows)} rows, but the batch has {inputs.rows}")
            if len({place.is_encoder for place in self._places.values()}) > 1:
                raise ExperimentError(
                    "positions of each row are those of one sequence: give paths= of the encoder only"
                )
            if self._step.past:
                raise ExperimentError("positions of each row are not known after a cache; give the whole sequence")
            self._columns = tuple(zip(*rows_of(rows, self._step.length or 0), strict=True))
            self.positions = list(range(len(self._columns)))

    def of_rows(self, path: str) -> dict[str, Any]:
        """Returns the fields of `KeptDims` for positions that differ by row."""
        return {"row": self._places[path].row_dim, "columns": self._columns} if self._columns else {}

    def row(self, path: str, scores: Scores) -> Scores:
        """Returns the scores of a path at `positions`, or NaN; adds to `problems`."""
        row, place, step = np.full(len(self.positions), np.nan), self._places.get(path), self._step
        if place is None:
            return row
        if self._columns:
            return scores if scores.ndim else np.zeros(len(row))
        if place.is_encoder:
            lengths = {step.encoder_length: 0}
        else:
            lengths = {(step.past or 0) + (step.length or 0): 0, step.length: step.past or 0}
        if scores.ndim == 0:  # equal in both runs
            scores = np.zeros((step.encoder_length if place.is_encoder else step.length) or 0)
        if len(scores) not in lengths:
            self.problems[path] = f"the positions of its {len(scores)} entries are unknown"
            return row
        first = lengths[len(scores)]
        cached = {position for position in self.positions if position < first}
        if len(cached) == len(self.positions):
            self.problems[path] = "these positions are in the given key/value cache, and not computed in the runs"
            return row
        self.cached |= cached
        there = np.asarray(self.positions) - first
        is_there = (there >= 0) & (there < len(scores))
        row[is_there] = scores[there[is_there]]
        return row

    # -- sequences -----------------------------------------------------------------------------------------------------

    def _sequence_of_input(self, dim: Any) -> Profile:
        """Returns the dimension `dim` of the first input that has it, of a model that does not take tokens."""
        if type(dim) is not int:
            raise ExperimentError(f"position_dim must be an int, not {dim!r}")
        if takes_tokens(self._root):
            raise ExperimentError(f"position_dim={dim} is not that of all values: give paths=, or a dict by path")
        for node in self._root.inputs():
            if isinstance(node.spec, TensorSpec) and -len(node.spec.shape) <= dim < len(node.spec.shape):
                return dimensions_of(self._root).profiles(node.spec)[dim]
        raise ExperimentError(f"position_dim={dim} is out of range for all inputs of the model")

    def _length(self, target: Target, inputs: Inputs) -> int:
        """Returns how long the sequence of a value is in a run: as long as a dimension of an input, or always the same.

        The model does not take tokens.
        """
        known = dimensions_of(self._root)
        assert isinstance(target.whole, TensorSpec)
        profile = known.profiles(target.whole)[self._places[target.path].dim]
        for node in self._root.inputs():
            value = given_input(self._root.parameters, node.target, inputs.args, inputs.kwargs)
            if isinstance(value, Tensor) and isinstance(node.spec, TensorSpec):
                for dim in known.dims_like(node.spec, profile):
                    return value.shape[dim]
        if known.follows_inputs(profile):
            raise ExperimentError(f"the positions of {target.text!r} are not known: no input has that dimension")
        return profile[0]

    def _step_of(self, inputs: Inputs, targets: Mapping[str, Target]) -> GenerationStep:
        """Returns the lengths of the sequences and of the cache in a run."""
        if not takes_tokens(self._root):
            lengths = {self._length(targets[path], inputs): path for path in self._places}
            if len(lengths) > 1:
                (one, first), (other, second), *_ = lengths.items()
                raise ExperimentError(
                    f"{second!r} has {other} positions, but {first!r} has {one}; give paths of one sequence at a time"
                )
            return GenerationStep(0, 0, *lengths)
        asking = Entry(
            Target("", self._root, self._root.output_node, (), (), self._root.output_node.spec),
            (ProbePatch(),),
            Restriction(None, _ALL),
        )
        steps = GenerationSteps(self._root, [asking], StepCount(), True)
        steps.begin(inputs.args, inputs.kwargs)
        return steps.current

    def _chosen(self, given: Positions | RowPositions) -> list[int]:
        """Returns the given positions, counted from the start."""
        total, of_encoder = (self._step.past or 0) + (self._step.length or 0), self._step.encoder_length or 0
        lengths = {of_encoder if place.is_encoder else total for place in self._places.values()}
        if len(lengths) > 1 and counts_from_end(given):
            raise ExperimentError(
                f"positions={given!r} counts from the end, but the encoder has {of_encoder} positions and the decoder "
                f"{total}: count from the start, or give paths= of one of the two"
            )
        longest = max(lengths, default=max(total, of_encoder))
        if not longest:
            raise ExperimentError("the sequence has no positions: give inputs with at least one token")
        return counted_positions(given, longest)
