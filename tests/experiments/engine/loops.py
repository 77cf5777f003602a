"""The oracle of sweeps: a plain loop over patch contexts, and what it takes to compare a sweep with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from graphpatch_notebook import PatchableGraph
from tests.zoo import Call
from tests.zoo.values import flatten


class Counts:
    """Numbers by key that a model may add to by a call: not a part of its state, as a dict or a list would be."""

    def __init__(self) -> None:
        self.by_key: dict[Any, int] = {}

    def __call__(self, key: Any, number: int = 1) -> None:
        self.by_key[key] = self.by_key.get(key, 0) + number


PatchMaps: TypeAlias = Sequence[Mapping[Any, Any]]
Metric: TypeAlias = Callable[[Any], Any]

TOLERANCE = 2e-6
"""By how much numbers of rows may differ from those of a loop, in float32; relative to them where they are beyond 1."""

LARGEST = 4096


@dataclass(frozen=True)
class Looped:
    """What a loop gave.

    Attributes:
        baseline: What the metric gave without patches.
        values: What it gave for each cell; `None` where the cell raised.
        errors: The class of what a cell raised, `None` for the others.
    """

    baseline: np.ndarray
    values: list[np.ndarray | None]
    errors: list[str | None]


def looped(
    pg: PatchableGraph,
    maps: PatchMaps,
    make_call: Callable[[], Call],
    metric: Metric,
    *,
    unpatched: PatchableGraph | None = None,
) -> Looped:
    """Returns what each cell gives in a context of its own, one after the other.

    Args:
        pg: What the cells run on.
        maps: The cells.
        make_call: Makes the inputs anew.
        metric: What is measured.
        unpatched: What the run without patches is made on, if that would change `pg`.
    """
    state = torch.get_rng_state(), random.getstate()
    with torch.no_grad():
        baseline = numbers(metric(make_call().run(unpatched or pg)))
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    values: list[np.ndarray | None] = []
    errors: list[str | None] = []
    for patches in maps:
        try:
            with torch.no_grad(), pg.patch(patches):
                value, error = numbers(metric(make_call().run(pg))), None
        except Exception as raised:  # of whatever kind the patched model raises
            value, error = None, type(raised).__name__
        values.append(value)
        errors.append(error)
    return Looped(baseline, values, errors)


def numbers(value: Any) -> np.ndarray:
    """Returns what a metric gave as an array."""
    if isinstance(value, Mapping):
        return np.array([float(item) for item in value.values()])
    return value.detach().double().numpy().copy() if isinstance(value, Tensor) else np.array(value, dtype=np.float64)


def swept(pg: PatchableGraph, maps: PatchMaps, call: Call, metric: Metric, **options: Any) -> Any:
    """Returns the `DataArray` of a sweep over these patch maps."""
    axes = {"cell": range(len(maps))}
    return pg.sweep(axes, maps.__getitem__, *call.args, metric=metric, progress=False, **options, **call.kwargs)


def disagreement(expected: Looped, found: Any, tolerance: float = 0.0, sizes: Sequence[int] = ()) -> str | None:
    """Returns in words where a sweep differs from a loop, or `None`.

    Args:
        expected: What the loop gave.
        found: What the sweep gave.
        tolerance: By how much numbers may differ; 0 for not in a bit.
        sizes: How the numbers of the metric are portioned: differences count relative to the largest of a portion.
    """
    failed = {error["cell"]["cell"]: error["error"] for error in found.attrs["errors"]}
    if (problem := differing(expected.baseline, np.array(found.attrs["baseline"]), tolerance, sizes)) is not None:
        return f"the baseline: {problem}"
    for number, (value, error) in enumerate(zip(expected.values, expected.errors, strict=True)):
        if value is None:
            if not failed.get(number, "none").startswith(str(error)):
                return f"cell {number}: raised {error} in the loop, but in the sweep {failed.get(number)}"
        elif number in failed:
            return f"cell {number}: failed in the sweep only, {failed[number]}"
        elif (problem := differing(value, found.values[number], tolerance, sizes)) is not None:
            return f"cell {number}: {problem}"
    return None


def differing(expected: np.ndarray, found: np.ndarray, tolerance: float, sizes: Sequence[int] = ()) -> str | None:
    """Returns in words where arrays differ by more than a tolerance, relative to what is largest in each portion."""
    if expected.shape != found.shape:
        return f"shape {found.shape} is not {expected.shape}"
    expected, found = expected.ravel(), found.ravel()
    both = np.where(np.isfinite(expected), expected, 0)
    scale = np.full(expected.shape, max(1.0, np.abs(both).max(initial=0)))
    if sum(sizes) == len(expected):
        edges = np.cumsum(sizes)[:-1]
        scale = np.concatenate(
            [np.full(len(part), max(1.0, np.abs(part).max(initial=0))) for part in np.split(both, edges)]
        )
    with np.errstate(invalid="ignore"):
        is_same = (expected == found) | (np.isnan(expected) & np.isnan(found))
        is_same |= np.abs(expected - found) <= tolerance * scale
    if is_same.all():
        return None
    index = int(np.argmin(is_same))
    wrong = np.abs(expected - found)
    return (
        f"{(~is_same).sum()} of {len(expected)} numbers differ, by up to {np.nanmax(wrong):.3g} "
        f"(of up to {scale[index]:.3g}), first {expected[index]!r} is not {found[index]!r} at {index}"
    )


@dataclass(frozen=True)
class Everything:
    """A metric that reads all numbers in an output, and gives as many for each output."""

    size: int

    def __call__(self, output: Any) -> Tensor:
        values = torch.cat([torch.zeros(0, dtype=torch.float64), *leaves_of(output)])
        size = max(1, min(self.size, LARGEST))
        if len(values) == size:
            return values
        turns = -(-max(1, len(values)) // size)
        values = torch.cat([values, values.new_zeros(turns * size - len(values))]).view(turns, size)
        # Each turn with a weight of its own, or what goes up in one and down in another would not be seen.
        return (values * torch.arange(1, turns + 1, dtype=torch.float64).cos()[:, None]).sum(0)


def leaves_of(output: Any) -> list[Tensor]:
    """Returns the numbers of each tensor and each number inside of an output."""
    found = []
    for _, leaf in flatten(output):
        if isinstance(leaf, Tensor):
            dense = leaf.detach() if leaf.layout == torch.strided else leaf.detach().to_dense()
            plain = dense.as_subclass(Tensor)
            plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
            found.append(plain.double().flatten())
        elif isinstance(leaf, (bool, int, float)):
            found.append(torch.tensor([leaf], dtype=torch.float64))
    return found


def last_logits(output: Any) -> Tensor:
    """A metric that reads the last position only."""
    return output.logits[:, -1].flatten()
