"""This package next to plain hooks and to other tools: `python -m tests.benchmarks.peers [--quick]`.

Each tool is installed from PyPI in an environment of its own, with the torch that CI tests against, and runs in a
process of its own, on one thread, on the same models with random weights. What it returns has to equal what plain
hooks give within 1e-4 before its time counts. Times are medians of alternating runs, as multiples of a plain forward
in the same process; sweeps as multiples of a loop with plain hooks. Time of the processor is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from rich.console import Console

from tests.benchmarks.peer_tools.comparison import Comparison
from tests.benchmarks.peer_tools.environments import FOLDER, ROOT, InstallationError, environment
from tests.benchmarks.peer_tools.measurement import Measured
from tests.benchmarks.peer_tools.subject import SUBJECTS
from tests.benchmarks.peer_tools.tools import TOOLS

QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}


def measured(interpreter: Path, tool: str, subject: str, quick: bool) -> Measured:
    """What a tool takes on a model, in a process of its own.

    Raises:
        RuntimeError: It failed, or its numbers are not those of plain hooks; the text is the end of what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        command = [str(interpreter), "-m", "tests.benchmarks.peer_tools.measurement", tool, subject, str(file)]
        done = subprocess.run(
            [*command, *(["--quick"] if quick else [])],
            cwd=ROOT, env={**os.environ, **QUIET}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        return Measured(**json.loads(file.read_text()))


def add(comparison: Comparison, tool: str, options: argparse.Namespace) -> None:
    """Measures a tool on the models, or notes why that failed."""
    try:
        interpreter = environment(tool, TOOLS[tool].requirements, options.environments)
        for subject in options.models:
            by_tool = comparison.measured.setdefault(SUBJECTS[subject].name, {})
            by_tool[tool] = measured(interpreter, tool, subject, options.quick)
    except (InstallationError, RuntimeError) as reason:
        comparison.failures[tool] = str(reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/benchmarks.md has it")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS), help="only these")
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="only these")
    parser.add_argument("--environments", type=Path, default=FOLDER, help="where environments lie, 1 to 2 GB each")
    options = parser.parse_args()
    console, log = Console(width=140), Console(stderr=True)
    started, comparison = time.perf_counter(), Comparison()
    for tool in options.tools:
        log.print(TOOLS[tool].title)
        add(comparison, tool, options)
    if options.markdown:
        print(comparison.markdown())
    else:
        console.print(comparison.table("graphpatch-notebook and its peers: time, one thread"))
    for line in (*comparison.versions(), *comparison.notes(), f"{time.perf_counter() - started:.0f} s"):
        console.print(line, highlight=False, markup=False)


if __name__ == "__main__":
    main()
