"""Law 6: gradients through a patch are those of the same edit by hooks."""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    GraphPatchError,
    GraphPatchWarning,
    PatchableGraph,
    PatchValueError,
    ProbePatch,
    RecordPatch,
)
from tests.laws.captures import Capture, capture_of, raise_if_out_of_memory, run, some_cases
from tests.laws.edits import Edit, boundary_edits, input_edits, returned_op_edits
from tests.zoo import Case, case_by_name
from tests.zoo.values import scalar_loss

pytestmark = [
    pytest.mark.filterwarnings("ignore:.aliased view:graphpatch_notebook.GraphPatchWarning"),
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


@some_cases(has_gradients)
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
        with pytest.raises(GraphPatchError, match="'sin'"):
            capture.pg(*call.args, **call.kwargs)
        with torch.no_grad():
            capture.pg(*call.args, **call.kwargs)


def test_backward_outside_of_the_block_is_warned_of() -> None:
    case = case_by_name("awkward-checkpoint")
    capture = capture_of(case)
    path = next(edit.path for edit in boundary_edits(capture, frame_count=99) if edit.path.startswith("block."))
    call = case.example()
    with (
        pytest.warns(GraphPatchWarning, match=r"call backward\(\) inside the `with` block"),
        capture.pg.patch({path: AddPatch(1.0)}),
    ):
        capture.pg(*call.args, **call.kwargs)


class Alias:
    """An edit that puts an alias of the tensor in its place."""

    value: Tensor

    def edit(self, value: Tensor) -> Tensor:
        self.value = value.view_as(value)
        return self.value


def _gradient_of(value: Tensor, output: Any) -> Tensor | None:
    """Returns the gradient of a loss on the output by a value of the run, `None` where it has none."""
    loss = scalar_loss(output)
    if loss is None or not loss.requires_grad or not value.requires_grad:
        return None
    value.retain_grad()
    loss.backward()
    return value.grad


def _gradient_by_a_probe(capture: Capture, path: str) -> Tensor | None:
    probe = ProbePatch()
    with capture.pg.patch({path: probe}):
        output = run(capture.pg, capture.case.example())
        return _gradient_of(probe.activation, output)


@some_cases(has_gradients)
def test_a_probed_input_has_the_gradient_of_what_the_module_does_with_it(case: Case) -> None:
    """Whatever else becomes of the same tensor: as if a hook gave the module an alias of it."""
    capture = capture_of(case)
    for path, oracle in input_edits(capture, frame_count=5):
        alias = Alias()
        with oracle(alias):
            output = run(capture.reference, case.example())
            expected = _gradient_of(alias.value, output)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = _gradient_by_a_probe(capture, path)
        if not any(getattr(warning.message, "kind", None) == "shared gradient" for warning in caught):
            assert _difference([expected], [found]) is None, path


class Branch(nn.Module):
    """Uses what it is given twice, in whatever form it is given."""

    def __init__(self, take: Callable[..., Tensor] = lambda x: x) -> None:
        super().__init__()
        self.take = take

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = self.take(*args, **kwargs)
        return x.sin() * x


class Stream(nn.Module):
    """A residual stream that a branch is given by `give`."""

    def __init__(self, give: Callable[[nn.Module, Tensor], Tensor], branch: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.branch = branch or Branch()
        self.give = give

    def forward(self, x: Tensor) -> Tensor:
        stream = self.embed(x)
        return stream * 5 + self.give(self.branch, stream) + stream.cos()


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@pytest.mark.parametrize(
    ("path", "take", "give"),
    [
        pytest.param("branch.args|sub_0", lambda x: x, lambda branch, x: branch(x), id="positional"),
        pytest.param("branch.kwargs|x", lambda x: x, lambda branch, x: branch(x=x), id="keyword"),
        pytest.param("branch.args|sub_0.sub_1", lambda pair: pair[1], lambda b, x: b((x + 1, x)), id="tuple"),
        pytest.param("branch.args|sub_0.sub_1", lambda pair: pair.right, lambda b, x: b(Pair(x + 1, x)), id="named"),
        pytest.param("branch.args|sub_0.sub_0.sub_0", lambda p: p[0][0], lambda b, x: b(((x,), 1)), id="nested"),
    ],
)
@pytest.mark.parametrize("kind", [ProbePatch, RecordPatch])
def test_an_input_is_an_alias_in_any_form(path: str, take: Any, give: Any, kind: Any) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(2, 3), Stream(give, Branch(take))
    pg = PatchableGraph(model, x)
    patch = kind()
    with pg.patch({path: patch}):
        output = pg(x)
    value = patch.activation if kind is ProbePatch else patch.activations[0]
    assert torch.equal(output, model(x))

    stream = model.embed(x).detach().requires_grad_()
    (stream.sin() * stream).sum().backward()
    assert torch.equal(_gradient_of(value, output), stream.grad)


class Self(nn.Module):
    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        assert query is key
        return query.sin() * key


def test_one_tensor_given_as_several_inputs_stays_one() -> None:
    """A module may ask for that, as attention does: the gradient is that of all these inputs, and this is said."""
    x, model = torch.randn(2, 3), Stream(lambda branch, x: branch(x, key=x), Self())
    pg, probes = PatchableGraph(model, x), {f"branch.{name}": ProbePatch() for name in ("query", "key")}
    with pytest.warns(GraphPatchWarning, match=r"'branch\.query'"), pg.patch(probes):
        output = pg(x)
    stream = model.embed(x).detach().requires_grad_()
    model.branch(stream, stream).sum().backward()
    found = [_gradient_of(probes["branch.query"].activation, output), probes["branch.key"].activation.grad]
    assert _difference([stream.grad] * 2, found) is None


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            x.mul_(3)
        return x * 2


def test_writing_into_a_probed_input_reaches_the_caller() -> None:
    """Also where capture did not see it."""
    model, probe, x = Stream(lambda branch, x: branch(x), Writes()), ProbePatch(), torch.ones(2, 3, requires_grad=True)
    pg = PatchableGraph(model, torch.ones(1, 3))
    with pg.patch({"branch.x": probe}):
        found = pg(x)
    expected = model(x)
    assert torch.equal(found, expected)
    assert _difference(list(torch.autograd.grad(expected.sum(), x)), list(torch.autograd.grad(found.sum(), x))) is None
    with pytest.raises(PatchValueError):
        probe.activation  # noqa: B018
