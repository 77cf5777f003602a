"""Kernels that are forks of one process end as other kernels do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.notebook.hosts import environment

START = """
import time
from jupyter_client.manager import start_new_kernel

kept = start_new_kernel(kernel_name="python3")
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("kernels_are_warm")
def test_a_kernel_ends_if_what_started_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", START]
    with subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, text=True) as starting:
        assert starting.stdout is not None
        has_started = any(line == "started\n" for line in starting.stdout)
        begun = psutil.Process(starting.pid).children()
        starting.kill()
    assert has_started
    assert begun
    _, left = psutil.wait_procs(begun, timeout=300)
    assert left == []
