"""Law 11: a sweep of pure functions gives the numbers of the loop `with pg.patch(make_patches(cell)): metric(pg(...))`.

Random sweeps are put together of kinds of patches that share forwards and of others, and `make_patches` reuses what it
can. Functions that are not pure are noticed by running cells again.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
    ReplacePatch,
    SkipPatch,
    StopPatch,
    ZeroPatch,
)
from graphpatch_notebook.errors import ExperimentError, GraphPatchWarning
from tests.experiments.engine.loops import TOLERANCE, Counts, differing, numbers
from tests.laws.captures import capture_of
from tests.zoo import Call, case_by_name, seed_all
from tests.zoo.case import floats, seeded
from tests.zoo.submodules import Submodules

pytestmark = pytest.mark.filterwarnings("ignore:.not fired:graphpatch_notebook.GraphPatchWarning")

CELLS = 8


class Chain(Submodules, a=(4, 4), b=(4, 4), c=(4, 4), drop=partial(nn.Dropout, 0.5)):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(self.drop(torch.tanh(self.a(x))))))


PATHS = ["a.output", "b.output", "c.output"]


def chain(*, training: bool = False) -> tuple[PatchableGraph, list[str], Call]:
    x = floats(1, 3, 4)
    return PatchableGraph(seeded(Chain).train(training), x), PATHS, Call.of(x)


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
    """A random sweep, and what its patches reuse.

    Args:
        seed: What it is made from.
        pg: The graph.
        paths: The paths that may be patched, in order.
        kinds: The names of the methods that make patches.
    """

    def __init__(self, seed: int, pg: PatchableGraph, paths: list[str], kinds: list[str]) -> None:
        self.seed, self.paths, self.kinds = seed, paths, kinds
        shapes = [pg.nodes[path].shape for path in paths]
        self.size = shapes[0][-1]
        self.value = floats(self.size)
        self.whole = {path: floats(*shape, seed=1) for path, shape in zip(paths, shapes, strict=True)}
        self.mask = torch.zeros(self.size, dtype=torch.bool)
        self.units = [0]
        self.patch = AddPatch(value=0.0, slice=(..., 0))
        self.now = 0
        self.patches: dict[str, Any] = {}

    def make(self, number: int) -> dict[str, Any]:
        self.rng = random.Random(100 * self.seed + number)
        self.now = number
        patches = self.patches  # one dict for all cells
        patches.clear()
        for kind in self.rng.sample(self.kinds, min(len(self.kinds), self.rng.randint(1, 2))):
            for path, patch in getattr(self, kind)(number).items():
                patches[path] = [*patches.get(path, []), patch]
        return patches

    @staticmethod
    def metric(output: Any) -> Tensor:
        logits = output if isinstance(output, Tensor) else output.logits
        return logits[0, -1, :7].double()

    @property
    def path(self) -> str:
        return self.rng.choice(self.paths)

    @property
    def unit(self) -> tuple[Any, ...]:
        return (..., self.rng.randrange(self.size))

    # -- kinds that share forwards -------------------------------------------------------------------------------------

    def plain(self, number: int) -> dict[str, Any]:
        return {self.path: self.rng.choice([ZeroPatch(slice=self.unit), AddPatch(value=float(number))])}

    def position(self, number: int) -> dict[str, Any]:
        path, at = self.path, number % 3
        return {path: ReplacePatch(value=self.whole[path][:, at], slice=(slice(None), at))}

    def by_row(self, number: int) -> dict[str, Any]:
        return {self.path: CustomPatch(custom_op=lambda value: value * number + value.mean(1, True), by_row=True)}

    def at_steps(self, number: int) -> dict[str, Any]:
        steps = self.rng.choice([0, 1, [0, 1], slice(0, 1), slice(1, None), None])
        return {self.path: ZeroPatch(slice=self.unit, steps=steps)}

    def nothing(self, number: int) -> dict[str, Any]:
        return {}

    # -- the same, made of what is reused ------------------------------------------------------------------------------

    def reused_value(self, number: int) -> dict[str, Any]:
        self.value.fill_(number)
        return {self.path: AddPatch(value=self.value)}

    def reused_numpy(self, number: int) -> dict[str, Any]:
        path = self.path
        array = self.whole[path].numpy()
        array[:] = 0.5
        array[..., number % 4] = number
        return {path: ReplacePatch(value=self.whole[path])}

    def reused_mask(self, number: int) -> dict[str, Any]:
        self.mask[:] = False
        self.mask[number % 4] = True
        return {self.path: ReplacePatch(value=2.0, slice=(..., self.mask))}

    def reused_list(self, number: int) -> dict[str, Any]:
        self.units[:] = [number % 4, 3]
        return {self.path: ZeroPatch(slice=(..., self.units))}

    def reused_patch(self, number: int) -> dict[str, Any]:
        self.patch.slice, self.patch.value = (..., number % 4), 1.5 * number
        return {self.path: self.patch}

    # -- kinds that run alone ------------------------------------------------------------------------------------------

    def late(self, number: int) -> dict[str, Any]:
        return {self.path: CustomPatch(custom_op=lambda value: value + self.now)}

    def across_rows(self, number: int) -> dict[str, Any]:
        return {self.path: CustomPatch(custom_op=lambda value: value - value.mean())}

    def overridden(self, number: int) -> dict[str, Any]:
        patch = ZeroPatch()
        patch.op = lambda value: value * 0.5 + number  # type: ignore[method-assign]
        return {self.path: patch}

    def subclassed(self, number: int) -> dict[str, Any]:
        return {self.path: Doubling(value=float(number))}

    def skipped(self, number: int) -> dict[str, Any]:
        return {self.path.removesuffix(".output"): SkipPatch()}

    def read(self, number: int) -> dict[str, Any]:
        return {self.rng.choice(self.paths[1:]): FromPatch(self.paths[0])}

    def stopped(self, number: int) -> dict[str, Any]:
        return {self.path: StopPatch()}


class Doubling(AddPatch):
    """A kind of somebody else's, which does not declare anything."""

    def op(self, value: Any) -> Any:
        return super().op(value) * 2


