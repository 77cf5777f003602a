"""A patch map is checked whole before anything runs: one error names every problem, and how to mend it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    PatchableGraph,
    PatchMapError,
    ReplacePatch,
    UnknownPathError,
    ZeroPatch,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.runs = 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        self.runs += 1
        hidden = self.linear(x) + 1
        return {"hidden": hidden, "pair": (hidden * 2, None)}


@pytest.fixture
def pg() -> PatchableGraph:
    return PatchableGraph(Model(), torch.ones(2, 3))


def refused(pg: PatchableGraph, patch_map: Any) -> PatchMapError:
    runs = getattr(pg, "runs", None)
    with pytest.raises(PatchMapError) as caught, pg.patch(patch_map):
        pytest.fail("the block must not be entered")
    assert getattr(pg, "runs", None) == runs
    return caught.value


@pytest.mark.parametrize(
    ("patch_map", "message"),
    [
        ({"hiden": ZeroPatch()}, "no node 'hiden' in the root graph; nearest: 'hidden'"),
        ({"linear.wieght": ZeroPatch()}, "no node 'wieght' in linear; nearest: 'linear.weight'"),
        ({"linear": ZeroPatch()}, "'linear' is a graph (CompiledGraphModule)"),
        ({"output": ZeroPatch()}, "say which value: 'output|hidden', 'output|pair.sub_0'"),
        ({"output.hidden": ZeroPatch()}, "'output|hidden'"),
        ({"output|pair.sub_7": ZeroPatch()}, "no 'sub_7' in 'output|pair'"),
        ({"x[0]": ZeroPatch()}, "not a node path: 'x[0]'"),
        ({"x": ZeroPatch}, "ZeroPatch is a class; write ZeroPatch(...)"),
        ({"x": 0}, "give a patch or a list of patches, not int"),
        ({"x": [ZeroPatch(), "zero"]}, "'zero' is not a Patch"),
        ({"x": ZeroPatch(slice=(0, 0, 0))}, "slice (0, 0, 0) has 3 dimensions, but the value recorded here has 2"),
        ({"x": ZeroPatch(slice="0")}, "slice '0' cannot index a tensor"),
        ({"x": AddPatch([1.0])}, "value must be a tensor or a number, not list"),
        ({"x": CustomPatch(3)}, "custom_op must be callable, not 3"),
        ([("x", ZeroPatch())], "a patch map is a dict from paths to patches, not list"),
    ],
)
def test_errors_say_what_is_wrong_and_how_to_fix_it(pg: PatchableGraph, patch_map: Any, message: str) -> None:
    assert message in str(refused(pg, patch_map))


def test_an_empty_list_means_no_patch_as_an_empty_map_does(pg: PatchableGraph) -> None:
    x = torch.ones(2, 3)
    expected = pg(x)
    with pg.patch({"x": [], "hidden": ()}):
        assert torch.equal(pg(x)["hidden"], expected["hidden"])
    with pg.patch({"h*": ZeroPatch(), "hidden": []}):  # a path of its own leaves it out of the pattern
        assert torch.equal(pg(x)["hidden"], expected["hidden"])
    assert "no node 'hiden'" in str(refused(pg, {"hiden": []}))


def test_all_of_it_in_one_error(pg: PatchableGraph) -> None:
    text = str(refused(pg, {"nowhere": ZeroPatch(), "linear": ZeroPatch(), "x": ZeroPatch(slice=(0, 0, 0))}))
    assert text.startswith("3 problems in this patch map:\n  - no node 'nowhere'")
    assert "\n  - 'linear' is a graph" in text
    assert "\n  - 'x': ZeroPatch: slice" in text


def test_paths_without_a_value_are_key_errors_and_the_rest_value_errors(pg: PatchableGraph) -> None:
    for path in ("nowhere", "linear", pg.graph.output, pg.graph.output.pair):
        unknown = refused(pg, {path: ZeroPatch()})
        assert isinstance(unknown, UnknownPathError)
        assert isinstance(unknown, KeyError)
        assert isinstance(unknown, ValueError)
    other = refused(pg, {"hidden": ZeroPatch(slice="0")})
    assert not isinstance(other, KeyError)
    assert isinstance(other, ValueError)


def test_a_name_of_the_models_own_attributes_is_respelled() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    pg = PatchableGraph(model, torch.ones(1, 2))
    assert "'sub_0.weight'" in str(refused(pg, {"0.weight": ZeroPatch()}))


def test_an_input_that_the_example_did_not_have_can_be_patched_when_it_is_given(pg: PatchableGraph) -> None:
    seen: list[Any] = []
    with pg.patch({"mask": CustomPatch(lambda value: seen.append(value))}):
        pg(torch.ones(2, 3), mask=torch.ones(2))
        pg(torch.ones(2, 3))
    assert torch.equal(seen[0], torch.ones(2))
    assert seen[1] is None


def test_a_context_has_the_map_that_it_was_made_with(pg: PatchableGraph) -> None:
    patch_map: dict[str, Any] = {"hidden": [ReplacePatch(1.0), AddPatch(2.0)]}
    context = pg.patch(patch_map)
    patch_map["hidden"].append(AddPatch(4.0))
    patch_map["nowhere"] = ZeroPatch()
    for _ in range(2):
        with context:
            assert torch.equal(pg(torch.ones(2, 3))["hidden"], torch.full((2, 4), 3.0))
