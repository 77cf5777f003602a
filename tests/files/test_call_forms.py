"""A loaded graph is a record of one run: calls of another form are refused, never answered with other numbers."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import GraphError, PatchableGraph, ZeroPatch
from graphpatch_notebook.patching.model_state import difference
from tests.files.files import Mlp, reloaded, x
from tests.zoo.submodules import Runs


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> PatchableGraph:
    return reloaded(PatchableGraph(Mlp().eval(), x()), tmp_path_factory.mktemp("form"))


@pytest.mark.parametrize(
    ("args", "kwargs", "name"),
    [
        ((x(), 1.0), {}, "'shift'"),
        ((x(),), {"shift": 0}, "'shift'"),
        ((x(),), {"mask": torch.ones(3)}, "'mask'"),
        ((x(2, 3, 4),), {}, "'x'"),
        ((x().double(),), {}, "'x'"),
        ((None,), {}, "'x'"),
        (([x()],), {}, "'x'"),
        ((x(), 0.0, None, 1), {}, "forward()"),
        ((), {"y": 1}, "'x'"),
    ],
)
def test_calls_of_another_form(loaded: PatchableGraph, args: Any, kwargs: Any, name: str) -> None:
    error = pytest.raises((GraphError, TypeError), match=re.escape(name))
    with error:
        loaded(*args, **kwargs)
    with error:
        loaded._graph_module(*args, **kwargs)
    with error, loaded.patch({"hidden": ZeroPatch()}):
        loaded(*args, **kwargs)


def test_calls_of_the_same_form(loaded: PatchableGraph) -> None:
    model = Mlp()
    model.load_state_dict(loaded.state_dict())
    for shape in ((0, 4), (1, 4), (1000, 4)):
        assert torch.equal(loaded(x=x(*shape), shift=0.0), model(x(*shape)))
        assert torch.equal(loaded._graph_module(x(*shape)), model(x(*shape)))


def test_other_modes(tmp_path: Path) -> None:
    loaded = reloaded(PatchableGraph(Mlp().eval(), x()), tmp_path)
    loaded.train()
    with pytest.raises(GraphError, match="eval"):
        loaded(x())
    loaded.eval()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(GraphError, match="default dtype"):
            loaded(x().float())
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu"), pytest.raises(GraphError, match="autocast"):
        loaded(x())


def looped(x: Tensor) -> Tensor:
    for i in range(x.shape[0]):
        x = x + i
    return x


def in_chunks(x: Tensor) -> Tensor:
    return torch.stack([x[i : i + 2].sum() for i in range(0, x.shape[0], 2)])


def over_rows(x: Tensor) -> Tensor:
    return torch.stack([row * len(x) for row in x])


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "greater": lambda x: x * 2 if x.shape[0] > 5 else x + 1,
    "even": lambda x: x * 2 if x.shape[0] % 2 else x,
    "square": lambda x: x * 2 if x.shape[0] == x.shape[1] else x,
    "same shape": lambda x: x * 2 if x.shape == (4, 4) else x,
    "truth": lambda x: x * 2 if x.shape[0] - 3 else x,
    "float": lambda x: x / (x.shape[0] ** 0.5),
    "quotient": lambda x: x * (x.shape[0] / 2),
    "format": lambda x: x * int(x.shape[0]),
    "text": lambda x: x * float(f"{x.shape[0]}.5") + len(str(x.shape[0] * 3)),
    "bit length": lambda x: x * x.shape[0].bit_length(),
    "bytes": lambda x: x * x.nbytes,
    "list": lambda x: x + torch.tensor([[1.0]] * x.shape[0]),
    "key": lambda x: x * {3: 1, 4: 2}.get(x.shape[0], 5),
    "bits": lambda x: x * (x.shape[0] << 1),
    "length": lambda x: x * len(x),
    "loop": looped,
    "chunks": in_chunks,
    "rows": over_rows,
    "logarithm": lambda x: x * math.log(x.shape[0]),
    "table": lambda x: x * list(range(20, 40))[x.shape[0]],
    "part of a list": lambda x: x * torch.tensor(list(range(20, 40))[: x.shape[0]])[:, None],
    "percent": lambda x: x * float("%d" % x.shape[0]),  # noqa: UP031
    "index": lambda x: x * operator.index(x.shape[0]),
    "one turn": lambda x: looped(x[:1].expand(x.shape[0], 4)),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("shape", [(3, 4), (6, 4)])
def test_what_code_makes_of_sizes_is_checked(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    model = Runs(READS[name])
    loaded = reloaded(PatchableGraph(model, x(*shape)), tmp_path)
    assert torch.equal(loaded(x(*shape)), model(x(*shape)))
    for rows in range(1, 9):
        with suppress(GraphError):
            assert torch.equal(loaded(x(rows, 4)), model(x(rows, 4))), rows


def test_sizes_that_leave_their_module_are_fixed(tmp_path: Path) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Runs(lambda x: x * self.rows)

        def forward(self, x: Tensor) -> Tensor:
            self.rows = x.shape[0]
            return self.inner(x)

    loaded = reloaded(PatchableGraph(Keeping(), x()), tmp_path)
    assert torch.equal(loaded(x()), x() * 3)
    with pytest.raises(GraphError, match="'x'"):
        loaded(x(4, 4))


def test_the_same_tensor_twice(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * 2 + b

    one = x()
    apart = reloaded(PatchableGraph(Sum(), x(), x()), tmp_path)
    assert difference(apart(one, one), one * 2 + one, "output") is None
    twice = reloaded(PatchableGraph(Sum(), one, one), tmp_path)
    assert difference(twice(one, one), one * 2 + one, "output") is None
    with pytest.raises(GraphError, match="'b'"):
        twice(x(), x())
    with pytest.raises(ValueError, match="'a'"), twice.patch({"a": ZeroPatch()}):
        twice(one, one)
