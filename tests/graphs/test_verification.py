"""`verify`: what it says of each frame, and that it leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from graphpatch_notebook import ExtractionOptions, PatchableGraph
from graphpatch_notebook.graphs.verification import FrameReport
from tests.graphs.models import Normed
from tests.zoo.submodules import Submodules

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Calls(nn.Module):
    """A module whose forward is a linear layer and then a function of itself and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.linear(x))


def only(pg: PatchableGraph, *args: Any) -> FrameReport:
    """The report of the root; all below it are equal."""
    report = pg.verify(*args)
    assert {frame.status for frame in report.frames[1:]} == {"equal"}
    return report.frames[0]


def counted(module: Any, x: Tensor) -> Tensor:
    module.calls += 1
    return x


@pytest.mark.parametrize(
    ("function", "status", "reason"),
    [
        (lambda m, x: x * 2, "equal", None),
        (lambda m, x: x if len(x) == 3 else -x, "differing", "output: 8 of 8 values differ"),
        (lambda m, x: x[[0, 1, 2]] if len(x) == 3 else x, "differing", "its graph raises IndexError: index 2 is out"),
        (lambda m, x: x.neg_() if len(x) == 3 else x, "differing", "output: 8 of 8 values differ"),
        (lambda m, x: (x, torch.rand(1)) if len(x) == 3 else (x, None), "differing", "output|sub_1: Tensor is not"),
        (lambda m, x: x if x.sum() > 9 else x * 2, "not comparable", "reads a value into Python (bool: "),
        (counted, "not comparable", "Calls changes its 'calls' while it runs"),
        (lambda m, x: x * random.random(), "not comparable", "the model draws random numbers (of Python)"),
        (lambda m, x: x * float(np.random.rand()), "not comparable", "the model draws random numbers (of numpy)"),
        (lambda m, x: (x, object()), "not comparable", "is not one of its inputs"),
    ],
    ids="equal branch raises in_place random reads counts python numpy object".split(),
)
def test_graphs_have_these_verdicts(function: Any, status: str, reason: str | None) -> None:
    frame = only(PatchableGraph(Calls(function), X), X[:2])
    assert frame.status == status
    assert frame.reason is None if reason is None else reason in (frame.reason or "")


def test_objects_among_inputs_and_outputs() -> None:
    class Cache:
        pass

    class Caching(nn.Module):
        def forward(self, x: Tensor, cache: Any) -> Any:
            return x * 2, cache

    pg = PatchableGraph(Caching(), X, Cache())
    (frame,) = pg.verify(X, Cache())
    assert (frame.status, frame.reason) == (
        "not comparable",
        "it is given an object (Cache), whose contents are unknown",
    )


class Parent(
    Submodules,
    norm=Normed,
    bad=lambda: Calls(lambda m, x: x if x.sum() > 0 else -x),
    layers=lambda: nn.ModuleList(Calls(lambda m, x: x if len(x) == 3 else -x) for _ in range(3)),
    custom=lambda: Flat(),
    skipped=nn.Dropout,
    unreached=(4, 4),
):
    def forward(self, x: Tensor, is_short: bool = False) -> Tensor:
        x = self.skipped(self.custom(self.norm(x)))
        for layer in self.layers:
            x = layer(x)
        return x if is_short else self.unreached(self.bad(x))


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3


def extract(module: nn.Module) -> fx.Graph:
    graph = fx.Graph()
    graph.output((graph.call_method("mul", (graph.placeholder("x"), 3)),))
    return graph


OPTIONS = ExtractionOptions(classes_to_skip_compiling={nn.Dropout}, custom_extraction_functions={Flat: extract})


def test_a_report_of_everything() -> None:
    pg = PatchableGraph(Parent().eval(), OPTIONS, X)
    report = pg.verify(X)
    statuses = {frame.path: frame.status for frame in report}
    assert statuses == {
        "": "equal",
        "norm": "equal",
        "norm.norm": "equal",
        "norm.dropout": "opaque",
        "custom": "own graph",
        "skipped": "opaque",
        **{f"layers_{i}{below}": "equal" for i in range(3) for below in ("", ".linear")},
        "bad": "not comparable",
        "bad.linear": "equal",
        "unreached": "equal",
    }
    assert not report.is_equal
    assert [frame.path for frame in report.of("not comparable")] == ["bad"]
    assert [frame.path for frame in report.of("opaque")] == ["norm.dropout", "skipped"]
    assert len(report.of("equal")) == 11
    assert report.of("differing") == ()
    short = pg.verify(X[:2], is_short=True)
    assert short.counts() == {"equal": 5, "differing": 4, "opaque": 2, "own graph": 1, "not reached": 3}
    assert [frame.path for frame in short.of("differing")] == ["", "layers_0", "layers_1", "layers_2"]
    assert str(short.of("differing")[1]) == "layers_0 (Calls): differing: output: 8 of 8 values differ"


def test_hooks_that_a_graph_would_leave_out() -> None:
    model = Parent().eval()
    model.norm.register_forward_hook(lambda module, args, output: output * 2)
    report = PatchableGraph(model, OPTIONS, X).verify(X)
    assert report.of("not comparable")[0].reason == "hooks on a Normed that it calls would not run"
    assert {frame.path: frame.status for frame in report}["norm"] == "equal"


def test_edited_graphs_are_not_compared() -> None:
    pg = PatchableGraph(Parent().eval(), X)
    pg._graph_module.norm.recompile()
    report = pg.verify(X)
    assert {frame.path: frame.status for frame in report}["norm"] == "own graph"


def test_inputs_that_the_model_writes_into_are_not_written_into() -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    given = X.clone()
    assert PatchableGraph(InPlace(), X.clone()).verify(given).is_equal
    assert torch.equal(given, X)
