"""Random modules of which `torch.compile` compiled some: before capture, after it, or between two patched calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from graphpatch_notebook import PatchableGraph
from tests.fuzz.cases import FuzzCase, Outcome, by_oracle, by_patches, cases, difference
from tests.fuzz.oracle import Interpreter
from tests.fuzz.programs import build
from tests.fuzz.strategies import Inputs
from tests.fuzz.test_programs import COMMON, FIRST_SEED

BACKENDS = ["eager", "aot_eager"]
PHASES = [Phase.generate]  # no shrinking: each step of it compiles
MOMENTS = ["before capture", "after capture", "after a patched call", "wrapped whole"]
PREFIX = "_orig_mod."  # of the paths in a model that `torch.compile` wrapped


@pytest.fixture(autouse=True)
def forgets_compiled_code() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_parts(model: nn.Module, which: list[int], backend: str) -> None:
    """Compiles, in place, modules by their number, counted around."""
    modules = [module for module in model.modules() if not isinstance(module, nn.ModuleList)]
    for module in {id(m): m for m in (modules[number % len(modules)] for number in which)}.values():
        module.compile(backend=backend)


def unpatched(case: FuzzCase, run: Callable[..., Any], inputs: Inputs) -> Outcome:
    call = inputs.call(case.program)
    found = Outcome(arguments=call, fired=set(), seen={})
    with torch.set_grad_enabled(case.has_grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the compiler
        found.output = run(*call.args, **call.kwargs)
    return found


def patched_as_written(case: FuzzCase, interpreter: Interpreter, pg: PatchableGraph, inputs: Inputs) -> str | None:
    """Returns where a patched call differs from the oracle: compiled parts run as they are written."""
    expected = by_oracle(case, interpreter, inputs.call(case.program), case.choices)
    prefix = PREFIX if any(path.startswith(PREFIX) for path in pg.nodes) else ""
    choices = [replace(choice, path=prefix + choice.path) for choice in case.choices]
    found = by_patches(case, pg, pg, inputs.call(case.program), choices)
    found.fired = {text.removeprefix(prefix) for text in found.fired or ()}
    found.seen = {(text.removeprefix(prefix), n): value for (text, n), value in found.seen.items()}
    return difference(expected, found)


def check(case: FuzzCase, which: list[int], backend: str, moment: str) -> None:
    """Raises where a number is wrong."""
    torch._dynamo.reset()
    interpreter, model, reference = case.interpreter(), build(case.program), build(case.program)
    calls = [case.example, *case.others]
    for inputs in calls:  # written into by nothing that is compiled: the oracle is right, and the compiler can do it
        assume(by_oracle(case, interpreter, inputs.call(case.program), []).error is None)
    compile_parts(reference, [0] if moment == MOMENTS[3] else which, backend)
    try:
        expected = [unpatched(case, reference, inputs) for inputs in calls]
    except Exception:  # the compiler's own, without a patch
        assume(False)
    if moment == MOMENTS[0]:
        compile_parts(model, which, backend)
    if moment == MOMENTS[3]:
        model = torch.compile(model, backend=backend)  # type: ignore[assignment]
    call = case.example.call(case.program)
    with torch.set_grad_enabled(case.has_grad):
        pg = PatchableGraph(model, *call.args, **call.kwargs)
    if moment == MOMENTS[2]:
        assert (problem := patched_as_written(case, interpreter, pg, case.example)) is None, problem
    if moment in MOMENTS[1:3]:
        compile_parts(model, which, backend)
    for inputs, plain in zip(calls, expected, strict=True):
        assert (problem := patched_as_written(case, interpreter, pg, inputs)) is None, f"{inputs}: {problem}"
        problem = difference(plain, unpatched(case, pg, inputs))
        assert problem is None, f"{inputs}, unpatched: {problem}"


PARTS = st.lists(st.integers(0, 7), min_size=1, max_size=3)
ARGUMENTS = (cases(), PARTS, st.sampled_from(BACKENDS), st.sampled_from(MOMENTS))


@settings(max_examples=5, derandomize=True, phases=PHASES, **COMMON)
@given(*ARGUMENTS)
def test_some_compiled_parts(case: FuzzCase, which: list[int], backend: str, moment: str) -> None:
    check(case, which, backend, moment)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
def test_many_compiled_parts(part: int) -> None:
    @hypothesis.seed(FIRST_SEED * 100 + part)
    @settings(max_examples=100, phases=PHASES, **COMMON)
    @given(*ARGUMENTS)
    def run(case: FuzzCase, which: list[int], backend: str, moment: str) -> None:
        check(case, which, backend, moment)

    run()
