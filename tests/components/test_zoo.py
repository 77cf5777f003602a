"""What is found in any model of the zoo is proved: a claim that its own proofs doubt is a wrong one."""

from __future__ import annotations

import pytest

from tests.laws.captures import Capture, some_cases
from tests.zoo import Case

DROPOUT = {
    "attn.scores": "their softmax is not the pattern",  # after dropout
    "attn.pattern": "its rows do not sum to 1",
    "mlp.post": "changes the stream",
}


HOOKED = "add is not the sum of the stream and what is added"
"""Said of a module whose hooks change what it returns: paths mean what its caller gets, and the sum is in the hook."""


@some_cases(every=4)
@pytest.mark.filterwarnings("ignore")
def test_what_is_found_is_proved(case: Case) -> None:
    components = Capture.of(case).pg.components
    if components:
        components.verify()
    doubts = {name: each.doubt for name, each in components.items() if each.doubt}
    if "train" in case.name:
        doubts = {name: text for name, text in doubts.items() if DROPOUT.get(name.split("].")[-1], "-") not in text}
    assert {*doubts.values()} == ({HOOKED} if case.name == "awkward-user-hooks" else set())
