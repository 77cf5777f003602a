"""Law 12: no patch is a no-op in silence: what selects nothing is an error, and what selects something changes it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    ExperimentError,
    FromPatch,
    GraphPatchError,
    Patch,
    PatchableGraph,
    PatchMapError,
    PatchValueError,
    ProbePatch,
    ReplacePatch,
    ZeroPatch,
)
from graphpatch_notebook.inspection.resolution import NodeMeta
from tests.laws.captures import (
    Capture,
    capture_of,
    each_case,
    leaves_its_state_alone,
    outcome,
    run,
    runs_the_same_code_again,
    without_recomputing,
)
from tests.zoo import CASES, Case, case_by_name, is_of_a_kind_of_its_own
from tests.zoo.submodules import Submodules

pytestmark = pytest.mark.filterwarnings(
    "ignore:.aliased view:graphpatch_notebook.GraphPatchWarning",
    "ignore:.repeated call:graphpatch_notebook.GraphPatchWarning",
)
_SAMPLE = {case.name for case in [case for case in CASES if is_of_a_kind_of_its_own(case)][::3]}


def is_in_sample(case: Case) -> bool:
    """Every third model of those of a kind of their own, if a run leaves it as it was."""
    return case.name in _SAMPLE and leaves_its_state_alone(case) and runs_the_same_code_again(case)


def lets_errors_through(case: Case) -> bool:
    """Those of them that do not catch a `ValueError`, which a `PatchValueError` is."""
    return is_in_sample(case) and case.name != "awkward-side-effects"


@contextmanager
def nothing_runs(model: nn.Module) -> Iterator[None]:
    """Makes sure that `forward` of a model is not called."""
    calls: list[int] = []
    with model.register_forward_pre_hook(lambda module, args: calls.append(1)):
        yield
    assert not calls


def some_nodes(capture: Capture, count: int, *kinds: str) -> list[NodeMeta]:
    """Random nodes of some kinds whose values were floating-point tensors with something in them."""
    found = [
        meta
        for meta in capture.pg.nodes.values()
        if meta.shape and 0 not in meta.shape and str(meta.dtype).startswith("torch.float") and meta.kind in kinds
    ]
    return capture.random(" ".join(kinds)).sample(found, min(count, len(found)))


VALUES = ("op", "output", "input")
HELD = ("parameter", "buffer")


def empty_selections(shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """Fields with which a patch has no effect on a value of this shape, whatever the inputs are."""
    indices = [
        slice(3, 3),
        (..., slice(5, 2)),
        slice(-2, -2),
        [],
        (..., []),
        torch.zeros(0, dtype=torch.long),
        torch.zeros(shape, dtype=torch.bool),
        [False] * shape[0],
        False,
    ]
    times: list[Any] = [[], range(0), slice(2, 2), set(), torch.zeros(0, dtype=torch.long)]
    return [
        *({"slice": index} for index in indices),
        *({"steps": numbers} for numbers in times),
        *({"positions": numbers} for numbers in times),
    ]


def some_patch(rng: random.Random, **fields: Any) -> Patch[Any]:
    make = rng.choice([ZeroPatch, AddPatch, ReplacePatch, CustomPatch])
    if make is CustomPatch:
        return CustomPatch(custom_op=lambda value: value + 1, **fields)
    return make(**fields) if make is ZeroPatch else make(value=1.0, **fields)


@each_case(is_in_sample)
def test_an_empty_slice_is_refused_before_anything_runs(case: Case) -> None:
    capture = capture_of(case)
    rng = capture.random("patches")
    for meta in some_nodes(capture, 3, *VALUES, *HELD):
        assert meta.shape is not None
        for fields in rng.sample(empty_selections(tuple(meta.shape)), 4):
            with (
                nothing_runs(capture.model),
                pytest.raises(PatchMapError, match=r"selects nothing.*allow_empty=True|positions"),
                capture.pg.patch({meta.path: some_patch(rng, **fields)}),
            ):
                pytest.fail(f"{meta.path} was patched with {fields}")


@each_case(is_in_sample)
def test_an_empty_slice_does_nothing_with_allow_empty(case: Case) -> None:
    capture = capture_of(case)
    rng = capture.random("allowed")
    patches: dict[str, list[Patch[Any]]] = {}
    for meta in some_nodes(capture, 5, *VALUES, *HELD):
        if meta.opens is not None:  # inside a fused call: a patch there changes rounding
            continue
        allowed = [fields for fields in empty_selections(tuple(meta.shape or ())) if "positions" not in fields]
        patches[meta.path] = [some_patch(rng, **fields, allow_empty=True) for fields in rng.sample(allowed, 4)]
    with without_recomputing(case):
        expected = run(capture.reference, case.example())
        with capture.pg.patch(patches):
            found = run(capture.pg, case.example())
    assert capture.difference(expected, found) is None


def beyond(shape: torch.Size, rng: random.Random) -> tuple[Any, int, Any]:
    """An index that is in no value of this shape, and the dimension in which it is not, and the part that is not."""
    dim = rng.randrange(len(shape))
    size = shape[dim]
    part = rng.choice([slice(size, size + 16), slice(size, None), size, -size - 1, [0, size], slice(None, -size)])
    before: tuple[Any, ...] = (slice(None),) * dim
    return (*before, part), dim, part


@each_case(is_in_sample)
def test_indices_that_no_weight_has_are_refused_before_anything_runs(case: Case) -> None:
    capture = capture_of(case)
    rng = capture.random("weights")
    for meta in some_nodes(capture, 3, "parameter"):
        assert meta.shape is not None
        index, dim, _ = beyond(meta.shape, rng)
        with (
            nothing_runs(capture.model),
            pytest.raises(
                PatchMapError, match=f"(out of range|selects nothing): dimension {dim} of the value recorded"
            ),
            capture.pg.patch({meta.path: some_patch(rng, slice=index)}),
        ):
            pytest.fail(f"{meta.path} was patched at {index}")


@each_case(lets_errors_through)
def test_indices_that_no_value_has_are_errors(case: Case) -> None:
    """On entry, or during the run where other inputs might have them."""
    capture = capture_of(case)
    rng = capture.random("values")
    for meta in some_nodes(capture, 3, *VALUES):
        assert meta.shape is not None
        index, _, _ = beyond(meta.shape, rng)
        with (
            without_recomputing(case),
            pytest.raises(GraphPatchError, match="out of range|selects nothing|out of bounds") as caught,
            capture.pg.patch({meta.path: some_patch(rng, slice=index)}),
        ):
            run(capture.pg, case.example())
        assert isinstance(caught.value, (PatchMapError, PatchValueError)), f"{meta.path} at {index}"


def noted(seen: list[Tensor], value: Tensor) -> Tensor:
    seen.append(value.detach().clone())
    return value


@each_case(is_in_sample)
def test_a_slice_changes_only_its_entries(case: Case) -> None:
    capture = capture_of(case)
    rng = capture.random("selections")
    for meta in some_nodes(capture, 3, *VALUES):
        assert meta.shape is not None
        size = meta.shape[-1]
        part: Any = rng.choice([slice(size - 1, size + 9), -1, [0, -1], slice(0, None, 2), torch.arange(size) == 0])
        index = rng.choice([(..., part), [..., part], [slice(None), ..., part][len(meta.shape) == 1 :]])
        seen: list[Tensor] = []
        look = CustomPatch(custom_op=partial(noted, seen), requires_clone=False)
        with (
            without_recomputing(case),
            capture.pg.patch({meta.path: [look, ReplacePatch(value=7.0, slice=index), look]}),
        ):
            outcome(capture.pg, case.example())
        assert len(seen) >= 2
        for before, after in zip(seen[::2], seen[1::2], strict=False):
            expected = before.clone()
            expected[(..., part)] = 7.0
            torch.testing.assert_close(after, expected, rtol=0, atol=0, equal_nan=True)
            assert not torch.equal(before, after), f"{meta.path} at {index}"


# -- sizes of a run ----------------------------------------------------------------------------------------------------


def test_a_slice_of_a_sequence_is_checked_against_what_each_run_has() -> None:
    case = case_by_name("gpt2-eager")
    capture = capture_of(case)
    path = "transformer.h_0.mlp.output"
    shape = capture.pg.nodes[path].shape
    assert shape is not None
    end = (slice(None), slice(shape[1], shape[1] + 2))
    ids = torch.arange(3, 3 + shape[1] + 2)[None]
    probe = ProbePatch()
    with capture.pg.patch({path: [ReplacePatch(value=0.5, slice=end), probe]}):
        capture.pg(ids)
        with pytest.raises(
            PatchValueError, match=rf"'{path}': slice \[:, .*\] selects nothing: dimension 1 of the value here"
        ):
            capture.pg(ids[:, : shape[1]])
    assert probe.activation[:, shape[1] :].eq(0.5).all()


def test_steps_and_positions_of_other_steps_are_not_errors_nor_are_their_slices() -> None:
    capture = capture_of(case_by_name("gpt2-eager"))
    path, ids = "transformer.h_0.mlp.output", torch.arange(3, 10)[None]
    first = (slice(None), slice(2, 4))

    def generated() -> Any:
        return capture.pg.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)

    for fields in ({"steps": "prefill"}, {"positions": [2, 3]}, {"allow_empty": True}):
        with capture.pg.patch(
            {path: AddPatch(value=5.0, slice=first if "positions" not in fields else None, **fields)}
        ):
            generated()
    with (
        capture.pg.patch({path: AddPatch(value=5.0, slice=first)}),
        pytest.raises(PatchValueError, match=r"slice \[:, 2:4\] selects nothing: dimension 1 of .* has 1 entries"),
    ):
        generated()


# -- experiments and options -------------------------------------------------------------------------------------------


class Attention(Submodules, up=(5, 64), down=(64, 2)):
    """Swallows what it is given by keyword."""

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return self.down(self.up(x))


def test_a_value_is_not_replaced_by_itself() -> None:
    pg = PatchableGraph(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.ones(2, 3))
    with pytest.raises(PatchMapError, match=r"the source 'sub_\*.output' means several values: name one"):
        pg.patch({"sub_0.output": FromPatch("sub_*.output")}).__enter__()
    with pg.patch({"sub_0.output": FromPatch("sub_0.output")}), pytest.raises(PatchValueError, match="give another"):
        pg(torch.ones(2, 3))
    with pg.patch({"sub_0.output": FromPatch("sub_0.output", allow_empty=True)}):
        assert torch.equal(pg(torch.ones(2, 3)), pg._module(torch.ones(2, 3)))


@pytest.mark.parametrize("name", ["steps", "allow_empty"])
def test_fields_of_patches_are_not_swallowed(name: str) -> None:
    model, x = Attention(), torch.ones(2, 3, 5)
    pg = PatchableGraph(model, x)
    with nothing_runs(model):
        with pytest.raises(ExperimentError, match=f"record has no {name}=; patches have"):
            pg.record("up.output", x, **{name: 1})
        with pytest.raises(ExperimentError, match=f"sweep has no {name}="):
            pg.sweep({"c": [0]}, lambda c: {"output": ZeroPatch()}, x, metric=torch.sum, **{name: 1})


class Cube(nn.Module):
    """All sizes are the same, so that any dimension of a value could be taken for any other."""

    def forward(self, x: Tensor) -> Tensor:
        doubled = x * 2
        return doubled + 1


CUBE = torch.arange(27.0).reshape(3, 3, 3)
PARTS = [
    None, 1, (slice(None), 0), (..., 2), (0, ..., 1), slice(1, None), (..., slice(1, 3)), [0, 2], (..., [0, 2]),
    (slice(None), [0, 1, 2]), (None, ...), (None, 0), (0, [1, 2]), torch.ones(3, 3, dtype=torch.bool),
    (..., torch.tensor([True, False, True])), ([0, 1, 2], [2, 1, 0]),
]  # fmt: skip
VALUE_SHAPES = [
    shape for rank in range(5) for shape in itertools.product((1, 2, 3), repeat=rank) if rank < 3 or 2 not in shape
]


@pytest.mark.parametrize("index", PARTS, ids=str)
@pytest.mark.parametrize("kind", [ReplacePatch, AddPatch, FromPatch, CustomPatch])
def test_a_value_of_other_dimensions_is_an_error_if_it_could_mean_other_dimensions(kind: Any, index: Any) -> None:
    """What runs equals torch's writing of a value with all dimensions; a value with fewer that runs is one vector along
    the last dimension of the patched tensor. Errors of values that are known come before anything runs.
    """
    pg = PatchableGraph(model := Cube(), CUBE)
    part = torch.zeros(3, 3, 3)[... if index is None else index]
    runs = 0
    for shape in VALUE_SHAPES:
        value = torch.rand(shape)
        patch: Patch[Any]
        if kind in (ReplacePatch, AddPatch):
            patch = kind(value=value, slice=index)
        elif kind is FromPatch:
            patch = FromPatch("x", lambda _, value=value: value, slice=index)
        elif index is None:
            continue
        else:
            patch = CustomPatch(custom_op=lambda _, value=value: value, slice=index)
        try:
            more = max(0, value.dim() - part.dim())
            broadcast = value.reshape(shape[more:]).broadcast_to(part.shape)
        except RuntimeError:
            broadcast = None
        last = torch.arange(3.0).expand(3, 3, 3)[... if index is None else index]
        has_last = len(last.unique()) > 1 and bool((last == last.reshape(-1, last.shape[-1])[0]).all())
        is_vector = value.numel() == 1 or (has_last and value.numel() == shape[-1])
        try:
            with pg.patch({"doubled": patch}):
                got = pg(CUBE)
        except (GraphPatchError, RuntimeError):
            assert broadcast is None or more or (value.dim() < part.dim() and not is_vector), (shape, index)
            if kind in (ReplacePatch, AddPatch) and value.dim() != part.dim() and not is_vector:
                with nothing_runs(model), pytest.raises(PatchMapError, match="'doubled'"), pg.patch({"doubled": patch}):
                    pass
            continue
        runs += 1
        assert broadcast is not None
        assert value.dim() == part.dim() or is_vector, (shape, index)
        want = CUBE * 2
        if kind is AddPatch:
            want[... if index is None else index] += broadcast
        else:
            want[... if index is None else index] = broadcast
        assert torch.equal(got, want + 1)
    assert runs or index is None


def test_a_source_of_other_dimensions_is_an_error_before_anything_runs() -> None:
    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = x.sum(0)
            return x * total

    pg = PatchableGraph(model := Sums(), CUBE)
    with (
        nothing_runs(model),
        pytest.raises(PatchMapError, match="'mul'.*FromPatch"),
        pg.patch({"mul": FromPatch("total")}),
    ):
        pass
    with pg.patch({"mul": FromPatch("total", slice=1)}):
        assert torch.equal(pg(CUBE)[1], CUBE.sum(0))


class Filled(nn.Module):
    """Writes into a tensor of which it has a view."""

    def forward(self, x: Tensor) -> Tensor:
        full = x * 1
        view = full[:1]
        full.add_(1)
        return view * 2


@pytest.mark.parametrize("as_graph", [False, True])
def test_what_selects_nothing_leaves_the_value_itself(as_graph: bool) -> None:
    x = torch.ones(2, 3)
    pg = PatchableGraph(Filled(), x)
    with pg.patch({"view": ZeroPatch(slice=slice(0, 0), allow_empty=True)}):
        assert torch.equal((pg.to_fx((x,)) if as_graph else pg)(x), torch.full((1, 3), 4.0))
