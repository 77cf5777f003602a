"""Law 11: a sweep *is* the loop `with pg.patch(make_patches(cell)): metric(pg(...))`, whatever the patches do.

Random sweeps are put together of patches that are alike each time and of patches that are not, and `make_patches`
reuses what it can. Each is made twice, for the loop and for the sweep; what they leave behind is compared, too.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    FromPatch,
    PatchableGraph,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    SkipPatch,
    StopPatch,
    ZeroPatch,
)
from graphpatch_notebook.checks.model_state import SharedRandomState
from graphpatch_notebook.errors import ExperimentError, ExperimentWarning
from tests.experiments.engine.loops import TOLERANCE, differing, numbers
from tests.laws.captures import capture_of
from tests.laws.channels import channels
from tests.zoo import Call, case_by_name, seed_all
from tests.zoo.case import floats, seeded

pytestmark = pytest.mark.filterwarnings("ignore::graphpatch_notebook.GraphPatchWarning")

CELLS = 8


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(self.drop(torch.tanh(self.a(x))))))


def chain(*, training: bool = False) -> tuple[PatchableGraph, list[str], Call]:
    x = floats(1, 3, 4)
    model = seeded(Chain)
    return PatchableGraph(model.train(training), x), ["a.output", "b.output", "c.output"], Call.of(x)


def language_model() -> tuple[PatchableGraph, list[str], Call]:
    capture = capture_of(case_by_name("gpt2-eager"))
    paths = [path for path in capture.pg.nodes if path.endswith(("mlp.output", "attn.c_proj.output"))]
    return capture.pg, paths, capture.case.example()


MODELS: dict[str, Callable[[], tuple[PatchableGraph, list[str], Call]]] = {
    "chain": chain,
    "chain that draws": lambda: chain(training=True),
    "language model": language_model,
}


class Cells:
    """A random sweep, and all that its patches, `make_patches` and metric share.

    Args:
        seed: What it is made from.
        paths: The paths that may be patched, in order.
        shapes: The shapes of the values there.
        kinds: The names of the methods that make patches.
    """

    def __init__(self, seed: int, paths: list[str], shapes: list[torch.Size], kinds: list[str]) -> None:
        self.rng = random.Random(seed)
        self.is_aimed = seed % 5 == 0
        self.paths, self.shapes, self.kinds = paths, shapes, kinds
        self.generator = torch.Generator().manual_seed(seed)
        self.numpy = np.random.RandomState(seed)
        self.numbers = iter(np.linspace(-1, 1, 100).tolist())
        self.now: dict[str, Any] = {"kept": torch.zeros(1)}
        self.at = 0
        self.calls: list[Any] = []
        self.value = floats(*shapes[0][-1:])
        self.whole = {path: floats(*shape, seed=1) for path, shape in zip(paths, shapes, strict=True)}
        self.mask = torch.zeros(shapes[0][-1], dtype=torch.bool)
        self.units = [0]
        self.patch = AddPatch(value=0.0, slice=(..., 0))
        self.probe, self.record = ProbePatch(), RecordPatch()
        self.patches: dict[str, Any] = {}

    def make(self, number: int) -> dict[str, Any]:
        patches = self.patches  # one dict for all cells
        patches.clear()
        if self.is_aimed:
            self.at = number + 1
        for kind in self.rng.sample(self.kinds, min(len(self.kinds), self.rng.randint(1, 2))):
            for path, patch in getattr(self, kind)(number).items():
                patches[path] = [*patches.get(path, []), patch]
        return patches

    def metric(self, output: Any) -> Tensor:
        logits = output if isinstance(output, Tensor) else output.logits
        return logits[0, -1, :7].double() + self.at

    def state(self) -> Iterator[Any]:
        yield from (self.generator.get_state(), torch.from_numpy(self.numpy.get_state()[1].astype(np.int64)))
        yield torch.tensor([next(self.numbers), self.rng.random(), random.random()])
        yield from (torch.rand(1), torch.tensor(self.calls, dtype=torch.float64), self.value, self.mask)
        yield from (self.now["kept"], torch.zeros(0) if self.probe.activation is None else self.probe.activation)
        yield from self.record.activations

    @property
    def path(self) -> str:
        return self.rng.choice(self.paths)

    @property
    def unit(self) -> tuple[Any, ...]:
        return (..., self.rng.randrange(self.shapes[0][-1]))

    # -- alike each time -----------------------------------------------------------------------------------------------

    def plain(self, number: int) -> dict[str, Any]:
        return {self.path: self.rng.choice([ZeroPatch(slice=self.unit), AddPatch(value=float(number))])}

    def whole_value(self, number: int) -> dict[str, Any]:
        path = self.path
        return {path: ReplacePatch(value=self.whole[path] * (1 + number // 4))}

    def position(self, number: int) -> dict[str, Any]:
        path, at = self.path, number % 3
        return {path: ReplacePatch(value=self.whole[path][:, at], slice=(slice(None), at))}

    def nothing(self, number: int) -> dict[str, Any]:
        return {}

    def skipped(self, number: int) -> dict[str, Any]:
        return {self.path.removesuffix(".output"): SkipPatch()}

    def read(self, number: int) -> dict[str, Any]:
        return {self.rng.choice(self.paths[1:]): FromPatch(self.paths[0])}

    def stopped(self, number: int) -> dict[str, Any]:
        return {self.path: StopPatch()}

    # -- alike, but made of what is reused -----------------------------------------------------------------------------

    def reused_value(self, number: int) -> dict[str, Any]:
        self.value.fill_(number)
        return {self.path: AddPatch(value=self.value)}

    def reused_data(self, number: int) -> dict[str, Any]:
        self.value.data.fill_(-number)
        return {self.path: ReplacePatch(value=self.value)}

    def reused_numpy(self, number: int) -> dict[str, Any]:
        self.value.numpy()[number % 4] += 1
        return {self.path: ReplacePatch(value=self.value, slice=(0, 0))}

    def reused_whole(self, number: int) -> dict[str, Any]:
        path = self.path
        self.whole[path].numpy()[..., number % 4] = number
        return {path: ReplacePatch(value=self.whole[path])}

    def reused_mask(self, number: int) -> dict[str, Any]:
        self.mask.numpy()[:] = False
        self.mask[number % 4] = True
        return {self.path: ReplacePatch(value=2.0, slice=(..., self.mask))}

    def reused_list(self, number: int) -> dict[str, Any]:
        self.units[:] = [number % 4, 3]
        return {self.path: ZeroPatch(slice=(..., self.units))}

    def reused_patch(self, number: int) -> dict[str, Any]:
        self.patch.slice, self.patch.value = (..., number % 4), 1.5 * number
        return {self.path: self.patch}

    def drawn_value(self, number: int) -> dict[str, Any]:
        return {self.path: AddPatch(value=torch.randn(self.shapes[0][-1]))}

    def generated_value(self, number: int) -> dict[str, Any]:
        return {self.path: AddPatch(value=torch.randn(self.shapes[0][-1], generator=self.generator))}

    def next_value(self, number: int) -> dict[str, Any]:
        return {self.path: AddPatch(value=next(self.numbers))}

    # -- another thing each time ---------------------------------------------------------------------------------------

    def handed_on(self, number: int) -> dict[str, Any]:
        def save(value: Tensor) -> Tensor:
            self.now["kept"] = value.detach().clone()
            return value

        def use(value: Tensor) -> Tensor:
            return value + self.now["kept"].mean()

        return {self.paths[0]: CustomPatch(custom_op=save), self.paths[-1]: CustomPatch(custom_op=use)}

    def late(self, number: int) -> dict[str, Any]:
        self.now["late"] = number
        return {self.path: CustomPatch(custom_op=lambda value: value + self.now["late"])}

    def counted(self, number: int) -> dict[str, Any]:
        def count(value: Tensor) -> Tensor:
            self.calls.append(number)
            return value + len(self.calls)

        return {self.path: CustomPatch(custom_op=count)}

    def noisy(self, number: int) -> dict[str, Any]:
        def noise(value: Tensor) -> Tensor:
            return value + torch.randn(value.shape, generator=self.generator)

        return {self.path: CustomPatch(custom_op=noise)}

    def noisy_by_numpy(self, number: int) -> dict[str, Any]:
        return {self.path: CustomPatch(custom_op=lambda value: value + self.numpy.rand())}

    def noisy_by_all(self, number: int) -> dict[str, Any]:
        return {self.path: CustomPatch(custom_op=lambda value: value + torch.rand(1) + random.random())}

    def iterated(self, number: int) -> dict[str, Any]:
        return {self.path: CustomPatch(custom_op=lambda value: value * next(self.numbers))}

    def subclassed(self, number: int) -> dict[str, Any]:
        return {self.path: Adding(value=1.0, calls=self.calls)}

    def overridden(self, number: int) -> dict[str, Any]:
        patch = ZeroPatch()
        patch.op = lambda value: value * 0.5 + len(self.calls)  # type: ignore[method-assign]
        return {self.path: patch}

    def seen(self, number: int) -> dict[str, Any]:
        before = self.probe.activation
        return {
            self.paths[0]: AddPatch(value=0.0 if before is None else before.mean().item()),
            self.paths[-1]: self.probe,
        }

    def recorded(self, number: int) -> dict[str, Any]:
        return {self.paths[-1]: self.record, self.paths[0]: AddPatch(value=float(len(self.record.activations)))}


class Adding(AddPatch):
    """A kind of somebody else's, which counts."""

    def __init__(self, value: float, calls: list[Any]) -> None:
        super().__init__(value=value)
        self.calls = calls

    def op(self, value: Any) -> Any:
        self.calls.append(-1)
        return super().op(value) * len(self.calls)


