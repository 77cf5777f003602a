"""Law 4: where graphs run, they equal eager bit for bit, or are refused; over the zoo."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from graphpatch_notebook.capture import capture
from graphpatch_notebook.errors import LiveFallbackWarning
from graphpatch_notebook.graph_modules import GraphModule, build_hierarchy
from graphpatch_notebook.graph_modules.verification import verify
from graphpatch_notebook.options import ExtractionOptions
from tests.zoo import CASES, Case, seed_all
from tests.zoo.values import bit_equal

pytestmark = [
    pytest.mark.filterwarnings("ignore::graphpatch_notebook.LiveFallbackWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]
RUNS = 3  # the first two are examinations

# Modules that the graph of the example itself cannot stand for, and why.
REFUSED_ON_EXAMPLE = {
    "a cache": r"\b(DynamicCache|EncoderDecoderCache|StaticCache)\b",
    "values read into Python": r"reads a value into Python",
}


def captured(case: Case) -> tuple[nn.Module, GraphModule]:
    model = case.build()
    seed_all()
    call = case.example()
    return model, build_hierarchy(capture(model, ExtractionOptions(), call.args, call.kwargs))


def run(module: Any, case: Case, model: nn.Module, name: str) -> Any:
    call = case.calls(model)[name]
    seed_all(5)
    return call.run(module)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_graph_modules_equal_the_model(case: Case) -> None:
    model, root = captured(case)
    twin = case.build()
    if case.mutates_state:  # each run has an effect on the next: both go through the same runs
        seed_all()
        case.example().run(twin)
    else:
        twin = model
    for name in case.calls(model):
        for _ in range(RUNS):
            expected = run(twin, case, twin, name)
            assert bit_equal(run(root, case, model, name), expected) is None, name


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_verified_graphs_equal_the_model(case: Case) -> None:
    model, root = captured(case)
    for name in case.calls(model):
        call = case.calls(model)[name]
        seed_all(5)
        report = verify(root, call.args, call.kwargs)
        assert report.frames
        if case.mutates_state:
            continue
        assert bit_equal(run(root, case, model, name), run(model, case, model, name)) is None, name
        for frame in report.frames:
            assert frame.status in ("equal", "refused", "opaque", "not reached")
            assert frame.reason is not None or frame.status in ("equal", "not reached")


TRANSFORMERS_WITHOUT_CACHE = ["bert-eager", "roberta-eager", "vit-eager", "distilbert-eager"]


@pytest.mark.parametrize("name", TRANSFORMERS_WITHOUT_CACHE)
def test_whole_transformers_run_as_graphs(name: str) -> None:
    pytest.importorskip("transformers")
    case = next(case for case in CASES if case.name == name)
    model = case.build()
    call = case.example()
    kwargs = call.kwargs
    root = build_hierarchy(capture(model, ExtractionOptions(), call.args, kwargs))
    report = verify(root, call.args, kwargs)
    assert report.is_equal, str(report)
    assert len(report.frames) > 20
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        verify(root, call.args, kwargs)
        patch.setattr(type(model), "forward", None)
        root.belief.watch._forward = model.forward
        assert root(*call.args, **kwargs)[0].shape == model_output_shape(root)


def model_output_shape(root: GraphModule) -> torch.Size:
    spec = root.frame.output_node.spec
    return spec.children[0][2].shape


def test_refusals_are_seen(recwarn: pytest.WarningsRecorder) -> None:
    case = next(case for case in CASES if case.name == "awkward-branch-on-sum")
    _, root = captured(case)
    with pytest.warns(LiveFallbackWarning, match="reads a value into Python"):
        case.example().run(copy.deepcopy(root))
