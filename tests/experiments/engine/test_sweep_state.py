"""What sweeps leave behind: nothing, however they end; and what else is active while they run counts, or is refused."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, CustomPatch, PatchableGraph, ZeroPatch
from graphpatch_notebook.errors import GraphPatchWarning
from tests.experiments.engine.loops import TOLERANCE, disagreement, looped, swept
from tests.integrations.offloaded import INPUT_IDS, SPREAD, gpt2
from tests.zoo import Call
from tests.zoo.case import floats, seeded
from tests.zoo.submodules import Submodules

X = floats(2, 4)


class Model(Submodules, a=(4, 4), b=[(4, 4), nn.Tanh], c=(4, 4)):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 2
        return self.c(h + self.b(h))


def captured() -> PatchableGraph:
    return PatchableGraph(seeded(Model), X)


def cells() -> list[dict[str, Any]]:
    units = [(..., unit) for unit in range(4)]
    return [
        *({"b.output": ZeroPatch(slice=unit)} for unit in units),
        *({"h": AddPatch(value=1.0, slice=unit)} for unit in units),
        *({"b.sub_0.weight": ZeroPatch(slice=unit)} for unit in units),
        {},
    ]


def total(output: Tensor) -> Tensor:
    return output.square().sum()


@pytest.mark.parametrize("batch", [None, "auto"])
@pytest.mark.parametrize("path", ["a.output", "h", "c.output", "a.weight", "x", "output", "b.output"])
def test_patches_of_outer_contexts_count(path: str, batch: Any) -> None:
    pg = captured()
    with pg.patch({path: AddPatch(value=0.5)}):
        loop = looped(pg, cells(), lambda: Call.of(X), total)
        found = swept(pg, cells(), Call.of(X), total, batch=batch)
    assert disagreement(loop, found, 0.0 if batch is None else TOLERANCE) is None, found.remarks
    assert (
        disagreement(looped(pg, cells(), lambda: Call.of(X), total), swept(pg, cells(), Call.of(X), total), 2e-6)
        is None
    )


def test_nothing_of_a_sweep_stays_in_memory() -> None:
    pg = captured()
    seen: list[weakref.ref[Tensor]] = []

    def metric(output: Tensor) -> Tensor:
        seen.append(weakref.ref(output))
        return output.sum()

    swept(pg, cells(), Call.of(X), metric)
    gc.collect()
    assert not any(reference() is not None for reference in seen)


def test_generators_and_modes_are_left_as_they_were() -> None:
    pg = captured()
    state = torch.get_rng_state()
    with torch.no_grad():
        swept(pg, cells(), Call.of(X), total)
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        inside = swept(pg, cells(), Call.of(X), total)
        assert torch.is_inference_mode_enabled()
    assert disagreement(looped(pg, cells(), lambda: Call.of(X), total), inside, TOLERANCE) is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("batch", [None, "auto", 3])
def test_one_failing_cell_leaves_the_others_their_numbers(batch: Any) -> None:
    pg = captured()
    maps = cells()
    maps.insert(3, {"b.output": AddPatch(value=torch.ones(7))})
    maps.insert(6, {"b.output": CustomPatch(custom_op=lambda value: 1 / 0)})
    loop = looped(pg, maps, lambda: Call.of(X), total)
    assert loop.errors[3] is not None
    assert loop.errors[6] == "ZeroDivisionError"
    with pytest.warns(GraphPatchWarning, match="cells failed"):
        found = swept(pg, maps, Call.of(X), total, batch=batch)
    assert disagreement(loop, found, 0.0 if batch is None else TOLERANCE) is None


@pytest.mark.parametrize("batch", [None, "auto"])
def test_offloaded_weights(batch: Any, tmp_path: Path) -> None:
    model = SPREAD["disk"](gpt2(), tmp_path)
    pg = PatchableGraph(model, input_ids=INPUT_IDS)
    maps = [
        {f"transformer.h_{layer}.{part}": ZeroPatch(slice=(slice(None), position))}
        for layer in range(2)
        for part in ("mlp.output", "output", "attn.c_proj.output")
        for position in (0, 3, -1)
    ]
    maps += [{"transformer.h_1.mlp.c_fc.weight": ZeroPatch(slice=number)} for number in range(3)]
    before = {name: parameter.device for name, parameter in model.named_parameters()}

    def metric(output: Any) -> Tensor:
        return output.logits[:, -1]

    loop = looped(pg, maps, lambda: Call.of(INPUT_IDS), metric)
    found = swept(pg, maps, Call.of(INPUT_IDS), metric, batch=batch)
    assert disagreement(loop, found, 0.0 if batch is None else TOLERANCE) is None, found.remarks
    assert {name: parameter.device for name, parameter in model.named_parameters()} == before
