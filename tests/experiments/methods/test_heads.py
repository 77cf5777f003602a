"""Heads one by one, by their names: against plain hooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.experiments import (
    LogitDifference,
    attribute,
    causal_trace,
    top_scores,
)
from tests.experiments.hooked import edited, gpt2, llama, outputs, putting

CLEAN = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
CORRUPTED = torch.tensor([[3, 1, 8, 1, 5, 9, 2]])
METRIC = LogitDifference(4, 8)
HOSTS = {
    "gpt2": (gpt2, "transformer.h_{}.attn.c_proj.x", "transformer.h.{}.attn.c_proj"),
    "llama": (llama, "model.layers_{}.self_attn.o_proj.input", "model.layers.{}.self_attn.o_proj"),
}
BATCHES = pytest.mark.parametrize(("batch", "tolerance"), [(None, 0.0), ("auto", 2e-6)])


@pytest.fixture(scope="module", params=HOSTS)
def host(request: pytest.FixtureRequest) -> tuple[nn.Module, PatchableGraph, list[str], list[str]]:
    make, path, name = HOSTS[request.param]
    model = make()
    pg = PatchableGraph(model, CLEAN[:, :5])
    return model, pg, [path.format(layer) for layer in range(3)], [name.format(layer) for layer in range(3)]


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return PatchableGraph(gpt2(), CLEAN)


def restored(model: nn.Module, values: dict[str, Tensor], index: tuple[Any, ...]) -> float:
    edits = {name: putting(value, index) for name, value in values.items()}
    with torch.no_grad(), edited(model, edits, of_inputs=True):
        return METRIC(model(CORRUPTED)).item()


def head(number: int) -> slice:
    return slice(4 * number, 4 * number + 4)


@BATCHES
def test_traces_of_heads_at_positions_equal_hooks(host: Any, batch: Any, tolerance: float) -> None:
    model, pg, _, names = host
    options: dict[str, Any] = {"batch": batch, "progress": False}
    found = causal_trace(pg, CLEAN, CORRUPTED, "layers[*].attn.heads[*].z", [2, -1], METRIC, **options)
    assert found.dims == ("layer", "head", "position")
    assert found.coords["position"].values.tolist() == [2, 6]
    assert found.coords["head"].values.tolist() == [0, 1, 2, 3]
    values = outputs(model, names, lambda: model(CLEAN), of_inputs=True)
    for layer, name in enumerate(names):
        for number in range(4):
            for column, position in enumerate([2, 6]):
                expected = restored(model, {name: values[layer]}, (slice(None), position, head(number)))
                assert found.values[layer, number, column] == pytest.approx(expected, abs=tolerance, rel=0)
    assert np.ptp(found.values) > 0.01


def scored_by_hand(model: nn.Module, names: list[str]) -> list[Tensor]:
    """Returns (clean - corrupted) * gradient on the corrupted inputs, for each entry of what modules are given."""
    clean = outputs(model, names, lambda: model(CLEAN), of_inputs=True)
    kept: dict[str, Tensor] = {}

    def keeping(name: str) -> Any:
        def edit(value: Tensor) -> Tensor:
            kept[name] = value
            return value

        return edit

    with edited(model, {name: keeping(name) for name in names}, of_inputs=True):
        gradients = torch.autograd.grad(METRIC(model(CORRUPTED)), [kept[name] for name in names])
    return [(a - kept[name].detach()) * g for a, name, g in zip(clean, names, gradients, strict=True)]


def test_scores_of_heads_equal_autograd_by_hand(host: Any) -> None:
    model, pg, paths, names = host
    by_hand = torch.stack(scored_by_hand(model, names))[:, 0].unflatten(-1, (4, 4)).sum(-1)  # (path, position, head)
    found = attribute(pg, METRIC, CLEAN, CORRUPTED, paths="layers[*].attn.heads[*].z")
    assert found.dims == ("layer", "head")
    assert found.values == pytest.approx(by_hand.sum(1).numpy(), abs=1e-6)
    whole = attribute(pg, METRIC, CLEAN, CORRUPTED, paths=paths)
    assert found.sum("head").values == pytest.approx(whole.values, abs=2e-6)
    some = {"paths": "layers[*].attn.heads[*].z", "positions": [-1, 2, 0]}
    by_position = attribute(pg, METRIC, CLEAN, CORRUPTED, **some)
    assert by_position.dims == ("layer", "head", "position")
    assert by_position.values == pytest.approx(by_hand[:, [6, 2, 0]].transpose(1, 2).numpy(), abs=1e-6)
    assert np.ptp(by_position.values[..., 0]) > 0.1
    assert (by_position.values[..., 2] == 0).all()
    assert top_scores(by_position, 1).index.names == ["layer", "head", "position"]
