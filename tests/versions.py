"""Runs the core of the tests with other versions of Python, torch and transformers: `hatch run versions`.

Each pair of a Python and a torch gets an environment of its own, in a temporary folder, one at a time: with builds of
torch for GPUs they take 6 GB. There the transformers are installed in turn, and the tests of `SELECTION` run. What
comes out is a table of versions, with how many tests passed, failed and were skipped.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]

OWN = f"{sys.version_info.major}.{sys.version_info.minor}"

ROWS = (
    (OWN, "==2.6.0", "<5"),
    (OWN, "==2.6.0", ">=5"),
    (OWN, "==2.8.0", "<5"),
    (OWN, "==2.8.0", ">=5"),
    (OWN, "==2.13.0", "<5"),
    (OWN, "==2.13.0", ">=5"),
    (OWN, ">2.13", "<5"),
    (OWN, ">2.13", ">=5"),
    ("3.10", "==2.13.0", ">=5"),
    ("3.12", "==2.13.0", ">=5"),
    ("3.13", "==2.13.0", ">=5"),
)
"""The Python, and what pip is asked for, of torch and of transformers.

The oldest torch that is supported, one in between, the one that CI tests against, and the newest that there is; of
transformers the newest of each major version that is supported. The other Pythons have the versions of CI.
"""

CASES = (
    "torch-mlp torch-lstm-cell awkward-in-place awkward-called-twice awkward-custom-operators gpt2-eager llama-sdpa "
    "bert-sdpa t5-eager vit-eager mamba"
).split()
"""The models of the zoo on which the laws are tried: some of each kind."""

SELECTION = """
    laws/test_law_01_unpatched.py laws/test_law_02_identity.py laws/test_law_03_edits.py laws/test_law_05_untouched.py
    laws/test_law_06_gradients.py laws/test_law_02_opened.py capture/test_decompositions.py
    patching/test_opened_calls.py integrations/test_transformers_calls.py patching/test_shapes.py
    patching/test_contexts.py integrations/test_positions.py integrations/test_steps.py
    integrations/test_generation.py integrations/test_attention_patterns.py integrations/test_exported.py
    integrations/test_torch_compile.py files/test_own_graphs.py
    patching/test_values.py files/test_round_trip.py patches/test_kinds.py test_patchable_graph.py
    notebook/export/test_patch_code.py notebook/session/test_recipes.py notebook/session/test_session.py
    notebook/session/test_session_file.py experiments/test_metrics.py experiments/methods/test_sweeps.py
    experiments/engine/test_sweep_metrics.py experiments/methods/test_causal_tracing.py
    experiments/methods/test_ablation.py experiments/methods/test_arguments.py
""".split()
"""The tests that are run, of those in `tests/`: the parts on which torch and transformers have a say; no widgets."""

QUICK = """
    laws/test_law_01_unpatched.py laws/test_law_02_identity.py laws/test_law_03_edits.py patches/test_kinds.py
    test_patchable_graph.py files/test_own_graphs.py notebook/export/test_patch_code.py
    notebook/session/test_session.py experiments/methods/test_sweeps.py
""".split()
"""Those of them that CI runs on another Python."""
QUICK_CASES = "torch-mlp awkward-called-twice gpt2-eager llama-sdpa t5-eager".split()

_COLUMNS = ("python", "torch", "transformers", "passed", "failed", "skipped", "minutes")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out for one row.

    Attributes:
        python: The version.
        torch: The version that pip chose.
        transformers: The same.
        passed: How many tests passed.
        failed: The names of those that failed, or could not be run.
        skipped: How many were skipped.
        seconds: How long the tests took.
    """

    python: str
    torch: str
    transformers: str
    passed: int
    failed: tuple[str, ...]
    skipped: int
    seconds: float

    def row(self) -> list[str]:
        counts = (self.passed, len(self.failed), self.skipped)
        return [self.python, self.torch, self.transformers, *map(str, counts), f"{self.seconds / 60:.0f}"]


