"""Nested tensors: inputs of either layout, and those between the layers of torch's encoder with a padding mask."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from graphpatch_notebook import AddPatch, CustomPatch, PatchableGraph, ProbePatch
from tests.zoo.case import floats, seeded

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@pytest.mark.parametrize(
    "path", ["layers_0.output", "layers_1.src", "layers_1.norm1.output", "layers_0.linear1.linear"]
)
@torch.no_grad()
def test_an_encoder_with_a_padding_mask(path: str) -> None:
    model = seeded(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval())
    x, hidden = floats(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    module = model.get_submodule(path.rpartition(".")[0].replace("layers_", "layers."))
    if path.endswith(".src"):
        handle = module.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
    else:
        handle = module.register_forward_hook(lambda _, args, out: out * 2)
    expected = model(x, src_key_padding_mask=hidden)
    handle.remove()
    pg, probe = PatchableGraph(model, x, src_key_padding_mask=hidden), ProbePatch()
    with pg.patch({path: [CustomPatch(custom_op=lambda value: value * 2), probe]}):
        found = pg(x, src_key_padding_mask=hidden)
    assert probe.activation.shape[:2] == (2, 5)
    torch.testing.assert_close(found[~hidden], expected[~hidden])
    assert not torch.allclose(found[~hidden], model(x, src_key_padding_mask=hidden)[~hidden])


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_every_public_call_takes_nested_inputs(layout: torch.layout) -> None:
    """Sums, the same files and cells of sweeps as for each of the tensors alone."""
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    rows = [floats(2, 3), floats(4, 3)]
    x = torch.nested.nested_tensor(rows, layout=layout)
    pg = PatchableGraph(model, x)
    pg.verify(x)
    pg.save(io.BytesIO())
    probe = ProbePatch()
    with pg.patch({"sub_0.output": [AddPatch(value=1.5), probe]}):
        found = pg(x)
    for got, kept, row in zip(found.unbind(), probe.activation.unbind(), rows, strict=True):
        torch.testing.assert_close(kept, model[0](row) + 1.5)
        torch.testing.assert_close(got, torch.tanh(model[0](row) + 1.5))
    assert "sub_0.linear: NestedTensor" in repr(pg.record("sub_0.linear", x))

    @torch.no_grad()
    def metric(out: torch.Tensor) -> float:
        return sum(float(row.sum()) for row in out.unbind())

    swept = pg.sweep(
        {"by": [0.0, 2.0]}, lambda by: {"sub_0.bias": AddPatch(value=by)}, x, metric=metric, progress=False
    )
    for got, by in zip(swept.values, (0.0, 2.0), strict=True):
        assert got == pytest.approx(sum(float(torch.tanh(model[0](row) + by).sum()) for row in rows), abs=1e-5)
