"""Fixtures of the tests of experiments."""

from __future__ import annotations

import pytest

from graphpatch_notebook.experiments.engine import cells


@pytest.fixture
def small_modules_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has small modules, too, compute only positions that change, as else only those do where that saves time."""
    monkeypatch.setattr(cells, "LEAST_OPERATIONS", {"cpu": 0.0, "other": 0.0})
