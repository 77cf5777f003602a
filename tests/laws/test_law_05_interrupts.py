"""Law 5, where it is hardest: an interrupt that comes between any two instructions of the engine.

A trace function raises `KeyboardInterrupt` at the n-th line that the engine executes, for every n: while a context is
entered, while a call runs in it, and while it is left.
"""

from __future__ import annotations

import itertools
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphpatch_notebook
import graphpatch_notebook.capture as capture_package
from graphpatch_notebook import AddPatch, PatchableGraph, ProbePatch, ZeroPatch, interrupts
from graphpatch_notebook.capture import observers
from graphpatch_notebook.capture.observers import is_swapped, observer
from graphpatch_notebook.execution import innermost
from graphpatch_notebook.patchable_graph import captured
from graphpatch_notebook.torch_compat import function_mode_depth

PACKAGE = str(Path(graphpatch_notebook.__file__).parent)
X = torch.ones(2, 3)
APPLY = torch.autograd.Function.__dict__["apply"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.linear.register_forward_hook(lambda module, args, output: output + 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().max()
        return torch.relu(self.linear(x)) * 2 * scale


def interrupted(action: Callable[[], object], at: int, in_files: str = PACKAGE) -> bool:
    """Runs `action` and interrupts it at a line of the engine; returns whether it came so far."""
    lines = itertools.count()
    came: list[int] = []

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(in_files):
            return None
        if is_beyond_reach(frame, event):
            return trace
        if event in ("call", "line") and next(lines) == at:
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


def assert_thread_is_unchanged(at: int) -> None:
    assert observer.get() is None, at
    assert observers.apply_observer.get() is None, at
    assert function_mode_depth() == 0, at
    assert torch.is_grad_enabled(), at
    assert torch.autograd.Function.__dict__["apply"] is APPLY, at


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python swallows some interrupts
def test_the_model_is_unchanged_after_an_interrupt_at_any_point() -> None:
    torch.manual_seed(0)
    model = Model()
    pg = PatchableGraph(model, X)
    expected = model(X)
    before = [dict(vars(module)) for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    patches = {"linear.output": [ZeroPatch(), ProbePatch()], "relu": AddPatch(value=1.0), "linear.bias": ZeroPatch()}

    def patched() -> None:
        with pg.patch(patches):
            pg(X)

    patched()
    with pg.patch(patches):
        changed = pg(X)
    assert not torch.equal(changed, expected)
    at = 0
    while interrupted(patched, at):
        assert [dict(vars(module)) for module in model.modules()] == before, at
        assert [len(module._forward_hooks) for module in model.modules()] == hooks, at
        assert innermost(captured(pg)) is None, at
        assert_thread_is_unchanged(at)
        assert not any(is_swapped(module) for module in model.modules()), at
        assert torch.equal(pg(X), expected), at
        at += 1
    assert at > 300
    with pg.patch(patches):
        assert torch.equal(pg(X), changed)
        assert torch.equal(model(X), expected)


def is_beyond_reach(frame: FrameType, event: str) -> bool:
    """Whether no Python code could take back what an interrupt leaves there, or Python looks for no signals there."""
    if frame.f_code.co_name == "__exit__" and frame.f_lineno <= frame.f_code.co_firstlineno + _LINES_BEFORE_TRY:
        return True
    # Signals are looked for after calls, never between the end of a `with` block and its `__exit__`.
    return event == "line" and linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


_LINES_BEFORE_TRY = 3  # `def __exit__(`, its parameters, `) -> None:`, `try:`


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_call_that_was_interrupted_leaves_nothing_in_its_context() -> None:
    torch.manual_seed(0)
    model = Model()
    pg = PatchableGraph(model, X)
    expected = model(X)
    with pg.patch({"relu": AddPatch(value=1.0)}):
        changed = pg(X)
        at = 0
        while interrupted(lambda: pg(X), at):
            assert_thread_is_unchanged(at)
            assert torch.equal(model(X), expected), at
            assert torch.equal(pg(X), changed), at
            at += 1
    assert at > 100


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_model_is_unchanged_after_an_interrupt_of_a_capture_at_any_point() -> None:
    """At each line of what sets a capture up and takes it back; tests/fuzz has points of all the rest."""
    torch.manual_seed(0)
    model = Model()
    before = [dict(vars(module)) for module in model.modules()]
    for file in (capture_package, observers, interrupts):
        at = 0
        while interrupted(lambda: PatchableGraph(model, X), at, str(file.__file__)):
            assert [dict(vars(module)) for module in model.modules()] == before, at
            assert not any(is_swapped(module) for module in model.modules()), at
            assert_thread_is_unchanged(at)
            at += 1
        assert at > 10