PURE = ["plain", "whole_value", "position", "nothing", "skipped", "read", "stopped"]
REUSED = ["reused_value", "reused_data", "reused_numpy", "reused_whole", "reused_mask", "reused_list", "reused_patch"]
REUSED += ["drawn_value", "generated_value", "next_value"]
IMPURE = ["handed_on", "late", "counted", "noisy", "noisy_by_numpy", "noisy_by_all", "iterated", "subclassed"]
IMPURE += ["overridden", "seen", "recorded"]


def kinds_of(seed: int) -> list[str]:
    rng = random.Random(seed)
    some = rng.sample(REUSED, rng.randint(1, 3)) + rng.sample(PURE, rng.randint(0, 2))
    return some if seed % 2 else some + rng.sample(IMPURE, rng.randint(1, 3))


@pytest.mark.parametrize("batch", ["auto", 3, None])
@pytest.mark.parametrize("model", MODELS)
def test_random_sweeps_equal_loops(model: str, batch: Any) -> None:
    pg, paths, call = MODELS[model]()
    shapes = [pg.nodes[path].shape for path in paths]
    for seed in range(24):
        kinds = kinds_of(seed)
        if seed % 3 == 0:  # what an earlier sweep has shown is no news of this one
            swept(pg, Cells(seed, paths, shapes, ["plain"]), call, batch)
        looped, other = Cells(seed, paths, shapes, kinds), Cells(seed, paths, shapes, kinds)
        seed_all(seed)
        expected = []
        with torch.no_grad():
            for number in range(CELLS):
                with pg.patch(looped.make(number)):
                    expected.append(numbers(looped.metric(call.run(pg))))
        left = list(looped.state())
        seed_all(seed)
        found = swept(pg, other, call, batch)
        for number, value in enumerate(expected):
            problem = differing(value, found.values[number], 0.0 if batch is None else TOLERANCE)
            assert problem is None, f"{seed=}, {kinds}, cell {number}: {problem}; {found.attrs}"
        for one, two in zip(left, other.state(), strict=True):
            assert torch.equal(one, two), f"{seed=}, {kinds}: {one} is not {two}; {found.attrs}"


