"""Experiments on values inside fused attention, against the same on the variables of eager attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from graphpatch_notebook import PatchableGraph, ZeroPatch
from graphpatch_notebook.experiments import ablate, attribute, causal_trace, path_patch
from tests.experiments.hooked import gpt2

LAYERS = range(3)
CLEAN = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
CORRUPTED = torch.tensor([[3, 1, 8, 1, 5, 9, 2]])
TOLERANCE = {"rtol": 1e-3, "atol": 2e-5}


def metric(output: Any) -> Any:
    return output.logits[:, -1, 3].mean()


@pytest.fixture(scope="module")
def fused() -> tuple[PatchableGraph, list[str]]:
    pg = PatchableGraph(gpt2(), CLEAN)
    return pg, [f"transformer.h_{layer}.attn.pattern" for layer in LAYERS]


@pytest.fixture(scope="module")
def eager() -> tuple[PatchableGraph, list[str]]:
    model = gpt2()
    model.set_attn_implementation("eager") if hasattr(model, "set_attn_implementation") else None
    model.config._attn_implementation = "eager"
    pg = PatchableGraph(model, CLEAN)
    softmaxes = [path for path, node in pg.nodes.items() if node.op == "softmax"]
    assert len(softmaxes) == len(LAYERS)
    return pg, softmaxes


Experiment = Callable[[PatchableGraph, list[str]], Any]
EXPERIMENTS: dict[str, Experiment] = {
    "attribute": lambda pg, paths: attribute(pg, metric, CLEAN, CORRUPTED, paths=paths).values,
    "integrated": lambda pg, paths: (
        attribute(pg, metric, CLEAN, CORRUPTED, paths=paths, method="integrated", steps=3).values
    ),
    "causal_trace": lambda pg, paths: (
        causal_trace(
            pg, CLEAN, CORRUPTED, paths, None, metric, progress=False, position_dim=dict.fromkeys(paths, 2)
        ).values
    ),
    "ablate": lambda pg, paths: ablate(pg, paths, CLEAN, metric=metric, progress=False).values,
    "sweep": lambda pg, paths: (
        pg.sweep(
            {"path": paths, "head": [0, 3], "key": [0, 2]},
            lambda path, head, key: {path: ZeroPatch(slice=(slice(None), head, slice(None), key))},
            CLEAN,
            metric=metric,
            progress=False,
        ).values
    ),
    "path_patch": lambda pg, paths: (
        path_patch(
            pg,
            paths[0],
            [f"transformer.h_{layer}.mlp.output" for layer in (1, 2)],
            CLEAN,
            CORRUPTED,
            metric,
            progress=False,
        ).values
    ),
}


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_values_inside_fused_attention_give_what_those_of_eager_attention_give(
    name: str, fused: tuple[PatchableGraph, list[str]], eager: tuple[PatchableGraph, list[str]]
) -> None:
    found, expected = (np.asarray(EXPERIMENTS[name](*each)) for each in (fused, eager))
    assert np.ptp(expected) > 1e-4
    np.testing.assert_allclose(found, expected, **TOLERANCE)


class FusedCalls(TorchFunctionMode):
    count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def test_attribution_opens_attention_only_if_paths_ask_for_it(fused: tuple[PatchableGraph, list[str]]) -> None:
    pg, paths = fused
    with FusedCalls() as everything:
        scores = attribute(pg, metric, CLEAN, CORRUPTED)
    assert not set(paths) & set(scores.coords["path"].values)
    with FusedCalls() as inside:
        attribute(pg, metric, CLEAN, CORRUPTED, paths=paths)
    assert everything.count >= 2 * len(LAYERS)
    assert inside.count == 0
