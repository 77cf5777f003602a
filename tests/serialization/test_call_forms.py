"""A loaded graph is a record of one run: calls of another form are refused, never answered with other numbers."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, SerializationError, StoredFormError, UnstoredFrameWarning, ZeroPatch
from graphpatch_notebook.checks.dimensions import dimensions_of
from graphpatch_notebook.checks.equality import difference
from tests.serialization.files import Mlp, reloaded, x
from tests.zoo import case_by_name


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> PatchableGraph:
    return reloaded(PatchableGraph(Mlp().eval(), x()), tmp_path_factory.mktemp("form"))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((x(), 1.0), {}, "'shift' is 1.0, and was 0.0 in the example; make the PatchableGraph with such"),
        ((x(),), {"shift": 0}, "'shift' is 0, and was 0.0"),
        ((x(),), {"mask": torch.ones(3)}, r"'mask' is Tensor\(3\) of float32, and was None"),
        ((x(2, 3, 4),), {}, r"'x' is Tensor\(2, 3, 4\) of float32, and was Tensor\(3, 4\)"),
        ((x().double(),), {}, "the dtype of the input 'x' is torch.float64, and was torch.float32"),
        ((x(3, 5),), {}, "dimension 1 of 'x' is 5, and the graph holds for 4 only"),
        ((x(1000, 4),), {}, "dimension 0 of 'x' is 1000, and the graph was checked for 1 to 307"),
        ((x(0, 4),), {}, "dimension 0 of 'x' is 0"),
        ((None,), {}, "'x' is None, and was Tensor"),
        (([x()],), {}, r"'x' is list\(1\), and was Tensor"),
        ((x(), 0.0, None, 1), {}, "the call does not fit forward"),
        ((), {"y": 1}, "the call does not fit forward"),
        ((x().to("meta"),), {}, "the device of the input 'x' is meta, and was cpu"),
    ],
)
def test_calls_of_another_form(loaded: PatchableGraph, args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(StoredFormError, match=message):
        loaded(*args, **kwargs)
    with pytest.raises(StoredFormError, match=message), loaded.patch({"hidden": ZeroPatch()}):
        loaded(*args, **kwargs)


def test_calls_of_the_same_form(loaded: PatchableGraph) -> None:
    model = Mlp()
    model.load_state_dict(loaded.state_dict())
    for shape in ((1, 4), (3, 4), (6, 4)):
        assert torch.equal(loaded(x(*shape)), model(x(*shape)))
        assert torch.equal(loaded(x=x(*shape), shift=0.0), model(x(*shape)))
        assert torch.equal(loaded._graph_module(x(*shape)), model(x(*shape)))
    with torch.no_grad():
        assert torch.equal(loaded(x()), model(x()))


def test_graph_modules_are_guarded_too(loaded: PatchableGraph) -> None:
    with pytest.raises(StoredFormError, match="'mask' is Tensor"):
        loaded._graph_module(x(), mask=torch.ones(3))


def test_other_modes(tmp_path: Path) -> None:
    loaded = reloaded(PatchableGraph(Mlp().eval(), x()), tmp_path)
    loaded.train()
    with pytest.raises(StoredFormError, match=r"Mlp was in eval mode when the graph was captured; call pg.eval\(\)"):
        loaded(x())
    loaded.eval()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(StoredFormError, match="the default dtype is torch.float64, and was torch.float32"):
            loaded(x().float())
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu"), pytest.raises(StoredFormError, match="the autocast is .*bfloat16.*, and was None"):
        loaded(x())


class Baked(nn.Module):
    """Loops over a size, which the graph does not see."""

    def forward(self, x: Tensor) -> Tensor:
        for i in range(x.shape[0]):
            x = x + i
        return x


class Threshold(nn.Module):
    """Does something else for many rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[1] > 20 else x + 1


def test_sizes_that_are_baked_in(tmp_path: Path) -> None:
    loaded = reloaded(PatchableGraph(Baked(), x()), tmp_path)
    assert torch.equal(loaded(x(3, 9)), Baked()(x(3, 9)))
    with pytest.raises(
        StoredFormError,
        match=r"dimension 0 of 'x' is 2, and the graph holds for 3 only \(at \(4, 4\): the model does s",
    ):
        loaded(x(2, 4))


def test_sizes_end_before_the_model_does_something_else(tmp_path: Path) -> None:
    loaded = reloaded(PatchableGraph(Threshold(), x()), tmp_path)
    assert torch.equal(loaded(x(3, 9)), Threshold()(x(3, 9)))
    with pytest.raises(StoredFormError, match="dimension 1 of 'x' is 21, and the graph was checked for 1 to 11"):
        loaded(x(3, 21))


