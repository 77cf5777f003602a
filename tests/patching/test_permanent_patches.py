"""Graphs made by `pg.edit` do what `with pg.patch(...)` does, in every call and on every way; the original does not."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    GraphPatchWarning,
    PatchableGraph,
    ProbePatch,
    ZeroPatch,
)
from graphpatch_notebook.experiments import attribute
from tests.tiny_models import gpt2

IDS = torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(0))
MLP, STREAM = "transformer.h_1.mlp.output", "transformer.h_0.output"
FIRST = {MLP: AddPatch(value=torch.linspace(-1, 1, 16)), "transformer.h_0.mlp.act.mul_3": ZeroPatch(slice=(..., 3))}
SECOND = {MLP: CustomPatch(custom_op=lambda value: value * 2), "transformer.wpe.weight": AddPatch(0.1)}


@pytest.fixture(scope="module")
def pg() -> PatchableGraph:
    return PatchableGraph(gpt2(), IDS)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_calls_are_those_of_contexts_and_the_original_stays(pg: PatchableGraph) -> None:
    before = pg(IDS).logits
    edited = pg.edit(FIRST).edit(SECOND)
    with pg.patch(FIRST), pg.patch(SECOND):
        expected, tokens = pg(IDS).logits, pg.generate(IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(edited(IDS).logits, expected)
    assert torch.equal(edited(input_ids=IDS[:1, :3]).logits, _patched(pg, IDS[:1, :3]))
    assert torch.equal(edited.generate(IDS, max_new_tokens=3, do_sample=False), tokens)
    with pg.patch({STREAM: ZeroPatch()}):  # of the other graph
        assert torch.equal(edited(IDS).logits, expected)
    with edited.patch({STREAM: ZeroPatch()}).quiet():
        assert torch.equal(pg(IDS).logits, before)
    assert torch.equal(pg(IDS).logits, before)
    assert torch.equal(pg._module(IDS).logits, before)
    for other in (copy.copy(edited), copy.deepcopy(edited)):
        assert torch.equal(other(IDS).logits, expected)
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda graph: graph(IDS).logits, [edited, pg] * 4)
        assert all(torch.equal(result, want) for result, want in zip(results, [expected, before] * 4, strict=True))


def _patched(pg: PatchableGraph, ids: Tensor) -> Tensor:
    with pg.patch(FIRST), pg.patch(SECOND):
        return pg(ids).logits


def test_contexts_and_experiments_come_after_permanent_patches(pg: PatchableGraph) -> None:
    edited, probe, other = pg.edit(SECOND), ProbePatch(), ProbePatch()
    with edited.patch(FIRST), edited.patch({MLP: probe}):
        found = edited(IDS).logits
    with pg.patch(SECOND), pg.patch(FIRST), pg.patch({MLP: other}):
        assert torch.equal(found, pg(IDS).logits)
    assert torch.equal(probe.activation, other.activation)

    def without(unit: int) -> dict[str, Any]:
        return {MLP: ZeroPatch(slice=(..., unit))}

    def last(output: Any) -> Tensor:
        return output.logits[:, -1, 7].sum()

    swept = edited.sweep({"unit": [0, 3]}, without, IDS, metric=last, progress=False)
    with torch.enable_grad():
        scores = attribute(edited, last, clean=IDS[:1], corrupted=IDS[1:], paths=[STREAM])
    with pg.patch(SECOND):
        looped = pg.sweep({"unit": [0, 3]}, without, IDS, metric=last, progress=False)
        with torch.enable_grad():
            expected = attribute(pg, last, clean=IDS[:1], corrupted=IDS[1:], paths=[STREAM])
    assert swept.values.tolist() == looped.values.tolist()
    assert scores.values.tolist() == expected.values.tolist()


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ({"positions": 60}, "its positions (60) were not reached"),
        ({"positions": [2, 60]}, "at positions 60 (of 2, 60)"),
        ({"steps": "decoding"}, "its steps ('decoding') were not reached"),
        ({"steps": [0, 7]}, "at steps 7 (of 0, 7)"),
    ],
    ids=str,
)
def test_steps_and_positions_that_are_not_reached_are_reported(
    pg: PatchableGraph, where: dict[str, Any], why: str
) -> None:
    """As in a block; outside of one, with each call."""
    edited, why = pg.edit({MLP: AddPatch(1.0, **where)}), re.escape(why)
    for _ in range(2):
        with pytest.warns(GraphPatchWarning, match=f"during this call: .*{why}"):
            edited(IDS)
    with pytest.warns(GraphPatchWarning, match=f"in this context: .*{why}"), edited.patch({MLP: AddPatch(0.0)}):
        edited(IDS)


def test_patch_that_never_fires_is_reported_where_the_model_runs() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor, doubled: bool = True) -> Tensor:
            return x * 2 if doubled else x

        def size(self) -> int:
            return 3

    edited = PatchableGraph(Branch(), torch.ones(2)).edit({"mul": AddPatch(1.0)})
    assert edited.size() == 3
    for _ in range(2):
        with pytest.warns(GraphPatchWarning, match="'mul': its module ran"):
            edited(torch.ones(2), doubled=False)
