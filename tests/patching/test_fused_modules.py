"""Patches inside of modules of torch that do not call what is in them, in eval mode without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, PatchableGraph, ProbePatch
from tests.zoo.case import floats, seeded

X = floats(2, 5, 8)
PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


class Holder(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inside = make()

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x, src_key_padding_mask=PADDING) * 2


MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "layer": (layer, "inside", "inside"),
    "encoder": (lambda: nn.TransformerEncoder(layer(), 2), "inside.layers_1", "inside.layers.1"),
}


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("inner", ["self_attn.output|sub_0", "linear1.output", "dropout1.input"])
def test_values_inside_can_be_patched(name: str, inner: str) -> None:
    make, path, module_path = MODELS[name]
    model = seeded(lambda: Holder(make))
    pg = PatchableGraph(model, X)
    with pg.patch({f"{path}.{inner}": AddPatch(value=1.0)}, strict=True):
        found = pg(X)

    def add(output: object) -> object:
        return (output[0] + 1, *output[1:]) if isinstance(output, tuple) else output + 1  # type: ignore[operator]

    module = model.get_submodule(f"{module_path}.{inner.split('.', maxsplit=1)[0]}")
    if "input" in inner:
        handle = module.register_forward_pre_hook(lambda _, args: add(args[0]))
    else:
        handle = module.register_forward_hook(lambda _, __, output: add(output))
    # With a hook there, torch itself does not take its fast path, nor does it with gradients.
    with torch.enable_grad():
        expected = model(X).detach()
    handle.remove()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", list(MODELS))
def test_parameters_inside_can_be_patched(name: str) -> None:
    make, path, module_path = MODELS[name]
    model = seeded(lambda: Holder(make))
    pg = PatchableGraph(model, X)
    with pg.patch({f"{path}.self_attn.in_proj_bias": AddPatch(value=1.0)}, strict=True):
        found = pg(X)
    model.get_parameter(f"{module_path}.self_attn.in_proj_bias").add_(1.0)
    with torch.enable_grad():
        expected = model(X).detach()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_boundary_of_a_layer_leaves_it_fused() -> None:
    model = seeded(lambda: Holder(layer))
    pg = PatchableGraph(model, X)
    probe = ProbePatch()
    with pg.patch({"inside.output": probe, "inside.src": ProbePatch()}):
        found = pg(X)
    assert torch.equal(found, model(X))
    assert probe.activation is not None
    assert torch.equal(probe.activation * 2, found)
