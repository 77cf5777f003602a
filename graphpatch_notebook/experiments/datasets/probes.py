"""Linear probes of stored values, by scikit-learn, with a direction to steer along."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook.errors import ExperimentError, extra
from graphpatch_notebook.experiments.datasets.store import ActivationStore

if TYPE_CHECKING:
    from xarray import Dataset

Kind: TypeAlias = Literal["logistic", "ridge", "difference_of_means"]
_Array: TypeAlias = "np.ndarray[Any, Any]"
_RESAMPLES = 1000
"""How many resamples of the held-out groups an interval is from."""
_DRAWS = 5
"""How many probes are fitted to labels of other examples."""


@dataclass(frozen=True, eq=False)
class Probe:
    """A linear probe of one value.

    Attributes:
        weights: Of the shape of a row of the value, float32. `(row * weights).sum() + bias` is what the probe says:
            above 0 for the second class, or the number.
        bias: The constant.
        direction: What to add to a row to go from the first class to the second, of that shape: along the weights, as
            far as the means of the classes are apart there. For numbers, what raises the probe's number by one.

    Example:
        >>> probe = Probe(weights=torch.tensor([2.0, 0.0]), bias=-1.0, direction=torch.tensor([0.5, 0.0]))
        >>> ((torch.ones(2) + probe.direction) * probe.weights).sum() + probe.bias
        tensor(2.)
    """

    weights: Tensor
    bias: float
    direction: Tensor


class Probes(Mapping[Any, Probe]):
    """The probes of `probes` by path, or by (path, position) where positions have probes of their own.

    Attributes:
        scores: A Dataset over `path`, and `position`: `accuracy` and `auc` for classes, `r2` for numbers, on groups
            that are held out; `low` and `high`, the 95% interval of the first by resampling these groups;
            `random_labels`, the mean of the first for five probes that were fitted to labels of other examples.

    Example:
        >>> import tempfile
        >>> from graphpatch_notebook import PatchableGraph
        >>> from graphpatch_notebook.experiments import record_to
        >>> x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Tanh()), x[:2])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = probes(record_to(pg, folder, "sub_0.output", x, batch_size=50), x[:, 0], "ridge")
        >>> list(found), list(found.scores)
        (['sub_0.output'], ['r2', 'low', 'high', 'random_labels'])
    """

    def __init__(self, found: Mapping[Any, Probe], scores: Dataset) -> None:
        self._found, self.scores = found, scores

    def __getitem__(self, key: Any) -> Probe:
        return self._found[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"<{len(self)} probes>\n{self.scores.to_dataframe().round(3)}"


def probes(
    store: ActivationStore,
    labels: Any,
    kind: Kind = "logistic",
    *,
    positions: Sequence[int] | None = None,
    penalty: float = 1.0,
    held_out: float = 0.25,
    groups: Any = None,
    seed: int = 0,
) -> Probes:
    """Returns linear probes of each value in a store, fitted by scikit-learn, with their scores on held-out groups.

    The rows of a value at one position, or at all, are in memory at once.

    Args:
        store: What `record_to` returned.
        labels: One label for each example: two classes (texts, integers or booleans, in sorted order), or for
            `kind="ridge"` finite numbers.
        kind: `"logistic"`: logistic regression. `"ridge"`: ridge regression. `"difference_of_means"`: the weights are
            the difference of the means of the classes, and the boundary is half-way.
        positions: The positions that have a probe of their own, such as `[-1]`: negative ones count from the end of
            each example. `None` for one probe over all positions.
        penalty: The penalty on the weights of standardized features: scikit-learn's `1 / C`, or `alpha`.
        held_out: The part of the groups that is held out.
        groups: One for each example: examples of a group, such as of one template, are held out together. By default,
            each example is a group.
        seed: The seed of the held-out groups, the other labels and the resamples.

    Raises:
        ExperimentError: Labels or groups do not fit the store or the kind, a position is not stored, a class is missing
            in one of both parts, or scikit-learn is not installed.

    Example:
        >>> import tempfile, torch
        >>> from graphpatch_notebook import AddPatch, PatchableGraph
        >>> from graphpatch_notebook.experiments import record_to
        >>> x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
        >>> pg = PatchableGraph(torch.nn.Sequential(torch.nn.Tanh()), x[:2])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = probes(record_to(pg, folder, "sub_0.output", x, batch_size=50), x[:, 0] > 0)
        >>> found.scores.accuracy.values.round(1).tolist()
        [1.0]
        >>> steer = {"sub_0.output": AddPatch(value=found["sub_0.output"].direction)}

    Sources:
        Alain and Bengio, "Understanding intermediate layers using linear classifier probes" (2016); labels of other
        examples as in Hewitt and Liang, "Designing and interpreting probes with control tasks" (2019); means of classes
        as in Marks and Tegmark, "The geometry of truth" (2023).
    """
    model_selection, xarray = extra("sklearn.model_selection", "a probe"), extra("xarray", "the scores of probes")
    given, of_groups = _checked(store, labels, groups, kind)
    random = np.random.default_rng(seed)
    others = [random.permutation(given) for _ in range(_DRAWS)]
    split = model_selection.GroupShuffleSplit(1, test_size=held_out, random_state=seed)
    _, held = next(split.split(of_groups, groups=of_groups))
    keys: list[Any] = list(store) if positions is None else [(path, place) for path in store for place in positions]
    found, rows = {}, []
    for key in keys:
        values, examples = _rows(store, *(key if positions is not None else (key, None)))
        is_held = np.isin(examples, held)
        probe = _fitted(values[~is_held], given[examples[~is_held]], kind, penalty)
        found[key] = probe
        random_probes = (_fitted(values[~is_held], other[examples[~is_held]], kind, penalty) for other in others)
        said = [_said(each, values[is_held]) for each in (probe, *random_probes)]
        rows.append(_scores(said, given[examples[is_held]], of_groups[examples[is_held]], kind, random))
    coords: dict[str, Any] = {"path": list(store)} | ({} if positions is None else {"position": list(positions)})
    shape = [len(values) for values in coords.values()]
    arrays = {name: (list(coords), np.reshape([row[name] for row in rows], shape)) for name in rows[0]}
    return Probes(found, xarray.Dataset(arrays, coords, {"kind": kind, "held_out": len(held)}))


def _checked(store: ActivationStore, labels: Any, groups: Any, kind: str) -> tuple[_Array, _Array]:
    """Returns labels as 0 and 1, or as numbers, and the group of each example."""
    if kind not in ("logistic", "ridge", "difference_of_means"):
        raise ExperimentError(f"kind must be 'logistic', 'ridge' or 'difference_of_means', not {kind!r}")
    given, of_groups = (np.asarray(each) for each in (labels, range(store.examples) if groups is None else groups))
    if not given.shape == of_groups.shape == (store.examples,):
        raise ExperimentError(f"give one label and one group for each of the {store.examples} examples")
    classes, numbers = np.unique(given, return_inverse=True)
    if kind == "ridge":
        numbers = given.astype(np.float64)
    if not np.isfinite(numbers).all() or (kind != "ridge" and len(classes) != 2):
        raise ExperimentError(f"kind={kind!r} takes {'finite numbers' if kind == 'ridge' else 'two classes'} as labels")
    return numbers, of_groups


def _rows(store: ActivationStore, path: str, position: int | None) -> tuple[Tensor, _Array]:
    """Returns the rows of a value, at one position or at all, and the example of each."""
    stored = store[path]
    try:
        chosen = stored.is_among(position=position)
    except ExperimentError as problem:
        raise ExperimentError(f"{path!r}: {problem}") from None
    return stored[chosen].float(), stored.example[chosen]


def _fitted(values: Tensor, labels: _Array, kind: str, penalty: float) -> Probe:
    linear = extra("sklearn.linear_model", "a probe")
    rows, shape = values.flatten(1).double().numpy(), values.shape[1:]
    if kind != "ridge" and len(np.unique(labels)) < 2:
        raise ExperimentError("a class has no example to fit on: hold fewer out, or give larger groups to one class")
    if kind == "difference_of_means":
        ends = [rows[labels == number].mean(0) for number in (0, 1)]
        weights = ends[1] - ends[0]
        bias = -weights @ (ends[0] + ends[1]) / 2
    else:
        scaler = extra("sklearn.preprocessing", "a probe").StandardScaler()
        model = linear.LogisticRegression(C=1 / penalty, max_iter=1000) if kind == "logistic" else linear.Ridge(penalty)
        model.fit(scaler.fit_transform(rows), labels)
        weights = model.coef_.reshape(-1) / scaler.scale_
        bias = np.ravel(model.intercept_)[0] - weights @ scaler.mean_
    apart = 1.0 if kind == "ridge" else np.diff([(rows[labels == number] @ weights).mean() for number in (0, 1)])[0]
    direction = weights * apart / max(weights @ weights, np.finfo(float).tiny)
    made = (torch.from_numpy(each).float().reshape(shape) for each in (weights, direction))
    return Probe(next(made), float(bias), next(made))


def _said(probe: Probe, values: Tensor) -> _Array:
    return np.asarray(values.flatten(1).double() @ probe.weights.double().flatten() + probe.bias)


def _scores(said_by: list[_Array], labels: _Array, groups: _Array, kind: str, random: Any) -> dict[str, float]:
    """Returns the scores of a probe, and of those fitted to other labels, by what they say of held-out rows."""
    said, *of_others = said_by
    metrics = extra("sklearn.metrics", "a probe")
    if kind == "ridge":
        name, score = "r2", metrics.r2_score
    else:
        name, score = "accuracy", lambda labels, said: np.mean(labels == (said > 0))
        if len(np.unique(labels)) < 2:
            raise ExperimentError("a class has no example that is held out: hold more out")
    members = [np.flatnonzero(groups == each) for each in np.unique(groups)]
    picks = random.integers(len(members), size=(_RESAMPLES, len(members)))
    again = [score(labels[rows], said[rows]) for rows in (np.concatenate([members[n] for n in pick]) for pick in picks)]
    low, high = np.nanquantile(again, [0.025, 0.975])
    found = {
        name: score(labels, said),
        "low": low,
        "high": high,
        "random_labels": np.mean([score(labels, each) for each in of_others]),
    }
    return found | ({} if kind == "ridge" else {"auc": metrics.roc_auc_score(labels, said)})
