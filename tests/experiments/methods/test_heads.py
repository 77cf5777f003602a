"""Heads one by one: against plain hooks, and refused where they are mixed already."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from graphpatch_notebook import ExperimentError, ExtractionOptions, PatchableGraph
from graphpatch_notebook.experiments import (
    LogitDifference,
    ablate,
    attribute,
    causal_trace,
    path_patch,
    top_scores,
)
from tests.experiments.hooked import edited, gpt2, llama, outputs, putting
from tests.integrations.test_transformer_lens import lens

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
    model, pg, paths, names = host
    options: dict[str, Any] = {"heads": 4, "batch": batch, "progress": False}
    found = causal_trace(pg, CLEAN, CORRUPTED, paths, [2, -1], METRIC, **options)
    assert found.dims == ("path", "head", "position")
    assert found.coords["position"].values.tolist() == [2, 6]
    assert found.coords["head"].values.tolist() == [0, 1, 2, 3]
    values = outputs(model, names, lambda: model(CLEAN), of_inputs=True)
    for layer, name in enumerate(names):
        for number in range(4):
            for column, position in enumerate([2, 6]):
                expected = restored(model, {name: values[layer]}, (slice(None), position, head(number)))
                assert found.values[layer, number, column] == pytest.approx(expected, abs=tolerance, rel=0)
    assert np.ptp(found.values) > 0.01


def test_traces_of_all_heads_and_positions_are_those_of_the_whole_value(host: Any) -> None:
    _, pg, paths, _ = host
    options: dict[str, Any] = {"progress": False, "batch": None}
    whole = causal_trace(pg, CLEAN, CORRUPTED, paths, True, METRIC, **options)
    one_head = causal_trace(pg, CLEAN, CORRUPTED, paths, True, METRIC, heads=1, **options)
    assert (one_head.isel(head=0).values == whole.values).all()


def test_senders_are_split_into_heads(host: Any) -> None:
    _, pg, paths, _ = host
    options: dict[str, Any] = {"progress": False, "batch": None}
    found = path_patch(pg, paths[:2], None, CLEAN, CORRUPTED, METRIC, heads=4, **options)
    assert found.dims == ("sender", "head")
    for path in paths[:2]:
        for number in range(4):
            one = path_patch(pg, (path, (..., head(number))), None, CLEAN, CORRUPTED, METRIC, **options)
            assert found.sel(sender=path, head=number).item() == one.item()
    assert np.ptp(found.values) > 1e-3
    single = path_patch(pg, paths[0], [paths[2], None], CLEAN, CORRUPTED, METRIC, heads=4, **options)
    assert single.dims == ("head", "receiver")
    assert (single.sel(receiver="output").values == found.values[0]).all()


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
    found = attribute(pg, METRIC, CLEAN, CORRUPTED, paths=paths, heads=4)
    assert found.dims == ("path", "head")
    assert found.values == pytest.approx(by_hand.sum(1).numpy(), abs=1e-6)
    assert found.sum("head").values == pytest.approx(
        attribute(pg, METRIC, CLEAN, CORRUPTED, paths=paths).values, abs=2e-6
    )
    by_position = attribute(pg, METRIC, CLEAN, CORRUPTED, paths=paths, heads=4, positions=[-1, 2, 0])
    assert by_position.dims == ("path", "head", "position")
    assert by_position.values == pytest.approx(by_hand[:, [6, 2, 0]].transpose(1, 2).numpy(), abs=1e-6)
    assert np.ptp(by_position.values[..., 0]) > 0.1
    assert (by_position.values[..., 2] == 0).all()
    inside = paths[1].rsplit(".", 2)[0]
    own = attribute(pg, METRIC, CLEAN, CORRUPTED, paths=[f"{inside}.attn_output"], heads=4, positions=True)
    assert own.values[0] == pytest.approx(by_hand[1].T.numpy(), abs=1e-6)  # (1, heads, positions, 4)
    assert top_scores(own, 1).index.names == ["path", "head", "position"]


def test_scores_of_heads_need_paths_of_heads(pg: PatchableGraph) -> None:
    with pytest.raises(ExperimentError, match="paths="):
        attribute(pg, METRIC, CLEAN, CORRUPTED, heads=4)
    with pytest.raises(ExperimentError, match="'transformer.h_0.attn.output|sub_0'"):
        attribute(pg, METRIC, CLEAN, CORRUPTED, heads=4, paths=["transformer.h_0.attn.output|sub_0"])


# -- mixed heads -------------------------------------------------------------------------------------------------------

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 23}


def opt() -> nn.Module:
    config = OPTConfig(**SMALL, ffn_dim=24, word_embed_proj_dim=16, max_position_embeddings=32)
    return OPTForCausalLM(config).eval()


def t5() -> nn.Module:
    config = T5Config(d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, vocab_size=23, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config).eval()


FAMILIES: dict[str, tuple[Any, str, str, list[str], list[str]]] = {
    "gpt2": (
        gpt2, "transformer.h_1", "attn.c_proj.x",
        ["attn.c_proj.x_1", "attn.c_proj.output", "attn.resid_dropout.output", "attn.output|sub_0", "output"],
        ["attn.query_states", "attn.key_states_1", "attn.attn_output", "attn.attn_output_3"],
    ),
    "llama": (
        llama, "model.layers_1", "self_attn.o_proj.input",
        ["self_attn.o_proj.output", "self_attn.output|sub_0", "output"],
        ["self_attn.query_states", "self_attn.q_proj.output", "self_attn.attn_output"],
    ),
    "opt": (
        opt, "model_decoder.layers_1", "self_attn.out_proj.input",
        ["self_attn.out_proj.linear", "self_attn.output|sub_0"],
        ["self_attn.q_proj.output", "self_attn.attn_output"],
    ),
    "bert": (
        lambda: BertModel(BertConfig(**SMALL, intermediate_size=24)).eval(),
        "encoder.layer_1", "attention.output.dense.input",
        ["attention.output.dense.output", "attention.output.output", "attention.output_1|sub_0"],
        ["attention.self.query.output", "attention.self.output|sub_0"],
    ),
    "bloom": (
        lambda: BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=2, n_head=4, vocab_size=23)).eval(),
        "transformer.h_1", "self_attention.dense.input",
        ["self_attention.dense.output", "self_attention.output|sub_0"],
        ["self_attention.query_layer"],
    ),
    "t5": (
        t5, "decoder.block_1", "layer_1.EncDecAttention.o.input",
        ["layer_1.EncDecAttention.o.output", "layer_1.EncDecAttention.output|sub_0", "layer_1.dropout.output"],
        ["layer_1.EncDecAttention.q.output", "layer_1.EncDecAttention.attn_output", "layer_1.EncDecAttention.k.output"],
    ),
}  # fmt: skip


def total(output: Any) -> Tensor:
    return output[0][..., 0].sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_values_with_mixed_heads_are_refused_and_others_are_not(family: str) -> None:
    torch.manual_seed(0)
    make, layer, apart, mixed, right = FAMILIES[family]
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if family == "t5" else {})
    pg = PatchableGraph(make(), **inputs)
    options: dict[str, Any] = {"metric": total, "heads": 4, "progress": False, "batch": None}
    for name in mixed:
        with pytest.raises(ExperimentError, match=re.escape(f"'{layer}.{name}'")):
            ablate(pg, [f"{layer}.{name}"], **inputs, **options)
    found = ablate(pg, [f"{layer}.{name}" for name in (apart, *right)], **inputs, **options)
    assert found.shape == (1 + len(right), 4)
    assert (np.abs(found.values - found.attrs["baseline"]) > 1e-6).all()


def test_hook_points_of_transformer_lens() -> None:
    tokens = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    pg = PatchableGraph(lens(), tokens)

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 4].mean()

    paths = ["blocks_0.attn.hook_z.output", "blocks_0.attn.hook_q.output", "blocks_0.attn.hook_pattern.output"]
    found = ablate(pg, paths, tokens, metric=metric, heads=4, progress=False, batch=None)

    def without(value: Tensor, hook: Any, number: int) -> Tensor:
        heads = 2 if "pattern" not in hook.name else 1
        return value.index_fill(heads, torch.tensor([number]), 0.0)

    for row, name in enumerate(["z", "q", "pattern"]):
        for number in range(4):
            hooks = [(f"blocks.0.attn.hook_{name}", functools.partial(without, number=number))]
            with torch.no_grad():
                expected = metric(lens().run_with_hooks(tokens, fwd_hooks=hooks)).item()
            assert found.values[row, number] == expected
    assert (np.ptp(found.values, axis=1) > 0).all()
    with pytest.raises(ExperimentError, match="blocks_0.hook_attn_out.output"):
        ablate(pg, ["blocks_0.hook_attn_out.output"], tokens, metric=metric, heads=4)


def test_patterns_and_values_with_heads_of_their_own_equal_hooks_behind_them(host: Any) -> None:
    model, _, paths, names = host
    pg = PatchableGraph(model, CLEAN, extraction_options=ExtractionOptions(decompose=["scaled_dot_product_attention"]))
    inside = paths[0].rsplit(".", 2)[0]
    options: dict[str, Any] = {"metric": METRIC, "heads": 4, "progress": False, "batch": None}
    found = ablate(pg, [f"{inside}.pattern", f"{inside}.attn_output", paths[0]], CLEAN, **options)
    for number in range(4):  # without the pattern of a head, it gives nothing
        with (
            torch.no_grad(),
            edited(model, {names[0]: putting(torch.zeros(1, 7, 16), (..., head(number)))}, of_inputs=True),
        ):
            expected = METRIC(model(CLEAN)).item()
        assert found.values[:, number] == pytest.approx(expected, abs=2e-5)


def test_heads_among_the_rows_of_the_batch_are_refused() -> None:
    torch.manual_seed(0)
    pg = PatchableGraph(BloomForCausalLM(BloomConfig(hidden_size=16, n_layer=1, n_head=4, vocab_size=23)).eval(), IDS)
    path = "transformer.h_0.self_attention.context_layer"
    assert pg.nodes[path].shape == (8, 5, 4)
    with pytest.raises(ExperimentError, match=re.escape(path)):
        ablate(pg, [path], IDS, metric=total, heads=4)


# -- wrong calls -------------------------------------------------------------------------------------------------------
