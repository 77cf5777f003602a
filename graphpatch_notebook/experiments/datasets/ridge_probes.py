"""Linear probes: what can be read off each value of a model, by ridge regression, in one pass over a dataset.

A probe needs the sums of products of features with features (the Gram matrix) and with labels only, which are added up
batch by batch: one set for examples to fit on, and one for examples that are held out to score on. So the score of each
probe is exact, and no activations are kept.

Sources: Alain and Bengio, "Understanding intermediate layers using linear classifier probes" (2016); shuffled labels as
in Hewitt and Liang, "Designing and interpreting probes with control tasks" (2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError
from graphpatch_notebook.experiments.datasets.batches import ExampleRows, RowReader, numbered, read_batch
from graphpatch_notebook.experiments.engine.inputs import Examples, batches_of
from graphpatch_notebook.lazy_names import extra
from graphpatch_notebook.patchable_graph import PatchableGraph
from graphpatch_notebook.patching.model_state import runs_where_the_model_is

if TYPE_CHECKING:
    from xarray import Dataset


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
    batch_size: int | None = None,
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
        batch_size: As of `record_to`.
        seed: The seed of what is random: held-out examples and shuffled labels.

    Returns:
        A Dataset with `r2`, and as a baseline `shuffled_labels`, the same probes on labels of other examples, over
        `path`, and over `position` if there are several. `result["r2"]` colors the tree in the browser.

    Raises:
        UnknownPathError: A path does not exist, or a pattern matches nothing; nothing ran.
        ExperimentError: A value has no positions but `positions` is given; labels do not fit the dataset; too few
            examples are held out.

    Example:
        >>> import torch
        >>> from graphpatch_notebook import PatchableGraph
        >>> x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softplus()), x[:2])
        >>> result = ridge_probes(pg, ["input", "sub_0.output"], x, x.sum(1), batch_size=50)
        >>> result["r2"].values.round(1).tolist()
        [1.0, 0.8]
    """
    given: Any = positions
    if given is not None and (not isinstance(given, Sequence) or min(given, default=0) < 0):
        raise ExperimentError(
            "positions= is a list of the positions that have a probe of their own, counted from zero, such as [0, 5]; "
            "`probes` of a store takes negative ones"
        )
    reader = RowReader(pg, patterns, positions)
    without = reader.without_positions
    if without and positions is not None:
        raise ExperimentError(f"{without[0]!r} has no positions: leave it out, or leave out positions=")
    sums, count = _AllSums(positions, labels, held_out, seed), 0
    for first, batch in numbered(batches_of(pg, dataset, batch_size)):
        rows, values = read_batch(reader, None, pg, (first, batch))
        for path, value in values.items():
            sums.add(path, value, ExampleRows.whole(first, len(value)) if path in without else rows)
        count = first + len(rows.kept)
    if count != len(sums.numbers):
        raise ExperimentError(f"the dataset has {count} examples, and there are {len(sums.numbers)} labels")
    dims, paths = ("path",) if positions is None else ("path", "position"), list(reader.by_path)
    found = {name: (dims, sums.scores(paths, penalty, own)) for name, own in (("r2", True), ("shuffled_labels", False))}
    coords = {"path": paths} if positions is None else {"path": paths, "position": sums.positions}
    held = int(sums.is_held_out.sum())
    return extra("xarray", "ridge_probes").Dataset(found, coords, {"held_out": held, "fitted": count - held})  # type: ignore[no-any-return]


# -- sums --------------------------------------------------------------------------------------------------------------


def _numbers_of(labels: Any) -> Tensor:
    """Returns labels as numbers, of shape (examples, numbers): of classes, one for each."""
    array = np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    if array.dtype.kind != "f" and array.ndim == 1:
        array = (array[:, None] == np.unique(array)).astype(float)
    if array.dtype.kind != "f" or array.ndim not in (1, 2) or not len(array) or not np.isfinite(array).all():
        raise ExperimentError(
            f"labels are finite numbers of the shape (examples) or (examples, numbers), or classes, not {array.shape}"
        )
    return torch.from_numpy(np.array(array, dtype=np.float64).reshape(len(array), -1))


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
    """The sums of all probes: for each feature, by position, those to fit on and those to score on.

    Attributes:
        positions: The positions; -1 for all.
        numbers: The labels, and then those of other examples, of shape (examples, 2 * numbers).
        is_held_out: By example.
    """

    def __init__(self, positions: Sequence[int] | None, labels: Any, held_out: float, seed: int) -> None:
        self.positions = [-1] if positions is None else sorted(set(positions))
        own, random = _numbers_of(labels), torch.Generator().manual_seed(seed)
        count = len(own)
        order, shuffled = (torch.randperm(count, generator=random) for _ in range(2))
        self.numbers, self._own = torch.cat([own, own[shuffled]], 1), own.shape[1]
        self.is_held_out = torch.isin(torch.arange(count), order[: round(held_out * count)])
        if self.is_held_out.sum() < 2 or self.is_held_out.all():
            raise ExperimentError(
                f"held_out={held_out} of {count} examples leaves too few to fit on, or fewer than 2 to score on"
            )
        self._sums: dict[tuple[str, int], list[_Sums]] = {}

    def add(self, path: str, value: Tensor, rows: ExampleRows) -> None:
        """Adds the rows of a feature."""
        value = torch.view_as_real(value) if value.is_complex() else value
        known = rows.examples < len(self.numbers)  # otherwise the dataset is too long, which is an error later
        for position in self.positions:
            chosen = known & (rows.positions == position) if position >= 0 else known
            examples, features = rows.examples[chosen], value[chosen].flatten(1)
            if (key := (path, position)) not in self._sums:
                self._sums[key] = [_Sums(features.shape[1], self.numbers.shape[1]) for _ in range(2)]
            is_held_out = self.is_held_out[examples]
            for sums, part in zip(self._sums[key], (~is_held_out, is_held_out), strict=True):
                sums.add(features[part], self.numbers[examples[part]])

    def scores(self, paths: Sequence[str], penalty: float, is_own: bool) -> Any:
        """Returns the scores of probes by path, and by position if there are several, for own or shuffled labels."""
        columns = slice(self._own) if is_own else slice(self._own, None)
        found = np.full((len(paths), len(self.positions)), np.nan)
        for row, path in enumerate(paths):
            for column, position in enumerate(self.positions):
                fitted, held_out = self._sums[path, position]
                if fitted.rows and held_out.rows > 1:
                    unexplained, whole = held_out.r2(fitted.weights(penalty))[:, columns].sum(1)
                    found[row, column] = 1 - unexplained / whole
        return found[:, 0] if self.positions == [-1] else found