class Remembers(Chain):
    """Changes itself while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.runs, self.generator = 0, torch.Generator().manual_seed(2)

    def forward(self, x: Tensor) -> Tensor:
        self.total += 1
        self.runs += 1
        return super().forward(x) + torch.rand(4, generator=self.generator)


class Last:
    """A metric that keeps its last result, in its own attribute and in all that it is told to keep it in."""

    shared = 0.0

    def __init__(self, *kept: Any) -> None:
        self.kept = kept
        self.value = 0.0

    def __call__(self, output: Tensor) -> Tensor:
        self.value = Last.shared = output.mean().item()
        for each in self.kept:
            each[...] = self.value
        return output.sum().double()


def drawn(output: Tensor) -> Tensor:
    return output.sum() + torch.rand(()) + random.random()


def readers(pg: PatchableGraph) -> dict[str, tuple[Callable[[int], Any], Callable[[Tensor], Tensor]]]:
    """Returns makers of values that read what runs change, and the metrics next to them."""
    model, last = pg._module, Last()
    Last.shared = 0.0
    value, array = torch.zeros(4), np.zeros(4, dtype=np.float32)
    kept: dict[Any, Any] = {...: 0.0}
    return {
        "a buffer": (lambda _: model.total.clone(), torch.sum),
        "a buffer, as it is when the patch is applied": (lambda _: model.total, torch.sum),
        "an attribute of the captured model": (lambda _: float(pg.runs), torch.sum),
        "the model's generator": (lambda _: torch.rand(4, generator=model.generator), torch.sum),
        "an attribute of the metric": (lambda _: last.value, last),
        "an attribute of a class": (lambda _: Last.shared, Last()),
        "a dict": (lambda number: kept[...] + number, Last(kept)),
        "a tensor": (lambda _: value.clone(), Last(value)),
        "an array whose memory a tensor has": (lambda _: torch.from_numpy(array.copy()), Last(torch.from_numpy(array))),
        "random numbers": (lambda _: torch.rand(4) * random.random(), drawn),
    }


@pytest.mark.parametrize("batch", ["auto", None])
@pytest.mark.parametrize("name", readers(PatchableGraph(seeded(Remembers), floats(1, 3, 4))))
def test_patch_maps_that_read_what_runs_change_equal_loops(name: str, batch: Any, tmp_path: Path) -> None:
    x, found = floats(1, 3, 4), []
    for is_swept in (False, True):
        pg = PatchableGraph(seeded(Remembers), x)
        read, metric = readers(pg)[name]

        def make(number: int, read: Callable[[int], Any] = read) -> dict[str, Any]:
            return {"a.output": AddPatch(value=read(number))}

        seed_all(0)
        if is_swept:
            result = pg.sweep({"number": range(5)}, make, x, metric=metric, batch=batch, progress=False)
            assert "may depend on what runs change" in result.attrs["remarks"][0]
            found.append(result.values.tolist())
            with pytest.raises(ExperimentError, match="with checkpoint= or executor= all patch maps are made before"):
                pg.sweep({"number": range(5)}, make, x, metric=metric, checkpoint=tmp_path / "cells", checkpoint_key="")
        else:
            with torch.no_grad():
                found.append([])
                for number in range(5):
                    with pg.patch(make(number)):
                        found[-1].append(metric(pg(x)).item())
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert len(set(found[0])) == 5


def handing_on(name: str, direction: str) -> Iterator[Any]:
    """Yields a maker of patch maps and a metric, where one hands numbers on to the other, or to its next call."""
    write, read = channels()[name]

    def make(number: int) -> dict[str, Any]:
        if direction == "to the metric":
            write(0.3 + number)
        value = math.tanh(read()) if direction == "from the metric" else 0.1
        return {["a.output", "b.output"][number % 2]: AddPatch(value=value + number)}

    def metric(output: Tensor) -> Tensor:
        value = output.mean() if direction == "from the metric" else output.mean() + math.tanh(read())
        if direction != "to the metric":
            write(round(output.sum().item(), 4))
        return value.double()

    yield from (make, metric)


@pytest.mark.parametrize("direction", ["from the metric", "to the metric", "from the metric to itself"])
def test_what_is_handed_on_is_handed_on_in_a_sweep(direction: str) -> None:
    """Next to the loop, with the metric of the run without patches after the first patch map is made."""
    pg, _, call = chain()
    wrong = {}
    for name in channels():
        for batch in ("auto", None):
            seed_all(0)
            np.random.seed(0)
            make, metric = handing_on(name, direction)
            with torch.no_grad():
                maps, shared = [make(0)], SharedRandomState()
                metric(call.run(pg))
                shared.restore()
                expected = []
                for number in range(6):
                    maps += [make(number)] if number else []
                    with pg.patch(maps[number]):
                        expected.append(metric(call.run(pg)).item())
            seed_all(0)
            np.random.seed(0)
            make, metric = handing_on(name, direction)
            found = pg.sweep({"cell": range(6)}, make, *call.args, metric=metric, batch=batch, progress=False)
            if found.values.tolist() != pytest.approx(expected, abs=TOLERANCE):
                wrong[name, batch] = found.values.tolist(), expected, found.attrs["remarks"]
    assert not wrong


@pytest.mark.parametrize("kind", ["late", "reused"])
@pytest.mark.parametrize("how", ["checkpoint", "executor"])
def test_patches_that_change_before_they_run_are_refused(kind: str, how: str, tmp_path: Path) -> None:
    now, reused = {"number": 0}, Adding(value=0.0, calls=[])

    def make(number: int) -> dict[str, Any]:
        now["number"] = reused.value = number
        return {"a.output": reused if kind == "reused" else CustomPatch(custom_op=lambda value: value + now["number"])}

    pg, _, call = chain()
    options: dict[str, Any] = {"checkpoint": tmp_path / "cells", "checkpoint_key": "1"}
    if how == "executor":
        options = {"executor": ThreadPoolExecutor(2)}
    with pytest.raises(ExperimentError, match=r"changes what the patches of an earlier cell \(cell=0\) refer to"):
        pg.sweep({"cell": range(3)}, make, *call.args, metric=torch.sum, **options)


class Normed(Chain):
    """Writes into its buffers while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def ordered(kind: str) -> Iterator[Any]:
    """Yields what a sweep whose cells depend on their order is made of: a graph, a maker of patch maps, a metric."""
    model = {"the model draws": lambda: seeded(Chain, training=True), "a buffer": lambda: seeded(Normed, training=True)}
    yield PatchableGraph(model.get(kind, lambda: seeded(Chain))(), floats(1, 3, 4))
    calls: list[float] = []

    def count(value: Tensor) -> Tensor:
        calls.append(1.0)
        return value + len(calls)

    ops: dict[str, list[Callable[[Tensor], Any]]] = {
        "torch": [lambda value: value + torch.randn(4)],
        "Python": [lambda value: value + random.random()],
        "numpy": [lambda value: value + np.random.rand()],
        "counts": [count],
        "reads, then counts": [lambda value: value + len(calls), count],
    }

    def make(number: int) -> dict[str, Any]:
        if kind in ops and number != 2:
            return {"a.output": CustomPatch(custom_op=ops[kind][number % len(ops[kind])])}
        return {"a.output": AddPatch(value=2.5 * number)}

    yield make
    yield drawn if kind == "the metric draws" else torch.sum


