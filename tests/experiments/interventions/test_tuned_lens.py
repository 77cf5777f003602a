"""The tuned lens: before training it is the logit lens, its training is that of plain torch, and it predicts better."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpatch_notebook import ExperimentError, PatchableGraph
from graphpatch_notebook.experiments import TunedLens, logit_lens
from tests.components.families import captured_once
from tests.tiny_models import gpt2

IDS = torch.randint(0, 50, (3, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bert", "vit", "neox"])
def test_before_training_it_is_the_logit_lens(name: str) -> None:
    pg, given = captured_once(name)
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