class Environment:
    """A virtual environment with one torch, in which transformers is replaced.

    Args:
        folder: Where it lies.
        python: The version of Python.
        torch: What pip is asked for.
    """

    def __init__(self, folder: Path, python: str, torch: str) -> None:
        self._folder = folder
        self._version = python
        self._torch = f"torch{torch}"
        self._python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        subprocess.run([interpreter(python), "-m", "venv", str(folder)], check=True)
        self._pip("--upgrade", "pip")  # groups of dependencies: pip 25.1

    def install(self, transformers: str) -> None:
        """Installs transformers, and what the tests need, if it is not there yet."""
        group = f"{ROOT / 'pyproject.toml'}:hosts"
        self._pip(self._torch, f"transformers{transformers}", "-e", f"{ROOT}[experiments]", "--group", group)

    def _pip(self, *arguments: str) -> None:
        command = [str(self._python), "-m", "pip", "install", "--quiet", "--no-cache-dir", *arguments]
        # Of the environment that this runs in: there is one torch in it, and this one's packages.
        others = {"PIP_CONSTRAINT", "PYTHONPATH", "VIRTUAL_ENV"}
        subprocess.run(command, check=True, env={name: text for name, text in os.environ.items() if name not in others})

    def version(self, package: str) -> str:
        """Returns the version of an installed package."""
        code = f"from importlib.metadata import version; print(version({package!r}))"
        return subprocess.run([self._python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()

    def outcome(self, arguments: Sequence[str], is_quick: bool) -> Outcome:
        """Runs the tests, all or a few of them, and returns what came out."""
        report = self._folder / "report.xml"
        report.unlink(missing_ok=True)
        files = [f"tests/{name}" for name in (QUICK if is_quick else SELECTION)]
        chosen = " or ".join(["not test_law_", *(QUICK_CASES if is_quick else CASES)])
        settings = ["-q", "--tb=short", "-p", "no:cacheprovider", "-n", "auto", f"--junit-xml={report}"]
        command = [str(self._python), "-m", "pytest", *settings, "-k", chosen, *files, *arguments]
        log = self._folder / "pytest.log"
        with log.open("w") as output:
            subprocess.run(command, check=False, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        if not report.exists():
            raise RuntimeError(f"pytest did not run:\n{log.read_text()}")
        return outcome_of(report.read_text("utf8"), self._version, self.version("torch"), self.version("transformers"))


def interpreter(version: str) -> str:
    """Returns the interpreter of this version of Python: this one, one of `PATH`, or one of pyenv.

    Raises:
        FileNotFoundError: There is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    names = [f"python{version}", *map(str, pyenv.glob(f"{version}.*/bin/python"))]
    for name in [sys.executable] * (version == OWN) + names:
        # Some of those in `PATH` are scripts that look for an interpreter, and find none.
        if shutil.which(name) and subprocess.run([name, "--version"], check=False, capture_output=True).returncode == 0:
            return name
    raise FileNotFoundError(f"there is no Python {version} in PATH, nor in {pyenv}")


def outcome_of(report: str, python: str, torch: str, transformers: str) -> Outcome:
    """Returns what the report of pytest, in the format of JUnit, says."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    names = tuple(dict.fromkeys(f"{case.get('classname')}::{case.get('name')}" for case in failed))
    seconds = sum(float(suite.get("time", 0)) for suite in ElementTree.fromstring(report).iter("testsuite"))
    return Outcome(python, torch, transformers, len(cases) - len(failed) - len(skipped), names, len(skipped), seconds)


def outcomes(
    rows: Sequence[tuple[str, str, str]], folder: Path, arguments: Sequence[str], is_quick: bool
) -> Iterator[Outcome]:
    """Runs the tests for each row, those with one Python and torch in one environment, which goes away after them."""
    for python, torch in dict.fromkeys(row[:2] for row in rows):
        with tempfile.TemporaryDirectory(dir=folder) as inner:
            environment = Environment(Path(inner) / "environment", python, torch)
            for *_, transformers in (row for row in rows if row[:2] == (python, torch)):
                environment.install(transformers)
                yield environment.outcome(arguments, is_quick)


def chosen_rows(texts: Sequence[str]) -> list[tuple[str, str, str]]:
    """Returns the rows that are named as `python3.12,torch==2.8.0,transformers<5`; all, if none is.

    Raises:
        ValueError: A text names no row.
    """
    rows = []
    for text in texts:
        match = re.fullmatch(r"(?:python([^,]+),)?torch([^,]+),transformers(.+)", text)
        if match is None:
            raise ValueError(f"{text!r} names no versions; write 'python3.12,torch==2.8.0,transformers<5'")
        rows.append((match[1] or OWN, match[2], match[3]))
    return rows or list(ROWS)


def main() -> None:
    """Reads the command line, runs the tests, prints the table.

    Leaves with 1 where a test failed, and with 2 where an environment could not be made.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="'python3.12,torch==2.8.0,transformers<5'; all of `ROWS`, if none")
    parser.add_argument("--folder", type=Path, help="where environments are made, of up to 6 GB, one at a time")
    parser.add_argument("--quick", action="store_true", help="fewer tests, as in CI: a minute or two")
    parser.add_argument("--pytest", action="append", default=[], metavar="ARGUMENT", help="one more for pytest")
    options = parser.parse_args()
    table = Table(*_COLUMNS, title="core of the tests")
    failed: list[str] = []
    try:
        for found in outcomes(chosen_rows(options.rows), options.folder, options.pytest, options.quick):
            row = found.row()
            table.add_row(*row)
            print(*(f"{name} {value}" for name, value in zip(_COLUMNS, row, strict=True)), sep=", ", flush=True)
            for name in found.failed:
                failed += [f"Python {found.python}, torch {found.torch}, transformers {found.transformers}: {name}"]
                print(failed[-1], flush=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        print(f"not run: {error}")
        sys.exit(2)
    Console(width=100).print(table)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
