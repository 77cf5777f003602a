"""The transformers of tutorials: components are what the models' own code says."""

from __future__ import annotations

import pytest

from tests.libraries.classics import CLASSICS
from tests.libraries.comparing import Trial, outcome_of

MAY_BE_MISSING = {"@logits"}  # of nanoGPT, for the last position alone: which dimension that is, is unknown


@pytest.mark.parametrize("trial", CLASSICS, ids=lambda each: each.label)
def test_components_are_what_the_code_says(trial: Trial) -> None:
    outcome = outcome_of(trial)
    assert outcome.wrong == {}
    assert set(outcome.missing) <= MAY_BE_MISSING, outcome.missing
    assert len(outcome.right) >= 16
