"""Path patching against edges computed by hand, and against plain forward hooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from graphpatch_notebook import ExperimentError, PatchableGraph, UnknownPathError
from graphpatch_notebook.experiments import LogitDifference, path_patch
from graphpatch_notebook.experiments.methods.path_patching import default_components
from tests.experiments.hooked import edited, gpt2, outputs, putting

CLEAN = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
CORRUPTED = torch.tensor([[3, 1, 8, 1, 5, 9, 2]])
METRIC = LogitDifference(4, 8)
EXACT: dict[str, Any] = {"batch": None, "progress": False}


class Mixing(nn.Module):
    """Stands for attention: each position gets from those before it."""

    def __init__(self, is_linear: bool) -> None:
        super().__init__()
        self.weight = nn.Linear(6, 6)
        self.is_linear = is_linear

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.weight(x).cumsum(1) / 4
        return mixed if self.is_linear else torch.tanh(mixed)


class Layer(nn.Module):
    def __init__(self, is_linear: bool) -> None:
        super().__init__()
        self.norm = nn.Identity() if is_linear else nn.LayerNorm(6)
        self.mixing = Mixing(is_linear)
        self.mlp = nn.Sequential(nn.Linear(6, 8), nn.Identity() if is_linear else nn.GELU(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixing(self.norm(x))
        return x + self.mlp(self.norm(x))


class Transformer(nn.Module):
    """A transformer whose edges can be computed by hand: see `Unrolled`."""

    def __init__(self, is_linear: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(is_linear) for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Unrolled:
    """The same transformer as a sum of components, each a function of the sum of those before it."""

    def __init__(self, model: Transformer) -> None:
        self.parts = [
            (lambda x, layer=layer, part=part: part(layer.norm(x)))
            for layer in model.layers
            for part in (layer.mixing, layer.mlp)
        ]
        self.head = model.head

    def values(self, x: Tensor, known: dict[int, Tensor] | None = None) -> list[Tensor]:
        values: list[Tensor] = []
        for number, part in enumerate(self.parts):
            given = (known or {}).get(number)
            values.append(part(sum(values, x)) if given is None else given)
        return values

    def edge(self, clean: Tensor, corrupted: Tensor, sender: int, receiver: int | None) -> Tensor:
        clean_values, values = self.values(clean), self.values(corrupted)
        arriving = [clean_values[i] if i == sender else value for i, value in enumerate(values)]
        if receiver is None:
            return self.head(sum(arriving, corrupted))
        received = self.parts[receiver](sum(arriving[:receiver], corrupted))
        return self.head(sum(self.values(corrupted, {receiver: received}), corrupted))


PARTS = [f"layers_{layer}.{part}.output" for layer in range(3) for part in ("mixing", "mlp")]


def total(output: Tensor) -> Tensor:
    return (output * torch.arange(output.numel()).reshape(output.shape)).sum() / output.numel()


@pytest.mark.parametrize("batch", [None, "auto"])
def test_all_edges_equal_those_computed_by_hand(batch: Any) -> None:
    torch.manual_seed(0)
    model = Transformer().eval()
    clean, corrupted = torch.randn(2, 2, 5, 6)
    pg = PatchableGraph(model, clean[:, :4])
    assert default_components(pg) == PARTS
    found = path_patch(pg, PARTS, [*PARTS, None], clean, corrupted, total, batch=batch, progress=False)
    assert found.dims == ("sender", "receiver")
    assert found.coords["receiver"].values.tolist() == [*PARTS, "output"]
    by_hand = Unrolled(model)
    with torch.no_grad():
        base = total(model(corrupted)).item()
        for i, sender in enumerate(PARTS):
            for j, receiver in enumerate([*PARTS, "output"]):
                value = found.sel(sender=sender, receiver=receiver).item()
                if j <= i:
                    assert value == pytest.approx(base, abs=1e-6)
                else:
                    edge = by_hand.edge(clean, corrupted, i, j if j < len(PARTS) else None)
                    assert value == pytest.approx(total(edge).item(), abs=1e-5)
                    assert abs(value - base) > 1e-4
    assert found.attrs["corrupted"] == found.attrs["baseline"] == pytest.approx(base)
    assert found.attrs["components"] == PARTS
    assert "in 21 of 42 pairs, the receiver does not run after the sender" in found.attrs["remarks"][-1]


def head(number: int) -> tuple[Any, ...]:
    return (..., slice(4 * number, 4 * number + 4))


def by_hooks(
    model: nn.Module, z: str, held: list[str], where: str, *, of_inputs: bool = False, part: Any = ...
) -> tuple[list[float], list[float]]:
    """Returns the metric with each head of a layer sent, to the logits and to what a module is given or returns.

    Args:
        model: The model.
        z: The name of the module that reads the heads of layer 0.
        held: The names of the modules that are held, first of all the one that has these heads.
        where: The name of the module that receives.
        of_inputs: Whether it receives by its input.
        part: The part that it receives.
    """
    (clean_z,) = outputs(model, [z], lambda: model(CLEAN), of_inputs=True)
    values = outputs(model, held, lambda: model(CORRUPTED))
    frozen = {name: putting(value) for name, value in zip(held[1:], values[1:], strict=True)}
    seen: list[Tensor] = []

    def see(value: Tensor) -> Tensor:
        seen.append(value.clone())
        return value

    direct, through = [], []
    with torch.no_grad():
        for number in range(4):
            with (
                edited(model, {z: putting(clean_z, head(number))}, of_inputs=True),
                edited(model, frozen),
                edited(model, {where: see}, of_inputs=of_inputs),
            ):
                direct.append(METRIC(model(CORRUPTED)).item())
            with edited(model, {where: putting(seen[-1], part)}, of_inputs=of_inputs):
                through.append(METRIC(model(CORRUPTED)).item())
    return direct, through


SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 23, "use_cache": False, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Gemma2ForCausalLM, Gemma2Config(**SIZES, head_dim=4)),  # a norm behind attention
        (GraniteForCausalLM, GraniteConfig(**SIZES, residual_multiplier=0.3)),  # a scale
    ],
)
def test_modules_after_that_of_a_sender_do_not_hold_it(kind: Any, config: Any) -> None:
    """What a layer adds to the stream is computed from its heads: it passes on their change."""
    torch.manual_seed(0)
    model = kind(config).eval()
    pg = PatchableGraph(model, CLEAN)
    held = [f"model.layers.{layer}.{part}" for layer in range(3) for part in ("self_attn", "mlp")]
    sender, receivers = "layers[0].attn.heads[*].z", [None, "layers[2].attn.heads[1].q"]
    found = path_patch(pg, sender, receivers, CLEAN, CORRUPTED, METRIC, **EXACT)
    where = "model.layers.2.self_attn.q_proj"
    direct, through = by_hooks(model, "model.layers.0.self_attn.o_proj", held, where, part=head(1))
    assert found.squeeze().values.tolist() == [list(pair) for pair in zip(direct, through, strict=True)]
    assert np.ptp(direct) > 1e-3
    assert np.ptp(through) > 1e-4


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return PatchableGraph(gpt2(), CLEAN)


FIRST, LAST = "transformer.h_0.mlp.output", "transformer.h_2.mlp.output"


@pytest.mark.parametrize(
    "changes",
    [
        {"sender": LAST, "receiver": FIRST},
        {"receiver": FIRST},
        {"sender": None},
        {"sender": (FIRST, LAST)},
        {"sender": [FIRST, FIRST]},
        {"receiver": []},
        {"receiver": [LAST, None], "together": True},
        {"sender": (FIRST, 0)},
        {"sender": "layers[0].mlp_out[0, 0, 0, 0]"},
        {"sender": "layers[0].mlp_out[:, :, 99:]"},
        {"sender": "transformer.h_0.mlp.outptu"},
        {"receiver": "layers[1].mlp"},
        {"components": ["nothing"]},
        {"corrupted": CORRUPTED[:, 1:]},
        {"corrupted": CLEAN, "normalize": True},
        {"sender": "transformer.h_0.attn.attention_mask"},
    ],
)
def test_invalid_paths_are_errors(pg: PatchableGraph, changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"sender": FIRST, "receiver": LAST, "clean": CLEAN, "corrupted": CORRUPTED}
    with pytest.raises((ExperimentError, UnknownPathError)):
        path_patch(pg, **(given | {"metric": METRIC, "progress": False} | changes))
