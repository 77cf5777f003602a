"""The tuned lens: before training it is the logit lens, its training is that of plain torch, and it predicts better."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer, GPT2LMHeadModel

from graphpatch_notebook import ExperimentError, PatchableGraph
from graphpatch_notebook.experiments import TunedLens, logit_lens
from tests.components.families import captured_model
from tests.tiny_models import gpt2

SHIPPED = Path(__file__).parents[3] / "examples" / "indirect_objects_model"
IDS = torch.randint(0, 50, (3, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bert", "vit", "neox"])
def test_before_training_it_is_the_logit_lens(name: str) -> None:
    pg, given = captured_model(name)
    plain, lens = logit_lens(pg, given), logit_lens(pg, given, lens=TunedLens(pg))
    assert lens.identical(plain)


def affine(linear: Any, state: Tensor) -> Tensor:
    return state + state @ linear.weight.T + linear.bias


def by_hand(model: Any, lens: TunedLens, ids: Tensor, kept: Tensor) -> list[Tensor]:
    """Returns the divergence of each state, in plain torch."""
    output = model(ids, attention_mask=kept.long(), output_hidden_states=True)
    said, losses = output.logits.log_softmax(-1).detach(), []
    for linear, state in zip(lens.maps, output.hidden_states, strict=False):
        logits = model.lm_head(model.transformer.ln_f(affine(linear, state.detach())))
        each = functional.kl_div(logits.log_softmax(-1), said, log_target=True, reduction="none").sum(-1)
        losses.append(each[kept].mean())
    return losses


@pytest.mark.parametrize("is_padded", [False, True])
def test_its_training_is_that_of_plain_torch(is_padded: bool) -> None:
    torch.manual_seed(0)
    model = gpt2().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    pg, kept = PatchableGraph(model, IDS), torch.ones_like(IDS).bool()
    kept[1, :2] = not is_padded
    lens, other = TunedLens(pg), TunedLens(pg)
    batches = [{"input_ids": IDS, "attention_mask": kept.long()}, {"input_ids": IDS.flip(1), "attention_mask": kept}]
    losses = lens.fit(pg, batches, epochs=2, optimizer=torch.optim.SGD(lens.parameters(), 0.1))
    optimizer, expected = torch.optim.SGD(other.parameters(), 0.1), []
    for ids in (IDS, IDS.flip(1)) * 2:
        optimizer.zero_grad()
        each = by_hand(model, other, ids, kept)
        torch.stack(each).sum().backward(inputs=list(other.parameters()))
        optimizer.step()
        expected.append(torch.stack(each).mean().item())
    assert losses == pytest.approx(expected, rel=1e-4)
    for one, two in zip(lens.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)
    assert not any(parameter.grad is not None for parameter in model.parameters())
    again = TunedLens(pg)
    again.load_state_dict(lens.state_dict())
    read = logit_lens(pg, IDS, lens=again)
    with torch.no_grad():
        states = model(IDS, output_hidden_states=True).hidden_states
        for layer, linear in enumerate(lens.maps):
            logits = model.lm_head(model.transformer.ln_f(affine(linear, states[layer])))
            torch.testing.assert_close(torch.tensor(read.values[layer]).float(), logits, rtol=1e-4, atol=1e-4)
    assert read.sel(layer=len(lens.maps)).equals(logit_lens(pg, IDS).sel(layer=len(lens.maps)))
    same = logit_lens(pg, IDS, streams="layers[0].resid_post", lens=lens)  # the input of the next layer
    assert (same.values[0] == read.values[1]).all()
    with pytest.raises(ExperimentError, match=r"layers\[0\]\.resid_mid"):
        logit_lens(pg, IDS, streams="layers[0].resid_mid", lens=lens)
    with pytest.raises(ExperimentError):
        lens.fit(pg, [])


def test_on_texts_that_it_was_not_trained_on_it_is_closer_to_the_model_than_the_logit_lens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    draw, names = random.Random(0), ["Mary", "John", "Emma", "Tom", "Anna", "Noah", "Vera"]

    def texts(count: int) -> list[str]:
        pairs = [draw.sample(names, 2) for _ in range(count)]
        return [f"then {a} and {b} went home and then {draw.choice((a, b))} gave it to" for a, b in pairs]

    model = GPT2LMHeadModel.from_pretrained(SHIPPED).eval()
    pg = PatchableGraph(model, texts(1)[0], tokenizer=tokenizer)
    torch.manual_seed(0)
    lens = TunedLens(pg)
    lens.fit(pg, texts(128), batch_size=32, epochs=8, lr=1e-2)
    held_out = texts(32)
    with torch.no_grad():
        said = pg(held_out).logits.log_softmax(-1)

    def divergence(read: Any) -> Tensor:
        found = torch.tensor(read.values).log_softmax(-1)
        return functional.kl_div(found, said.expand_as(found), log_target=True, reduction="none").sum(-1).mean((1, 2))

    plain, tuned = (divergence(logit_lens(pg, held_out, **more)) for more in ({}, {"lens": lens}))
    assert (tuned[:-1] < plain[:-1] / 2).all()
    assert tuned[-1] == plain[-1]
