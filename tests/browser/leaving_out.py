"""Whether the tests that drive a browser are left out: one answer for all processes of a test run."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock

# Set by the process that starts the others, which inherit it.
_VARIABLE = "GRAPHPATCH_TEST_RUN"


def begin() -> None:
    """Makes the place where the processes of this run leave their answer."""
    os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="graphpatch-tests-")


def end() -> None:
    shutil.rmtree(os.environ.pop(_VARIABLE), ignore_errors=True)


def is_left_out(count: int) -> bool:
    """Whether to leave out so many tests, since no browser starts; the first process that asks tries it."""
    from tests.browser.chromium import problem

    with FileLock(_answer().with_suffix(".lock")):
        if not _answer().exists():
            _answer().write_text(json.dumps([problem(), count]), encoding="utf8")
    return bool(json.loads(_answer().read_text(encoding="utf8"))[0])


def note_packages(count: int) -> None:
    """Notes that so many tests are left out, since the packages that they need are not installed."""
    _packages().write_text(str(count), encoding="utf8")


def summary() -> str:
    """Returns what the run says of it in the end: one line, empty where nothing was left out."""
    problem, count = json.loads(_answer().read_text(encoding="utf8")) if _answer().exists() else ("", 0)
    if not problem and _packages().exists():
        problem = "`npm ci --ignore-scripts` installs what they show widgets with"
        count = int(_packages().read_text(encoding="utf8"))
    return f"{count} browser tests left out: {problem}" if problem else ""


def _packages() -> Path:
    return Path(os.environ[_VARIABLE]) / "packages"


def _answer() -> Path:
    return Path(os.environ[_VARIABLE]) / "browser.json"
