"""Sweeps that show how far they are, are interrupted or have cells that fail, and continue from a checkpoint."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    ExperimentError,
    GraphPatchWarning,
    PatchableGraph,
    ProbePatch,
    ReplacePatch,
    ZeroPatch,
)
from graphpatch_notebook.errors import SweepInterrupted
from graphpatch_notebook.experiments import KLDivergence, LogProbability, Loss, Probability
from graphpatch_notebook.values import digest

X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.1, -1.0]])
AXES = {"path": ["sub_0.output", "sub_1.output"], "unit": range(3)}


@pytest.fixture
def pg() -> PatchableGraph:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2))
    return PatchableGraph(model, torch.ones(2, 3))


def zeros(path: str, unit: int) -> dict[str, ZeroPatch]:
    return {path: ZeroPatch(slice=(slice(None), unit))}


Act = Callable[[str, int], object]


def swept(pg: PatchableGraph, act: Act = lambda path, unit: None, make_patches: Any = zeros, **options: Any) -> Any:
    """A sweep that calls `act` in each cell."""

    def patches(path: str, unit: int) -> dict[str, Any]:
        def op(value: torch.Tensor) -> torch.Tensor:
            act(path, unit)
            return value

        return {path: [CustomPatch(custom_op=op), *make_patches(path, unit).values()]}

    settings: dict[str, Any] = {"metric": torch.sum, "batch": None, "progress": False} | options
    if "checkpoint" in settings:
        settings.setdefault("checkpoint_key", "1")
    return pg.sweep(settings.pop("axes", AXES), patches, settings.pop("inputs", X), **settings)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


# -- interrupts and failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_an_interrupt_keeps_what_is_done(pg: PatchableGraph, tmp_path: Path, has_checkpoint: bool) -> None:
    runs: list[Any] = []

    def act(*cell: Any) -> None:
        runs.append(cell)
        if len(runs) == 5:
            interrupt()

    options = {"checkpoint": tmp_path / "sweep"} if has_checkpoint else {}
    whole = swept(pg)
    with pytest.raises(SweepInterrupted) as caught:
        swept(pg, act, **options)
    result = caught.value.result
    assert isinstance(caught.value, KeyboardInterrupt)
    assert result.values.ravel()[:4].tolist() == whole.values.ravel()[:4].tolist()
    assert np.isnan(result.values.ravel()[4:]).all()
    assert "2 of 6 cells" in result.attrs["remarks"][-1]
    assert result.attrs["errors"] == []
    assert caught.value.__context__ is None
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 4
    assert torch.equal(pg(X), pg._module(X))
    if has_checkpoint:
        assert swept(pg, act, **options).identical(whole)
        assert len(runs) == 5 + 2


def failing(path: str, unit: int) -> None:
    if (path, unit) == ("sub_0.output", 1):
        raise RuntimeError("no")


def test_one_failing_cell_does_not_lose_the_others(pg: PatchableGraph, tmp_path: Path) -> None:
    whole, runs = swept(pg), []
    with pytest.warns(GraphPatchWarning, match="experiment]") as caught:
        result = swept(pg, failing, checkpoint=tmp_path / "sweep")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert np.argwhere(np.isnan(result.values)).tolist() == [[0, 1]]
    assert np.nansum(result.values) == np.sum(np.where(np.isnan(result.values), 0, whole.values))
    cell = {"path": "sub_0.output", "unit": 1}
    assert result.attrs["errors"] == [{"cell": cell, "error": "RuntimeError: no"}]
    assert swept(pg, lambda *cell: runs.append(cell), checkpoint=tmp_path / "sweep").identical(whole)
    assert runs == [("sub_0.output", 1)]


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 3, 6])
def test_done_cells_are_not_run_again(pg: PatchableGraph, tmp_path: Path, keep: int) -> None:
    result = swept(pg, checkpoint=tmp_path / "sweep")
    for file in sorted((tmp_path / "sweep").glob("0*.json"))[keep:]:
        file.unlink()
    runs: list[Any] = []
    for count in (6 - keep, 6 - keep):
        assert swept(pg, lambda *cell: runs.append(cell), checkpoint=tmp_path / "sweep").identical(result)
        assert len(runs) == count


def test_not_a_number_is_a_result(pg: PatchableGraph, tmp_path: Path) -> None:
    def metric(output: torch.Tensor) -> dict[str, torch.Tensor]:
        zero = -0.0 * output.abs().sum()
        return {"nan": output.sum() * torch.nan, "inf": output.new_tensor(-torch.inf), "zero": zero}

    result = swept(pg, metric=metric, checkpoint=tmp_path / "sweep")
    again = swept(pg, failing, metric=metric, checkpoint=tmp_path / "sweep")  # nothing runs
    assert again.values.tobytes() == result.values.tobytes()


def replaced(path: str, unit: int) -> dict[str, ReplacePatch]:
    return {path: ReplacePatch(value=torch.arange(2.0), slice=(slice(None), unit))}


OTHERS: dict[str, dict[str, Any]] = {
    "axes": {"axes": {"path": AXES["path"], "unit": range(2)}},
    "metric": {"metric": torch.mean},
    "metric's values": {"metric": Probability(1, None)},
    "key": {"checkpoint_key": "2"},
    "inputs": {"inputs": X + 1},
    "patches": {"make_patches": lambda path, unit: (replaced if unit == 1 else zeros)(path, unit)},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=list(OTHERS))
def test_another_sweep_is_refused(pg: PatchableGraph, tmp_path: Path, options: dict[str, Any]) -> None:
    swept(pg, checkpoint=tmp_path / "sweep")
    before = {file: file.read_bytes() for file in (tmp_path / "sweep").iterdir()}
    with pytest.raises(ExperimentError, match="another sweep"):
        swept(pg, failing, checkpoint=tmp_path / "sweep", **options)
    assert {file: file.read_bytes() for file in (tmp_path / "sweep").iterdir()} == before


def test_other_weights_are_refused(pg: PatchableGraph, tmp_path: Path) -> None:
    """Also where they do not change the metric without patches."""
    with torch.no_grad():
        pg.get_parameter("2.weight").zero_()
    swept(pg, checkpoint=tmp_path / "sweep")
    with torch.no_grad():
        pg.get_parameter("0.weight")[0, 0] += 1e-6
    with pytest.raises(ExperimentError, match="weights"):
        swept(pg, checkpoint=tmp_path / "sweep")


def test_changed_results_are_not_read(pg: PatchableGraph, tmp_path: Path) -> None:
    """No digit of a result changes unseen, as a disk or an editor may change it."""
    whole = swept(pg, checkpoint=tmp_path / "sweep")
    file = max((tmp_path / "sweep").glob("0*.json"))
    text = file.read_text()
    places = [place for place, letter in enumerate(text) if letter.isdigit()]
    assert len(places) > 20
    for place in places[::4]:
        other = "1" if text[place] != "1" else "2"
        file.write_text(text[:place] + other + text[place + 1 :])
        with pytest.raises(ExperimentError, match=file.name):
            swept(pg, failing, checkpoint=tmp_path / "sweep")
    file.write_text(text)
    assert swept(pg, failing, checkpoint=tmp_path / "sweep").identical(whole)


def test_other_files_are_not_overwritten(pg: PatchableGraph, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("my notes")
    with pytest.raises(ExperimentError, match="not written by a sweep"):
        swept(pg, checkpoint=tmp_path)
    with pytest.raises(FileExistsError):
        swept(pg, checkpoint=tmp_path / "notes.txt")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_functions_need_a_key(pg: PatchableGraph, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="CustomPatch"):
        swept(pg, checkpoint=tmp_path / "sweep", checkpoint_key="")
    for key in (1, None):
        with pytest.raises(ExperimentError, match="checkpoint_key"):
            swept(pg, checkpoint=tmp_path / "sweep", checkpoint_key=key)
    assert not (tmp_path / "sweep").exists()
    pg.sweep(AXES, zeros, X, metric=lambda output: output.sum(), checkpoint=tmp_path / "sweep", progress=False)
    with pytest.raises(ExperimentError, match="metric"):
        pg.sweep(AXES, zeros, X, metric=lambda output: 1 * output.sum(), checkpoint=tmp_path / "sweep", progress=False)


# -- digests -----------------------------------------------------------------------------------------------------------


def test_digests_see_what_patches_do() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    different = [
        ZeroPatch(),
        ZeroPatch(slice=0),
        ZeroPatch(slice=(0,)),
        ZeroPatch(slice=slice(0, 2)),
        ZeroPatch(positions=[0, 2]),
        ZeroPatch(any_shape=True),
        AddPatch(value=0),
        AddPatch(value=0.0),
        AddPatch(value=-0.0),
        AddPatch(value=True),
        ReplacePatch(value=tensor),
        ReplacePatch(value=tensor.T),
        ReplacePatch(value=tensor.double()),
        ReplacePatch(value=tensor.reshape(3, 2)),
        ReplacePatch(value=tensor + 1e-6),
        ReplacePatch(value=tensor.bfloat16()),
        ReplacePatch(value=torch.tensor(float("nan"))),
        ReplacePatch(value=torch.ones(0, 3)),
        Probability(1),
        Probability(2),
        LogProbability(1),
        Loss(torch.tensor([[0, 1]])),
        Loss(torch.tensor([[0, 2]])),
        KLDivergence(tensor, None),
        KLDivergence(tensor * 2, None),
        CustomPatch(custom_op=torch.neg, slice=0),
        CustomPatch(custom_op=torch.neg, slice=1),
        CustomPatch(custom_op=lambda t: t),
        CustomPatch(custom_op=lambda t: t + 1),
        CustomPatch(custom_op=lambda t: t + 2),
        [1, 2],
        (1, 2),
        [1, [2]],
        {1, 2},
        np.arange(3),
        np.arange(3) + 1,
        torch.sum,
        torch.mean,
    ]
    digests = list(map(digest, different))
    assert len(set(digests)) == len(different)


def test_digests_of_equal_things_are_equal() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert digest({"a": ReplacePatch(value=tensor)}) == digest({"a": ReplacePatch(value=tensor.clone())})
    assert digest({"b", "a", "c"}) == digest({"c", "b", "a"})
    assert digest(tensor.T) == digest(tensor.T.contiguous())
    assert digest(np.arange(3)) == digest(np.arange(6)[:3])
    assert digest(torch.ones(2, dtype=torch.cfloat).conj()) == digest(torch.ones(2, dtype=torch.cfloat).conj_physical())
    probe, used = ProbePatch(), ProbePatch()
    used.op(torch.ones(2))
    assert digest(probe) == digest(used)
