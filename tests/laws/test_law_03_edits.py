"""Law 3: a patch equals the same edit by a plain torch hook, of a copy of the model, or of its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest

import sys

from tests.laws.captures import Capture, each_case, runs_the_same_code_again
from tests.laws.edits import (
    Edit,
    argument_op_edits,
    boundary_edits,
    each_edit,
    returned_op_edits,
    tensor_edits,
)
from tests.laws.source_edits import source_edits
from tests.zoo import Case

# A patch on a view that is filled in later changes what the same edit of the source changes, and is warned of. Gradients,
# which checkpointing is about, are the business of law 6.
pytestmark = [
    pytest.mark.filterwarnings("ignore::graphpatch_notebook.AliasedPatchWarning"),
    pytest.mark.filterwarnings("ignore::graphpatch_notebook.CheckpointWarning"),
]

MakeEdits = Callable[[Capture], Iterable[Edit]]


def _check(case: Case, make: MakeEdits) -> None:
    for capture, edit in each_edit(case, make):
        expected = edit.by_torch(capture, case.example())
        found = edit.by_patch(capture, case.example())
        assert capture.difference(expected, found) is None, f"{edit.path}, {edit.change.kind}"


@each_case()
def test_inputs_and_outputs_equal_hooks(case: Case) -> None:
    _check(case, partial(boundary_edits, frame_count=12))


@each_case()
def test_parameters_equal_an_edited_copy(case: Case) -> None:
    _check(case, partial(tensor_edits, count=8))


@each_case()
def test_returned_ops_equal_an_edited_return(case: Case) -> None:
    _check(case, partial(returned_op_edits, count=8))


@each_case()
def test_ops_given_to_a_submodule_equal_its_pre_hook(case: Case) -> None:
    _check(case, partial(argument_op_edits, count=8))


def comes_from_known_source(case: Case) -> bool:
    """The bytecode says where in the source it comes from (from Python 3.11 on), and is run again."""
    return sys.version_info >= (3, 11) and runs_the_same_code_again(case)


@each_case(comes_from_known_source)
def test_ops_equal_edited_source(case: Case) -> None:
    _check(case, partial(source_edits, count=800))
