"""Law 5 for interrupts: a `KeyboardInterrupt` at each line of the user's code leaves nothing behind."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, CustomPatch, PatchableGraph, ProbePatch, ZeroPatch
from graphpatch_notebook.capture.modules import is_swapped, observer
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.patching import innermost
from graphpatch_notebook.torch_compat import function_mode_depth
from tests.zoo.values import same_state, snapshot

X = torch.ones(2, 3)
APPLY = torch.autograd.Function.__dict__["apply"]


def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + 1


def halved(value: Tensor) -> Tensor:
    return value / 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.linear.register_forward_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().max()
        return torch.relu(self.linear(x)) * 2 * scale


def interrupted(action: Callable[[], object], at: int, in_file: str = __file__) -> bool:
    """Runs `action` and interrupts it at a line of functions in a file; returns whether there are so many."""
    lines = itertools.count()
    came: list[int] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != in_file or frame.f_code.co_name in ("patched", "action", "<lambda>"):
            return None
        if event == "line" and next(lines) == at:
            sys.settrace(None)
            came.append(at)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        assert came
    finally:
        sys.settrace(None)
    return bool(came)


@pytest.mark.parametrize("has_block", [False, True])
def test_the_model_is_unchanged_after_an_interrupt(has_block: bool) -> None:
    """In the call, or as the block goes on: the next call in it is a whole one."""
    torch.manual_seed(0)
    model = Model()
    pg, expected = PatchableGraph(model, X), model(X)
    patches = {
        "linear.output": [CustomPatch(halved), ProbePatch()],
        "linear.input": CustomPatch(halved),
        "relu": AddPatch(value=1.0),
        "linear.bias": ZeroPatch(),
    }

    def patched() -> Tensor:
        with pg.patch(patches):
            return pg(X)

    def check(at: int) -> None:
        assert observer.get() is None, at
        assert function_mode_depth() == 0, at
        assert torch.is_grad_enabled(), at
        assert torch.autograd.Function.__dict__["apply"] is APPLY, at
        assert torch.equal(model(X), expected), at

    changed, before = patched(), snapshot(model)
    at = 0
    if has_block:
        with pg.patch(patches):
            while interrupted(lambda: pg(X), at):
                check(at)
                assert torch.equal(pg(X), changed), at
                at += 1
    else:
        while interrupted(patched, at):
            check(at)
            assert same_state(model, before) is None, at
            assert innermost(captured(pg)) is None, at
            assert not any(is_swapped(module) for module in model.modules()), at
            at += 1
    assert at > 4
    assert same_state(model, before) is None
    assert torch.equal(patched(), changed)


def test_the_model_is_unchanged_after_an_interrupt_of_a_capture() -> None:
    model = Model()
    before, at = snapshot(model), 0
    while interrupted(lambda: PatchableGraph(model, X), at):
        assert same_state(model, before) is None, at
        assert not any(is_swapped(module) for module in model.modules()), at
        assert observer.get() is None, at
        at += 1
    assert at > 2
