"""Checkpoint files: a sweep goes on where it was stopped, and with nothing but the same sweep."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphpatch_notebook import (
    AddPatch,
    CustomPatch,
    ExperimentError,
    ExperimentWarning,
    Patch,
    PatchableGraph,
    ProbePatch,
    ReplacePatch,
    ZeroPatch,
)
from graphpatch_notebook.experiments import KLDivergence, LogProbability, Loss, Probability
from graphpatch_notebook.experiments.executors.checkpoint import Digester
from tests.experiments.executors import sweep_to_kill

ROOT = Path(__file__).parents[3]
CELLS = 15


@pytest.fixture
def pg() -> PatchableGraph:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 2))
    return PatchableGraph(model, torch.ones(2, 3))


X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.1, -1.0]])
AXES = {"path": ["sub_0.output", "sub_1.output"], "unit": range(3)}


def zeros(path: str, unit: int) -> dict[str, ZeroPatch]:
    return {path: ZeroPatch(slice=(slice(None), unit))}


def swept(pg: PatchableGraph, file: Path | None, runs: list[Any] | None = None, **options: Any) -> Any:
    """A sweep whose cells say in `runs` that they were run."""
    options = {"axes": AXES, "make_patches": zeros, "inputs": X, "metric": torch.sum, "key": "1"} | options

    def patches(path: str, unit: int) -> dict[str, Any]:
        told = CustomPatch(custom_op=Told(path, unit, runs if runs is not None else []))
        return {path: [told, *options["make_patches"](path, unit).values()]}

    return pg.sweep(
        options["axes"], patches, options["inputs"], metric=options["metric"], batch=None, checkpoint=file,
        checkpoint_key=options["key"], progress=False,
    )  # fmt: skip


# A list of runs is state, for all that the package knows.
tells_of_runs = pytest.mark.filterwarnings("ignore:patches of cells that are done")


@dataclasses.dataclass
class Told:
    path: str
    unit: int
    runs: list[Any]

    def __call__(self, value: Any) -> Any:
        self.runs.append((self.path, self.unit))
        return value


def runs_of(folder: Path) -> list[str]:
    return (folder / "runs.txt").read_text().splitlines()


@pytest.mark.slow
def test_a_killed_process_repeats_at_most_one_chunk(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    sweep_to_kill.main(whole)

    environment = os.environ | {"KILL_AT": "8", "PYTHONPATH": str(ROOT)}  # of a process with other hashes
    done = subprocess.run([sys.executable, sweep_to_kill.__file__, killed], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(runs_of(killed)) == 9
    assert not (killed / "result.bin").exists()
    with (killed / "sweep.jsonl").open("a") as stream:  # ... and as if the next line was being written
        stream.write('{"cells": [[8, {"values": 1.')
    sweep_to_kill.main(killed)

    assert (killed / "result.bin").read_bytes() == (whole / "result.bin").read_bytes()
    assert len(runs_of(whole)) == CELLS
    assert {cell: n for cell, n in Counter(runs_of(killed)).items() if n > 1} == {"1,3": 2}  # of one cell each
    assert [json.loads(line) for line in (killed / "sweep.jsonl").read_text().splitlines()]


def test_done_cells_are_not_run_again(pg: PatchableGraph, tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    first, again = [], []
    result = swept(pg, file, first)
    loaded = swept(pg, file, again)
    assert len(first) == 6
    assert again == []
    assert result.identical(loaded)
    assert result.values.tobytes() == loaded.values.tobytes()


@tells_of_runs
@pytest.mark.parametrize("keep", range(7))
def test_each_line_that_is_whole_counts(pg: PatchableGraph, tmp_path: Path, keep: int) -> None:
    file = tmp_path / "sweep.jsonl"
    result = swept(pg, file)
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 7
    torn = lines[keep + 1][:-1] if keep < 6 else b""
    file.write_bytes(b"".join(lines[: keep + 1]) + torn)
    runs: list[Any] = []
    assert swept(pg, file, runs).identical(result)
    assert len(runs) == 6 - keep
    assert sorted(file.read_bytes().splitlines()) == sorted(line.rstrip(b"\n") for line in lines)


@tells_of_runs
def test_a_damaged_line_is_run_again(pg: PatchableGraph, tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    result = swept(pg, file)
    lines = file.read_bytes().splitlines(keepends=True)
    lines[2] = b"\0" * 20 + b"\n"
    file.write_bytes(b"".join(lines))
    runs: list[Any] = []
    assert swept(pg, file, runs).identical(result)
    assert runs == [("sub_0.output", 1)]


@tells_of_runs
def test_failed_cells_are_run_again(pg: PatchableGraph, tmp_path: Path) -> None:
    file, switch = tmp_path / "sweep.jsonl", tmp_path / "repaired"

    def metric(output: torch.Tensor) -> torch.Tensor:
        if output[0, 0] == output.new_tensor(failing) and not switch.exists():
            raise RuntimeError("the disk is away")
        return output.sum()

    with torch.no_grad(), pg.patch(zeros("sub_0.output", 2)):
        failing = pg(X)[0, 0].item()
    with pytest.warns(ExperimentWarning, match=r"1 of 6 cells failed .*path='sub_0.output', unit=2: RuntimeError"):
        result = swept(pg, file, metric=metric)
    assert np.isnan(result.values).sum() == 1
    assert result.attrs["errors"] == [
        {"cell": {"path": "sub_0.output", "unit": 2}, "error": "RuntimeError: the disk is away"}
    ]
    switch.touch()
    runs: list[Any] = []
    repaired = swept(pg, file, runs, metric=metric)
    assert runs == [("sub_0.output", 2)]
    assert not np.isnan(repaired.values).any()
    assert repaired.attrs["errors"] == []


def test_not_a_number_is_a_result(pg: PatchableGraph, tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"

    def metric(output: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "nan": output.sum() * torch.nan,
            "inf": output.new_tensor(-torch.inf),
            "zero": -0.0 * output.abs().sum(),
        }

    result, runs = swept(pg, file, metric=metric), []
    assert swept(pg, file, runs, metric=metric).values.tobytes() == result.values.tobytes()
    assert runs == []
    assert result.dims == ("path", "unit", "metric")


def replaced(path: str, unit: int) -> dict[str, ReplacePatch]:
    return {path: ReplacePatch(value=torch.arange(2.0), slice=(slice(None), unit))}


OTHERS = {
    "axis": ({"axes": {"path": AXES["path"], "unit": range(2)}}, r"axis 'unit' are \[0, 1, 2\], not \[0, 1\]"),
    "metric": ({"metric": torch.mean}, "its metric is sum, not mean.*without patches its metric is "),
    "key": ({"key": "2"}, "its checkpoint_key is '1', not '2'"),
    "metric's values": ({"metric": Probability(1, None)}, r"its metric is sum, not Probability\(token=1"),
    "inputs": ({"inputs": X + 1}, "its inputs are others; without patches its metric is "),
    "patches": (
        {"make_patches": lambda path, unit: replaced(path, unit) if unit == 1 else zeros(path, unit)},
        "its patches are others in 2 of 6 cells, the first being path='sub_0.output', unit=1",
    ),
}


@pytest.mark.parametrize(("options", "message"), OTHERS.values(), ids=list(OTHERS))
def test_another_sweep_is_refused(pg: PatchableGraph, tmp_path: Path, options: Any, message: str) -> None:
    file = tmp_path / "sweep.jsonl"
    swept(pg, file)
    before, runs = file.read_bytes(), []
    with pytest.raises(ExperimentError, match=rf"{message}.* Give another name, or delete"):
        swept(pg, file, runs, **options)
    assert file.read_bytes() == before
    assert runs == []


def test_other_weights_are_refused(pg: PatchableGraph, tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    swept(pg, file)
    with torch.no_grad():
        pg.get_parameter("2.bias")[0] += 1e-6
    message = r"its weights or modes \(.*\) are others; without patches its metric is .* other weights, inputs"
    with pytest.raises(ExperimentError, match=message):
        swept(pg, file)


@pytest.mark.parametrize("content", [b"my notes\n", b'{"format": "other"}\n', b"[]", b"\xff\0"])
def test_other_files_are_not_overwritten(pg: PatchableGraph, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    with pytest.raises(ExperimentError, match="was not written by a sweep"):
        swept(pg, file)
    assert file.read_bytes() == content


def test_a_file_that_cannot_be_written_is_an_error_at_once(pg: PatchableGraph, tmp_path: Path) -> None:
    runs: list[Any] = []
    for file in (tmp_path / "nowhere" / "sweep.jsonl", tmp_path):
        with pytest.raises(ExperimentError, match=r"checkpoint=.* cannot be used"):
            swept(pg, file, runs)
    assert runs == []


def test_a_sweep_outlives_its_file(pg: PatchableGraph, tmp_path: Path) -> None:
    file = tmp_path / "folder" / "sweep.jsonl"
    file.parent.mkdir()

    def metric(output: torch.Tensor) -> torch.Tensor:
        if len(runs) == 3 and file.exists():
            file.rename(tmp_path / "away")
            file.mkdir()
        return output.sum()

    runs: list[Any] = []
    with pytest.warns(ExperimentWarning, match="can no longer be written"):
        result = swept(pg, file, runs, metric=metric)
    assert result.identical(swept(pg, None, metric=metric).rename(result.name))


@pytest.mark.parametrize("is_other", [False, True], ids=["reads", "changes"])
def test_patches_with_a_state_warn_with_a_checkpoint(pg: PatchableGraph, tmp_path: Path, is_other: bool) -> None:
    """The state is gone with the process; that it was needed is in the file."""
    file = tmp_path / "sweep.jsonl"

    def swept_from(state: dict[str, float], fails_at: int | None = None, **options: Any) -> Any:
        def patches(path: str, unit: int) -> dict[str, CustomPatch]:
            def op(value: torch.Tensor) -> torch.Tensor:
                if unit == 0 or is_other:
                    state["count"] = state.get("count", 0.0) + 1.0
                return value + state.get("count", 0.0)

            return {path: CustomPatch(op)}

        def metric(output: torch.Tensor) -> torch.Tensor:
            measured.append(1)
            if len(measured) == fails_at:
                raise KeyboardInterrupt
            return output.sum()

        measured: list[int] = []
        return pg.sweep(AXES, patches, X, metric=metric, batch=None, checkpoint_key="1", progress=False, **options)

    whole = swept_from({})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyboardInterrupt):
            swept_from({}, 4, checkpoint=file)
    with pytest.warns(ExperimentWarning, match="changed what they refer to when they ran, .* without that"):
        rest = swept_from({}, checkpoint=file)
    assert not np.array_equal(rest.values, whole.values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swept_from({}, checkpoint=file)  # nothing is left to do


def test_gradients_are_not_kept(pg: PatchableGraph, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"backward=True .* use one of the two"):
        pg.sweep(AXES, zeros, X, metric=torch.sum, backward=True, checkpoint=tmp_path / "sweep.jsonl")


# -- digests -----------------------------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    return Digester("").digest(value, "what is tested")


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


def test_with_a_key_other_objects_are_seen_as_far_as_they_are_data() -> None:
    def told(value: Any) -> str:
        return Digester("key").digest(value, "what is tested")

    probe, used = ProbePatch(), ProbePatch()
    used.op(torch.ones(2))
    assert told(probe) == told(used)
    assert told(CustomPatch(custom_op=torch.neg, slice=0)) != told(CustomPatch(custom_op=torch.neg, slice=1))
    assert told(CustomPatch(custom_op=lambda t: t)) == told(CustomPatch(custom_op=lambda t: -t))


def test_code_needs_a_key(pg: PatchableGraph, tmp_path: Path) -> None:
    """Code is not looked at: without a key nobody could tell that it was changed meanwhile."""

    class Own(LogProbability):
        def __call__(self, output: Any) -> torch.Tensor:
            return output.sum()

    def custom(path: str, unit: int) -> dict[str, Patch[Any]]:
        return {path: CustomPatch(custom_op=torch.neg, slice=unit)} if unit == 1 else zeros(path, unit)

    file, settings = tmp_path / "sweep.jsonl", {"checkpoint": tmp_path / "sweep.jsonl", "progress": False}
    place = r"the patches of path='sub_0.output', unit=1"
    with pytest.raises(ExperimentError, match=rf'what a CustomPatch does \({place}\): .* checkpoint_key="version 1"'):
        pg.sweep(AXES, custom, X, metric=torch.sum, **settings)
    for metric, shown in (
        (lambda output: output.sum(), r"function does \(the metric <lambda>\)"),
        (torch.ones(2).dot, r"builtin_function_or_method does \(the metric dot\)"),
        (Own(1, None), r"Own does \(the metric Own"),
    ):
        with pytest.raises(ExperimentError, match=shown):
            pg.sweep(AXES, zeros, (X[0] if "dot" in shown else X), metric=metric, **settings)
    assert not file.exists()
    for metric in (torch.sum, Probability(1, position=None)):
        pg.sweep(AXES, zeros, X, metric=metric, **settings)
        file.unlink()
    with pytest.raises(ExperimentError, match="checkpoint_key must be a text, not 1"):
        pg.sweep(AXES, zeros, X, metric=torch.sum, checkpoint_key=1, **settings)


def test_other_weights_are_seen_without_the_metric(pg: PatchableGraph, tmp_path: Path) -> None:
    settings = {"metric": Probability(0, position=None), "checkpoint": tmp_path / "sweep", "progress": False}
    axes = {"unit": range(2)}

    def without(unit: int) -> dict[str, ZeroPatch]:
        return {"sub_0.output": ZeroPatch(slice=(..., unit))}

    with torch.no_grad():
        pg.get_parameter("2.weight").zero_()
    pg.sweep(axes, without, X, **settings)
    with torch.no_grad():
        pg.get_parameter("0.weight").mul_(2)
    with pytest.raises(ExperimentError, match=r"holds another sweep: its weights or modes \(.*\) are others\. Give"):
        pg.sweep(axes, without, X, **settings)
