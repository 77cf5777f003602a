"""What patches share, keep and draw is in a sweep what it is in a loop of plain hooks."""

from __future__ import annotations

import itertools
import random
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    ExperimentError,
    ExperimentWarning,
    PatchableGraph,
    UnknownPathError,
    ZeroPatch,
)
from graphpatch_notebook.experiments.engine.inputs import Inputs
from graphpatch_notebook.experiments.methods.reference_runs import record
from tests.experiments.engine.awkward_prefixes import Layers
from tests.experiments.engine.loops import Counts
from tests.hooks import registered
from tests.zoo.case import floats, seeded

X = floats(2, 4)
Edit = Callable[[Tensor], Tensor]


@pytest.fixture
def model() -> nn.Module:
    return seeded(Layers)


def looped(
    model: nn.Module, edits: Callable[[int], dict[str, Edit]], count: int = 5, rows: int | slice = 0
) -> np.ndarray:
    """The loop: hooks that edit what modules return, one cell after the other."""
    found = []
    for number in range(count):
        handles = [
            getattr(model, name).register_forward_hook(lambda _module, _args, output, edit=edit: edit(output.clone()))
            for name, edit in edits(number).items()
        ]
        with registered(handles), torch.no_grad():
            found.append(model(X)[rows].double().numpy().copy())
    return np.stack(found)


def first_row(output: Tensor) -> Tensor:
    return output[0]


def swept(
    model: nn.Module | PatchableGraph,
    make_patches: Callable[[int], dict[str, Any]],
    batch: Any = "auto",
    count: int = 5,
) -> Any:
    pg = model if isinstance(model, PatchableGraph) else PatchableGraph(model, X)
    return pg.sweep({"cell": range(count)}, make_patches, X, metric=first_row, batch=batch, progress=False)


def test_pure_cells_before_the_first_other_one_share_forwards(model: nn.Module) -> None:
    counts, forward = Counts(), model.c.forward
    model.c.forward = lambda value: counts("c") or forward(value)

    def make(number: int) -> dict[str, Any]:
        return {"b.output": ZeroPatch(slice=(..., number % 4)) if number < 20 else CustomPatch(custom_op=torch.neg)}

    found = swept(model, make, count=24)
    assert counts.by_key["c"] < 12
    assert found.remarks[0].startswith("4 of 24 cells ran one by one")


@dataclass(slots=True)
class Slotted:
    count: int = 0


class Named:
    """Counts in an attribute of its class, by a property."""

    count = 0

    @property
    def next(self) -> int:
        type(self).count += 1
        return self.count

    def __call__(self, output: Tensor) -> float:
        return output[0, 0].item() + self.next


def memories() -> dict[str, Callable[[Tensor], Any]]:
    """Metrics that have another value each time, by where they keep the count."""
    count, numbers, draws, state = itertools.count(1), deque([0.0] * 2000), random.Random(1), np.random.default_rng(1)
    slotted, place, norm, inner = Slotted(), types.ModuleType("place"), nn.BatchNorm1d(4), types.SimpleNamespace()
    place.count, Named.count, inner.inner = 0, 0, types.SimpleNamespace(inner=types.SimpleNamespace(count=0))

    def increased(owner: Any) -> int:
        owner.count += 1
        return owner.count

    def of_itself(output: Tensor) -> Tensor:
        return output[0, 0] + increased(of_itself)

    def deep(output: Tensor) -> Tensor:
        return output[0, 0] + increased(inner.inner.inner)

    def of_module(output: Tensor) -> Tensor:
        place.count += 1
        return output[0, 0] + place.count

    of_itself.count = 0  # type: ignore[attr-defined]
    return {
        "iterator": lambda output: output[0, 0] + next(count),
        "queue": lambda output: numbers.append(1.0) or output[0, 0] + len(numbers) - 2000,
        "generator of Python": lambda output: output[0, 0] + draws.random(),
        "generator of numpy": lambda output: output[0, 0] + float(state.random()),
        "slots": lambda output: output[0, 0] + increased(slotted),
        "buffer": lambda output: norm(output)[0, 0].item() * 0 + norm.running_mean[0],
        "module of Python": of_module,
        "class": Named(),
        "function": of_itself,
        "deep": deep,
    }


