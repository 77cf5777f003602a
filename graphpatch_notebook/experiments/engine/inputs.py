"""The inputs and the other arguments that experiments share, runs without patches, and means over examples."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from graphpatch_notebook.capture.inputs import given_input
from graphpatch_notebook.errors import ExperimentError, SweepInterrupted, UnknownPathError, extra, warn_each_time
from graphpatch_notebook.experiments.engine import map_batches
from graphpatch_notebook.experiments.engine.cells import Measurement, baseline_of, measurement
from graphpatch_notebook.experiments.metrics import AnswerLogProbability, Continuations, Generated, Metric
from graphpatch_notebook.inspection.node_path import NodePath
from graphpatch_notebook.inspection.resolution import Target
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import ProbePatch
from graphpatch_notebook.patching import padded_end, row_dimension, sequence_dim
from graphpatch_notebook.patching.model_state import RandomState, copied
from graphpatch_notebook.paths import is_component_name, is_pattern
from graphpatch_notebook.texts import decoded, is_text, token_text
from graphpatch_notebook.values import children, replaced

if TYPE_CHECKING:
    from xarray import DataArray


@dataclass(frozen=True)
class Inputs:
    """The arguments of a call of the model.

    Attributes:
        args: The positional arguments.
        kwargs: The keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def fresh(self) -> Inputs:
        """Returns copies for one run: a model may write into its inputs, or let a cache grow."""
        args, kwargs = copied((self.args, self.kwargs))
        return Inputs(args, kwargs)

    def run(self, model: Callable[..., Any]) -> Any:
        """Calls the model with copies of the arguments, and returns its output."""
        fresh = self.fresh()
        return model(*fresh.args, **fresh.kwargs)

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors among the arguments, and in containers among these."""
        waiting = [*self.args, *self.kwargs.values()]
        for value in waiting:
            if isinstance(value, Tensor):
                yield value
            else:
                waiting += [child for _, child in children(value) or ()]

    def attrs(self, pg: PatchableGraph) -> dict[str, list[str]]:
        """Returns what results say of the inputs: `tokens`, the texts of the only row, if there is a tokenizer."""
        first = next(self.tensors(), None)
        is_tokens = first is not None and first.ndim == 2 and len(first) == 1 and first.dtype == torch.int64
        if pg.tokenizer is None or first is None or not is_tokens or "decoder_input_ids" in pg.nodes:
            return {}
        return {"tokens": [token_text(pg.tokenizer, number) for number in first[0].tolist()]}

    @property
    def rows(self) -> int | None:
        """The batch size: the size of the first dimension of the first tensor."""
        return next((len(tensor) for tensor in self.tensors() if tensor.ndim), None)


def as_one(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the arguments of a call as one value, which may be a dataset: its only argument, or `Inputs`."""
    return args[0] if len(args) == 1 and not kwargs else Inputs(args, dict(kwargs))


def inputs_of(pg: PatchableGraph, given: Any, kwargs: Mapping[str, Any] | None = None) -> Inputs:
    """Converts a tuple of arguments, a dict of keyword arguments, or a single value to `Inputs`; texts to tokens.

    Args:
        pg: The graph.
        given: The value.
        kwargs: Keyword arguments, if it is a tuple of arguments.
    """
    if isinstance(given, Inputs):
        return given
    if isinstance(given, Mapping):  # the `BatchEncoding` of a tokenizer among them
        return Inputs(kwargs={str(name): value for name, value in given.items()})
    is_args = isinstance(given, tuple) and not is_text(given)  # a `DataLoader` makes tuples of texts
    args = given if is_args else (given,)
    return Inputs(*captured(pg).tokenized(args, dict(kwargs or {})))


