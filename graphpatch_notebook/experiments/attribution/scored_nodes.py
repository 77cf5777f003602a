"""The nodes that an attribution scores, and the positions in their values."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.capture.records import HELD_KINDS, Frame, Node, refs_in
from graphpatch_notebook.checks.dimensions import Profile, dimensions_of, shape_problem
from graphpatch_notebook.components import find
from graphpatch_notebook.components.names import MEMBERS
from graphpatch_notebook.errors import ExperimentError, UnknownPathError
from graphpatch_notebook.execution import (
    Entry,
    GenerationStep,
    GenerationSteps,
    Restriction,
    StepCount,
    restriction_of,
    sequence_dims,
    token_inputs,
)
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.methods.positions import (
    Positions,
    RowPositions,
    are_of_rows,
    counted_positions,
    counts_from_end,
    row_dim,
    rows_of,
    whole_numbers,
)
from graphpatch_notebook.inspection.node_map import NodeMap, NodeRows
from graphpatch_notebook.inspection.resolution import Target, Unresolvable, resolve_all
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
        places: Where the value of each name in the result is: of paths, and of names of components.
        nodes: All nodes that hold floating-point tensors, in order of execution.
        skipped: Why a path cannot have a score.
    """

    places: dict[str, ScoredPlace]
    nodes: list[ScoredNode]
    skipped: dict[str, str]


def selected_nodes(nodes: NodeMap, paths: Iterable[Any] | None) -> Selected:
    """Returns the nodes for scores of `paths`, or of all floating-point values.

    Raises:
        UnknownPathError: A path does not exist, or is not a single value.
        ExperimentError: There are no paths.
    """
    places = {} if paths is None else dict(_places(nodes, paths))
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
    return Selected(places, found, skipped)


def has_storage(value: Tensor) -> bool:
    """Whether a tensor has memory: wrappers of `torch.func` do not."""
    try:
        value.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _places(nodes: NodeMap, paths: Iterable[Any]) -> Iterator[tuple[str, ScoredPlace]]:
    """Yields the names of values, and where these are."""
    if isinstance(paths, (str, bytes)):
        paths = [paths]
    unknown = []
    for path in map(str, paths):
        try:
            targets = resolve_all(nodes.root, path)
        except Unresolvable as problem:
            unknown.append(problem.message)
            continue
        for target in targets:
            yield target.text, _place_of(target)
    if unknown:
        raise UnknownPathError("; ".join(unknown))


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

    `position_dim` is the sequence dimension, as for `attribute`. For models that do not take tokens, it is also that of
    their first input.

    Attributes:
        dims: The sequence dimension of each path.
        problems: Why the positions of a path are unknown, or not computed.
        cached: The positions that some values lack, since they are in a given key/value cache.
    """

    def __init__(
        self,
        root: Frame,
        nodes: Iterable[ScoredNode],
        inputs: Inputs,
        positions: Positions | RowPositions,
        position_dim: int | Mapping[str, int] | None,
    ) -> None:
        self._root = root
        self._given = position_dim
        rows = rows_of(positions) if are_of_rows(positions) else None
        if positions is not None and positions is not True and rows is None:
            whole_numbers(positions)  # check this first
        self.problems: dict[str, str] = {}
        self.cached: set[int] = set()
        self._places: dict[str, Restriction] = {}
        self._by_tokens = bool(token_inputs(root))
        for node in nodes:
            place = self._place_or_problem(node)
            if place is not None:
                self._places[node.path] = place
        self._columns: tuple[tuple[int, ...], ...] = ()
        self._row_dims: dict[str, int] = {}
        for node in nodes if rows is not None else ():
            self._find_rows(node)
        self.dims = {path: place.dim for path, place in self._places.items()}
        self._step = self._step_of(inputs)
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
            self._columns = tuple(zip(*map(self._chosen, rows), strict=True))
            self.positions = list(range(len(self._columns)))

    def of_rows(self, path: str) -> dict[str, Any]:
        """Returns the fields of `KeptDims` for positions that differ by row."""
        return {"row": self._row_dims[path], "columns": self._columns} if self._columns else {}

    def _find_rows(self, node: ScoredNode) -> None:
        """Notes which dimension of a value has the rows, or why that is not known."""
        place = self._places.get(node.path)
        if place is None:
            return
        found = row_dim(self._root, Target(node.path, node.frame, node.node, (), (), node.spec), place.dim)
        if isinstance(found, int):
            self._row_dims[node.path] = found
        else:
            del self._places[node.path]
            self.problems[node.path] = re.sub("; (give|choose|use) .*", "", found)

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

    # -- dimensions ----------------------------------------------------------------------------------------------------

    def _place_or_problem(self, node: ScoredNode) -> Restriction | None:
        try:
            return self._place(node)
        except ExperimentError:
            raise
        except ValueError as problem:
            # Drop the repair, which is for patches with positions.
            self.problems[node.path] = re.sub("; (drop|choose|use) .*", "", str(problem))
            return None

    def _place(self, node: ScoredNode) -> Restriction:
        target = Target(node.path, node.frame, node.node, (), (), node.spec)
        given = self._given.get(node.path) if isinstance(self._given, Mapping) else self._given
        if not self._by_tokens:
            return self._place_without_tokens(node, given)
        try:
            found = restriction_of(self._root, target, ProbePatch(positions=slice(None)))
        except ValueError:
            if given is None or not -len(node.spec.shape) <= given < len(node.spec.shape):
                raise
            found = restriction_of(self._root, target, ProbePatch(positions=slice(None), position_dim=given))
        assert found is not None
        return found

    def _place_without_tokens(self, node: ScoredNode, given: int | None) -> Restriction:
        shape = tuple(node.spec.shape)
        _, sequence = self._sequence_input()
        if node.is_state:
            raise ValueError(f"a {node.node.kind} has no positions")
        dims = dimensions_of(self._root).dims_like(node.spec, sequence)
        along = sequence_dims(find(self._root).axes_at(node.path)) if len(dims) > 1 else []
        dims = [dim for dim in dims if dim in along] or dims
        if given is not None and -len(shape) <= given < len(shape) and given % len(shape) in dims:
            dims = [given % len(shape)]
        if len(dims) != 1:
            which = "several dimensions" if dims else "no dimension"
            raise ValueError(f"{which} of its shape {shape} can be the example's sequence of {sequence[0]} positions")
        return Restriction(None, _ALL, dims[0])

    def _sequence_input(self) -> tuple[str, Profile]:
        """Returns the input that has the dimension `position_dim`, and a description of that dimension."""
        dim = self._given
        if not isinstance(dim, int):
            raise ExperimentError(
                "positions are known for models that take input_ids or inputs_embeds; for others, give the sequence "
                "dimension of the first input: position_dim=1"
            )
        for node in self._root.inputs():
            if isinstance(node.spec, TensorSpec) and -len(node.spec.shape) <= dim < len(node.spec.shape):
                return node.target, dimensions_of(self._root).profiles(node.spec)[dim]
        raise ExperimentError(f"position_dim={dim}: no input of the model has such a dimension")

    # -- positions -----------------------------------------------------------------------------------------------------

    def _step_of(self, inputs: Inputs) -> GenerationStep:
        """Returns the lengths of the sequences and of the cache in a run."""
        if not self._by_tokens:
            name, _ = self._sequence_input()
            value = given_input(self._root.parameters, name, inputs.args, inputs.kwargs)
            assert isinstance(self._given, int)
            return GenerationStep(0, 0, value.shape[self._given] if isinstance(value, Tensor) else 0)
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
        return counted_positions(given, longest, f"the sequence has {longest} positions")
