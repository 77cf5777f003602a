"""Checkpoint files: a sweep goes on where it was stopped, and with nothing but the same sweep."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
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
from graphpatch_notebook.experiments.digests import Digester
from tests.experiments import sweep_to_kill

SCRIPT = Path(sweep_to_kill.__file__)
CELLS = 15


class Count:
    """A metric that counts its calls."""

    name = "sum"

    def __init__(self) -> None:
        self.__dict__["calls"] = [0]

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return output.sum()


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
    options = {"axes": AXES, "make_patches": zeros, "inputs": X, "metric": torch.sum, "batch": None} | options

    def patches(path: str, unit: int) -> dict[str, Any]:
        told = CustomPatch(custom_op=Told(path, unit, runs if runs is not None else []))
        return {path: [told, *options["make_patches"](path, unit).values()]}

    return pg.sweep(
        options["axes"], patches, options["inputs"], metric=options["metric"], batch=options["batch"], checkpoint=file,
        progress=False,
    )  # fmt: skip


@dataclasses.dataclass
class Told:
    path: str
    unit: int
    runs: dataclasses.InitVar[list[Any]]

    def __post_init__(self, runs: list[Any]) -> None:
        self.told = runs  # no field: no part of what the sweep is

    def __call__(self, value: Any) -> Any:
        self.told.append((self.path, self.unit))
        return value


def run_script(folder: Path, **variables: str) -> int:
    environment = os.environ | variables | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([sys.executable, str(SCRIPT), str(folder)], env=environment, check=False).returncode


def runs_of(folder: Path) -> list[str]:
    return (folder / "runs.txt").read_text().splitlines()


@pytest.mark.slow
def test_a_killed_process_repeats_at_most_one_chunk(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    sweep_to_kill.main(whole)

    assert run_script(killed, KILL_AT="8") == -signal.SIGKILL
    assert len(runs_of(killed)) == 9
    assert not (killed / "result.bin").exists()
    with (killed / "sweep.jsonl").open("a") as stream:  # ... and as if the next line was being written
        stream.write('{"cells": [[8, {"values": 1.')
    assert run_script(killed) == 0

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


def test_a_damaged_line_is_run_again(pg: PatchableGraph, tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    result = swept(pg, file)
    lines = file.read_bytes().splitlines(keepends=True)
    lines[2] = b"\0" * 20 + b"\n"
    file.write_bytes(b"".join(lines))
    runs: list[Any] = []
    assert swept(pg, file, runs).identical(result)
    assert runs == [("sub_0.output", 1)]


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
    "code": ({"metric": Count()}, "its metric sum has other code"),
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
    with pytest.raises(ExperimentError, match="without patches its metric is .* other weights, inputs or machine"):
        swept(pg, file)


@pytest.mark.parametrize("content", [b"my notes\n", b'{"format": "other"}\n', b"[]", b"\xff\0"])
def test_files_of_others_are_left_alone(pg: PatchableGraph, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    with pytest.raises(ExperimentError, match="no sweep has written"):
        swept(pg, file)
    assert file.read_bytes() == content


def test_a_file_that_cannot_be_written_is_told_at_once(pg: PatchableGraph, tmp_path: Path) -> None:
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
    with pytest.warns(ExperimentWarning, match="cannot be written any more"):
        result = swept(pg, file, runs, metric=metric)
    assert result.identical(swept(pg, None, metric=metric).rename(result.name))


def test_gradients_are_not_kept(pg: PatchableGraph, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"backward=True .* use one of the two"):
        pg.sweep(AXES, zeros, X, metric=torch.sum, backward=True, checkpoint=tmp_path / "sweep.jsonl")


# -- digests -----------------------------------------------------------------------------------------------------------


def digest(value: Any) -> str:
    return Digester().digest(value)


def scaled(factor: float) -> CustomPatch:
    return CustomPatch(custom_op=lambda value: value * factor)


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
        scaled(2.0),
        scaled(3.0),
        CustomPatch(custom_op=lambda value: value + 2.0),
        CustomPatch(custom_op=torch.neg),
        CustomPatch(custom_op=lambda value, n=1: value),
        CustomPatch(custom_op=lambda value, n=2: value),
        CustomPatch(custom_op=lambda value: sum(value for _ in range(2))),
        CustomPatch(custom_op=lambda value: sum(value for _ in range(3))),
    ]
    digests = list(map(digest, different))
    assert len(set(digests)) == len(different)


def test_digests_of_equal_things_are_equal() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    probe = ProbePatch()
    fresh = digest([probe, scaled(2.0), {"a": ReplacePatch(value=tensor)}])
    probe.op(tensor)
    assert fresh == digest([probe, scaled(2.0), {"a": ReplacePatch(value=tensor.clone())}])
    assert digest({"b", "a", "c"}) == digest({"c", "b", "a"})
    assert digest(tensor.T) == digest(tensor.T.contiguous())
    assert digest(np.arange(3)) == digest(np.arange(6)[:3])


def test_digests_see_the_code_of_classes() -> None:
    patch = """
@dataclasses.dataclass(kw_only=True)
class Scale(Patch):
    factor: float
    def op(self, value):
        return value {} self.factor
"""
    metric = """
class Mean:
    def __call__(self, output):
        return self.inner(output)
    def inner(self, output):
        return output.mean() {} 1
"""

    def made(source: str, **fields: Any) -> Any:
        names: dict[str, Any] = {"dataclasses": dataclasses, "Patch": Patch, "__name__": "own"}
        exec(compile(source, "own", "exec", dont_inherit=True), names)
        return next(kind for name, kind in names.items() if name in ("Scale", "Mean"))(**fields)

    for source, fields in ((patch, {"factor": 2.0}), (metric, {})):
        plus, again, times = (digest(made(source.format(sign), **fields)) for sign in "++*")
        assert plus == again != times


def test_digests_see_globals() -> None:
    def compiled(factor: float) -> Any:
        names: dict[str, Any] = {"factor": factor}
        exec("def inner(x): return x * factor\ndef outer(x): return inner(x)", names)
        return names["outer"]

    assert digest(compiled(2.0)) == digest(compiled(2.0))
    assert digest(compiled(2.0)) != digest(compiled(3.0))


def test_digests_of_what_holds_itself_end() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    other: list[Any] = [2]
    other.append(other)
    assert digest(ring) != digest(other)
