"""The comparison with other tools: what is there is measured on a tiny model; numbers that are wrong do not count."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.benchmarks.peer_tools import environments
from tests.benchmarks.peer_tools.comparison import Comparison
from tests.benchmarks.peer_tools.measurement import ROWS, measured
from tests.benchmarks.peer_tools.ours import Ours
from tests.benchmarks.peer_tools.subject import Subject
from tests.benchmarks.peer_tools.tools import TOOLS

TINY = Subject("tiny", 2, 16, 2, 20, rounds=1, sweep_rounds=1, positions=3, length=5)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return Comparison({"tiny": {tool: measured(TOOLS[tool].load(), TINY) for tool in ("hooks", "ours", "hooked")}})


def test_each_row_has_a_ratio_or_a_reason(comparison: Comparison) -> None:
    for tool, found in comparison.measured["tiny"].items():
        assert found.ratios.keys() | found.missing.keys() == ROWS.keys(), tool
        assert not found.ratios.keys() & found.missing.keys(), tool
        assert all(ratio > 0 for ratio in found.ratios.values())
    assert comparison.measured["tiny"]["ours"].missing == {}
    assert comparison.measured["tiny"]["hooks"].missing.keys() == {"construct", "zero_tanh", "everything"}
    assert comparison.measured["tiny"]["hooked"].missing.keys() == {"zero_tanh", "record_modules"}


def test_table(comparison: Comparison) -> None:
    assert comparison.headers()[1:] == ["asked", "best peer", "plain hooks", "this package", "TransformerLens 3"]
    ((heading, rows),) = comparison.rows()
    assert heading.startswith("tiny (a forward: ")
    assert [row[0] for row in rows] == list(ROWS.values())
    assert rows[0][1] == ""
    assert rows[0][3] == "-"
    assert float(rows[1][2]) == float(rows[1][5]) > 0
    lines = comparison.markdown().splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 2 + 1 + len(ROWS)
    assert len(comparison.table("all of it").columns) == 6
    assert any("transformer-lens 3." in line for line in comparison.versions())
    assert "plain hooks, construct: -, nothing to construct" in comparison.notes()


def test_failures_are_reported(comparison: Comparison) -> None:
    failed = Comparison(comparison.measured, {"pyvene": "no such version"})
    assert "pyvene: not measured: no such version" in failed.notes()
    assert "pyvene" not in " ".join(failed.headers())


class ZeroesNothing(Ours):
    def zero(self) -> Tensor:
        return self.forward()


class SweepsBackwards(Ours):
    def sweep(self) -> Tensor:
        return super().sweep().flip(1)


class RecordsTooLittle(Ours):
    def record_modules(self) -> dict[str, Tensor]:
        found = dict(super().record_modules())
        del found["lm_head"]
        return found


@pytest.mark.parametrize(
    ("wrong", "row", "said"),
    [
        (ZeroesNothing, "zero", r"zero: off by \d"),
        (SweepsBackwards, "sweep", r"sweep: off by \d"),
        (RecordsTooLittle, "record_modules", r"not recorded: \['lm_head'\]"),
    ],
)
def test_wrong_numbers_do_not_count(wrong: type[Ours], row: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        measured(wrong, TINY, rows={row: ROWS[row]})


def test_environments_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environments.environment("ours", (), tmp_path) == Path(sys.executable)
    commands: list[tuple[str, ...]] = []

    def run(*command: str) -> None:
        commands.append(command)
        (tmp_path / "some").mkdir(exist_ok=True)

    monkeypatch.setattr(environments, "run", run)
    for requirement in ("some==1", "some==1", "some==2"):
        environments.environment("some", (requirement,), tmp_path)
    assert [command[-1] for command in commands] == [
        str(tmp_path / "some"),
        "some==1",
        str(tmp_path / "some"),
        "some==2",
    ]


def test_pip_is_held_to_the_torch_of_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    show = "import os, sys; sys.exit(os.environ['PIP_CONSTRAINT'])"
    with pytest.raises(environments.InstallationError, match=r"constraints\.txt"):
        environments.run(sys.executable, "-c", show)
    assert f"torch=={torch.__version__.split('+')[0]}" in environments.CONSTRAINTS.read_text()
