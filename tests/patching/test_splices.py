"""Spliced SAEs: numbers and gradients are those of hooks, and their parts are values like any other."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    ExperimentError,
    GraphError,
    GraphPatchError,
    PatchableGraph,
    PatchMapError,
    PatchValueError,
    ProbePatch,
    UnknownPathError,
    ZeroPatch,
)
from graphpatch_notebook.experiments import (
    ablate,
    attribute,
    attribute_edges,
    causal_trace,
)
from tests.tiny_models import gpt2
from tests.zoo.submodules import Submodules

IDS = torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(0))
OTHER = torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(1))
PLACE = "layers[0].resid_post"
LATENTS = f"{PLACE}.sae.latents"


class Sae(nn.Module):
    """A sparse autoencoder with untied weights, and the config of one of SAELens."""

    def __init__(self, size: int = 16, features: int = 24, **metadata: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, features), nn.Linear(features, size)
        self.cfg = SimpleNamespace(metadata=SimpleNamespace(**metadata))

    def encode(self, value: Tensor) -> Tensor:
        return torch.relu(self.up(value))

    def decode(self, latents: Tensor) -> Tensor:
        return self.down(latents)


class TopK(Sae):
    """It keeps the four largest latents."""

    def encode(self, value: Tensor) -> Tensor:
        values, at = super().encode(value).topk(4, -1)
        return torch.zeros(*value.shape[:-1], self.up.out_features).scatter(-1, at, values)


class Namesake(Sae):
    """Its variables have the names of the parts of a splice."""

    def encode(self, value: Tensor) -> Tensor:
        error = self.up(value)
        latents = torch.relu(error)
        return latents  # noqa: RET504

    def decode(self, latents: Tensor) -> Tensor:
        latents = latents * 1
        reconstruction = self.down(latents)
        error = residue = decoded = reconstruction + 0
        result = error + (residue - decoded)
        return result  # noqa: RET504


class Skipping(Sae):
    """A skip transcoder, as those of SAELens."""

    def __init__(self, **metadata: str) -> None:
        super().__init__(**metadata)
        self.W_skip = nn.Parameter(torch.randn(16, 16))


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return PatchableGraph(gpt2(), IDS)


@pytest.fixture(scope="module")
def sae() -> Sae:
    torch.manual_seed(1)
    return Sae()


@pytest.fixture(scope="module")
def spliced(pg: PatchableGraph, sae: Sae) -> PatchableGraph:
    return pg.splice({PLACE: sae})


def total(output: Any) -> Any:
    return output.logits[:, -1, 7].sum()


def changed(sae: Any, change: Callable[[Tensor], Tensor], *, error: bool = True) -> Callable[[Tensor], Tensor]:
    """Returns what replaces a value if latents are changed."""

    def hook(value: Tensor) -> Tensor:
        latents = sae.encode(value)
        rest = value - sae.decode(latents) if error else 0
        return sae.decode(change(latents)) + rest

    return hook


def without(unit: int) -> Callable[[Tensor], Tensor]:
    return lambda latents: latents * (torch.arange(latents.shape[-1]) != unit)


@contextmanager
def hooked(module: nn.Module, hook: Callable[[Tensor], Tensor]) -> Iterator[None]:
    def of_output(module: nn.Module, args: Any, output: Any) -> Any:
        return hook(output) if isinstance(output, Tensor) else (hook(output[0]), *output[1:])

    with module.register_forward_hook(of_output):
        yield


PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "layers[0].resid_post": lambda model: model.transformer.h[0],
    "layers[1].attn_out": lambda model: model.transformer.h[1].attn,
    "transformer.h_0.mlp.output": lambda model: model.transformer.h[0].mlp,
    "transformer.h_1.attn.output|sub_0": lambda model: model.transformer.h[1].attn,
    "blocks.1.ln2.hook_normalized": lambda model: model.transformer.h[1].ln_2,
    "transformer.h_1.mlp.hidden_states": lambda model: model.transformer.h[1].ln_2,  # an input
    "transformer.h_1.ln_2.layer_norm": lambda model: model.transformer.h[1].ln_2,  # an operation
}


@pytest.mark.parametrize(("place", "kind"), [*zip(PLACES, itertools.cycle([Sae, TopK, Namesake]), strict=False)])
def test_an_sae_changes_nothing_and_its_latents_are_those_of_hooks(pg: PatchableGraph, place: str, kind: Any) -> None:
    model, sae, identity = pg._module, kind(), CustomPatch(custom_op=torch.clone)
    spliced, whole = pg.splice({place: sae}), pg.splice({place: sae}, error=False)
    inside = [path for path in spliced.nodes if path not in pg.nodes and spliced.nodes[path].shape is not None]
    (latents,) = [path for path in inside if path.endswith("sae.latents")]
    with torch.no_grad():
        expected = pg(IDS).logits
        assert torch.equal(spliced(IDS).logits, expected)
        with spliced.patch(dict.fromkeys(inside, identity)):
            assert torch.equal(spliced(IDS).logits, expected)
        with spliced.patch({latents: ZeroPatch(slice=(..., 3))}):
            found = spliced(IDS[:, :3]).logits
        with hooked(PLACES[place](model), changed(sae, without(3))):
            torch.testing.assert_close(found, model(IDS[:, :3]).logits)
        with hooked(PLACES[place](model), changed(sae, torch.clone, error=False)):
            replaced = model(IDS).logits
        torch.testing.assert_close(whole(IDS).logits, replaced)
    assert torch.equal(pg(IDS).logits, expected)


def test_latents_are_ablated_traced_and_scored(pg: PatchableGraph, sae: Sae, spliced: PatchableGraph) -> None:
    block = pg._module.transformer.h[0]
    found = ablate(spliced, f"{LATENTS}[*]", IDS, metric=total, progress=False)
    assert found.dims == ("layer", "latent")
    for unit, value in enumerate(found.values[0]):
        with torch.no_grad(), hooked(block, changed(sae, without(unit))):
            assert value == pytest.approx(float(total(pg._module(IDS))), abs=1e-5)
    parts = [LATENTS, f"{PLACE}.sae.error"]
    traced = causal_trace(spliced, IDS, OTHER, [LATENTS], positions=[1, 3], metric=total, progress=False)
    with torch.no_grad():
        kept = sae.encode(pg.record(PLACE, IDS)[PLACE])
        for column, at in enumerate((1, 3)):

            def restored(latents: Tensor, at: int = at) -> Tensor:
                return torch.where(torch.arange(5)[:, None] == at, kept, latents)

            with hooked(block, changed(sae, restored)):
                assert traced.values[0, column] == pytest.approx(float(total(pg._module(OTHER))), abs=1e-5)
    # By hand: the change of the latents, times the gradient of what is decoded from them.
    value = pg.record(PLACE, OTHER)[PLACE].detach()
    leaf = sae.encode(value).detach().requires_grad_()
    rest = (value - sae.decode(leaf)).detach()
    with hooked(block, lambda _: sae.decode(leaf) + rest):
        (gradient,) = torch.autograd.grad(total(pg._module(OTHER)), leaf)
    expected = ((kept - leaf) * gradient).sum((0, 1))
    scores = attribute(spliced, total, IDS, OTHER, paths=[f"{LATENTS}[*]"])
    np.testing.assert_allclose(scores.values.ravel(), expected.detach().numpy(), atol=1e-5)
    secants = attribute(spliced, total, IDS, OTHER, paths=parts, method="secant")
    assert float(secants.sum()) == pytest.approx((total(pg(IDS)) - total(pg(OTHER))).item(), abs=1e-4)


def test_transcoders_are_placed_by_their_configs(pg: PatchableGraph) -> None:
    torch.manual_seed(2)
    hooks = {"hook_name": "blocks.1.ln2.hook_normalized", "hook_name_out": "blocks.1.hook_mlp_out"}
    several = [Skipping(**hooks), Sae(hook_name="blocks.0.hook_mlp_in")]
    spliced, mlp = pg.splice(several), pg._module.transformer.h[1].mlp
    transcoder, latents = several[0], "layers[1].mlp_out.sae.latents"
    alone, named = pg.splice(transcoder, error=False), pg.splice({("layers[*].ln2", "layers[*].mlp_out"): transcoder})
    assert "transformer.h_0.ln_2.input_sae.latents" in spliced.nodes
    assert "layers[0].mlp_out.sae.latents" in named.components

    def change(module: nn.Module, args: Any, output: Any) -> Tensor:
        encoded = transcoder.encode(args[0])
        difference = transcoder.decode(without(3)(encoded)) - transcoder.decode(encoded)
        return output + difference

    with torch.no_grad():
        found = []
        for graph in (spliced, named):
            with graph.patch({latents: ZeroPatch(slice=(..., 3))}):
                found.append(graph(IDS).logits)
        with mlp.register_forward_hook(change):
            expected = pg._module(IDS).logits
        torch.testing.assert_close(found, [expected] * 2)
        replaced = mlp.register_forward_hook(
            lambda _, args, output: transcoder.decode(transcoder.encode(args[0])) + args[0] @ transcoder.W_skip.T
        )
        expected = pg._module(IDS).logits
        replaced.remove()
        torch.testing.assert_close(alone(IDS).logits, expected)


class CrossLayer(
    Submodules,
    up=lambda: nn.Parameter(torch.randn(2, 16, 6)),
    down=lambda: nn.Parameter(torch.randn(2, 2, 6, 16).triu(0)),
):
    """A cross-layer transcoder: what is read in a layer is written in this and later ones."""

    def encode(self, values: Tensor) -> Tensor:
        return torch.relu(torch.einsum("lrd,ldf->lrf", values, self.up))

    def decode(self, latents: Tensor) -> Tensor:
        written = torch.einsum("lrf,lmfd->lmrd", latents, self.down)
        return torch.stack([written[: layer + 1, layer].sum(0) for layer in range(2)])


@pytest.mark.parametrize("error", [True, False])
def test_cross_layer_transcoders(pg: PatchableGraph, error: bool) -> None:
    torch.manual_seed(3)
    sae, blocks, identity = CrossLayer(), pg._module.transformer.h, CustomPatch(custom_op=torch.clone)
    spliced = pg.splice({("layers[*].ln2", "layers[*].mlp_out"): sae}, across=True, error=error)
    latents = ["layers[0].ln2.sae.latents", "layers[1].ln2.sae.latents"]
    assert [name for name in spliced.components if name.endswith("latents")] == latents

    def run(*changes: Callable[[Tensor], Tensor]) -> Tensor:
        known: list[Tensor] = []  # the latents of each layer, and what they are without changes
        handles = []
        for layer, change in enumerate(changes):

            def hook(module: nn.Module, args: Any, output: Tensor, layer: int = layer, change: Any = change) -> Tensor:
                encoded = torch.relu(args[0] @ sae.up[layer])
                known.append(change(encoded) - (encoded if error else 0))
                written = sum(each @ sae.down[at, layer] for at, each in enumerate(known))
                return output + written if error else written

            handles.append(blocks[layer].mlp.register_forward_hook(hook))
        result = pg._module(IDS).logits
        for handle in handles:
            handle.remove()
        return result

    with torch.no_grad():
        if error:
            assert torch.equal(spliced(IDS).logits, pg(IDS).logits)
            with spliced.patch(dict.fromkeys(latents, identity)):
                assert torch.equal(spliced(IDS).logits, pg(IDS).logits)
        else:
            torch.testing.assert_close(spliced(IDS).logits, run(torch.clone, torch.clone))
        with spliced.patch({f"{latents[0]}[3]": ZeroPatch()}):
            torch.testing.assert_close(spliced(IDS).logits, run(without(3), torch.clone))
        with spliced.patch({f"{latents[0]}[3]": ZeroPatch(), latents[1]: AddPatch(1.0)}):
            torch.testing.assert_close(spliced(IDS).logits, run(without(3), lambda value: value + 1))
        effects = ablate(spliced, "layers[*].ln2.sae.latents[*]", IDS, metric=total, progress=False)
    assert effects.shape == (2, 6)
    if error:
        expected = total(SimpleNamespace(logits=run(without(3), torch.clone))).item()
        assert effects.values[0, 3] == pytest.approx(expected, abs=1e-5)
        probe, read = ProbePatch(), pg.record("layers[0].ln2", IDS)["layers[0].ln2"]
        leaf = torch.relu(read @ sae.up[0]).detach().requires_grad_()
        with spliced.patch({latents[0]: probe}):
            found = torch.autograd.grad(spliced(IDS).logits.square().sum(), probe.activation)
        by_hand = torch.autograd.grad(run(lambda _: leaf, torch.clone).square().sum(), leaf)
        torch.testing.assert_close(found, by_hand, rtol=1e-3, atol=1e-3)


class Across(
    Submodules, up=lambda: nn.Parameter(torch.randn(2, 16, 6)), down=lambda: nn.Parameter(torch.randn(6, 2, 16))
):
    """A crosscoder of two places."""

    def encode(self, values: Tensor) -> Tensor:
        return torch.relu(torch.einsum("lrd,ldf->rf", values, self.up))

    def decode(self, latents: Tensor) -> Tensor:
        return torch.einsum("rf,fld->lrd", latents, self.down)


def test_crosscoders_have_latents_where_all_is_read(pg: PatchableGraph) -> None:
    sae = Across()
    spliced, blocks = pg.splice({"layers[*].resid_post": sae}, across=True), pg._module.transformer.h
    assert [name for name in spliced.components if name.endswith("latents")] == ["layers[1].resid_post.sae.latents"]
    read: list[Tensor] = []

    def write(value: Tensor) -> Tensor:
        latents = torch.relu(read[0] @ sae.up[0] + value @ sae.up[1])
        return value - latents[..., 3:4] * sae.down[3, 1]

    with torch.no_grad():
        with spliced.patch({"layers[1].resid_post.sae.latents[3]": ZeroPatch()}):
            found = spliced(IDS).logits
        with hooked(blocks[0], lambda value: read.append(value) or value), hooked(blocks[1], write):
            torch.testing.assert_close(found, pg._module(IDS).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(PatchMapError, match="pair"):
        pg.splice({("layers[*].resid_pre", "layers[*].resid_post"): sae}, across=True)


class OfHeads(Sae):
    """An SAE for `hook_z`, as in SAELens: it takes the heads apart."""

    hook_z_reshaping_mode = True

    def encode(self, value: Tensor) -> Tensor:
        self.d_head = value.shape[-1]
        return super().encode(value.flatten(-2))

    def decode(self, latents: Tensor) -> Tensor:
        return super().decode(latents).unflatten(-1, (-1, self.d_head))


def test_saes_of_all_heads(pg: PatchableGraph) -> None:
    sae, projection = OfHeads(hook_name="blocks.1.attn.hook_z"), pg._module.transformer.h[1].attn.c_proj
    spliced, plain = pg.splice(sae), Sae()
    plain.load_state_dict(sae.state_dict())
    change = changed(plain, without(3))
    with torch.no_grad():
        with spliced.patch({"transformer.h_1.attn.c_proj.x_sae.latents": ZeroPatch(slice=(..., 3))}):
            found = spliced(IDS).logits
        with projection.register_forward_pre_hook(lambda _, args: change(args[0])):
            torch.testing.assert_close(found, pg._module(IDS).logits)


def test_contexts_edits_copies_and_other_splices(pg: PatchableGraph, sae: Sae, spliced: PatchableGraph) -> None:
    both = spliced.splice({PLACE: Sae(), "layers[1].attn_out": sae}, name="other")
    zero, block = ZeroPatch(slice=(..., 3)), pg._module.transformer.h[0]
    with torch.no_grad():
        with hooked(block, changed(sae, lambda latents: without(3)(latents) + 1)):
            expected = pg._module(IDS).logits
        with spliced.patch({LATENTS: zero}), spliced.patch({LATENTS: AddPatch(1.0)}):
            nested = spliced(IDS).logits
        permanent = spliced.edit({LATENTS: [zero, AddPatch(1.0)]})
        twin = copy.deepcopy(spliced)
        with twin.patch({LATENTS: [zero, AddPatch(1.0)]}):
            copied = twin(IDS).logits
        with both.patch({LATENTS: [zero, AddPatch(1.0)]}):
            other = both(IDS).logits
        with spliced.patch({PLACE: AddPatch(1.0), LATENTS: zero}):
            before = spliced(IDS).logits
        with hooked(block, lambda value: changed(sae, without(3))(value + 1)):
            torch.testing.assert_close(before, pg._module(IDS).logits)
    for found in (nested, permanent(IDS).logits, copied, other):
        torch.testing.assert_close(found, expected)
    assert {"layers[0].resid_post.other.latents", "layers[1].attn_out.other.error", LATENTS} <= {*both.components}
    for use in (lambda: spliced.save(io.BytesIO()), lambda: spliced.verify(IDS), lambda: spliced.to_fx((IDS,))):
        with pytest.raises(GraphError, match=r"splice\(\)"):
            use()


def test_in_its_block_the_graph_itself_is_spliced(pg: PatchableGraph, sae: Sae, spliced: PatchableGraph) -> None:
    pg, patches = copy.copy(pg), {LATENTS: ZeroPatch(slice=(..., 3))}
    with torch.no_grad():
        with spliced.patch(patches):
            expected = spliced(IDS).logits
        with pg.splice({PLACE: sae}) as inside:
            assert torch.equal(pg(IDS).logits, pg._module(IDS).logits)
            with pg.patch(patches):
                assert torch.equal(pg(IDS).logits, expected)
            with pg.splice({PLACE: sae}, name="b"), pg.patch({f"{PLACE}.b.latents": ZeroPatch(slice=(..., 3))}):
                torch.testing.assert_close(pg(IDS).logits, expected)
            with inside, inside.patch(patches):  # twice
                assert torch.equal(inside(IDS).logits, expected)
            assert LATENTS in pg.components
            with contextlib.suppress(UnknownPathError), pg.splice({PLACE: sae}, name="b"):
                pg.record("c", IDS)
            assert f"{PLACE}.b.latents" not in pg.components
    assert LATENTS not in pg.components
    with pg.patch({PLACE: ZeroPatch()}), pytest.raises(GraphError), pg.splice({PLACE: sae}):
        pass
    with pytest.raises(GraphError), pg:
        pass


def test_errors_are_raised_before_anything_runs(pg: PatchableGraph, sae: Sae, spliced: PatchableGraph) -> None:
    cases: list[tuple[PatchableGraph, Any, dict[str, Any], type[GraphPatchError], str]] = [
        (pg, {PLACE: nn.Linear(2, 2)}, {}, PatchMapError, "Linear is not an SAE"),
        (pg, {"layers[0].resid_pots": sae}, {}, UnknownPathError, "resid_post"),
        (pg, {"blocks.7.hook_resid_post": sae}, {}, UnknownPathError, "7 is out of range"),
        (pg, sae, {}, PatchMapError, "hook_name"),
        (pg, {"input_ids": sae}, {}, PatchMapError, "'input_ids': SAEs are for whole tensors"),
        (pg, {f"{PLACE}[:, 0]": sae}, {}, PatchMapError, "SAEs are for whole tensors"),
        (pg, {PLACE: sae}, {"name": "a.b"}, PatchMapError, "identifier"),
        (spliced, {PLACE: sae}, {}, PatchMapError, "a splice 'sae' already"),
        (pg, {("layers[1].ln2", PLACE): sae}, {}, PatchMapError, "does not come before"),
        (pg, {("layers[*].ln2", PLACE): sae}, {}, PatchMapError, "2 values to encode, and 1"),
        (pg, {(PLACE,) * 3: sae}, {}, PatchMapError, "pair"),
        (pg, {PLACE: SimpleNamespace(encode=list, decode=list)}, {}, PatchValueError, "encode .*tensor, not a list"),
        (pg, {PLACE: SimpleNamespace(encode=torch.relu, decode=lambda x: x[..., :3])}, {}, PatchValueError, "2, 5, 16"),
    ]
    for graph, given, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            graph.splice(given, **options)
    for path, message in ((f"{LATENTS}[24]", "out of range"), (f"{PLACE}.sae.latent", "sae.latents")):
        with pytest.raises(UnknownPathError, match=message), spliced.patch({path: ZeroPatch()}):
            pass
    with (
        pytest.raises(UnknownPathError),
        pg.splice({PLACE: sae}, error=False).patch({f"{PLACE}.sae.error": ZeroPatch()}),
    ):
        pass  # it is not part of what the model computes with


class Careless(nn.Module):
    """An SAE that writes into what it is given, and notes in `encode` what `decode` uses up."""

    def encode(self, value: Tensor) -> Tensor:
        self.scale = value.abs().max().item()
        return value.div_(2)

    def decode(self, latents: Tensor) -> Tensor:
        scale, self.scale = self.scale, 0.0
        return latents.mul_(3) + scale


def test_an_sae_may_write_into_what_it_is_given() -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            doubled = x * 2
            return doubled + 1

    x = torch.tensor([[1.0, -4.0]])
    pg, probe = PatchableGraph(Doubled(), x), ProbePatch()
    for error, expected in ((False, (x + 1) * 3 + 8 + 1), (True, x * 2 + 3 + 1)):
        spliced = pg.splice({"doubled": Careless()}, error=error)
        with spliced.patch({"doubled_sae.latents": [probe, AddPatch(value=1.0)]}):
            assert torch.equal(spliced(x), expected)
        assert torch.equal(probe.activation, x)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_an_sae_of_another_dtype(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    model, sae = gpt2().to(dtypes[0]), Sae().to(dtypes[1])
    pg = PatchableGraph(model, IDS)
    spliced = pg.splice({PLACE: sae})
    with torch.no_grad(), spliced.patch({LATENTS: CustomPatch(custom_op=torch.clone)}):
        assert torch.equal(spliced(IDS).logits, model(IDS).logits)
    assert spliced.nodes["transformer.h_0.sae.latents"].dtype == dtypes[1]
    assert spliced.nodes["transformer.h_0.sae.output"].dtype == dtypes[0]


@pytest.mark.parametrize("place", ["layers[0].mlp_out", "layers[1].attn_out"])
def test_latents_are_senders_of_edges(pg: PatchableGraph, place: str) -> None:
    """Their scores sum to those of what writes into the stream, and each is the effect of this latent there."""
    sae = Sae(16, 6)
    spliced, transcoder = pg.splice({place: sae}), pg.splice({("layers[0].ln2", "layers[0].mlp_out"): Skipping()})
    for graph, sender in ((spliced, place), (transcoder, "layers[0].mlp_out")):
        whole = attribute_edges(pg, total, IDS, OTHER, heads=False).sel(sender=sender)
        parts = attribute_edges(graph, total, IDS, OTHER, heads=False)
        inside = [name for name in parts.sender.values if name.startswith(sender)]
        assert len(inside) == (2 if graph is spliced else 3)
        own = parts.sel(sender=inside).sum("sender", skipna=False)
        np.testing.assert_allclose(own.values, whole.values, atol=1e-5)
    ends = {"senders": f"{place}.sae.latents[2]", "receivers": "@logits"}
    scores = attribute_edges(spliced, total, IDS, OTHER, method="exact", **ends)
    with torch.no_grad():
        change = sae.encode(pg.record(place, IDS)[place]) - sae.encode(pg.record(place, OTHER)[place])
        more = change[..., 2:3] * sae.down.weight[:, 2]
        with pg._module.transformer.ln_f.register_forward_pre_hook(lambda _, args: args[0] + more):
            effect = total(pg._module(OTHER))
        effect -= total(pg._module(OTHER))
    assert scores.item() == pytest.approx(float(effect), abs=1e-5)
    with pytest.raises(ExperimentError, match="linear map"):
        attribute_edges(pg.splice({place: SimpleNamespace(encode=torch.relu, decode=torch.tanh)}), total, IDS, OTHER)
