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
    ("patch_map", "parts"),
    [
        ({"hiden": ZeroPatch()}, ["'hiden'", "'hidden'"]),
        ({"linear.wieght": ZeroPatch()}, ["'wieght'", "'linear.weight'"]),
        ({"linear": ZeroPatch()}, ["'linear'"]),
        ({"output": ZeroPatch()}, ["'output|hidden', 'output|pair.sub_0'"]),
        ({"output.hidden": ZeroPatch()}, ["'output|hidden'"]),
        ({"output|pair.sub_7": ZeroPatch()}, ["'sub_7'", "'output|pair'"]),
        ({"x[0]": ZeroPatch()}, ["'x[0]'"]),
        ({"x": ZeroPatch}, ["'x'", "ZeroPatch(...)"]),
        ({"x": 0}, ["'x'", "int"]),
        ({"x": [ZeroPatch(), "zero"]}, ["'x'", "'zero'"]),
        ({"x": ZeroPatch(slice=(0, 0, 0))}, ["'x'", "(0, 0, 0)"]),
        ({"x": ZeroPatch(slice="0")}, ["'x'", "'0'"]),
        ({"x": AddPatch([1.0])}, ["'x'", "list"]),
        ({"x": CustomPatch(3)}, ["'x'", "custom_op"]),
        ([("x", ZeroPatch())], ["list"]),
    ],
)
def test_errors_name_the_path_and_what_to_write(pg: PatchableGraph, patch_map: Any, parts: list[str]) -> None:
    text = str(refused(pg, patch_map))
    assert [part for part in parts if part not in text] == []


def test_an_empty_list_means_no_patch_as_an_empty_map_does(pg: PatchableGraph) -> None:
    x = torch.ones(2, 3)
    expected = pg(x)
    with pg.patch({"x": [], "hidden": ()}):
        assert torch.equal(pg(x)["hidden"], expected["hidden"])
    with pg.patch({"h*": ZeroPatch(), "hidden": []}):  # a path of its own leaves it out of the pattern
        assert torch.equal(pg(x)["hidden"], expected["hidden"])
    assert "'hiden'" in str(refused(pg, {"hiden": []}))


def test_all_of_it_in_one_error(pg: PatchableGraph) -> None:
    text = str(refused(pg, {"nowhere": ZeroPatch(), "linear": ZeroPatch(), "x": ZeroPatch(slice=(0, 0, 0))}))
    assert [line for line in ("'nowhere'", "'linear'", "'x'") if line not in text] == []


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