class Divided(nn.Module):
    """Does another thing at sizes between others at which it does the same."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        is_other = {"even": length % 2 == 0, "third": length % 3 == 0, "square": batch == length}[self.kind]
        return self.linear(x) * 2 if is_other else self.linear(x)


@pytest.mark.parametrize(("kind", "shape"), [("even", (2, 5)), ("even", (2, 4)), ("third", (2, 5)), ("square", (2, 4))])
def test_sizes_between_others(kind: str, shape: tuple[int, int], tmp_path: Path) -> None:
    model = Divided(kind)
    loaded = reloaded(PatchableGraph(model, x(*shape, 4)), tmp_path)
    assert torch.equal(loaded(x(*shape, 4)), model(x(*shape, 4)))
    for batch in range(1, 6):
        for length in range(1, 10):
            with suppress(StoredFormError):
                assert torch.equal(loaded(x(batch, length, 4)), model(x(batch, length, 4))), (batch, length)


class Printing(nn.Module):
    """Prints the sizes at which it runs without values."""

    def forward(self, x: Tensor) -> Tensor:
        if x.untyped_storage().device.type == "meta":
            print(tuple(x.shape))
        return x * 2


@pytest.mark.filterwarnings("ignore")
def test_no_size_is_tried_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pg = PatchableGraph(Printing(), x())
    dimensions_of(pg.nodes.root)
    capsys.readouterr()
    pg.save(tmp_path / "graph")
    tried = capsys.readouterr().out.splitlines()
    assert {"(3, 4)", "(307, 4)", "(3, 1)", "(307, 307)", "(1, 1)"} <= set(tried)
    assert [shape for shape in set(tried) if tried.count(shape) > 1] == []


def test_sizes_at_which_the_model_cannot_run_on_meta(tmp_path: Path) -> None:
    case = case_by_name("awkward-packed-lstm")
    model, example = case.build(), case.example()
    other = case.variants(model)["other_size"]
    pg = PatchableGraph(model, *example.args, **example.kwargs)
    with pytest.raises(StoredFormError, match="dimension 0 of 'x' is 2, and the graph was checked for 3 only"):
        other.run(reloaded(pg, tmp_path, allow=["tests.zoo"]))
    loaded = reloaded(pg, tmp_path, allow=["tests.zoo"], check=[(other.args, other.kwargs)])
    assert difference(other.run(loaded), other.run(model), "output") is None


def test_the_callers_own_checks(tmp_path: Path) -> None:
    pg = PatchableGraph(Mlp(), x())
    loaded = reloaded(pg, tmp_path, check=[((x(500, 4),), {})])
    assert torch.equal(loaded(x(400, 4)), pg(x(400, 4)))
    with pytest.raises(
        SerializationError, match=r"check\[0\]: the graph gives other results than the model \(output: "
    ):
        pg.save(tmp_path / "graph.safetensors", check=[((x(), 1.0), {})])
    with pytest.raises(SerializationError, match=r"check\[1\]: the model raises RuntimeError"):
        pg.save(tmp_path / "graph.safetensors", check=[((x(),), {}), ((x(3, 7),), {})])
    with pytest.raises(TypeError, match=re.escape("check=[((x,), {})]")):
        pg.save(tmp_path / "graph.safetensors", check=[x()])
    baked = PatchableGraph(Baked(), x())
    with pytest.raises(SerializationError, match=r"check\[0\]: the graph gives other results"):
        baked.save(tmp_path / "graph.safetensors", check=[((x(5, 4),), {})])


def test_inputs_that_cannot_be_made_up(tmp_path: Path) -> None:
    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch._assert(bool((x > 0).all()), "only positive numbers")
            return x.log()

    pg = PatchableGraph(Positive(), torch.rand(3) + 1)
    with pytest.raises(
        SerializationError, match=r"Positive raises AssertionError: only positive.* pg.save\(file, check"
    ):
        pg.save(tmp_path / "graph.safetensors")
    loaded = reloaded(pg, tmp_path, check=[((torch.rand(3) + 1,), {})])
    assert torch.equal(loaded(torch.full((3,), 2.0)), torch.full((3,), 2.0).log())
    with pytest.raises(StoredFormError, match="reads a value into Python here, which is False now and was True"):
        loaded(-torch.ones(3))


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
    loaded = reloaded(pg, tmp_path, check=[((two,), {})])
    for given in (two, other_two):
        assert torch.equal(loaded(given), pg(given))
    for given, count in ((one, 1), (three, 3)):
        with pytest.raises(StoredFormError, match=f"reads a value into Python here, which is {count} now and was 2"):
            loaded(given)
    with pytest.raises(StoredFormError, match="is 1 now and was 2"), loaded.patch({"x": ZeroPatch()}):
        loaded(two)


def test_the_same_tensor_twice(tmp_path: Path) -> None:
    class Same(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * 2 if a is b else a + b

    pg = PatchableGraph(Same(), x(), x())
    loaded = reloaded(pg, tmp_path)
    one = x()
    with pytest.raises(StoredFormError, match="'b' is the same tensor as 'a', unlike in the example"):
        loaded(one, one)
    twice = PatchableGraph(Same(), one, one)
    with pytest.warns(UnstoredFrameWarning, match="values differ"):
        twice.save(tmp_path / "twice.safetensors")
    loaded = reloaded(twice, tmp_path, check=[((one, one), {})])
    assert torch.equal(loaded(one, one), one * 2)
    with pytest.raises(StoredFormError, match="'b' is not the same tensor as 'a'"):
        loaded(x(), x())
    with pytest.raises(ValueError, match="'a' was the same tensor as another input"), loaded.patch({"a": ZeroPatch()}):
        loaded(one, one)


def test_inputs_that_are_not_contiguous(tmp_path: Path) -> None:
    class Strided(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.is_contiguous() else x * 3

    loaded = reloaded(PatchableGraph(Strided(), x(4, 4)), tmp_path)
    with pytest.raises(StoredFormError, match=r"layout in memory of the input 'x' is \(1, 4\), and was contiguous"):
        loaded(x(4, 4).T)
    assert torch.equal(loaded(x(4, 4)), x(4, 4) * 2)


def test_gradients_on_and_off(tmp_path: Path) -> None:
    class Switch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if torch.is_grad_enabled() else x * 3

    with torch.no_grad():
        pg = PatchableGraph(Switch(), x())
    loaded = reloaded(pg, tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(x()), x() * 3)
    with pytest.raises(StoredFormError, match="not found equal to the model with gradients on"):
        loaded(x())
