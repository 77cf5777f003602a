"""Law 4: where graphs run, they equal eager bit for bit, or are refused; over the zoo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from graphpatch_notebook import GraphInterpreter
from graphpatch_notebook.capture import capture
from graphpatch_notebook.graphs import GraphModule, build_hierarchy
from graphpatch_notebook.graphs.verification import verify
from graphpatch_notebook.options import ExtractionOptions
from tests.laws.captures import leaves_its_state_alone, some_cases
from tests.zoo import CASES, Case, installed, seed_all
from tests.zoo.values import bit_equal

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
]


def captured(case: Case) -> tuple[nn.Module, GraphModule]:
    model = case.build()
    seed_all()
    call = case.example()
    return model, build_hierarchy(capture(model, ExtractionOptions(), call.args, call.kwargs))


def run(module: Any, case: Case, model: nn.Module, name: str) -> Any:
    call = case.calls(model)[name]
    seed_all(5)
    return call.run(module)


@pytest.mark.slow
@some_cases(leaves_its_state_alone)
def test_graphs_equal_the_model_on_all_calls(case: Case) -> None:
    """What verified graphs return, run as code and node by node, is what the model returns."""
    model, root = captured(case)
    for name, call in case.calls(model).items():
        seed_all(5)
        report = verify(root, call.args, call.kwargs)
        assert all(frame.reason for frame in report if frame.status in ("differing", "not comparable", "opaque"))
        expected = run(model, case, model, name)
        assert bit_equal(run(root, case, model, name), expected) is None, name
        if name == "example" and report.is_equal:
            assert bit_equal(run(GraphInterpreter(root).run, case, model, name), expected) is None


@pytest.mark.parametrize("case", [case for case in CASES if case.mutates_state], ids=lambda case: case.name)
def test_graphs_leave_the_same_state(case: Case) -> None:
    model, root = captured(case)
    twin = case.build()
    seed_all()
    case.example().run(twin)  # as capture did: each run has an effect on the next
    for name in case.calls(model):
        for _ in range(3):
            assert bit_equal(run(root, case, model, name), run(twin, case, twin, name)) is None, name


TRANSFORMERS_WITHOUT_CACHE = ["bert-eager", "vit-eager"]
LOOKS_FOR_PADDING = ["bert-eager"]


@pytest.mark.parametrize("name", TRANSFORMERS_WITHOUT_CACHE)
def test_whole_transformers_run_as_graphs(name: str) -> None:
    pytest.importorskip("transformers")
    case = next(case for case in CASES if case.name == name)
    model = case.build()
    call = case.example()
    kwargs = call.kwargs
    root = build_hierarchy(capture(model, ExtractionOptions(), call.args, kwargs))
    report = verify(root, call.args, kwargs)
    if name in LOOKS_FOR_PADDING and installed.TRANSFORMERS < (5, 0):
        assert [frame.reason for frame in report.frames if frame.status != "equal"] == [
            "reads a value into Python (contains: if self.config.pad_token_id in input_ids[:, [-1, 0]]:)"
        ]
        return
    assert report.is_equal, str(report)
    assert len(report.frames) > 20
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        verify(root, call.args, kwargs)
        patch.setattr(type(model), "forward", None)  # nothing but the graphs can run
        assert root.run_graph(call.args, kwargs)[0].shape == model_output_shape(root)


def model_output_shape(root: GraphModule) -> torch.Size:
    spec = root.frame.output_node.spec
    return spec.children[0][2].shape
