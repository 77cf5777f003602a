"""The nodes whose values an attribution looks at."""

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
from graphpatch_notebook.errors import ExperimentError, UnknownPathError
from graphpatch_notebook.execution import (
    Entry,
    GenerationStep,
    GenerationSteps,
    Restriction,
    StepCount,
    restriction_of,
    token_inputs,
)
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.methods.positions import (
    Positions,
    counted_positions,
    counts_from_end,
    whole_numbers,
)
from graphpatch_notebook.inspection.nodes import NodeMap, NodeRows
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patches.kinds import ProbePatch
from graphpatch_notebook.patches.selections import selection
from graphpatch_notebook.values import TensorSpec, ValueSpec, leaves

Scores = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(eq=False)
class ScoredNode:
    """A value that is compared between the runs.

    Attributes:
        path: Its path.
        node: The node.
        frame: The frame that the node is in.
        spec: What was recorded of the value.
        is_wanted: Whether it gets a score.
        is_compared: Whether its values are compared between the runs: it gets a score, or the runs may begin to differ
            there. Others are only looked at, to tell tensors that come up under several names.
    """

    path: str
    node: Node
    frame: Frame
    spec: TensorSpec
    is_wanted: bool = True
    is_compared: bool = True

    @property
    def is_parameter(self) -> bool:
        """Whether it is a weight: the same in all runs."""
        return self.node.kind == "parameter"

    @property
    def is_state(self) -> bool:
        """Whether it is a tensor that the model holds: its values in different runs are one tensor."""
        return self.node.kind in HELD_KINDS

    @property
    def is_in_container(self) -> bool:
        """Whether the value of the node is a container, with this value in it."""
        return self.spec is not self.node.spec

    @functools.cached_property
    def can_be_cut(self) -> bool:
        """Whether another tensor may take the place of the value in a run.

        The state of a module is left alone, and so are a view through which the model fills in another tensor, and a
        container that a module is given: it may write into it.
        """
        if self.is_state or self.node.is_view_filled_later:
            return False
        return not (self.is_in_container and self.node.kind == "input" and self.frame.parent is not None)

    def problem(self, value: Any) -> str | None:
        """Returns in words why the value that came up is none that can have a score, or `None`."""
        if not isinstance(value, Tensor):
            return f"a tensor when it was captured, of type {type(value).__name__} now"
        if not value.is_floating_point():
            return _not_floating(value.dtype)
        if value.element_size() < 2:
            return f"of dtype {str(value.dtype).removeprefix('torch.')}, which knows no arithmetic"
        if value.layout is not torch.strided:
            return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
        if not has_storage(value):
            return "inside of torch.func or vmap, where it stands for several values"
        if value.shape != self.spec.shape:
            problem = shape_problem(self.frame, self.spec, value.shape)
            if problem is not None:
                return f"its name may mean another value for these inputs: {problem}"
        return None


@dataclass(frozen=True)
class Selected:
    """What an attribution is about.

    Attributes:
        paths: The paths that the result has, in order.
        nodes: All nodes that hold floating-point tensors, in order of execution.
        skipped: Paths that can have no score, with the reason.
    """

    paths: list[str]
    nodes: list[ScoredNode]
    skipped: dict[str, str]


def selected_nodes(nodes: NodeMap, paths: Iterable[Any] | None) -> Selected:
    """Returns what to look at for scores of `paths`, or of all floating-point values.

    Raises:
        UnknownPathError: There is no such path, or it leads to no single value.
    """
    wanted = None if paths is None else list(dict.fromkeys(_known(nodes, paths)))
    of_interest = set(wanted or ())
    found: list[ScoredNode] = []
    skipped: dict[str, str] = {}
    for path, node, frame, spec in _rows(nodes.root, with_plumbing=wanted is not None):
        is_wanted = path in of_interest if wanted is not None else not node.is_plumbing
        if not is_wanted and node.is_plumbing:
            continue
        if isinstance(spec, TensorSpec) and spec.dtype.is_floating_point:
            found.append(ScoredNode(path, node, frame, spec, is_wanted, is_wanted or _is_source(node, frame)))
        elif path in of_interest or (isinstance(spec, TensorSpec) and spec.dtype.is_complex and is_wanted):
            skipped[path] = _not_floating(spec.dtype) if isinstance(spec, TensorSpec) else f"no tensor, but {spec}"
    if wanted is None:
        wanted = [node.path for node in found if node.is_wanted]
    return Selected(wanted, found, skipped)


def has_storage(value: Tensor) -> bool:
    """Whether a tensor has memory of its own: not one that stands for others."""
    try:
        value.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _known(nodes: NodeMap, paths: Iterable[Any]) -> Iterator[str]:
    if isinstance(paths, (str, bytes)):
        paths = [paths]
    unknown = []
    for path in paths:
        try:
            yield nodes[path].path
        except UnknownPathError as problem:  # noqa: PERF203  # all of them are told
            unknown.append(str(problem))
    if unknown:
        raise UnknownPathError("; ".join(unknown))


def _rows(root: Frame, *, with_plumbing: bool) -> Iterator[tuple[str, Node, Frame, ValueSpec]]:
    rows = NodeRows.of(root, with_plumbing=with_plumbing)
    return zip(rows.paths, rows.nodes, rows.frames, rows.specs, strict=True)


def _not_floating(dtype: torch.dtype) -> str:
    return f"of dtype {str(dtype).removeprefix('torch.')}: scores are of floating-point values"


def _is_source(node: Node, frame: Frame) -> bool:
    """Whether a value is, as far as is recorded, made of no other floating-point value but the model's own."""
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


