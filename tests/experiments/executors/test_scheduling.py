"""Sweeps that show how far they are, are interrupted, or have cells that fail."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphpatch_notebook import CustomPatch, ExperimentError, ExperimentWarning, PatchableGraph, ZeroPatch, interrupts
from graphpatch_notebook.experiments import SweepInterrupted

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.1, -1.0]])


@pytest.fixture
def pg() -> PatchableGraph:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2))
    return PatchableGraph(model, torch.ones(2, 3))


def halved(unit: int) -> dict[str, CustomPatch]:
    return {"sub_0.output": CustomPatch(custom_op=lambda value: value / 2, slice=(slice(None), unit))}


class At:
    """Patches of cells that do something when one of them is run."""

    def __init__(self, unit: int, act: Any) -> None:
        self.unit, self.act = unit, act

    def __call__(self, unit: int) -> dict[str, CustomPatch]:
        def op(value: torch.Tensor) -> torch.Tensor:
            if unit == self.unit:
                self.act()
            return value / 2

        return {"sub_0.output": CustomPatch(custom_op=op, slice=(slice(None), unit % 3))}


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    raise RuntimeError("no")


def test_an_interrupt_keeps_what_is_done(pg: PatchableGraph) -> None:
    whole = pg.sweep({"unit": range(6)}, lambda unit: halved(unit % 3), X, metric=torch.sum, batch=None, progress=False)
    with pytest.raises(SweepInterrupted, match="stopped after 4 of 6 cells") as caught:
        pg.sweep({"unit": range(6)}, At(4, interrupt), X, metric=torch.sum, batch=None, progress=False)
    result = caught.value.result
    assert isinstance(caught.value, KeyboardInterrupt)
    assert result.values[:4].tolist() == whole.values[:4].tolist()
    assert np.isnan(result.values[4:]).all()
    assert result.attrs["remarks"][-1] == "interrupted: 2 of 6 cells did not run and are NaN"
    assert result.attrs["errors"] == []
    assert caught.value.__context__ is None
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 3
    assert torch.equal(pg(X), pg._module(X))


def test_after_an_interrupt_the_same_call_continues(pg: PatchableGraph, tmp_path: Path) -> None:
    file, switch = tmp_path / "sweep.jsonl", tmp_path / "once"

    def act() -> None:
        if not switch.exists():
            switch.touch()
            interrupt()

    def call() -> Any:
        return pg.sweep(
            {"unit": range(6)},
            At(4, act),
            X,
            metric=torch.sum,
            batch=None,
            progress=False,
            checkpoint=file,
            checkpoint_key="1",
        )

    with pytest.raises(SweepInterrupted, match=r"the same call continues from .*sweep\.jsonl"):
        call()
    assert len(file.read_text().splitlines()) == 1 + 4
    assert not np.isnan(call().values).any()


def test_an_interrupt_after_the_last_cell_loses_nothing(pg: PatchableGraph) -> None:
    name = "interrupting"

    class Metric:
        """Its name is asked for when all cells are done, for the result."""

        @property
        def name(self) -> str:
            interrupt()
            return name

        def __call__(self, output: torch.Tensor) -> torch.Tensor:
            return output.sum()

    whole = pg.sweep({"unit": range(3)}, halved, X, metric=torch.sum, batch=None, progress=False)
    with pytest.raises(SweepInterrupted, match="stopped after 3 of 3 cells") as caught:
        pg.sweep({"unit": range(3)}, halved, X, metric=Metric(), batch=None, progress=False)
    assert caught.value.result.name == name
    assert caught.value.result.values.tolist() == whole.values.tolist()


def test_interrupts_wait_for_the_end_of_a_block() -> None:
    order = []

    def block() -> None:
        with interrupts.deferred():
            interrupt()
            order.append("whole")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert order == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("unit", range(6))
def test_no_moment_of_keeping_is_bad_for_an_interrupt(pg: PatchableGraph, tmp_path: Path, unit: int) -> None:
    """Interrupts at the lines of Python that follow a run: what is kept in memory and in the file is the same."""
    file, lines = tmp_path / "sweep.jsonl", 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.endswith(("scheduling.py", "checkpoint.py")):
            return None
        if event == "line" and frame.f_code.co_name in ("keep", "append", "_line"):
            lines += 1
            if lines == 4 * unit + 3:
                interrupt()
        return trace

    sys.settrace(trace)
    try:
        with pytest.raises(SweepInterrupted) as caught:
            pg.sweep(
                {"unit": range(3)},
                halved,
                X,
                metric=torch.sum,
                batch=None,
                progress=False,
                checkpoint=file,
                checkpoint_key="1",
            )
    finally:
        sys.settrace(None)
    kept = len(file.read_bytes().splitlines()) - 1
    assert file.read_bytes().endswith(b"\n")
    assert np.isfinite(caught.value.result.values).sum() == kept


def test_one_failing_cell_does_not_lose_the_others(pg: PatchableGraph) -> None:
    whole = pg.sweep({"unit": range(3)}, halved, X, metric=torch.sum, batch=None, progress=False)
    with pytest.warns(ExperimentWarning, match=r"1 of 3 cells failed and are NaN, .* unit=1: .*no") as caught:
        result = pg.sweep({"unit": range(3)}, At(1, fail), X, metric=torch.sum, batch=None, progress=False)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert np.isnan(result.values).tolist() == [False, True, False]
    assert result.values[[0, 2]].tolist() == whole.values[[0, 2]].tolist()
    (error,) = result.attrs["errors"]
    assert error["cell"] == {"unit": 1}
    assert "RuntimeError: no" in error["error"]


def test_a_sweep_without_any_number_is_an_error(pg: PatchableGraph) -> None:
    def metric(output: torch.Tensor) -> torch.Tensor:
        return output.sum() if torch.equal(output, baseline) else fail()

    baseline = pg(X)
    with pytest.raises(ExperimentError, match="all 3 cells failed, the first one: unit=0: RuntimeError: no"):
        pg.sweep({"unit": range(3)}, halved, X, metric=metric, progress=False)


def test_numbers_of_another_shape_are_a_failure(pg: PatchableGraph) -> None:
    def metric(output: torch.Tensor) -> torch.Tensor:
        return output.sum(0) if torch.equal(output, baseline) or output[0, 0] != failing else output.sum()

    baseline = pg(X)
    with torch.no_grad(), pg.patch(halved(2)):
        failing = pg(X)[0, 0]
    with pytest.warns(ExperimentWarning, match=r"unit=2: the metric gave numbers of shape \(\) here, and \(2,\)"):
        result = pg.sweep({"unit": range(3)}, halved, X, metric=metric, batch=None, progress=False)
    assert np.isnan(result.values).sum() == 2
    assert result.dims == ("unit", "metric_0")


def test_the_numbers_of_a_metric_have_dimensions_of_their_own(pg: PatchableGraph) -> None:
    with pytest.raises(ExperimentError, match="dimension 'metric'; give the axis another name"):
        pg.sweep({"metric": range(3)}, halved, X, metric=lambda output: {"a": output.sum()}, progress=False)


def test_progress_shows_rate_and_remaining_time(pg: PatchableGraph, capsys: pytest.CaptureFixture[str]) -> None:
    pg.sweep({"unit": range(3)}, halved, X, metric=torch.sum, batch=None)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.search(r"sweep: 100%.* 3/3 \[00:\d\d<00:\d\d, .*cell/s\]", shown.err)


def test_progress_counts_what_was_done_before(
    pg: PatchableGraph, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "sweep.jsonl"
    pg.sweep(
        {"unit": range(3)}, halved, X, metric=torch.sum, batch=None, checkpoint=file, checkpoint_key="1", progress=False
    )
    assert capsys.readouterr().err == ""
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    pg.sweep({"unit": range(3)}, halved, X, metric=torch.sum, batch=None, checkpoint=file, checkpoint_key="1")
    assert re.search(r"sweep: +67%.* 2/3 ", capsys.readouterr().err)


def test_missing_packages_are_an_error_before_anything_runs(
    pg: PatchableGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    line = re.escape("pip install 'graphpatch-notebook[experiments]'")
    with pytest.raises(ExperimentError, match=rf"needs tqdm: {line}, or say progress=False"):
        pg.sweep({"unit": range(3)}, At(0, fail), X, metric=torch.sum)
    assert pg.sweep({"unit": range(3)}, halved, X, metric=torch.sum, progress=False).shape == (3,)
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ExperimentError, match=f"the result of a sweep needs xarray: {line}"):
        pg.sweep({"unit": range(3)}, At(0, fail), X, metric=torch.sum, progress=False)


def test_labels_keep_their_types(pg: PatchableGraph) -> None:
    axes = {"unit": [np.int64(0), torch.tensor(1)], "what": ["a", 1, 2.5, True, slice(0, 2)]}
    result = pg.sweep(axes, lambda unit, what: {"sub_0.output": ZeroPatch()}, X, metric=torch.sum, progress=False)
    assert result.coords["unit"].dtype.kind == "i"
    assert result.coords["what"].values.tolist() == ["a", 1, 2.5, True, "slice(0, 2, None)"]
    assert list(map(type, result.coords["what"].values)) == [str, int, float, bool, str]
