"""SAEs in place of values: numbers and gradients are those of hooks, and latents are patched and probed by path."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    ExperimentError,
    GraphError,
    Patch,
    PatchableGraph,
    PatchMapError,
    ProbePatch,
    SplicePatch,
    UnknownPathError,
    ZeroPatch,
    save_patches,
)
from graphpatch_notebook.experiments import ablate
from tests.tiny_models import gpt2

IDS = torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(0))
PATH = "transformer.h_0.mlp.output"


class Sae(nn.Module):
    """A sparse autoencoder with untied weights."""

    def __init__(self, size: int, features: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, features), nn.Linear(features, size)

    def encode(self, value: Tensor) -> Tensor:
        return torch.relu(self.up(value))

    def decode(self, latents: Tensor) -> Tensor:
        return self.down(latents)


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return PatchableGraph(gpt2(), IDS)


@pytest.fixture(scope="module")
def sae() -> Sae:
    torch.manual_seed(1)
    return Sae(16, 40)


def hooked(pg: PatchableGraph, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns the logits of the model with the value at `PATH` changed by a plain hook."""
    mlp = pg._module.transformer.h[0].mlp
    with mlp.register_forward_hook(lambda *given: change(given[-1])):
        return pg._module(IDS).logits


def without(sae: Sae, unit: int, *, error: bool) -> Callable[[Tensor], Tensor]:
    def change(value: Tensor) -> Tensor:
        latents = sae.encode(value)
        rest = value - sae.decode(latents) if error else 0
        latents = latents.clone()
        latents[..., unit] = 0
        return sae.decode(latents) + rest

    return change


def test_with_the_error_term_nothing_changes(pg: PatchableGraph, sae: Sae) -> None:
    probe, identity = ProbePatch(), CustomPatch(custom_op=torch.clone)
    expected, wte = pg(IDS).logits, pg._module.transformer.wte.weight
    expected.sum().backward()
    gradient = wte.grad.clone()
    pg.zero_grad()
    parts = {f"{PATH}|sae.latents": [identity, probe], f"{PATH}|sae.reconstruction": identity}
    with pg.patch({PATH: SplicePatch(sae), **parts}):
        found = pg(IDS).logits
        probe.activation.retain_grad()
        found.sum().backward()
    assert torch.equal(found, expected)
    torch.testing.assert_close(wte.grad, gradient, rtol=1e-4, atol=1e-4)
    pg.zero_grad()
    leaf = probe.activation.detach().requires_grad_()
    hooked(pg, lambda value: sae.decode(leaf) + (value - sae.decode(leaf)).detach()).sum().backward()
    torch.testing.assert_close(probe.activation.grad, leaf.grad)


@pytest.mark.parametrize("error", [True, False])
def test_patched_latents_are_those_of_hooks(pg: PatchableGraph, sae: Sae, error: bool) -> None:
    zero, splice, probe = ZeroPatch(slice=(..., 3)), SplicePatch(sae, error=error), ProbePatch()
    latents = f"{PATH}|sae.latents"
    with torch.no_grad():
        expected = hooked(pg, without(sae, 3, error=error))
        assert not torch.equal(expected, hooked(pg, without(sae, 4, error=error)))
        with pg.patch({latents: [zero, probe], PATH: splice}):
            together = pg(IDS).logits
        with pg.patch({PATH: splice}), pg.patch({latents: zero}), pg.patch({latents: probe}):
            nested = pg(IDS).logits
        spliced = pg.edit({PATH: splice})
        with spliced.patch({latents: zero}):
            edited = spliced(IDS).logits
        permanent = spliced.edit({latents: zero})(IDS).logits

        def patches(unit: int) -> dict[str, Patch[Any]]:
            return {latents: ZeroPatch(slice=(..., unit))}

        swept = spliced.sweep({"unit": [3, 4]}, patches, IDS, metric=lambda out: out.logits.sum(), progress=False)
        assert torch.equal(
            spliced(IDS).logits, hooked(pg, lambda value: value if error else sae.decode(sae.encode(value)))
        )
    for found in (together, nested, edited, permanent):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert probe.activation.shape == (2, 5, 40)
    assert probe.activation[..., 3].count_nonzero() == 0
    assert swept.values[0] == pytest.approx(float(expected.sum()), abs=1e-3)


def test_in_containers_at_positions_and_before_other_patches(pg: PatchableGraph, sae: Sae) -> None:
    path = "transformer.h_1.attn.output|sub_0"
    patches = {path: [AddPatch(1.0), SplicePatch(sae, positions=-1 % 5)], f"{path}.sae.latents": AddPatch(1.0)}

    def change(module: nn.Module, args: Any, output: Any) -> Any:
        value = output[0] + 1
        changed = value + sae.decode(sae.encode(value) + 1) - sae.decode(sae.encode(value))
        return (torch.cat([value[:, :-1], changed[:, -1:]], 1), *output[1:])

    handle = pg._module.transformer.h[1].attn.register_forward_hook(change)
    with torch.no_grad():
        expected = pg._module(IDS).logits
        handle.remove()
        with pg.patch(patches):
            torch.testing.assert_close(pg(IDS).logits, expected)


