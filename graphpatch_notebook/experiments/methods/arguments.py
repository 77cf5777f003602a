"""The arguments that experiments share: a graph, a metric, paths, and inputs of the same shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.components.names import is_component_name
from graphpatch_notebook.errors import ExperimentError, UnknownPathError
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.metrics import AnswerLogProbability, Generated, Metric
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import ProbePatch
from graphpatch_notebook.patching import padded_end, row_dimension, sequence_dim
from graphpatch_notebook.paths import is_pattern
from graphpatch_notebook.values import children

Paths: TypeAlias = "str | Iterable[str | NodePath]"


def check_graph(pg: Any, *, has_gradients: bool = False) -> None:
    """Checks what an experiment is given as the graph, and, if it needs gradients, that the model can have some.

    Raises:
        TypeError: It is something else than a `PatchableGraph`, such as a model.
        ExperimentError: The model was made in inference mode.
    """
    if not isinstance(pg, PatchableGraph):
        raise TypeError(f"give a PatchableGraph, not a {type(pg).__name__}: PatchableGraph(model, *example_inputs)")
    held = {**dict(pg.named_parameters()), **dict(pg.named_buffers())} if has_gradients else {}
    if made := next((name for name, value in held.items() if not is_lazy(value) and value.is_inference()), None):
        raise ExperimentError(
            f"gradients do not flow past {made!r}, which was made in torch.inference_mode(): make or load the model "
            "outside of it, or use method='exact' or a sweep"
        )


def check_metric(metric: Any) -> None:
    """Checks that a metric can be called with an output, and is not a class.

    Example:
        >>> check_metric(max)
    """
    if not callable(metric) or (isinstance(metric, type) and not issubclass(metric, (int, float))):
        raise ExperimentError(
            f"metric={metric!r} must be a function of the model's output, such as Probability(token), or "
            "lambda output: output.loss"
        )


def check_ablation(method: str, reference: Any, mean_over: str, methods: Sequence[str]) -> None:
    """Checks by what an ablation replaces values; raises an `ExperimentError`."""
    if method not in methods or mean_over not in ("batch", "batch and positions"):
        raise ExperimentError(
            f"method must be one of {', '.join(map(repr, methods))}, not {method!r}; mean_over 'batch' or 'batch and "
            f"positions', not {mean_over!r}"
        )
    if (method == "zero") is not (reference is None):
        raise ExperimentError("method='mean' and 'resample' need reference inputs, reference=...; 'zero' takes none")


def several_paths(pg: PatchableGraph, given: Any, what: str = "paths") -> list[str]:
    """Returns the given paths as text. Component names and patterns that mean several values become several.

    Raises:
        UnknownPathError, PatchMapError: Some paths cannot be patched. The message names all of them.
        ExperimentError: There is no path, or one is repeated.
    """
    if isinstance(given, (str, NodePath)):
        given = [given]
    if isinstance(given, Tensor) or not isinstance(given, Iterable):
        raise ExperimentError(f"{what} must be a list of paths, not {given!r}")
    paths = [str(path) for path in given]
    if not paths or len(set(paths)) < len(paths):
        raise ExperimentError(f"{what} must have at least one path, and each once, not {paths}")
    return list(targets(pg, paths))


def targets(pg: PatchableGraph, paths: Iterable[str]) -> dict[str, Target]:
    """Returns the node that each path refers to. Component names and patterns may mean several.

    Raises:
        UnknownPathError, PatchMapError: Some paths cannot be patched. The message names all of them.
    """
    probes = {name: ProbePatch() for path in paths for name in _meant(pg, str(path))}
    entries = captured(pg).entries_of(probes)
    return {path: entry.target for path, entry in zip(probes, entries, strict=True)}


def _meant(pg: PatchableGraph, text: str) -> list[str]:
    """Returns the paths and names that a path means; the text itself if it means nothing, which is reported later."""
    with suppress(UnknownPathError):
        if is_component_name(text) or is_pattern(text):
            return captured(pg).paths_of(text)
    return [text]


def check_same_shapes(clean: Mapping[str, Tensor], corrupted: Mapping[str, Tensor]) -> None:
    """Raises an `ExperimentError` if values of the clean and the corrupted run differ in shape."""
    for path, value in clean.items():
        if path in corrupted and value.shape != corrupted[path].shape:
            raise ExperimentError(
                f"{path!r} has shape {tuple(value.shape)} on the clean inputs and {tuple(corrupted[path].shape)} "
                "on the corrupted inputs; give inputs of the same shapes (pad the shorter ones)"
            )


def check_same_input_shapes(pg: PatchableGraph, clean: Inputs, corrupted: Inputs) -> None:
    """Raises an `ExperimentError` if the tensors in the clean and the corrupted inputs differ in shape."""
    check_same_shapes(*(input_tensors(pg, inputs) for inputs in (clean, corrupted)))


def input_tensors(pg: PatchableGraph, inputs: Inputs) -> dict[str, Tensor]:
    """Returns the tensors in the inputs of `forward`, by parameter name and path within it."""
    parameters = pg.nodes.root.parameters
    found: dict[str, Tensor] = {}
    waiting = [(each.name, given_input(parameters, each.name, inputs.args, inputs.kwargs)) for each in parameters]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Tensor):
            found[name] = value
        elif isinstance(value, (list, tuple, dict)):
            waiting += [(f"{name}|{key}", child) for key, child in children(value) or ()]
    return found


# -- positions ---------------------------------------------------------------------------------------------------------

Positions: TypeAlias = "bool | int | Iterable[int] | slice | None"
"""A position, several, or a slice; negative numbers count from the end of the sequence. `True` for all positions."""

RowPositions: TypeAlias = "Sequence[Sequence[int]] | Tensor"
"""The positions of each row of the batch, `(batch, columns)`."""

PositionDim: TypeAlias = "int | Mapping[str, int] | None"
"""The sequence dimension: of all values, or by path."""


# -- dimensions --------------------------------------------------------------------------------------------------------


def position_dims(pg: PatchableGraph, paths: Sequence[str], position_dim: PositionDim) -> dict[str, int]:
    """Returns the sequence dimension of the value at each path.

    `position_dim` is that of all paths, or by path; it is required for models that do not take tokens.

    Raises:
        ExperimentError: A sequence dimension is unknown. The message has each reason once, with its paths.
    """
    places, root = targets(pg, paths), pg.nodes.root
    given = given_dims(pg, places, position_dim)
    found, problems = found_or_problems(
        places, lambda path, target: target.kept_dims.index(sequence_dim(root, target, given.get(path))[0])
    )
    check_problems(problems)
    return found


def row_dims(pg: PatchableGraph, paths: Iterable[str], dims: Mapping[str, int]) -> dict[str, int]:
    """Returns the batch dimension of the value at each path, whose sequence dimension `dims` has if it is known.

    Raises:
        ExperimentError: A batch dimension is unknown.
    """

    def dim(path: str, target: Target) -> int:
        whole = target.kept_dims[dims[path]] if path in dims else None
        return target.kept_dims.index(row_dimension(pg.nodes.root, target, whole))

    found, problems = found_or_problems(targets(pg, paths), dim)
    check_problems(problems, "the rows of the batch are unknown:")
    return found


_Found = TypeVar("_Found")


def found_or_problems(
    targets: Mapping[str, Target], find: Callable[[str, Target], _Found]
) -> tuple[dict[str, _Found], dict[str, str]]:
    """Returns by path what a function finds in a value, and the text of each `ValueError` that it raises."""
    found: dict[str, _Found] = {}
    problems: dict[str, str] = {}
    for path, target in targets.items():
        try:
            result = find(path, target)
        except ValueError as problem:
            problems[path] = str(problem)
            continue
        found[path] = result
    return found, problems


def given_dims(pg: PatchableGraph, paths: Iterable[str], position_dim: PositionDim) -> dict[str, int | None]:
    """Returns what the user said is the sequence dimension, by path."""
    if not isinstance(position_dim, Mapping):
        return dict.fromkeys(paths, position_dim)
    given = {path: dim for key, dim in position_dim.items() for path in targets(pg, [str(key)])}
    if others := given.keys() - set(paths):
        raise ExperimentError(f"position_dim has {min(others)!r}, whose positions are not asked for")
    return dict(given)


def check_is_used(position_dim: PositionDim, *, is_used: bool) -> None:
    """Raises an `ExperimentError` if a sequence dimension is given, but nothing has positions."""
    if position_dim is not None and not is_used:
        raise ExperimentError(f"position_dim={position_dim!r} has no effect without positions=...")


def check_problems(problems: Mapping[str, str], what: str = "the sequence dimension is unknown:") -> None:
    """Raises an `ExperimentError` with the problems of some paths, if there are any."""
    if problems:
        raise ExperimentError("\n  ".join([what, *by_problem(problems)]))


def by_problem(problems: Mapping[str, str]) -> list[str]:
    """Returns each problem once with its paths, the most common first."""
    paths: dict[str, list[str]] = {}
    for path, problem in problems.items():
        paths.setdefault(problem, []).append(path)
    lines = []
    for problem, found in sorted(paths.items(), key=lambda item: -len(item[1])):
        others = f" and {len(found) - 3} others" if len(found) > 3 else ""
        lines.append(f"{', '.join(map(repr, found[:3]))}{others}: {problem}")
    return lines


# -- positions ---------------------------------------------------------------------------------------------------------


def counted_positions(given: Positions | RowPositions, length: int, whose: str = "the sequence") -> list[Any]:
    """Returns the given positions in the given order, counted from the start of a sequence of some length.

    `True` and `None` are all positions. Positions of each row are as many lists. `whose` says what has that length, for
    the message.

    Example:
        >>> counted_positions([2, -1], 7), counted_positions(slice(-2, None), 7)
        ([2, 6], [5, 6])
    """
    every = np.arange(length)
    if are_of_rows(given):
        given_rows: Any = given
        rows = [counted_positions(row, length, whose) for row in given_rows]
        if len({len(row) for row in rows}) > 1:
            raise ExperimentError(f"positions must have as many numbers for each row of the batch, not {given!r}")
        return rows
    if given is None or given is True:
        return list(range(length))
    index: Any = given
    if not isinstance(given, slice):
        index = np.atleast_1d(np.asarray(given.tolist() if isinstance(given, Tensor) else _listed(given)))
        if index.dtype.kind not in "iu":
            raise ExperimentError(f"positions must be integers, or True for all, not {given!r}")
    try:
        found: list[int] = every[index].tolist()
    except (IndexError, TypeError) as error:
        raise ExperimentError(f"positions={given!r}: {whose} has {length} positions, {error}") from error
    if not found or len(set(found)) < len(found):
        raise ExperimentError(f"positions={given!r} must have each position once, of {length} of {whose}; not {found}")
    return found


def _listed(given: Any) -> Any:
    return list(given) if isinstance(given, Iterable) and not isinstance(given, (str, np.ndarray)) else given


def are_of_rows(given: Any) -> bool:
    """Whether positions are given for each row of the batch, with two dimensions.

    Example:
        >>> are_of_rows([[3], [5]]), are_of_rows([3, 5])
        (True, False)
    """
    if hasattr(given, "tolist"):
        return len(given.shape) == 2
    return isinstance(given, (list, tuple)) and any(
        isinstance(row, (list, tuple)) or len(getattr(row, "shape", ())) for row in given
    )


def counts_from_end(given: Any) -> bool:
    """Whether positions count from the end of the sequence."""
    given = given.tolist() if isinstance(given, Tensor) else given
    parts = (given.start, given.stop) if isinstance(given, slice) else np.ravel(_listed(given)).tolist()
    return any(part is not None and part < 0 for part in parts)


def check_ends(
    pg: PatchableGraph, inputs: Inputs, given: Any, *, is_encoder: bool = False, what: str = "positions"
) -> None:
    """Raises an `ExperimentError` if positions count from the end of a sequence, where rows of the batch have padding.

    `is_encoder` says whether the sequence is that of an encoder.
    """
    if given is None or not counts_from_end(given):
        return
    if why := padded_end(pg.nodes.root, inputs.args, inputs.kwargs, is_encoder=is_encoder):
        raise ExperimentError(f"{what}={given!r} {why}")


def are_of_encoder(pg: PatchableGraph, dims: Mapping[str, int]) -> bool:
    """Whether values have the sequence of an encoder; their sequence dimensions are given by path."""
    found = targets(pg, dims)
    return any(sequence_dim(pg.nodes.root, each, dims[path])[1] for path, each in found.items())


def check_metric_position(pg: PatchableGraph, inputs: Inputs, metric: Any) -> None:
    """Raises an `ExperimentError` if a metric reads the logits of an end that is padding, or of another answer."""
    if isinstance(metric, Metric):
        check_ends(pg, inputs, getattr(metric, "position", None), what=f"{type(metric).__name__} with position")
    ids = inputs.kwargs.get("decoder_input_ids", next(inputs.tensors(), None))
    if isinstance(metric, AnswerLogProbability) and isinstance(ids, Tensor) and not ids.is_floating_point():
        metric.check_inputs(ids)


def check_generated(metric: Any, *, has_positions: bool) -> None:
    """Raises an `ExperimentError` if a metric generates where parts of values at positions are replaced."""
    if has_positions and isinstance(metric, Generated):
        raise ExperimentError(
            "positions here are those of a single forward, and metric=Generated(...) runs the model token by token: "
            "use pg.sweep, with positions= in the patches"
        )


@dataclass(frozen=True)
class PositionCells:
    """The positions of an experiment, and where they are in its values.

    Attributes:
        labels: The positions, counted from the start; numbers of columns, if each row of the batch has its own.
        dims: The sequence dimension, by path.
        columns: For each column, the position in each row; empty if positions are the same for all rows.
        row_dims: The batch dimension, by path; empty likewise.
    """

    labels: list[int]
    dims: Mapping[str, int]
    columns: Sequence[Sequence[int]] = ()
    row_dims: Mapping[str, int] = field(default_factory=dict)

    def place(self, index: list[Any], path: str, label: int | list[int]) -> None:
        """Makes an index of the value at `path`, a list with an item for each dimension, one of positions."""
        if not self.columns:
            index[self.dims[path]] = label
            return
        index[self.dims[path]] = torch.tensor(self.columns)[label]
        index[self.row_dims[path]] = torch.arange(len(self.columns[0]))


def position_cells(
    pg: PatchableGraph, given: Positions | RowPositions, values: Mapping[str, Tensor], dims: Mapping[str, int]
) -> PositionCells:
    """Returns the given positions, of all rows of the batch or of each; `True` and `None` are all positions.

    The values, and their sequence dimensions, are given by path.
    """
    lengths = {path: values[path].shape[dim] for path, dim in dims.items()}
    if len(set(lengths.values())) > 1:
        raise ExperimentError(f"give paths of one sequence at a time; these have different lengths: {lengths}")
    first, length = next(iter(lengths.items()))
    rows = counted_positions(given, length, repr(first))
    if not are_of_rows(given):
        return PositionCells(rows, dims)
    batch_dims = row_dims(pg, dims, dims)
    for path, dim in batch_dims.items():
        shape = tuple(values[path].shape)
        if shape[dim] != len(rows):
            raise ExperimentError(f"positions has {len(rows)} rows, but {path!r} has {shape[dim]}, shape {shape}")
    if len(rows) == 1:
        return PositionCells(rows[0], dims)
    columns = list(zip(*rows, strict=True))
    return PositionCells(list(range(len(columns))), dims, columns, batch_dims)


class ValueParts:
    """The parts of values that the cells of a sweep are about: a position of a value, or all of it.

    `positions` may be `None`, for whole values; `sequences` has the sequence dimension by path, if there are positions.

    Attributes:
        axes: The axes of the sweep: `path`, and `position` for parts of values.
        has_rows: Whether each row of the batch has positions of its own.
    """

    def __init__(
        self,
        pg: PatchableGraph,
        values: Mapping[str, Tensor],
        positions: Positions | RowPositions,
        sequences: Mapping[str, int],
    ) -> None:
        self._values = values
        self._positions = None if positions is None else position_cells(pg, positions, values, sequences)
        self.axes: dict[str, Any] = {"path": list(values)}
        if self._positions is not None:
            self.axes["position"] = self._positions.labels
        self.has_rows = self._positions is not None and bool(self._positions.columns)

    def index(self, path: str, cell: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the index of the part of a value that a cell is about, from the labels of the cell."""
        index: list[Any] = [slice(None)] * self._values[path].ndim
        if self._positions is not None:
            self._positions.place(index, path, cell["position"])
        return tuple(index)
