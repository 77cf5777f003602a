"""Tests of sweeps on small models, as on large ones: runs skip logits that the metric does not read."""

from __future__ import annotations

import pytest

from graphpatch_notebook.experiments.engine import shared


@pytest.fixture(autouse=True)
def skipped_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_MANY_LOGITS", 0)
