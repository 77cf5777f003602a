"""Law 2 at sizes that the example did not have, where sizes are doubled, rounded up or cut into chunks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graphpatch_notebook import AddPatch, PatchableGraph, PatchValueError, ZeroPatch
from graphpatch_notebook.components.dimensions import dimensions_of
from tests.laws.captures import identity
from tests.zoo import AWKWARD, Case, case_by_name
from tests.zoo.case import floats, seed_all, seeded, tokens
from tests.zoo.values import bit_equal, same_state, snapshot


def assert_identity(model: nn.Module, example: Any, others: list[Any], call: Callable[..., Any]) -> None:
    """Patches every node with the identity, at sizes that the example did not have."""
    with torch.no_grad():
        pg = PatchableGraph(model, example)
        with pg.patch({path: identity() for path in pg.nodes}).quiet():
            for other in others:
                assert bit_equal(call(pg, other), call(model, other)) is None, tuple(other.shape)


def funnel() -> nn.Module:
    from transformers import FunnelConfig, FunnelModel

    config = FunnelConfig(
        vocab_size=99, block_sizes=[1, 1], num_decoder_layers=1, d_model=12, n_head=2, d_head=6, d_inner=16,
    )  # fmt: skip
    return seeded(lambda: FunnelModel(config))


def mamba2() -> nn.Module:
    from transformers import Mamba2Config, Mamba2Model

    config = Mamba2Config(
        vocab_size=99, hidden_size=12, num_hidden_layers=1, num_heads=4, head_dim=6, state_size=5, n_groups=1,
        chunk_size=16,
    )  # fmt: skip
    return seeded(lambda: Mamba2Model(config))


def longformer() -> nn.Module:
    from transformers import LongformerConfig, LongformerModel

    config = LongformerConfig(
        vocab_size=99, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        attention_window=8, max_position_embeddings=80,
    )  # fmt: skip
    return seeded(lambda: LongformerModel(config))


@pytest.mark.parametrize("build", [funnel, mamba2, longformer])
def test_other_sizes_of_transformers(build: Callable[[], nn.Module]) -> None:
    assert_identity(build(), tokens(2, 7), [tokens(3, 11), tokens(1, 16), tokens(2, 37)], lambda run, ids: run(ids)[0])


class Derived(nn.Module):
    """Twice the length, one more, whole chunks of it, batch times length; a hidden size as large as the length."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        places = torch.arange(2 * length)
        begun = torch.cat([x[:, :1], x], dim=1)
        padded = functional.pad(x, (0, 0, 0, -length % 64))
        chunks = padded.reshape(batch, -1, 64, 6)
        rows = x.flatten(0, 1)
        last = x[:, -min(length, 4) :]
        return begun.sum() + chunks.mean(1) * places.sum() + rows.sum() + last.sum()


def test_sizes_computed_from_the_inputs() -> None:
    assert_identity(
        Derived(),
        floats(2, 6, 6),
        [floats(1, 9, 6), floats(3, 64, 6), floats(2, 300, 6), floats(2, 3, 6)],
        lambda m, x: m(x),
    )


@pytest.mark.parametrize(
    "name", ["awkward-loops-over-values", "mixtral-expert-loop-eager", "awkward-size-plumbing", "vit-eager"]
)
@pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning")
def test_other_sizes_of_the_zoo(name: str) -> None:
    case = case_by_name(name)
    model, call = case.build(), case.example()
    pg = PatchableGraph(model, *call.args, **call.kwargs)
    names = set(case.variants(model)) & {"others", "fewer", "other_size", "one_token", "longer", "shorter"}
    with torch.no_grad():
        expected = {name: case.variants(model)[name].run(model) for name in names}
        with pg.patch({path: identity() for path in pg.nodes}).quiet():
            found = {name: case.variants(model)[name].run(pg) for name in names}
    assert names
    assert bit_equal(expected, found) is None


class Packs(nn.Module):
    """Packs heads under the same name where a mask is given: as many heads as tokens in the example."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, _ = x.shape
        heads = x.reshape((batch, 4, length, 3) if mask is None else (batch, 2, 2 * length, 3))
        return heads.reshape(batch, length, 12)


def test_a_fixed_size_that_coincides_with_the_length_stays_fixed() -> None:
    pg = PatchableGraph(Packs(), floats(4, 4, 12))
    with pg.patch({"heads": AddPatch(1.0)}):
        pg(floats(2, 9, 12))
        with pytest.raises(PatchValueError, match="dimension 1 does not follow the inputs' sizes"):
            pg(floats(4, 4, 12), mask=torch.ones(4))


def test_models_that_cannot_run_without_values() -> None:
    """Sizes that coincide with those of inputs have to do."""

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([(x * float(x.numpy().sum())).transpose(0, 1)] * 2, dim=1)

    pg = PatchableGraph(Counts(), floats(5, 6))
    assert "numpy" in str(dimensions_of(pg.nodes.root).reason)
    with pg.patch({"mul": ZeroPatch(), "transpose": ZeroPatch()}):
        pg(floats(7, 6))
    with pg.patch({"cat": ZeroPatch()}), pytest.raises(PatchValueError, match="dimension 1 does not follow"):
        pg(floats(7, 6))


def test_what_the_model_keeps_by_size_has_its_values() -> None:
    case = case_by_name("awkward-cached-by-shape")
    model, reference = case.build(), case.build()
    ((example,), ((longer,), *_)) = case.example().args, [call.args for call in case.variants(model).values()]
    pg = PatchableGraph(model, example)
    known = dimensions_of(pg.nodes.root)
    assert known.run_at_other_sizes()
    for length in {2 * example.shape[1] + 3, longer.shape[1], example.shape[1]}:
        for batch in (2 * len(example) + 3, 307, len(example)):
            x = floats(batch, length, *example.shape[2:])
            assert bit_equal(reference(x), pg(x)) is None


@pytest.mark.parametrize("case", [case for case in AWKWARD if case.mutates_state], ids=lambda case: case.name)
def test_models_that_change_themselves_are_left_alone(case: Case) -> None:
    """Law 5: nothing is left of the runs at other sizes, in the model or in the random generators."""
    model, reference = case.build(), case.build()
    call = case.example()
    seed_all()
    pg = PatchableGraph(model, *call.args, **call.kwargs)
    seed_all()
    case.example().run(reference)
    before, drawn = snapshot(model), (torch.get_rng_state(), random.getstate())
    dimensions_of(pg.nodes.root).run_at_other_sizes()
    assert same_state(model, before) is None
    assert bit_equal((torch.get_rng_state(), random.getstate()), drawn) is None
    assert bit_equal(case.example().run(reference), case.example().run(model)) is None
