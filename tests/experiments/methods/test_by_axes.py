"""Experiments on models written by hand, whose dimensions have other orders, compared with edits of their own code."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.experiments import (
    ablate,
    attribute,
    direct_logit_attribution,
    head_scores,
    logit_lens,
)
from tests.experiments.methods.test_head_scores import looped
from tests.fuzz import test_roles as written

HEADS, SIZE = 4, 6
STYLES: dict[str, dict[str, Any]] = {
    "sequence first": {"is_sequence_first": True},
    "heads before the batch": {"layout": "h b t c"},
    "merged": {"layout": "(b h) t c", "is_sequence_first": True, "are_scores_transposed": True},
    "merged, heads first": {"layout": "(h b) t c", "softmax": "written out", "sharing": 2},
    "einsum": {"layout": "t b h c", "split": "einsum", "softmax": "sinks", "rotary": True},
    "shared keys": {"kind": "shared keys"},
}


class Model(written.Model):
    """A model that takes its tokens with the positions first, if the stream has them first."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.T if self.is_sequence_first else tokens)

    def attention(self, layer: int) -> Any:
        return self.parts[layer].attention.part


@functools.cache
def captured(style: str) -> PatchableGraph:
    torch.manual_seed(0)
    first = {name: values[0] for name, values in written.CHOICES.items()}
    model = Model(HEADS * SIZE, HEADS, {**first, **STYLES[style]}).eval()
    return PatchableGraph(model, tokens_of(model)[1])


@pytest.fixture(params=STYLES)
def pg(request: Any, monkeypatch: pytest.MonkeyPatch) -> PatchableGraph:
    kept: dict[str, tuple[Tensor, str]] = {}
    monkeypatch.setattr(written, "_kept", kept)
    return captured(request.param)


def tokens_of(model: Model, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns tokens as (batch, position), and as the model takes them; there are as many rows as positions."""
    tokens = torch.randint(0, 9, (7, 7), generator=torch.Generator().manual_seed(seed))
    return tokens, tokens.T if model.is_sequence_first else tokens


def kept(name: str) -> Tensor:
    """Returns what the model's own code kept, as (batch, head, position, ...) or (batch, position, channel)."""
    value, axes = written._kept[name]
    letters = axes.replace("(", "").replace(")", "").split()
    if axes.startswith("("):
        value = value.unflatten(0, [HEADS if letter == "h" else 7 for letter in letters[:2]])
    return value.permute(sorted(range(len(letters)), key=lambda dim: "bhtqkc".index(letters[dim])))


@contextmanager
def edited(model: Model, layer: int, head: int, factor: float) -> Iterator[None]:
    """Scales what a head returns, before the output projection."""
    part = slice(SIZE * head, SIZE * head + SIZE)

    def edit(_: Any, given: tuple[Tensor]) -> tuple[Tensor]:
        z = given[0].clone()
        z[..., part] *= factor
        return (z,)

    handle = model.attention(layer).out.register_forward_pre_hook(edit)
    try:
        yield
    finally:
        handle.remove()


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3].sum()


def test_heads_are_ablated_and_scored(pg: PatchableGraph) -> None:
    model: Any = pg._module
    _, given = tokens_of(model)
    found = ablate(pg, "layers[1].attn.heads[*].z", given, metric=metric)
    for head in range(HEADS):
        with torch.no_grad(), edited(model, 1, head, 0.0):
            expected = float(metric(model(given)))
        assert float(found.sel(head=head).squeeze()) == pytest.approx(expected, abs=1e-4)


def test_heads_attend_to_tokens_by_position(pg: PatchableGraph) -> None:
    model: Any = pg._module
    tokens, given = tokens_of(model)
    scores = head_scores(pg, given)
    model(given)
    for layer in range(2):
        pattern = kept(f"layers[{layer}].attn.pattern")
        for kind in scores.coords["score"].values:
            np.testing.assert_allclose(scores.sel(score=kind)[layer], looped(pattern, tokens, kind), atol=1e-5)


def test_the_lens_reads_positions(pg: PatchableGraph) -> None:
    model: Any = pg._module
    _, given = tokens_of(model)
    found = logit_lens(pg, given)
    with torch.no_grad():
        model(given)
        for layer, name in enumerate(["layers[0].resid_pre", "layers[1].resid_pre", "layers[1].resid_post"]):
            expected = model.unembed(model.norm(kept(name)))
            np.testing.assert_allclose(found.sel(layer=layer), expected, atol=1e-4)


def test_logits_are_sums_of_what_layers_write(pg: PatchableGraph) -> None:
    model: Any = pg._module
    _, given = tokens_of(model)
    parts = direct_logit_attribution(pg, given, target=3, position=-1)
    with torch.no_grad():
        model(given)
        scale = (kept("layers[1].resid_post").var(-1, correction=0, keepdim=True) + model.norm.eps).sqrt()
        for layer in range(2):
            for part in ("attn", "mlp"):
                value = kept(f"layers[{layer}].{part}_out")
                normed = (value - value.mean(-1, keepdim=True)) / scale * model.norm.weight
                expected = (normed @ model.unembed.weight[3])[:, -1]
                np.testing.assert_allclose(parts[part].sel(layer=layer), expected, atol=1e-4)


def test_scores_of_heads_are_derivatives(pg: PatchableGraph) -> None:
    model: Any = pg._module
    (_, clean), (_, corrupted) = tokens_of(model), tokens_of(model, 1)
    values = list[Tensor]()
    names = [f"layers[1].attn.heads[{head}].z" for head in range(HEADS)]
    found = attribute(pg, metric, clean, corrupted, paths=names)

    def keep(_: Any, given: tuple[Tensor]) -> tuple[Tensor]:
        values.append(given[0].detach().requires_grad_())
        return (values[-1],)

    handle = model.attention(1).out.register_forward_pre_hook(keep)
    model(clean)
    metric(model(corrupted)).backward()
    handle.remove()
    gradient = values[1].grad
    assert gradient is not None
    products = ((values[0] - values[1]).detach() * gradient).unflatten(-1, (HEADS, SIZE))
    expected = products.sum(-1).flatten(0, -2).sum(0)
    np.testing.assert_allclose(found.values.reshape(-1), expected.numpy(), atol=1e-4)
