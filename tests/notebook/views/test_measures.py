"""The columns of the tree: parameters, operations, times, statistics and gradients, beside plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import SessionError
from graphpatch_notebook.notebook.views.browser import Browser
from graphpatch_notebook.notebook.views.measures import MEASURES
from graphpatch_notebook.notebook.views.skeleton import skeleton_of


class Net(nn.Module):
    """Two layers, and the loss of their output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("shift", torch.tensor([0.0, float("nan"), 1.0]))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        shifted = logits + self.shift
        out = {"logits": logits, "shifted": shifted}
        return out if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **out}


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])


def columns(browser: Browser, *names: str) -> dict[str, dict[str, float]]:
    """Returns the columns by path, as the front end gets them."""
    browser.show_columns(*names)
    skeleton = skeleton_of(browser.graph)
    values = torch.frombuffer(bytearray(browser.scores), dtype=torch.float32).view(len(browser.score_names), -1)
    paths = [skeleton.path(row) for row in range(len(skeleton))]
    return {
        name: {path: value for path, value in zip(paths, column, strict=True) if value == value}  # not NaN
        for name, column in zip(browser.score_names, values.tolist(), strict=True)
    }


def test_columns_say_what_plain_torch_says(inputs: tuple[Tensor, Tensor]) -> None:
    model = Net()
    browser = PatchableGraph(model, *inputs).browse()
    found = columns(browser, *MEASURES)
    assert list(found) == list(MEASURES)
    assert found["parameters"][""] == sum(one.numel() for one in model.parameters())
    assert found["parameters"]["body.sub_0"] == 40
    assert found["bytes"]["body.sub_0.weight"] == 4 * 32
    assert found["bytes"]["body.sub_0.output"] == 4 * 40
    with FlopCounterMode(display=False) as counter:
        output = model(*inputs)
    assert found["FLOPs"][""] == counter.get_total_flops()
    assert found["FLOPs"]["body.sub_0"] == found["FLOPs"]["body.sub_0.linear"] == 2 * 5 * 4 * 8
    assert "body.sub_1" not in found["FLOPs"]  # torch counts none there
    logits = output["logits"]
    for path in ("body.output", "body"):
        assert found["mean"][path] == pytest.approx(logits.mean().item(), rel=1e-5)
        assert found["std"][path] == pytest.approx(logits.std().item(), rel=1e-5)
        assert found["norm"][path] == pytest.approx(logits.norm().item(), rel=1e-5)
    assert found["NaN"]["output|shifted"] == pytest.approx(1 / 3)
    assert found["NaN"]["body"] == 0
    weight = model.get_parameter("body.0.weight")
    gradients = torch.autograd.grad(output["loss"], [logits, weight])
    assert found["gradient"]["body"] == pytest.approx(gradients[0].norm().item(), rel=1e-5)
    assert found["gradient"]["body.sub_0.weight"] == pytest.approx(gradients[1].norm().item(), rel=1e-5)
    assert found["ms"][""] > found["ms"]["body"] > found["ms"]["body.sub_0"] > 0
    assert all(skeleton_of(browser.graph).find(path) is not None for path in found["ms"])
    assert weight.grad is None
    assert not weight._backward_hooks  # type: ignore[truthy-function]


def test_scores_stay_beside_columns_which_replace_each_other(inputs: tuple[Tensor, Tensor]) -> None:
    browser = PatchableGraph(Net(), *inputs).browse()
    browser.set_scores({"body.output": 2.0}, name="effect")
    found = columns(browser, "FLOPs", "mean")
    assert list(found) == ["effect", "FLOPs", "mean"]
    assert found["effect"] == {"body.output": 2.0}
    browser.clear_scores()
    assert list(columns(browser, "norm")) == ["norm"]
    browser.show_columns()
    assert browser.score_names == []


def test_columns_that_cannot_be_filled(inputs: tuple[Tensor, Tensor]) -> None:
    browser = PatchableGraph(Net(), inputs[0]).browse()
    with pytest.raises(ValueError, match="'speed'"):
        browser.show_columns("speed")
    with pytest.raises(SessionError, match="labels"):
        browser.show_columns("gradient")
    assert browser.score_names == []
    frozen = PatchableGraph(Net().requires_grad_(False), *inputs).browse()
    with pytest.raises(SessionError, match="require gradients"):
        frozen.show_columns("gradient")


def test_requests_of_the_front_end(inputs: tuple[Tensor, Tensor]) -> None:
    browser: Any = PatchableGraph(Net(), *inputs).browse()
    sent: list[Any] = []
    browser.send = lambda content, _: sent.append(content)

    def ask(names: list[str]) -> Any:
        browser._answer({"id": 1, "request": "columns", "payload": {"names": names, "inputs": None}})
        return sent[-1]["result"]

    while (status := ask(["FLOPs", "mean"]))["state"] == "running":
        pass
    assert (status["state"], browser.score_names) == ("done", ["FLOPs", "mean"])
    measured = browser._measuring
    assert ask(["mean"])["state"] == "done"
    assert browser.score_names == ["mean"]
    assert browser._measuring is measured  # no second run
    ask([])
    assert browser.score_names == []
