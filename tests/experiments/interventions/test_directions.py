"""Directions and their removal, against means and projections by plain hooks, and edited copies of models."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from graphpatch_notebook import ExperimentError, PatchableGraph, UnknownPathError
from graphpatch_notebook.experiments import direction, project_out, record_to
from tests.hooks import registered
from tests.tiny_models import gpt2

FOLDER = Path(__file__).parents[3] / "examples" / "indirect_objects_model"
POSITIVE = ["then Mary and John went home", "so Mary met John at the park when"]
NEGATIVE = ["then John and Mary went home and then", "John met", "when Emma met Tom at the park she said"]
IDS = torch.arange(12).reshape(2, 6)
WIDTH = 32
STREAM = "layers[1].resid_post"

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def without_gradients() -> Any:
    with torch.no_grad():
        yield


MODEL = GPT2LMHeadModel.from_pretrained(FOLDER).eval()


@pytest.fixture(scope="module")
def graph() -> PatchableGraph:
    return PatchableGraph(MODEL, POSITIVE[0], tokenizer=AutoTokenizer.from_pretrained(FOLDER))


def on_outputs(modules: list[nn.Module], function: Callable[[Tensor], Tensor], run: Callable[[], Any]) -> Any:
    """Runs with a plain hook on each module, which replaces its output, or the first one."""

    def hook(_: nn.Module, __: Any, out: Any) -> Any:
        return (function(out[0]), *out[1:]) if isinstance(out, tuple) else function(out)

    with registered([module.register_forward_hook(hook) for module in modules]):
        return run()


def mean_by_hooks(pg: PatchableGraph, texts: list[str], positions: slice) -> Tensor:
    """The mean of a stream over texts that run one by one, without padding."""
    found: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        found.append(value[0, positions])
        return value

    for text in texts:
        on_outputs([MODEL.transformer.h[1]], keep, lambda text=text: MODEL(pg.to_tokens(text)))  # type: ignore[misc]
    return torch.cat(found).mean(0)


@pytest.mark.parametrize(("positions", "taken"), [(None, slice(None)), (-1, slice(-1, None)), (slice(1), slice(1))])
def test_a_direction_is_the_difference_of_the_means_of_texts(
    graph: PatchableGraph, tmp_path: Path, positions: Any, taken: slice
) -> None:
    expected = mean_by_hooks(graph, POSITIVE, taken) - mean_by_hooks(graph, NEGATIVE, taken)
    found = direction(graph, POSITIVE, NEGATIVE, positions=positions, batch_size=3)
    assert list(found) == [f"layers[{layer}].resid_post" for layer in range(4)]
    assert torch.allclose(found[STREAM], expected, atol=1e-5)
    store = record_to(graph, tmp_path, [STREAM, "@embed"], POSITIVE + NEGATIVE, batch_size=2, shard_bytes=1)
    mask = [True] * len(POSITIVE) + [False] * len(NEGATIVE)
    for negative in (None, ~torch.tensor(mask)):
        of_store = direction(store, mask, negative, STREAM, positions=positions)
        assert torch.allclose(of_store[STREAM], expected, atol=1e-5)


def test_rows_of_a_store_are_chosen_by_a_condition(graph: PatchableGraph, tmp_path: Path) -> None:
    store = record_to(graph, tmp_path, [STREAM, "@embed"], POSITIVE + NEGATIVE, batch_size=2)
    mary, john = graph.to_single_token("Mary"), graph.to_single_token("John")
    found = direction(store, store.token == mary, torch.from_numpy(store.token == john))
    assert torch.allclose(found["@embed"], MODEL.transformer.wte.weight[mary] - MODEL.transformer.wte.weight[john])


def test_masks_that_fit_neither_examples_nor_rows_are_errors(graph: PatchableGraph, tmp_path: Path) -> None:
    store = record_to(graph, tmp_path, STREAM, POSITIVE, batch_size=2)
    rows = len(store.example)
    for positive in ([True], [1.0, 0.0], "harmful", [[True, False]]):
        with pytest.raises(ExperimentError, match=rf"{rows} rows of 'layers\[1\].resid_post'"):
            direction(store, positive)
    with pytest.raises(ExperimentError, match=r"layers\[1\].resid_post.*negative"):
        direction(store, [True, True])
    with pytest.raises(KeyError, match=r"layers\[0\].resid_post"):
        direction(store, [True, False], paths="layers[0].resid_post")
    with pytest.raises(ExperimentError, match="negative="):
        direction(graph, POSITIVE)
    with pytest.raises(TypeError, match="PatchableGraph"):
        direction(MODEL, POSITIVE, NEGATIVE)  # type: ignore[arg-type]


# -- steering ----------------------------------------------------------------------------------------------------------


# -- removal -----------------------------------------------------------------------------------------------------------

SIZES = {"vocab_size": 50, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def prepared(model: Any) -> Any:
    """Gives biases and norms numbers of their own."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def writers(model: Any) -> tuple[list[nn.Module], list[tuple[str, int]]]:
    """Returns the modules that write to the stream, and the names of their weights, with the dimension of channels."""
    if isinstance(model, GPT2LMHeadModel):
        blocks, start = model.transformer.h, model.transformer
        modules = [start.wte, start.wpe, *(part for block in blocks for part in (block.attn.c_proj, block.mlp.c_proj))]
        return modules, [(name, -1) for name, _ in model.named_parameters() if re.search(r"wte|wpe|c_proj", name)]
    if isinstance(model, GPTNeoXForCausalLM):
        blocks, start = model.gpt_neox.layers, [model.gpt_neox.embed_in]
        modules = [*start, *(part for block in blocks for part in (block.attention.dense, block.mlp.dense_4h_to_h))]
        found = [name for name, _ in model.named_parameters() if re.search(r"embed_in|attention.dense|4h_to_h", name)]
        return modules, [(name, -1 if "embed" in name else 0) for name in found]
    blocks, start = model.model.layers, [model.model.embed_tokens]
    modules = [*start, *(part for block in blocks for part in (block.self_attn.o_proj, block.mlp.down_proj))]
    found = [name for name, _ in model.named_parameters() if re.search(r"embed_tokens|o_proj|down_proj", name)]
    return modules, [(name, -1 if "embed" in name else 0) for name in found]


