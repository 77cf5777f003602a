from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphpatch_notebook.errors import PatchValueError
from graphpatch_notebook.patches.kinds import (
    AddPatch,
    CustomPatch,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
)
from graphpatch_notebook.patches.slices import indexed_dimensions, selection_problem

SLICES = [
    None,
    0,
    -1,
    slice(1, None),
    slice(None, None, 2),
    ...,
    (slice(None), 1),
    (..., -1),
    (0, slice(1, 3)),
    [0, 2],
    (slice(None), [0, 2]),
    torch.tensor([0, 1]),
    torch.tensor([True, False, True]),
    (slice(None), torch.tensor([True, False, True, False])),
    torch.eye(3, 4).bool(),
    (torch.tensor([0, 1]), torch.tensor([2, 3])),
    torch.tensor(1),
    True,
]


def value() -> Tensor:
    return torch.arange(1.0, 13.0).reshape(3, 4)


@pytest.mark.parametrize("index", SLICES, ids=repr)
@pytest.mark.parametrize(
    ("make", "edit"),
    [
        (lambda s: ZeroPatch(slice=s), lambda old: torch.zeros_like(old)),
        (lambda s: AddPatch(value=2.5, slice=s), lambda old: old + 2.5),
        (lambda s: ReplacePatch(value=-1, slice=s), lambda old: torch.full_like(old, -1)),
        (lambda s: CustomPatch(custom_op=lambda t: t.square() - 3, slice=s), lambda old: old.square() - 3),
        (lambda s: CustomPatch(custom_op=lambda t: t.mul_(2), slice=s), lambda old: old * 2),
    ],
    ids=["zero", "add", "replace", "custom", "custom-in-place"],
)
def test_slices_are_written_like_torch_writes_them(make, edit, index):
    patch, expected = make(index), value()
    where = ... if index is None else index
    expected[where] = edit(expected[where])
    assert patch.problem(expected.shape) is None
    assert torch.equal(patch.op(value()), expected)


@pytest.mark.parametrize("make", [ZeroPatch, lambda **fields: CustomPatch(custom_op=torch.relu, **fields)])
def test_a_slice_that_selects_nothing_is_refused_unless_allow_empty_is_set(make):
    with pytest.raises(PatchValueError, match=r"slice \[:, 4:8\] selects nothing: dimension 1 of the value here"):
        make(slice=(slice(None), slice(4, 8))).op(value())
    assert torch.equal(make(slice=(slice(None), slice(4, 8)), allow_empty=True).op(value()), value())
    assert make(slice=slice(0, 2)).op(torch.ones(0, 4)).shape == (0, 4)
    assert "allow_empty must be True or False, not 1" in str(make(allow_empty=1).problem(None))


def test_values_broadcast_to_the_slice():
    row = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert torch.equal(AddPatch(value=row).op(value()), value() + row)
    assert torch.equal(ReplacePatch(value=row, slice=1).op(value())[1], row)
    column = torch.ones(3, 1)
    assert torch.equal(ReplacePatch(value=column).op(value()), torch.ones(3, 4))
    with pytest.raises(RuntimeError):
        AddPatch(value=torch.ones(5)).op(value())


def test_zero_keeps_shape_dtype_and_replaces_nan():
    patched = ZeroPatch().op(torch.tensor([float("nan"), float("inf")], dtype=torch.bfloat16))
    assert patched.dtype == torch.bfloat16
    assert patched.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("node", "patch_value", "is_fine"),
    [
        (torch.float32, torch.float64, True),
        (torch.float16, torch.float32, True),
        (torch.float32, torch.int64, True),
        (torch.int64, torch.float32, False),
        (torch.float32, torch.complex64, False),
        (torch.bool, torch.int64, False),
    ],
)
def test_the_dtype_stays_that_of_the_node_by_torchs_rules_for_adding(node, patch_value, is_fine):
    patch, target = AddPatch(value=torch.ones(2, dtype=patch_value)), torch.zeros(2, dtype=node)
    if is_fine:
        assert patch.op(target).dtype == node
    else:
        with pytest.raises(RuntimeError, match="can't be cast"):
            patch.op(target)


@pytest.mark.parametrize("node", [torch.float16, torch.int64, torch.bool])
def test_the_dtype_stays_that_of_the_node_by_torchs_rules_for_writing(node):
    patched = ReplacePatch(value=torch.full((2,), 1.75)).op(torch.zeros(2, dtype=node))
    assert patched.dtype == node
    assert torch.equal(patched, torch.full((2,), 1.75).to(node))


