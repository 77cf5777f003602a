"""*Run* over the zoo: the numbers of `with pg.patch(...)` in the main thread, and everything as it was afterwards."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch

from graphpatch_notebook import AddPatch, GraphPatchWarning
from graphpatch_notebook.notebook.runs import Runs
from graphpatch_notebook.notebook.session.chosen_patch import ChosenPatch
from graphpatch_notebook.notebook.session.session import Session
from tests.laws.captures import Capture, outcome, some_cases
from tests.notebook.replies import received
from tests.zoo import Case, seed_all
from tests.zoo.values import bit_equal, same_state, snapshot

SHIFT = 0.25


def some_path(capture: Capture) -> str:
    """A floating-point value in the middle of the model."""
    paths = [
        path
        for path, meta in capture.pg.nodes.items()
        if meta.dtype is not None and meta.dtype.is_floating_point and meta.kind in ("op", "output")
    ]
    return paths[len(paths) // 2]


@some_cases(every=3)
def test_zoo_runs_equal_patched_calls_in_the_main_thread(case: Case) -> None:
    subject = Capture.of(case)
    path = some_path(subject)
    session = Session(subject.pg)
    session.add(ChosenPatch(path, "add", value="shift"))
    variables: dict[str, Any] = {"call": case.example(), "shift": SHIFT}
    runs = Runs(session, lambda: variables)
    if runs_change_nothing(case):
        outcome(subject.model, case.example())  # torch keeps the `forward` of a scripted module at its first call
    before = snapshot(subject.model)
    seed_all(5)
    generators = torch.get_rng_state(), random.getstate()
    number = runs.start("*call.args, **call.kwargs")
    runs.wait(number)
    status, _ = received(runs.status(number))
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert same_state(subject.model, before) is None
    plain, patched = _expected(subject, path)
    if isinstance(plain, str) or isinstance(patched, str):
        assert status["state"] == "failed"
        return
    assert status["state"] == "done", status
    assert runs.last is not None
    assert bit_equal(plain, runs.last.unpatched_output) is None
    assert bit_equal(patched, runs.last.output) is None


def _expected(subject: Capture, path: str) -> tuple[Any, Any]:
    """Returns what the main thread gets, on models whose buffers are what they were when *Run* began."""
    case = subject.case
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphPatchWarning)
        other = subject if runs_change_nothing(case) else Capture.of(case)
        plain = outcome(other.pg, case.example())
        if not runs_change_nothing(case):
            other = Capture.of(case)
        with other.pg.patch({path: AddPatch(value=SHIFT)}):
            return plain, outcome(other.pg, case.example())


def runs_change_nothing(case: Case) -> bool:
    return not case.mutates_state and not case.training