@dataclass(frozen=True)
class GenerationInputs(Inputs):
    """Inputs on which a model generates, with the options of `generate`."""

    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, model: Callable[..., Any]) -> Continuations:
        """Returns what the model, a `PatchableGraph`, generates."""
        pg: Any = model
        fresh, first = self.fresh(), next(self.tensors(), None)
        # The model counts positions itself, and returns the prompt, too, if that is tokens of the same sequence.
        kwargs = {name: value for name, value in fresh.kwargs.items() if name != "position_ids"}
        has_prompt = first is not None and not first.is_floating_point() and "decoder_input_ids" not in pg.nodes
        ids = pg.generate(*fresh.args, **kwargs, **self.options)
        new = ids[:, first.shape[1] if has_prompt and first is not None else 0 :].tolist()
        return Continuations(new if pg.tokenizer is None else [decoded(pg.tokenizer, row) for row in new])


def with_generation(pg: PatchableGraph, inputs: Inputs, metric: Any) -> Inputs:
    """Returns inputs that run as a metric asks for: those of `Generated` generate.

    Raises:
        ExperimentError: The model does not generate, or rows are padded on the right.
    """
    if not isinstance(metric, Generated):
        return inputs
    if not callable(getattr(pg, "generate", None)):
        raise ExperimentError(f"{type(captured(pg).module).__name__} has no method generate")
    if padded_end(captured(pg).root, inputs.args, inputs.kwargs):
        raise ExperimentError("rows have padding at their end: pad on the left (tokenizer.padding_side = 'left')")
    return GenerationInputs(inputs.args, inputs.kwargs, metric.options)


# -- runs without patches ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceRun:
    """The results of one run without patches.

    Attributes:
        values: The values at some paths: the model's tensors, detached.
        measurement: The metric.
        is_random: Whether the model drew random numbers of torch.
    """

    values: Mapping[str, Tensor]
    measurement: Measurement
    is_random: bool = False

    def warn_if_random(self) -> None:
        """Warns if the model draws random numbers, which differ in each run."""
        if self.is_random:
            warn_each_time(
                "the model draws random numbers in each run, so the compared runs also differ by these; call pg.eval() "
                "first, if it is in training mode",
                "experiment",
            )


def record(
    pg: PatchableGraph,
    inputs: Inputs,
    paths: Iterable[str],
    metric: Callable[[Any], Any] | None = None,
    run: Callable[[PatchableGraph], Any] | None = None,
) -> ReferenceRun:
    """Runs the model once without gradients, by `run` if given, and returns the values at `paths` and the metric.

    Raises:
        ExperimentError: A value is not a tensor.
        PatchNotFiredError: A path was not reached.
    """
    probes: dict[Any, ProbePatch] = {path: ProbePatch() for path in paths}
    with torch.no_grad(), pg.patch(probes, strict=True):
        state = RandomState()
        output = (run or inputs.run)(pg)
        is_random = any(name.startswith("torch") for name in state.changed())
    if isinstance(metric, Generated):  # the values are those of the prompt
        with torch.no_grad():
            output = with_generation(pg, inputs, metric).run(pg)
    given = measurement(0.0) if metric is None else baseline_of(metric, output)
    values = {}
    for path, probe in probes.items():
        value = probe.activation
        if not isinstance(value, Tensor):
            raise ExperimentError(f"{str(path)!r} holds {value!r}, which is not a tensor; give paths of tensors")
        values[str(path)] = value.detach()
    return ReferenceRun(values, given, is_random)


Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


