"""Law 3: a patch equals the same edit by a plain torch hook, of a copy of the model, or of its source."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import CustomPatch, PatchableGraph
from tests.laws.captures import (
    Capture,
    capture_of,
    each_case,
    leaves_its_state_alone,
    runs_the_same_code_again,
    some_cases,
    without_recomputing,
)
from tests.laws.edits import (
    Edit,
    argument_op_edits,
    boundary_edits,
    each_edit,
    returned_op_edits,
    tensor_edits,
    variant_edits,
)
from tests.laws.source_edits import editable_ops, source_edits
from tests.zoo import Case
from tests.zoo.case import floats
from tests.zoo.values import bit_equal

# A patch on a view that is filled in later does what the same edit of the source does, and is warned of.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.aliased view:graphpatch_notebook.GraphPatchWarning"),
]

MakeEdits = Callable[[Capture], Iterable[Edit]]


def _check(case: Case, make: MakeEdits) -> None:
    for capture, edit in each_edit(case, make):
        with without_recomputing(case):
            expected = edit.by_torch(capture, case.example())
            found = edit.by_patch(capture, case.example())
        assert capture.difference(expected, found) is None, f"{edit.path}, {edit.change.kind}"


@some_cases()
def test_edits_equal_those_by_torch(case: Case) -> None:
    """By hooks, by overwriting a parameter of a copy, and by editing what a forward returns."""
    _check(case, partial(boundary_edits, frame_count=8))
    for make in (tensor_edits, returned_op_edits, argument_op_edits):
        _check(case, partial(make, count=8))


@some_cases(leaves_its_state_alone)
def test_inputs_and_outputs_equal_hooks_on_other_calls(case: Case) -> None:
    """Numbers in slices, which fit any shape, on calls that the example was nothing like."""
    capture = capture_of(case)
    names = [name for name in capture.calls() if name != "example"]
    with without_recomputing(case):
        for name in capture.random("variants").sample(names, min(2, len(names))):
            for edit in variant_edits(capture, name, frame_count=2):
                expected = edit.by_torch(capture, capture.call(name))
                if expected == "raises":  # this call has no such value
                    continue
                found = edit.by_patch(capture, capture.call(name), any_shape=True)
                assert capture.difference(expected, found) is None, f"{name}: {edit.path}, {edit.change}"


def comes_from_known_source(case: Case) -> bool:
    """The bytecode says where in the source it comes from (from Python 3.11 on), and is run again."""
    return sys.version_info >= (3, 11) and runs_the_same_code_again(case)


# A patched value may make a loop of the model go on for longer.
@pytest.mark.filterwarnings("ignore:.repeated call:graphpatch_notebook.GraphPatchWarning")
@some_cases(comes_from_known_source)
def test_ops_equal_edited_source(case: Case) -> None:
    _check(case, partial(source_edits, count=5))


def is_gpt2_from_known_source(case: Case) -> bool:
    """A usual transformer, which tells whether the oracle above reaches much at all."""
    return case.name == "gpt2-eager" and comes_from_known_source(case)


@each_case(is_gpt2_from_known_source)
def test_most_ops_can_be_edited_in_the_source(case: Case) -> None:
    capture = capture_of(case)
    ops = [meta for meta in capture.pg.nodes.values() if meta.kind == "op" and meta.shape is not None]
    assert len(list(editable_ops(capture, random.Random(0)))) > 0.8 * len(ops)


class Unusual(nn.Module):
    def forward(self, x: Tensor, edits: Mapping[str, Callable[[Any], Any]] = {}) -> tuple[Tensor, Tensor]:
        """Returns values of the module below, each after the edit of the name that it is to have."""

        def edit(name: str, value: Any) -> Any:
            return edits.get(name, lambda same: same)(value)

        h = x
        for name in ("tanh", "tanh_1"):
            h = edit(name, torch.tanh(h)) + 1
        low, high = h.split(3, dim=-1)
        low, high = edit("low", low), edit("high", high)
        total = torch.cat([high, low * edit("size_shape|sub_0", high.shape[0])], dim=-1)
        total += x
        total.copy_(edit("total_1", total))
        alias = total.view(-1)
        if edit("bool", bool(alias.sum() > 0)):
            total = total * edit("item", alias.max().item())
        return total, alias


EDITS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(["tanh", "tanh_1", "low", "high", "total_1"], lambda value: value.flip(-1) * 2 + 1),
    "bool": lambda value: not value,
    "item": lambda value: value - 5.0,
    "size_shape|sub_0": lambda rows: rows + 3,
}


@pytest.mark.parametrize("path", list(EDITS))
def test_unusual_lines_equal_the_same_edit_of_the_source(path: str) -> None:
    """Rounds of a loop, unpacked values, writing into a tensor with an alias, a branch, a number, a size."""
    x = floats(4, 6)
    pg = PatchableGraph(Unusual(), x)
    with pg.patch({path: CustomPatch(custom_op=EDITS[path])}, strict=True):
        found = pg(x)
    assert bit_equal(Unusual()(x, {path: EDITS[path]}), found) is None
    assert bit_equal(pg(x), found) is not None
