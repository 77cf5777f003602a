"""Calls that are skipped (`SkipPatch`) and values read from the same run (`FromPatch`), against plain torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    FromPatch,
    GraphError,
    GraphPatchWarning,
    Patch,
    PatchableGraph,
    PatchMapError,
    PatchValueError,
    ProbePatch,
    ReplacePatch,
    SkipPatch,
    ZeroPatch,
)
from graphpatch_notebook.paths import format_path
from graphpatch_notebook.values import TensorSpec
from tests import tiny_models
from tests.laws.captures import capture_of, leaves_its_state_alone, outcome, some_cases, without_recomputing
from tests.zoo import Case
from tests.zoo.submodules import Submodules
from tests.zoo.values import same_state, snapshot


@contextlib.contextmanager
def skipped_by_hand(module: nn.Module) -> Iterator[None]:
    """Replaces the forward of a module by one that returns its first tensor."""
    module.forward = lambda *args, **kwargs: next(
        value.clone() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)
    )
    yield
    del module.forward


def can_be_skipped(case: Case) -> bool:
    return leaves_its_state_alone(case) and case.name not in ("awkward-worker-thread", "awkward-side-effects")


@some_cases(can_be_skipped, every=4)
def test_a_skipped_module_is_one_whose_forward_returns_its_input(case: Case) -> None:
    capture = capture_of(case)
    frames = [
        frame
        for frame in capture.frames_called_once()
        if frame.parent is not None
        and isinstance(frame.output_node.spec, TensorSpec)
        and not isinstance(frame.module, torch.jit.ScriptModule)
        and "forward" not in vars(frame.module)
    ]
    before = snapshot(capture.model)
    for frame in capture.random("skip").sample(frames, min(4, len(frames))):
        path = format_path(frame.path)
        try:
            with without_recomputing(case), capture.pg.patch({path: SkipPatch()}).quiet():
                found = outcome(capture.pg, case.example())
        except PatchMapError:  # the input cannot pass through
            continue
        with skipped_by_hand(capture.counterpart(frame.module)):
            expected = outcome(capture.reference, case.example())
        assert capture.difference(expected, found) is None, path
    assert same_state(capture.model, before) is None
    expected = outcome(capture.reference, case.example())
    assert capture.difference(expected, outcome(capture.pg, case.example())) is None


TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
MLP = "transformer.h_1.mlp.output"


@pytest.fixture(scope="module")
def gpt2() -> PatchableGraph:
    return PatchableGraph(tiny_models.gpt2(layers=3, width=8, vocabulary=20, n_positions=32), TOKENS)


def test_the_input_of_a_skipped_call_is_patched_and_what_is_inside_is_reported(gpt2: PatchableGraph) -> None:
    inside = {"transformer.h_1.mlp": SkipPatch(), "transformer.h_1.mlp.hidden_states": AddPatch(value=1.0)}
    probe = ProbePatch()
    with gpt2.patch(inside), gpt2.patch({MLP: probe}):
        gpt2(TOKENS)
    norm = gpt2.run_until("transformer.h_1.ln_2.output", TOKENS)
    assert torch.equal(probe.activation, norm + 1.0)
    with (
        gpt2.patch({"transformer.h_1.mlp": SkipPatch(), "transformer.h_1.mlp.c_fc.output": ProbePatch()}),
        pytest.warns(GraphPatchWarning, match=r"c_fc\.output': 'transformer\.h_1\.mlp' was skipped"),
    ):
        gpt2(TOKENS)


@pytest.mark.parametrize(
    ("path", "patch"),
    [
        ("transformer.h_1.mlp.c_fc", SkipPatch()),
        ("transformer.h_1.mlp.c_fc", SkipPatch(1.0)),
        ("transformer.h_1.ln_1.input", SkipPatch()),
        ("transformer", SkipPatch()),
        ("output|logits", SkipPatch()),
        (MLP, SkipPatch(positions=1)),
        (MLP, SkipPatch(torch.ones(2, 4, 9))),
        (MLP, SkipPatch(torch.ones(2, 4, 8).double())),
        (MLP, SkipPatch("x")),
        (MLP, FromPatch("transformer.h_1.output")),
        (MLP, FromPatch("transformer.h_1.nothing")),
        (MLP, FromPatch("transformer.h_*.output")),
        (MLP, FromPatch("transformer.h_0.output", rows=[0.5])),
        (MLP, FromPatch("transformer.h_0.output", transform=3)),
    ],
)
def test_patches_that_are_refused_before_anything_runs(gpt2: PatchableGraph, path: str, patch: Any) -> None:
    with pytest.raises(PatchMapError, match=re.escape(path)):
        gpt2.patch({path: patch}).__enter__()


def test_reading_is_replacing_by_the_value_of_the_run(gpt2: PatchableGraph) -> None:
    source, target = "transformer.h_0.mlp.output", "transformer.h_2.mlp.output"
    value = gpt2.run_until(source, TOKENS)
    cases = [
        (FromPatch(source), value),
        (FromPatch(source, lambda v: v * 2), value * 2),
        (FromPatch(source, rows=[1, 0]), value[[1, 0]]),
        (FromPatch(source, rows=-1), value[[-1]]),
        (FromPatch(source, lambda v: v[:, 0], slice=(slice(None), -1)), None),
    ]
    for patch, new in cases:
        plain = ReplacePatch(value=new) if new is not None else ReplacePatch(value=value[:, 0], slice=(slice(None), -1))
        with gpt2.patch({target: patch}):
            found = gpt2(TOKENS).logits
        with gpt2.patch({target: plain}):
            assert torch.equal(found, gpt2(TOKENS).logits)


def test_what_is_read_is_the_value_after_all_patches_also_of_inner_contexts(gpt2: PatchableGraph) -> None:
    source, probe = "transformer.h_0.output", ProbePatch()
    with gpt2.patch({"transformer.h_1.output": [FromPatch(source), probe]}), gpt2.patch({source: AddPatch(value=1.0)}):
        gpt2(TOKENS)
    assert torch.equal(probe.activation, gpt2.run_until(source, TOKENS) + 1.0)


class Two(Submodules, a=(3, 3), b=(3, 3)):
    def forward(self, x: Tensor, go: bool = True) -> Tensor:
        return self.b(self.a(x) if go else x) * 2

    def with_and_without(self, x: Tensor) -> Tensor:
        return self(x) + self(x, go=False)


def test_a_source_that_does_not_run_is_an_error_and_no_older_value() -> None:
    x = torch.ones(2, 3)
    pg = PatchableGraph(Two(), x)
    with pg.patch({"b.output": FromPatch("a.output")}):
        pg(x)
        with pytest.raises(PatchValueError, match=r"'b\.output'.*'a\.output'"):
            pg(x, go=False)
        with pytest.raises(PatchValueError, match=r"'a\.output'"):
            pg.with_and_without(x)
    with pg.patch({"b.output": FromPatch("a.output")}), pytest.raises(GraphError):
        pg.to_fx((x,))
    with pg.patch({"b.output": SkipPatch(torch.ones(3, 3))}):
        assert torch.equal(pg(torch.ones(3, 3)), torch.full((3, 3), 2.0))
    with pytest.raises((PatchMapError, PatchValueError)):
        pg.patch({"b.output": SkipPatch(torch.ones(3))}).__enter__()


def test_the_output_of_a_skipped_call_is_the_value_and_is_patched(gpt2: PatchableGraph) -> None:
    given = torch.randn(2, 4, 8)
    for path, output in (("mlp", MLP), ("attn", "transformer.h_1.attn.output|sub_0")):  # which returns a tuple
        with gpt2.patch({f"transformer.h_1.{path}": SkipPatch(given), output: AddPatch(value=1.0)}):
            found = gpt2(TOKENS).logits
        with gpt2.patch({output: ReplacePatch(value=given + 1.0)}):
            assert torch.equal(found, gpt2(TOKENS).logits)


def test_a_transform_cannot_write_into_the_source_and_rows_must_fit(gpt2: PatchableGraph) -> None:
    source = "transformer.h_0.mlp.output"
    for rows in (None, [0, 1]):
        with torch.no_grad(), gpt2.patch({MLP: FromPatch(source, lambda value: value.mul_(2), rows=rows)}):
            found = gpt2(TOKENS).logits
        with torch.no_grad(), gpt2.patch({MLP: FromPatch(source, lambda value: value * 2)}):
            assert torch.equal(found, gpt2(TOKENS).logits)
    with gpt2.patch({MLP: FromPatch(source, rows=[0, 2])}), pytest.raises(PatchValueError, match="has 2 rows"):
        gpt2(TOKENS)


@dataclass(kw_only=True, eq=False)
class SumOf(Patch[Tensor]):
    """Puts the sum of other values in the place of its own."""

    paths: tuple[str, ...]
    read: Any = ()

    @property
    def sources(self) -> Sequence[str]:
        return self.paths

    def reading(self, values: Sequence[Any]) -> SumOf:
        return replace(self, read=tuple(values))

    def op(self, original_output: Tensor) -> Tensor:
        return sum(self.read, torch.zeros_like(original_output))


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first = x * 2
        second = x + 3
        third = x - 1
        return third * 10 + first - second


def test_a_patch_reads_all_of_its_sources_and_may_write_into_them() -> None:
    x = torch.ones(2, 2)
    pg = PatchableGraph(Chain(), x)
    with pg.patch({"third": SumOf(paths=("first", "second"))}):
        assert torch.equal(pg(x), (x * 2 + x + 3) * 10 + x * 2 - (x + 3))
    with pg.patch({"third": FromPatch("first", lambda value: value.mul_(7))}):
        assert torch.equal(pg(x), x * 2 * 7 * 10 + x * 2 - (x + 3))


def test_a_part_of_a_value_does_not_read_another_part_of_the_same_value() -> None:
    pg = PatchableGraph(tiny_models.gpt2(), torch.arange(5)[None])
    patches = {"layers[0].attn.heads[0].z": FromPatch("layers[0].attn.heads[1].z")}
    with pytest.raises(PatchMapError, match="does not come before"), pg.patch(patches):
        pass


class Passes(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * 2


class UsesBoth(Submodules, inner=Passes):
    """Uses what it gave a module, and what that returned in a container: one tensor, two values."""

    def forward(self, x: Tensor) -> Tensor:
        given = x + 1
        returned, doubled = self.inner(given)
        return given * 10 + returned * 100 + doubled * 1000


@pytest.mark.parametrize("as_graph", [False, True])
def test_an_input_that_is_returned_in_a_container_is_a_value_of_its_own(as_graph: bool) -> None:
    x = torch.ones(1)
    pg = PatchableGraph(UsesBoth(), x)
    with pg.patch({"inner.output|sub_0": ZeroPatch()}):
        assert (pg.to_fx((x,)) if as_graph else pg)(x).item() == 4020
