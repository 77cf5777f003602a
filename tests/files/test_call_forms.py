"""A loaded graph is a record of one run: calls of another form are refused, never answered with other numbers."""

from __future__ import annotations

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
        ((x(), 0.0, None, 1), {}, "forward"),
        ((), {"y": 1}, "forward"),
    ],
)
def test_calls_of_another_form(loaded: PatchableGraph, args: Any, kwargs: Any, name: str) -> None:
    with pytest.raises(GraphError, match=name):
        loaded(*args, **kwargs)
    with pytest.raises(GraphError, match=name):
        loaded._graph_module(*args, **kwargs)
    with pytest.raises(GraphError, match=name), loaded.patch({"hidden": ZeroPatch()}):
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


class WithoutGradients(Mlp):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        with torch.no_grad():
            frozen = super().forward(x).reshape(2, -1)
        return x * 2 + frozen.sum()


class WithGradients(WithoutGradients):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            return super().forward(x)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("cls", [WithoutGradients, WithGradients])
def test_grad_mode_that_the_model_switches(cls: type[Mlp], captured: bool, tmp_path: Path) -> None:
    model, given = cls().eval(), x().requires_grad_()
    with torch.set_grad_enabled(captured):
        loaded = reloaded(reloaded(PatchableGraph(model, x()), tmp_path), tmp_path)
    for now in (True, False):
        with torch.set_grad_enabled(now):
            if captured is now or (captured and cls is WithoutGradients):
                assert loaded(given).requires_grad is model(given).requires_grad
            else:
                with pytest.raises(GraphError, match="grad mode"):
                    loaded(given)
            with suppress(RuntimeError, GraphError):
                loaded(x(3, 4)[:, :3])
            assert torch.is_grad_enabled() is now


class Sized(nn.Module):
    """Does with its sizes what a function says."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


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
    "one turn": lambda x: looped(x[:1].expand(x.shape[0], 4)),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (6, 4)])
def test_what_code_makes_of_sizes_is_checked(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    model = Sized(READS[name])
    loaded = reloaded(PatchableGraph(model, x(*shape)), tmp_path)
    assert torch.equal(loaded(x(*shape)), model(x(*shape)))
    for rows in range(1, 9):
        with suppress(GraphError):
            assert torch.equal(loaded(x(rows, 4)), model(x(rows, 4))), rows


def test_sizes_that_leave_their_module_are_fixed(tmp_path: Path) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Sized(lambda x: x * self.rows)

        def forward(self, x: Tensor) -> Tensor:
            self.rows = x.shape[0]
            return self.inner(x)

    loaded = reloaded(PatchableGraph(Keeping(), x()), tmp_path)
    assert torch.equal(loaded(x()), x() * 3)
    with pytest.raises(GraphError, match="'x'"):
        loaded(x(4, 4))


def test_the_callers_own_checks(tmp_path: Path) -> None:
    pg = PatchableGraph(Mlp(), x())
    file = tmp_path / "graph.safetensors"
    pg.save(file, check=[((x(500, 4),), {}), ((x(),), {"shift": 0.0})])
    for call in (((x(), 1.0), {}), ((x(3, 4), 0.0, torch.ones(3)), {})):
        with pytest.raises(GraphError, match=r"check\[1\]"):
            pg.save(tmp_path / "other", check=[((x(),), {}), call])
    assert list(tmp_path.iterdir()) == [file]


class Experts(nn.Module):
    """Goes over the rows that some input is greatest in, as mixtures of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = nn.functional.one_hot(x.argmax(-1), x.shape[-1])
        result = torch.zeros_like(x)
        for expert in (chosen.sum(0) > 0).nonzero():
            result = result + x * chosen[:, expert[0]].unsqueeze(-1) * (expert + 1)
        return result


def test_a_loop_over_as_many_parts_as_values_say(tmp_path: Path) -> None:
    two, other_two, one, three = (torch.eye(4)[list(rows)] for rows in ((0, 1, 1), (3, 2, 2), (1, 1, 1), (0, 1, 2)))
    pg = PatchableGraph(Experts(), two)
    loaded = reloaded(pg, tmp_path)
    for given in (two, other_two):
        assert torch.equal(loaded(given), pg(given))
    for given in (one, three):
        with pytest.raises(GraphError, match="was 2"):
            loaded(given)
    with pytest.raises(GraphError, match="was 2"), loaded.patch({"x": ZeroPatch()}):
        loaded(two)


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