@pytest.mark.parametrize("where", memories())
def test_metrics_that_count_are_called_for_each_cell_in_order(model: nn.Module, where: str) -> None:
    def edits(number: int) -> dict[str, Edit]:
        return {"cab"[number % 3]: lambda value: value + number}

    def make(number: int) -> dict[str, Any]:
        return {f"{'cab'[number % 3]}.output": AddPatch(value=float(number))}

    metric = memories()[where]
    with torch.no_grad():
        expected = [float(metric(model(X)))]
    expected += [
        float(metric(torch.from_numpy(output).float())) for output in looped(model, edits, 9, rows=slice(None))
    ]
    metric = memories()[where]
    found = PatchableGraph(model, X).sweep({"cell": range(9)}, make, X, metric=metric, progress=False)
    assert [found.baseline, *found.values] == pytest.approx(expected, rel=1e-5, abs=1e-6)


DRAWS = torch.Generator()


class Noisy(nn.Module):
    """Draws from a generator that it does not hold."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(4, generator=DRAWS)


def noise() -> Tensor:
    return torch.rand(4, generator=DRAWS)


class NoisyByFunction(nn.Module):
    """Calls a function that draws from such a generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x + noise()


@pytest.mark.parametrize("count", [3, 24])
@pytest.mark.parametrize("noisy", [Noisy, NoisyByFunction])
def test_submodules_that_draw_from_a_generator_outside_of_the_model(noisy: type[nn.Module], count: int) -> None:
    model = nn.Sequential(noisy(), nn.Linear(4, 4)).eval()
    pg = PatchableGraph(model, X)
    expected = []
    DRAWS.manual_seed(0)
    for number in range(count):
        added = model[0].register_forward_hook(lambda _, __, output, number=number: output + number)
        with added, torch.no_grad():
            expected.append(model(X).sum().item())
    drawn = DRAWS.get_state()
    DRAWS.manual_seed(0)
    found = pg.sweep(
        {"cell": range(count)}, lambda cell: {"sub_0.output": AddPatch(value=float(cell))}, X,
        metric=lambda output: output.sum(), progress=False,
    )  # fmt: skip
    assert found.values.tolist() == pytest.approx(expected, rel=1e-5)
    assert torch.equal(DRAWS.get_state(), drawn)
    assert pg.verify(X).is_equal
    assert torch.equal(DRAWS.get_state(), drawn)


class Settings:
    unit = 0


@pytest.mark.parametrize("start", [0, 1])
def test_settings_that_make_patches_restores_are_noticed(model: nn.Module, start: int) -> None:
    def make(number: int) -> dict[str, Any]:
        Settings.unit = (start + number) % 4
        return {"b.output": AddPatch(value=float(number))}

    def metric(output: Tensor) -> Tensor:
        return output[0, Settings.unit]

    pg = PatchableGraph(model, X)
    Settings.unit = 0
    if start == 0:  # the first cell does not show it
        with pytest.raises(ExperimentError, match="make_patches changes what the metric refers to"):
            pg.sweep({"cell": range(5)}, make, X, metric=metric, progress=False)
        return
    found = pg.sweep({"cell": range(4)}, make, X, metric=metric, progress=False)
    expected = looped(model, lambda number: {"b": lambda value: value + number}, 4)
    assert (found.values == [expected[number, (start + number) % 4] for number in range(4)]).all()


def test_inputs_that_make_patches_changes_and_restores_are_refused(model: nn.Module) -> None:
    x = X.clone()

    def make(number: int) -> dict[str, Any]:
        x.data[0, 0] = X[0, 0] + number % 4
        return {"b.output": ZeroPatch()}

    pg = PatchableGraph(model, x)
    with pytest.raises(ExperimentError, match="make_patches changes what the model runs on"):
        pg.sweep({"cell": range(5)}, make, x, metric=torch.sum, progress=False)


def test_make_patches_that_changes_what_all_cells_run_on_is_refused(model: nn.Module) -> None:
    def make(number: int) -> dict[str, Any]:
        with torch.no_grad():
            model.a.bias.fill_(number)
        return {"b.output": ZeroPatch()}

    with pytest.raises(ExperimentError, match="make_patches changes the model, and is called for some cells before"):
        swept(model, make)


def test_values_with_gradients_that_are_written_into_are_refused(model: nn.Module) -> None:
    value = torch.zeros(4, requires_grad=True)

    def make(number: int) -> dict[str, Any]:
        value.data.fill_(number)
        return {"b.output": AddPatch(value=value)}

    pg = PatchableGraph(model, X)
    with pytest.raises(ExperimentError, match=r"has gradients.*value\.clone\(\)"):
        pg.sweep({"cell": range(5)}, make, X, metric=torch.sum, backward=True, progress=False)


