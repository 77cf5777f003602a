"""Sweeps over models that are made to make them wrong: their numbers are those of the loop all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, CustomPatch, PatchableGraph, ReplacePatch, ZeroPatch
from tests.experiments.engine.awkward_rows import ELSEWHERE, INTERACTING, TrainedNorm
from tests.experiments.engine.loops import TOLERANCE, Everything, disagreement, leaves_of, looped, swept
from tests.zoo import Call, seed_all
from tests.zoo.case import seeded
from tests.zoo.values import copy_call

pytestmark = [
    pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning"),
]


def patches_everywhere(pg: PatchableGraph, steps: int = 12) -> list[dict[str, Any]]:
    """Returns cells that patch each node, the ones in the middle first, each in several of these ways."""
    paths = [path for path, meta in pg.nodes.items() if not meta.is_size and not meta.is_view_filled_later]
    paths = [path for path in paths if pg.nodes[path].shape is not None] or paths
    maps: list[dict[str, Any]] = []
    for number, path in enumerate(paths[:: max(1, len(paths) // steps)]):
        meta = pg.nodes[path]
        if not meta.dtype.is_floating_point:
            maps.append({path: ZeroPatch()})
            continue
        ways = [
            ZeroPatch(slice=(..., 0)),
            AddPatch(value=0.5),
            AddPatch(value=0.5, slice=0),
            CustomPatch(custom_op=flipped),
            ReplacePatch(value=torch.linspace(-2, 2, meta.shape.numel()).view(meta.shape)),
            CustomPatch(custom_op=doubled),
            ReplacePatch(value=1.5, slice=-1),
            ZeroPatch(),
            AddPatch(value=torch.tensor(3.0)),
        ]
        if not meta.shape:
            ways = [AddPatch(value=0.5), ZeroPatch(), ReplacePatch(value=torch.tensor(2.0))]
        maps += [{path: ways[(number * 3 + turn) % len(ways)]} for turn in range(3)]
    maps.append({path: AddPatch(value=0.25) for path in paths[1::3] if pg.nodes[path].dtype.is_floating_point})
    return [*maps, {}]


def flipped(value: Tensor) -> Tensor:
    return value.flip(0) if value.dim() else -value


def doubled(value: Tensor) -> Tensor:
    return value * 2


MODELS = [*INTERACTING, *ELSEWHERE]


@pytest.mark.parametrize("batches", [(None, "auto"), pytest.param((4,), marks=pytest.mark.exhaustive)], ids=str)
@pytest.mark.parametrize(
    ("kind", "call"), MODELS, ids=[f"{kind.__name__}-{number}" for number, (kind, call) in enumerate(MODELS)]
)
def test_sweeps_equal_loops(kind: type[nn.Module], call: Call, batches: tuple[Any, ...]) -> None:
    """Each sweep runs on a new model, equal to that of the loop."""

    def new() -> PatchableGraph:
        example = copy_call(call)
        seed_all(2)
        return PatchableGraph(seeded(kind, training=kind is TrainedNorm), *example.args, **example.kwargs)

    with torch.no_grad():
        sizes = [len(leaf) for leaf in leaves_of(copy_call(call).run(new()))]
    metric = Everything(sum(sizes))
    pg, unpatched = new(), new()
    seed_all(3)
    expected = looped(pg, patches_everywhere(pg), lambda: copy_call(call), metric, unpatched=unpatched)
    for batch in batches:
        other = new()
        seed_all(3)
        found = swept(other, patches_everywhere(other), copy_call(call), metric, batch=batch)
        tolerance = 0.0 if batch is None else TOLERANCE
        assert disagreement(expected, found, tolerance, sizes) is None, f"{batch=}, {found.remarks}"