@pytest.mark.filterwarnings("default::graphpatch_notebook.GraphPatchWarning")
@pytest.mark.parametrize("count", [3, 9])
@pytest.mark.parametrize(
    "kind",
    ["torch", "Python", "numpy", "counts", "reads, then counts", "the model draws", "a buffer", "the metric draws"],
)
def test_cells_that_depend_on_their_order_are_the_loop_with_an_executor(kind: str, count: int) -> None:
    x, found, left = floats(1, 3, 4), [], []
    for is_swept in (False, True):
        pg, make, metric = ordered(kind)
        seed_all(0)
        np.random.seed(0)
        if is_swept:
            with ThreadPoolExecutor(2) as executor, pytest.warns(ExperimentWarning) as caught:
                result = pg.sweep({"cell": range(count)}, make, x, metric=metric, executor=executor, progress=False)
            assert re.search("this process, one after the other", str(caught[0].message))
            found.append(result.values.tolist())
        else:
            with torch.no_grad():
                found.append([])
                for number in range(count):
                    with pg.patch(make(number)):
                        found[-1].append(metric(pg(x)).item())
        buffers = [buffer.tolist() for buffer in pg._module.buffers()]
        left.append([torch.rand(1).item(), random.random(), np.random.rand(), *buffers])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert left[0] == left[1]
    assert len(set(found[0])) > 1


