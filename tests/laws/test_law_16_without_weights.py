"""Law 16: a model without weights has the names, shapes and dtypes that it has with weights, and never runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from graphpatch_notebook import GraphError, PatchableGraph, ZeroPatch
from graphpatch_notebook.experiments import attribute, composition_scores, intervene, logit_lens, project_out, record_to
from tests.laws.captures import capture_of, some_cases, without_recomputing
from tests.zoo import Case

# What their code does on meta tensors differs, whoever runs it.
DIFFER = {
    "awkward-lazy-child": "a lazy module takes its sizes from weights that are there",
    "awkward-worker-thread": "function modes do not reach other threads",
    "awkward-functional-transforms": "torch.func does not let a mode see its factories",
    "awkward-inner-autograd": "a value read from another graph has no gradient",
    "awkward-scripted-function": "a scripted function shows what it does",
    "awkward-sparse": "there are no sparse meta tensors",
    "awkward-packed-lstm": "lengths have to be on the CPU",
    "awkward-numpy-roundtrip": "numpy needs values",
    "awkward-switches": "autocast of the CPU does not change dtypes on meta",
    "awkward-random-ops": "what is drawn decides which modules run",
}
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
IDS = torch.arange(6)[None]


@some_cases(lambda case: case.name not in DIFFER, every=2)
def test_names_shapes_and_dtypes_are_those_of_the_model_with_weights(case: Case) -> None:
    expected = _values(capture_of(case).pg)
    model, call = case.build().to("meta"), case.example()
    with warnings.catch_warnings(record=True) as caught, without_recomputing(case):
        warnings.simplefilter("always")
        found = _values(PatchableGraph(model, *call.args, **call.kwargs))
    if any("as if they were 0" in str(each.message) for each in caught):
        assert found.keys() & expected.keys()  # values decide what runs: it is said
    else:
        assert found == expected
    assert all(parameter.is_meta for parameter in model.parameters())


def _values(pg: PatchableGraph) -> dict[str, tuple[Any, Any]]:
    return {path: (meta.shape, meta.dtype) for path, meta in pg.nodes.items()}


@pytest.fixture(
    scope="module", params=[GPT2Config(n_layer=2, n_embd=32, n_head=4), LlamaConfig(**SMALL, dtype=torch.bfloat16)]
)
def config(request: pytest.FixtureRequest) -> PretrainedConfig:
    config: PretrainedConfig = request.param
    return config


@pytest.fixture(scope="module")
def browsed(config: PretrainedConfig) -> PatchableGraph:
    return PatchableGraph.from_config(config, input_ids=IDS)


def test_a_config_is_enough_and_weights_that_are_loaded_later_give_the_same_bits(config: PretrainedConfig) -> None:
    state = torch.get_rng_state()
    browsed = PatchableGraph.from_config(config, input_ids=IDS)
    assert torch.equal(torch.get_rng_state(), state)
    real = PatchableGraph(_with_weights(config), input_ids=IDS)
    assert _values(browsed) == _values(real)
    assert browsed.components.keys() == real.components.keys()

    browsed.load_state_dict(real.state_dict(), assign=True)
    patches = {"layers[1].attn.heads[2].z": ZeroPatch(), "layers[0].mlp_out": ZeroPatch(slice=(..., slice(3, 9)))}
    with browsed.patch(patches), real.patch(patches):
        assert torch.equal(browsed(input_ids=IDS).logits, real(input_ids=IDS).logits)


def _with_weights(config: PretrainedConfig) -> nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model: nn.Module = AutoModelForCausalLM.from_config(config).eval()
    return model


@pytest.mark.parametrize(
    "use",
    [
        lambda pg: pg(input_ids=IDS),
        lambda pg: pg.generate(IDS, max_new_tokens=1),
        lambda pg: pg.record("layers[*].resid_post", input_ids=IDS),
        lambda pg: pg.run_until("layers[0].resid_post", input_ids=IDS),
        lambda pg: pg.edit({"layers[0].mlp_out": ZeroPatch()})(input_ids=IDS),
        lambda pg: pg.verify(input_ids=IDS),
        lambda pg: pg.interpreter().run(input_ids=IDS),
        lambda pg: pg.to_fx((), {"input_ids": IDS}),
        lambda pg: pg.save("graph.safetensors"),
        lambda pg: logit_lens(pg, input_ids=IDS),
        lambda pg: composition_scores(pg, "K"),
        lambda pg: record_to(pg, "store", "layers[*].resid_post", IDS, batch_size=1),
        lambda pg: intervene(pg, {"layers[0].mlp_out": nn.Tanh()}, IDS),
        lambda pg: project_out(pg, torch.ones(32), weights=True),
        lambda pg: attribute(pg, _first_logit, {"input_ids": IDS}, {"input_ids": IDS + 1}),
        lambda pg: pg.sweep({"layer": [0]}, _zeroed, input_ids=IDS, metric=_first_logit),
    ],
)  # fmt: skip
def test_what_needs_weights_says_so(
    browsed: PatchableGraph, use: Callable[[PatchableGraph], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GraphError, match="no weights"):
        use(browsed)
    assert not any(tmp_path.iterdir())


def _zeroed(layer: int) -> dict[str, ZeroPatch]:
    return {f"layers[{layer}].mlp_out": ZeroPatch()}


def _first_logit(output: Any) -> Any:
    return output.logits[0, -1, 0]


VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip


def test_models_whose_initialization_reads_values() -> None:
    """They draw from a truncated normal distribution until all values are in range."""
    config, model_class = transformers.SiglipVisionConfig(**VISION), transformers.SiglipVisionModel
    pixels = torch.zeros(1, 3, 56, 56)
    with torch.no_grad():
        expected = _values(PatchableGraph(model_class(config).eval(), pixels))
    assert _values(PatchableGraph.from_config(config, pixels, model_class=model_class)) == expected
