"""Where no browser starts, its tests are left out, and a line says so; or they fail, if all are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OTHER = "tests/test_paths.py::test_two_paths_never_share_a_text"
SETUP = "tests/browser/test_browser_setup.py"


def run_pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        cwd=ROOT,
        env={**os.environ, "CHROMIUM": str(ROOT / "nowhere")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_they_are_left_out_or_fail_where_all_are_asked_for() -> None:
    done = run_pytest("-m", "not gpu", "-n0", OTHER, SETUP)
    assert done.returncode == 0, done.stdout
    *_, line, count = done.stdout.splitlines()
    assert line.startswith("1 browser tests left out: no browser starts: install Chromium")
    assert "1 passed" in count
    done = run_pytest("-m", "not gpu", "-n0", "--all-browser-tests", "-x", OTHER, SETUP)
    assert done.returncode == 1, done.stdout
    assert f"ERROR {SETUP}::" in done.stdout
    assert "1 passed" in done.stdout.splitlines()[-1]
