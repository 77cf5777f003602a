"""Law 5 in sweeps: an interrupt that comes at a line of the model or of the metric."""

from __future__ import annotations

from typing import Any

import pytest

from tests.experiments.engine import test_sweep_state
from tests.experiments.engine.loops import TOLERANCE, disagreement, looped, swept
from tests.experiments.engine.test_sweep_state import X, assert_nothing_is_left, captured, cells, total
from tests.laws.test_law_05_interrupts import interrupted
from tests.zoo import Call
from tests.zoo.values import snapshot


@pytest.mark.parametrize("batch", [None, "auto"])
def test_an_interrupt_leaves_nothing(batch: Any) -> None:
    pg = captured()
    unpatched = pg(X)
    loop = looped(pg, cells(), lambda: Call.of(X), total)
    before, given = snapshot(pg._module), cells()

    def action() -> None:
        swept(pg, given, Call.of(X), total, batch=batch)

    at = 0
    while interrupted(action, at, in_file=test_sweep_state.__file__):
        assert_nothing_is_left(pg, before, unpatched)
        at += 3
    assert at > 6
    found = swept(pg, cells(), Call.of(X), total, batch=batch)
    assert disagreement(loop, found, 0.0 if batch is None else TOLERANCE) is None
