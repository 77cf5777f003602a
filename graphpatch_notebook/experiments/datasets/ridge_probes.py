"""Linear probes: what can be read off each value of a model, by ridge regression, in one pass over a dataset.

A probe needs the sums of products of features with features (the Gram matrix) and with labels only, which are added up
batch by batch: one set for examples to fit on, and one for examples that are held out to score on. So the score of each
probe is exact, and no activations are kept.

Sources: Alain and Bengio, "Understanding intermediate layers using linear classifier probes" (2016); baselines as in
Hewitt and Liang, "Designing and interpreting probes with control tasks" (2019).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.checks.model_state import preserved
from graphpatch_notebook.checks.sharding import is_distributed
from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.datasets.batches import Dataset as Examples
from graphpatch_notebook.experiments.datasets.batches import ExampleRows, RowReader, batches_of, numbered, read_batch
from graphpatch_notebook.experiments.extras import extra
from graphpatch_notebook.patchable_graph import PatchableGraph, captured, runs_where_the_model_is

if TYPE_CHECKING:
    from xarray import Dataset

_BASELINES = ("shuffled_labels", "random_weights", "bag_of_tokens")
_BAG = 256
"""The number of random features of a bag of tokens."""


@runs_where_the_model_is
def ridge_probes(
    pg: PatchableGraph,
    patterns: Any,
    dataset: Examples,
    labels: Any,
    *,
    positions: Sequence[int] | None = None,
    penalty: float = 1e-2,
    held_out: float = 0.25,
    baselines: Sequence[str] = _BASELINES,
    batch_size: int | None = None,
    max_bytes: int = 2**31,
    seed: int = 0,
) -> Dataset:
    """Returns how well a linear probe of each value predicts labels, on examples that are held out.

    The score is R², the explained part of the variance of the labels: 1 is perfect, 0 is the mean of the labels, and
    below 0 is worse than that. Classes are predicted as numbers, one for each class.

    Args:
        pg: The graph.
        patterns: A path, a pattern such as `"layers[*].resid_post"`, or several.
        dataset: As of `record_to`.
        labels: One number or class for each example, of shape (examples) or, for several numbers, (examples, numbers).
            Classes are texts, integers or booleans; numbers are floats.
        positions: The positions that have a probe of their own; `None` for one probe over all positions.
        penalty: The penalty on the weights, relative to the mean variance of the features.
        held_out: The part of the examples that is held out.
        baselines: What to compare with: `"shuffled_labels"`, the same probes on labels of other examples;
            `"random_weights"`, the same probes of the model with shuffled weights, which runs as well;
            `"bag_of_tokens"`, a probe of random features of the tokens up to the position, which needs no model.
        batch_size: As of `record_to`.
        max_bytes: The most memory that sums of products may take.
        seed: The seed of what is random: held-out examples, shuffled labels and weights, features of tokens.

    Returns:
        A Dataset with `r2` and a variable for each baseline, over `path`, and over `position` if there are several.
        `result["r2"]` colors the tree in the browser.

    Raises:
        UnknownPathError: A path does not exist, or a pattern matches nothing; nothing ran.
        ExperimentError: A value has no positions but `positions` is given; labels do not fit the dataset; the sums
            would take more than `max_bytes`; too few examples are held out.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softplus()), x[:2])
        >>> result = ridge_probes(pg, ["input", "sub_0.output"], x, x.sum(1), batch_size=50, baselines=[])
        >>> result["r2"].values.round(1).tolist()
        [1.0, 0.8]
    """
    if unknown := [name for name in baselines if name not in _BASELINES]:
        raise ExperimentError(f"{unknown[0]!r} is not a baseline; there are {', '.join(_BASELINES)}")
    given: Any = positions
    if given is not None and not isinstance(given, Sequence):
        raise ExperimentError("positions= is a list of the positions that have a probe of their own, such as [0, 5]")
    reader = RowReader(pg, patterns, positions)
    without = [path for path in reader.by_path if not reader.has_positions(path)]
    if without and (positions is not None or "bag_of_tokens" in baselines):
        raise ExperimentError(
            f"{without[0]!r} has no positions: leave it out, or leave out positions= and the baseline 'bag_of_tokens'"
        )
    labeled = _Labels.of(labels, held_out, seed, is_shuffled="shuffled_labels" in baselines)
    models = {"r2": pg}
    if "random_weights" in baselines:
        models["random_weights"] = _with_shuffled_weights(pg, seed)
    bag = _BagOfTokens(seed) if "bag_of_tokens" in baselines else None
    sums = _AllSums(None if positions is None else sorted(set(positions)), labeled, max_bytes)
    count = 0
    for first, batch in numbered(batches_of(dataset, batch_size)):
        for name, model in models.items():
            # The copy draws from the same generators.
            with nullcontext() if model is pg else preserved(captured(pg).module):
                rows, values = read_batch(reader, None, model, (first, batch))
            for path, value in values.items():
                sums.add((name, path), value, rows if reader.has_positions(path) else _whole_examples(value, first))
            if bag is not None and name == "r2":
                sums.add(("bag_of_tokens", ""), bag.features(reader.tokens(batch)[1], rows), rows)
        count = first + len(rows.kept)
    labeled.check_count(count)
    return sums.scores(list(reader.by_path), penalty, baselines)


def _whole_examples(value: Tensor, first: int) -> ExampleRows:
    examples = torch.arange(first, first + len(value))
    return ExampleRows(
        examples, torch.full_like(examples, -1), torch.full_like(examples, -1), torch.ones(len(value), 1).bool()
    )


# -- sums --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Labels:
    """The labels as numbers, of shape (examples, numbers): then those of other examples, if these are a baseline.

    Attributes:
        numbers: The labels.
        own: How many of the columns are true labels.
        is_held_out: By example.
    """

    numbers: Tensor
    own: int
    is_held_out: Tensor

    @classmethod
    def of(cls, labels: Any, held_out: float, seed: int, *, is_shuffled: bool) -> _Labels:
        array = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
        if array.dtype.kind != "f":
            if array.ndim != 1:
                raise ExperimentError(f"classes have the shape (examples), not {array.shape}")
            array = (array[:, None] == np.unique(array)).astype(float)
        numbers = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))
        numbers = numbers[:, None] if numbers.ndim == 1 else numbers
        if numbers.ndim != 2 or not len(numbers) or not bool(numbers.isfinite().all()):
            raise ExperimentError(
                "labels are finite numbers of the shape (examples) or (examples, numbers), or classes"
            )
        random = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(numbers), generator=random)
        is_held_out = torch.zeros(len(numbers), dtype=torch.bool)
        is_held_out[order[: round(held_out * len(numbers))]] = True
        if is_held_out.sum() < 2 or is_held_out.all():
            raise ExperimentError(
                f"held_out={held_out} of {len(numbers)} examples leaves too few to fit on, or fewer than 2 to score on"
            )
        own = numbers.shape[1]
        others = numbers[torch.randperm(len(numbers), generator=random)]
        return cls(torch.cat([numbers, others], 1) if is_shuffled else numbers, own, is_held_out)

    def check_count(self, examples: int) -> None:
        """Raises an error if the dataset has another number of examples."""
        if examples != len(self.numbers):
            raise ExperimentError(f"the dataset has {examples} examples, and there are {len(self.numbers)} labels")


class _Sums:
    """Sums over rows, in float64, of products of features (with a 1 for the constant), and of these with labels."""

    def __init__(self, features: int, numbers: int) -> None:
        self.rows = 0
        self.gram = torch.zeros(features + 1, features + 1, dtype=torch.float64)
        self.cross = torch.zeros(features + 1, numbers, dtype=torch.float64)
        self.squares = torch.zeros(numbers, dtype=torch.float64)

    def add(self, features: Tensor, labels: Tensor) -> None:
        with_one = torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)
        self.rows += len(features)
        self.gram += with_one.T @ with_one
        self.cross += with_one.T @ labels
        self.squares += labels.square().sum(0)

    def weights(self, penalty: float) -> Tensor:
        """Returns the weights of ridge regression, of shape (features + 1, numbers); the constant is not penalized."""
        means = self.gram[-1] / max(self.rows, 1)
        variance = (self.gram.diagonal() - self.rows * means.square())[:-1].clamp(min=0)
        penalties = torch.full((len(self.gram),), penalty * float(variance.mean()), dtype=torch.float64)
        penalties[-1] = 0
        result: Tensor = torch.linalg.lstsq(self.gram + penalties.diag(), self.cross, driver="gelsd").solution
        return result

    def r2(self, weights: Tensor) -> Tensor:
        """Returns the unexplained and the whole variance of each number under some weights, as sums over rows."""
        unexplained = self.squares - 2 * (weights * self.cross).sum(0) + (weights * (self.gram @ weights)).sum(0)
        whole = self.squares - self.cross[-1].square() / max(self.rows, 1)
        return torch.stack([unexplained, whole])


class _AllSums:
    """The sums of all probes: for each feature, by position, those to fit on and those to score on."""

    def __init__(self, positions: list[int] | None, labels: _Labels, max_bytes: int) -> None:
        self._positions, self._labels, self._max_bytes = positions, labels, max_bytes
        self._sums: dict[tuple[str, str, int], tuple[_Sums, _Sums]] = {}
        self._bytes = 0

    def add(self, name: tuple[str, str], value: Tensor, rows: ExampleRows) -> None:
        """Adds the rows of a feature."""
        value = torch.view_as_real(value) if value.is_complex() else value
        known = rows.examples < len(self._labels.numbers)  # otherwise the dataset is too long, which is an error later
        for position in [-1] if self._positions is None else self._positions:
            chosen = known if self._positions is None else known & (rows.positions == position)
            examples, features = rows.examples[chosen], value[chosen].flatten(1)
            is_held_out = self._labels.is_held_out[examples]
            for sums, part in zip(
                self._of((*name, position), features.shape[1]), (~is_held_out, is_held_out), strict=True
            ):
                sums.add(features[part], self._labels.numbers[examples[part]])

    def _of(self, key: tuple[str, str, int], width: int) -> tuple[_Sums, _Sums]:
        if key not in self._sums:
            self._bytes += 16 * (width + 1) ** 2
            if self._bytes > self._max_bytes:
                raise ExperimentError(
                    f"the sums of products of features take more than max_bytes={self._max_bytes:,} (values of {width} "
                    "numbers need as many squared, for each path and position): ask for fewer paths or positions"
                )
            self._sums[key] = _Sums(width, self._labels.numbers.shape[1]), _Sums(width, self._labels.numbers.shape[1])
        return self._sums[key]

    def scores(self, paths: list[str], penalty: float, baselines: Sequence[str]) -> Dataset:
        """Returns the scores of all probes."""
        xarray = extra("xarray", "ridge_probes")
        positions = self._positions or [-1]
        dims = ("path", "position") if self._positions is not None else ("path",)
        coords: dict[str, Any] = {"path": paths} | ({"position": positions} if self._positions is not None else {})

        found: dict[str, tuple[tuple[str, ...], Any]] = {}
        for name in ("r2", *(each for each in _BASELINES if each in baselines)):
            of, is_shuffled = [""] if name == "bag_of_tokens" else paths, name == "shuffled_labels"
            model = "r2" if is_shuffled else name
            scores = [[self._score((model, path, at), penalty, is_shuffled) for at in positions] for path in of]
            values = np.array(scores) if self._positions is not None else np.array(scores)[:, 0]
            found[name] = (dims[1:], values[0]) if name == "bag_of_tokens" else (dims, values)
        held_out = int(self._labels.is_held_out.sum())
        return xarray.Dataset(found, coords, {"held_out": held_out, "fitted": len(self._labels.numbers) - held_out})  # type: ignore[no-any-return]

    def _score(self, key: tuple[str, str, int], penalty: float, is_shuffled: bool) -> float:
        fitted, held_out = self._sums[key]
        if not fitted.rows or held_out.rows < 2:
            return float("nan")
        unexplained, whole = held_out.r2(fitted.weights(penalty))
        own = slice(self._labels.own, None) if is_shuffled else slice(self._labels.own)
        return float(1 - unexplained[own].sum() / whole[own].sum())


# -- baselines ---------------------------------------------------------------------------------------------------------


def _with_shuffled_weights(pg: PatchableGraph, seed: int) -> PatchableGraph:
    """Returns a copy in which the entries of each parameter are in another order: the same sizes, nothing learned."""
    if any(map(is_distributed, pg.parameters())):
        raise ExperimentError(
            "the baseline 'random_weights' shuffles the weights of a copy, and the weights of this model are "
            "distributed over processes: give the other baselines, "
            "baselines=['shuffled_labels', 'bag_of_tokens']"
        )
    result, random = copy.deepcopy(pg), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in result.parameters():
            order = torch.randperm(parameter.numel(), generator=random).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return result


class _BagOfTokens:
    """Random features of the tokens of an example up to a position, without their order."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._table = torch.zeros(0, _BAG)

    def features(self, tokens: Tensor | None, rows: ExampleRows) -> Tensor:
        """Returns the features, of shape (rows, features)."""
        if tokens is None or tokens.ndim != 2 or tokens.is_floating_point():
            raise ExperimentError("the model does not take tokens: leave out the baseline 'bag_of_tokens'")
        tokens = tokens.cpu()
        if (missing := int(tokens.max()) + 1 - len(self._table)) > 0:
            self._table = torch.cat([self._table, torch.randn(missing, _BAG, generator=self._random)])
        counts = torch.arange(1, tokens.shape[1] + 1)[:, None]
        return (self._table[tokens].cumsum(1) / counts)[rows.kept]