def test_errors_are_raised_before_anything_runs(pg: PatchableGraph, sae: Sae) -> None:
    latents = f"{PATH}|sae.latents"
    for graph, patches, kind, message in (
        (
            pg,
            {latents: ZeroPatch()},
            UnknownPathError,
            r"a SplicePatch\(sae, name='sae'\) on .*would have it, and there is none",
        ),
        (pg.edit({PATH: SplicePatch(sae, name="other")}), {latents: ZeroPatch()}, UnknownPathError, "there is none"),
        (
            pg,
            {PATH: [SplicePatch(sae)] * 2, latents: ZeroPatch()},
            PatchMapError,
            "2 splices named 'sae': give one name=",
        ),
        (
            pg.edit({PATH: SplicePatch(sae)}),
            {f"{PATH}|sae.latent": ZeroPatch(), "layers[1].resid_post|sae.features": ZeroPatch()},
            UnknownPathError,
            "sae.features",
        ),
        (pg, {PATH: SplicePatch(nn.Linear(2, 2))}, PatchMapError, "a Linear has no encode"),
        (pg, {PATH: SplicePatch(sae, error=1)}, PatchMapError, "error must be True or False"),
        (pg, {PATH: SplicePatch(sae, name="a.b")}, PatchMapError, "name must be an identifier"),
        (pg, {PATH: SplicePatch(sae), latents: ZeroPatch(positions=0)}, PatchMapError, "are for the SplicePatch"),
        (pg, {PATH: SplicePatch(sae), latents: 3}, PatchMapError, "give a patch or a list of patches, not int"),
    ):
        with pytest.raises(kind, match=message), graph.patch(patches):
            pass
    with pytest.raises(UnknownPathError, match="there is none"):
        pg.edit({latents: ZeroPatch()})
    with pytest.raises(ExperimentError, match="part of a splice"):
        ablate(pg.edit({PATH: SplicePatch(sae)}), [latents], IDS, metric=lambda out: out.logits.sum())
    with pytest.raises(GraphError, match="SplicePatch: it holds a Sae"):
        save_patches(io.BytesIO(), {PATH: SplicePatch(sae)})


def test_latents_are_recorded_by_path(pg: PatchableGraph, sae: Sae) -> None:
    latents = f"{PATH}|sae.latents"
    spliced = pg.edit({PATH: SplicePatch(sae)})
    recording = spliced.record([latents, "transformer.h_1.output"], IDS)
    assert list(recording) == [latents, "transformer.h_1.output"]
    assert torch.equal(recording[latents], sae.encode(pg.record(PATH, IDS)[PATH]))
    with pytest.raises(UnknownPathError, match="a SplicePatch"):
        pg.record(latents, IDS)


class Careless(nn.Module):
    """An SAE that writes into what it is given, and notes in `encode` what `decode` uses up."""

    def encode(self, value: Tensor) -> Tensor:
        self.scale = value.abs().max().item()
        return value.div_(2)

    def decode(self, latents: Tensor) -> Tensor:
        scale, self.scale = self.scale, 0.0
        return latents.mul_(3) + scale


@dataclass(kw_only=True, eq=False)
class Looks(Patch[Any]):
    """It only looks, and returns nothing."""

    observes_only: ClassVar[bool] = True

    def op(self, original_output: Any) -> None:  # type: ignore[override]
        self.seen = original_output.clone()


def test_an_sae_may_write_into_what_it_is_given() -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            doubled = x * 2
            return doubled + 1

    x = torch.tensor([[1.0, -4.0]])
    pg, looks = PatchableGraph(Doubled(), x), Looks()
    patches = {"doubled": SplicePatch(Careless(), error=False), "doubled|sae.latents": [looks, AddPatch(value=1.0)]}
    with pg.patch(patches):
        assert torch.equal(pg(x), (x + 1) * 3 + 8 + 1)
    assert torch.equal(looks.seen, x)
    with pg.patch({"doubled": SplicePatch(Careless()), "doubled|sae.latents": AddPatch(value=1.0)}):
        assert torch.equal(pg(x), x * 2 + 3 + 1)


def test_gradients_of_latents_are_those_of_what_is_decoded_from_them(sae: Sae) -> None:
    """The error term, which is computed from them too, would take these gradients away again."""
    pg, probe, weights = PatchableGraph(nn.Linear(16, 16), torch.ones(3, 16)), ProbePatch(), torch.arange(16.0)
    with pg.patch({"output": SplicePatch(sae), "output|sae.latents": probe}):
        output = pg(torch.ones(3, 16))
        (gradient,) = torch.autograd.grad((output @ weights).sum(), probe.activation)
    assert torch.allclose(gradient, (weights @ sae.down.weight).expand(3, -1))