def test_cells_with_the_same_problem_are_named_once(model: nn.Module) -> None:
    def make(layer: str, number: int) -> dict[str, Any]:
        return {f"{layer}.output": ZeroPatch(slice=(slice(None), number))}

    with pytest.raises(UnknownPathError) as raised:
        PatchableGraph(model, X).sweep({"layer": ["a", "z", "y"], "number": range(3)}, make, X, metric=torch.sum)
    lines = str(raised.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"layer={n!r}, number=0 and 2 more cells" for n in "zy"]


def test_all_unknown_paths_are_in_one_error_before_anything_runs(model: nn.Module) -> None:
    runs: list[int] = []
    pg = PatchableGraph(model, X)
    model.c.register_forward_hook(lambda *_: None).remove()
    forward = model.c.forward
    model.c.forward = lambda value: runs.append(1) or forward(value)
    with pytest.raises(UnknownPathError) as raised:
        pg.sweep(
            {"path": ["bb.output", "b.output", "cc.output"]}, lambda path: {path: ZeroPatch()}, X, metric=torch.sum
        )
    assert "bb" in str(raised.value)
    assert "cc" in str(raised.value)
    assert runs == []


def test_a_cell_that_is_made_late_and_cannot_be_made_is_one_that_failed(model: nn.Module) -> None:
    paths = iter(["b.output", "bb.output", "b.output"])
    with pytest.warns(ExperimentWarning, match="3 of 5 cells failed"):
        found = swept(model, lambda _: {next(paths): CustomPatch(custom_op=torch.neg)})
    assert np.isnan(found.values).any(1).tolist() == [False, True, False, True, True]
    assert [error["error"].split(":")[0] for error in found.errors] == [
        "UnknownPathError", "StopIteration", "StopIteration",
    ]  # fmt: skip


class Waiting(Layers):
    def forward(self, x: Tensor) -> Any:
        time.sleep(0.02)  # in which other threads draw
        return super().forward(x)


class Drawing(Waiting):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 + random.random() + random.choice([0, 1]))


@contextmanager
def another_thread_that_draws() -> Iterator[None]:
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            random.random()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("kind", [Waiting, Drawing])
def test_another_thread_that_draws_random_numbers_does_not_matter(kind: type[nn.Module]) -> None:
    model = seeded(kind)
    with another_thread_that_draws():
        found = swept(model, lambda number: {"b.output": AddPatch(value=float(number))})
        drawn = record(PatchableGraph(model, X), Inputs((X,)), ["b.output"]).drawn
    assert list(drawn) == (["Python"] if kind is Drawing else [])
    # `make_patches` may seem to draw, too, if the thread does in the same moment.
    remarks = [
        remark for remark in found.remarks if "draws random numbers (of Python)" in remark or "in turn" in remark
    ]
    assert bool(remarks) == (kind is Drawing)


class Branching(Layers):
    def forward(self, x: Tensor, deep: bool = True) -> Any:
        h = self.a(x)
        return self.c(self.b(h)) if deep else self.c(h)


@pytest.mark.filterwarnings("ignore::graphpatch_notebook.PatchNotFiredWarning")
def test_a_path_that_the_model_does_not_reach_is_named() -> None:
    pg = PatchableGraph(seeded(Branching), X)
    paths = ["a.output"] * 6 + ["b.output"] * 2
    found = pg.sweep(
        {"cell": range(8)}, lambda cell: {paths[cell]: AddPatch(value=1.0)}, X, deep=False, metric=torch.sum,
        progress=False,
    )  # fmt: skip
    (remark,) = found.remarks
    assert remark.endswith("one by one: 'b.output': the model does not reach it on these inputs (first cell=6)")


class Measured:
    """A metric that is an object, with a method of its own."""

    def __init__(self) -> None:
        self.units = [0, 1]

    def __call__(self, output: Tensor) -> Tensor:
        return self.chosen(output).sum()

    def chosen(self, output: Tensor) -> Tensor:
        return output[0, self.units]


@pytest.mark.parametrize("metric", [Measured(), Measured().chosen, torch.sum, nn.Flatten(0)])
def test_metrics_that_keep_nothing_do_not_keep_cells_from_sharing_forwards(model: nn.Module, metric: Any) -> None:
    pg = PatchableGraph(model, X)
    found = pg.sweep({"cell": range(8)}, lambda n: {"b.output": AddPatch(value=n)}, X, metric=metric, progress=False)
    assert found.remarks == []
