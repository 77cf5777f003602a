"""What experiments give can be drawn as it is: the picture says what it compares with, also after loading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from torch import Tensor

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.experiments import (
    LogitDifference,
    attribute,
    causal_trace,
    load_result,
    plot_heatmap,
    save_result,
    show_heatmap,
    top_scores,
)
from tests.tiny_models import gpt2

METRIC = LogitDifference(3, 5)
PATHS = ["transformer.h_0.mlp.output", "transformer.h_1.mlp.output"]


@pytest.fixture(autouse=True)
def figures() -> Iterator[None]:
    yield
    pyplot.close("all")


@pytest.fixture(scope="module")
def runs() -> tuple[PatchableGraph, Tensor, Tensor]:
    """Returns a graph, clean inputs and corrupted ones."""
    model = gpt2(vocabulary=20, n_positions=8)
    clean = torch.randint(0, 20, (1, 6))
    corrupted = clean.clone()
    corrupted[0, 2] = (clean[0, 2] + 1) % 20
    return PatchableGraph(model, clean), clean, corrupted


def label(ax: pyplot.Axes) -> str:
    return " ".join(ax.collections[0].colorbar.ax.get_ylabel().split())


@pytest.mark.parametrize("suffix", [None, "nc"])
def test_a_causal_trace(runs: tuple[PatchableGraph, Tensor, Tensor], tmp_path: Path, suffix: str | None) -> None:
    result = causal_trace(*runs, PATHS, None, METRIC, progress=False)
    if suffix is not None:
        save_result(result, tmp_path / f"trace.{suffix}")
        result = load_result(tmp_path / f"trace.{suffix}")
    tokens = [f" {token}" for token in runs[1][0].tolist()]
    ax = plot_heatmap(result, tokens=tokens)
    low, high = ax.collections[0].get_clim()
    assert (low + high) / 2 == pytest.approx(result.attrs["corrupted"])
    assert label(ax) == f"{METRIC.name} (no color: corrupted {result.attrs['corrupted']:.4g})"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == [f"␣{token}" for token in runs[1][0].tolist()]
    assert np.array_equal(ax.collections[0].get_array(), result.values)
    assert show_heatmap(result, tokens=tokens).heatmap["center"] == f"corrupted {result.attrs['corrupted']:.4g}"


def test_attribution(runs: tuple[PatchableGraph, Tensor, Tensor]) -> None:
    pg, clean, corrupted = runs
    result = attribute(pg, METRIC, clean, corrupted)
    strongest = np.sort(np.abs(result.values[np.isfinite(result.values)]))[::-1][:5]
    # Nearly equal scores keep their order.
    assert np.abs(top_scores(result, 5, distinct=False)).tolist() == pytest.approx(strongest.tolist(), rel=1e-5)
    ax = plot_heatmap(attribute(pg, METRIC, clean, corrupted, paths=PATHS, positions=True))
    low, high = ax.collections[0].get_clim()
    assert low == -high
    assert label(ax) == f"score ({METRIC.name})"
