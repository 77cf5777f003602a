"""Law 10: a patch that never fired during a call is reported, with the reason."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import GraphPatchWarning, PatchableGraph, PatchNotFiredError, ProbePatch, ZeroPatch
from tests.zoo.submodules import Submodules


class Branching(Submodules, often=(2, 2), seldom=[(2, 2), nn.ReLU]):
    def forward(self, x: Tensor, detour: bool = True) -> dict[str, Tensor]:
        x = self.often(x)
        if detour:
            bent = x * 2
            return {"x": self.seldom(bent), "extra": bent}
        return {"x": x}


@pytest.fixture
def pg() -> PatchableGraph:
    return PatchableGraph(Branching(), torch.ones(1, 2))


X = torch.ones(1, 2)


def test_patches_that_fire_are_not_reported(pg: PatchableGraph) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pg.patch({path: ProbePatch() for path in pg.nodes}):
            pg(X)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("bent", "its module ran, but did not"),
        ("seldom.sub_0.linear", "'seldom.sub_0' was not called"),
        ("output|extra", "the dict in this run does not hold 'extra'"),
    ],
)
def test_reasons(pg: PatchableGraph, path: str, why: str) -> None:
    message = re.escape(f"{path!r}: {why}")
    with pg.patch({path: ZeroPatch()}), pytest.warns(GraphPatchWarning, match=message):
        pg(X, detour=False)
    with pg.patch({path: ZeroPatch()}, strict=True), pytest.raises(PatchNotFiredError, match=message):
        pg(X, detour=False)


def test_all_unfired_patches_are_in_one_report(pg: PatchableGraph) -> None:
    with (
        pg.patch({"bent": ZeroPatch(), "seldom.output": ZeroPatch(), "often.output": ZeroPatch()}),
        pytest.warns(
            GraphPatchWarning, match=r"2 patches never fired during this call: 'bent': .*; 'seldom\.output': "
        ),
    ):
        pg(X, detour=False)


def test_each_call_is_reported_for_itself(pg: PatchableGraph) -> None:
    with pg.patch({"bent": ZeroPatch()}):
        pg(X)
        with pytest.warns(GraphPatchWarning, match="'bent'"):
            pg(X, detour=False)


def test_a_block_without_a_call_says_nothing(pg: PatchableGraph) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pg.patch({"bent": ZeroPatch()}, strict=True):
            pass


@pytest.mark.parametrize("calls", [1, 2])
def test_it_is_shown_in_each_context_that_a_line_enters(pg: PatchableGraph, calls: int) -> None:
    """As Python shows it by default: else who runs a cell again would see numbers without a patch, and no warning."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            with pg.patch({"bent": ZeroPatch()}):
                for _ in range(calls):
                    pg(X, detour=False)
    assert len(shown) == 3
    assert {warning.filename for warning in shown} == {__file__}
