"""Patches find their lines however the interpreter has specialised them.

What is read off the bytecode itself is tested in `tests/interpreters`, on newer versions of Python, too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ProbePatch


class BuiltinCalls(nn.Module):
    """Calls that Python 3.11 and later specialise, each at its own kind of instruction."""

    def forward(self, x: Tensor) -> Tensor:
        a = torch.pow(x, 2)
        b = a.sum(dim=0, keepdim=True)
        c = sum([b, b, b])
        d = c.relu() + x[0]
        return max(d, d, key=lambda t: 0).neg()


def test_patches_still_fire_after_the_code_has_warmed_up() -> None:
    model, x = BuiltinCalls(), torch.ones(3, 2)
    pg = PatchableGraph(model, x)
    for _ in range(200):
        model(x)
    probes = {path: ProbePatch() for path, node in pg.nodes.items() if not node.is_size}
    with pg.patch(probes, strict=True):
        pg(x)
    assert {path for path, probe in probes.items() if probe.activation is None} == set()
