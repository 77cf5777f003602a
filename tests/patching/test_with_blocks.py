"""Blocks that are none: a context that is never entered, one in which only the model is called, one without an end."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphpatch_notebook import GraphPatchWarning, PatchableGraph, PatchNotFiredError, ZeroPatch
from tests.zoo.values import same_state, snapshot

X = torch.ones(2, 3)
PATCHES = {"output": ZeroPatch()}


@pytest.fixture
def pg() -> PatchableGraph:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    nn.init.ones_(model[0].weight)
    return PatchableGraph(model, X)


# -- contexts that are never entered -----------------------------------------------------------------------------------


def test_a_context_that_is_never_entered_warns(pg: PatchableGraph) -> None:
    for _ in range(2):  # each time: a cell may be run again
        with pytest.warns(GraphPatchWarning, match="never entered") as told:
            pg.patch(PATCHES)
        assert told[0].filename == __file__
    with pytest.warns(GraphPatchWarning, match="never entered"):
        pg.patch(PATCHES, strict=True).quiet()


def test_a_context_says_whether_it_is_active(pg: PatchableGraph) -> None:
    context = pg.patch(PATCHES)
    assert "not active" in repr(context)
    with context:
        assert repr(context) == "<PatchContext, active>"
    assert "with pg.patch(...)" in repr(context)


# -- calls of the model itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["output", "sub_0.linear", "sub_1.input", "sub_0.weight"])
@pytest.mark.parametrize("has_grad", [True, False])
def test_a_block_that_only_calls_the_original_model_warns(pg: PatchableGraph, path: str, has_grad: bool) -> None:
    model = pg._module
    before, expected = snapshot(model), model(X)
    with torch.set_grad_enabled(has_grad):
        with (
            pytest.warns(GraphPatchWarning, match="only the Sequential itself was called"),
            pg.patch({path: ZeroPatch()}),
        ):
            assert torch.equal(model(X), expected)
        with pytest.raises(PatchNotFiredError, match="itself was called"), pg.patch({path: ZeroPatch()}, strict=True):
            model(X)
        with pytest.raises(PatchNotFiredError), pg.patch({}, strict=True), pg.patch({path: ZeroPatch()}):
            model(X)
    assert same_state(model, before) is None