@dataclass(frozen=True)
class _Place:
    """Where the positions of a value are: a dimension of it, of an encoder's sequence or of the model's own."""

    dim: int
    is_encoder: bool = False


class PositionAxis:
    """The positions of the sequence of a run.

    Args:
        root: The root frame of the capture.
        nodes: The nodes that get scores.
        inputs: What the model is run on.
        positions: Those that are wanted, as for `causal_trace`.
        position_dim: Which dimension runs along the sequence, where several could: one number for all nodes, or by
            path. For models that take no tokens, the dimension of their first input that is the sequence, too.

    Attributes:
        dims: By path, the dimension of the value that runs along the sequence.
        problems: For paths whose values have no positions, or where these cannot be told, the reason.

    Raises:
        ExperimentError: The model has no sequence that is known, or no such positions.
    """

    def __init__(
        self,
        root: Frame,
        nodes: Iterable[ScoredNode],
        inputs: Inputs,
        positions: Positions,
        position_dim: int | Mapping[str, int] | None,
    ) -> None:
        self._root = root
        self._given = position_dim
        if positions is not None and positions is not True:
            whole_numbers(positions)  # refuses what is none, before all else
        self.problems: dict[str, str] = {}
        self._places: dict[str, _Place] = {}
        self._by_tokens = bool(token_inputs(root))
        for node in nodes:
            place = self._place_or_problem(node)
            if place is not None:
                self._places[node.path] = place
        self.dims = {path: place.dim for path, place in self._places.items()}
        self._step = self._step_of(inputs)
        self.positions = self._chosen(positions)

    def row(self, path: str, scores: Scores) -> Scores:
        """Returns the scores of a path at `positions`: NaN where it has none; adds to `problems`."""
        row = np.full(len(self.positions), np.nan)
        if scores.ndim == 0:  # the same in both runs
            size = self._size(path)
            scores = np.zeros(0 if size is None else size)
        first = self._first(path, len(scores))
        if first is None:
            return row
        for index, position in enumerate(self.positions):
            if first <= position < first + len(scores):
                row[index] = scores[position - first]
        return row

    # -- dimensions ----------------------------------------------------------------------------------------------------

    def _place_or_problem(self, node: ScoredNode) -> _Place | None:
        try:
            return self._place(node)
        except ExperimentError:
            raise
        except ValueError as problem:
            # Its repairs are for patches with positions.
            self.problems[node.path] = re.sub("; (drop|choose|use) .*", "", str(problem))
            return None

    def _place(self, node: ScoredNode) -> _Place:
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
        return _Place(found.dim, found.is_encoder)

    def _place_without_tokens(self, node: ScoredNode, given: int | None) -> _Place:
        shape = tuple(node.spec.shape)
        _, sequence = self._sequence_input()
        if node.is_state:
            raise ValueError(f"a {node.node.kind} has no positions")
        dims = dimensions_of(self._root).dims_like(node.spec, sequence)
        if given is not None and -len(shape) <= given < len(shape) and given % len(shape) in dims:
            return _Place(given % len(shape))
        if len(dims) != 1:
            which = "several dimensions of its shape are" if dims else "no dimension of its shape is"
            raise ValueError(f"{which} that of the example's sequence: {shape}, {sequence[0]} positions")
        return _Place(dims[0])

    def _sequence_input(self) -> tuple[str, Profile]:
        """Returns the input whose dimension `position_dim` is the sequence, and that dimension."""
        dim = self._given
        if not isinstance(dim, int):
            raise ExperimentError(
                "positions are known for models that take input_ids or inputs_embeds; for others, say which dimension "
                "of the first input is the sequence: position_dim=1"
            )
        for node in self._root.inputs():
            if isinstance(node.spec, TensorSpec) and -len(node.spec.shape) <= dim < len(node.spec.shape):
                return node.target, dimensions_of(self._root).profiles(node.spec)[dim]
        raise ExperimentError(f"position_dim={dim}: no input of the model has such a dimension")

    # -- positions -----------------------------------------------------------------------------------------------------

    def _step_of(self, inputs: Inputs) -> GenerationStep:
        """Returns how long the sequences are in a run, and what is in a cache before them."""
        if not self._by_tokens:
            name, _ = self._sequence_input()
            value = given_input(self._root.parameters, name, inputs.args, inputs.kwargs)
            assert isinstance(self._given, int)
            return GenerationStep(0, 0, value.shape[self._given] if isinstance(value, Tensor) else 0)
        asking = Entry(
            Target("", self._root, self._root.output_node, (), (), self._root.output_node.spec),
            (ProbePatch(),),
            Restriction(None, selection(slice(None), "positions")),
        )
        steps = GenerationSteps(self._root, [asking], StepCount(), True)
        steps.begin(inputs.args, inputs.kwargs)
        return steps.current

    def _chosen(self, given: Positions) -> list[int]:
        """Returns the positions that a user gave, counted from the start."""
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

    def _size(self, path: str) -> int | None:
        place = self._places.get(path)
        if place is None:
            return None
        return self._step.encoder_length if place.is_encoder else self._step.length

    def _first(self, path: str, size: int) -> int | None:
        """Returns the position at which a value begins."""
        place, step = self._places.get(path), self._step
        if place is None:
            return None
        if place.is_encoder:
            lengths = {step.encoder_length: 0}
        else:
            lengths = {(step.past or 0) + (step.length or 0): 0, step.length: step.past or 0}
        if size not in lengths:
            self.problems[path] = f"which positions its {size} entries are cannot be told"
            return None
        return lengths[size]
