"""Law 5 in sweeps: an interrupt that comes between any two instructions of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from graphpatch_notebook.experiments.engine import changed_positions
from tests.experiments.engine.loops import TOLERANCE, disagreement, looped, swept
from tests.experiments.engine.test_sweep_state import X, assert_nothing_is_left, captured, cells, total
from tests.laws.test_law_05_interrupts import interrupted
from tests.zoo import Call
from tests.zoo.values import snapshot


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("batch", [None, "auto"])
def test_an_interrupt_at_any_point_leaves_nothing(batch: Any) -> None:
    """Some of all the places: every one of them takes minutes."""
    pg = captured()
    unpatched = pg(X)
    loop = looped(pg, cells(), lambda: Call.of(X), total)
    before = snapshot(pg._module)

    def action() -> None:
        swept(pg, cells(), Call.of(X), total, batch=batch)

    at = 0
    while interrupted(action, at):
        assert_nothing_is_left(pg, before, unpatched)
        at += 401
    assert at > 1000
    found = swept(pg, cells(), Call.of(X), total, batch=batch)
    assert disagreement(loop, found, 0.0 if batch is None else TOLERANCE) is None


def test_an_interrupt_at_the_start_of_changed_positions_leaves_nothing() -> None:
    """A frame that has not begun to be followed is one that ends, too."""
    pg = captured()
    unpatched, before = pg(X), snapshot(pg._module)

    def action() -> None:
        swept(pg, cells(), Call.of(X), total, batch="auto")

    for at in range(80):
        assert interrupted(action, at, in_files=changed_positions.__file__)
        assert_nothing_is_left(pg, before, unpatched)
