"""In rows, modules compute only positions that patches change, and that are read: fewer, and to the same numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import AddPatch, CustomPatch, PatchableGraph, ZeroPatch
from tests.experiments.engine.loops import TOLERANCE, Counts

LENGTH, SIZE = 8, 16
TOKENS = torch.arange(LENGTH)[None] * 3 % 11


class Seen(nn.Module):
    """Counts the vectors that go through a module; `mix` may make it work on more than one at a time."""

    def __init__(self, mix: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.norm = nn.BatchNorm1d(SIZE)
        self.scales = nn.Parameter(torch.rand(64))
        self.gate = nn.Parameter(torch.zeros(1))
        self.positions = nn.Parameter(torch.eye(64))
        self.seen = 1
        self._mix = mix

    def forward(self, x: Tensor) -> Tensor:
        COUNTS(id(self), x.shape[0] * x.shape[1])
        x = self.linear(x)
        return x.tanh() if self._mix is None else self._mix(self, x)

    def longest(self, length: int) -> int:
        if length > self.seen:
            self.seen = length
        return self.seen


COUNTS = Counts()
STATE = {"mix": 0.0}


class Body(nn.Module):
    """Three blocks, with causal sums between positions before the second."""

    def __init__(self, mix: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(11, SIZE)
        self.first, self.second, self.third = Seen(), Seen(mix), Seen()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.first(x)
        x = x + self.second(x.cumsum(1) / 4)
        return x + self.third(x)


class Model(nn.Module):
    """A body and a head."""

    def __init__(self, mix: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = Body(mix)
        self.head = nn.Linear(SIZE, 5)

    def forward(self, tokens: Tensor, logits_to_keep: int = 0) -> Any:
        return Output(self.head(self.body(tokens)[:, -logits_to_keep:]))


class Output(dict[str, Tensor]):
    """An output with an attribute, as those of transformers."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits=logits)

    @property
    def logits(self) -> Tensor:
        return self["logits"]


MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "the position before": lambda self, x: x + 0.1 * x.roll(1, 1),
    "the mean over positions": lambda self, x: x - x.mean(1, keepdim=True),
    "the mean over rows": lambda self, x: x - x.mean(0, keepdim=True),
    "one position only, a little": lambda self, x: x + 1e-3 * x[:, :1],
    "sums": lambda self, x: x.cumsum(1) * 0.3,
    "a softmax over positions": lambda self, x: x.softmax(1),
    "where it stands": lambda self, x: x * self.scales[: x.shape[1], None] if x.shape[1] <= 64 else x,
    "how many there are": lambda self, x: x / x.shape[1],
    "whether there is one": lambda self, x: x if x.shape[1] == 1 else x * 2,
    "the largest of all": lambda self, x: x / (1 + x.abs().max()),
    "batch norm": lambda self, x: self.norm(x.flatten(0, 1)).view_as(x),
    "a gate that is closed": lambda self, x: x + self.gate * x.mean(1, keepdim=True),
    "a matrix that mixes nothing yet": lambda self, x: self.positions[: x.shape[1], : x.shape[1]] @ x,
    "nothing, but infinities": lambda self, x: x + 0 * x.sum(1, keepdim=True),
    "a state from elsewhere": lambda self, x: x + STATE["mix"] * x.mean(1, keepdim=True) if STATE["mix"] else x,
    "the longest so far": lambda self, x: x / self.longest(x.shape[1]),
    "whether a sum is positive, which seldom changes": lambda self, x: (self.linear(x.cumsum(1)) > 0).float(),
    "neighbours by a convolution": lambda self, x: torch.nn.functional.avg_pool1d(x.mT, 3, 1, 1).mT,
}


def last(output: Any) -> Tensor:
    logits = output.logits[:, -1]
    return logits[:, 2] - logits[:, 3]


def everything(output: Any) -> Tensor:
    return output.logits


def compared(
    pg: PatchableGraph, make: Callable[..., Any], metric: Any, paths: list[str], x: Tensor = TOKENS
) -> list[str]:
    """Asserts that a sweep over paths and positions equals the loop over patch contexts; returns its remarks."""
    axes = {"path": paths, "position": range(x.shape[1])}
    result = pg.sweep(axes, make, x, metric=metric, progress=False)
    with torch.no_grad():
        for path, position in itertools.product(*axes.values()):
            with pg.patch(make(path, position)):
                expected = metric(pg(x))
            found = torch.from_numpy(result.sel(path=path, position=position).values)
            assert torch.allclose(found, expected.double(), rtol=TOLERANCE, atol=TOLERANCE), (path, position)
    return result.attrs["remarks"]


def zeroed(path: str, position: int) -> dict[str, Any]:
    return {path: ZeroPatch(slice=(slice(None), position))}


PATHS = ["body.first.output", "body.second.output", "body.third.output"]


@pytest.mark.usefixtures("small_modules_in_parts")
@pytest.mark.parametrize("metric", [last, everything])
def test_only_positions_that_change_are_computed(metric: Any) -> None:
    model = Model().eval()
    pg = PatchableGraph(model, TOKENS)
    COUNTS.by_key.clear()

    result = pg.sweep({"path": PATHS, "position": range(LENGTH)}, zeroed, TOKENS, metric=metric, progress=False)

    assert result.attrs["remarks"] == []
    cells = len(PATHS) * LENGTH
    # Without patches (also in vain, without earlier logits), wild and known numbers for checks, and a cell again.
    setup = (6 if metric is last else 7) * LENGTH
    # In sequences as long as the example, the last of which may be filled up. Besides, behind the sums, what is at
    # the patched position or after it.
    behind = LENGTH * (LENGTH + 1) // 2
    assert COUNTS.by_key[id(model.body.first)] <= setup
    assert COUNTS.by_key[id(model.body.second)] <= setup + behind + LENGTH
    assert COUNTS.by_key[id(model.body.third)] <= setup + behind + 2 * LENGTH
    assert 3 * cells * LENGTH >= 4 * max(COUNTS.by_key.values())


@pytest.mark.usefixtures("small_modules_in_parts")
@pytest.mark.parametrize("name", MIXING)
def test_modules_in_which_positions_meet_are_computed_as_a_whole(name: str) -> None:
    pg = PatchableGraph(Model(MIXING[name]).eval(), TOKENS)
    for metric in (last, everything):
        compared(pg, zeroed, metric, PATHS)


@pytest.mark.usefixtures("small_modules_in_parts")
def test_patches_that_look_at_other_positions_see_what_is_there() -> None:
    """The metric reads the last position alone, but a patch takes others there."""
    pg = PatchableGraph(Model().eval(), TOKENS)

    def make(path: str, position: int) -> dict[str, Any]:
        moved = CustomPatch(custom_op=lambda x: x + x.roll(position + 1, 1))
        return {path: AddPatch(value=1.0, slice=(slice(None), position)), "body.third.output": moved}

    compared(pg, zeroed, last, PATHS)
    compared(pg, make, last, PATHS[:2])
