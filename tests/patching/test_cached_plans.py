"""Contexts that are entered for the same frames share what is known of these, and nothing of their patches."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ProbePatch


class Twice(nn.Module):
    """One module is called twice, and holds one that is called once each time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.inner(x)))


X = torch.linspace(-1, 1, 6).reshape(2, 3)


def outputs() -> tuple[PatchableGraph, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Twice().eval()
    first = model.inner(X)
    second = model.inner(first)
    return PatchableGraph(model, X), {
        "inner_0.sub_0.output": model.inner[0](X),
        "inner_0.output": first,
        "inner_1.sub_0.output": model.inner[0](first),
        "inner_1.output": second,
        "last.output": model.last(second),
        "output": model.last(second),
    }


@torch.no_grad()
def test_each_set_of_paths_in_any_order_many_times() -> None:
    pg, expected = outputs()
    sets = [paths for size in (1, 2, 3) for paths in combinations(expected, size)]
    assert len(sets) > 40  # more than are remembered
    for paths in (*sets, *[tuple(reversed(paths)) for paths in sets], *sets):
        probes = {path: ProbePatch() for path in paths}
        with pg.patch(probes, strict=True):
            pg(X)
        for path, probe in probes.items():
            assert torch.equal(probe.activation, expected[path])
