"""The laws on random modules: each patched run is what an interpreter that never saw the package makes of the edits."""

from __future__ import annotations

import datetime
import os
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings

from graphpatch_notebook import PatchableGraph
from tests.fuzz.cases import FuzzCase, by_oracle, by_patches, cases, difference, same_state, snapshot
from tests.fuzz.graph_runs import WAYS
from tests.fuzz.programs import build
from tests.zoo.values import tensors_of

COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
}
FIRST_SEED = int(os.environ.get("FUZZ_SEED", datetime.date.today().toordinal()))


def check(case: FuzzCase) -> None:
    """Raises where a law does not hold for a case."""
    interpreter = case.interpreter()
    reference, model = build(case.program), build(case.program)
    calls = [case.example, *case.others]
    for inputs in calls:  # the oracle, against the module itself
        mine = by_oracle(case, interpreter, inputs.call(case.program), [])
        assume(mine.error is None)
        own = inputs.call(case.program)
        with torch.set_grad_enabled(case.has_grad):
            output = own.run(reference)
        problem = difference(mine, type(mine)(output, own, mine.gradients, fired=set(), seen={}))
        assert problem is None, f"the oracle is wrong: {problem}"
    before = snapshot(model)
    with torch.set_grad_enabled(case.has_grad):
        call = case.example.call(case.program)
        pg = PatchableGraph(model, *call.args, **call.kwargs)
    known = {text.split("|")[0] for text in pg.nodes}
    places = interpreter.places.values()
    missing = [place.path for place in places if tensors_of(place.value) and place.path not in known]
    assert not missing, missing
    for inputs in calls:
        expected = by_oracle(case, interpreter, inputs.call(case.program), case.choices)
        found = by_patches(case, pg, pg, inputs.call(case.program), case.choices)
        problem = difference(expected, found)
        assert problem is None, f"{inputs}: {problem}"
        unpatched = by_oracle(case, interpreter, inputs.call(case.program), [])
        call = inputs.call(case.program)
        with torch.set_grad_enabled(case.has_grad):
            output = call.run(pg)
        problem = difference(unpatched, type(unpatched)(output, call, unpatched.gradients, fired=set(), seen={}))
        assert problem is None, f"{inputs}, unpatched: {problem}"
    assert same_state(model, before) is None
    WAYS[case.way % len(WAYS)](case, interpreter)


@pytest.mark.slow
@settings(max_examples=15, derandomize=True, **COMMON)
@given(cases())
def test_some_programs(case: FuzzCase) -> None:
    check(case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_programs(part: int) -> None:
    """Others each day; `FUZZ_SEED` brings back those of a day (`datetime.date.toordinal`)."""

    @hypothesis.seed(FIRST_SEED * 100 + part)
    @settings(max_examples=500, **COMMON)
    @given(cases())
    def run(case: FuzzCase) -> None:
        check(case)

    run()
