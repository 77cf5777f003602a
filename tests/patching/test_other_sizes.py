"""Law 2 at sizes that the example did not have, where sizes are doubled, rounded up or cut into chunks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from graphpatch_notebook import (
    AddPatch,
    PatchableGraph,
    PatchMapError,
    PatchValueError,
    UnknownPathError,
    ZeroPatch,
)
from graphpatch_notebook.components.dimensions import dimensions_of
from tests.laws.captures import identity
from tests.zoo import case_by_name
from tests.zoo.case import floats, seeded, tokens
from tests.zoo.submodules import Submodules
from tests.zoo.values import bit_equal


def of_transformers(name: str, **settings: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(vocab_size=99, **settings)
    return seeded(lambda: getattr(transformers, f"{name}Model")(config))


ZOO = """
awkward-loops-over-values awkward-size-plumbing mixtral-expert-loop-eager gpt2-eager llama-eager bert-eager
t5-eager bloom-eager falcon-alibi-eager torch-resnet torch-unet
""".split()


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning")
def test_other_sizes_of_the_zoo(name: str) -> None:
    case = case_by_name(name)
    model, call = case.build(), case.example()
    pg = PatchableGraph(model, *call.args, **call.kwargs)
    names = set(case.variants(model)) & {"others", "fewer", "other_size", "one_token", "odd_size", "longer", "shorter"}
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
        with pytest.raises(PatchValueError, match="'heads'"):
            pg(floats(4, 4, 12), mask=torch.ones(4))
    with pg.patch({"heads": AddPatch(1.0, any_shape=True)}, strict=True):
        pg(floats(4, 4, 12), mask=torch.ones(4))


def test_without_runs_sizes_are_not_checked_but_positions_are_refused() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.numpy().sum())

    pg = PatchableGraph(Counts(), floats(5, 6))
    with pg.patch({"mul": ZeroPatch()}):
        assert not pg(floats(7, 6)).any()
    with pytest.raises(PatchMapError, match="mul"), pg.patch({"mul": ZeroPatch(positions=0)}):
        pass


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


class Patches(Submodules, embed=partial(nn.Conv2d, 3, 4, 2, 2), places=lambda: nn.Parameter(torch.randn(1, 4, 4, 4))):
    """Takes images of one size, unless it is told to interpolate, as ViT."""

    def forward(self, x: Tensor, interpolate: bool = False) -> Tensor:
        if x.shape[-2:] != (8, 8) and not interpolate:
            raise ValueError("images are 8 by 8")
        embedded = self.embed(x)
        return embedded + functional.interpolate(self.places, embedded.shape[-2:])


def test_nothing_is_fixed_at_sizes_that_the_model_could_not_run_at_when_it_was_captured() -> None:
    model = seeded(Patches)
    pg = PatchableGraph(model, torch.randn(2, 3, 8, 8))
    larger = torch.randn(2, 3, 12, 12)
    with torch.no_grad(), pg.patch({"embed.output": AddPatch(value=1.0)}):
        patched = pg(larger, interpolate=True)
    with torch.no_grad():
        torch.testing.assert_close(patched, model(larger, interpolate=True) + 1)


@pytest.mark.parametrize("name", ["StableLm", "Llama"])
def test_components_of_a_capture_with_one_token_are_those_of_longer_ones(name: str) -> None:
    """Or there is none of that name: never a value of a branch that longer inputs do not take."""
    model = of_transformers(
        name, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    ids, found = tokens(2, 6), {}
    with torch.no_grad():
        for length in (7, 1):
            pg = PatchableGraph(model, tokens(1, length))
            for part in ("q", "k", "v", "q_rot", "k_rot", "z", "pattern"):
                path = f"layers[0].attn.{part}"
                try:
                    value = pg.record(path, ids)[path]
                except UnknownPathError:
                    continue
                if length == 7:
                    found[part] = value
                else:
                    assert torch.equal(value, found[part]), part
    assert {"z", "pattern"} <= set(found)