@pytest.mark.filterwarnings("default::graphpatch_notebook.GraphPatchWarning")
@pytest.mark.parametrize("state", ["generator", "list", None])
def test_patches_that_get_a_state_later_warn_where_cells_run_in_any_order(state: str | None) -> None:
    pg, _, call = chain()
    calls = [0]

    def make(number: int) -> dict[str, Any]:
        def function(value: Tensor) -> Tensor:
            if number < 4 or state is None:
                return value * number
            if state == "generator":
                return value + torch.rand(1)
            calls[0] += 1
            return value + calls[0]

        return {"a.output": [CustomPatch(custom_op=function), ProbePatch()]}

    with ThreadPoolExecutor(2) as executor, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = pg.sweep({"cell": range(6)}, make, *call.args, metric=torch.sum, executor=executor, progress=False)
    assert found.shape == (6,)
    warned = [bool(re.search("may not be those of a loop", str(each.message))) for each in caught]
    assert warned == [True] * (state is not None)


OPTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "gradients": lambda _: {"backward": True},
    "checkpoint": lambda file: {"checkpoint": file, "checkpoint_key": "1"},
    "executor": lambda _: {"executor": ThreadPoolExecutor(2)},
}


def told(caught: list[warnings.WarningMessage]) -> bool:
    return any(re.search("those of a loop", str(each.message)) for each in caught)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("model", [*MODELS, "a buffer", "memory"])
