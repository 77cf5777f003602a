"""Causal tracing against plain forward hooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import ExperimentError, PatchableGraph, UnknownPathError
from graphpatch_notebook.errors import SweepInterrupted
from graphpatch_notebook.experiments import (
    LogitDifference,
    Noise,
    Probability,
    ablate,
    attribute,
    causal_trace,
    path_patch,
)
from tests.experiments.hooked import GPT2_OUTPUT, edited, gpt2, outputs, putting

CLEAN = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
CORRUPTED = torch.tensor([[3, 1, 8, 1, 5, 9, 2]])
METRIC = LogitDifference(4, 8)
PATH, PATH_1, PATH_2 = (f"transformer.h_{number}.{GPT2_OUTPUT}" for number in range(3))


@pytest.mark.parametrize("window", [2, 3])
def test_window_restores_neighbouring_layers_as_rome_does(window: int) -> None:
    model = gpt2(layers=5)
    names = [f"transformer.h.{number}.mlp" for number in range(5)]
    paths = [f"transformer.h_{number}.mlp.output" for number in range(5)]
    pg = PatchableGraph(model, CLEAN)
    traced = causal_trace(pg, CLEAN, CORRUPTED, paths, 2, METRIC, window=window, progress=False, batch=None)
    found = traced.values[:, 0]
    values = outputs(model, names, lambda: model(CLEAN))
    assert [traced.attrs[run] for run in ("clean", "corrupted")] == [
        METRIC(model(ids)).item() for ids in (CLEAN, CORRUPTED)
    ]
    for layer in range(5):
        # As in ROME's own code.
        near = range(max(0, layer - window // 2), min(5, layer - (-window // 2)))
        edits = {names[i]: putting(values[i], (slice(None), 2)) for i in near}
        with torch.no_grad(), edited(model, edits):
            assert found[layer] == METRIC(model(CORRUPTED)).item()


def test_noise_is_three_deviations_unless_it_has_a_scale() -> None:
    """As in ROME; exercise 13 compares noise of a scale with hooks."""
    model = gpt2()
    pg, name = PatchableGraph(model, CLEAN), "transformer.wte.output"
    scale = 3 * model.transformer.wte(CLEAN).std().item()
    noises = [Noise(name, positions=[1, -5], samples=2, seed=7, scale=each) for each in (None, scale)]
    found = [causal_trace(pg, CLEAN, noise, [PATH_1, name], [2, 6], METRIC, progress=False) for noise in noises]
    np.testing.assert_allclose(found[0].values, found[1].values, atol=1e-5)
    assert abs(found[0].attrs["corrupted"] - found[0].attrs["clean"]) > 0.01


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return PatchableGraph(gpt2(), CLEAN)


@pytest.mark.parametrize(
    "changes",
    [
        {"corrupted": CORRUPTED[:, :5]},
        {"paths": []},
        {"paths": [PATH, PATH]},
        {"paths": ["transformer.h_0.mlp.c_fc.weight"]},
        {"positions": 7},
        {"positions": -8},
        {"positions": []},
        {"positions": "last"},
        {"positions": [0.5]},
        {"paths": None},
        {"paths": CLEAN},
        {"metric": lambda output: None},
        {"metric": lambda output: output},
        {"window": 0},
        {"corrupted": CLEAN, "normalize": True},
        {"corrupted": Noise("transformer.emb.output")},
        {"corrupted": Noise("input_ids", scale=1.0)},
        {"corrupted": Noise("transformer.wte.output", positions=9)},
    ],
)
def test_invalid_traces_are_errors(pg: PatchableGraph, changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"clean": CLEAN, "corrupted": CORRUPTED, "paths": [PATH], "positions": None}
    with pytest.raises((ExperimentError, UnknownPathError)):
        causal_trace(pg, **(given | {"metric": METRIC, "progress": False} | changes))


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("something ran")


def calls_of_experiments(pg: PatchableGraph, ids: Any, metric: Any) -> list[Any]:
    return [
        lambda: pg.sweep({"path": [PATH]}, lambda path: {}, ids, metric=metric),
        lambda: causal_trace(pg, ids, ids, [PATH], None, metric),
        lambda: ablate(pg, [PATH], input_ids=ids, metric=metric),
        lambda: path_patch(pg, PATH, None, ids, ids, metric),
        lambda: attribute(pg, metric, CLEAN, ids),
    ]


@pytest.mark.parametrize("metric", [Probability, nn.CrossEntropyLoss, None, "loss", CLEAN])
def test_invalid_metrics_are_errors_before_anything_runs(metric: Any) -> None:
    model = gpt2()
    pg = PatchableGraph(model, CLEAN)
    model.register_forward_pre_hook(never)
    for call in calls_of_experiments(pg, CORRUPTED, metric):
        with pytest.raises(ExperimentError, match="metric="):
            call()


@pytest.mark.parametrize("corrupted", [CORRUPTED, Noise("transformer.wte.output", samples=2)], ids=["tokens", "noise"])
def test_an_interrupted_trace_is_labeled_as_the_whole_one(pg: PatchableGraph, corrupted: Any) -> None:
    left = 10

    def metric(output: Any) -> Tensor:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return METRIC(output)

    paths = ["transformer.wte.output", PATH_2]
    settings: dict[str, Any] = {"normalize": True, "progress": False, "batch": None}
    whole = causal_trace(pg, CLEAN, corrupted, paths, None, METRIC, **settings)
    with pytest.raises(SweepInterrupted) as stopped:
        causal_trace(pg, CLEAN, corrupted, paths, None, metric, **settings)
    found = stopped.value.result
    assert found.dims == whole.dims
    assert found.attrs["clean"] == whole.attrs["clean"]
    is_done = ~np.isnan(found.values)
    assert is_done.any() == (corrupted is CORRUPTED)
    assert not is_done.all()
    assert (found.values[is_done] == whole.values[is_done]).all()
