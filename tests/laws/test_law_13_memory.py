"""Law 13: no weight is copied, capture keeps only metadata, and needs no more memory at its peak than the forward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ZeroPatch
from graphpatch_notebook.capture.records import Frame, Node
from graphpatch_notebook.patchable_graph import captured
from tests.benchmarks.memory import peak_bytes
from tests.laws.captures import capture_of, leaves_its_state_alone, some_cases
from tests.zoo import Call, Case, case_by_name


@some_cases(leaves_its_state_alone)
def test_records_hold_no_tensors(case: Case) -> None:
    capture = capture_of(case)
    held = [value for frame in captured(capture.pg).root.walk() for value in _held(frame)]
    assert [value for value in held if isinstance(value, Tensor)] == []


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


@some_cases()
def test_parameters_are_shared(case: Case) -> None:
    capture = capture_of(case)
    mine = {name: id(parameter) for name, parameter in capture.model.named_parameters()}
    assert {name: id(parameter) for name, parameter in capture.pg.named_parameters()} == mine
    in_hierarchy = {id(parameter) for parameter in capture.pg._graph_module.parameters()}
    assert in_hierarchy <= {id(parameter) for parameter in capture.model.parameters()} | in_hierarchy & set(
        mine.values()
    )


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


def test_nothing_is_left_of_a_graph_that_is_gone() -> None:
    case = case_by_name("llama-sdpa")
    model, call = case.build(), case.example()

    def construct() -> None:
        pg = PatchableGraph(model, *call.args, **call.kwargs)
        with pg.patch({"model.layers_0.output": ZeroPatch()}):
            pg(*call.args, **call.kwargs)

    construct()
    gc.collect()
    before = sum(isinstance(value, Frame) for value in gc.get_objects())
    for _ in range(3):
        construct()
    gc.collect()
    assert sum(isinstance(value, Frame) for value in gc.get_objects()) <= before


@some_cases()
def test_models_are_freed(case: Case) -> None:
    """Nothing that is kept for later captures (what code reads, what classes are) keeps a model."""
    assert _what_stays_of(case.build, case.example()) == []


def _what_stays_of(build: Callable[[], nn.Module], call: Call) -> list[str]:
    def construct() -> list[weakref.ref[nn.Module]]:
        model = build()
        PatchableGraph(model, *call.args, **call.kwargs)
        return [weakref.ref(module) for module in model.modules()]

    references = construct()
    gc.collect()
    return [type(reference()).__name__ for reference in references if reference() is not None]