@pytest.mark.parametrize(
    ("patch", "number", "expected"),
    [
        (ZeroPatch(), 3, 0),
        (ZeroPatch(), 2.5, 0.0),
        (ZeroPatch(), True, False),
        (ZeroPatch(), 1j, 0j),
        (AddPatch(value=2), 3, 5),
        (AddPatch(value=torch.tensor(2)), 3, 5),
        (AddPatch(value=0.5), 1.0, 1.5),
        (ReplacePatch(value=7), 3, 7),
        (ReplacePatch(value=torch.tensor(0.5)), 3.0, 0.5),
        (ReplacePatch(value=False), True, False),
    ],
)
def test_numbers_keep_their_type(patch, number, expected):
    patched = patch.op(number)
    assert patched == expected
    assert type(patched) is type(number)


@pytest.mark.parametrize(
    "patch",
    [
        ZeroPatch(slice=0),
        AddPatch(value=1, slice=0),
        ReplacePatch(value=1, slice=0),
        CustomPatch(custom_op=abs, slice=0),
    ],
)
def test_a_number_has_no_slices(patch):
    with pytest.raises(PatchValueError):
        patch.op(3)


@pytest.mark.parametrize("patch", [ZeroPatch(), AddPatch(value=1), ReplacePatch(value=1)])
def test_other_values_are_for_custom_patches(patch):
    with pytest.raises(PatchValueError, match=f"{type(patch).__name__} needs a tensor .* type str; use CustomPatch"):
        patch.op("text")


def test_gradients_flow_to_the_value_and_through_the_rest():
    source = value().requires_grad_()
    added, written = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    target = AddPatch(value=added, slice=0).op(source * 2)
    target = ReplacePatch(value=written, slice=1).op(target)
    target = ZeroPatch(slice=2).op(target)
    (target * 3).sum().backward()
    assert added.grad.tolist() == [3.0] * 4
    assert written.grad.tolist() == [3.0] * 4
    assert source.grad.tolist() == [[6.0] * 4, [0.0] * 4, [0.0] * 4]


def test_probe_and_record_hold_the_very_value():
    probe, record, first, second = ProbePatch(), RecordPatch(), value(), value()
    assert probe.activation is None
    assert record.activations == []
    for item in (first, second):
        assert probe.op(item) is item
        assert record.op(item) is item
    assert probe.activation is second
    assert [kept is item for kept, item in zip(record.activations, (first, second), strict=True)] == [True, True]
    assert RecordPatch().activations is not record.activations


def test_custom_patch_on_a_slice_is_given_a_copy_of_the_slice_alone():
    seen, given = [], value()
    patched = CustomPatch(custom_op=lambda t: seen.append(t) or t * 10, slice=(slice(None), -1)).op(given)
    assert patched is given  # a clone, where the engine calls it: `requires_clone`
    assert seen[0].tolist() == [4.0, 8.0, 12.0]
    assert given[:, -1].tolist() == [40.0, 80.0, 120.0]
    assert CustomPatch(custom_op=lambda t: 7, slice=0).op(value())[0].tolist() == [7.0] * 4  # it may give a number
    with pytest.raises(TypeError):
        CustomPatch(abs, 0)  # type: ignore[misc]  # by keyword only


@pytest.mark.parametrize(
    ("custom_op", "index", "message"),
    [
        (lambda t: t[:2], 0, r"returned a tensor of shape \(2,\) for slice=0, which has shape \(4,\); it must return"),
        (lambda t: None, 0, r"custom_op returned None for slice=0: is a return statement missing?"),
        (lambda t: "text", (0, 1), r"custom_op returned 'text' for slice=\(0, 1\)"),
        (abs, 3, r"slice 3 of a value of shape \(3, 4\): index 3 is out of bounds"),
    ],
)
def test_custom_patch_says_what_does_not_fit_its_slice(custom_op, index, message):
    with pytest.raises(PatchValueError, match=message):
        CustomPatch(custom_op=custom_op, slice=index).op(value())


