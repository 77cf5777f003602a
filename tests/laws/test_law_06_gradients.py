"""Law 6: gradients through a patch are those of the same edit by hooks."""

from __future__ import annotations

import random
import zlib

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, CheckpointWarning, GraphPatchError, PatchableGraph, ReplacePatch, ZeroPatch
from tests.laws.captures import Capture, capture_of, each_case, raise_if_out_of_memory, run
from tests.laws.edits import Edit, boundary_edits, returned_op_edits
from tests.zoo import Case, case_by_name
from tests.zoo.values import scalar_loss

pytestmark = [
    pytest.mark.filterwarnings("ignore::graphpatch_notebook.AliasedPatchWarning"),
]


def has_gradients(case: Case) -> bool:
    """The loss can be backpropagated, and runs do not change what the next one computes."""
    return case.grad and not case.mutates_state


def _gradients(capture: Capture, model: nn.Module, edit: Edit, by_patch: bool) -> list[Tensor | None] | str:
    """Returns the gradients of all parameters and of the edit's own value, or what torch raised."""
    change = edit.change.again()
    context = capture.pg.patch({edit.path: change.patch()}) if by_patch else edit.oracle(change)
    runner = capture.pg if by_patch else capture.reference
    model.zero_grad(set_to_none=True)
    try:
        with context:
            loss = scalar_loss(run(runner, capture.case.example()))
            if loss is None or not loss.requires_grad:
                return "no gradient"
            loss.backward()
    except RuntimeError as error:
        raise_if_out_of_memory(error)
        return "GraphPatchError" if isinstance(error, GraphPatchError) else type(error).__name__
    value = change.value
    own = [value.grad] if isinstance(value, Tensor) else []
    return [parameter.grad for parameter in model.parameters()] + own


def _difference(expected: list[Tensor | None] | str, found: list[Tensor | None] | str) -> str | None:
    """Returns in words where gradients differ, by the numbers of the parameters; the edit's own value comes last."""
    if isinstance(expected, str) or isinstance(found, str):
        is_same = isinstance(expected, str) and expected == found
        return None if is_same else " / ".join(x if isinstance(x, str) else "gradients" for x in (expected, found))
    differing = [
        f"{i}: {_by_how_much(a, b)}" for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not _equal(a, b)
    ]
    return f"{len(differing)} of {len(expected)} differ: {'; '.join(differing[:3])}" if differing else None


def _by_how_much(a: Tensor | None, b: Tensor | None) -> str:
    if a is None or b is None or a.shape != b.shape:
        return " / ".join("none" if each is None else str(tuple(each.shape)) for each in (a, b))
    return f"{(a.to_dense() - b.to_dense()).abs().max().item():.1e} of {a.to_dense().abs().max().item():.1e}"


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return a is b
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


@each_case(has_gradients)
def test_gradients_equal_those_of_hooks(case: Case) -> None:
    capture = capture_of(case)
    edits = [*boundary_edits(capture, frame_count=4), *returned_op_edits(capture, count=3)]
    chosen = random.Random(zlib.crc32(case.name.encode())).sample(edits, min(6, len(edits)))
    for edit in chosen:
        expected = _gradients(capture, capture.reference, edit, by_patch=False)
        found = _gradients(capture, capture.model, edit, by_patch=True)
        if case.tolerance and not isinstance(expected, str) and not isinstance(found, str):
            pairs = [(a, b) for a, b in zip(expected, found, strict=True) if a is not None and b is not None]
            assert all(torch.allclose(a, b, atol=case.tolerance * 10) for a, b in pairs), edit.path
        else:
            assert _difference(expected, found) is None, f"{edit.path}, {edit.change.kind}"


CHECKPOINTED = ["awkward-checkpoint", "awkward-checkpoint-reentrant", "llama-checkpointing-sdpa"]


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_ops_in_checkpointed_modules(name: str) -> None:
    """Op patches are applied again when the forward is recomputed: else these gradients would be silently wrong."""
    capture = capture_of(case_by_name(name))
    edits = [edit for edit in returned_op_edits(capture, count=8) if "." in edit.path]
    assert edits
    for edit in edits:
        expected = _gradients(capture, capture.reference, edit, by_patch=False)
        assert _difference(expected, _gradients(capture, capture.model, edit, by_patch=True)) is None, edit.path


@pytest.mark.parametrize("name", CHECKPOINTED[:2])
def test_ops_in_a_checkpointed_function_are_refused(name: str) -> None:
    """Only modules can be seen when they run again: a function under checkpoint cannot be patched where it matters."""
    capture = capture_of(case_by_name(name))
    call = capture.case.example()
    with capture.pg.patch({"sin": AddPatch(1.0)}):
        with pytest.raises(GraphPatchError, match=r"'sin' is computed in a function under torch\.utils\.checkpoint"):
            capture.pg(*call.args, **call.kwargs)
        with torch.no_grad():
            capture.pg(*call.args, **call.kwargs)


def test_backward_outside_of_the_block_is_warned_of() -> None:
    case = case_by_name("awkward-checkpoint")
    capture = capture_of(case)
    path = next(edit.path for edit in boundary_edits(capture, frame_count=99) if edit.path.startswith("block."))
    call = case.example()
    with (
        pytest.warns(CheckpointWarning, match=r"call backward\(\) inside the `with` block"),
        capture.pg.patch({path: AddPatch(1.0)}),
    ):
        capture.pg(*call.args, **call.kwargs)


def test_values_of_patches_are_learnt() -> None:
    """A steering vector: its gradient is that of the loss by the value that it replaces."""
    case = case_by_name("gpt2-eager")
    capture = capture_of(case)
    path = "transformer.h_0.mlp.act.mul_3"
    shape = capture.pg.nodes[path].shape
    steering = torch.zeros(shape[-1], requires_grad=True)
    call = case.example()
    with capture.pg.patch({path: ReplacePatch(steering, slice=(slice(None), -1))}):
        capture.pg(*call.args, **call.kwargs).logits[:, -1].square().sum().backward()
    assert steering.grad is not None
    assert steering.grad.abs().sum() > 0
    assert isinstance(capture.pg, PatchableGraph)


def test_the_warning_of_a_missing_backward_names_the_users_line() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)

    x = torch.ones(1, 2, requires_grad=True)
    pg = PatchableGraph(Checkpointed(), x)
    with pytest.warns(CheckpointWarning) as shown, pg.patch({"linear.output": ZeroPatch()}):
        pg(x)
    assert [warning.filename for warning in shown] == [__file__]
