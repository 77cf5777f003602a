"""Metrics of answers: of several tokens, against log-softmax; of generated text, against generation under hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, GPT2LMHeadModel

from graphpatch_notebook import AddPatch, ExperimentError, PatchableGraph
from graphpatch_notebook.experiments import (
    AnswerLogProbability,
    Generated,
    Noise,
    ablate,
    attribute,
    causal_trace,
)
from tests.hooks import registered

SHIPPED = Path(__file__).parents[2] / "examples" / "indirect_objects_model"
PROMPTS = ["Mary and John went home Mary gave it to", "Anna and Tom had Tom gave it to"]
ANSWERS = ["John and Mary", "Anna"]


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    model = GPT2LMHeadModel.from_pretrained(SHIPPED).eval()
    return PatchableGraph(model, PROMPTS[0], tokenizer=AutoTokenizer.from_pretrained(SHIPPED))


@torch.no_grad()
def said(model: Any, prompt: str, answer: str, tokenizer: Any) -> Tensor:
    """Returns the log-probability of an answer, token by token, in plain torch."""
    prompt_ids, total = tokenizer.encode(prompt), torch.zeros(())
    for token in tokenizer.encode(answer, add_special_tokens=False):
        total = total + model(torch.tensor([prompt_ids])).logits[0, -1].log_softmax(-1)[token]
        prompt_ids = [*prompt_ids, token]
    return total


def test_answers_of_several_tokens_are_their_log_softmax(pg: PatchableGraph) -> None:
    model, tokenizer = pg._module, pg.tokenizer
    texts = [f"{prompt} {answer}" for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    metric = AnswerLogProbability(ANSWERS, tokenizer)
    assert metric.tokens[1, :2].tolist() == [-100, -100]
    with torch.no_grad():
        alone = [said(model, *pair, tokenizer) for pair in zip(PROMPTS, ANSWERS, strict=True)]
        torch.testing.assert_close(metric(pg(texts)), torch.stack(alone).mean(), rtol=1e-4, atol=1e-4)
        one = AnswerLogProbability(ANSWERS[0], tokenizer)
        torch.testing.assert_close(one(pg(texts[0])), alone[0], rtol=1e-4, atol=1e-4)
        assert one(pg(texts[0])) == AnswerLogProbability(tokenizer.encode(ANSWERS[0])[1:])(pg(texts[0]))

        def without(_: Any, args: Any, output: Any) -> Any:
            return torch.zeros_like(output)

        found = ablate(pg, "layers[*].mlp_out", texts[0], metric=one, progress=False)
        for number, block in enumerate(model.transformer.h):
            with registered([block.mlp.register_forward_hook(without)]):
                expected = said(model, PROMPTS[0], ANSWERS[0], tokenizer)
            assert found.values[number] == pytest.approx(expected.item(), rel=1e-4)


def test_inputs_end_with_the_answer(pg: PatchableGraph) -> None:
    metric = AnswerLogProbability("John", pg.tokenizer)
    for inputs, error in ((PROMPTS[0], "the answer"), ("John", "before 1 tokens")):
        ids = pg.to_tokens(inputs)[:, -1:] if inputs == "John" else inputs
        with pytest.raises(ExperimentError, match=error):
            ablate(pg, "layers[0].mlp_out", ids, metric=metric, progress=False)
    padded = {"input_ids": torch.tensor([[0, 3, 3]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    with pytest.raises(ExperimentError, match="attention_mask"):
        ablate(pg, "layers[0].mlp_out", metric=metric, progress=False, **padded)
    for answer, tokenizer in (
        ("John", None),
        ([], None),
        ([[1.0]], None),
        ([-100], None),
        (torch.ones(1, 1, 1).long(), None),
    ):
        with pytest.raises(ExperimentError):
            AnswerLogProbability(answer, tokenizer)
    with pytest.raises(ExperimentError, match="2 answers"):
        AnswerLogProbability([[1], [2]])(torch.zeros(3, 4, 5))


def count_of_names(texts: list[str]) -> dict[str, float]:
    return {name: float(sum(text.count(name) for text in texts)) for name in ("Mary", "John", "Anna")}


@pytest.mark.parametrize("prompts", [PROMPTS[0], PROMPTS])
def test_metrics_of_generated_text_are_those_of_generation_under_hooks(pg: PatchableGraph, prompts: Any) -> None:
    model, tokenizer = pg._module, pg.tokenizer
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "use_cache": True}
    given = tokenizer(prompts if isinstance(prompts, list) else [prompts], return_tensors="pt", padding=True)
    metric = Generated(count_of_names, **options)

    def generated() -> list[float]:
        ids = model.generate(given.input_ids, attention_mask=given.attention_mask, **options)[
            :, given.input_ids.shape[1] :
        ]
        return [*count_of_names(tokenizer.batch_decode(ids, skip_special_tokens=True)).values()]

    found = ablate(pg, "layers[*].attn.heads[*].z", prompts, metric=metric, progress=False)
    assert found.dims == ("layer", "head", "metric")
    assert found.attrs["baseline"] == generated()
    size = model.config.n_embd // model.config.n_head
    for layer, block in enumerate(model.transformer.h):
        for head in range(model.config.n_head):

            def without(_: Any, args: Any, head: int = head) -> Any:
                z = args[0].clone()
                z[..., head * size : (head + 1) * size] = 0
                return (z,)

            with registered([block.attn.c_proj.register_forward_pre_hook(without)]):
                assert found.values[layer, head].tolist() == generated()
    assert len(np.unique(found.values)) > 1
    vector = 30 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    steered = pg.sweep(
        {"by": [0.0, 1.0]},
        lambda by: {"layers[1].resid_post": AddPatch(by * vector, steps="decoding")},
        prompts,
        metric=metric,
        progress=False,
    )

    def steer(_: Any, args: Any, output: Any) -> Any:
        return output + vector if output.shape[1] == 1 else output

    assert steered.values[0].tolist() == generated()
    with registered([model.transformer.h[1].register_forward_hook(steer)]):
        assert steered.values[1].tolist() == generated()


def test_what_does_not_generate_is_refused(pg: PatchableGraph) -> None:
    metric, name = Generated(len, max_new_tokens=2), "layers[0].resid_post"
    other = PROMPTS[0].replace("Mary", "Tom")
    noise = Noise("layers[0].resid_pre", samples=2)
    for run in (
        lambda: ablate(pg, name, PROMPTS[0], metric=metric, positions=0, progress=False),
        lambda: causal_trace(pg, PROMPTS[0], other, name, None, metric, progress=False),
        lambda: causal_trace(pg, PROMPTS[0], noise, name, False, metric, progress=False),
    ):
        with pytest.raises(ExperimentError, match="positions"):
            run()
    with pytest.raises(ExperimentError, match="does not generate"):
        attribute(pg, metric, PROMPTS[0], PROMPTS[0].replace("Mary", "Tom"))
    with pytest.raises(ExperimentError, match="generate"):
        ablate(PatchableGraph(torch.nn.ReLU(), torch.ones(1, 2)), "output", torch.ones(1, 2), metric=metric)
    padded = {"input_ids": torch.tensor([[0, 3, 3]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    with pytest.raises(ExperimentError, match="left"):
        ablate(pg, "layers[0].mlp_out", metric=metric, progress=False, **padded)
