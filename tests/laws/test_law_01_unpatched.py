"""Law 1: unpatched `pg(x)` is bit-equal to `model(x)` and runs the same code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from graphpatch_notebook import PatchableGraph, ProbePatch
from tests.laws.captures import capture_of, each_call, run, some_cases
from tests.zoo import Case, case_by_name
from tests.zoo.values import bit_equal


@some_cases()
def test_same_bits(case: Case) -> None:
    """Also where torch has fast paths, which it takes without autograd, and an unpatched run does not switch off."""
    for name, capture, call, same_call in each_call(case):
        expected = run(capture.reference, call)
        assert bit_equal(expected, run(capture.pg, same_call)) is None, name
    capture = capture_of(case)
    with torch.no_grad():
        expected = run(capture.reference, case.example())
        assert bit_equal(expected, run(capture.pg, case.example())) is None


@some_cases()
def test_same_code(case: Case) -> None:
    """Each module runs its own forward: nothing is swapped, hooked or watched, and none of our code lies between."""
    capture = capture_of(case)
    expected = _seen(capture.reference, capture)
    with capture.pg.patch({"output" if "output" in capture.pg.nodes else next(iter(capture.pg.nodes)): ProbePatch()}):
        pass
    found = _seen(capture.pg, capture)
    assert found == expected
    assert len(found) >= 1


def _seen(module: Any, capture: Any) -> list[Any]:
    with _watched() as seen:
        run(module, capture.case.example())
    return seen


@contextmanager
def _watched() -> Iterator[list[Any]]:
    """Notes of each module, right after its forward, what it is and what surrounds it."""
    seen: list[Any] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, PatchableGraph):
            return
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        modes = torch._C._len_torch_function_stack()
        seen.append((type(module).__qualname__, sorted(module.__dict__), hooks, modes, _own_functions()))

    with register_module_forward_hook(look):
        yield seen


def _own_functions() -> set[str]:
    """The functions of the package on the stack, but for the one that hands a call of `pg` to the model."""
    frame = sys._getframe(1)
    found = set()
    while frame.f_back is not None:
        frame = frame.f_back
        if "graphpatch_notebook" in frame.f_code.co_filename:
            found.add(frame.f_code.co_name)
    return found - {"forward", "_call"}


def test_the_watch_notices_a_patched_run() -> None:
    """What `test_same_code` looks at tells a patched run from an unpatched one."""
    capture = capture_of(case_by_name("gpt2-eager"))
    expected = _seen(capture.reference, capture)
    with capture.pg.patch({"transformer.h_0.mlp.act.tanh": ProbePatch()}):
        assert _seen(capture.pg, capture) != expected
        assert _seen(capture.model, capture) != expected, "a swapped forward is there for the length of the block"
    assert _seen(capture.model, capture) == expected
