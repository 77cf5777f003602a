"""Where no browser starts, its tests are left out, and a line says so; or they fail, if all are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OTHER = "tests/test_paths.py::test_two_paths_never_share_a_text"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status", "expected"),
    [
        (["-n1"], 0, "3 browser tests left out: no browser starts: install Chromium"),
        (["--all-browser-tests", "-x"], 1, "ERROR tests/browser/test_browser_setup.py::"),
    ],
)
def test_run(options: list[str], status: int, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "not gpu", *options, OTHER, "tests/browser/test_browser_setup.py"],
        cwd=ROOT,
        env={**os.environ, "CHROMIUM": str(ROOT / "nowhere")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout
    *_, line, count = done.stdout.splitlines()
    assert expected in (line if status == 0 else done.stdout)
    assert "1 passed" in count
