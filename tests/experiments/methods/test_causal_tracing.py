"""Causal tracing against plain forward hooks."""

from __future__ import annotations

import json
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
from tests.experiments.hooked import GPT2_OUTPUT, edited, gpt2, llama, outputs, putting

CLEAN = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
CORRUPTED = torch.tensor([[3, 1, 8, 1, 5, 9, 2]])
METRIC = LogitDifference(4, 8)
HOSTS = {"gpt2": (gpt2, "transformer.h", GPT2_OUTPUT), "llama": (llama, "model.layers", "output")}
PATH, PATH_1, PATH_2 = (f"transformer.h_{number}.{GPT2_OUTPUT}" for number in range(3))


def traced_by_hand(model: nn.Module, names: list[str], clean: Tensor, corrupted: Tensor, metric: Any) -> np.ndarray:
    values = outputs(model, names, lambda: model(clean))
    rows = []
    for name, value in zip(names, values, strict=True):
        for position in range(clean.shape[1]):
            with torch.no_grad(), edited(model, {name: putting(value, (slice(None), position))}):
                rows.append(metric(model(corrupted)).item())
    return np.array(rows).reshape(len(names), -1)


@pytest.fixture(scope="module", params=HOSTS)
def host(request: pytest.FixtureRequest) -> tuple[nn.Module, PatchableGraph, str, str]:
    """A model, its graph, where its layers are, and which value of a layer is its output."""
    make, layers, output = HOSTS[request.param]
    model = make()
    return model, PatchableGraph(model, CLEAN[:, :5]), layers, output


@pytest.mark.parametrize(("batch", "tolerance"), [(None, 0.0), ("auto", 2e-6)])
@pytest.mark.parametrize("part", ["", ".mlp"])
def test_equals_hooks(host: Any, part: str, batch: Any, tolerance: float) -> None:
    model, pg, layers, output = host
    names = [f"{layers}.{number}{part}" for number in range(3)]
    paths = [f"{layers}_{number}{part}.{'output' if part else output}" for number in range(3)]
    found = causal_trace(pg, CLEAN, CORRUPTED, paths, None, METRIC, batch=batch, progress=False)
    assert found.dims == ("path", "position")
    assert found.coords["path"].values.tolist() == paths
    assert found.coords["position"].values.tolist() == list(range(7))
    expected = traced_by_hand(model, names, CLEAN, CORRUPTED, METRIC)
    np.testing.assert_allclose(found.values, expected, atol=tolerance, rtol=0)
    assert np.ptp(expected) > 0.1
    with torch.no_grad():
        assert found.attrs["clean"] == METRIC(model(CLEAN)).item()
        assert found.attrs["corrupted"] == METRIC(model(CORRUPTED)).item()
    json.dumps(found.attrs)


def test_positions_are_chosen_and_counted_from_the_end() -> None:
    pg = PatchableGraph(gpt2(), CLEAN)
    paths = [PATH, pg.graph.transformer.h_2.attn.c_proj.x]

    def trace(positions: Any) -> Any:
        return causal_trace(pg, CLEAN, CORRUPTED, paths, positions, METRIC, progress=False, batch=None)

    whole = trace(None)
    some = trace([-1, 2])
    assert some.coords["position"].values.tolist() == [6, 2]
    assert (some.values == whole.values[:, [6, 2]]).all()
    assert (trace(range(1, 3)).values == whole.values[:, 1:3]).all()
    assert (trace(torch.tensor([0])).values == trace(0).values).all()


@pytest.mark.parametrize("window", [2, 3, 10])
def test_window_restores_neighbouring_layers_as_rome_does(window: int) -> None:
    model = gpt2(layers=5)
    names = [f"transformer.h.{number}.mlp" for number in range(5)]
    paths = [f"transformer.h_{number}.mlp.output" for number in range(5)]
    pg = PatchableGraph(model, CLEAN)
    found = causal_trace(pg, CLEAN, CORRUPTED, paths, 2, METRIC, window=window, progress=False, batch=None).values[:, 0]
    values = outputs(model, names, lambda: model(CLEAN))
    for layer in range(5):
        # As in ROME's own code.
        near = range(max(0, layer - window // 2), min(5, layer - (-window // 2)))
        edits = {names[i]: putting(values[i], (slice(None), 2)) for i in near}
        with torch.no_grad(), edited(model, edits):
            assert found[layer] == METRIC(model(CORRUPTED)).item()


@pytest.mark.parametrize("settings", [{"scale": 0.5}, {}], ids=["scale", "rome"])
def test_noise_equals_hooks(settings: dict[str, float]) -> None:
    model = gpt2()
    pg = PatchableGraph(model, CLEAN)
    paths, names = ["transformer.wte.output", PATH_1], ["transformer.wte", "transformer.h.1"]
    noise = Noise(pg.graph.transformer.wte.output, positions=[1, -5], samples=3, seed=7, **settings)
    found = causal_trace(pg, CLEAN, noise, paths, [2, 6], METRIC, progress=False)
    assert found.dims == ("path", "position")

    values = outputs(model, names, lambda: model(CLEAN))
    deviation = values[0].std().item()
    scale = settings.get("scale", 3 * deviation)
    generator = torch.Generator().manual_seed(7)
    draws = [torch.randn(1, 2, 16, generator=generator) * scale for _ in range(3)]
    expected, corrupted = np.zeros((3, 2, 2)), []
    for sample, draw in enumerate(draws):
        noisy = values[0].clone()
        noisy[:, [1, 2]] += draw
        with torch.no_grad(), edited(model, {"transformer.wte": putting(noisy)}):
            corrupted.append(METRIC(model(CLEAN)).item())
            for column, position in enumerate([2, 6]):
                index = (slice(None), position)
                with edited(model, {"transformer.wte": putting(values[0], index)}):  # after the noise
                    expected[sample, 0, column] = METRIC(model(CLEAN)).item()
                with edited(model, {"transformer.h.1": putting(values[1], index)}):
                    expected[sample, 1, column] = METRIC(model(CLEAN)).item()
    np.testing.assert_allclose(found.values, expected.mean(0), atol=2e-6, rtol=0)
    assert found.attrs["corrupted"] == pytest.approx(np.mean(corrupted), abs=2e-6)
    assert abs(found.attrs["corrupted"] - found.attrs["clean"]) > 0.01


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
