"""What patches share, keep and draw is in a sweep what it is in a loop of plain hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    PatchableGraph,
    UnknownPathError,
    ZeroPatch,
)
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


def test_pure_cells_share_forwards_and_the_others_run_just_after_they_are_made(model: nn.Module) -> None:
    counts, forward, made = Counts(), model.c.forward, []
    model.c.forward = lambda value: counts("c") or forward(value)

    def late(value: Tensor) -> Tensor:
        return value * made[-1]

    def make(number: int) -> dict[str, Any]:
        made.append(number)
        return {"b.output": CustomPatch(custom_op=late) if number % 6 == 5 else AddPatch(value=float(number % 4))}

    found = swept(model, make, count=24)
    assert counts.by_key["c"] < 14
    expected = looped(model, lambda n: {"b": lambda value: value * n if n % 6 == 5 else value + n % 4}, 24)
    assert found.values == pytest.approx(expected, rel=1e-5, abs=1e-6)


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


class Branching(Layers):
    def forward(self, x: Tensor, deep: bool = True) -> Any:
        h = self.a(x)
        return self.c(self.b(h)) if deep else self.c(h)


@pytest.mark.filterwarnings("ignore:.not fired:graphpatch_notebook.GraphPatchWarning")
def test_cells_of_a_path_that_the_model_does_not_reach_run_alone() -> None:
    pg = PatchableGraph(seeded(Branching), X)
    paths = ["a.output"] * 6 + ["b.output"] * 2
    found = pg.sweep(
        {"cell": range(8)}, lambda cell: {paths[cell]: AddPatch(value=1.0)}, X, deep=False, metric=torch.sum,
        progress=False,
    )  # fmt: skip
    assert found.remarks == ["2 of 8 cells ran one by one: they patch values without rows"]