@pytest.mark.parametrize(
    ("patch", "clones", "observes"),
    [
        (ZeroPatch(), True, False),
        (AddPatch(value=1), True, False),
        (ReplacePatch(value=1), True, False),
        (ProbePatch(), False, True),
        (RecordPatch(), False, True),
        (CustomPatch(custom_op=id), True, False),
        (CustomPatch(custom_op=id, requires_clone=False), False, False),
        (CustomPatch(custom_op=id, slice=0), True, False),
    ],
)
def test_what_a_patch_does_to_the_value_that_it_is_given(patch, clones, observes):
    assert (patch.requires_clone, patch.observes_only) == (clones, observes)
    assert patch.any_shape is False
    assert type(patch).__name__ in repr(patch)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (ZeroPatch(slice=(0, 0, 0)), r"slice \(0, 0, 0\) has 3 dimensions, but .* has 2: shape \(3, 4\)"),
        (AddPatch(value=1, slice="a"), "slice 'a' cannot index a tensor; use ints, slices"),
        (AddPatch(value=1, slice={1}), "cannot index a tensor"),
        (AddPatch(value=1, slice=1.5), "slice 1.5 cannot index a tensor"),
        (AddPatch(value=[1, 2]), r"value must be a tensor or a number, not list; use value=torch.as_tensor\(...\)"),
        (CustomPatch(custom_op=abs, slice=(0, 0, 0)), r"slice \(0, 0, 0\) has 3 dimensions, but .* \(3, 4\)"),
        (CustomPatch(custom_op=abs, slice="a"), "slice 'a' cannot index a tensor"),
        (CustomPatch(custom_op=abs, slice=0, requires_clone=False), "slice= needs requires_clone=True"),
        (CustomPatch(custom_op=abs, slice=0, position_dim=1), "position_dim=1 has no effect without positions"),
        (ReplacePatch(value=None), "value must be a tensor or a number, not NoneType"),
    ],
)
def test_problems_are_found_before_a_run(patch, message):
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(patch.problem(torch.Size([3, 4])))
    assert ZeroPatch(slice=(0, 0, 0)).problem(None) is None


SHAPE = (2, 3, 2)
PARTS = st.one_of(
    st.none(),
    st.just(Ellipsis),
    st.booleans(),
    st.integers(-1, 1),
    st.slices(2),
    st.lists(st.integers(-1, 1), min_size=1, max_size=3),
    st.lists(st.integers(-1, 1), min_size=2, max_size=2).map(torch.tensor),
    st.integers(-1, 1).map(torch.tensor),
    st.lists(st.booleans(), min_size=2, max_size=2),
    st.sampled_from([(2,), (3,), (2, 3), (3, 2), (2, 3, 2), (2, 3, 2, 1), ()]).map(lambda s: torch.ones(s).bool()),
    st.just(range(2)),
)


@settings(max_examples=250, deadline=None)
@given(
    st.one_of(PARTS, st.lists(PARTS, max_size=5).filter(lambda parts: [*map(id, parts)].count(id(...)) < 2).map(tuple))
)
def test_an_index_has_too_many_dimensions_exactly_where_torch_says_so(index):
    try:
        torch.zeros(SHAPE)[index]
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        says_too_many = "too many indices" in str(error)
        other = not says_too_many
    else:
        says_too_many = other = False
    if not other:
        assert (indexed_dimensions(index) > len(SHAPE)) == says_too_many


BOUNDS = st.none() | st.integers(-4, 4)
CHOICES = st.one_of(
    st.none(),
    st.just(Ellipsis),
    st.booleans(),
    st.integers(-4, 3),
    st.builds(slice, BOUNDS, BOUNDS, st.none() | st.integers(1, 2)),
    st.lists(st.integers(-4, 3), max_size=2),
    st.lists(st.integers(-4, 3), min_size=2, max_size=2).map(torch.tensor),
    st.lists(st.booleans(), min_size=2, max_size=2),
    st.lists(st.booleans(), min_size=6, max_size=6).map(lambda entries: torch.tensor(entries).view(2, 3)),
)


@settings(max_examples=250, deadline=None)
@given(st.lists(CHOICES, min_size=1, max_size=4).filter(lambda parts: [*map(id, parts)].count(id(...)) < 2).map(tuple))
def test_an_index_selects_nothing_exactly_where_torch_says_so(index):
    problem = selection_problem(index, SHAPE, "the value") if indexed_dimensions(index) <= len(SHAPE) else None
    try:
        selected = torch.zeros(SHAPE)[index]
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        is_beyond = "out of range" in str(error) or "out of bounds" in str(error)
        assert problem is not None or not is_beyond
        return
    allowed = selection_problem(index, SHAPE, "the value", allow_empty=True)
    assert allowed is None or "is out of range" in allowed
    if allowed is None:
        assert (problem is not None) == (selected.numel() == 0)
        assert selection_problem(index, SHAPE, "", only_slices=True) is None or selected.numel() == 0
