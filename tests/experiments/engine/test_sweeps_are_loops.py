"""What patches share, keep and draw is in a sweep what it is in a loop of plain hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    PatchableGraph,
    ProbePatch,
    UnknownPathError,
    ZeroPatch,
)
from tests.experiments.engine.loops import Counts
from tests.hooks import registered
from tests.zoo.case import floats, seeded
from tests.zoo.submodules import Submodules

X = floats(2, 4)


class Layers(Submodules, a=(4, 4), b=(4, 4), c=(4, 4)):
    def forward(self, x: Tensor, deep: bool = True) -> Any:
        h = self.a(x).tanh()
        return self.c(self.b(h)) if deep else self.c(h)


@pytest.fixture
def model() -> nn.Module:
    return seeded(Layers)


def test_cells_with_the_same_problem_are_named_once(model: nn.Module) -> None:
    def make(layer: str, number: int) -> dict[str, Any]:
        return {f"{layer}.output": ZeroPatch(slice=(slice(None), number))}

    with pytest.raises(UnknownPathError) as raised:
        PatchableGraph(model, X).sweep({"layer": ["a", "z", "y"], "number": range(3)}, make, X, metric=torch.sum)
    lines = str(raised.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"layer={n!r}, number=0 and 2 more cells" for n in "zy"]


def test_the_frames_before_a_patch_do_not_run_again(model: nn.Module) -> None:
    x, counts, linear = X[:1], Counts(), model.a.forward
    pg = PatchableGraph(model, x)
    pg.a.forward = lambda value: counts("a", value.shape[0]) or linear(value)

    def make(unit: int) -> dict[str, Any]:
        return {"c.output": ZeroPatch(slice=(..., unit % 4))}

    pg.sweep({"unit": range(40)}, make, x, metric=torch.sum, batch=8, progress=False)

    # Without patches, at twice the batch, and two cells that run again.
    assert counts.by_key["a"] <= 5


@pytest.mark.parametrize("way", ["probe", "function", "hook", "hook on all modules"])
def test_a_metric_reads_what_the_run_of_its_cell_kept(way: str, model: nn.Module) -> None:
    pg, probe, kept, handles = PatchableGraph(model, X), ProbePatch(), {}, []

    def keep(module: Any, _args: Any, output: Tensor) -> None:
        kept.update({"value": output} if module is pg.b else {})

    def make(strength: float) -> dict[str, Any]:
        by_function = CustomPatch(custom_op=lambda value: keep(pg.b, (), value) or value)
        keeping = {"probe": {"b.output": probe}, "function": {"b.output": by_function}}.get(way, {})
        return {"a.output": AddPatch(value=strength, slice=(..., 1)), **keeping}

    def metric(_output: Tensor) -> Tensor:
        return (probe.activation if way == "probe" else kept["value"])[0].sum()

    if way.startswith("hook"):
        handles = [pg.b.register_forward_hook(keep) if way == "hook" else register_module_forward_hook(keep)]
    strengths, expected = [0.0, 0.0, 0.0, 0.0, 1.0, -2.0, 3.0, 4.0], []
    with registered(handles), torch.no_grad():
        for strength in strengths:
            with pg.patch(make(strength)):
                expected.append(float(metric(pg(X))))
        found = pg.sweep({"strength": strengths}, make, X, metric=metric, batch=4, progress=False)

    assert found.values.tolist() == pytest.approx(expected, rel=2e-6)


class Cached(Submodules, embed=lambda: nn.Embedding(8, 4)):
    def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Tensor:
        keys = self.embed(input_ids)
        return keys if past_key_values is None else torch.cat([past_key_values[0][0][:, 0], keys], dim=1).tanh()


@torch.no_grad()
def test_positions_count_on_after_a_cache_of_tuples() -> None:
    """Rows of a forward that cells share began at position 0."""
    model, ids, past = seeded(Cached), torch.tensor([[4, 0, 1]]), ((floats(1, 1, 4, 4), floats(1, 1, 4, 4)),)
    pg = PatchableGraph(model, torch.tensor([[3, 1, 2, 5]]))
    found = pg.sweep(
        {"first": range(7)}, lambda first: {"embed.output": ZeroPatch(positions=slice(first, None))},
        ids, past_key_values=past, metric=torch.sum, batch=8, progress=False,
    )  # fmt: skip
    for first in range(7):
        kept = max(first - 4, 0)  # the cache holds four positions
        values = torch.cat([past[0][0][:, 0], model.embed(ids[:, :kept]), torch.zeros(1, 3 - kept, 4)], dim=1)
        assert found.values[first] == pytest.approx(float(values.tanh().sum()), rel=2e-5)
