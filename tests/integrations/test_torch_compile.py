"""Models with parts that `torch.compile` compiled: they load, and are patched, by running those parts as written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import CustomPatch, PatchableGraph, ZeroPatch

X = torch.linspace(-1, 1, 6).view(2, 3)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) * 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = Inner()
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


def wrapped() -> nn.Module:
    model = Outer()
    model.inner = torch.compile(model.inner, backend="eager")
    return model


def in_place() -> nn.Module:
    model = Outer()
    model.inner.compile(backend="eager")
    return model


def whole() -> nn.Module:
    return torch.compile(Outer(), backend="eager")


@pytest.mark.parametrize("build", [wrapped, in_place, whole])
def test_compiled_parts_are_captured_and_patched(build: Callable[[], nn.Module]) -> None:
    model, plain = build(), Outer()
    expected = plain(X)
    pg = PatchableGraph(model, X)
    assert torch.equal(pg(X), expected)
    with pg.patch({path: CustomPatch(lambda value: value, requires_clone=False) for path in pg.nodes}, strict=True):
        assert torch.equal(pg(X), expected)
    relu = next(path for path in pg.nodes if path.endswith("relu"))
    with pg.patch({relu: ZeroPatch()}, strict=True):
        assert torch.equal(pg(X), plain.last(torch.zeros(2, 3)))
    assert torch.equal(pg(X), expected)
