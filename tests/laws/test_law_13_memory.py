"""Law 13: no weight is copied, capture keeps only metadata, and needs no more memory at its peak than the forward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ProbePatch
from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.patchable_graph import captured
from tests.benchmarks.memory import peak_bytes
from tests.laws.captures import capture_of, some_cases
from tests.zoo import CASES, Call, Case, case_by_name, is_of_a_kind_of_its_own


@some_cases()
def test_records_hold_no_tensors_and_parameters_are_shared(case: Case) -> None:
    capture = capture_of(case)
    held = [value for frame in captured(capture.pg).root.walk() for value in _held(frame)]
    assert case.mutates_state or [value for value in held if isinstance(value, Tensor)] == []
    mine = {name: id(parameter) for name, parameter in capture.model.named_parameters()}
    assert {name: id(parameter) for name, parameter in capture.pg.named_parameters()} == mine
    in_hierarchy = {id(parameter) for parameter in capture.pg._graph_module.parameters()}
    assert in_hierarchy <= {id(parameter) for parameter in capture.model.parameters()} | in_hierarchy & set(
        mine.values()
    )


def _held(frame: Frame) -> list[Any]:
    """All that can be reached from the records of a frame without going through a module or another frame."""
    seen: dict[int, Any] = {}
    waiting: list[Any] = [frame.nodes, frame.output, frame.parameters, frame.doubts]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (nn.Module, Frame, type)) or callable(value):
            continue
        seen[id(value)] = value
        if isinstance(value, Node):
            waiting += [value.args, value.kwargs, value.spec]
        else:
            waiting += gc.get_referents(value) if not isinstance(value, Tensor) else []
    return list(seen.values())


def test_peak_of_capture_is_that_of_the_forward() -> None:
    case = case_by_name("gpt2-eager")
    model, call = case.build(), case.example()
    ids = torch.randint(0, 99, (8, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids)
        eager = peak_bytes(lambda: model(ids))
        captured = peak_bytes(lambda: PatchableGraph(model, ids))
    assert call.args or call.kwargs
    assert captured <= 1.1 * eager


def test_nothing_is_left_of_graphs_and_models_that_are_gone() -> None:
    """Nothing that is kept for later captures (what code reads, what classes are) keeps a model, or records.

    All models at once: a collection looks at all that the tests before this one have left.
    """
    gc.collect()
    before = _frames()
    stays = case_by_name("gpt2-eager").build()
    _used(stays, case_by_name("gpt2-eager").example())
    cases = [case for case in CASES if is_of_a_kind_of_its_own(case)]
    references = {case.name: _used(case.build(), case.example()) for case in cases}
    gc.collect()
    left = {
        name: [type(found()).__name__ for found in kept if found() is not None] for name, kept in references.items()
    }
    assert {name: classes for name, classes in left.items() if classes} == {}
    assert _frames() <= before
    assert stays is not None


def _frames() -> int:
    return sum(isinstance(value, Frame) for value in gc.get_objects())


def _used(model: nn.Module, call: Call) -> list[weakref.ref[nn.Module]]:
    """Captures a model and runs it patched; returns references to its modules."""
    pg = PatchableGraph(model, *call.args, **call.kwargs)
    if "output" in pg.nodes:
        with pg.patch({"output": ProbePatch()}):
            call.run(pg)
    return [weakref.ref(module) for module in model.modules()]