SHARING = ["plain", "position", "by_row", "at_steps", "nothing"]
REUSED = ["reused_value", "reused_numpy", "reused_mask", "reused_list", "reused_patch"]
ALONE = ["late", "across_rows", "overridden", "subclassed", "skipped", "read", "stopped"]


def kinds_of(seed: int) -> list[str]:
    rng = random.Random(seed)
    some = rng.sample(REUSED, rng.randint(0, 2)) + rng.sample(SHARING, rng.randint(1, 2))
    return some if seed % 3 else some + rng.sample(ALONE, rng.randint(1, 2))


def looped(pg: PatchableGraph, cells: Cells, metric: Any, call: Call) -> list[np.ndarray]:
    found = []
    for number in range(CELLS):
        with torch.no_grad(), pg.patch(cells.make(number)):
            found.append(numbers(metric(call.run(pg))))
    return found


def swept(pg: PatchableGraph, make: Any, call: Call, metric: Any, cells: int = CELLS, **options: Any) -> Any:
    options["progress"] = False
    return pg.sweep({"cell": range(cells)}, make, *call.args, metric=metric, **options, **call.kwargs)


@pytest.mark.parametrize("batch", ["auto", 3, None])
@pytest.mark.parametrize("model", MODELS)
def test_random_sweeps_equal_loops(model: str, batch: Any) -> None:
    pg, paths, call = MODELS[model]()
    for seed in range(9):
        one, other = (Cells(seed, pg, paths, kinds_of(seed)) for _ in range(2))
        seed_all(seed)
        expected = looped(pg, one, one.metric, call)
        seed_all(seed)
        found = swept(pg, other.make, call, other.metric, batch=batch)
        for number, value in enumerate(expected):
            problem = differing(value, found.values[number], 0.0 if batch is None else TOLERANCE)
            assert problem is None, f"{seed=}, {one.kinds}, cell {number}: {problem}; {found.attrs}"


OPTIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "checkpoint": lambda file: {"checkpoint": file, "checkpoint_key": "1"},
    "executor": lambda _: {"executor": ThreadPoolExecutor(2)},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("model", ["chain", "language model"])
def test_random_sweeps_with_options_equal_loops(model: str, option: str, tmp_path: Path) -> None:
    pg, paths, call = MODELS[model]()
    for seed in range(6):
        # Without `late`: all patch maps are made before a cell runs.
        kinds = [kind for kind in kinds_of(seed) if kind != "late"]
        one, other = (Cells(seed, pg, paths, kinds) for _ in range(2))
        expected = looped(pg, one, Cells.metric, call)
        found = swept(
            pg,
            lambda number, cells=other: {**cells.make(number)},
            call,
            Cells.metric,
            **OPTIONS[option](tmp_path / str(seed)),
        )
        problems = [differing(value, found.values[number], TOLERANCE) for number, value in enumerate(expected)]
        assert problems == [None] * CELLS, f"{seed=}, {kinds}: {found.attrs}"


def test_functions_that_declare_to_work_by_row_share_forwards() -> None:
    pg, _, call = chain()
    calls = []

    def make(number: int) -> dict[str, Any]:
        def halved(value: Tensor) -> Tensor:
            calls.append(value.shape)
            return value / (1 + number)

        return {"b.output": CustomPatch(custom_op=halved, by_row=True)}

    counts, forward = Counts(), pg._module.c.forward
    pg._module.c.forward = lambda value: counts("runs") or forward(value)
    found = swept(pg, make, call, torch.sum, 24)
    assert found.remarks == []
    assert counts.by_key["runs"] < 12
    assert {tuple(shape) for shape in calls} == {(1, 3, 4)}


def counting() -> Callable[[Tensor], Any]:
    calls: list[int] = []
    return lambda output: calls.append(1) or output.sum() + len(calls)


def least_so_far() -> Callable[[Tensor], Any]:
    """Whether it is pure does not show in the cell that changes the output most."""
    least = [math.inf]

    def metric(output: Tensor) -> float:
        least[0] = min(least[0], output.sum().item())
        return least[0]

    return metric


@pytest.mark.parametrize("make_metric", [counting, least_so_far])
def test_a_metric_that_is_not_pure_is_noticed_by_one_warning(make_metric: Any) -> None:
    pg, _, call = chain()

    def make(number: int) -> dict[str, Any]:
        return {"c.output": AddPatch(value=-float(number))}

    with pytest.warns(GraphPatchWarning, match="runs again as a loop") as warned:
        found = swept(pg, make, call, make_metric())
    assert len(warned) == 1
    assert "not a pure function" in found.remarks[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = swept(pg, make, call, make_metric(), batch=None)
    metric = make_metric()
    metric(call.run(pg))  # the run without patches
    with torch.no_grad():
        for number in range(CELLS):
            with pg.patch(make(number)):
                assert float(metric(call.run(pg))) == alone.values[number]


@pytest.mark.parametrize("count", [3, 9])
def test_an_executor_needs_a_model_that_does_not_change(count: int) -> None:
    pg, _, call = chain(training=True)
    with ThreadPoolExecutor(2) as executor, pytest.raises(ExperimentError, match="random"):
        swept(pg, lambda number: {"b.output": AddPatch(value=number)}, call, torch.sum, count, executor=executor)