MODELS: list[Callable[[], Any]] = [
    lambda: gpt2(heads=4, width=WIDTH),
    lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)),
    lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, num_attention_heads=4)),
]


@pytest.mark.parametrize(("build", "count"), [*zip(MODELS, (None, 3, 3), strict=True)])
def test_weights_without_a_direction_equal_projections_of_all_that_is_written(build: Any, count: int | None) -> None:
    model = prepared(build())
    pg = PatchableGraph(model, IDS)
    given = torch.randn(WIDTH) if count is None else torch.randn(count, WIDTH)[[0, 1, 0]]  # two different ones
    axes = torch.linalg.qr((given[None] if count is None else given[:2]).T).Q
    modules, names = writers(model)

    def removed(value: Tensor, dim: int = -1) -> Tensor:
        return value - (value.movedim(dim, -1) @ axes @ axes.T).movedim(-1, dim)

    expected = on_outputs(modules, removed, lambda: model(IDS).logits)
    assert not torch.allclose(expected, model(IDS).logits, atol=1e-2)
    edited = copy.deepcopy(model)
    edited.lm_head = edited.embed_out = copy.deepcopy(model.get_output_embeddings())  # which may be the embedding
    for name, dim in names:
        parameter = edited.get_parameter(name)
        parameter.copy_(removed(parameter, dim))
    assert torch.allclose(edited(IDS).logits, expected, atol=1e-4)

    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pg.patch(project_out(pg, given)):
        assert torch.allclose(pg(IDS).logits, expected, atol=1e-4)
        streams = pg.record("layers[*].resid_*", IDS)
    assert all((value @ axes).abs().max() < 1e-4 for value in streams.values())
    patches = project_out(pg, given, weights=True)
    assert len(patches) == len(names)
    by_weights = pg.edit(patches)
    assert torch.allclose(by_weights(IDS).logits, expected, atol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


OTHERS: list[Callable[[], Any]] = [
    lambda: OPTForCausalLM(OPTConfig(**SIZES, num_attention_heads=4, ffn_dim=48, word_embed_proj_dim=WIDTH)),
    lambda: FalconForCausalLM(FalconConfig(**SIZES, num_attention_heads=4, bias=True)),
    lambda: GraniteForCausalLM(GraniteConfig(**SIZES, **HEADS, embedding_multiplier=3.0, residual_multiplier=0.5)),
    lambda: MambaForCausalLM(MambaConfig(**SIZES, state_size=4)),
    lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    ),
]


@pytest.mark.parametrize("build", OTHERS)
def test_of_any_architecture_the_stream_is_without_the_direction(build: Any) -> None:
    model, given = prepared(build()), torch.randn(WIDTH)
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})
    pg = PatchableGraph(model, **inputs)
    with pg.patch(project_out(pg, given)):
        logits = pg(**inputs).logits
        streams = pg.record([name for name in pg.components if "resid" in name], **inputs)
    assert all((value @ given).abs().max() < 1e-4 for value in streams.values())
    edited = pg.edit(project_out(pg, given, weights=True))
    assert torch.allclose(edited(**inputs).logits, logits, atol=1e-4)
    assert not torch.allclose(logits, model(**inputs).logits, atol=1e-2)


def test_what_no_direction_can_be_removed_from_is_an_error() -> None:
    pg = PatchableGraph(gpt2(heads=4, width=WIDTH), IDS)
    for given in (torch.zeros(WIDTH), torch.full((WIDTH,), torch.nan), torch.ones(1, 1, WIDTH), torch.tensor(1.0)):
        with pytest.raises(ExperimentError, match=re.escape(str(tuple(given.shape)))):
            project_out(pg, given)
    ones = torch.ones(WIDTH)
    for paths, options, named in (
        (["layers[0].attn.heads[1].z", "layers[0].mlp_out"], {}, r"layers\[0\].attn.heads\[1\].z"),
        ("layers[9].mlp_out", {}, r"layers\[9\]"),
        (None, {"weights": True, "positions": 3}, "positions"),
        ("transformer.h_0.output", {"weights": True}, "transformer.h_0.output"),
    ):
        with pytest.raises((ExperimentError, UnknownPathError), match=named):
            project_out(pg, ones, paths, **options)
    with pytest.raises(ExperimentError, match="layers"):
        project_out(PatchableGraph(nn.Linear(2, 2), torch.ones(1, 2)), torch.ones(2))
    behind_norms = PatchableGraph(prepared(Gemma2ForCausalLM(Gemma2Config(**SIZES, **HEADS, head_dim=8))), IDS)
    experts = PatchableGraph(prepared(MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, num_local_experts=2))), IDS)
    for each, path in ((behind_norms, r"layers\[0\].attn_out"), (experts, r"layers\[0\].mlp_out")):
        with pytest.raises(ExperimentError, match=path):
            project_out(each, ones, weights=True)
        with each.patch(project_out(each, ones)):
            assert (each.record("layers[*].resid_post", IDS).stack("resid_post") @ ones).abs().max() < 1e-3
