"""Experiments on components: the numbers of the same experiment on paths, with dimensions for layers and heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphpatch_notebook import ExperimentError, PatchableGraph, ProbePatch, ReplacePatch, ZeroPatch
from graphpatch_notebook.experiments import ablate, attribute
from graphpatch_notebook.experiments.results import component_grid
from tests.tiny_models import gpt2

clean, corrupted = torch.arange(14).reshape(2, 7), torch.arange(14).reshape(2, 7).flip(1)
LAYERS = range(2)


@pytest.fixture(scope="module")
def pg():
    return PatchableGraph(gpt2(heads=4, vocabulary=20, n_positions=16), clean)


def metric(output):
    return output.logits[:, -1, 3].mean()


@pytest.mark.parametrize(
    ("names", "axes"),
    [
        (["layers[0].attn.heads[1].z"], {"layer": (0,), "head": (1,)}),
        ([f"layers[{i}].experts[{e}].out" for e in (0, 1) for i in (2, 3)], {"layer": (2, 3), "expert": (0, 1)}),
        (["@embed", "@logits"], {"component": ("@embed", "@logits")}),
        (["a.layers[0].ln1", "b.layers[0].ln1"], {"component": ("a.ln1", "b.ln1"), "layer": (0,)}),
        (["layers[0].ln1", "layers[1].ln1", "layers[0].ln2"], None),
        (["layers[0].ln1", "@embed"], None),
        (["layers[0].ln1", "h_0.output"], None),
    ],
)  # fmt: skip
def test_grid(names, axes):
    grid = component_grid(names)
    assert (None if grid is None else grid.axes) == axes


ROWS = [[2, 0], [4, -1]]


def test_positions_of_each_row(pg):
    names = [f"layers[{layer}].mlp_out" for layer in LAYERS]
    means = {name: value.detach().mean(0) for name, value in pg.record(names, corrupted).items()}
    options = {"metric": metric, "positions": torch.tensor(ROWS), "progress": False}
    zeroed = ablate(pg, names, clean, **options)
    meant = ablate(pg, names, clean, method="mean", reference=corrupted, **options)
    assert zeroed.dims == ("layer", "position")
    for layer, name in enumerate(names):
        for column, (first, second) in enumerate(zip(*ROWS, strict=True)):
            with torch.no_grad(), pg.patch({name: ZeroPatch(positions=[[first], [second % 7]])}):
                np.testing.assert_allclose(zeroed[layer, column], metric(pg(clean)).item(), atol=1e-6)
            mean = torch.stack([means[name][first], means[name][second]])
            where = (torch.arange(2), torch.tensor([first, second]))
            with torch.no_grad(), pg.patch({name: ReplacePatch(mean, slice=where)}):
                np.testing.assert_allclose(meant[layer, column], metric(pg(clean)).item(), atol=1e-6)


def test_attribution_of_positions_of_each_row(pg):
    name = "layers[0].attn.z"
    scores = attribute(
        pg, metric, clean, corrupted, paths=["layers[*].attn.z", "layers[0].attn.heads[1].z"], positions=ROWS
    )
    wanted = pg.record(name, clean)[name]
    probe = ProbePatch()
    with pg.patch({name: probe}):
        output = metric(pg(corrupted))
    (gradient,) = torch.autograd.grad(output, probe.activation)
    products = (wanted - probe.activation) * gradient
    dim = pg.components[name].axes.index("head")
    for column, (first, second) in enumerate(zip(*ROWS, strict=True)):
        at = [products.movedim(dim, -2)[row, position] for row, position in enumerate((first, second))]
        total = sum(part.sum() for part in at).item()
        np.testing.assert_allclose(scores.sel(path=name, position=column), total, atol=1e-7)
        head = sum(part[1].sum() for part in at).item()
        np.testing.assert_allclose(scores.sel(path="layers[0].attn.heads[1].z", position=column), head, atol=1e-7)
    with pytest.raises(ExperimentError, match="positions="):
        attribute(pg, metric, clean, corrupted, paths=[name], positions=[[1], [2], [3]])