@dataclass(frozen=True)
class MetricRange:
    """The metrics on the clean and on the corrupted inputs; with `normalize`, results are 1 and 0 there."""

    clean: Array
    corrupted: Array
    normalize: bool

    def __post_init__(self) -> None:
        with np.errstate(invalid="ignore"):  # infinite metrics
            span = self.clean - self.corrupted
        if self.normalize and not np.all(np.isfinite(span) & (span != 0)):
            raise ExperimentError(
                f"cannot normalize: the metric is {self.clean.tolist()} on the clean inputs and "
                f"{self.corrupted.tolist()} on the corrupted inputs; remove normalize=True, or change the inputs"
            )

    def result_of(self, run: Callable[[], DataArray], form: Callable[[DataArray], DataArray]) -> DataArray:
        """Returns the result of a sweep, scaled, with the metrics of the two runs in its `attrs`.

        `form` removes dimensions that are not part of the result, and keeps the `attrs`. If the sweep is interrupted,
        the partial result is finished in the same way.
        """
        try:
            return self._finished(form(run()))
        except SweepInterrupted as stopped:
            stopped.result = self._finished(form(stopped.result))
            raise

    def _finished(self, result: DataArray) -> DataArray:
        attrs, baseline = result.attrs, self.corrupted
        if self.normalize:
            result = (result - self.corrupted) / (self.clean - self.corrupted)
            result.name = f"{result.name}, normalized"
            baseline = np.zeros_like(baseline)
        ends = {"clean": self.clean, "corrupted": self.corrupted, "baseline": baseline}
        result.attrs = attrs | {name: numbers.tolist() for name, numbers in ends.items()}
        return result


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


_RESAMPLES, _LEVEL = 1000, 95
_AT_ONCE = 2**22
"""How many resampled means are in memory at once."""
_METRICS = ("baseline", "clean", "corrupted")
"""The attributes of results that are means of the metric, too."""

Examples: TypeAlias = "Tensor | Mapping[str, Any] | Iterable[Any]"
"""Inputs of all examples (a tensor, a dict of tensors, a list of texts, or a dataset of Hugging Face `datasets`), or an
iterable of batches of inputs."""


def batches_of(pg: PatchableGraph, dataset: Examples, batch_size: int | None) -> Iterator[Inputs]:
    """Yields the batches of a dataset: those of an iterable, or parts of the inputs of all examples.

    Texts are cut into batches before they become tokens, so that they are padded to the longest of their batch.
    """
    if isinstance(dataset, (list, tuple)) and is_text(dataset):
        if batch_size is None:
            raise ExperimentError("batch_size= says how many of the texts run at once: give it, too")
        yield from (inputs_of(pg, [*dataset[i : i + batch_size]]) for i in range(0, len(dataset), batch_size))
        return
    if hasattr(dataset, "with_format"):  # of Hugging Face `datasets`
        yield from _of_columns(pg, dataset, batch_size)
        return
    if not isinstance(dataset, (Tensor, Mapping, tuple, Inputs)):
        if batch_size is not None:
            raise ExperimentError(f"each item of this {type(dataset).__name__} is a batch: leave batch_size= out")
        if not isinstance(dataset, Iterable):
            raise ExperimentError(f"a {type(dataset).__name__} is one batch: give a list of batches, [inputs]")
        yield from (inputs_of(pg, batch) for batch in dataset)
        return
    whole = inputs_of(pg, dataset)
    if batch_size is None or (count := whole.rows) is None:
        raise ExperimentError("batch_size= cuts tensors with examples along their first dimension: give both")
    for first in range(0, count, batch_size):
        part = slice(first, first + batch_size)
        args = tuple(_cut(value, part, count) for value in whole.args)
        yield Inputs(args, {name: _cut(value, part, count) for name, value in whole.kwargs.items()})


def _of_columns(pg: PatchableGraph, dataset: Any, batch_size: int | None) -> Iterator[Inputs]:
    """Yields the batches of a `datasets.Dataset`: those of its columns that the model has parameters for."""
    if batch_size is None:
        raise ExperimentError("batch_size= says how many examples of the dataset run at once: give it, too")
    names = {parameter.name for parameter in captured(pg).root.parameters}
    for batch in dataset.with_format("torch").iter(batch_size):
        given = {name: column for name, column in batch.items() if name in names}
        if not given or not all(isinstance(column, Tensor) for column in given.values()):
            raise ExperimentError(
                f"the dataset has the columns {list(batch)}, and the model takes {sorted(names)}: tokenize the texts, "
                "padded to one length, or give them as a list"
            )
        yield Inputs(kwargs=given)


