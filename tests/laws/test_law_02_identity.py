"""Law 2: an identity patch on every node changes no bit of the output, on the example and on every other call."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from graphpatch_notebook import GraphPatchWarning, ProbePatch
from tests.laws.captures import (
    Capture,
    capture_of,
    each_call,
    each_case,
    identity,
    run,
    runs_the_same_code_again,
    some_cases,
    without_recomputing,
)
from tests.zoo import Call, Case
from tests.zoo.values import bit_equal, flatten


def has_fast_paths(case: Case) -> bool:
    """Without autograd torch runs fused kernels, which a function mode switches off: another path than with it."""
    return case.tolerance > 0


def _identity_everywhere(capture: Capture, call: Call) -> Any:
    patches = {path: identity(any_shape=True) for path in capture.paths}
    with warnings.catch_warnings(), capture.pg.patch(patches):
        # Other inputs take other branches: that a patch does not fire is what law 10 is about.
        warnings.simplefilter("ignore")
        return run(capture.pg, call)


@some_cases()
def test_on_every_call(case: Case) -> None:
    for name, capture, call, same_call in each_call(case):
        expected = run(capture.reference, call)
        found = _identity_everywhere(capture, same_call)
        assert capture.difference(expected, found) is None, name
        assert _gradients_known(expected) == _gradients_known(found), name


@each_case(has_fast_paths)
def test_without_autograd(case: Case) -> None:
    for name, capture, call, same_call in each_call(case):
        with torch.no_grad():
            expected = run(capture.reference, call)
            assert capture.difference(expected, _identity_everywhere(capture, same_call)) is None, name


@pytest.mark.filterwarnings("ignore:.shared gradient:graphpatch_notebook.GraphPatchWarning")
@some_cases(runs_the_same_code_again)
def test_probes_find_what_was_recorded(case: Case) -> None:
    """On the inputs of the capture no patch is left over (a warning is an error here), and no shape is another."""
    capture = capture_of(case)
    probes = {path: ProbePatch() for path in capture.paths}
    with without_recomputing(case):
        with capture.pg.patch({path: [identity(), probe] for path, probe in probes.items()}):
            found = run(capture.pg, case.example())
        assert capture.difference(run(capture.reference, case.example()), found) is None
    for path, probe in probes.items():
        value, meta = probe.activation, capture.pg.nodes[path]
        is_tensor = isinstance(value, Tensor)
        assert is_tensor == (meta.shape is not None), path
        if is_tensor:
            assert (value.shape, value.dtype, value.device) == (meta.shape, meta.dtype, meta.device), path


def runs_other_code_again(case: Case) -> bool:
    """The cases left out above: patches on what only the first run makes are reported, and do no harm."""
    return not runs_the_same_code_again(case)


@each_case(runs_other_code_again)
def test_a_value_that_is_computed_only_once_is_reported(case: Case) -> None:
    capture = capture_of(case)
    with (
        capture.pg.patch({path: identity() for path in capture.paths}),
        pytest.warns(GraphPatchWarning, match="its module ran, but did not come to this operation"),
    ):
        found = run(capture.pg, case.example())
    assert bit_equal(run(capture.reference, case.example()), found) is None


def _gradients_known(output: Any) -> list[tuple[str, bool]]:
    return [(path, leaf.requires_grad) for path, leaf in flatten(output) if isinstance(leaf, Tensor)]
