"""Models whose weights accelerate keeps elsewhere: they load, are patched, and their weights stay where they were."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    ExtractionOptions,
    PatchableGraph,
    PatchValueError,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
)
from graphpatch_notebook.experiments import direct_logit_attribution
from graphpatch_notebook.patchable_graph import captured
from tests.integrations.offloaded import INPUT_IDS, MODELS, SPREAD, attribute_path, counted, llama
from tests.laws.captures import identity, outside_fused_calls


class Case(NamedTuple):
    """A spread model, and how to make it as it was before."""

    model: nn.Module
    original: Callable[[], nn.Module]

    @property
    def is_llama(self) -> bool:
        return self.original is llama

    @property
    def linear(self) -> str:
        """The node path of a module in the last layer."""
        return "model.layers_1.mlp.down_proj" if self.is_llama else "transformer.h_1.mlp.c_proj"

    @property
    def module(self) -> str:
        return attribute_path(self.linear)


GPT2 = ("disk, buffers too", "part on disk, by itself")
# Each way once: these are those of gpt2, or what others have, too.
STOOD_FOR = (*GPT2, "disk", "cpu, buffers too")
CASES = [
    *(
        pytest.param(("llama", way), marks=[pytest.mark.exhaustive] if way in STOOD_FOR else [], id=f"llama: {way}")
        for way in SPREAD
    ),
    *(pytest.param(("gpt2", way), id=f"gpt2: {way}") for way in GPT2),
]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    original = MODELS[request.param[0]]
    return Case(SPREAD[request.param[1]](original(), tmp_path), original)


def devices(model: nn.Module) -> list[str]:
    return [str(tensor.device) for tensor in (*model.parameters(), *model.buffers())]


def generated(model: Any) -> Tensor:
    mask = torch.ones_like(INPUT_IDS)
    return model.generate(INPUT_IDS, attention_mask=mask, max_new_tokens=4, do_sample=False)


# -- untouched ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_runs_as_it_does_also_with_patches_that_change_nothing(case: Case) -> None:
    before, original = devices(case.model), case.original()
    assert "meta" in before
    pg = PatchableGraph(case.model, INPUT_IDS)
    assert [frame.opaque_reason for frame in captured(pg).root.walk() if frame.opaque_reason] == []
    assert torch.equal(pg(INPUT_IDS).logits, original(INPUT_IDS).logits)
    with pg.patch({path: identity() for path in outside_fused_calls(pg)}, strict=True):
        assert torch.equal(pg(INPUT_IDS).logits, original(INPUT_IDS).logits)
        assert torch.equal(pg(INPUT_IDS[:1, :3]).logits, original(INPUT_IDS[:1, :3]).logits)
    assert devices(case.model) == before


# -- parameters --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_probes_keep_real_values_of_all_that_modules_hold(case: Case) -> None:
    pg, plain = PatchableGraph(case.model, INPUT_IDS), case.original()
    held = {**dict(plain.named_parameters(remove_duplicate=False)), **dict(plain.named_buffers())}
    paths = {path: attribute_path(path) for path in pg.nodes if attribute_path(path) in held}
    assert len(paths) >= len(list(plain.parameters()))
    probes = {path: ProbePatch() for path in paths}
    with pg.patch(probes, strict=True):
        pg(INPUT_IDS)
    pg(INPUT_IDS)
    for path, attribute in paths.items():
        assert probes[path].activation.device.type == "cpu", path
        assert torch.equal(probes[path].activation, held[attribute]), path


@pytest.mark.parametrize("case", [("llama", "cpu"), ("gpt2", "disk, buffers too")], indirect=True, ids=" ".join)
@torch.no_grad()
def test_weights_of_components_are_loaded_where_they_are_read(case: Case) -> None:
    before, plain = devices(case.model), PatchableGraph(case.original(), INPUT_IDS)
    pg = PatchableGraph(case.model, INPUT_IDS)
    absent = {"b_U", "W_pos"} if case.model.config.model_type == "llama" else {"b_U"}
    for name in ("W_OV", "W_QK"):
        assert torch.equal(getattr(pg.weights, name)[1, 0].product, getattr(plain.weights, name)[1, 0].product), name
    for name in {*dir(pg.weights)} - absent - {"W_OV", "W_QK"}:
        of_model, expected = getattr(pg.weights, name), getattr(plain.weights, name)
        if isinstance(expected, Tensor):
            assert torch.equal(of_model, expected), name
        else:
            assert all(torch.equal(of_model[n], expected[n]) for n in range(2) if n not in expected.missing), name
    steered = {"layers[0].resid_post": AddPatch(value=pg.weights.W_U[:, 7])}
    with pg.patch(steered), plain.patch(steered):
        assert torch.equal(pg(INPUT_IDS).logits, plain(INPUT_IDS).logits)
    parts, of_plain = (direct_logit_attribution(graph, INPUT_IDS, target=7, by="head") for graph in (pg, plain))
    assert parts.equals(of_plain)
    assert devices(case.model) == before


@pytest.mark.parametrize("is_opaque", [False, True], ids=["compiled", "opaque"])
@torch.no_grad()
def test_a_patched_parameter_equals_an_edited_one(case: Case, is_opaque: bool) -> None:
    before = devices(case.model)
    pg = PatchableGraph(case.model, ExtractionOptions(skip_compilation=is_opaque), INPUT_IDS)
    edited = case.original()
    module = edited.get_submodule(case.module)
    module.weight[0] += 2
    patches = {f"{case.linear}.weight": AddPatch(2, slice=0)}
    norm = "model.layers_0.input_layernorm.weight" if case.is_llama else "transformer.h_0.ln_1.bias"
    edited.get_parameter(attribute_path(norm))[3:5] = 0
    patches[norm] = ZeroPatch(slice=slice(3, 5))
    with pg.patch(patches, strict=True):
        assert torch.equal(pg(INPUT_IDS).logits, edited(INPUT_IDS).logits)
    assert torch.equal(pg(INPUT_IDS).logits, case.original()(INPUT_IDS).logits)
    assert devices(case.model) == before


@torch.no_grad()
def test_a_weight_without_numbers_is_no_value_of_a_patch(case: Case) -> None:
    weight = case.model.get_submodule(case.module).weight
    assert weight.is_meta
    pg = PatchableGraph(case.model, INPUT_IDS)
    for patch in (AddPatch(weight[0]), ReplacePatch(weight)):
        path = f"{case.linear}.weight"
        with pytest.raises(PatchValueError, match=re.escape(repr(path))), pg.patch({path: patch}):
            pg(INPUT_IDS)
    assert torch.equal(pg(INPUT_IDS).logits, case.original()(INPUT_IDS).logits)


# -- everything else ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_generates_with_a_patched_parameter(case: Case) -> None:
    before = devices(case.model)
    pg = PatchableGraph(case.model, INPUT_IDS)
    edited = case.original()
    edited.get_submodule(case.module).weight *= -50
    record = RecordPatch()
    patches = [CustomPatch(lambda weight: weight * -50), record]
    with pg.patch({f"{case.linear}.weight": patches}, strict=True):
        tokens = generated(pg)
    assert torch.equal(tokens, generated(edited))
    assert not torch.equal(tokens, generated(case.original()))
    assert len(record.activations) == 4
    assert all(torch.equal(weight, edited.get_submodule(case.module).weight) for weight in record.activations)
    assert torch.equal(generated(pg), generated(case.original()))
    assert devices(case.model) == before


# -- memory ------------------------------------------------------------------------------------------------------------


PATCH_MAPS: list[Callable[[list[str]], dict[str, Any]]] = [
    lambda paths: {},
    lambda paths: dict.fromkeys(paths, identity()),
    lambda paths: {path: ProbePatch() for path in paths if not is_held(path)},
    lambda paths: {path: ZeroPatch() for path in paths if is_held(path)},
    lambda paths: {path: AddPatch(1) for path in paths if path.endswith(".output")},
]


def is_held(path: str) -> bool:
    return path.endswith(("weight", "bias"))


@pytest.mark.parametrize("has_gradients", [False, True], ids=["without gradients", "with gradients"])
def test_nothing_is_loaded_but_by_the_hooks(case: Case, has_gradients: bool) -> None:
    ledger = counted(case.model)
    with torch.set_grad_enabled(has_gradients):
        plain = ledger.of(lambda: case.model(INPUT_IDS))
        assert len(plain.names) > 8
        assert ledger.live == 0
        kept: list[PatchableGraph] = []
        assert ledger.of(lambda: kept.append(PatchableGraph(case.model, INPUT_IDS))) == plain
        options = ExtractionOptions(skip_compilation=True)
        assert ledger.of(lambda: kept.append(PatchableGraph(case.model, options, INPUT_IDS))) == plain
        for pg in kept:
            for make in PATCH_MAPS:
                # Made for each run: probes keep what the gradients of their values take.
                with pg.patch(make(list(pg.nodes))):
                    assert ledger.of(lambda pg=pg: pg(INPUT_IDS)) == plain
        repr(kept[0].graph), repr(kept[1].graph), kept[0].graph._code
    assert ledger.live == 0


class Small(nn.Module):
    """Uses a parameter and a buffer of its own, besides those of its submodule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.shift


@pytest.mark.parametrize("way", ["cpu, buffers too", "disk, buffers too", "disk, hooks in hooks"])
@torch.no_grad()
def test_graphs_run_and_are_verified_between_the_hooks(way: str, tmp_path: Path) -> None:
    x, model = torch.rand(2, 4), SPREAD[way](Small(), tmp_path)
    pg = PatchableGraph(model, x)
    assert pg.verify(x).counts() == {"equal": 2}
    for _ in range(3):
        assert torch.equal(pg._graph_module(x), Small()(x))
    assert set(devices(model)) <= {"meta", "cpu"}