def _cut(value: Any, part: slice, count: int) -> Any:
    """Returns some rows of the tensors with as many, also of those in containers."""
    if isinstance(value, Tensor):
        return value[part] if value.ndim and len(value) == count else value
    for key, child in children(value) or ():
        if (cut := _cut(child, part, count)) is not child:
            value = replaced(value, key, cut)
    return value


@dataclass(frozen=True)
class OverExamples:
    """Runs an experiment on each batch of a dataset.

    Attributes:
        datasets: The arguments of the experiment that are inputs, by name; those that are not datasets are the same for
            all batches. `inputs` are the arguments of the model.
        batch_size: How many examples of a tensor, a dict of tensors or a list of texts are a batch.
        keep: Whether the result has all examples, along the dimension `example`, in place of their mean.
    """

    datasets: Mapping[str, Any]
    batch_size: int | None
    keep: bool

    def __bool__(self) -> bool:
        """Whether there is a dataset."""
        if any(map(self._is_dataset, self.datasets.values())):
            return True
        if self.batch_size is not None or self.keep:
            raise ExperimentError(
                "batch_size= and keep_examples= are for datasets: the inputs of all examples, or a list of batches"
            )
        return False

    def _is_dataset(self, given: Any) -> bool:
        if isinstance(given, (Tensor, Mapping, tuple, Inputs)) or is_text(given):
            return self.batch_size is not None
        return isinstance(given, Iterable)

    def run(
        self,
        pg: PatchableGraph,
        experiment: Callable[..., Any],
        /,
        *args: Any,
        each: Mapping[str, Any],
        executor: Any = None,
        recipe: Any = None,
        progress: bool = True,
        checkpoint: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Returns the mean of the results of `experiment(pg, *args, **kwargs)`, or all of them.

        Args:
            pg: The graph.
            experiment: The function, by the name that its module has: it is pickled for other processes.
            *args: Its positional arguments before the inputs.
            each: Arguments of which a batch may have its own: a list with one for each batch, or, with `batch_size`, a
                tensor with one for each example.
            executor: Runs batches elsewhere, as for `map_batches`.
            recipe: As for `map_batches`.
            progress: Whether a progress bar is shown.
            checkpoint: Must be `None`.
            **kwargs: All other keyword arguments.

        Raises:
            ExperimentError: There are no examples, the datasets have different numbers of batches, or results have
                different coordinates.
        """
        if checkpoint is not None:
            raise ExperimentError("checkpoint= keeps the cells of one sweep, and a dataset has one for each batch")
        given = {**kwargs, **self.datasets, **each, "progress": False}
        columns = {
            name: batches_of(pg, dataset, self.batch_size)
            for name, dataset in self.datasets.items()
            if self._is_dataset(dataset)
        }
        for name, value in each.items():
            if isinstance(value, (list, tuple)):
                columns[name] = iter(value)
            elif isinstance(value, Tensor) and value.ndim and self.batch_size is not None:
                columns[name] = iter(value.split(self.batch_size))
        same = {name: value for name, value in given.items() if name not in columns}
        one = functools.partial(_run_one, experiment, args, same)
        results = map_batches(pg, one, _in_step(columns), executor=executor, recipe=recipe)
        if progress:
            tqdm = extra("tqdm.auto", "the progress of an experiment", ", or say progress=False").tqdm
            results = tqdm(results, desc=experiment.__name__, unit="batch")
        return _together(list(results), self.keep)


def _in_step(columns: Mapping[str, Iterator[Any]]) -> Iterator[dict[str, Any]]:
    """Yields the arguments of each batch."""
    ended = object()
    for row in itertools.zip_longest(*columns.values(), fillvalue=ended):
        if any(value is ended for value in row):
            short = [name for name, value in zip(columns, row, strict=True) if value is ended]
            raise ExperimentError(f"{short} have fewer batches than {[name for name in columns if name not in short]}")
        yield dict(zip(columns, row, strict=True))


def _run_one(
    experiment: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    pg: PatchableGraph,
    batch: Mapping[str, Any],
) -> tuple[int, Any]:
    """Returns the number of examples of a batch, and the result on it."""
    call = {**kwargs, **batch}
    rows = next(value.rows for value in batch.values() if isinstance(value, Inputs))
    own = call.pop("inputs", Inputs())
    return rows or 1, _as_given(experiment(pg, *args, *own.args, **call, **own.kwargs), call.get("positions"))


def _as_given(result: Any, positions: Any) -> Any:
    """Returns a result with the positions as they were given: -1 is another one where a batch has another length."""
    if positions is None or isinstance(positions, slice) or "position" not in result.dims:
        return result
    labels = np.atleast_1d(np.asarray(positions))
    return result.assign_coords(position=labels) if labels.ndim == 1 and labels.dtype.kind in "iu" else result


def _together(results: Sequence[tuple[int, Any]], keep: bool) -> Any:
    """Returns the mean over examples, with the ends of its confidence interval as coordinates; or the examples.

    Each row is an example where results have rows (the dimension `batch`), and each batch otherwise, with the weight of
    its rows.
    """
    xarray = extra("xarray", "a mean of results")
    if not results:
        raise ExperimentError("the dataset has no examples")
    found = [each.rename(batch="example") if "batch" in each.dims else each for _, each in results]
    has_rows = "example" in found[0].dims
    weights = np.array([1.0] * sum(each.sizes["example"] for each in found) if has_rows else [n for n, _ in results])
    try:
        plain = [each.drop_vars("example", errors="ignore") for each in found]
        whole = xarray.concat(plain, "example", join="exact", combine_attrs="drop_conflicts")
    except ValueError as error:
        raise ExperimentError(
            f"the results of batches have different coordinates ({error}): give positions= that all examples have, as "
            "numbers, such as [-2, -1] for their ends"
        ) from error
    for name in _METRICS:
        numbers = [each.attrs[name] for each in found if name in each.attrs]
        if numbers and not keep:
            whole.attrs[name] = np.average(numbers, axis=0, weights=weights).tolist()
        elif numbers:
            whole.attrs[name] = numbers
    if keep:
        return whole
    if isinstance(whole, xarray.Dataset):
        means = {name: _mean(weights, array, f"{name}_") for name, array in whole.items()}
        return xarray.Dataset(means, attrs=whole.attrs)
    return _mean(weights, whole)


def _mean(weights: Any, whole: Any, prefix: str = "") -> Any:
    """Returns the mean over examples; the middle 95% of means of resampled examples are from `low` to `high`."""
    whole = whole.transpose("example", ...)
    values = whole.values.reshape(len(whole), -1).astype(np.float64)
    draws = np.random.default_rng(0).multinomial(len(values), [1 / len(values)] * len(values), _RESAMPLES) * weights
    ends = [50 - _LEVEL / 2, 50 + _LEVEL / 2]
    found = np.full((3, values.shape[1]), np.nan)
    step = max(1, _AT_ONCE // _RESAMPLES)
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # cells that no example has
        for first in range(0, values.shape[1], step):
            part = slice(first, first + step)
            known = ~np.isnan(values[:, part])
            numbers = np.where(known, values[:, part], 0.0)
            found[0, part] = weights @ numbers / (weights @ known)
            if len(values) > 1:
                found[1:, part] = np.nanpercentile(draws @ numbers / (draws @ known), ends, axis=0)
    mean, low, high = (whole.isel(example=0, drop=True).copy(data=each.reshape(whole.shape[1:])) for each in found)
    return mean.assign_coords({f"{prefix}low": low.variable, f"{prefix}high": high.variable})
