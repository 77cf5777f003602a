"""Law 5: after the block, however it is left, the model is what it was."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from graphpatch_notebook import AddPatch, CustomPatch, Patch, PatchableGraph, ZeroPatch
from tests.laws.captures import Capture, capture_of, leaves_its_state_alone, run, some_cases
from tests.zoo import Case, case_by_name
from tests.zoo.submodules import Submodules
from tests.zoo.values import bit_equal, same_state, snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning"),
    pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True``"),  # torch, of a hook that raised
]


class Interrupted(BaseException):
    """Stands for `KeyboardInterrupt`, which pytest would take for its own."""


def raising(error: BaseException) -> Callable[[Any], Any]:
    def op(value: Any) -> Any:
        raise error

    return op


def patches_everywhere(capture: Capture) -> dict[str, Patch]:
    return {path: CustomPatch(custom_op=lambda v: v, requires_clone=False, any_shape=True) for path in capture.paths}


def can_be_interrupted(case: Case) -> bool:
    """Some of its values come up in the thread of the caller, and nothing in the model swallows what they raise."""
    return leaves_its_state_alone(case) and case.name not in ("awkward-side-effects", "awkward-worker-thread")


@some_cases(can_be_interrupted)
def test_after_errors_and_interrupts_at_any_point(case: Case) -> None:
    capture = capture_of(case)
    paths = list(capture.pg.nodes)
    run(capture.model, case.example())
    before = snapshot(capture.model)
    for error in (ArithmeticError("injected"), Interrupted("injected")):
        for path in capture.random("interrupts").sample(paths, min(2, len(paths))):
            patches = patches_everywhere(capture) | {path: CustomPatch(custom_op=raising(error), requires_clone=False)}
            try:
                with capture.pg.patch(patches):
                    run(capture.pg, case.example())
            except type(error):
                pass
            assert same_state(capture.model, before) is None, path
    expected = run(capture.reference, case.example())
    assert bit_equal(expected, run(capture.pg, case.example())) is None


@some_cases(leaves_its_state_alone, every=2)
def test_after_an_error_of_capture(case: Case) -> None:
    """Interrupted in the middle: by a hook, as the user's own code would be."""
    model = case.build()
    run(model, case.example())
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    victim = modules[len(modules) // 2]
    with victim.register_forward_pre_hook(lambda module, args: raising(Interrupted())(None)):
        before = snapshot(model)
        with contextlib.suppress(Interrupted):
            run(lambda *args, **kwargs: PatchableGraph(model, *args, **kwargs), case.example())
        assert same_state(model, before) is None


@pytest.fixture
def gpt2() -> Capture:
    return capture_of(case_by_name("gpt2-eager"))


def test_contexts_left_in_another_order_than_entered(gpt2: Capture) -> None:
    before = snapshot(gpt2.model)
    call = gpt2.case.example()
    first = gpt2.pg.patch({"transformer.h_0.mlp.output": ZeroPatch()})
    second = gpt2.pg.patch({"transformer.h_0.mlp.output": AddPatch(1.0)})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    run(gpt2.pg, call)
    second.__exit__(None, None, None)
    assert same_state(gpt2.model, before) is None
    assert bit_equal(run(gpt2.reference, gpt2.case.example()), run(gpt2.pg, gpt2.case.example())) is None


def test_generators_and_reentered_contexts(gpt2: Capture) -> None:
    before = snapshot(gpt2.model)
    context = gpt2.pg.patch({"transformer.h_0.mlp.output": ZeroPatch()})

    def patched_runs() -> Any:
        with context:
            yield run(gpt2.pg, gpt2.case.example())
            yield run(gpt2.pg, gpt2.case.example())

    runs = patched_runs()
    first = next(runs)
    with context:
        again = run(gpt2.pg, gpt2.case.example())
    second = next(runs)
    runs.close()
    assert bit_equal(first, again) is None
    assert bit_equal(first, second) is None
    assert same_state(gpt2.model, before) is None


class Scaled(Submodules, linear=(3, 3)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_made_inside_a_block_are_unpatched_and_run_their_own_weights(
    duplicate: Callable[[nn.Module], nn.Module],
) -> None:
    model, x = Scaled(), torch.ones(2, 3)
    pg = PatchableGraph(model, x)
    expected = model(x)
    with pg.patch({"linear.linear": ZeroPatch(), "linear.output": AddPatch(1.0)}):
        twin = duplicate(model)
        assert torch.equal(twin(x), expected)
    with torch.no_grad():
        twin.linear.weight.zero_()
        twin.linear.bias.zero_()
    assert torch.equal(twin(x), torch.zeros(2, 3))
    assert torch.equal(model(x), expected)


def test_a_copy_of_the_graph_is_patched_on_its_own() -> None:
    model, x = Scaled(), torch.ones(2, 3)
    pg = PatchableGraph(model, x)
    twin = copy.deepcopy(pg)
    with torch.no_grad():
        twin.linear.weight.zero_()
        twin.linear.bias.fill_(1)
    with twin.patch({"linear.linear": AddPatch(1.0)}):
        assert torch.equal(twin(x), torch.full((2, 3), 4.0))
        assert torch.equal(pg(x), model(x))
    assert not torch.equal(model(x), twin(x))
