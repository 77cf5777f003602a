"""Experiments over datasets: the mean of their results over examples, with confidence intervals."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.engine import map_batches
from graphpatch_notebook.experiments.engine.inputs import Inputs, inputs_of
from graphpatch_notebook.lazy_names import extra
from graphpatch_notebook.patchable_graph import PatchableGraph, captured
from graphpatch_notebook.texts import is_text
from graphpatch_notebook.values import children, replaced

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
        datasets: The arguments of the experiment that are inputs, by name; those that are no dataset are the same for
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
