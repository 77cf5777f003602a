"""What users do in metrics, patches and `make_patches` that a forward shared by several cells could make wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    PatchableGraph,
    ProbePatch,
    ZeroPatch,
)
from graphpatch_notebook.errors import SweepInterrupted
from tests.experiments.engine.loops import Counts

STRENGTHS = [0.0, 0.0, 0.0, 0.0, 1.0, -2.0, 3.0, 4.0]


class Tokens(nn.Module):
    def __init__(self, centred: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.centred = centred

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h - h.mean() if self.centred else h)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(6, 4), nn.Linear(4, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(input_ids)))


def graph(centred: bool = False) -> tuple[PatchableGraph, Tensor]:
    x = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(1))
    return PatchableGraph(Tokens(centred).eval(), x), x


def loop(pg: PatchableGraph, make: Callable[[Any], Any], x: Tensor, metric: Callable[[Any], Any]) -> list[float]:
    found = []
    with torch.no_grad():
        for strength in STRENGTHS:
            with pg.patch(make(strength)):
                found.append(float(metric(pg(x))))
    return found


def strengthened(strength: float) -> dict[str, Any]:
    return {"a.output": AddPatch(value=strength, slice=(..., 1))}


def swept(pg: PatchableGraph, make: Callable[[Any], Any], x: Tensor, metric: Callable[[Any], Any]) -> Any:
    return pg.sweep({"strength": STRENGTHS}, make, x, metric=metric, batch=4, progress=False)


@pytest.mark.parametrize("way", ["probe", "function", "hook"])
def test_a_metric_reads_what_the_run_of_its_cell_kept(way: str) -> None:
    pg, x = graph()
    probe, kept = ProbePatch(), {}

    def keep(value: Tensor) -> Tensor:
        kept["value"] = value
        return value

    keeping = {"probe": {"b.output": probe}, "function": {"b.output": CustomPatch(custom_op=keep)}, "hook": {}}[way]
    if way == "hook":
        pg.b.register_forward_hook(lambda _module, _args, output: keep(output))

    def make(strength: float) -> dict[str, Any]:
        return {**strengthened(strength), **keeping}

    def metric(_output: Tensor) -> Tensor:
        return (probe.activation if way == "probe" else kept["value"])[0, -1].sum()

    with pg.patch(make(0.0)):
        pg(x)
    result = swept(pg, make, x, metric)

    assert result.values.tolist() == loop(pg, make, x, metric)


@torch.no_grad()
def test_positions_count_on_after_a_cache_of_tuples() -> None:
    """Rows of a forward that cells share began at position 0."""

    class Cached(Embedded):
        def forward(self, input_ids: Tensor, past_key_values: Any = None) -> Tensor:
            keys = self.embed(input_ids)
            if past_key_values is not None:
                keys = torch.cat([past_key_values[0][0][:, 0], keys], dim=1)
            return self.out(torch.tanh(keys))

    model = Cached().eval()
    pg = PatchableGraph(model, torch.tensor([[3, 1, 2, 5]]))
    past, ids = ((torch.randn(1, 1, 4, 4), torch.randn(1, 1, 4, 4)),), torch.tensor([[4, 0, 1]])
    patches = {
        "steps": lambda cell: {"steps": cell % 2},
        "positions": lambda cell: {"positions": slice(cell % 7, None)},
    }
    for name, where in patches.items():
        expected = []
        for cell in range(24):
            strength = 1.0 if cell % 7 else 5.0
            first = max(cell % 7 - 4, 0) if name == "positions" else 3 * (cell % 2 == 0)  # the call is step 1

            def add(_module: nn.Module, _args: Any, output: Tensor, first: int = first, by: float = strength) -> Tensor:
                return torch.cat([output[:, :first], output[:, first:] + by], dim=1)

            with model.embed.register_forward_hook(add):
                expected.append(float(model(ids, past).sum()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of cells for step 0
            result = pg.sweep(
                {"cell": range(24)},
                lambda cell, where=where: {"embed.output": AddPatch(1.0 if cell % 7 else 5.0, **where(cell))},
                ids, past_key_values=past, metric=torch.sum, batch=8, progress=False,
            )  # fmt: skip
        assert result.values.tolist() == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("others", [[], [1]], ids=["alone", "with another"])
def test_positions_that_the_sequence_does_not_have_are_reported_as_in_the_loop(others: list[int]) -> None:
    ids = torch.tensor([[3, 1, 2, 5]])
    pg = PatchableGraph(Embedded().eval(), input_ids=ids)

    def make(position: int) -> dict[str, Any]:
        return {"embed.output": AddPatch(value=1.0, positions=[*others, position])}

    def reported(run: Callable[[], Any]) -> tuple[Any, list[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return run(), sorted(str(warning.message) for warning in caught)

    def looped() -> list[float]:
        found = []
        for position in range(8):
            with torch.no_grad(), pg.patch(make(position)):
                found.append(float(pg(input_ids=ids).sum()))
        return found

    expected, told = reported(looped)
    result, also_told = reported(
        lambda: pg.sweep({"position": range(8)}, make, input_ids=ids, metric=torch.sum, batch=4, progress=False)
    )
    assert result.values.tolist() == pytest.approx(expected, rel=2e-6)
    assert also_told == told
    assert len(told) == 4


def test_rows_that_meet_in_a_mean_are_noticed() -> None:
    pg, x = graph(centred=True)
    result = swept(pg, strengthened, x, torch.sum)

    assert result.values.tolist() == pytest.approx(loop(pg, strengthened, x, torch.sum), rel=2e-6, abs=2e-6)
    assert "reach the rows of another" in " ".join(result.attrs["remarks"])


@pytest.mark.parametrize("batch", [None, 4])
def test_a_metric_may_write_into_the_output(batch: int | None) -> None:
    pg, x = graph()

    def make(strength: float) -> dict[str, Any]:
        return {} if strength == 0 else {"b.output": AddPatch(value=strength)}

    def metric(output: Tensor) -> Tensor:
        return output.mul_(2).sum()

    result = pg.sweep({"strength": STRENGTHS}, make, x, metric=metric, batch=batch, progress=False)

    assert result.values.tolist() == pytest.approx(loop(pg, make, x, metric), rel=2e-6)


def test_the_frames_before_a_patch_do_not_run_again() -> None:
    pg, x = graph()
    counts, linear = Counts(), pg.a.forward
    pg.a.forward = lambda value: counts("a", value.shape[0]) or linear(value)

    def make(unit: int) -> dict[str, Any]:
        return {"b.output": ZeroPatch(slice=(..., unit % 4))}

    pg.sweep({"unit": range(40)}, make, x, metric=torch.sum, batch=8, progress=False)

    # Without patches, at twice the batch, and two cells that run again.
    assert counts.by_key["a"] <= 5


def test_notebooks_show_one_line_of_an_interrupted_sweep() -> None:
    assert SweepInterrupted("stopped after 1 of 2 cells", None)._render_traceback_() == [
        "SweepInterrupted: stopped after 1 of 2 cells"
    ]


def test_a_hook_on_all_modules_that_comes_later_sees_cells_one_by_one() -> None:
    pg, x = graph()
    swept(pg, strengthened, x, torch.sum)
    seen: dict[str, Tensor] = {}
    with torch.nn.modules.module.register_module_forward_hook(
        lambda module, _args, output: seen.update(last=output) if module is pg.b else None
    ):
        found = swept(pg, strengthened, x, lambda _output: seen["last"][0, -1].sum())
        assert found.values.tolist() == pytest.approx(
            loop(pg, strengthened, x, lambda _output: seen["last"][0, -1].sum()), rel=2e-6
        )

    assert any("hooks" in remark for remark in found.attrs["remarks"])
