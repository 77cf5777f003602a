"""What is known of a model, and of the axes of a sweep, is asked for anew where something has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import PatchableGraph, ZeroPatch
from graphpatch_notebook.capture.held_values import plain_tensors
from graphpatch_notebook.checks.model_state import ModuleState
from graphpatch_notebook.experiments.engine.changed_positions import SameSteps, TorchCalls
from graphpatch_notebook.experiments.engine.clean_run import shown_earlier
from graphpatch_notebook.experiments.engine.rows import BatchRows, parted, perturbed, perturbed_cells, taken


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.notes: list[int] = []
        self.options: dict[str, Any] = {"scale": 1.0}
        self.register_buffer("mask", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.options["scale"]


def test_results_of_earlier_sweeps_are_dropped_after_a_change() -> None:
    model = Held()
    pg = PatchableGraph(model, torch.ones(1, 2))
    shown_earlier(pg, ModuleState(model))["test"] = True
    assert "test" in shown_earlier(pg, ModuleState(model))
    model.options["scale"] = 3.0
    assert "test" not in shown_earlier(pg, ModuleState(model))


def test_plain_tensors_are_those_among_values_and_what_is_in_them() -> None:
    a, b, c = torch.ones(3, 1)
    assert [id(t) for t in plain_tensors((a, 1, [b, {"c": (c,)}], None, "a"))] == [id(a), id(b), id(c)]


def test_parts_of_a_batch_equal_parts_taken_one_by_one() -> None:
    from transformers.modeling_outputs import CausalLMOutput

    x = torch.arange(12.0).reshape(6, 2)
    value = CausalLMOutput(logits=x, hidden_states=(x + 1, [x + 2], []))
    layout = (BatchRows(0, 2), BatchRows(0, 2), BatchRows(None))
    parts = parted(value, layout, 3)
    for number, part in enumerate(parts):
        expected = taken(value, layout, number)
        assert type(part) is CausalLMOutput
        assert list(part) == list(expected)
        torch.testing.assert_close(tuple(part.values()), tuple(expected.values()), rtol=0, atol=0)
    assert parts[0].hidden_states[1] is not parts[1].hidden_states[1]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_perturbed_rows_move_the_extremes_and_the_median_of_a_batch(size: int) -> None:
    cells = torch.ones(1 + perturbed_cells(size), size, 4)
    rows = torch.cat([cells[0], perturbed(cells[1:].flatten(0, 1), 0)])
    for number in (rows.median(0).values, rows.max(0).values, -rows.min(0).values):
        assert (number > 900).all()


def steps_of(run: Callable[[], object]) -> TorchCalls:
    steps = TorchCalls()

    class Noting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            steps.note(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    with Noting():
        run()
    return steps


X = torch.ones(2, 3)
RUNS: dict[str, Callable[[], object]] = {
    "the same": lambda: (X + 1).sum(dim=1),
    "another function": lambda: (X - 1).sum(dim=1),
    "another number": lambda: (X + 2).sum(dim=1),
    "a tensor for a number": lambda: (X + X).sum(dim=1),
    "another keyword": lambda: (X + 1).sum(dim=0),
    "another word": lambda: (X + 1).sum(axis=1),
    "no keyword": lambda: (X + 1).sum(1),
    "fewer": lambda: X + 1,
    "more": lambda: (X + 1).sum(dim=1).abs(),
    "none": lambda: None,
}


@pytest.mark.parametrize("run", RUNS)
def test_different_torch_calls_are_noticed(run: str) -> None:
    with SameSteps(steps_of(RUNS["the same"])) as mode:
        RUNS[run]()
    assert mode.is_same == (run == "the same")
    assert mode.is_same == (run == "the same")  # asking twice makes no difference


def test_coordinates_with_equal_labels_stay_different_and_belong_to_one_result() -> None:
    pg = PatchableGraph(nn.Linear(2, 2), torch.ones(1, 2))

    def swept(values: list[Any]) -> Any:
        axes = {"value": values}
        return pg.sweep(axes, lambda _: {"output": ZeroPatch()}, torch.ones(1, 2), metric=torch.sum, progress=False)

    first, second = swept([0.0, 1.0]), swept([-0.0, 1.0])
    assert [str(result.value.values[0]) for result in (first, second)] == ["0.0", "-0.0"]
    assert swept([0, 1]).value.dtype.kind == "i"
    assert swept([False, True]).value.dtype.kind == "b"
    first.value.attrs["unit"] = "m"
    first["value"] = [5.0, 6.0]
    again = swept([0.0, 1.0])
    assert again.value.attrs == {}
    assert again.value.values.tolist() == [0.0, 1.0]
