"""Ablations against plain forward hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import ExperimentError, PatchableGraph
from graphpatch_notebook.experiments import LogitDifference, ablate
from tests.experiments.hooked import GPT2_OUTPUT, Edit, edited, gpt2, llama, outputs, putting

HOSTS = {
    "gpt2": (gpt2, "transformer.h_{}.attn.c_proj.x", "transformer.h.{}.attn.c_proj"),
    "llama": (llama, "model.layers_{}.self_attn.o_proj.input", "model.layers.{}.self_attn.o_proj"),
}
METRIC = LogitDifference([1, 2, 3], 5)
Z = "layers[*].attn.heads[*].z"
torch.manual_seed(1)
IDS = torch.randint(23, (3, 6))
REFERENCE = torch.randint(23, (4, 6))
BATCHES = pytest.mark.parametrize(("batch", "tolerance"), [(None, 0.0), ("auto", 2e-6)])


@pytest.fixture(scope="module", params=HOSTS)
def host(request: pytest.FixtureRequest) -> tuple[nn.Module, PatchableGraph, list[str], list[str]]:
    make, path, name = HOSTS[request.param]
    model = make()
    pg = PatchableGraph(model, IDS[:1, :5])
    return model, pg, [path.format(layer) for layer in range(3)], [name.format(layer) for layer in range(3)]


def without(model: nn.Module, name: str, edit: Edit) -> float:
    with torch.no_grad(), edited(model, {name: edit}, of_inputs=True):
        return METRIC(model(IDS)).item()


@BATCHES
def test_zero_by_head_and_position(host: Any, batch: Any, tolerance: float) -> None:
    model, pg, _, names = host
    found = ablate(pg, Z, IDS, metric=METRIC, positions=[0, -1], batch=batch, progress=False)
    assert found.dims == ("layer", "head", "position")
    assert found.coords["position"].values.tolist() == [0, 5]
    assert found.attrs["method"] == "zero"
    nothing = torch.zeros(3, 6, 16)
    for layer, name in enumerate(names):
        for head in range(4):
            for column, position in enumerate([0, 5]):
                index = (slice(None), position, slice(4 * head, 4 * head + 4))
                expected = without(model, name, putting(nothing, index))
                assert found.values[layer, head, column] == pytest.approx(expected, abs=tolerance, rel=0)
    assert np.ptp(found.values) > 0.01
    with torch.no_grad():
        assert found.attrs["baseline"] == pytest.approx(METRIC(model(IDS)).item(), abs=tolerance, rel=0)


LONGER = torch.randint(23, (2, 9))
# What each method puts in place of a value, of the values on the reference.
METHODS: list[tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = [
    ({"method": "mean", "reference": REFERENCE}, lambda value: value.mean(0, keepdim=True).expand(3, -1, -1)),
    (
        {"method": "mean", "reference": {"input_ids": LONGER}, "mean_over": "batch and positions"},
        lambda value: value.mean((0, 1), keepdim=True).expand(3, 6, -1),
    ),
    ({"method": "resample", "reference": REFERENCE[:3]}, lambda value: value),
]


@pytest.mark.parametrize("batch", [None, "auto"])
@pytest.mark.parametrize(("settings", "replaced"), METHODS)
def test_values_of_a_reference(host: Any, settings: Any, replaced: Any, batch: Any) -> None:
    model, pg, paths, names = host
    options: dict[str, Any] = {**settings, "metric": METRIC, "batch": batch, "progress": False}
    found = ablate(pg, Z, IDS, **options)
    placed = ablate(pg, paths, IDS, positions=True, **options)
    assert (found.dims, placed.dims) == (("layer", "head"), ("path", "position"))
    reference = settings["reference"]
    ids = reference["input_ids"] if isinstance(reference, dict) else reference
    for layer, (name, value) in enumerate(
        zip(names, outputs(model, names, lambda: model(ids), of_inputs=True), strict=True)
    ):
        for head in range(4):
            expected = without(model, name, putting(replaced(value), (..., slice(4 * head, 4 * head + 4))))
            assert found.values[layer, head] == pytest.approx(expected, abs=2e-6, rel=0)
        for position in (0, 5):
            expected = without(model, name, putting(replaced(value), (slice(None), position)))
            assert placed.values[layer, position] == pytest.approx(expected, abs=2e-6, rel=0)


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return PatchableGraph(gpt2(), IDS)


MEAN: dict[str, Any] = {"method": "mean", "reference": REFERENCE}


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "median"},
        {"method": "mean"},
        {"reference": IDS},
        MEAN | {"mean_over": "all"},
        {"method": "resample", "reference": IDS, "mean_over": "batch and positions"},
        {"method": "resample", "reference": REFERENCE},  # of 4 rows, for 3
        MEAN | {"reference": REFERENCE[:, :4]},
        MEAN | {"paths": ["transformer.wpe.output"]},  # it has no rows
        MEAN | {"paths": ["transformer.wte.input"]},  # integers
        MEAN | {"mean_over": "batch and positions", "paths": ["transformer.h_0.mlp.c_fc.weight"]},
        {"positions": False},
        {"positions": 6},
        {"positions": 0, "position_dim": "1"},
    ],
)
def test_invalid_ablations_are_errors(pg: PatchableGraph, settings: dict[str, Any]) -> None:
    given = {"paths": [f"transformer.h_0.{GPT2_OUTPUT}"], "metric": METRIC, "progress": False} | settings
    with pytest.raises(ExperimentError):
        ablate(pg, given.pop("paths"), IDS, **given)
