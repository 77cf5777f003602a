"""The inputs of the model in an experiment, and runs on them without patches, which other runs are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError, SweepInterrupted, warn_each_time
from graphpatch_notebook.experiments.engine.cells import Measurement, baseline_of, measurement
from graphpatch_notebook.experiments.metrics import Continuations, Generated
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.patches.kinds import ProbePatch
from graphpatch_notebook.patching import padded_end
from graphpatch_notebook.patching.model_state import RandomState, copied
from graphpatch_notebook.texts import decoded, is_text, token_text
from graphpatch_notebook.values import children

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
