"""Law 3: a patch equals the same edit by a plain torch hook, of a copy of the model, or of its source."""

from __future__ import annotations

from collections.abc import Iterable

from graphpatch_notebook import PatchableGraph
from tests.laws.captures import Capture, capture_of, each_case, leaves_its_state_alone, outcome
from tests.laws.edits import Edit, argument_op_edits, boundary_edits, returned_op_edits, tensor_edits
from tests.zoo import Case


def _check(capture: Capture, edits: Iterable[Edit]) -> int:
    """Asserts that each edit, as a patch and without the package, has the same outcome; returns how many there are."""
    count = 0
    for count, edit in enumerate(edits, 1):
        current = capture if leaves_its_state_alone(capture.case) else Capture.of(capture.case)
        expected = outcome(lambda *_: edit.by_torch(current, capture.case.example()), capture.case.example())
        found = outcome(lambda *_: edit.by_patch(current, capture.case.example()), capture.case.example())
        assert current.difference(expected, found) is None, f"{edit.path} {edit.change.kind}"
    return count
