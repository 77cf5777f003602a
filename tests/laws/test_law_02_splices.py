"""Law 2 for splices: an SAE without an error changes nothing, and patches on its latents are patches on the value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, CustomPatch, PatchableGraph, ProbePatch
from graphpatch_notebook.capture.records import spliced_calls
from graphpatch_notebook.experiments.attribution.secants import has_memory
from graphpatch_notebook.paths import format_path
from tests.laws.captures import (
    capture_of,
    outside_fused_calls,
    run,
    runs_the_same_code_again,
    some_cases,
    without_recomputing,
)
from tests.zoo import Case
from tests.zoo.values import close


class Halving(nn.Module):
    """Its latents are half the value, which no rounding changes."""

    def encode(self, value: Tensor) -> Tensor:
        return value / 2

    def decode(self, latents: Tensor) -> Tensor:
        return latents * 2


def is_finite(value: Any) -> bool:
    return type(value) is Tensor and has_memory(value) and bool(value.isfinite().all())


def latents_of(pg: PatchableGraph) -> list[str]:
    return [f"{format_path(call.frame.path)}.latents" for call in spliced_calls(pg.nodes.root)]


def applies(case: Case) -> bool:
    # One writes into a leaf; with other values, others run loops or experts that the example did not have.
    others = {"awkward-inner-autograd", "awkward-loops-over-values", "mixtral-expert-loop-eager"}
    return runs_the_same_code_again(case) and not case.mutates_state and case.name not in others


@some_cases(applies, every=3)
def test_latents_at_many_nodes_are_these_values(case: Case) -> None:
    capture = capture_of(case)
    pg = capture.pg
    with torch.no_grad(), without_recomputing(case):
        probes = {path: ProbePatch() for path in outside_fused_calls(pg)}
        with pg.patch(probes):
            run(pg, case.example())
    paths = [
        path
        for path, node in pg.nodes.items()
        if node.dtype is not None
        and node.dtype.is_floating_point
        and node.kind in ("op", "input", "output")
        and node.opens is None
        and not (node.is_mutated_later or node.is_view_filled_later)
        and is_finite(probes[path].activation)
    ][::7]
    whole, exact = (pg.splice(dict.fromkeys(paths, Halving()), error=error) for error in (False, True))
    assert len(latents_of(whole)) == len(paths)
    with without_recomputing(case):
        expected = run(capture.reference, case.example())
        # Sums are new tensors, whose strides may be others: kernels then round in another way.
        with pg.patch(dict.fromkeys(paths, CustomPatch(custom_op=lambda value: value / 2 * 2))):
            assert close(run(pg, case.example()), run(whole, case.example()), 1e-5) is None
        with exact.patch(dict.fromkeys(latents_of(exact), CustomPatch(custom_op=torch.clone))):
            assert close(expected, run(exact, case.example()), 1e-5) is None
        add: dict[str, Any] = dict.fromkeys(paths[::2], CustomPatch(custom_op=lambda value: (value / 2 + 1) * 2))
        with pg.patch(add):
            changed = run(pg, case.example())
        with whole.patch(dict.fromkeys(latents_of(whole)[::2], AddPatch(1.0))):
            assert close(changed, run(whole, case.example()), 1e-5) is None
