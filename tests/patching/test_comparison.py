"""Two runs from the same state: how they compare, and that nothing is left of them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook.patching.model_state import compared
from tests.zoo.values import same_state, snapshot

X = torch.linspace(-1, 1, 12).reshape(3, 4)
PLACE: ContextVar[int] = ContextVar("place", default=0)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0


MODEL = Holder()


def adds(x: Tensor) -> Tensor:
    MODEL.count.add_(1)
    return x + torch.rand(()) + MODEL.count


def adds_otherwise(x: Tensor) -> Tensor:
    torch.rand(())
    return adds(x)


def writes(x: Tensor) -> int:
    x.zero_()
    return 1


def switches(x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    return x


def leaves(x: Tensor) -> Tensor:
    PLACE.set(PLACE.get() + 1)
    return x + PLACE.get()


def counts(x: Tensor) -> Tensor:
    MODEL.calls += 1
    return x


def fails(x: Tensor) -> Tensor:
    MODEL.count.add_(5)
    raise IndexError("no such row\nmore of it")


def holds_itself(x: Tensor) -> Any:
    found = SimpleNamespace(x=x)
    found.itself = found
    return found


@pytest.mark.parametrize(
    ("expected", "found", "outcome", "detail"),
    [
        (adds, adds, "equal", ""),
        (leaves, leaves, "equal", ""),
        (holds_itself, holds_itself, "equal", ""),
        (adds, adds_otherwise, "differing", "output: 12 of 12 values differ"),
        (writes, lambda x: 1, "differing", "inputs|sub_0.sub_0: 12 of 12 values differ"),
        (lambda x: x, switches, "differing", "it ends in another gradient mode"),
        (lambda x: x, fails, "differing", "its graph raises IndexError: no such row"),
        (counts, lambda x: x, "not comparable", "Holder changes its 'calls' while it runs"),
        (
            lambda x: object(),
            lambda x: object(),
            "not comparable",
            "output: objects of type object cannot",
        ),
    ],
)
def test_comparisons_have_these_outcomes(
    expected: Callable[..., Any], found: Callable[..., Any], outcome: str, detail: str
) -> None:
    before, given, random = snapshot(MODEL), X.clone(), torch.get_rng_state()
    comparison = compared(MODEL, expected, found, (given,), {})
    assert (comparison.status, comparison.reason[: len(detail)]) == (outcome, detail)
    MODEL.calls = 0
    assert same_state(MODEL, before) is None
    assert torch.equal(given, X)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()
    assert PLACE.get() == 0
