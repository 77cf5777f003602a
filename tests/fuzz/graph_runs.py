"""The ways in which graphs run in place of the model: each gives what the oracle gives, or refuses the call."""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from graphpatch_notebook import ExtractionOptions, PatchableGraph
from graphpatch_notebook.errors import CaptureError, GraphError, GraphPatchError, GraphPatchWarning, PatchMapError
from tests.fuzz.cases import FuzzCase, Outcome, by_oracle, by_patches, difference
from tests.fuzz.oracle import Interpreter
from tests.fuzz.programs import build
from tests.fuzz.strategies import Inputs

Way: TypeAlias = Callable[[FuzzCase, Interpreter], None]
ANSWERS: Counter[tuple[str, str]] = Counter()
"""How many calls each way answered, and refused: a way that refuses everything tests nothing."""


def _all_calls(case: FuzzCase) -> list[Inputs]:
    return [case.example, *case.others]


def captured(case: FuzzCase, model: nn.Module, *options: Any) -> PatchableGraph:
    """Returns the `PatchableGraph` of a case's model."""
    call = case.example.call(case.program)
    with torch.set_grad_enabled(case.has_grad):
        return PatchableGraph(model, *options, *call.args, **call.kwargs)


def verified(case: FuzzCase, interpreter: Interpreter) -> None:
    """`verify` finds each graph equal on the example."""
    call = case.example.call(case.program)
    with torch.set_grad_enabled(case.has_grad):
        report = captured(case, build(case.program)).verify(*call.args, **call.kwargs)
    assert not report.of("differing"), str(report)
    ANSWERS["verified", "equal" if report.is_equal else "not comparable"] += 1


def written_as_fx(case: FuzzCase, interpreter: Interpreter) -> None:
    """The patched model as plain fx modules."""
    pg = captured(case, build(case.program))
    patches = {choice.text: [edit.patch() for edit in choice.edits] for choice in case.choices}
    call = case.example.call(case.program)
    with warnings.catch_warnings(), torch.set_grad_enabled(case.has_grad):
        warnings.simplefilter("ignore", GraphPatchWarning)
        expected = by_oracle(case, interpreter, case.example.call(case.program), case.choices)
        if expected.error is not None:
            return
        try:
            with pg.patch(patches):
                module = pg.to_fx(call.args, call.kwargs)
        except GraphError as error:
            ANSWERS["to_fx", str(error).split(":")[0]] += 1
            return
    for inputs in _all_calls(case):
        expected = by_oracle(case, interpreter, inputs.call(case.program), case.choices)
        call = inputs.call(case.program)
        found = Outcome(
            arguments=call, fired={choice.text for choice in case.choices}, seen={}, gradients=expected.gradients
        )
        with torch.set_grad_enabled(case.has_grad):
            try:
                found.output = module(*call.args, **call.kwargs)
            except RuntimeError as error:
                found.error = error
        _assert_same_or_refused("to_fx", inputs is case.example, expected, found)


def add_unused_call(graph_module: Any, module: nn.Module) -> None:
    """Edits a graph without an effect."""
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    with graph_module.graph.inserting_before(output):
        graph_module.graph.call_function(torch.ones, (1,))


def edited(case: FuzzCase, interpreter: Interpreter) -> None:
    """Graphs that were edited, in a way that changes nothing, are their modules from then on."""
    try:
        pg = captured(case, build(case.program), ExtractionOptions(postprocessing_function=add_unused_call))
    except CaptureError:  # it switches modes, for example
        ANSWERS["edited", "refused"] += 1
        return
    for inputs in _all_calls(case):
        expected = by_oracle(case, interpreter, inputs.call(case.program), case.choices)
        found = by_patches(case, pg, pg, inputs.call(case.program), case.choices)
        _assert_same_or_refused("edited", inputs is case.example, expected, found)


def stored(case: FuzzCase, interpreter: Interpreter) -> None:
    """What `save` wrote runs without the model, or refuses the call."""
    _stored(case, interpreter, with_model=False)


def stored_beside_model(case: FuzzCase, interpreter: Interpreter) -> None:
    """With the model at hand, all calls are answered."""
    _stored(case, interpreter, with_model=True)


def _stored(case: FuzzCase, interpreter: Interpreter, with_model: bool) -> None:
    model = build(case.program)
    pg = captured(case, model)
    call = case.example.call(case.program)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphPatchWarning)
        file = Path(folder) / "graph.safetensors"
        with torch.set_grad_enabled(case.has_grad):
            pg.save(file, check=[(call.args, call.kwargs)])
            loaded = PatchableGraph.load(file, model=model if with_model else None, allow=["tests.fuzz.programs"])
    what = "loaded, with the model" if with_model else "loaded"
    for inputs in _all_calls(case):
        expected = by_oracle(case, interpreter, inputs.call(case.program), case.choices)
        found = by_patches(case, loaded, loaded, inputs.call(case.program), case.choices)
        _assert_same_or_refused(what, inputs is case.example and not loaded.unstored, expected, found)


def _assert_same_or_refused(way: str, must_answer: bool, expected: Outcome, found: Outcome) -> None:
    may_refuse = isinstance(found.error, PatchMapError) or not must_answer
    if isinstance(found.error, GraphPatchError) and may_refuse:
        ANSWERS[way, "refused"] += 1
        return
    if not must_answer and (expected.fired != found.fired or expected.error is not None):
        # A graph holds for calls that go another way, too, where that gives the same; then its nodes come up there.
        ANSWERS[way, "another branch"] += 1
        return
    problem = difference(expected, found)
    assert problem is None, f"{way}: {problem}"
    ANSWERS[way, "answered"] += 1


WAYS: list[Way] = [verified, written_as_fx, edited, stored, stored_beside_model]
