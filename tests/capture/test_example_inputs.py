"""The example inputs that a graph keeps: references, shared by its copies, and what is noticed of changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import ExtractionOptions, PatchableGraph
from graphpatch_notebook.capture.inputs import ExampleInputs
from graphpatch_notebook.patchable_graph import captured
from tests.zoo import installed


class Cache:
    """As those of transformers: an object that holds lists of tensors."""

    def __init__(self) -> None:
        self.layers = [{"keys": torch.zeros(1, 2)}]


@dataclass
class Batch:
    ids: Tensor = field(default_factory=lambda: torch.arange(3))
    scale: float = 1.0


def everything() -> dict[str, Any]:
    return {"t": torch.ones(2), "cache": Cache(), "batch": Batch(), "list": [1, "a", None], "nan": float("nan")}


def test_nothing_has_changed_at_first() -> None:
    kept = everything()
    inputs = ExampleInputs((kept["t"], [kept]), kept)
    assert inputs.change() is None
    assert inputs.change() is None
    assert inputs.args[0] is kept["t"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda k: k["t"].add_(1), "t was written into"),
        (lambda k: k["t"][0].zero_(), "t was written into"),
        (lambda k: k["t"].resize_(3), "t had the shape (2,), and has (3,)"),
        (lambda k: k["t"].requires_grad_(), "t has another requires_grad than before"),
        (lambda k: k["cache"].layers.append({}), "cache.layers.sub_1 is new"),
        (lambda k: k["cache"].layers[0]["keys"].add_(1), "cache.layers.sub_0.keys was written into"),
        (lambda k: k["cache"].layers[0].update(keys=torch.ones(1, 2)), "cache.layers.sub_0.keys is another object"),
        (lambda k: k["cache"].layers.clear(), "cache.layers.sub_0 is gone"),
        (lambda k: setattr(k["batch"], "scale", 2.0), "batch.scale was 1.0, and is 2.0"),
        (lambda k: setattr(k["batch"], "ids", None), "batch.ids is another object"),
        (lambda k: k["list"].__setitem__(0, True), "list.sub_0 was 1, and is True"),
    ],
)
def test_changes_are_noticed(change: Callable[[dict[str, Any]], object], words: str) -> None:
    kept = everything()
    inputs = ExampleInputs((), dict(kept))
    change(kept)
    assert inputs.change() == words


def test_a_tensor_at_the_address_of_a_deleted_one_is_a_change() -> None:
    for _ in range(20):  # the new one may be where the old one was
        kept = [torch.ones(2)]
        inputs = ExampleInputs((kept,), {})
        kept.clear()
        kept.append(torch.zeros(2))
        assert inputs.change() == "argument 0.sub_0 is another object"


def test_containers_that_contain_themselves_are_visited_once() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    inputs = ExampleInputs((loop,), {})
    assert inputs.change() is None
    loop[0] = 2
    assert inputs.change() == "argument 0.sub_0 was 1, and is 2"


def test_inference_tensors_can_be_inputs() -> None:
    with torch.inference_mode():
        x = torch.ones(2)
    assert ExampleInputs((x,), {}).change() is None


class Grows(nn.Module):
    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.append(x)
        return x * 2


def test_a_graph_keeps_its_inputs_without_the_options_and_shares_them_with_copies() -> None:
    x = torch.ones(2)
    pg = PatchableGraph(nn.ReLU(), ExtractionOptions(), x)
    assert captured(pg).examples.args == (x,)
    for other in (copy.copy(pg), copy.deepcopy(pg)):
        assert captured(other).examples is captured(pg).examples
    x.add_(1)
    assert captured(pg).examples.change() == "argument 0 was written into"


def test_what_the_capture_itself_changes_is_a_change() -> None:
    pg = PatchableGraph(Grows(), torch.ones(2), kept=[])
    assert captured(pg).examples.change() == "kept.sub_0 is new"


def test_graphs_without_a_run_have_none(tmp_path: Any) -> None:
    pg = PatchableGraph(nn.Linear(2, 3), torch.ones(1, 2))
    pg.save(tmp_path / "linear.safetensors")
    assert captured(PatchableGraph.load(tmp_path / "linear.safetensors")).examples is None
    if installed.TORCH < (2, 6):  # of which no program is taken: see integrations/test_old_torch.py
        return
    program = torch.export.export(nn.Sequential(nn.Linear(2, 3)), (torch.ones(1, 2),))
    assert captured(PatchableGraph.from_exported(program)).examples is None


def test_inputs_are_not_part_of_the_model() -> None:
    x = nn.Parameter(torch.ones(2))
    pg = PatchableGraph(nn.Linear(2, 3), x)
    assert pg.state_dict().keys() == {"weight", "bias"}
    assert len(list(pg.parameters())) == 2
