"""*Show activation*: the value of a node as a plain hook sees it, drawn; what runs for it, what is kept; tokens."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph
from graphpatch_notebook.errors import ChosenPatchError, SessionError
from graphpatch_notebook.notebook.runs import Runs
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.expressions import Origin
from graphpatch_notebook.notebook.session.session import Session
from graphpatch_notebook.patchable_graph import captured
from tests.notebook.replies import received
from tests.noted import Noted
from tests.zoo import case_by_name


class Counts(nn.Module):
    """Attention-like values; counts its runs."""

    noted = Noted()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 6)
        self.register_buffer("scale", torch.full((6,), 2.0))

    def forward(self, x: Tensor, flag: bool = True) -> Tensor:
        Counts.noted()
        if not flag:
            return x.sum(-1)
        hidden = self.linear(x) * self.scale
        scores = hidden @ hidden.transpose(-1, -2)
        return scores.softmax(-1)


X = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pg() -> PatchableGraph:
    return PatchableGraph(Counts().eval(), X)


def runs_of(pg: PatchableGraph, *patches: ChosenPatch, tokenizer: Any = None, **more: Any) -> Runs:
    session = Session(pg, Origin("pg", "model"))
    session.extend(patches)
    runs = Runs(session, lambda: {"x": X, "head": 2, "torch": torch}, **more)
    pg.tokenizer = tokenizer
    return runs


def shown(runs: Runs, path: str, plane: str | None = None, is_patched: bool = False, inputs: str | None = None) -> Any:
    number = runs.start_activation(path, plane, is_patched, inputs)
    runs.wait(number, 10)
    status, buffers = received(runs.status(number))
    assert status["state"] == "done", status
    plot = status["view"]["plot"]
    if plot["type"] == "heatmap":
        assert len(buffers) == 1
        plot["values"] = np.frombuffer(buffers[plot["buffer"]], "<f4").reshape(plot["rows"], plot["columns"])
    return number, status["view"]


def test_another_plane_runs_nothing(pg: PatchableGraph) -> None:
    runs = runs_of(pg)
    number, _ = shown(runs, "hidden")
    count = len(Counts.noted.values)
    expected = (pg._module.linear(X) * pg._module.scale).detach()
    again, view = shown(runs, "hidden", "1, head")
    assert (again, len(Counts.noted.values)) == (number, count)
    assert np.array_equal(view["plot"]["values"], expected[1, 2].numpy())
    assert view["plot"]["slice"] == "1, head"
    with pytest.raises(ChosenPatchError, match="leaves 3 dimensions") as caught:
        runs.start_activation("hidden", "1", False, None)
    assert caught.value.field == "plane"
    assert received(runs.status(number))[0]["view"]["plot"]["slice"] == "1, head"
    assert len(Counts.noted.values) == count


def test_patched_values_are_what_came_of_all_patches(pg: PatchableGraph) -> None:
    runs = runs_of(
        pg, ChosenPatch("linear.linear", "zero"), ChosenPatch("hidden", "add", value="1"),
        ChosenPatch("hidden", "add", value="2", slice=":, :, 0"),
    )  # fmt: skip
    _, view = shown(runs, "hidden", None, True)
    assert view["plot"]["values"].tolist() == [[3] * 6] + [[1] * 6] * 4
    _, view = shown(runs, "hidden", None, False)
    assert view["statistics"]["std"] > 0.1


def test_parameters_and_buffers_need_no_run(tmp_path: Any) -> None:
    pg = PatchableGraph(Counts().eval(), X.clone())
    captured(pg).examples.args[0].zero_()  # nothing to run on
    runs = runs_of(pg, ChosenPatch("linear.weight", "zero"))
    count = len(Counts.noted.values)
    _, view = shown(runs, "linear.weight")
    assert np.array_equal(view["plot"]["values"], pg._module.linear.weight.detach().numpy())
    _, view = shown(runs, "scale", None, True)
    assert view["plot"]["counts"] == [6]
    with torch.no_grad():
        pg._module.linear.weight.fill_(5)
    _, view = shown(runs, "linear.weight", "1:3, :")
    assert view["plot"]["values"].tolist() == [[5.0] * 4] * 2
    assert len(Counts.noted.values) == count
    _, view = shown(runs, "linear.weight", None, True, "torch.ones(1, 1, 1, 4)")
    assert view["statistics"]["max"] == 0


def test_planes_are_checked_before_anything_runs(pg: PatchableGraph) -> None:
    runs, count = runs_of(pg), len(Counts.noted.values)
    for path, plane, field in (("hidden", "0", "plane"), ("hidden", "5, 0", "plane"), ("hiden", None, "path"),
                               ("hidden", "f(1)", "plane"), ("linear", None, "path")):  # fmt: skip
        with pytest.raises(ChosenPatchError) as caught:
            runs.start_activation(path, plane, False, None)
        assert caught.value.field == field
    with pytest.raises(ChosenPatchError, match="'y'") as caught:
        runs.start_activation("hidden", None, False, "y")
    assert caught.value.field == "inputs"
    assert len(Counts.noted.values) == count


def test_values_are_kept_until_all_views_are_closed(pg: PatchableGraph) -> None:
    runs = runs_of(pg)
    kept = []

    def held() -> Any:
        gc.collect()
        return [one() is not None for one in kept]

    for path in ("hidden", "scores"):
        number, _ = shown(runs, path)
        value = runs._started[number][0].result.value
        kept.append(weakref.ref(value))
        del value
    assert held() == [False, True]
    runs.close_activation(number)
    assert held() == [False, False]


class Waits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate: threading.Event | None = None
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        while self.gate is not None and not self.gate.is_set():
            time.sleep(0.001)
        return self.linear(x)


def test_a_later_activation_replaces_a_running_one_and_a_run_does_not() -> None:
    model = Waits()
    pg = PatchableGraph(model, X)
    model.gate = threading.Event()
    runs = runs_of(pg)
    first = runs.start_activation("linear.linear", None, False, None)
    with pytest.raises(SessionError):
        runs.start(None)
    second = runs.start_activation("output", None, False, None)
    runs.wait(first, 10)
    assert received(runs.status(first))[0]["state"] == "interrupted"
    runs.interrupt(second)
    runs.wait(second, 10)
    assert received(runs.status(second))[0]["state"] == "interrupted"
    third = runs.start(None)
    with pytest.raises(SessionError):
        runs.start_activation("output", None, False, None)
    model.gate.set()
    runs.wait(third, 10)
    assert received(runs.status(third))[0]["state"] == "done"
    closed = runs.start_activation("output", None, False, None)
    runs.close_activation(closed)


# --------------------------------------------------------------------------------------------------------------------
# Language models


class Words:
    def decode(self, ids: list[int]) -> str:
        return f" w{ids[0]}"


@pytest.mark.parametrize("name", ["gpt2-eager", "llama-eager"])
def test_attention_patterns_have_tokens_on_both_sides(name: str) -> None:
    model = case_by_name(name).build()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    pg = PatchableGraph(model, input_ids=ids)
    path = next(
        path for path, node in pg.nodes.items() if "attn" in path and node.shape is not None
        and tuple(node.shape)[-2:] == (5, 5) and node.op == "softmax"
    )  # fmt: skip
    _, view = shown(runs_of(pg, tokenizer=Words()), path)
    assert view["row_labels"] == view["column_labels"] == [" w5", " w6", " w7", " w8", " w9"]
    values = view["plot"]["values"]
    assert np.allclose(values.sum(1), 1, atol=1e-6)
    assert (np.triu(values, 1) == 0).all()


@pytest.mark.parametrize("name", ["gpt2-eager", "llama-sdpa"])
def test_a_run_of_a_language_model_reports_its_next_tokens(name: str) -> None:
    model = case_by_name(name).build()
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    pg = PatchableGraph(model, ids, attention_mask=mask)
    path = next(path for path in pg.nodes if path.endswith("mlp.output"))
    runs = runs_of(pg, ChosenPatch(path, "zero"), tokenizer=Words())
    number = runs.start(None)
    runs.wait(number)
    report = received(runs.status(number))[0]["report"]
    assert report["changes"][0]["path"] == "output|logits"
    assert report["warnings"] == []
    assert [one["position"] for one in report["predictions"]] == [2, 3]
    assert [one["prompt"] for one in report["predictions"]] == [
        Words().decode(own) for own in ([5, 6, 7], [9, 10, 11, 12])
    ]
    assert runs.last is not None
    for number, one in enumerate(report["predictions"]):
        for run, output in (("before", runs.last.unpatched_output), ("after", runs.last.output)):
            probabilities = output.logits[number, one["position"]].softmax(-1)
            best = probabilities.topk(10)
            first = sorted((row for row in one["rows"] if row[run][0] < 10), key=lambda row: row[run][0])
            assert [row["text"] for row in first] == [f" w{n}" for n in best.indices.tolist()]
            assert [row[run][1] for row in first] == pytest.approx(best.values.tolist())
        assert any(row["before"] != row["after"] for row in one["rows"])