def test_random_sweeps_with_options_equal_loops_or_say_so(model: str, option: str, tmp_path: Path) -> None:
    """Also where the model changes itself; a sweep that is refused runs no cell."""
    makers = {"a buffer": lambda: seeded(Normed, training=True), "memory": lambda: seeded(Remembers)}
    outcomes = set()
    for seed in range(30):
        rng, found, left = random.Random(seed), [], []
        kinds = rng.sample(PURE, rng.randint(1, 2)) + rng.sample(REUSED, 1) + rng.sample(IMPURE, rng.choice([0, 1, 1]))
        for is_swept in (False, True):
            pg, paths, call = MODELS.get(model, chain)()
            pg = PatchableGraph(makers[model](), *call.args) if model in makers else pg
            pg._module.zero_grad()
            cells = Cells(seed, paths, [pg.nodes[path].shape for path in paths], kinds)
            make = cells.make if seed % 2 else lambda number, cells=cells: {**cells.make(number)}
            metric = cells.metric if option != "gradients" else lambda output, cells=cells: cells.metric(output).sum()
            seed_all(seed)
            if is_swept:
                options = OPTIONS[option](tmp_path / str(seed)) | {"batch": rng.choice(["auto", 3, None])} | call.kwargs
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    try:
                        result = pg.sweep({"n": range(8)}, make, *call.args, metric=metric, progress=False, **options)
                    except ExperimentError:
                        if option == "gradients":
                            raise
                        outcomes.add("refused")
                        break
                found.append([*result.values])
            else:
                with torch.set_grad_enabled(option == "gradients"):
                    found.append([])
                    for number in range(CELLS):
                        with pg.patch(make(number)):
                            value = metric(call.run(pg))
                            if option == "gradients" and value.requires_grad:
                                value.backward()
                            found[-1].append(numbers(value))
            gradients = [torch.zeros(1) if each.grad is None else each.grad for each in pg._module.parameters()]
            left.append([*cells.state(), *gradients, *(buffer.clone() for buffer in pg._module.buffers())])
        else:
            problems = [differing(one, two, TOLERANCE) for one, two in zip(*found, strict=True)]
            problems += [
                None if one.shape == two.shape and torch.allclose(one, two, 1e-4, 1e-5) else f"{one} is not {two}"
                for one, two in zip(*left, strict=True)
            ]
            assert told(caught) or not any(problems), f"{seed=}, {kinds}: {[*filter(None, problems)]}; {result.attrs}"
            outcomes.add("told" if told(caught) else "equal")
    # A file needs all patch maps first, and `make_patches` may read what these models change.
    assert "equal" in outcomes or (option == "checkpoint" and model not in {"chain", "language model"})


def swept(pg: PatchableGraph, cells: Cells, call: Call, batch: Any) -> Any:
    return pg.sweep(
        {"cell": range(CELLS)}, cells.make, *call.args, metric=cells.metric, batch=batch, progress=False, **call.kwargs
    )
